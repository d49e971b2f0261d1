"""Several optimizers (docs/several-optimizers.md): each call of ``trainer.optimize`` is an exact step in every mode."""

from pathlib import Path

import pytest
import torch
from cli_errors import error_message
from launching import (
    assert_equal_runs,
    differing_tensors,
    environment,
    fork_server,
    launch,
    relative_difference,
    resume,
    run_in_process,
    train,
    write_config,
)
from optimizer_tasks import Adversarial

from paramserver import Partition
from paramserver.devices import CPU
from paramserver.parameters.model import build_model
from paramserver.rng import seed_all
from paramserver.sources import deal

TASKS = Path(__file__).parents[1] / "helpers" / "optimizer_tasks.py"
CONFIG = {
    "training": {"max_steps": 25, "batch_size": 8, "validate_every": 7, "ema_decay": 0.9, "clip_grad_norm": 0.5},
    "checkpoint": {"every": 7, "keep": 9, "background": False, "best": {"metric": "loss", "mode": "min"}},
}
STOPPED = {**CONFIG, "training": {**CONFIG["training"], "max_steps": 14}}
NAMES = ["judge", "make", "weight"]
MODES = ["local", "ddp", "rpc"]


def task(name="Adversarial", **arguments):
    return {"task": f"{TASKS}:{name}", "task_args": arguments}


def assert_same(one, other):
    """The runs have made the same steps, bit for bit."""
    for name in ("model", "optimizer", "ema"):
        assert differing_tensors(one.load(name), other.load(name)) == [], name
    assert one.load("run")["scheduler"] == other.load("run")["scheduler"]
    for kind, fields in (
        ("train", ("step", "loss", "losses", "lr", "epoch", "samples")),
        ("validation", ("step", "values")),
    ):
        assert [[r[f] for f in fields] for r in one.of_kind(kind)] == [
            [r[f] for f in fields] for r in other.of_kind(kind)
        ]
    assert one.best == other.best


class PlainLoop:
    """In the place of a trainer: what a loop in plain PyTorch does."""

    def __init__(self, optimizers):
        self.optimizers, self.made = optimizers, []

    def optimize(self, name, loss, retain_graph=False):
        loss.backward(retain_graph=retain_graph)
        self.optimizers[name].step()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        self.made.append((name, loss.item()))

    @property
    def step(self):
        return len(self.made)

    def log(self, *_):
        pass


def test_the_updates_are_those_of_a_loop_in_plain_pytorch(tmp_path):
    run = train(tmp_path, "local", 1, **task(schedule=False), training={"max_steps": 50, "batch_size": 8})
    reference = Adversarial(schedule=False)
    model = build_model(reference, 0, CPU)
    reference.trainer = loop = PlainLoop(reference.build_optimizer(model))
    seed_all(0, 1)
    points, batch_idx = reference.train_source(None).tensors[0], 0
    while len(loop.made) < 50:
        epoch, first = divmod(batch_idx * 8, 96)
        indices = deal(96, Partition(0, 1), seed=0, epoch=epoch)[first : first + 8]
        reference.training_step(model, (points[indices],), batch_idx)
        batch_idx += 1
    assert run.summary["steps"] == len(loop.made)
    assert [r["loss"] for r in run.of_kind("train")] == [loss for _, loss in loop.made]
    assert differing_tensors(run.load("model"), model.state_dict()) == []
    plain = {name: optimizer.state_dict() for name, optimizer in loop.optimizers.items()}
    assert differing_tensors(run.load("optimizer"), plain) == []


@pytest.mark.processes
def test_one_trainer_is_the_same_in_every_mode_bit_for_bit(tmp_path):
    """Also: an unused parameter is not stepped; limits and validations that fall inside of a batch come at its end."""
    local = train(tmp_path / "local", "local", 1, **task(unused=True), **CONFIG)
    assert local.summary["steps"] == 25
    assert [r["step"] for r in local.of_kind("validation")] == [8, 15, 23, 25]
    assert [list(r["losses"]) for r in local.of_kind("train")][:5] == [[n] for n in [*NAMES, "judge", "make"]]
    assert sorted(local.load("optimizer")) == sorted(NAMES)
    assert local.load("model")["unused"].tolist() == [1.0, 1.0]
    for folder, mode, options in (
        ("ddp", "ddp", {}),
        ("memory", "rpc", {"server": {"transport": "shared_memory"}}),
        ("messages", "rpc", {"server": {"transport": "rpc", "bucket_mb": 0.0005}}),
    ):
        assert_same(local, train(tmp_path / folder, mode, 1, **task(unused=True), **CONFIG, **options))


