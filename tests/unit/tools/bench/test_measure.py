"""From steps to figures: the window that all trainers share, and what follows from it."""

import itertools
import json
from types import SimpleNamespace

import pytest
from launching import write_config

from paramserver.config import config_from_mapping
from paramserver.errors import TrainingError, UnsupportedConfiguration
from paramserver.metrics.records import PHASES
from paramserver.tools.bench.cases import RequestedCases, make_cases, require_first_reached, target_for
from paramserver.tools.bench.measure import (
    KernelSampler,
    MeasuredWindow,
    _wire_bytes,
    measured_window,
    run_config,
    step_figures,
)
from paramserver.tools.bench.step_stamps import COLUMNS, StepStamp, StepStamps, read_stamps, server_pids
from paramserver.tools.report.from_runs import learning_curves
from paramserver.tools.report.results import Target
from paramserver.tools.report.statistics import interpolated

PHASE_S = dict.fromkeys(COLUMNS, 0.0)


def trainer(durations, begin=0.0, index=0, samples=32, gaps=None):
    """One whose steps follow each other, with ``gaps`` (seconds by number of the step) before some."""
    made, end = StepStamps(index, 100 + index, 400), begin
    for number, seconds in enumerate(durations):
        end += seconds + (gaps or {}).get(number, 0.0)
        made.add(
            end, seconds, samples, 10, {**PHASE_S, "forward": 0.75 * seconds, "push": 0.25 * seconds, "hidden": 9.0}
        )
    return made


def test_the_warm_up_ends_with_a_step_and_not_before_the_third():
    assert measured_window([trainer([0.5] * 10)], 1.2) == MeasuredWindow(1.5, 5.0)
    assert measured_window([trainer([2.0] * 5)], 1.0) == MeasuredWindow(6.0, 10.0)


def test_a_round_of_local_steps_is_a_warm_up():
    assert measured_window([trainer([2.0] * 5)], 1.0, warm_steps=1) == MeasuredWindow(2.0, 10.0)
    with pytest.raises(TrainingError, match=r"1 step no trainer may be .* of up to 8 s they made 1 in all"):
        measured_window([trainer([8.0])], 1.0, warm_steps=1)


def test_all_trainers_train_in_the_window():
    late, early = trainer([1.0] * 10, begin=3.0), trainer([1.0] * 8, index=1)
    assert measured_window([late, early], 1.0) == MeasuredWindow(6.0, 8.0)


@pytest.mark.parametrize("durations", [[], [1.0], [1.0] * 3, [0.1] * 9])
def test_too_few_steps_are_refused_with_their_number(durations):
    with pytest.raises(TrainingError, match=rf"made {len(durations)}, 20 in all; raise --seconds"):
        measured_window([trainer(durations), trainer([1.0] * 20, index=1)], 1.0)


def test_a_window_in_which_one_trainer_is_in_the_middle_of_a_step_is_refused():
    with pytest.raises(TrainingError, match="without a step"):
        measured_window([trainer([0.5] * 9), trainer([1.2] * 4, index=1)], 1.0)


def test_trainers_in_step_make_their_samples_in_their_time():
    both = [trainer([0.125] * 40, index=i) for i in range(2)]
    found = step_figures(both, measured_window(both, 1.0), updates=0.5, processes=3)
    assert (found["steps"], found["samples"]) == (32, 2 * 32 * 32)
    assert found["seconds"] == pytest.approx(4.0)
    assert found["samples_per_second"] == pytest.approx(512)
    assert found["per_trainer"] == pytest.approx((256, 256))
    assert found["per_process"] == pytest.approx(512 / 3)
    assert found["step_ms"]["mean"] == pytest.approx(125)
    assert sum(found["step_bins"].values()) == 64
    assert found["wire_bytes_per_step"] == 10


def test_a_slow_trainer_counts_by_the_part_of_its_steps_that_lies_inside():
    fast, slow = trainer([0.1] * 100), trainer([0.73] * 14, index=1)
    window = measured_window([fast, slow], 1.0)
    found = step_figures([fast, slow], window)
    assert found["per_trainer"] == pytest.approx((320, 32 / 0.73))
    assert found["samples_per_second"] == pytest.approx(320 + 32 / 0.73)
    assert found["samples"] == round(found["samples_per_second"] * found["seconds"])


