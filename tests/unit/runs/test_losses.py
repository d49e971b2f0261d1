"""Training time of a start of a run over its sessions, also where rank 0 was killed between two updates."""

import json
from types import SimpleNamespace

import pytest

from paramserver.config import Config
from paramserver.metrics import FanOut
from paramserver.metrics.records import StepResult, TrainerTotals
from paramserver.runs import losses
from paramserver.runs.losses import LossLog
from paramserver.runs.monitor import RunMonitor

pytestmark = pytest.mark.claim("time-after-losses")


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(time=lambda: now.now, now=1000.0)
    monkeypatch.setattr(losses, "time", now)
    return now


class Session:
    """Rank 0 from one start to its death or its end; each update takes 2 s of training and 32 samples."""

    def __init__(self, folder, clock, state=None, begins=None):
        self.clock, self.log = clock, LossLog(folder / "losses.json")
        begins = "return_to" if begins is None else begins
        first = 0 if state is None else state["step"]
        later = {"step": first, "furthest_step": first} if begins == "return_to" else {}
        getattr(self.log, begins)(generation=1, trainer_ranks=[0], **later)
        self.monitor = RunMonitor(Config(mode="local"), FanOut([]), folder / "summary.json", self.log)
        if state is not None:
            self.monitor.load_state_dict(state)
        self.monitor.run_started({"kind": "start"})

    def train(self, steps, takes_s=2.0):
        for _ in range(steps):
            self.clock.now += takes_s
            step, seconds = self.monitor.step + 1, self.monitor.seconds + 2.0
            self.monitor.update_applied(StepResult(step, 32 * step, 0.5, (0.1,), seconds))
        return self.monitor.state_dict()

    def close(self, status="completed", **totals):
        return self.monitor.close(status, [TrainerTotals(0, **totals)] if totals else [])


@pytest.mark.parametrize("end", ["killed", "failed", "suspended"])
@pytest.mark.parametrize("begins", ["return_to", "resize"])
def test_the_time_of_all_sessions_is_summed_and_that_between_them_is_not_training(tmp_path, clock, end, begins):
    first = Session(tmp_path, clock, begins="begin")
    state = first.train(3)
    first.train(4)
    if end == "failed":
        assert first.close("failed")["seconds"] == 14.0
    elif end == "suspended":
        first.monitor.suspend()
    clock.now += 25.0
    second = Session(tmp_path, clock, state, begins)  # killed again before an update
    clock.now += 5.0
    second = Session(tmp_path, clock, state)
    second.train(5)
    summary = second.close(seconds=9.0)
    assert summary["seconds"] == 24.0
    assert summary["recovery_s"] == 30.0
    assert summary["samples_per_second"] == 32 * 8 / 24.0
    assert json.loads((tmp_path / "summary.json").read_text())["seconds"] == 24.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["losses.json", "summary.json"]


def test_a_resumed_run_counts_from_where_it_was_resumed_also_after_losses(tmp_path, clock):
    state = Session(tmp_path, clock, begins="begin").train(10)
    clock.now += 3600.0
    resumed = Session(tmp_path, clock, state, "begin")
    state = resumed.train(2)
    clock.now += 7.0
    last = Session(tmp_path, clock, state)
    last.train(3)
    summary = last.close("failed")  # no trainer reported its totals
    assert (last.log.first_step, last.log.first_samples) == (10, 320)
    assert (summary["seconds"], summary["recovery_s"]) == (10.0, 7.0)
    assert summary["samples_per_second"] == 32 * 5 / 10.0


def test_a_trainer_that_took_the_place_of_another_does_not_shorten_the_time(tmp_path, clock):
    session = Session(tmp_path, clock, begins="begin")
    session.train(10)
    assert session.close(seconds=3.0)["seconds"] == 20.0


def test_a_run_without_losses_counts_the_whole_last_step(tmp_path, clock):
    session = Session(tmp_path, clock, begins="begin")
    session.train(10)
    summary = session.close(seconds=20.5)
    assert (summary["seconds"], summary["recovery_s"]) == (20.5, 0.0)