@pytest.mark.processes
@pytest.mark.parametrize("uneven_inputs", ["stop", "join"])
def test_two_trainers_are_the_same_in_ddp_and_rpc_bit_for_bit(tmp_path, uneven_inputs):
    """With ``join`` trainer 0 has a batch more, which trainer 1 follows without data, and with the judge frozen."""
    config = {**CONFIG, "training": {**CONFIG["training"], "clip_grad_norm": None}}
    if uneven_inputs == "join":
        limits = {"max_steps": None, "max_epochs": 2, "uneven_inputs": "join", "batch_size": 10}
        config = {**config, "training": {**config["training"], **limits}}
    samples = 61 if uneven_inputs == "join" else 96  # two shares of 31 and 30 samples
    of_task = task(samples=samples, freezes=uneven_inputs == "join")
    ddp = train(tmp_path / "ddp", "ddp", 2, **of_task, **config)
    assert ddp.summary["samples"] == (122 if uneven_inputs == "join" else ddp.of_kind("train")[-1]["samples"])
    for folder, cluster, transport in (
        ("memory", {}, "shared_memory"),
        ("messages", {}, "rpc"),
        ("servers", {"num_servers": 2}, "rpc"),
    ):
        server = {"transport": transport, "bucket_mb": 0.0005}
        rpc = train(tmp_path / folder, "rpc", 2, **of_task, **config, server=server, cluster=cluster)
        assert_same(ddp, rpc)


UNSTEADY = [(0, 1, "judge"), (1, 1, "make"), (0, 4, "make"), (1, 6, "judge"), (0, 6, "make")]


def unsteady(factor=float("nan"), **arguments):
    skips = {"nonfinite": "skip"} if factor != factor else {"precision": "float16"}
    return task("Unsteady", places=UNSTEADY, factor=factor, **arguments), {**CONFIG["training"], **skips}


def skipped(run):
    names = ("step", "trainers", "samples", "cause", "scale")
    return [[record.get(name) for name in names] for record in run.of_kind("skipped")]


@pytest.mark.processes
@pytest.mark.parametrize("factor", [float("nan"), 1000.0])
@pytest.mark.parametrize("uneven_inputs", ["stop", "join"])
def test_a_call_is_skipped_by_all_trainers_alike_in_ddp_and_rpc(tmp_path, factor, uneven_inputs):
    """The scale of float16 changes within a batch."""
    given, training = unsteady(factor, samples=61 if uneven_inputs == "join" else 96)
    training |= {"clip_grad_norm": None, "uneven_inputs": uneven_inputs}
    training |= {"max_steps": None, "max_epochs": 2, "batch_size": 10} if uneven_inputs == "join" else {}
    config = {**CONFIG, "training": training}
    ddp = train(tmp_path / "ddp", "ddp", 2, **given, **config)
    assert len(skipped(ddp)) == (4 if uneven_inputs == "join" else 5)
    if factor == 1000.0:
        scales = [entry[-1] for entry in skipped(ddp)]
        assert scales == [2.0 ** (16 - number) for number in range(len(scales))]
    assert [entry[2] for entry in skipped(ddp)] == [20, 0, 0, 0] if uneven_inputs == "join" else [16, 0, 0, 16, 0]
    assert ddp.summary["samples_skipped"] == sum(entry[2] for entry in skipped(ddp))
    for folder, cluster, transport in (
        ("memory", {}, "shared_memory"),
        ("messages", {}, "rpc"),
        ("servers", {"num_servers": 2}, "rpc"),
    ):
        server = {"transport": transport, "bucket_mb": 0.0005}
        rpc = train(tmp_path / folder, "rpc", 2, **given, **config, server=server, cluster=cluster)
        assert_same(ddp, rpc)
        assert skipped(ddp) == skipped(rpc)
        assert ddp.load("run")["skipping"] == rpc.load("run")["skipping"]
        assert ddp.summary["samples_skipped"] == rpc.summary["samples_skipped"]