def test_time_between_steps_is_not_training():
    one = trainer([0.125] * 40, gaps={20: 5.0})
    found = step_figures([one], measured_window([one], 1.0))
    assert found["seconds"] == pytest.approx(4.0)
    assert found["samples_per_second"] == pytest.approx(256)


def test_samples_that_were_not_applied_do_not_count():
    both = [trainer([0.125] * 40, index=i) for i in range(2)]
    assert step_figures(both, measured_window(both, 1.0), applied=0.5)["samples_per_second"] == pytest.approx(256)


def test_phases_sum_to_the_step_without_the_hidden_one():
    one = trainer([0.1, 0.2, 0.3] * 10)
    found = step_figures([one], measured_window([one], 1.0))
    assert sum(found["phases_ms"][name] for name in PHASES) == pytest.approx(found["step_ms"]["mean"])
    assert found["phases_ms"]["hidden"] == pytest.approx(9000)


def test_stamps_are_read_as_they_were_written(tmp_path):
    for index in range(2):
        trainer([0.1, 0.2], index=index).write(tmp_path)
    found = read_stamps(tmp_path, 2)
    assert found == [trainer([0.1, 0.2], index=index) for index in range(2)]
    assert isinstance(found[0].steps[0], StepStamp)
    (tmp_path / "process-7").touch()
    (tmp_path / "process-100").touch()
    assert server_pids(tmp_path, found) == [7]
    with pytest.raises(TrainingError, match="trainer 2 left no record"):
        read_stamps(tmp_path, 3)


# CPU time.


def test_values_between_samples_lie_on_the_line():
    samples = [(1.0, 10.0), (2.0, 20.0), (4.0, 20.0)]
    assert [interpolated(samples, t) for t in (0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 9.0)] == [10, 10, 15, 20, 20, 20, 20]


def test_cpu_time_is_that_of_processes_that_signed_in(tmp_path):
    import os
    import time

    (tmp_path / f"process-{os.getpid()}").touch()
    (tmp_path / f"process-{2**22 + 1}").touch()  # above the largest id that the kernel gives
    kernel = KernelSampler([tmp_path], None, 0)
    kernel.sample()
    began, used_before = time.perf_counter(), time.process_time()
    while time.process_time() < used_before + 0.3:
        sum(range(1000))
    kernel.sample()
    window = MeasuredWindow(began, time.perf_counter())
    assert kernel.used_s([os.getpid()], window) == pytest.approx(0.3, abs=0.06)
    assert kernel.used_s([os.getpid()] * 2, window) == 2 * kernel.used_s([os.getpid()], window)
    assert kernel.used_s([os.getpid(), 2**22 + 1], window) is None
    assert kernel.used_s([], window) is None
    assert kernel.moved_bytes(window) is None


# The value to be reached.


def config(training=None, **sections):
    return config_from_mapping({"task": "a:B", "training": {"max_steps": 1, **(training or {})}, **sections})


@pytest.mark.parametrize(
    ("name", "best", "at_most"),
    [
        ("accuracy", None, False),
        ("val_loss", None, True),
        ("score", {"metric": "score", "mode": "min"}, True),
        ("loss", {"metric": "loss", "mode": "max"}, False),
        ("loss", {"metric": "other", "mode": "max"}, True),
    ],
)
def test_the_config_decides_whether_a_target_is_a_minimum_or_a_maximum(name, best, at_most):
    goal = target_for(f"{name}=0.5", config(checkpoint={"best": best}) if best else config())
    assert goal == Target(name, 0.5, at_most)


def test_a_goal_needs_validations_on_the_way():
    with pytest.raises(UnsupportedConfiguration, match=r"training.validate_every \(0\) must be above 0"):
        target_for("accuracy=0.5", config(training={"validate_every": 0}))


