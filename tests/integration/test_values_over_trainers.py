"""Metrics that are no means are merged exactly, and ``trainer.all_gather`` has the values of all trainers."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import launch, train

from paramserver.evaluate import evaluate_run

TASKS = Path(__file__).parents[1] / "helpers" / "metric_tasks.py"
CONFIG = {
    "training": {"max_steps": 8, "batch_size": 8, "validate_every": 4, "validation_batch_size": 7},
    "checkpoint": {"every": 4, "keep": 9, "background": False, "best": {"metric": "recall", "mode": "max"}},
    "cluster": {"timeout_s": 30},
}
MODES = [("local", 1), ("ddp", 2), ("ddp", 3), ("rpc", 1), ("rpc", 2)]


def task(name, **arguments):
    return {"task": f"{TASKS}:{name}", "task_args": arguments}


def without_best(config):
    return {**config, "checkpoint": {**config["checkpoint"], "best": None}}


def assert_exact(run, names):
    """What the run recorded is what one process computes of the same parameters over all samples at once."""
    for record in run.of_kind("validation"):
        assert record["samples"] == 37
        whole = evaluate_run(run.run_dir, str(record["step"]), ["training.validation_batch_size=37"])
        for name in names:
            assert record["values"][name] == pytest.approx(whole.values[name], rel=1e-6), name


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "trainers"), MODES)
def test_a_metric_over_all_trainers_is_that_of_one_process(tmp_path, mode, trainers):
    run = train(tmp_path, mode, trainers, **task("Measured"), **CONFIG)
    assert len(run.of_kind("validation")) == 2
    assert_exact(run, ["recall", "each", "accuracy"])
    assert all(record["values"]["each"] == record["values"]["recall"] for record in run.of_kind("validation"))
    best = max(run.of_kind("validation"), key=lambda record: record["values"]["recall"])
    assert run.best == f"step-{best['step']:08d}"


@pytest.mark.processes
def test_trainers_that_run_freely_merge_their_metrics(tmp_path):
    run = train(tmp_path, "rpc", 2, **task("Measured"), **without_best(CONFIG), server={"consistency": "async"})
    assert_exact(run, ["recall"])


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "trainers"), [("local", 1), ("ddp", 2), ("rpc", 2)])
def test_metrics_of_torchmetrics(tmp_path, mode, trainers):
    if find_spec("torchmetrics") is None:
        pytest.skip("torchmetrics is not installed")
    run = train(tmp_path, mode, trainers, **task("OfTorchmetrics"), **without_best(CONFIG))
    for record in run.of_kind("validation"):
        assert record["values"]["accuracy_tm"] == pytest.approx(record["values"]["accuracy"], rel=1e-6)
    from metric_tasks import OfTorchmetrics

    whole = OfTorchmetrics()
    whole.on_train_start()
    for step in (4, 8):
        model = whole.build_model()
        model.load_state_dict(run.load("model", step))
        model.eval()
        images, labels = whole.validation_source(None).tensors
        output = model(images).softmax(1)
        (record,) = [record for record in run.of_kind("validation") if record["step"] == step]
        for name, metric in whole.metrics.items():
            metric.update(output, labels)
            assert record["values"][name] == pytest.approx(float(metric.compute()), rel=1e-5), name
            metric.reset()


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("vector", "validation_step: x: Vector.compute() must return one number"),
        ("state", "x: NotMergeable has no merge_state; a metric needs update, compute, reset and merge_state(other)"),
        ("mixed", "validation_step: x must be a mean in every batch, or a metric object in every one"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(tmp_path, what, expected):
    run = launch(tmp_path, **task("Wrong", what=what), **without_best(CONFIG))
    assert run.code == 2
    assert expected in run.output


# all_gather.


@pytest.mark.sampled(3)
@pytest.mark.processes
@pytest.mark.parametrize(("mode", "trainers"), MODES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_trainer_gets_the_values_of_all_in_every_place(tmp_path, mode, trainers, accumulate):
    training = {**CONFIG["training"], "accumulate_batches": accumulate, "max_steps": None, "max_epochs": 2}
    config = {**without_best(CONFIG), "training": training}
    run = train(tmp_path, mode, trainers, **task("Gathers", samples=96), **config)
    kind = "log" if trainers == 1 else "reduced"
    assert {record["value"] for record in run.of_kind(kind) if record["name"] == "gathered"} == {trainers}
    assert evaluate_run(run.run_dir).logged == {"gathered": 1}


@pytest.mark.processes
@pytest.mark.parametrize("server", [{"consistency": "async"}, {"consistency": "bounded"}, {"backup_trainers": 1}])
def test_trainers_that_do_not_step_together_are_refused(tmp_path, server):
    run = launch(tmp_path, mode="rpc", **task("Gathers"), **without_best(CONFIG), server=server)
    assert run.code == 2
    assert "trainer.all_gather must have trainers that step together" in run.output


@pytest.mark.parametrize(
    ("mode", "hook"), [("local", "on_train_start"), ("rpc", "on_train_start"), ("rpc", "on_epoch_start")]
)
def test_in_a_hook_that_a_replacement_calls_alone_it_is_refused(tmp_path, mode, hook):
    run = launch(tmp_path, mode=mode, **task("GathersElsewhere", hook=hook), **without_best(CONFIG))
    assert run.code == 2
    assert "must be called where all trainers are at the same time: in training_step" in run.output


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["local", "rpc"])
def test_what_cannot_be_sent_is_refused(tmp_path, mode):
    run = launch(tmp_path, mode=mode, **task("GathersFunction"), **without_best(CONFIG))
    assert run.code == 2
    assert "trainer.all_gather was given what cannot be sent to another process" in run.output
    assert "Traceback" not in run.output


@pytest.mark.processes
def test_a_trainer_that_does_not_call_it_is_named(tmp_path):
    config = {**without_best(CONFIG), "cluster": {"timeout_s": 4}}
    run = launch(tmp_path, mode="rpc", **task("GathersAlone"), **config)
    assert run.code == 2
    assert "trainer.all_gather was not called by trainer 1 within cluster.timeout_s (4 s)" in run.output


@pytest.mark.processes
def test_a_trainer_without_data_takes_no_part_in_a_step(tmp_path):
    training = {"batch_size": 8, "max_steps": None, "uneven_inputs": "join"}
    config = {**without_best(CONFIG), "training": training}
    run = train(tmp_path, "rpc", 2, **task("GathersUneven"), **config)
    by_step = {record["step"]: record["value"] for record in run.of_kind("log") if record["name"] == "gathered"}
    assert list(by_step.values()) == [2] * 5 + [1] * 5
    ddp = launch(tmp_path / "ddp", mode="ddp", **task("GathersUneven"), **config)
    assert ddp.code == 2
    assert "cannot be called in a step in which a trainer has no data" in ddp.output


@pytest.mark.processes
def test_a_trainer_that_dies_is_not_waited_for(tmp_path):
    training = {**CONFIG["training"], "max_steps": 60}
    config = {**without_best(CONFIG), "training": training}
    run = train(tmp_path, "rpc", 2, **task("GathersAndDies", mark=str(tmp_path / "mark")), **config)
    assert run.summary["steps"] == 60
    assert len(run.of_kind("lost")) == 1
    assert {record["value"] for record in run.of_kind("log") if record["name"] == "gathered"} == {1, 2}
