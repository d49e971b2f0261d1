"""Embedding tables (docs/tables.md): their gradients have the rows of a batch, and updates are exact in every mode."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_errors import error_message
from hosts import Hosts, start_ranks
from launching import (
    FinishedRun,
    differing_tensors,
    environment,
    fork_server,
    launch,
    relative_difference,
    resume,
    train,
    write_config,
)

pytestmark = pytest.mark.processes

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


def assert_same(one, other, limit=0.0, names=("model", "optimizer")):
    for name in names:
        if limit:
            assert relative_difference(one.load(name), other.load(name)) <= limit, name
        else:
            assert differing_tensors(one.load(name), other.load(name)) == [], name
    for kind, field in (("train", "loss"), ("validation", "values")):
        values = [[r["step"], r[field]] for r in other.of_kind(kind)]
        own = [[r["step"], r[field]] for r in one.of_kind(kind)]
        assert own == values if not limit else own == [[step, pytest.approx(v, rel=limit)] for step, v in values]


@pytest.mark.claim("tables")
@pytest.mark.sampled(4)
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
    assert_same(sparse, dense, limit=1e-12, names=["model"])
    states = sparse.load("optimizer")
    for state in states["state"].values():
        state.pop("row_version", None)
    assert relative_difference(states, dense.load("optimizer")) <= 1e-12


@pytest.mark.claim("tables")
@pytest.mark.sampled(17)
@pytest.mark.parametrize(("kind", "accumulate_batches"), [("Adagrad", 3), ("SparseAdam", 1), ("RowWiseAdagrad", 1)])
@pytest.mark.parametrize("transport", ["shared_memory", "rpc", "tcp"])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_rows_are_divided_over_servers_and_sent(tmp_path, kind, accumulate_batches, transport, servers):
    config = tables(kind=kind, training={"accumulate_batches": accumulate_batches})
    one = train(tmp_path / "one", "rpc", 2, **config)
    server = {"transport": transport}
    other = train(tmp_path / "other", "rpc", 2, **config, cluster={"num_servers": servers}, server=server)
    assert other.of_kind("transport")[0]["transport"] == transport
    for run in (one, other):
        figures = run.summary["tables"]
        for name, figure in (("table_ids", "ids_per_step"), ("table_rows", "rows_per_step")):
            recorded = [one[name] for one in run.of_kind("train")]
            # The records are of both trainers.
            assert sum(recorded) / len(recorded) == pytest.approx(
                2 * sum(f[figure] for f in figures.values()), rel=0.01
            )
        assert figures.keys() >= {"users.weight", "words.weight", "weighted.weight"}
        words = figures["words.weight"]
        assert words["ids_per_step"] == pytest.approx(24 * accumulate_batches, rel=0.05)
        assert 1 < words["rows_per_step"] < words["ids_per_step"]
        assert (words["rows"], words["bytes_of_all_rows"]) == (60, 60 * 3 * 8)
        first, end = words["busiest_rows"]
        assert (0 <= first < end <= 60, end - first) == (True, 1)
        assert 1 / 60 < words["busiest_share"] < 0.5
        assert len(words["server_shares"]) == (servers if run is other else 1)
        assert sum(words["server_shares"]) == pytest.approx(1, abs=1e-3)
        assert words["bytes_per_step"] == pytest.approx(words["rows_per_step"] * 3 * 8, abs=2)
        assert re.search(r"tables +.*words.weight \d+ of 60 rows a step", run.output)
    # With several servers the norm of the gradients is rounded in another way.
    assert_same(one, other, limit=0.0 if servers == 1 else 1e-12)


@pytest.mark.claim("tables")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("placement", "servers"), [([0, 0, 1], 1), ([0, 1, 0, 1], 2)])
def test_tables_are_divided_over_hosts(tmp_path, placement, servers):
    whole = train(tmp_path, "rpc", 2, **tables(), cluster={"num_servers": servers})
    cluster = {"num_trainers": 2, "num_servers": servers, "timeout_s": 30}
    with Hosts(2) as hosts, start_ranks(hosts, placement, mode="rpc", cluster=cluster, **tables()) as ranks:
        assert_same(whole, ranks.finish())


@pytest.mark.claim("tables")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("transport", ["auto", "rpc", "tcp"])
@pytest.mark.parametrize("consistency", ["bounded", "async"])
def test_one_trainer_that_runs_freely_is_a_local_run(tmp_path, consistency, transport):
    config = tables()
    server = {"consistency": consistency, "transport": transport}
    assert_same(train(tmp_path, "local", 1, **config), train(tmp_path, "rpc", 1, **config, server=server))


@pytest.mark.claim("tables")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("transport", "servers"), [("shared_memory", 1), ("rpc", 1), ("rpc", 2)])
def test_optimizers_that_are_stepped_in_turns_update_their_tables(tmp_path, transport, servers):
    config = tables("Turns", training={"clip_grad_norm": None})
    cluster, server = {"num_servers": servers}, {"transport": transport}
    one = train(tmp_path, "rpc", 1, **config, cluster=cluster, server=server)
    assert_same(train(tmp_path, "local", 1, **config), one, limit=0.0 if servers == 1 else 1e-12)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("transport", ["auto", "rpc", "tcp"])
@pytest.mark.parametrize("consistency", ["bounded", "async"])
def test_trainers_that_run_freely_validate_one_version(tmp_path, consistency, transport, servers):
    """At a barrier: the rows are those of the version, like the dense parameters, which count the same."""
    server = {"consistency": consistency, "transport": transport}
    config = {**tables("Counts", kind="SGD", training={"validate_every": 5, "clip_grad_norm": None}), "server": server}
    run = train(tmp_path, "rpc", 2, **config, cluster={"num_servers": servers})
    values = [r["values"] for r in run.of_kind("validation")]
    assert len(values) == 4
    assert all(value["difference"] == 0 and value["sum"] != 0 for value in values), values
    assert differing_twins(run) == []


def differing_twins(run):
    model = run.load("model")
    assert model["table.weight"].abs().sum() > 0
    return differing_tensors({"": model["table.weight"]}, {"": model["twin.weight"]})


@pytest.mark.claim("tables")
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("transport", "servers"), [("auto", 2), ("auto", 1), ("rpc", 3)])
@pytest.mark.parametrize("background", [False, True])
def test_a_table_that_changes_while_it_is_written_is_of_one_version(tmp_path, transport, servers, background):
    """Adagrad makes the weight of a row from the number of its gradients, which its state has."""
    training = {"max_steps": 100, "clip_grad_norm": None, "validate_every": 0}
    checkpoint = {"every": 20, "keep": 20, "background": background}
    shapes = ((560_000 * servers, 4),)  # more than 16 MiB on each server
    config = {**tables("Repeated", shapes=shapes, training=training), "checkpoint": checkpoint}
    server = {"consistency": "async", "transport": transport}
    run = train(tmp_path, "rpc", 2, **config, server=server, cluster={"num_servers": servers})
    # With a learning rate of 0.1, after k gradients of 1.
    weights = -0.1 * torch.rsqrt(torch.arange(1, 1000, dtype=torch.float64)).cumsum(0)
    written = run.of_kind("checkpoint")
    assert len(written) > 2
    for step in [record["step"] for record in written]:
        weight, state = run.load("model", step)["table0.weight"], run.load("optimizer", step)["state"][0]["sum"]
        counts = state[:, 0].long()
        assert int(counts.sum()) == 1000 * step
        assert torch.equal(state, counts[:, None].expand(-1, 4).double())
        assert torch.allclose(weight, torch.cat([torch.zeros(1).double(), weights])[counts, None].expand(-1, 4))
    # Steps were made while a checkpoint was written.
    seen = [(record["kind"], record.get("step", 0)) for record in run.records]
    assert any(kind == "checkpoint" and step < max(s for _, s in seen[:at]) for at, (kind, step) in enumerate(seen))


PLACES = (("auto", 1), ("auto", 2), ("rpc", 3))
UNEVEN = ((2_097_151, 1), (2_200_000, 2), (900_000, 1))  # 16 MiB less 8 bytes, and more, as a whole or by server


@pytest.mark.claim("tables")
@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", ["Adagrad", "SGD", "RowWiseAdagrad"])
@pytest.mark.parametrize(("transport", "servers"), PLACES)
def test_large_tables_are_stored_as_in_a_local_run_and_continue(tmp_path, kind, transport, servers):
    assert_stored_as_in_a_local_run(tmp_path, kind, transport, servers)


@pytest.mark.claim("tables")
@pytest.mark.parametrize("kind", ["OwnRows", "WithModes"])
def test_large_tables_of_other_optimizers_are_stored_as_in_a_local_run(tmp_path, kind):
    """With several servers they are refused by name, as they do not say what they update by itself."""
    assert_stored_as_in_a_local_run(tmp_path, kind, "auto", 1)


def assert_stored_as_in_a_local_run(tmp_path, kind, transport, servers):
    """With the version that changed each row last."""
    shapes = UNEVEN if kind == "Adagrad" else ((2_200_000, 1),)
    training = {"max_steps": 7, "clip_grad_norm": None, "validate_every": 0}
    config = {**tables("Repeated", kind=kind, shapes=shapes, training=training), "checkpoint": {"every": 4}}
    server, cluster = {"transport": transport}, {"num_servers": servers}
    local = train(tmp_path, "local", 1, **config)
    rpc = train(tmp_path, "rpc", 1, **config, server=server, cluster=cluster)
    assert_same(local, rpc)
    versions = local.load("optimizer")["state"][0]["row_version"]
    assert versions.unique().tolist() == [0, 5, 6, 7]
    for run in (local, rpc):
        again = resume(run, "--set", "training.max_steps=9", timeout_s=150)
        assert again.code == 0, again.output
    assert_same(local, rpc)


def test_a_table_that_is_not_finite_is_named(tmp_path):
    training = {"max_steps": 4, "clip_grad_norm": None, "validate_every": 0}
    config = tables("Repeated", spoil=True, training=training)
    run = launch(tmp_path, mode="rpc", cluster={"num_trainers": 1}, **config)
    assert "NotFinite: step 4: parameter table0.weight is NaN or infinite and must be finite" in run.output
    assert run.code == 1
    assert run.checkpoints == []


@pytest.mark.nightly
def test_a_checkpoint_in_memory_may_read_rows_of_other_servers_after_the_last_step(tmp_path):
    """It waits for the one before, and ends after the last one on the disk."""
    memory = {"every": 0, "memory_every": 1, "memory_folder": str(tmp_path)}
    training = {"max_steps": 12, "clip_grad_norm": None, "validate_every": 0}
    config = tables("SlowlyWritten", shapes=((2_200_000, 4),), training=training) | {"checkpoint": memory}
    run = train(tmp_path, "rpc", 1, **config, cluster={"num_servers": 2}, server={"transport": "rpc"})
    written = [(record["step"], record["reason"]) for record in run.of_kind("checkpoint")]
    assert written[-2:] == [(12, "end"), (12, "memory")]
    assert "is lost" not in run.log(0)
    assert json.loads((run.run_dir / "losses.json").read_text())["view"] == 1


@pytest.mark.parametrize("lost", ["server:1", "server:0"])
def test_a_server_that_is_lost_while_its_rows_are_written_costs_that_checkpoint_only(tmp_path, lost):
    config = write_config(
        tmp_path,
        mode="rpc",
        **{**tables("SlowlyWritten", shapes=((1_100_000, 4),)), "checkpoint": {"every": 4}},
        cluster={"num_trainers": 1, "num_servers": 2, "timeout_s": 60},
        server={"transport": "rpc", "lost_after_s": 4.0},
    )
    training = {"max_steps": 12, "clip_grad_norm": "null", "validate_every": 0}
    flags = [flag for key, value in training.items() for flag in ("--set", f"training.{key}={value}")]
    arguments = ["--config", config, "--set", "logging.name=run", "--faults", f"kill {lost} @step 6", *flags]
    code, output = fork_server().run(arguments, tmp_path, 150, environment(), program="chaos")
    assert code == 0, output
    assert "did not fire" not in output
    run = FinishedRun(code, output, tmp_path / "runs" / "run")
    versions = run.load("optimizer")["state"][0]["row_version"]
    assert versions.unique().tolist() == [0, 10, 11, 12]
    assert run.load("optimizer")["state"][0]["sum"].sum() == 12 * 1000 * 4


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["only", "column", "small", "hooks"])
@pytest.mark.parametrize(("transport", "servers"), [("auto", 1), ("rpc", 1), ("rpc", 2)])
def test_other_models_are_those_of_a_local_run(tmp_path, kind, transport, servers):
    config = tables("Others", kind=kind, training={"clip_grad_norm": None})
    cluster, server = {"num_servers": servers}, {"transport": transport}
    one = train(tmp_path, "rpc", 1, **config, cluster=cluster, server=server)
    assert_same(train(tmp_path, "local", 1, **config), one)


@pytest.mark.parametrize("servers", [1, 2])
def test_rounded_messages_have_exact_rows(tmp_path, servers):
    """Also of a table that only one of the trainers uses in a step. The rest is rounded to bfloat16."""
    config = tables(training={"max_steps": 6, "clip_grad_norm": None})
    server = {"transport": "rpc", "wire_dtype": "bfloat16"}
    run = train(tmp_path, "rpc", 2, **config, server=server, cluster={"num_servers": servers})
    assert run.summary["steps"] == 6


def test_hooks_between_steps_use_the_model_also_after_a_resume_and_without_data(tmp_path):
    training = {"max_steps": None, "max_epochs": 2, "uneven_inputs": "join", "validate_every": 0}
    config = {**tables("Others", kind="hooks", uneven=True, training=training), "server": {"transport": "rpc"}}
    run = train(tmp_path, "rpc", 2, **config)
    again = resume(run, "--set", "training.max_epochs=3")
    assert again.code == 0, again.output


FAULTS = [
    ("async", "rpc", 1, "kill trainer:1 @step 10; kill trainer:0 @step 25"),
    ("async", "rpc", 2, "kill server:1 @step 20; kill trainer:1 @step 30"),
    ("async", "auto", 1, "kill server:0 @step 20; kill trainer:0 @step 30"),
    ("bounded", "rpc", 2, "kill server:0 @step 20; freeze trainer:1 @step 30 for 1s"),
    ("sync", "rpc", 2, "lose replies 4%; lose requests 4%; kill trainer:0 @step 20"),
    ("async", "rpc", 1, "lose replies 4%; lose requests 4%"),
]


@pytest.mark.claim("tables")
@pytest.mark.parametrize(("consistency", "transport", "servers", "faults"), FAULTS)
def test_each_row_of_a_push_is_applied_once_under_faults(tmp_path, consistency, transport, servers, faults):
    """As often as to dense parameters, to which each push is applied once (test_chaos.py)."""
    config = write_config(
        tmp_path,
        mode="rpc",
        **{**tables("Counts", kind="SGD", samples=600), "checkpoint": {"every": 10}},
        cluster={"num_trainers": 2, "num_servers": servers, "timeout_s": 60},
        server={"consistency": consistency, "transport": transport, "lost_after_s": 4.0},
    )
    training = {"max_steps": "null", "max_epochs": 1, "uneven_inputs": "join", "clip_grad_norm": "null"}
    flags = [flag for key, value in training.items() for flag in ("--set", f"training.{key}={value}")]
    arguments = ["--config", config, "--set", "logging.name=run", "--faults", faults, *flags]
    code, output = fork_server().run(arguments, tmp_path, 150, environment(), program="chaos")
    assert code == 0, output
    assert "did not fire" not in output
    assert differing_twins(FinishedRun(code, output, tmp_path / "runs" / "run")) == []


@pytest.fixture(scope="module")
def whole_and_part(tmp_path_factory):
    """A run, and the same until its tenth step."""
    folder = tmp_path_factory.mktemp("tables")
    whole = train(folder / "whole", "rpc", 1, **tables())
    return whole, train(folder / "part", "rpc", 1, **tables(training={"max_steps": 10}))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mode", "servers"), [("rpc", 1), ("rpc", 2), ("local", 1)])
def test_a_run_continues_in_another_mode_and_with_more_servers(tmp_path, whole_and_part, mode, servers):
    whole, begun = whole_and_part
    part = replace(begun, run_dir=Path(shutil.copytree(begun.run_dir, tmp_path / "run")))
    flags = [f"mode={mode}", f"cluster.num_servers={servers}", "training.max_steps=20"]
    more = resume(part, *(flag for setting in flags for flag in ("--set", setting)))
    assert more.code == 0, more.output
    assert_same(whole, more, limit=0.0 if servers == 1 else 1e-12)


@pytest.mark.sampled(1)
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
    ("max", {}, r"mode \(max\) of table table.weight \(EmbeddingBag\) must be sum or mean"),
    ("momentum", {}, r"momentum \(0.5\) of SGD must not be set for table table.weight"),
    ("weight_decay", {}, r"weight_decay \(0.5\) of SGD must not be set for table table.weight"),
    ("fused", {}, r"fused \(True\) of SGD must not be set for table table.weight"),
    ("data", {}, "parameter table.weight was changed by the task, and belongs to the servers"),
    ("to_sparse", {}, r"the gradient of table table.weight must have one sparse dimension, its rows, and has 2"),
    ("dense", {}, r"the gradient of table table.weight is dense"),
    ("functional", {}, r"the gradient of parameter other.weight is sparse"),
    ("Adam", {}, r"optimizer \(Adam\) must step the rows of a sparse gradient only.*use SGD, Adagrad, SparseAdam or"),
    ("SparseAdam", {}, r"SparseAdam must step tables only"),
    ("nothing", {"server": {"compute": "server"}}, r"server.compute \(server\) must be trainer with embedding tables"),
    (
        "nothing",
        {"server": {"backup_trainers": 1}, "cluster": {"num_trainers": 2}},
        r"server.backup_trainers \(1\) must be 0 with embedding tables",
    ),
    ("nothing", {"training": {"ema_decay": 0.9}}, r"training.ema_decay \(0.9\) must be null with embedding tables"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("change", "config", "message"), REFUSED)
def test_what_cannot_work_with_tables_is_refused_by_name(tmp_path, change, config, message):
    kind = change if change.endswith("Adam") else "Adagrad"
    settings = {**tables("OneTable", change=change, kind=kind), "mode": "rpc"}
    settings["training"] = {**TRAINING, "validate_every": 0, **config.get("training", {})}
    finished = launch(tmp_path, **{"cluster": {"num_trainers": 1}, **config, **settings})
    assert finished.code == 2, finished.output
    assert re.search(message, error_message(finished)), finished.output


def test_a_sparse_gradient_of_no_module_is_refused_in_ddp_too(tmp_path):
    finished = launch(tmp_path, mode="ddp", cluster={"num_trainers": 2}, **tables("WithoutModule"))
    assert finished.code == 2, finished.output
    assert "a gradient is sparse, and that of no nn.Embedding or nn.EmbeddingBag" in error_message(finished)