@pytest.mark.processes
@pytest.mark.parametrize("factor", [float("nan"), 1000.0])
def test_calls_of_one_trainer_are_skipped_alike_in_every_mode_and_after_a_resume(tmp_path, factor):
    given, training = unsteady(factor)
    runs = [train(tmp_path / mode, mode, 1, **given, **{**CONFIG, "training": training}) for mode in MODES]
    for other in runs[1:]:
        assert_same(runs[0], other)
        assert skipped(runs[0]) == skipped(other)
    stopped = train(tmp_path / "part", "rpc", 1, **given, **{**CONFIG, "training": {**training, "max_steps": 7}})
    resumed = resume(stopped, "--set", "training.max_steps=25")
    assert resumed.code == 0, resumed.output
    assert_same(runs[0], resumed)
    assert skipped(runs[0]) == skipped(resumed) != []


@pytest.mark.processes
def test_the_trainers_that_have_data_gather_in_the_hooks_of_a_batch(tmp_path):
    training = {"max_epochs": 2, "max_steps": None, "batch_size": 10, "uneven_inputs": "join"}
    run = train(tmp_path, "rpc", 2, **task("Gathers", samples=61, schedule=False), training=training)
    counts = [(r["trainer"], r["value"]) for r in run.of_kind("log") if r["name"] == "gathered"]
    assert counts.count((0, 1.0)) == 2
    assert counts.count((0, 2.0)) == counts.count((1, 2.0)) == 12


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "trainers"), [("local", 1), ("ddp", 2), ("rpc", 2)])
def test_a_run_that_is_stopped_and_resumed_is_one_that_was_not(tmp_path, mode, trainers):
    whole = train(tmp_path / "whole", mode, trainers, **task(), **CONFIG)
    part = train(
        tmp_path / "part", mode, trainers, **task(), **CONFIG | {"training": CONFIG["training"] | {"max_steps": 14}}
    )
    assert part.summary["steps"] == 15  # the limit was reached in the middle of a batch
    resumed = resume(part, "--set", "training.max_steps=25")
    assert resumed.code == 0, resumed.output
    assert_equal_runs(whole, resumed, trainers)
    assert_same(whole, resumed)
    logged = [sorted((r["step"], r["name"], r["value"]) for r in run.of_kind("log")) for run in (whole, resumed)]
    assert logged[0] == logged[1]


@pytest.mark.processes
def test_a_checkpoint_resumes_in_another_mode_and_with_several_servers(tmp_path):
    """Not clipped: the norm over two servers rounds differently."""
    flags = ("--set", "training.clip_grad_norm=null")
    begun = run_in_process(tmp_path / "begun", *flags, mode="local", **task(), **STOPPED)
    to = ("--set", "training.max_steps=25", "--set", "cluster.num_servers=2", "--set", "server.transport=rpc")
    resumed = resume(begun, "--mode", "rpc", *to, "--set", "cluster.num_trainers=1")
    assert resumed.code == 0, resumed.output
    assert_same(run_in_process(tmp_path / "whole", *flags, mode="local", **task(), **CONFIG), resumed)


def test_autocast_does_not_continue_with_parameters_before_an_update(tmp_path):
    config = {**CONFIG, "training": {**CONFIG["training"], "precision": "bfloat16"}}
    with_cache = train(tmp_path / "with", "local", 1, **task(), **config)
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        without = train(tmp_path / "without", "local", 1, **task(), **config)
    finally:
        torch.set_autocast_cache_enabled(enabled)
    assert_same(with_cache, without)


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "how"), [("ddp", "less"), ("rpc", "less"), ("ddp", "other"), ("rpc", "other")])
def test_trainers_that_make_different_calls_are_refused(tmp_path, mode, how):
    run = launch(
        tmp_path, mode=mode, cluster={"num_trainers": 2, "timeout_s": 60}, **task("Differs", how=how), **CONFIG
    )
    found = "none" if how == "less" else "optimize('judge')"
    assert run.code == 2
    assert f"call 2 of a batch is optimize('make') on trainer 0, and {found} on trainer 1" in run.output


