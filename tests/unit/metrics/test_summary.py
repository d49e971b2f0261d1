"""What a person reads at the end of a run."""

import math
import re

import pytest

from paramserver.config import Config
from paramserver.metrics import FanOut
from paramserver.metrics.records import StepResult
from paramserver.metrics.summary import summary_text
from paramserver.runs.monitor import RunMonitor

FULL = {
    "status": "completed",
    "mode": "rpc",
    "consistency": "bounded",
    "num_servers": 1,
    "num_trainers": 2,
    "steps": 1000,
    "samples": 64000,
    "samples_served": 64032,
    "samples_left": 32,
    "seconds": 12.345,
    "recovery_s": 3.21,
    "samples_per_second": 5203.4,
    "train_loss": 0.12345678,
    "validation": {"loss": 0.25, "accuracy": 0.98},
    "step_ms": {"mean": 10.0, "p50": 9.5, "p90": 11.0, "p95": 12.25, "p99": 20.0, "max": 40.5},
    "phases_ms": {"data": 0.5, "forward": 4.0, "backward": 5.0, "wait": None, "hidden": 1.0, "apply": 0.25},
    "staleness": {"mean": 1.5, "p95": 3.0, "max": 4, "histogram": {}},
    "faults": [{"message": "trainer 1 lost"}],
    "restarts": 2,
    "updates_redone": 15,
    "checkpoint": "runs/x/checkpoints/step-00001000",
    "error": None,
}


def fields(text):
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in text.splitlines())


def test_what_the_reason_says_of_the_rest_is_not_said_twice(tmp_path):
    reason = "20 epochs done; 32 samples are less than a step of both trainers"
    told = fields(summary_text({**FULL, "reason": reason}, tmp_path))
    assert (told["reason"], told["samples"]) == (reason, "64000 applied, 64032 served")


def test_everything_is_told_in_aligned_lines(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    text = summary_text(FULL, tmp_path)
    assert 10 <= len(text.splitlines()) <= 17
    assert fields(text) == {
        "status": "completed",
        "mode": "rpc, bounded, 1 server, 2 trainers",
        "steps": "1000",
        "samples": "64000 applied, 64032 served, 32 left",
        "time": "12.3 s",
        "recovery": "3.2 s between sessions",
        "speed": "5203 samples/s",
        "train loss": "0.1235",
        "valid": "loss 0.25, accuracy 0.98",
        "step": "mean 10 ms, p50 9.5 ms, p95 12.25 ms, max 40.5 ms",
        "phases": "data 0.5 ms (5 %), forward 4 ms (40 %), backward 5 ms (50 %), apply 0.25 ms (2 %)",
        "overlapped": "hidden 1 ms (10 %)",
        "staleness": "mean 1.5, p95 3, max 4",
        "faults": "1, 2 restarts, 15 updates made again",
        "checkpoint": "runs/x/checkpoints/step-00001000",
        "tensorboard": f"tensorboard --logdir {tmp_path}/tensorboard",
        "folder": str(tmp_path),
    }
    resumed = fields(summary_text(FULL, tmp_path, first_step=400))
    assert resumed == {**fields(text), "time": "12.3 s since step 400"}
    columns = {line.index(value) for line, value in zip(text.splitlines(), fields(text).values(), strict=True)}
    assert len(columns) == 1


@pytest.mark.parametrize(
    ("share", "threads", "named"), [(0.4, 2, True), (0.4, 1, False), (0.1, 2, False), (None, 2, False)]
)
def test_threads_that_waited_for_cores_are_named(share, threads, named):
    trainers = [{"trainer": 0, "core_wait_share": 0.0, "threads": 2}]
    trainers += [{"trainer": 1, "core_wait_share": share, "threads": threads}]
    line = fields(summary_text({**FULL, "trainers": trainers}, "runs/x")).get("cores")
    text = (
        "trainer 1 waited 40 % of the time for a core, with 2 threads: set OMP_NUM_THREADS to the number of free cores"
    )
    assert line == (text if named else None)


@pytest.mark.parametrize("name", sorted(FULL))
@pytest.mark.parametrize("missing", [True, False])
def test_any_field_may_be_missing_or_none(name, missing):
    summary = {key: value for key, value in FULL.items() if key != name} if missing else {**FULL, name: None}
    others = fields(summary_text(FULL, "runs/x"))
    told = fields(summary_text(summary, "runs/x"))
    assert set(told) <= set(others)
    assert sum(told.get(key) != value for key, value in others.items()) <= 3


def test_a_run_that_failed_at_once_is_told_too():
    text = summary_text({"status": "failed", "error": "TaskError: no task\nmore", "step_ms": {"mean": None}}, "runs/x")
    told = fields(text)
    assert told["error"] == "TaskError: no task"
    assert told["steps"] == told["train loss"] == told["time"] == "-"
    assert told["checkpoint"] == "none was written"
    assert "step" not in told


@pytest.mark.claim("failed-step-time")
def test_a_run_that_failed_before_its_trainers_reported_shows_no_figure_that_was_not_measured(tmp_path):
    monitor = RunMonitor(Config(), FanOut([]), tmp_path / "summary.json")
    for step in (1, 2, 3):
        monitor.update_applied(StepResult(step, 32 * step, 0.5, (0.1,), 0.25 * step))
    summary = monitor.close("failed", [], error="trainer 1 is lost")
    unknown = ("step_ms", "samples_served", "samples_left", "wire_bytes_per_step", "buffer")
    assert {name: summary[name] for name in unknown} == dict.fromkeys(unknown)
    told = fields(summary_text(summary, tmp_path))
    assert told["samples"] == "96 applied"
    assert told["steps"] == "3"
    assert not told.keys() & {"step", "phases", "overlapped"}
    assert " 0 ms" not in summary_text(summary, tmp_path)


def test_a_run_that_lost_nothing_shows_no_loss(tmp_path):
    """Also between the sessions of a run whose trainers joined or left."""
    text = summary_text({**FULL, "faults": [], "restarts": 0}, tmp_path)
    assert fields(text)["recovery"] == "3.2 s between sessions"
    assert "losses" not in text


def test_a_loss_that_is_not_a_number_is_told_as_such():
    assert fields(summary_text({"train_loss": math.nan}, "x"))["train loss"] == "nan"
    assert fields(summary_text({"train_loss": math.inf}, "x"))["train loss"] == "inf"


@pytest.mark.parametrize("steps", [20, 25])
@pytest.mark.parametrize("names", [("",), ("a", "b")])
def test_the_losses_of_a_run_that_resumes_after_its_last_update_are_those_of_its_end(tmp_path, steps, names):
    """As after the loss of a server in ``on_train_end``, or where a trainer leaves after the last step."""
    config = Config()
    assert config.logging.log_every == 10
    monitor, resumed = (RunMonitor(config, FanOut([]), tmp_path / f"{name}.json") for name in ("before", "after"))
    for step in range(1, steps + 1):
        monitor.update_applied(
            StepResult(step, 32 * step, 1 / step, (0.1,), 0.25 * step, optimizer=names[step % len(names)])
        )
    resumed.load_state_dict(monitor.state_dict())
    summaries = [one.close("completed", []) for one in (monitor, resumed)]
    of_loss = [{name: value for name, value in one.items() if "loss" in name} for one in summaries]
    assert of_loss[0] == of_loss[1]
    assert of_loss[0]["last_step_loss"] == 1 / steps
    assert set(of_loss[0].get("train_losses", {})) == set(names) - {""}
