"""Embedding tables (docs/tables.md): their gradients have the rows of a batch, and updates are exact in every mode."""

import re
from pathlib import Path

import pytest
from cli_errors import error_message
from launching import differing_tensors, launch, relative_difference, resume, train

TASKS = Path(__file__).parents[1] / "helpers" / "table_tasks.py"
TRAINING = {"max_steps": 20, "batch_size": 6, "validate_every": 7, "clip_grad_norm": 0.5}
CHECKPOINT = {"every": 5, "keep": 9, "background": False}


def tables(name="Tables", training=(), **arguments):
    return {
        "task": f"{TASKS}:{name}",
        "task_args": arguments,
        "training": {**TRAINING, **dict(training)},
        "checkpoint": CHECKPOINT,
    }


def assert_same(one, other, limit=0.0):
    for name in ("model", "optimizer"):
        if limit:
            assert relative_difference(one.load(name), other.load(name)) <= limit, name
        else:
            assert differing_tensors(one.load(name), other.load(name)) == [], name
    for kind, field in (("train", "loss"), ("validation", "values")):
        values = [[r["step"], r[field]] for r in other.of_kind(kind)]
        own = [[r["step"], r[field]] for r in one.of_kind(kind)]
        assert own == values if not limit else own == [[step, pytest.approx(v, rel=limit)] for step, v in values]


@pytest.mark.claim("tables")
@pytest.mark.parametrize("kind", ["Adagrad", "SGD", "SparseAdam", "RowWiseAdagrad"])
def test_one_trainer_is_a_local_run_and_two_are_ddp(tmp_path, kind):
    config = tables(kind=kind)
    assert_same(train(tmp_path / "one", "local", 1, **config), train(tmp_path / "one", "rpc", 1, **config))
    config = tables(kind=kind, rare=False)
    rpc = train(tmp_path, "rpc", 2, **config)
    assert rpc.of_kind("transport")[0]["transport"] == "shared_memory"
    assert_same(train(tmp_path, "ddp", 2, **config), rpc)


def test_rows_are_those_of_dense_gradients(tmp_path):
    """Adagrad does not change a row whose gradient is zero, so both give the same numbers but for rounding."""
    sparse = train(tmp_path / "sparse", "rpc", 2, **tables())
    dense = train(tmp_path / "dense", "rpc", 2, **tables(sparse=False))
    assert_same(sparse, dense, limit=1e-12)


@pytest.mark.parametrize(("kind", "accumulate_batches"), [("Adagrad", 3), ("SparseAdam", 1)])
def test_several_servers_each_own_whole_tables(tmp_path, kind, accumulate_batches):
    config = tables(kind=kind, training={"accumulate_batches": accumulate_batches})
    one = train(tmp_path / "one", "rpc", 2, **config)
    two = train(tmp_path / "two", "rpc", 2, **config, cluster={"num_servers": 2})
    assert_same(one, two, limit=1e-12)  # the norm of the gradients is rounded in another way


@pytest.mark.parametrize(("mode", "servers"), [("rpc", 1), ("rpc", 2), ("local", 1)])
def test_a_run_continues_in_another_mode_and_with_more_servers(tmp_path, mode, servers):
    whole = train(tmp_path / "whole", "rpc", 1, **tables())
    part = train(tmp_path / "part", "rpc", 1, **tables(training={"max_steps": 10}))
    flags = [f"mode={mode}", f"cluster.num_servers={servers}", "training.max_steps=20"]
    more = resume(part, *(flag for setting in flags for flag in ("--set", setting)))
    assert more.code == 0, more.output
    assert_same(whole, more, limit=0.0 if servers == 1 else 1e-12)


@pytest.mark.parametrize("servers", [1, 2])
def test_rows_of_a_trainer_that_dies_are_applied_as_dense_gradients_are(tmp_path, servers):
    """These are applied once or not at all (test_losses.py)."""
    marker = tmp_path / "died"
    cluster = {"num_servers": servers}
    lost = train(tmp_path, "rpc", 2, **tables("Twins", kind="SGD", die=str(marker)), cluster=cluster)
    assert marker.exists()
    assert lost.summary["steps"] == 20
    model = lost.load("model")
    assert relative_difference(model["table.weight"], model["twin.weight"]) <= 1e-12


REFUSED = [
    ("max_norm", {}, r"max_norm \(1.0\) of table table.weight \(Embedding\) must be None"),
    ("scale_grad_by_freq", {}, r"scale_grad_by_freq of table table.weight \(Embedding\) must be False"),
    ("max", {}, r"mode \(max\) of table table.weight \(EmbeddingBag\) must be sum or mean"),
    ("tied", {}, r"other.weight \(Linear\) must not be the table table.weight"),
    ("momentum", {}, r"momentum \(0.5\) of SGD must not be set for table table.weight"),
    ("weight_decay", {}, r"weight_decay \(0.5\) of SGD must not be set for table table.weight"),
    ("fused", {}, r"fused \(True\) of SGD must not be set for table table.weight"),
    ("data", {}, "parameter table.weight was changed by the task, and belongs to the servers"),
    ("to_sparse", {}, r"the gradient of table table.weight must have one sparse dimension, its rows, and has 2"),
    ("dense", {}, r"the gradient of table table.weight is dense"),
    ("functional", {}, r"the gradient of parameter other.weight is sparse"),
    ("Adam", {}, r"optimizer \(Adam\) must step the rows of a sparse gradient only.*use SGD, Adagrad, SparseAdam or"),
    ("SparseAdam", {}, r"SparseAdam must step tables only"),
    ("nothing", {"server": {"consistency": "async"}}, r"server.consistency \(async\) must be sync with embedding tab"),
    ("nothing", {"server": {"transport": "rpc"}}, r"server.transport \(rpc\) must be shared_memory or auto with embed"),
    ("nothing", {"server": {"compute": "server"}}, r"server.compute \(server\) must be trainer with embedding tables"),
    ("nothing", {"server": {"backup_trainers": 1}}, r"server.backup_trainers \(1\) must be 0 with embedding tables"),
    ("nothing", {"training": {"ema_decay": 0.9}}, r"training.ema_decay \(0.9\) must be null with embedding tables"),
]


@pytest.mark.parametrize(("change", "config", "message"), REFUSED)
def test_what_cannot_work_with_tables_is_refused_by_name(tmp_path, change, config, message):
    kind = change if change.endswith("Adam") else "Adagrad"
    settings = {**tables("OneTable", change=change, kind=kind), "mode": "rpc", "cluster": {"num_trainers": 2}}
    settings["training"] = {**TRAINING, "validate_every": 0, **config.get("training", {})}
    finished = launch(tmp_path, **{**config, **settings})
    assert finished.code == 2, finished.output
    assert re.search(message, error_message(finished)), finished.output