@pytest.mark.processes
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("local", {}),
        ("ddp", {}),
        ("rpc", {"server": {"transport": "shared_memory"}}),
        ("rpc", {"server": {"transport": "rpc"}}),
    ],
)
def test_a_graph_from_before_an_update_of_its_parameters_is_refused(tmp_path, mode, options):
    start = run_in_process if mode == "local" else launch
    run = start(tmp_path, mode=mode, cluster={"num_trainers": 1}, **task("Stale", schedule=False), **CONFIG, **options)
    assert run.code == 2
    assert "the loss was computed before an update of parameters that its gradient depends on" in run.output


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("returns", "training_step must call self.trainer.optimize(name, loss) and return None"),
        ("nothing", "in batch 0 it did not call it"),
        ("name", "trainer.optimize('jugde') must name an optimizer; build_optimizer returned judge, make, weight"),
        ("part", "optimize('make', loss): the loss depends on no parameter of this optimizer"),
        ("backward", "a backward() of the task has left a gradient of parameter judge.0.weight, which would be in no"),
        ("one", "trainer.optimize('jugde') must have a dict of optimizers, and build_optimizer returned none"),
        ("hook", "trainer.optimize('judge') must be called in training_step"),
        ("shared", "gives weight to two optimizers (weight, again)"),
        ("keys", "returned a dict with the keys [0, 'make']"),
        ("schedule", "build_scheduler must return None or a dict of schedulers by the names of the optimizers"),
    ],
)
def test_calls_that_make_no_sense_are_refused(tmp_path, how, message):
    run = run_in_process(tmp_path, **task("Misused", how=how), **CONFIG)
    assert run.code == 2
    assert message in run.output


@pytest.mark.processes
@pytest.mark.parametrize(
    ("mode", "section", "key", "value"),
    [
        ("rpc", "server", "consistency", "async"),
        ("rpc", "server", "consistency", "bounded"),
        ("rpc", "server", "backup_trainers", 1),
        ("rpc", "server", "compute", "server"),
        ("ddp", "ddp", "comm_hook", "bf16"),
        ("local", "training", "accumulate_batches", 2),
    ],
)
def test_keys_with_which_they_do_not_work_are_refused_by_name(tmp_path, mode, section, key, value):
    training = {"max_steps": 8, "batch_size": 8}
    config = {"training": training, section: {**(training if section == "training" else {}), key: value}}
    start = run_in_process if mode == "local" else launch
    run = start(tmp_path, mode=mode, cluster={"num_trainers": 2}, **task(schedule=False), **config)
    message = error_message(run)
    assert f"{section}.{key} ({value})" in message
    assert "several optimizers (judge, make, weight)" in message


@pytest.mark.nightly
@pytest.mark.processes
def test_a_slow_trainer_holds_the_others_without_failing(tmp_path):
    """It takes longer than ``cluster.timeout_s``, as with one optimizer."""
    slow_s, cluster = 9.0, {"num_trainers": 2, "timeout_s": 5}
    finished = launch(tmp_path, mode="rpc", cluster=cluster, **task("Slow", slow_s=slow_s), training={"max_steps": 20})
    assert finished.code == 0, finished.output
    assert finished.summary["step_ms"]["max"] > slow_s * 1e3


