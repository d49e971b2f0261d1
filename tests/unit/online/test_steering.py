"""Samplers that learn: what they draw depends on what they observed alone, across a stop at any point."""

import json
import math
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paramserver.config import SimulationsConfig
from paramserver.errors import CheckpointError, TaskError, UnsupportedConfiguration
from paramserver.online.coordinator import SamplerRecord
from paramserver.online.protocol import (
    Header,
    MessageKind,
    SimulationReport,
    TrainerJoined,
    check_secret,
    density_ratio_of,
    start_secret,
)
from paramserver.online.receiver import ReceiveStats
from paramserver.online.sampler import CheckedSampler, make_sampler, replay, sampler_of_run
from paramserver.online.spec import IngestSpec, ReceiverSpec, parse_fields
from paramserver.online.tracker import ManagedSimulations, StartProcess
from paramserver.sources import Stream

RANGES = (("a", 0.0, 1.0), ("b", 100.0, 500.0))
COUNT = 40


def make(**options):
    return make_sampler("importance", RANGES, 7, COUNT, options=options)


def loss_of(parameters):
    """High in one corner."""
    return 1e-3 + parameters[0] ** 8


def trained(sampler, first=0, last=COUNT):
    """Draw and observe in turns; returns the draws."""
    draws = []
    for index in range(first, last):
        draws.append(sampler.draw_with_ratio(index))
        sampler.observe({index: loss_of(draws[-1][0])})
    return draws


def test_the_same_observations_give_the_same_draws_across_a_stop_at_any_point():
    straight = trained(make())
    assert trained(make()) == straight
    for stop in range(COUNT):
        before, after = make(), make()
        assert trained(before, 0, stop) == straight[:stop]
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert trained(after, stop) == straight[stop:]


def test_draws_follow_the_loss_and_stay_in_their_ranges():
    draws = np.array([parameters for parameters, _ in trained(make(power=2), last=400)])
    assert (draws >= [0.0, 100.0]).all()
    assert (draws <= [1.0, 500.0]).all()
    assert (draws[200:, 0] > 0.8).mean() > 0.4  # 0.2 of uniform draws
    other = [make().draw(index) for index in range(5)]
    assert other == [make_sampler("uniform", RANGES, 7, COUNT).draw(index) for index in range(5)]


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_density_of_a_draw_is_that_of_the_mixture_and_its_ratio_is_bounded(share):
    """A histogram of draws from one state has the density that the ratio states, which integrates to one."""
    sampler = make(share=share, sigma=0.15)
    trained(sampler)
    state = sampler.state_dict()
    unit, ratios = [], []
    for index in range(COUNT, COUNT + 1500):
        sampler.load_state_dict(state)
        parameters, ratio = sampler.draw_with_ratio(index)
        unit.append([parameters[0], (parameters[1] - 100.0) / 400.0])
        ratios.append(ratio)
    unit, ratios = np.array(unit), np.array(ratios)
    assert ratios.max() <= 1.0 / share
    assert (ratios == 1.0).all() == (share == 1.0)
    # The mean of uniform over drawn density, over draws, is the integral of the uniform density.
    assert abs(ratios.mean() - 1.0) < 5 * ratios.std() / 1500**0.5 + 1e-12
    # So it is in each part of the ranges.
    for low in (0.0, 0.25, 0.5, 0.75):
        inside = ratios * ((unit[:, 0] >= low) & (unit[:, 0] < low + 0.25))
        assert abs(inside.mean() - 0.25) < 5 * inside.std() / 1500**0.5


