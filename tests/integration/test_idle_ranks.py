"""Ranks of ddp without data for some steps, with several calls of the model in a step: as in rpc."""

import pytest
import skipped_steps
from idle_tasks import pausing
from launching import differing_tensors, launch, relative_difference, resume, train

pytestmark = pytest.mark.processes

TRAINING = {"max_steps": None, "batch_size": 8, "uneven_inputs": "join"}


def run(folder, mode, how="once", trainers=3, training=(), task_args=(), **config):
    return train(
        folder,
        mode,
        trainers,
        task="idle_tasks:Calls",
        task_args={"how": how, **dict(task_args)},
        trainer=pausing(mode) if trainers > 1 else None,
        training={**TRAINING, **dict(training)},
        **config,
    )


def assert_same(ddp, rpc):
    assert (ddp.summary["steps"], ddp.summary["samples"]) == (rpc.summary["steps"], rpc.summary["samples"])
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []
    assert differing_tensors(ddp.load("optimizer"), rpc.load("optimizer")) == []


@pytest.mark.parametrize("how", ["once", "without_gradients", "twice", "in_a_loop"])
def test_any_number_of_calls_is_the_same_as_in_rpc(tmp_path, how):
    ddp, rpc = (run(tmp_path, mode, how) for mode in ("ddp", "rpc"))
    assert rpc.summary["samples"] == 288
    assert_same(ddp, rpc)


@pytest.mark.parametrize("how", ["without_gradients", "in_a_loop"])
def test_with_accumulation_it_is_the_same_as_in_rpc(tmp_path, how):
    ddp, rpc = (run(tmp_path, mode, how, training={"accumulate_batches": 2}) for mode in ("ddp", "rpc"))
    assert rpc.summary["samples"] == 288
    assert_same(ddp, rpc)


@pytest.mark.parametrize("how", ["without_gradients", "in_a_loop"])
@pytest.mark.parametrize("batches", [1, 2])
def test_with_skipped_steps_it_is_the_same_as_in_rpc(tmp_path, how, batches):
    config = {
        "training": {"nonfinite": "skip", "accumulate_batches": batches},
        "task_args": {"nonfinite": [[2, 9], [0], [7]]},
    }
    ddp, rpc = (run(tmp_path, mode, how, **config) for mode in ("ddp", "rpc"))
    assert ddp.summary["samples_skipped"] >= 16
    skipped_steps.assert_same(ddp, rpc)


@pytest.mark.parametrize("how", ["without_gradients", "in_a_loop"])
@pytest.mark.parametrize("trainers", [2, 3])
def test_over_gloo_it_is_the_same_as_in_rpc(tmp_path, how, trainers):
    ddp = run(tmp_path, "ddp", how, trainers, ddp={"shared_memory": "off"})
    rpc = run(tmp_path, "rpc", how, trainers)
    assert ddp.summary["transports"] == {str(trainer): "gloo" for trainer in range(trainers)}
    if trainers == 2:
        assert_same(ddp, rpc)
    assert relative_difference(ddp.load("model"), rpc.load("model")) < 1e-6


@pytest.mark.parametrize("options", [{}, {"shared_memory": "off"}], ids=str)
def test_a_parameter_that_no_trainer_uses_in_a_step_is_left_as_it_is(tmp_path, options):
    """Adam with weight decay changes one with a gradient of zeros."""
    config = {"task_args": {"optimizer": "adamw"}, "trainers": 2}
    ddp = run(tmp_path, "ddp", "partly", ddp={"extra": {"find_unused_parameters": True}, **options}, **config)
    assert_same(ddp, run(tmp_path, "rpc", "partly", **config))


@pytest.mark.parametrize(("hook", "most"), [("fp16", 1e-3), ("powersgd", 0.2)])
def test_compressed_gradients_are_the_mean_of_the_ranks_with_data(tmp_path, hook, most):
    plain, compressed = (run(tmp_path / hook, "ddp", "in_a_loop", ddp={"comm_hook": hook}) for hook in ("none", hook))
    assert compressed.summary["steps"] == plain.summary["steps"]
    assert 0 < relative_difference(plain.load("model"), compressed.load("model")) < most


@pytest.mark.parametrize("trainer", ["PausingWithHook", "PausingWithBuiltinHook"])
def test_with_a_hook_of_the_user_gradients_are_the_mean_of_the_ranks_with_data(tmp_path, trainer):
    config = {"task": "idle_tasks:Calls", "task_args": {"how": "in_a_loop"}, "training": TRAINING}
    ddp = train(tmp_path, "ddp", 3, trainer=f"idle_tasks:{trainer}", **config)
    rpc = run(tmp_path, "rpc", "in_a_loop")
    assert ddp.summary["steps"] == rpc.summary["steps"]
    assert relative_difference(ddp.load("model"), rpc.load("model")) < 1e-6


@pytest.mark.parametrize("how", ["without_gradients", "in_a_loop"])
def test_a_resumed_run_is_the_same_as_a_straight_one(tmp_path, how):
    """It stops before a step that only one rank has data for, and after one that only two have."""
    config = {"how": how, "training": {"validate_every": 4}}
    straight = run(tmp_path / "straight", "ddp", **config)
    stopped = run(tmp_path / "stopped", "ddp", **{**config, "training": {"validate_every": 4, "max_steps": 8}})
    resumed = resume(stopped, "--set", "training.max_steps=null")
    assert resumed.code == 0, resumed.output
    assert_same(straight, resumed)
    assert_same(straight, run(tmp_path, "rpc", **config))


def rates(finished):
    return [record["lr"] for record in finished.of_kind("train")]


