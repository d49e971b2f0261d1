"""Histograms merge exactly, the phases of a clock sum to the step, and means are exact."""

import math
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from types import SimpleNamespace

import pytest

from paramserver.metrics import records
from paramserver.metrics.records import (
    PHASES,
    CoreWait,
    DurationHistogram,
    PhaseClock,
    RecordWindow,
    RunClock,
    StepResult,
    WeightedSums,
    make_record,
    merge_sums,
    peak_rss_mb,
)


def histogram(durations_s) -> DurationHistogram:
    made = DurationHistogram()
    for duration_s in durations_s:
        made.add(duration_s)
    return made


def durations(seed: int, count: int) -> list[float]:
    """From microseconds to minutes."""
    draw = random.Random(seed)
    return [10 ** draw.uniform(-5.9, 2) for _ in range(count)]


@pytest.mark.parametrize("q", [0.0, 0.01, 0.5, 0.9, 0.95, 0.99, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_a_quantile_is_within_one_percent(q, count):
    values = durations(count, count)
    exact = sorted(values)[max(math.ceil(q * count) - 1, 0)]
    assert histogram(values).quantile_s(q) == pytest.approx(exact, rel=0.0101)


def test_no_quantile_is_above_the_maximum():
    values = durations(5, 300)
    made = histogram(values)
    assert made.max_s == max(values)
    assert all(made.quantile_s(q / 100) <= made.max_s for q in range(101))


@pytest.mark.parametrize("tiny_s", [0.0, 1e-12, 1e-6])
def test_durations_below_a_microsecond_are_counted(tiny_s):
    made = histogram([tiny_s, tiny_s])
    assert made.count == 2
    assert made.quantile_s(0.5) == pytest.approx(tiny_s)


def test_histograms_merge_exactly():
    values = sorted(durations(3, 500))  # so that the second part has the maximum, and the first the minimum
    merged = histogram(values[:123])
    merged.merge(histogram(values[123:]))
    merged.merge(DurationHistogram())
    whole = histogram(values)
    assert merged.bins == whole.bins
    assert (merged.count, merged.max_s) == (500, max(values))
    assert merged.total_s == pytest.approx(sum(values))


def test_the_summary_is_in_milliseconds():
    summary = histogram([0.010] * 98 + [0.2, 0.4]).summary_ms()
    assert list(summary) == ["mean", "p50", "p90", "p95", "p99", "max"]
    assert summary["mean"] == pytest.approx((0.98 + 0.6) * 10)
    assert summary["p50"] == summary["p95"] == pytest.approx(10, rel=0.01)
    assert summary["p99"] == pytest.approx(200, rel=0.01)
    assert summary["max"] == 400
    assert set(DurationHistogram().summary_ms().values()) == {0.0}


@pytest.fixture
def clock_at(monkeypatch):
    """A phase clock whose time is set by hand."""
    now = SimpleNamespace(perf_counter=lambda: now.seconds, time=time.time, seconds=100.0)
    monkeypatch.setattr(records, "time", now)
    return PhaseClock(), now


def test_the_clock_of_a_run_counts_the_time_in_which_it_is_not_stopped(clock_at):
    _, now = clock_at
    clock = RunClock(10.0)
    now.seconds += 1.0
    assert clock.seconds == 10.0  # nothing has begun
    for _ in range(2):
        clock.start()
        now.seconds += 2.0
    assert clock.seconds == 14.0
    for _ in range(2):
        clock.stop()
        now.seconds += 4.0
    assert clock.seconds == 14.0
    clock.start()
    now.seconds += 8.0
    clock.stop()
    now.seconds += 16.0
    clock.undo_stop()
    assert clock.seconds == 14.0 + 8.0 + 16.0
    clock.start(4.0)  # it runs
    assert clock.seconds == 38.0
    clock.stop()
    now.seconds += 32.0
    clock.start(8.0)
    assert clock.seconds == 38.0 + 8.0
    clock.stop()
    now.seconds += 1.0
    clock.start(64.0)  # since before it was stopped
    assert clock.seconds == 46.0 + 1.0


def test_each_lap_goes_to_one_phase_and_all_sum_to_the_step(clock_at):
    clock, now = clock_at
    for phase, seconds in (("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("data", 8.0)):
        now.seconds += seconds
        clock.lap(phase)
    now.seconds += 16.0
    assert clock.end_step() == 31.0
    assert set(clock.seconds) == set(PHASES)
    assert {name: s for name, s in clock.seconds.items() if s} == {
        "data": 9.0,
        "forward": 2.0,
        "backward": 4.0,
        "wait": 16.0,
    }
    assert (clock.steps.count, clock.steps.total_s) == (1, 31.0)


def test_a_shared_lap_attributes_known_times_to_other_phases(clock_at):
    clock, now = clock_at
    now.seconds += 10.0
    clock.lap_shared("push", wait=6.0, apply=1.0)
    clock.end_step()
    assert [clock.seconds[p] for p in ("push", "wait", "apply")] == [3.0, 6.0, 1.0]


def test_a_shared_lap_never_attributes_more_than_its_duration(clock_at):
    clock, now = clock_at
    now.seconds += 5.0
    clock.lap("push")  # of the same step, before
    now.seconds += 10.0
    clock.lap_shared("push", wait=8.0, apply=7.0)  # clocks of server and trainer may differ
    clock.end_step()
    assert [clock.seconds[p] for p in ("push", "wait", "apply")] == [5.0, 8.0, 2.0]


def test_skipped_time_counts_for_no_phase_and_no_step(clock_at):
    clock, now = clock_at
    now.seconds += 50.0
    clock.skip()
    now.seconds += 2.0
    assert clock.end_step() == 2.0
    assert sum(clock.seconds.values()) == 2.0


def test_a_step_that_does_not_end_is_not_counted(clock_at):
    clock, now = clock_at
    now.seconds += 3.0
    clock.lap("data")
    clock.skip()
    now.seconds += 2.0
    clock.lap("forward")
    clock.end_step()
    assert sum(clock.seconds.values()) == clock.steps.total_s == 2.0


def test_means_are_weighted_by_samples():
    sums = WeightedSums()
    sums.add({"loss": 1.0, "accuracy": 0.5}, 32)
    sums.add({"loss": 4.0}, 16)
    assert sums.means() == {"loss": 2.0, "accuracy": 0.5}  # a batch may lack a metric
    assert sums.samples == 48
    assert WeightedSums().means() == {}


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_parts_merge_to_the_mean_over_all_samples(shares):
    draw = random.Random(shares)
    values = [Fraction(draw.randint(-1000, 1000), 64) for _ in range(101)]  # exact in binary
    parts = {}
    for index in range(shares):
        part, own = WeightedSums(), values[index::shares]
        for start in range(0, len(own), 8):
            batch = own[start : start + 8]
            part.add({"loss": float(sum(batch)) / len(batch)}, len(batch))
        parts[index] = part
    merged = merge_sums(parts)
    assert merged.samples == 101
    assert merged.means()["loss"] == pytest.approx(float(sum(values) / 101), rel=1e-12)


def test_parts_merge_in_the_order_of_trainers():
    parts = {i: WeightedSums({"x": v}, {"x": 1}, 1) for i, v in ((2, -1e16), (0, 1e16), (1, 1.0))}
    assert merge_sums(parts).sums == {"x": (1e16 + 1.0) - 1e16}
    assert parts[0].sums == {"x": 1e16}  # the parts are not modified


def test_a_record_has_its_time_kind_and_step():
    before = time.time()
    record = make_record("train", 7, loss=0.5)
    assert list(record) == ["time", "kind", "step", "loss"]
    assert (record["kind"], record["step"], record["loss"]) == ("train", 7, 0.5)
    assert before <= record["time"] <= time.time()
    assert make_record("log", None)["step"] is None


def test_the_peak_of_memory_is_in_mebibytes():
    assert 10 < peak_rss_mb() < 100_000


def test_a_thread_that_shares_its_core_waits_for_it():
    core = min(os.sched_getaffinity(0))
    spins = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True:\n    pass"
    other = subprocess.Popen([sys.executable, "-c", spins, str(core)], stdout=subprocess.PIPE)

    def compute_next_to_it():
        os.sched_setaffinity(0, {core})  # of this thread
        wait, deadline = CoreWait(), time.monotonic() + 60
        while (wait.share() or 0.0) < 0.2 and time.monotonic() < deadline:
            pass
        return wait.share()

    try:
        assert other.stdout.readline()
        with ThreadPoolExecutor(1, "computes") as pool:
            assert pool.submit(compute_next_to_it).result() >= 0.2
    finally:
        other.kill()
        other.communicate()


def test_a_window_has_a_speed_once_time_has_passed():
    window = RecordWindow(samples_before=8, seconds_before=2.0)
    window.add(StepResult(2, 16, 0.5, (0.1,), seconds=2.0))
    record = window.to_record(0)
    assert (record["seconds"], record["samples_per_second"], record["step_ms"]) == (2.0, None, None)
    window.add(StepResult(3, 24, 0.5, (0.1,), seconds=3.0))
    window.add(StepResult(4, 32, 0.5, (0.1,), seconds=4.0))
    assert (window.to_record(0)["seconds"], window.to_record(0)["samples_per_second"]) == (4.0, 12.0)
    assert window.next_window().seconds_before == 4.0