def test_a_target_without_such_a_metric_is_refused_with_the_known_metrics():
    points = [(320, 0.5, {"accuracy": 0.5}), (960, 1.5, {"accuracy": 0.96}), (1280, 2.0, {"accuracy": 0.99})]
    assert require_first_reached(points, Target("accuracy", 0.95, at_most=False)) == (960, 1.5)
    assert require_first_reached(points, Target("accuracy", 0.995, at_most=False)) is None
    with pytest.raises(TrainingError, match="--target acc: validation_step gives accuracy"):
        require_first_reached(points, Target("acc", 0.9, at_most=False))
    with pytest.raises(TrainingError, match="gives nothing"):
        require_first_reached([], Target("acc", 0.9, at_most=False))


def test_what_was_learned_has_the_samples_that_were_applied():
    train = [{"kind": "train", "step": 10 * i, "samples": 640 * i, "seconds": float(i), "loss": 1 / i} for i in (1, 2)]
    valid = [
        {"kind": "validation", "step": step, "samples": 99, "seconds": step / 10, "values": {"accuracy": 0.5}}
        for step in (5, 15, 20)
    ]
    found = learning_curves([*train, {"kind": "note", "step": 0}, *valid], {"steps": 20, "samples": 1280})
    assert found["loss"] == [[640, 1.0, 1.0], [1280, 2.0, 0.5]]
    assert [point[:2] for point in found["validation"]] == [[320, 0.5], [960, 1.5], [1280, 2.0]]
    assert learning_curves([*train, *valid], {}) == found
    assert [point[0] for point in learning_curves(valid, {})["validation"]] == [0, 0, 0]


def test_stamps_are_plain_json(tmp_path):
    trainer(itertools.repeat(0.1, 3)).write(tmp_path)
    assert len(json.loads((tmp_path / "steps-0.json").read_text())["steps"]) == 3


class Counted:
    """A fake of hosts, whose interfaces return these counters at each sample."""

    def __init__(self, *each):
        self.left = [iter(moved) for moved in each]

    def moved_bytes(self, number):
        return next(self.left[number])


def test_bytes_of_a_group_are_counted_by_the_kernel_or_computed(tmp_path, monkeypatch):
    ddp = next(
        c for c in make_cases(RequestedCases(write_config(tmp_path), modes="ddp", trainers="2")) if c.mode.name == "ddp"
    )
    trainers = [trainer([1.0] * 5, index=i) for i in range(2)]
    computed = _wire_bytes(ddp, trainers, MeasuredWindow(1.0, 4.0), KernelSampler([], None, 2))
    assert computed == {"wire_bytes_per_step": 2 * 400, "wire_bytes_source": "computed, ring all-reduce"}
    moments = iter([0.5, 4.5])
    monkeypatch.setattr("paramserver.tools.bench.measure.time.perf_counter", lambda: next(moments))
    kernel = KernelSampler([], Counted([0, 4000], [100, 4100]), 2)
    kernel.sample()
    kernel.sample()
    counted = _wire_bytes(ddp, trainers, MeasuredWindow(1.0, 4.0), kernel)  # 2 x 3 steps in 3 of 4 seconds
    assert counted == {"wire_bytes_per_step": pytest.approx(1000), "wire_bytes_source": "counted by the kernel"}


def test_nothing_of_the_config_disturbs_a_measurement(tmp_path):
    config = {
        "task": "tasks:ReferenceTask",
        "checkpoint": {"every": 5, "memory_every": 2, "best": {"metric": "loss", "mode": "min"}},
        "logging": {"prometheus_port": 9100, "tensorboard": True},
        "publish": {"port": 5556},
        "profile": {"start_step": 3},
        "training": {"max_steps": 9},
    }
    file = write_config(tmp_path, **config)
    (case, *_) = make_cases(RequestedCases(file, modes="rpc", trainers="2"))
    method = SimpleNamespace(folders=(tmp_path,), warm_s=1.0, seconds=2.0, target=None)
    measured = run_config(case, 0, method, tmp_path / "out", 0)
    assert (measured.checkpoint.every, measured.checkpoint.memory_every, measured.checkpoint.best) == (0, None, None)
    assert (measured.logging.prometheus_port, measured.logging.tensorboard) == (None, False)
    assert (measured.publish.port, measured.profile) == (0, None)