@pytest.mark.processes
def test_a_trainer_that_is_lost_is_replaced_and_each_sample_applied_once(tmp_path):
    """The others finish their batch without it; its replacement counts its batches as they do."""
    training = {"max_steps": None, "max_epochs": 2, "batch_size": 8, "uneven_inputs": "join", "validate_every": 25}
    server = {"lost_after_s": 4.0}
    cluster = {"num_trainers": 2, "timeout_s": 60}
    sections = {"training": training, "server": server, "cluster": cluster, "checkpoint": {"every": 25}}
    file = write_config(tmp_path, mode="rpc", **task(samples=480, schedule=False), **sections)
    faults = "kill trainer:1 @step 40; lose replies 5%"
    arguments = ["--config", file, "--set", "logging.name=run", "--faults", faults]
    code, output = fork_server().run(arguments, tmp_path, 150, environment(), program="chaos")
    assert code == 0, output
    assert "960 applied, 960 due" in output


@pytest.mark.processes
def test_a_trainer_without_data_does_not_count_an_update_that_is_never_made(tmp_path):
    """The only one that has data is lost between the comparison of a call and its push, where a validation is due."""
    training = {"max_steps": None, "max_epochs": 2, "batch_size": 10, "uneven_inputs": "join", "validate_every": 13}
    of_task = task("DiesBeforePush", mark=str(tmp_path / "died"), samples=61)  # two shares of 31 and 30 samples
    finished = launch(tmp_path, mode="rpc", cluster={"num_trainers": 2, "timeout_s": 30}, **of_task, training=training)
    assert finished.code == 0, finished.output
    assert (tmp_path / "died").exists()
    assert finished.summary["samples"] == 122
    assert [record["step"] for record in finished.of_kind("validation")] == [14]


@pytest.mark.processes
def test_those_that_take_the_places_of_all_do_what_was_due_inside_of_a_batch(tmp_path):
    """The schedule that follows validations, and the checkpoint, are those of a run without a loss."""
    of_task = task("DiesValidating", mark=str(tmp_path / "died"), step=8)
    config = {
        "training": {"max_steps": 13, "batch_size": 8, "validate_every": 7},
        "checkpoint": {"every": 7, "keep": 9},
    }
    finished = train(tmp_path, "rpc", 1, **of_task, **config)
    assert (tmp_path / "died").exists()
    assert [record["step"] for record in finished.of_kind("validation")] == [8, 13]
    assert [record["step"] for record in finished.of_kind("checkpoint")] == [8, 13]


def test_the_example_of_the_documentation(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "several-optimizers.md").read_text()
    (tmp_path / "task.py").write_text(text.split("```python\n")[1].split("```")[0])
    run = run_in_process(tmp_path, task=f"{tmp_path / 'task.py'}:Gan", training={"max_steps": 8})
    assert run.code == 0, run.output
    assert [list(record["losses"]) for record in run.of_kind("train")] == [["d"], ["g"]] * 4


SPARSE = {"task": f"{TASKS.with_name('any_optimizers.py')}:SparseOptimizers"}


@pytest.mark.claim("ddp-sparse")
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["SparseAdam", "SGD", "Adagrad"])
def test_sparse_gradients_in_ddp_are_the_mean_over_all_trainers(tmp_path, kind):
    """A table is used by one of two trainers in some steps, by both or none in others."""
    training = {"max_steps": 24, "batch_size": 8}
    sparse = train(tmp_path / "sparse", "ddp", 2, **SPARSE, task_args={"kind": kind}, training=training)
    if kind == "SparseAdam":  # which updates the rows of the gradient only; it has no dense counterpart
        part = train(
            tmp_path / "part", "ddp", 2, **SPARSE, task_args={"kind": kind}, training={**training, "max_steps": 10}
        )
        more = resume(part, "--set", "training.max_steps=24")
        assert more.code == 0, more.output
        assert differing_tensors(sparse.load("model"), more.load("model")) == []
        assert differing_tensors(sparse.load("optimizer"), more.load("optimizer")) == []
        return
    dense = train(tmp_path / "dense", "ddp", 2, **SPARSE, task_args={"kind": kind, "sparse": False}, training=training)
    # Adagrad rounds a sparse gradient in another way.
    limit = 0.0 if kind == "SGD" else 1e-6
    assert relative_difference(sparse.load("model"), dense.load("model")) <= limit
    assert [r["loss"] for r in sparse.of_kind("train")] == pytest.approx(
        [r["loss"] for r in dense.of_kind("train")], rel=limit
    )