def test_only_the_newest_simulations_are_kept():
    sampler = make(window=5)
    trained(sampler)
    assert [index for index, _ in sampler.state_dict()["state"]["points"]] == list(range(COUNT - 5, COUNT))
    before = sampler.state_dict()
    sampler.observe({0: 1e9})
    assert sampler.state_dict()["state"]["scores"] == before["state"]["scores"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"share": 0.0}, r"sampler_args.share \(0.0\) must be a number above 0 and at most 1"),
        ({"share": 1.5}, r"sampler_args.share \(1.5\) must be a number above 0 and at most 1"),
        ({"share": "half"}, r"sampler_args.share \(half\) must be a number above"),
        ({"sigma": float("nan")}, r"sampler_args.sigma \(nan\) must be a number from 0.001 to 10"),
        ({"sigma": 1e17}, r"sampler_args.sigma \(1e\+17\) must be a number from 0.001 to 10"),
        ({"sigma": 1e-17}, r"sampler_args.sigma \(1e-17\) must be a number from 0.001 to 10"),
        ({"power": -1}, r"sampler_args.power \(-1\) must be a number, at least 0"),
        ({"power": True}, r"sampler_args.power \(True\) must be a number, at least 0"),
        ({"window": 0}, r"sampler_args.window \(0\) must be a whole number, at least 1"),
        ({"window": 1.5}, r"sampler_args.window \(1.5\) must be a whole number, at least 1"),
        ({"window": True}, r"sampler_args.window \(True\) must be a whole number, at least 1"),
        ({"bogus": 1}, r"sampler_args \(\{'bogus': 1\}\) must be options of simulations.sampler \(importance\)"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(options, sentence):
    with pytest.raises(UnsupportedConfiguration, match=sentence):
        make(**options)


@pytest.mark.parametrize("sigma", [1e-3, 10])
def test_the_density_is_a_finite_number_at_both_limits_of_sigma(sigma):
    ratios = [ratio for _, ratio in trained(make(sigma=sigma))]
    assert all(0 < ratio <= 2.0 for ratio in ratios)


def test_a_score_is_the_mean_of_the_score_before_and_the_new_ratio():
    sampler = make()
    sampler.draw(0)
    mean, scores = 0.0, []
    for loss in (1.0, 4.0, 2.0):
        sampler.observe({0: loss})
        mean = 0.99 * mean + 0.01 * loss if mean else loss
        scores = [(scores[0] + loss / mean) / 2 if scores else loss / mean]
        assert sampler.state_dict()["state"]["scores"] == [[0, pytest.approx(scores[0])]]


@pytest.mark.parametrize("power", [0, 3, 200, 1e6, 1e308])
@pytest.mark.parametrize("losses", [(1e300, 1e-300), (1e-320, 1.0), (0.0, 1e308), (1.7e308, 1.7e308), (5e-324, 0.0)])
def test_weights_are_finite_and_favour_the_largest_loss_whatever_the_power_and_the_losses(power, losses):
    sampler = make(power=power, sigma=0.05, share=1e-3)
    points = [sampler.draw(index) for index in (0, 1)]
    for _ in range(3):
        sampler.observe(dict(enumerate(losses)))
    draws = [sampler.draw_with_ratio(index) for index in range(2, 60)]
    assert np.isfinite([parameters for parameters, _ in draws]).all()
    assert all(0 < ratio <= 1e3 for _, ratio in draws)
    if power >= 200 and losses[0] != losses[1]:
        hard = points[int(np.argmax(losses))]
        assert np.mean([abs(parameters[0] - hard[0]) < 0.25 for parameters, _ in draws]) > 0.9
    json.dumps(sampler.state_dict(), allow_nan=False)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_left_out(loss):
    sampler = make()
    sampler.draw(3)
    sampler.observe({3: 0.5})
    before = sampler.state_dict()
    sampler.observe({3: loss})
    assert sampler.state_dict() == before


def test_the_mean_of_finite_losses_is_finite():
    stats = ReceiveStats({}, 8, 0)
    stats.report_losses([3, 3, 4], [1.7e308, 1.7e308, 0.5])
    assert stats.make_report([]).losses == {3: 1.7e308, 4: 0.5}


def test_a_loss_below_0_is_refused_with_the_cure():
    sampler = make()
    sampler.draw(3)
    sampler.observe({3: 0.0})
    with pytest.raises(
        TaskError, match=r"^the loss of simulation 3 \(-0.5\) must be at least 0, .*log_sample_loss\("
    ) as e:
        sampler.observe({3: -0.5})
    assert "raised" not in str(e.value)


@pytest.mark.parametrize("options", [{}, {"sigma": 0.2}])
def test_importance_without_parameters_is_refused_by_name(options):
    with pytest.raises(UnsupportedConfiguration, match=r"sampler \(importance\) must have parameters .*add"):
        make_sampler("importance", (), 7, COUNT, options=options)


@pytest.mark.parametrize("parameters", [{}, {"a": [0, 1]}])
def test_importance_is_refused_for_simulations_from_outside(parameters):
    config = SimulationsConfig(sampler="importance", fields={"u": [2]}, parameters=parameters)
    with pytest.raises(UnsupportedConfiguration, match=r"\(importance\) must not learn .* come from outside"):
        sampler_of_run(IngestSpec.from_config(config), 7)


# Samplers of the user.


class Follows:
    """Draws the sum of what it observed."""

    def __init__(self):
        self.sum = 0.0

    def draw(self, index):
        return [self.sum, float(index)]

    def observe(self, simulation, loss):
        self.sum += loss

    def state_dict(self):
        return {"sum": self.sum}

    def load_state_dict(self, state):
        self.sum = state["sum"]


def own(**methods):
    return CheckedSampler(type("Own", (Follows,), methods)(), RANGES, "own.py:Own")


def raises(self, *arguments):
    raise KeyError("on purpose")


def test_a_sampler_that_observes_must_have_a_state():
    class Forgets:
        draw = observe = state_dict = Follows.draw

    with pytest.raises(UnsupportedConfiguration, match=r"own.py:Forgets\) has observe and no load_state_dict, so"):
        CheckedSampler(Forgets(), RANGES, "own.py:Forgets")


@pytest.mark.parametrize(
    ("methods", "call", "sentence"),
    [
        ({"observe": raises}, lambda one: one.observe({3: 0.5}), r"own.py:Own\).observe\(3, 0.5\) raised KeyError"),
        ({"state_dict": raises}, lambda one: one.state_dict(), r"state_dict\(\) raised KeyError"),
        ({"state_dict": lambda self: {"x": object()}}, lambda one: one.state_dict(), "gave what cannot be stored"),
        ({"state_dict": lambda self: {1: 2}}, lambda one: one.state_dict(), "must give lists, dicts with texts"),
        ({"state_dict": lambda self: {"x": math.nan}}, lambda one: one.state_dict(), "and no NaN: "),
        (
            {"density_ratio": lambda self, index: 0.0},
            lambda one: one.draw_with_ratio(0),
            r"density_ratio\(0\) gave 0.0; it must give a finite number above 0",
        ),
        (
            {"density_ratio": lambda self, index: np.array(1.0)},
            lambda one: one.draw_with_ratio(0),
            r"density_ratio\(0\) gave array\(1.\); it must give a finite number above 0",
        ),
    ],
)
def test_what_a_sampler_does_wrong_is_reported_by_name(methods, call, sentence):
    with pytest.raises(TaskError, match=sentence):
        call(own(**methods))


@pytest.mark.parametrize("method", ["draw", "observe"])
def test_a_state_that_cannot_be_stored_is_reported_at_once(method):
    """Not when the first checkpoint is written, by which time all may have been trained."""
    calls = {"draw": lambda one: one.draw_with_ratio(0), "observe": lambda one: one.observe({0: 1.0})}
    seen = []
    sampler = own(state_dict=lambda self: seen.append(1) or {"x": (1, 2)})
    with pytest.raises(TaskError, match=r"state_dict\(\) must give lists, dicts with texts as keys"):
        calls[method](sampler)
    calls[method](sampler)
    assert len(seen) == 1  # it is looked at once, as it may be large


@pytest.mark.parametrize("sigma", [1e-3, 0.1, 10.0])
def test_any_number_of_parameters_has_a_density(sigma):
    ranges = tuple((f"p{i}", 0.0, 1.0) for i in range(1500))
    sampler = make_sampler("importance", ranges, 7, COUNT, options={"share": 0.1, "sigma": sigma})
    for index in range(20):
        _, ratio = sampler.draw_with_ratio(index)
        assert 0 < ratio <= 10 * (1 + 1e-9)
        sampler.observe({index: 1.0 + index})


@pytest.mark.parametrize("ratio", [2, np.float32(2), np.int64(2), Fraction(2)])
def test_a_ratio_is_any_kind_of_number(ratio):
    assert own(density_ratio=lambda self, index: ratio).draw_with_ratio(0) == ([0.0, 0.0], 2.0)


def test_the_state_of_another_sampler_is_refused():
    with pytest.raises(CheckpointError, match=r"sampler \(own.py:Own\) must be that of the checkpoint, importance"):
        own().load_state_dict(make().state_dict())


# In a run.


def started(sampler, state=None, count=6, **options):
    config = SimulationsConfig(function="x.py:f", count=count, at_once=2, steps=2, sampler="importance", **options)
    tracker = ManagedSimulations(config, 1, sampler, None)
    if state is not None:
        tracker.load_state_dict(state)
    tracker.on_trainers_joined([TrainerJoined("a", {}, {})], 0.0)
    return tracker


def starts(tracker):
    return [action for action in tracker.poll(0.0) if isinstance(action, StartProcess)]


@pytest.mark.parametrize("names", [["b", "a"], ["a"], ["a", "b", "c"]])
def test_parameters_that_were_drawn_keep_their_names(names):
    """A resumed run would give a simulation that starts again the values of other parameters."""
    ranges = {"a": [0, 1], "b": [100, 500]}
    state = started(make(), parameters=ranges)
    starts(state)
    with pytest.raises(CheckpointError, match=r"simulations.parameters \(.*\) must be those of .* order \(a, b\), as"):
        started(make(), state.state_dict(), parameters={name: [0, 1] for name in names})
    started(make(), state.state_dict(), parameters={"a": [0, 2], "b": [7, 8]})


def test_a_simulation_is_drawn_when_it_first_starts_and_keeps_its_parameters_and_ratio():
    tracker = started(make())
    first = starts(tracker)
    assert [one.density_ratio for one in first] == [1.0, 1.0]
    tracker.on_report(0, SimulationReport({0: 2}, losses={0: 5.0, 1: 0.1, 99: 3.0}), 0.0)
    tracker.on_exit(0, 0, 0, 0.0)
    (third,) = starts(tracker)
    assert third.density_ratio != 1.0
    tracker.on_exit(2, 0, 1, 0.0)
    again = starts(tracker)  # after what was left of it could have been reported
    resumed = started(make(), tracker.state_dict())
    restarted = {one.simulation: one for one in [*again, *starts(resumed)]}
    assert restarted[2].parameters == third.parameters
    assert restarted[2].density_ratio == third.density_ratio


def ratio_of_one(self, index):
    return 1.0


def test_a_checkpoint_of_a_sampler_without_a_ratio_is_not_continued_with_one():
    tracker = started(own())
    starts(tracker)
    with pytest.raises(CheckpointError, match=r"gives a density_ratio, and the samples .* have no"):
        started(own(density_ratio=ratio_of_one), tracker.state_dict())


def test_a_sampler_that_learns_and_one_that_does_not_do_not_continue_each_other():
    plain, learning = make_sampler("uniform", RANGES, 7, 6), own()
    begun = started(plain)
    starts(begun)
    assert "sampler" not in begun.state_dict()
    sentence = r"\(own.py:Own\) learns, and that of the checkpoint \(uniform\), .* does not; resume with the sampler of"
    with pytest.raises(CheckpointError, match=sentence):
        started(learning, begun.state_dict())
    begun = started(learning)
    starts(begun)
    sentence = r"\(uniform\) does not learn, and that of the checkpoint \(own.py:Own\), .* does; resume with"
    with pytest.raises(CheckpointError, match=sentence):
        started(plain, begun.state_dict())
    # Where nothing was drawn, either may begin.
    assert len(starts(started(own(), started(plain).state_dict()))) == 2
    assert len(starts(started(plain, started(own()).state_dict()))) == 2


def test_a_run_is_replayed_from_its_record():
    lines = []
    sampler = make()
    sampler.record = lambda entry: lines.append(json.dumps(entry))
    straight = trained(sampler, 0, 20)
    resumed = make()
    resumed.load_state_dict(state := sampler.state_dict())
    resumed.record = sampler.record
    lines.append(json.dumps({"state": state}))
    straight += trained(resumed, 20)
    draws = replay(lines, make)
    assert [recorded for recorded, _ in draws] == straight
    assert all(recorded == repeated for recorded, repeated in draws)
    changed = [re.sub(r"observe(.*), 0", r"observe\1, 1", line) for line in lines]
    assert any(recorded != repeated for recorded, repeated in replay(changed, make))


def test_a_report_is_one_line_of_the_record_and_keeps_its_order():
    lines = []
    sampler = own()
    sampler.record = lambda entry: lines.append(json.dumps(entry))
    sampler.observe({9: 0.1, 2: 0.7, 5: 0.2})
    assert lines == ['{"observe": [[9, 0.1], [2, 0.7], [5, 0.2]]}']
    sampler.draw_with_ratio(0)
    ((recorded, repeated),) = replay(lines, own)
    assert recorded == repeated


def test_a_record_is_replayed_by_an_object_of_the_class_too():
    """Also that of a run which was resumed."""
    lines = []
    sampler = own()
    sampler.record = lambda entry: lines.append(json.dumps(entry))
    sampler.draw_with_ratio(0)
    lines.append(json.dumps({"state": sampler.state_dict()}))
    sampler.draw_with_ratio(1)
    draws = replay(lines, lambda: own()._sampler)
    assert [recorded == repeated for recorded, repeated in draws] == [True, True]


@pytest.mark.parametrize("torn", ["draw", "observe", "state"])
def test_a_record_with_a_line_that_a_kill_left_incomplete_is_continued_and_replayed(tmp_path, torn):
    file = tmp_path / "sampler.jsonl"

    def begun(state):
        kept, sampler = SamplerRecord(file), own()
        kept.begin(state)
        if state is not None:
            sampler.load_state_dict(state)
        sampler.record = kept.append
        return sampler

    first = begun(None)
    straight = trained(first, 0, 5)
    state = first.state_dict()
    with file.open("a") as opened:
        opened.write(json.dumps({torn: [[5, 0.25]]})[:-4])
    straight += trained(begun(state), 5, 10)
    lines = file.read_text().splitlines()
    assert len(lines) == 22  # 10 draws, 10 reports and 2 starts
    draws = replay(lines, own)
    assert [recorded for recorded, _ in draws] == straight
    assert all(recorded == repeated for recorded, repeated in draws)


def test_a_record_that_cannot_be_written_ends_with_one_warning(caplog):
    kept = SamplerRecord(Path("/dev/full"))
    kept.begin(None)
    sampler = own()
    sampler.record = kept.append
    assert len(trained(sampler, 0, 3)) == 3
    (warning,) = [entry.getMessage() for entry in caplog.records]
    assert "/dev/full cannot be written" in warning
    assert "the run continues without it" in warning


def test_a_trainer_reports_losses_only_if_the_sampler_learns():
    reported = []
    for learns in (False, True):
        source = Stream()
        source._spec = ReceiverSpec("tcp://127.0.0.1:1", b"", None, 0, 1, learns=learns)
        source._receiver = SimpleNamespace(stats=SimpleNamespace(report_losses=lambda *losses: reported.append(losses)))
        assert source.needs_losses == learns
        source.report_losses([3], [0.5])
    assert reported == [([3], [0.5])]


def test_the_secret_of_a_start_carries_the_ratio_and_nobody_can_change_it():
    header = Header(MessageKind.OPEN, 3, attempt=1)
    secret = start_secret(b"token", 3, 1, 1.75).encode()
    assert check_secret(b"token", header, [b"", secret]) is None
    assert density_ratio_of(secret) == 1.75
    plain = start_secret(b"token", 3, 1).encode()
    assert check_secret(b"token", header, [b"", plain]) is None
    assert density_ratio_of(plain) is None
    for wrong in (secret.replace(b"1.75", b"0.75"), secret[:-5], plain + b" 2.0", b"", b" 2.0"):
        assert "must be opened with the secret" in check_secret(b"token", header, [b"", wrong])


def test_no_field_is_called_as_the_ratio():
    with pytest.raises(UnsupportedConfiguration, match=r"fields.density_ratio must not be one of .*density_ratio"):
        parse_fields({"density_ratio": [2]})