@pytest.mark.parametrize("trainers", [1, 3])
def test_records_have_the_learning_rate_of_their_update_in_every_mode(tmp_path, trainers):
    """Also where rank 0, which writes them, has no data, and where a step is skipped."""
    config = {
        "trainers": trainers,
        "training": {"nonfinite": "skip", "accumulate_batches": 2},
        "task_args": {"nonfinite": [[2], [0], [7]], "schedule": "step"},
    }
    modes = ["ddp", "rpc"] + ["local"] * (trainers == 1)
    runs = [run(tmp_path, mode, **config) for mode in modes]
    updates = runs[0].summary["steps"]
    assert updates > 3
    for finished in runs:
        assert finished.summary["samples_skipped"] > 0
        assert rates(finished) == [[pytest.approx(0.05 * 0.7 ** (update // 3))] for update in range(updates)]


def test_records_have_the_learning_rate_of_their_update_with_a_schedule_of_validations(tmp_path):
    config = {"training": {"validate_every": 2}, "task_args": {"schedule": "validation"}}
    ddp, rpc = (run(tmp_path, mode, **config) for mode in ("ddp", "rpc"))
    assert rates(ddp) == rates(rpc)
    assert rates(ddp)[:2] == [[0.05]] * 2
    assert len({rate for (rate,) in rates(ddp)}) > 1


@pytest.mark.parametrize("hook", ["on_batch_start", "on_batch_end"])
def test_hooks_may_call_the_model_in_a_step_that_a_rank_has_no_data_for(tmp_path, hook):
    config = {"task": "idle_tasks:CallsInHook", "task_args": {"hook": hook}, "training": TRAINING}
    ddp, rpc = (train(tmp_path, mode, 3, trainer=pausing(mode), **config) for mode in ("ddp", "rpc"))
    assert_same(ddp, rpc)


def test_an_unused_parameter_is_named_where_a_rank_has_no_data_for_the_next_step(tmp_path):
    run = launch(
        tmp_path,
        mode="ddp",
        task="idle_tasks:Calls",
        task_args={"unused": True},
        trainer="idle_tasks:PausesSecondStep",
        training=TRAINING,
        cluster={"num_trainers": 2},
    )
    assert run.code == 2, run.output
    assert "had no part in the loss of an earlier step; set ddp.extra: {find_unused_parameters: true}" in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"trainer": "stream_tasks:Unwrapped"},
            "training.uneven_inputs (join) must be stop where configure_ddp returns",
        ),
        (
            {"ddp": {"extra": {"static_graph": True}}},
            "must have a first step that all trainers have data for, and trainer 0 has none; remove it",
        ),
        (
            {"task": "idle_tasks:SparseGradients"},
            "sparse gradients (table.weight) must have a step that all trainers have data for, and trainer 0 has none",
        ),
    ],
    ids=["not wrapped", "static graph", "sparse gradients"],
)
def test_what_a_rank_without_data_cannot_follow_is_refused(tmp_path, options, message):
    config = {"task": "idle_tasks:Calls", "trainer": pausing("ddp"), **options}
    run = launch(tmp_path, mode="ddp", training=TRAINING, cluster={"num_trainers": 2}, **config)
    assert run.code == 2, run.output
    assert message in run.output
    assert "Traceback" not in run.output


LIMIT_S = 4
KINDS = {
    "shared memory": {},
    "gloo": {"ddp": {"shared_memory": "off"}},
    "several optimizers": {"task_args": {"optimizers": 2}},
    "rounds": {"training": {"local_steps": 2}},  # whose waits have twice the limit
}


def run_long(folder, kind, does, seconds=0, **config):
    options = {"task_args": {}, "training": {}, **KINDS[kind], **config}
    options["task_args"] = {**options["task_args"], "mark": str(folder / "mark"), "does": does, "seconds": seconds}
    options["training"] = {**TRAINING, **options["training"]}
    cluster = {"num_trainers": 2, "timeout_s": LIMIT_S, "max_restarts": 0}
    return launch(folder, mode="ddp", task="idle_tasks:LongLastBatch", cluster=cluster, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_data_waits_as_long_as_the_others_compute(tmp_path, kind):
    seconds = LIMIT_S * (2 if kind == "rounds" else 1) + 2
    finished = run_long(tmp_path, kind, "compute", seconds)
    assert finished.code == 0, finished.output
    assert finished.summary["samples"] == 24


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("does", ["die", "freeze"])
def test_a_rank_without_data_ends_with_the_loss_of_the_one_that_it_waits_for(tmp_path, kind, does):
    finished = run_long(tmp_path, kind, does, server={"lost_after_s": 3.0})
    assert (tmp_path / "mark").exists(), finished.output
    assert finished.code == 1, finished.output
    assert "rank 1" in finished.output


@pytest.mark.parametrize(
    ("task_args", "training"),
    [
        pytest.param({}, {}, id="one optimizer"),
        pytest.param({"optimizers": 2, "without": ["on_batch_end"]}, {}, id="several optimizers"),
        pytest.param({}, {"local_steps": 2}, id="rounds"),
        pytest.param({"without": ["on_epoch_end"]}, {"local_steps": 2}, id="rounds without on_epoch_end"),
    ],
)
def test_buffers_that_a_rank_without_data_does_not_have_yet_are_the_same_as_in_rpc(tmp_path, task_args, training):
    """Forwards reshape and register them, and give them another type, while ranks have no data."""
    config = {
        "task": "buffer_tasks:Uneven",
        "task_args": {"quantized": False, **task_args},
        "training": {**TRAINING, **training},
    }
    ddp, rpc = (train(tmp_path, mode, 3, trainer=pausing(mode), **config) for mode in ("ddp", "rpc"))
    assert_same(ddp, rpc)
