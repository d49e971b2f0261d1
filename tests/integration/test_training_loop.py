"""The order of a run, its limits, and what is counted, in every mode."""

import threading
import time

import pytest
from launching import WITNESS_TRAINERS, differing_tensors, launch, relative_difference, run_concurrently, train

pytestmark = pytest.mark.processes

MODES = [("local", 1), ("ddp", 2), ("rpc", 2)]


def hooks_of(folder, trainer):
    return (folder / f"trainer-{trainer}").read_text().splitlines()


@pytest.mark.parametrize(("mode", "trainers"), MODES)
def test_the_order_of_a_run(tmp_path, mode, trainers):
    """16 samples of each trainer are an epoch of two batches of eight, one step. Validation: every two steps."""
    folder = tmp_path / "hooks"
    finished = train(
        tmp_path,
        mode,
        trainers,
        task="HookRecorder",
        task_args={"folder": str(folder), "samples": 16 * trainers, "validation": 9 * trainers},
        training={"max_steps": 3, "batch_size": 8, "accumulate_batches": 2, "validate_every": 2},
        checkpoint={"every": 2},
    )

    def step(n):
        return [f"{word} {i}" for i in (2 * n, 2 * n + 1) for word in ("batch_start", "training_step", "batch_end")]

    def validation(n):
        return [
            f"validation_start {n}",
            "validation_step eval 8",
            "validation_step eval 1",
            f"validation_end {n}",
            "checkpoint",
        ]

    expected = [
        "train_start",
        "epoch_start 0",
        *step(0),
        "epoch_end 0",
        "epoch_start 1",
        *step(1),
        *validation(4),
        "epoch_end 1",
        "epoch_start 2",
        *step(2),
        "epoch_end 2",
        *validation(6),
        "train_end",
    ]
    for trainer in range(trainers):
        assert hooks_of(folder, trainer) == expected
    logged = [(r["trainer"], r["step"], r["value"]) for r in finished.of_kind("log")]
    assert sorted(logged) == sorted((t, i // 2 + 1, 2.0 * i) for t in range(trainers) for i in range(6))
    reduced = [(r["step"], r["name"], r["value"], r["trainers"]) for r in finished.of_kind("reduced")]
    assert reduced == [(s, "double", 4.0 * s - 3.0, trainers) for s in (1, 2, 3)]
    summary = finished.summary
    assert (summary["status"], summary["steps"], summary["samples"]) == ("completed", 3, 48 * trainers)
    assert [r["step"] for r in finished.of_kind("validation")] == [2, 3]
    assert {r["samples"] for r in finished.of_kind("validation")} == {9 * trainers}
    phases = dict(summary["phases_ms"])
    assert phases.pop("hidden") >= 0  # overlaps with the others
    assert sum(phases.values()) == pytest.approx(summary["step_ms"]["mean"], rel=0.05)


@pytest.mark.parametrize(("mode", "trainers"), [MODES[0], MODES[2]])
def test_the_first_limit_that_is_reached_ends_the_run(tmp_path, mode, trainers):
    finished = train(
        tmp_path, mode, trainers, training={"max_steps": 100, "max_samples": 50 * trainers, "batch_size": 8}
    )
    summary = finished.summary
    assert summary["steps"] == 7  # the first step at which 50 samples of each trainer are reached
    assert summary["samples"] == 56 * trainers
    assert "max_samples" in summary["reason"]


@pytest.mark.parametrize(("mode", "trainers"), MODES[:2])
def test_max_epochs_serves_every_sample_once_per_epoch(tmp_path, mode, trainers):
    finished = train(
        tmp_path,
        mode,
        trainers,
        task_args={"samples": 50 * trainers},
        training={"max_steps": None, "max_epochs": 3, "batch_size": 8},
    )
    assert finished.summary["samples"] == 150 * trainers
    assert finished.summary["samples_left"] == 0
    assert finished.summary["steps"] == 19  # 150 samples in batches of 8, the last one smaller


def test_max_seconds_ends_a_run(tmp_path):
    finished = train(tmp_path, "rpc", 2, training={"max_steps": None, "max_seconds": 0.5})
    assert "max_seconds" in finished.summary["reason"]
    assert 0.4 < finished.summary["seconds"] < 5


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_stop_ends_all_trainers_with_the_first_and_one_may_hold_all_validation_data(tmp_path, mode):
    """Trainer 0 has 40 samples, trainer 1 has 80: all stop after five batches of eight.

    The validation data are an iterator, which the task is asked for anew each time.
    """
    finished = train(
        tmp_path, mode, 2, task="ValidatesOnOne", training={"max_steps": None, "batch_size": 8, "validate_every": 2}
    )
    summary = finished.summary
    assert summary["steps"] == 5
    assert summary["samples"] == 80
    assert "uneven_inputs" in summary["reason"]
    assert [(r["step"], r["samples"]) for r in finished.of_kind("validation")] == [(2, 20), (4, 20), (5, 20)]


@pytest.mark.parametrize("task", ["UnevenLengths", "UnevenCalls"])
def test_join_drains_every_trainer_the_same_in_both_modes(tmp_path, task):
    """40, 80 and 120 samples: five steps of three trainers, five of two, five of one."""
    config = {
        "task": task,
        "task_args": {"schedule": "step"},
        "training": {"max_steps": None, "batch_size": 8, "uneven_inputs": "join", "validate_every": 4},
        # Written at once: in the background the checkpoint of step 15 may supersede that of step 14.
        "checkpoint": {"every": 7, "background": False},
    }
    ddp, rpc = (train(tmp_path, mode, 3, **config) for mode in ("ddp", "rpc"))
    for finished in (ddp, rpc):
        assert finished.summary["steps"] == 15
        assert finished.summary["samples"] == 240
        assert [t["samples"] for t in finished.summary["trainers"]] == [40, 80, 120]
        assert [r["step"] for r in finished.of_kind("validation")] == [4, 8, 12, 15]
        assert {r["samples"] for r in finished.of_kind("validation")} == {37}
    assert relative_difference(ddp.load("model"), rpc.load("model")) < 1e-6
    for one, other in zip(ddp.of_kind("validation"), rpc.of_kind("validation"), strict=True):
        assert one["values"] == pytest.approx(other["values"], rel=1e-5)
    for step in (7, 14):
        assert relative_difference(ddp.load("model", step), rpc.load("model", step)) < 1e-6
        assert relative_difference(ddp.load("optimizer", step), rpc.load("optimizer", step)) < 1e-5


def test_join_with_accumulation_and_two_trainers_is_the_same_bit_for_bit(tmp_path):
    config = {
        "task": "UnevenLengths",
        "training": {"max_steps": None, "batch_size": 8, "accumulate_batches": 3, "uneven_inputs": "join"},
    }
    ddp, rpc = (train(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    assert ddp.summary["samples"] == rpc.summary["samples"] == 120
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []
    assert differing_tensors(ddp.load("optimizer"), rpc.load("optimizer")) == []


def test_with_join_compressed_gradients_are_the_mean_of_the_trainers_that_take_part(tmp_path):
    """The hook divides by the number of all ranks: without a correction the models differ by 0.03."""
    training = {"max_steps": None, "batch_size": 8, "uneven_inputs": "join"}
    plain, compressed = (
        train(tmp_path / hook, "ddp", 3, task="UnevenLengths", training=training, ddp={"comm_hook": hook})
        for hook in ("none", "fp16")
    )
    assert compressed.summary["steps"] == plain.summary["steps"] == 15
    assert relative_difference(plain.load("model"), compressed.load("model")) < 1e-3


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("bf16", "ddp.comm_hook (bf16) must be one that the devices and the backend of the run support"),
        ("powersgd", "parameter scale must have at least one dimension with ddp.comm_hook (powersgd)"),
    ],
)
def test_a_hook_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, hook, message):
    refused = launch(tmp_path, mode="ddp", cluster={"num_trainers": 2}, ddp={"comm_hook": hook})
    assert refused.code == 2
    assert message in refused.output
    assert "Traceback" not in refused.output


def test_join_keeps_the_module_buffers_where_the_last_trainer_is_drained_first(tmp_path):
    """The buffers that a step keeps are those of the last trainer that takes part: they pass on to another one."""
    training = {"max_steps": None, "batch_size": 8, "uneven_inputs": "join", "validate_every": 0}
    config = {"task": "ShortestLast", "training": training}
    ddp, rpc = (train(tmp_path, mode, 2, **config, checkpoint={"every": 0}) for mode in ("ddp", "rpc"))
    assert ddp.summary["samples"] == rpc.summary["samples"] == 120
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []
    saved = train(tmp_path / "saved", "ddp", 2, **config, checkpoint={"every": 1})
    assert differing_tensors(ddp.load("model"), saved.load("model")) == [], "a checkpoint changes nothing"


def opened_late(folder, mode, **config):
    """A run of ``Starved`` whose stream gives nothing for four seconds, starting with the first wait for it."""
    gate = folder / f"gate-{mode}"
    opener = threading.Thread(target=open_late, args=(gate, 4.0))
    opener.start()
    try:
        return launch(
            folder / mode,
            mode=mode,
            task="Starved",
            task_args={"gate": str(gate)},
            training={"max_steps": None, "batch_size": 8},
            cluster={"num_trainers": 2, "timeout_s": 3},
            **config,
        )
    finally:
        opener.join()


def open_late(gate, after_s):
    deadline = time.monotonic() + 60
    while not gate.with_suffix(".awaited").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(after_s)  # how long is what is tested
    gate.touch()


def test_a_trainer_that_waits_for_data_holds_the_others_without_failing(tmp_path):
    """The stream is silent for longer than every timeout; the run continues when it gives samples again."""
    server = {"lost_after_s": 2.0}
    runs = run_concurrently(lambda: opened_late(tmp_path, "ddp"), lambda: opened_late(tmp_path, "rpc", server=server))
    for finished in runs:
        assert finished.code == 0, finished.output
        assert finished.summary["samples"] == 128
        assert finished.summary["buffer"]["get_wait_s"] > 3


def test_no_sync_skips_the_collectives(tmp_path):
    """The gradients are one bucket: four micro-batches of a step need one all-reduce."""
    finished = train(
        tmp_path,
        "ddp",
        2,
        trainer=f"{WITNESS_TRAINERS}:CountingTrainer",
        training={"max_steps": 6, "batch_size": 4, "accumulate_batches": 4},
    )
    counts = [r["value"] for r in finished.of_kind("log") if r["name"] == "gradient_all_reduces"]
    assert counts == [6.0, 6.0]


def test_ranks_that_share_no_memory_agree_in_the_same_way(tmp_path):
    """With an uneven end, where one rank shadows the collectives of the other."""
    config = {
        "task_args": {"samples": 72},
        "training": {"max_epochs": 2, "batch_size": 8, "uneven_inputs": "join", "validate_every": 3},
        "logging": {"log_every": 1},
    }
    shared = train(tmp_path / "shared", "ddp", 2, **config)
    reduced = train(tmp_path / "reduced", "ddp", 2, trainer=f"{WITNESS_TRAINERS}:ReducingTrainer", **config)
    assert sorted(r["value"] for r in reduced.of_kind("log") if r["name"] == "rank_reduced") == [0.0, 1.0]
    assert differing_tensors(shared.load("model"), reduced.load("model")) == []
    figures = [
        [(r["step"], r["loss"], r["samples"], r["epoch"]) for r in run.of_kind("train")] for run in (shared, reduced)
    ]
    assert figures[0] == figures[1]
    assert figures[0][-1][2] == 144


@pytest.mark.parametrize(
    ("mode", "trainers", "consistency"),
    [("local", 1, "sync"), ("ddp", 2, "sync"), ("rpc", 2, "sync"), ("rpc", 2, "async"), ("rpc", 2, "elastic")],
)
def test_a_task_may_end_the_run(tmp_path, mode, trainers, consistency):
    """In good order: with a last validation and checkpoint, and its reason."""
    finished = launch(
        tmp_path,
        mode=mode,
        task="StopsRun",
        cluster={"num_trainers": trainers, "elastic": consistency == "elastic"},
        training={"max_steps": 5000, "batch_size": 8},
        **({"server": {"consistency": consistency.replace("elastic", "sync")}} if mode == "rpc" else {}),
    )
    assert finished.code == 0, finished.output
    summary = finished.summary
    assert (summary["status"], summary["reason"]) == ("completed", "it is good enough")
    assert 6 <= summary["steps"] <= (4000 if consistency == "async" else 7)  # the other trainer may be far ahead
    assert finished.checkpoints == [f"step-{summary['steps']:08d}"]
    assert [record["step"] for record in finished.of_kind("validation")] == [summary["steps"]]
