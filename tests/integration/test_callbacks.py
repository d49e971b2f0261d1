"""Callbacks: their hooks in every mode, their state in checkpoints, and ``training.min_delta``."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import (
    assert_equal_runs,
    differing_tensors,
    main_in_process,
    resume,
    resume_in_process,
    run_in_process,
    train,
    write_config,
)

from paramserver.checkpoint import BestMetric

TASKS = Path(__file__).parents[1] / "helpers" / "callback_tasks.py"
GUIDE = Path(__file__).parents[2] / "docs" / "callbacks.md"
CONFIG = {
    "training": {"max_steps": 8, "batch_size": 8, "validate_every": 4},
    "checkpoint": {"every": 4, "keep": 9, "background": False},
}
MODES = [("local", 1), ("ddp", 2), ("rpc", 2)]


def task(name, **arguments):
    return {"task": f"{TASKS}:{name}", "task_args": arguments}


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "trainers"), MODES)
def test_each_hook_of_the_task_is_followed_by_those_of_the_callbacks(tmp_path, mode, trainers):
    train(tmp_path, mode, trainers, **task("Recorded", folder=str(tmp_path / "notes")), **CONFIG)
    for trainer in range(trainers):
        notes = (tmp_path / "notes" / f"trainer-{trainer}").read_text().splitlines()
        own = [note for note in notes if note.split()[0] not in ("a", "b")]
        steps = re.compile(r"training_step|validation_step|checkpoint|resume")
        expected = [
            line for note in own for line in ([note] if steps.match(note) else [note, f"a {note}", f"b {note}"])
        ]
        assert notes == expected
        assert {note.split()[1] for note in notes if note.startswith("a ")} == {
            f"{what}_{when}" for what in ("train", "epoch", "batch", "validation") for when in ("start", "end")
        }


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "trainers"), MODES)
def test_a_resumed_run_has_the_callbacks_of_one_that_was_not_stopped(tmp_path, mode, trainers):
    whole = train(tmp_path / "whole", mode, trainers, **task("Counted"), **CONFIG)
    half = {**CONFIG, "training": {**CONFIG["training"], "max_steps": 4}}
    other = train(tmp_path / "other", mode, trainers, **task("Counted"), **half)
    other = (resume_in_process if mode == "local" else resume)(other, "--set", "training.max_steps=8")
    assert other.code == 0, other.output
    assert_equal_runs(whole, other, trainers)
    for trainer in range(trainers):
        state = whole.load(f"trainer-{trainer}")["task"]
        assert state == other.load(f"trainer-{trainer}")["task"]
        validated = [record["values"]["loss"] for record in whole.of_kind("validation")][:1]
        assert state == {
            "own": 7,
            "paramserver.callbacks": {
                "Counter": {"batches": 8, "seen": state["paramserver.callbacks"]["Counter"]["seen"]},
                "Counter-2": {"batches": 8, "seen": state["paramserver.callbacks"]["Counter"]["seen"]},
            },
        }
        assert state["paramserver.callbacks"]["Counter"]["seen"][:1] == validated


@pytest.mark.processes
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rank", "on_loss"), [(0, "continue"), (2, "rollback")])
def test_a_loss_before_the_first_checkpoint_leaves_nothing_of_the_task(tmp_path, rank, on_loss):
    """Nor of its callbacks: the processes that live make their tasks anew."""
    config = {"training": {"max_steps": 8, "batch_size": 8, "validate_every": 4}, "checkpoint": {"every": 0}}
    runs = []
    for name in ("lost", "whole"):  # the mark of the first is there
        lost = task("LosesARank", mark=str(tmp_path / "mark"), rank=rank)
        runs.append(train(tmp_path / name, "rpc", 2, **lost, **config, server={"on_loss": on_loss}))
    lost, whole = runs
    assert lost.summary["updates_redone"] > 0
    assert_equal_runs(whole, lost, 2)
    assert [lost.load(f"trainer-{n}")["task"] for n in (0, 1)] == [whole.load(f"trainer-{n}")["task"] for n in (0, 1)]


@pytest.mark.processes
def test_a_hook_on_the_model_acts_also_after_the_loss_of_a_server(tmp_path):
    """The trainer that lives builds the model anew, and calls ``on_train_start`` for it."""
    lost = task("KeepsALayer", mark=str(tmp_path / "mark"), rank=0)
    run = train(tmp_path, "rpc", 1, **lost, **CONFIG)
    assert run.summary["updates_redone"] == 1
    model, at_checkpoint = run.load("model"), run.load("model", step=4)
    assert torch.equal(model["conv.weight"], at_checkpoint["conv.weight"])
    # Not conv.bias: before BatchNorm its gradient is rounding.
    assert not torch.equal(model["last.bias"], at_checkpoint["last.bias"])


VARIANTS = {
    "shared memory": {},
    "tcp": {"server": {"transport": "tcp"}},
    "rpc, two servers": {"server": {"transport": "rpc"}, "cluster": {"num_servers": 2}},
}


@pytest.mark.processes
@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("step", [3, 4])
def test_hooks_between_steps_see_the_parameters_of_the_present_version(tmp_path, variant, step):
    """Also where these are messages, at the end of a run, and in one that is resumed within an epoch or at its end."""
    config = {**CONFIG, "training": {**CONFIG["training"], "max_steps": step, "validate_every": 3}}
    seen = {}
    for mode, sections in (("ddp", {}), ("rpc", VARIANTS[variant])):
        folder = tmp_path / f"notes-{mode}"
        run = train(tmp_path, mode, 2, **task("SeesParameters", folder=str(folder)), **config, **sections)
        assert resume(run, "--set", "training.max_steps=9").code == 0
        seen[mode] = [(folder / f"trainer-{trainer}").read_text().splitlines() for trainer in (0, 1)]
        seen[mode] += [run.load(f"trainer-{trainer}")["task"] for trainer in (0, 1)]
    assert seen["ddp"] == seen["rpc"]
    assert {line.split()[0] for line in seen["rpc"][0]} >= {"checkpoint", "epoch_start", "epoch_end", "train_end"}


@pytest.mark.processes
def test_a_callback_stores_what_the_parameters_of_the_checkpoint_are(tmp_path):
    config = {**CONFIG, "training": {"max_steps": 8, "batch_size": 8, "validate_every": 3}}
    run = train(tmp_path, "rpc", 2, server={"transport": "tcp"}, **task("StoresInCallback"), **config)
    stored = float(run.load("model")["last.weight"].double().sum())
    for trainer in (0, 1):
        assert run.load(f"trainer-{trainer}")["task"]["paramserver.callbacks"]["CallbackSees"] == {"sum": stored}


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "trainers"), MODES)
def test_the_last_checkpoint_has_what_the_end_of_its_epoch_changed(tmp_path, mode, trainers):
    """Whether or not a periodic checkpoint of the same step was made before."""
    for every in (0, 4):
        config = {"training": {"max_steps": 4, "batch_size": 8, "validate_every": 0}, "checkpoint": {"every": every}}
        args = {"batch_norm": False, "samples": 16 * trainers}
        run = train(tmp_path / str(every), mode, trainers, task=f"{TASKS}:CountsEpochs", task_args=args, **config)
        assert run.load("model")["epochs"] == 2
        assert [run.load(f"trainer-{n}")["task"] for n in range(trainers)] == [{"ended": 2}] * trainers
        assert not run.load("trainer-0")["counters"]["epoch_open"]


@pytest.mark.processes
def test_gradients_that_a_callback_changes_are_those_of_the_update(tmp_path):
    local = train(tmp_path, "local", 1, **task("Counted"), **CONFIG)
    rpc = train(tmp_path, "rpc", 1, **task("Counted"), **CONFIG, server={"transport": "rpc"})
    plain = train(tmp_path / "plain", "local", 1, **task("Unclamped"), **CONFIG)
    assert differing_tensors(local.load("model"), rpc.load("model")) == []
    assert differing_tensors(local.load("model"), plain.load("model")) != []


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("callback", "returned Counter; it must return a list of paramserver.Callback objects"),
        ("none", "returned NoneType"),
        ("other", "an object of object, which must be derived from paramserver.Callback"),
        ("signature", "(WrongSignature): on_batch_end(self) cannot be called with the arguments that it is given"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["run", "dry"])
def test_what_is_no_callback_is_refused_before_the_first_step(tmp_path, what, expected, dry):
    code, output = main_in_process("--config", write_config(tmp_path, **task("Returned", what=what)), *dry)
    assert code == 2, output
    assert expected in output
    assert not list((tmp_path / "runs").glob("*"))


def documented():
    return re.search(r"^<!-- file: task.py -->\n```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)[1]


def test_the_documented_callback_takes_a_share_without_a_sample():
    exec(documented(), module := {})
    callback, trainer, logged = module["StopsAbove"](10.0), SimpleNamespace(validation={}), []
    callback.task = SimpleNamespace(trainer=trainer, log=lambda name, value, reduce: logged.append(value))
    callback.on_validation_end(3)
    assert logged == [0.0]


@pytest.mark.parametrize(("bound", "steps"), [(10.0, 8), (0.1, 4)])
def test_the_documented_callback_stops_a_run(tmp_path, bound, steps):
    code = documented().replace("StopsAbove(10.0)", f"StopsAbove({bound})")
    (tmp_path / "documented.py").write_text(
        f"{code}\nfrom tasks import ReferenceTask\n\nclass Documented(WithCallbacks, ReferenceTask):\n    pass\n"
    )
    run = run_in_process(tmp_path, task=f"{tmp_path}/documented.py:Documented", **CONFIG)
    assert (run.code, run.summary["steps"]) == (0, steps), run.output
    worst = [record["value"] for record in run.of_kind("log") if record["name"] == "worst_loss"]
    assert worst[-1] == max(record["values"]["loss"] for record in run.of_kind("validation"))
    assert run.summary["reason"] == (f"the loss is above {bound}" if steps == 4 else "training.max_steps (8) reached")


# Patience with a smallest change.


def test_a_change_that_is_not_larger_than_min_delta_is_no_improvement():
    best = BestMetric("loss", "min", min_delta=0.1)
    counted = [(best.update(value, step), best.without_improvement) for step, value in enumerate((1.0, 0.95, 0.9, 0.8))]
    # Each is the best so far, which is kept as such; only one of 0.2 is an improvement for patience.
    assert counted == [(True, 0), (True, 1), (True, 2), (True, 0)]
    best = BestMetric("accuracy", "max", min_delta=0.1)
    assert [best.update(0.5) or best.without_improvement, best.update(0.6), best.without_improvement] == [True, True, 1]


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "trainers"), MODES)
def test_patience_ends_a_run_that_improves_too_little(tmp_path, mode, trainers):
    training = {"max_steps": 40, "batch_size": 8, "validate_every": 2, "patience": 3, "min_delta": 1e6}
    run = train(tmp_path, mode, trainers, training=training, checkpoint={"best": {"metric": "loss", "mode": "min"}})
    assert run.summary["reason"] == "no improvement of loss in training.patience (3) validations"
    assert len([r for r in run.of_kind("validation") if r["step"] % 2 == 0]) == 4


def test_min_delta_without_patience_is_refused(tmp_path):
    code, output = main_in_process("--config", write_config(tmp_path, training={"min_delta": 0.1}))
    assert code == 2
    assert "training.min_delta (0.1) must be 0 without training.patience" in output
