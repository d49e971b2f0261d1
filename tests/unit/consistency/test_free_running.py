"""Consistency without lockstep: random runs against what must always hold, and single regressions."""

import dataclasses
from collections import Counter
from functools import cache
from random import Random

import pytest
from consistency_model import KINDS, SimulatedRun
from hypothesis import given, settings, strategies as st

from paramserver.config import CheckpointConfig, Config, ServerConfig, TrainingConfig
from paramserver.consistency import (
    Announcement,
    Async,
    Bounded,
    Decision,
    Readiness,
    RunTerms,
    Stop,
    Sync,
    Update,
    Verdict,
    make_consistency,
)
from paramserver.consistency.factory import CLASSES
from paramserver.consistency.free_running import MAX_RETAINED_VERSIONS, BackupSync
from paramserver.limits import Limits

READY, WAITING, DRAINED = (Announcement(readiness) for readiness in Readiness)
SIGNAL = Announcement(Readiness.READY, stop=Stop.SIGNAL, reason="signal SIGTERM")
NONE = Limits()
SEEDS = range(60)


@cache
def run_of(kind: str, seed: int, churn: float = 0.0) -> SimulatedRun:
    """A run to its end, checked at every event, and on to a second end where a signal interrupted the first."""
    run = SimulatedRun(Random(seed), kind, churn).run()
    run.was_interrupted = run.end.interrupted
    if run.was_interrupted:
        run.resume()
        run.run()
    return run


def runs_of(kind: str) -> list[SimulatedRun]:
    return [run_of(kind, seed) for seed in SEEDS]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", range(0, len(SEEDS), 20))
def test_whatever_happens_the_run_ends_as_it_must(kind, first):
    for seed in SEEDS[first : first + 20]:
        assert run_of(kind, seed).end.verdict is Verdict.END


@given(st.randoms(use_true_random=False), st.sampled_from(KINDS))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_hypothesis_finds_no_run_that_breaks_a_rule(random, kind):
    SimulatedRun(random, kind).run()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("churn", [0.02, 0.1, 0.3])
def test_whatever_happens_while_trainers_leave_and_join_the_run_ends_as_it_must(kind, churn):
    runs = [run_of(kind, seed, churn) for seed in range(90 if churn < 0.1 else 25)]
    left = sum((run.left for run in runs), Counter())
    states = {"boundary", "announced", "busy", "drained", "validating", "barrier"}
    states |= {"pushed", "held"} if kind == "backup" else set()
    assert states <= left.keys(), "a trainer left in each of these states"
    assert any(run.forgotten for run in runs)
    assert any(run.for_others for run in runs), "the share of a lost trainer was validated by another"
    assert any(len(run.trainers) > 6 for run in runs), "one joined beyond the first world"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_skipped_the_run_ends_as_it_must(kind):
    """Limits, barriers and validations hold; what is skipped is in no version."""
    runs = [SimulatedRun(Random(seed), kind, nonfinite=0.2).run() for seed in range(40)]
    assert all(run.end.verdict is Verdict.END for run in runs)
    assert sum(run.skipped for run in runs) > 100


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_runs_reach_what_they_are_to_test(kind):
    runs = runs_of(kind)
    reasons = " ".join(run.end.reason for run in runs)
    for reason in ("max_steps", "max_samples", "no more data", "all data was served", "LIMIT requested"):
        assert reason in reasons
    assert sum(run.was_interrupted for run in runs) > 2
    least = 5 if kind == "buffered" else 10  # several gradients make a version, so there are fewer
    assert sum(len(run.barriers) > 2 for run in runs) > least
    assert sum(len(run.reported) > 2 for run in runs) > least
    assert kind in ("async", "buffered") or sum(run.passed > 0 for run in runs) > 5
    assert kind != "buffered" or sum(run.shorter > 0 for run in runs) > least


@pytest.mark.parametrize("bound", range(4))
def test_the_distance_of_clocks_reaches_the_bound_and_never_exceeds_it(bound):
    assert max(run.distance for run in runs_of("bounded") if run.bound == bound) == bound


@pytest.mark.parametrize("bound", range(3))
def test_a_trainer_starts_as_many_clocks_ahead_as_the_bound_and_then_waits_for_the_slowest(bound):
    rules = Bounded(RunTerms(2, NONE), bound)
    rules.announce(0, READY)
    for step in range(bound + 1):
        assert rules.pop_decisions()[0].verdict is Verdict.GO
        rules.push(0, step, 1)
        assert rules.next_update().trainers == (0,)
        rules.announce(0, READY)
    assert rules.pop_decisions() == {}
    rules.announce(1, READY)
    assert list(rules.pop_decisions()) == [1]
    rules.push(1, bound + 1, 1)
    assert rules.next_update().trainers == (1,)
    assert rules.pop_decisions()[0].verdict is Verdict.GO


def test_staleness_is_within_its_limit_and_beyond_that_of_a_smaller_bound():
    beyond = 0
    for run in runs_of("bounded"):
        others, worst = len(run.trainers) - 1, max(run.staleness, default=0)
        assert worst <= others * (2 * run.bound + 1)
        beyond += worst > others
    assert beyond > 2
    assert any(max(run.staleness, default=0) > 5 * (len(run.trainers) - 1) for run in runs_of("async"))


def test_backups_are_never_stale_and_some_come_too_late():
    assert {value for run in runs_of("backup") for value in run.staleness} == {0}
    assert sum(run.dropped.total() for run in runs_of("backup")) > 25


@pytest.mark.parametrize("kind", ["async", "bounded"])
def test_as_many_versions_as_allowed_are_retained_and_no_more(kind):
    kept = [run.most_retained for run in runs_of(kind)]
    assert max(kept) == MAX_RETAINED_VERSIONS
    assert sum(n == MAX_RETAINED_VERSIONS for n in kept) > 10


# Single situations.


def terms(trainers: int, limits: Limits = NONE, uneven_inputs: str = "join", **every) -> RunTerms:
    return RunTerms(trainers, limits, uneven_inputs, 1, **every)


def announce(rules, index: int, announcement: Announcement = READY) -> dict[int, Verdict]:
    """Return the verdicts that follow from an announcement and the updates that it completes."""
    if index in getattr(rules, "_validating", ()):  # a trainer reports what it validated before it announces again
        rules.share_reported(index)
    rules.announce(index, announcement)
    while rules.next_update() is not None:
        pass
    return {i: decision.verdict for i, decision in rules.pop_decisions().items()}


def push(rules, index: int, version: int, samples: int = 1) -> Update | None:
    assert rules.rejection_reason(index, version) is None
    rules.push(index, version, samples)
    update = rules.next_update()
    assert rules.next_update() is None
    return update


def take_step(rules, index: int) -> Update | None:
    """One step of one trainer."""
    assert announce(rules, index) == {index: Verdict.GO}
    return push(rules, index, rules.step)


GO = Verdict.GO


@pytest.mark.parametrize(("trainers", "bound"), [(2, 0), (2, 3), (4, 2)])
def test_the_worst_staleness_of_the_bounded_rule_is_reached(trainers, bound):
    rules = Bounded(terms(trainers), bound)
    for _ in range(bound):
        take_step(rules, 0)
    assert announce(rules, 0) == {0: GO}  # as far ahead as it may be
    version = rules.step
    for index in range(1, trainers):
        assert announce(rules, index) == {index: GO}
    for _ in range(2 * bound + 1):
        for index in range(1, trainers):
            push(rules, index, rules._permits[index].version)
            announce(rules, index)
    assert not rules._permits.keys() - {0}  # no other may start now
    assert push(rules, 0, version).staleness == ((trainers - 1) * (2 * bound + 1),)
    assert set(rules.pop_decisions()) == set(range(1, trainers))


def test_a_drained_trainer_delays_no_other_while_it_validates_or_waits_at_a_barrier():
    rules = Bounded(terms(2, barrier_every=(2,), validate_every=1), bound=0)
    assert announce(rules, 0, DRAINED) == {}
    take_step(rules, 1)
    assert rules.pop_decisions() == {0: Decision(Verdict.VALIDATE, (), 1, 1, share=0)}
    assert announce(rules, 1) == {1: Verdict.VALIDATE}
    take_step(rules, 1)  # trainer 0 still validates
    assert [announce(rules, i, w) for i, w in ((1, READY), (0, DRAINED))] == [
        {1: Verdict.VALIDATE},
        {0: Verdict.VALIDATE},
    ]
    assert announce(rules, 1) == {}
    assert announce(rules, 0, DRAINED) == {0: Verdict.BARRIER, 1: Verdict.BARRIER}
    assert announce(rules, 1) == {1: GO}  # trainer 0 has not announced again


@pytest.mark.parametrize("rules", [Async(terms(2, validate_every=2)), Bounded(terms(2, validate_every=2), 9)])
def test_a_slow_validation_delays_the_others_before_the_version_that_would_be_retained_next(rules):
    take_step(rules, 0)
    take_step(rules, 0)
    assert [announce(rules, 0), announce(rules, 1)] == [{0: Verdict.VALIDATE}, {1: Verdict.VALIDATE}]  # 1 is slow
    take_step(rules, 0)
    take_step(rules, 0)
    assert announce(rules, 0) == {0: Verdict.VALIDATE}
    take_step(rules, 0)
    assert announce(rules, 0) == {}  # 2 and 4 are retained, and this push would make 6
    assert announce(rules, 1) == {0: GO, 1: Verdict.VALIDATE}
    push(rules, 0, 5)
    assert announce(rules, 0) == {0: Verdict.VALIDATE}
    assert announce(rules, 1) == {1: Verdict.VALIDATE}


def test_a_small_batch_may_come_last_and_is_applied_all_the_same():
    rules = Async(terms(3, Limits(max_samples=9)))
    assert announce(rules, 0, Announcement(Readiness.READY, batches=1)) == {0: GO}
    assert announce(rules, 1, Announcement(Readiness.READY, batches=3)) == {1: GO}
    assert announce(rules, 2, Announcement(Readiness.READY, batches=6)) == {}  # 3 + 6 would leave no room for the 1
    push(rules, 0, 0, 1)
    assert rules.pop_decisions().keys() == {2}  # now the 3 may come last
    push(rules, 2, 1, 6)
    push(rules, 1, 0, 3)
    assert rules.samples == 10


def test_a_run_that_reaches_its_limit_is_complete_despite_a_signal():
    rules = Async(terms(2, Limits(max_steps=1)))
    assert announce(rules, 0) == {0: GO}
    assert announce(rules, 1, SIGNAL) == {}
    push(rules, 0, 0)
    rules.announce(0, SIGNAL)
    end = Decision(Verdict.END, (), 1, 1, "training.max_steps (1) reached")
    assert rules.pop_decisions() == {0: end, 1: end}


def test_what_is_due_is_done_before_a_signal_ends_a_run_and_it_outweighs_a_requested_limit():
    rules = Async(terms(2, validate_every=1, barrier_every=(1,)))
    take_step(rules, 0)
    assert announce(rules, 1, Announcement(Readiness.READY, stop=Stop.LIMIT, reason="time")) == {1: Verdict.VALIDATE}
    assert announce(rules, 1, SIGNAL) == {}
    assert announce(rules, 0) == {0: Verdict.VALIDATE}
    assert announce(rules, 0) == {0: Verdict.BARRIER, 1: Verdict.BARRIER}
    assert announce(rules, 0) == {}
    rules.announce(1, READY)
    end = Decision(Verdict.END, (), 1, 1, "signal SIGTERM", interrupted=True)
    assert rules.pop_decisions() == {0: end, 1: end}


def test_a_resumed_run_has_its_clocks_again():
    rules = Bounded(terms(2), bound=1)
    for _ in range(2):
        take_step(rules, 0)
    resumed = Bounded(terms(2), 1, step=2, samples=2)
    resumed.load_state_dict(rules.state_dict())
    assert resumed.clocks == {0: 2, 1: 0}
    assert announce(resumed, 0) == {}
    take_step(resumed, 1)
    assert resumed.pop_decisions().keys() == {0}


@pytest.mark.parametrize(
    ("state", "clocks"),
    [
        ({}, {0: 0, 1: 0, 2: 0}),  # of another rule
        ({"clocks": [5, 3, 4, 1]}, {0: 5, 1: 3, 2: 4}),  # of more trainers
        ({"clocks": [5, 3]}, {0: 5, 1: 3, 2: 3}),  # of fewer
        ({"clocks": [5, None, 4]}, {0: 5, 1: 4, 2: 4}),  # made while one was lost
    ],
)
def test_a_trainer_without_a_saved_clock_starts_with_the_slowest(state, clocks):
    rules = Bounded(terms(3), 1, step=9)
    rules.load_state_dict(state)
    assert rules.clocks == clocks


def test_the_clock_of_a_lost_trainer_is_not_saved():
    rules = Bounded(terms(3), 1)
    take_step(rules, 0)
    rules.remove(1)
    assert rules.state_dict() == {"clocks": [1, None, 0]}
    rules.remove(2)
    assert rules.state_dict() == {"clocks": [1]}


def test_a_run_that_resumes_at_a_barrier_does_not_repeat_it():
    rules = Async(terms(1, barrier_every=(4,)), step=4, samples=4)
    for _ in range(4):
        take_step(rules, 0)
    assert announce(rules, 0) == {0: Verdict.BARRIER}
    assert announce(rules, 0) == {0: GO}


# Trainers that leave and join.


def free(rules, index: int, verdict: Verdict = GO) -> None:
    assert announce(rules, index) == {index: verdict}


@pytest.mark.parametrize("kind", [Async, lambda terms: Bounded(terms, 1)])
def test_a_push_that_was_counted_is_applied_after_its_trainer_left(kind):
    rules = kind(terms(2))
    free(rules, 0)
    assert rules.push(0, 0, 7)
    rules.remove(0)
    rules.join(0)
    assert rules.next_update() == Update((0,), (0,), 0)
    assert (rules.step, rules.samples, rules.next_update()) == (1, 7, None)
    free(rules, 0)


@pytest.mark.parametrize("announced", [False, True])
def test_the_slowest_trainer_holds_no_other_up_after_it_left(announced):
    rules = Bounded(terms(2, barrier_every=(9,)), bound=0)
    take_step(rules, 0)
    assert announce(rules, 0) == {}
    if announced:
        free(rules, 1)
    rules.remove(1)
    assert {i: d.verdict for i, d in rules.pop_decisions().items()} == {0: GO}
    assert "outside a step" in rules.rejection_reason(1, 1)


def test_a_trainer_that_joins_starts_with_the_slowest_whose_data_has_not_ended():
    rules = Bounded(terms(3), bound=1)
    announce(rules, 2, DRAINED)  # at clock 0
    for index in (0, 1, 0, 1, 0):
        take_step(rules, index)
    rules.join(5)
    assert rules.clocks == {0: 3, 1: 2, 2: 0, 5: 2}
    assert rules.dropped[5] == 0
    for index in (0, 1, 5):
        free(rules, index)


@pytest.mark.parametrize("limits", [Limits(max_steps=1), Limits(max_samples=1)])
def test_the_permit_of_a_trainer_that_left_is_free_again(limits):
    rules = Async(terms(2, limits))
    free(rules, 0)
    assert announce(rules, 1) == {}
    rules.remove(0)
    assert {i: d.verdict for i, d in rules.pop_decisions().items()} == {1: GO}
    push(rules, 1, 0)
    assert (rules.step, rules.samples) == (1, 1)
    assert announce(rules, 1) == {1: Verdict.END}


@pytest.mark.parametrize("state", ["silent", "waiting", "drained", "to validate", "validating"])
def test_a_barrier_does_not_wait_for_a_trainer_that_left(state):
    validates = state in ("to validate", "validating")
    rules = Async(terms(3, barrier_every=(1,), validate_every=int(validates)))
    others = dict.fromkeys((0, 1), Decision(Verdict.BARRIER, (), 1, 1))
    if state == "waiting":
        assert announce(rules, 2, WAITING) == {2: Verdict.WAIT}
    if state == "drained":
        assert announce(rules, 2, DRAINED) == {}
    take_step(rules, 0)
    for index in range(3 if state == "validating" else 2 if validates else 0):
        free(rules, index, Verdict.VALIDATE)
    if state == "drained":
        rules.remove(2)
    assert announce(rules, 0) == {}
    if state == "drained":
        assert announce(rules, 1) == dict.fromkeys((0, 1), Verdict.BARRIER)
    else:
        assert announce(rules, 1) == {}
        rules.remove(2)
        if validates:  # its share is that of another now
            assert rules.pop_decisions() == {0: Decision(Verdict.VALIDATE, (), 1, 1, share=2)}
            rules.share_reported(0)
            rules.announce(0, READY)
        assert rules.pop_decisions() == others
    assert rules.participants == {0, 1}
    rules.remove(1)
    assert rules.participants == {0}


def test_the_last_step_before_a_barrier_is_that_of_another_if_its_trainer_left():
    rules = Async(terms(2, barrier_every=(2,)))
    free(rules, 1)
    take_step(rules, 0)
    assert announce(rules, 0) == {}
    rules.remove(1)
    assert {i: d.verdict for i, d in rules.pop_decisions().items()} == {0: GO}
    push(rules, 0, 1)
    free(rules, 0, Verdict.BARRIER)


def test_a_trainer_that_joins_during_a_barrier_makes_no_version_before_it_is_over():
    rules = Async(terms(2, barrier_every=(1,)))
    take_step(rules, 0)
    assert announce(rules, 0) == {}
    assert announce(rules, 1) == dict.fromkeys((0, 1), Verdict.BARRIER)
    rules.join(2)
    assert announce(rules, 2) == {}
    assert announce(rules, 1, WAITING) == {1: Verdict.WAIT, 2: GO}


def test_a_barrier_that_all_leave_is_that_of_the_trainers_that_join():
    rules = Async(terms(1, barrier_every=(1,)))
    take_step(rules, 0)
    free(rules, 0, Verdict.BARRIER)
    rules.remove(0)
    assert rules.pop_decisions() == {}
    rules.join(0)
    free(rules, 0, Verdict.BARRIER)
    free(rules, 0)


def test_a_barrier_that_is_due_waits_for_the_first_trainer_that_joins():
    rules = Async(terms(1, barrier_every=(1,)))
    take_step(rules, 0)
    rules.remove(0)
    assert rules.pop_decisions() == {}
    rules.join(0)
    free(rules, 0, Verdict.BARRIER)
    free(rules, 0)


def share_of(rules, index: int) -> tuple[int, int]:
    """Let a trainer announce and be told to validate; return the version and the share."""
    if index in rules._validating:
        rules.share_reported(index)
    rules.announce(index, READY)
    decision = rules.pop_decisions()[index]
    assert decision.verdict is Verdict.VALIDATE
    return decision.step, decision.share


def test_the_share_of_a_trainer_that_left_is_validated_by_one_that_was_there():
    rules = Async(terms(3, validate_every=1))
    take_step(rules, 0)
    rules.remove(2)
    rules.join(2)
    free(rules, 2)  # it has nothing to validate
    assert [share_of(rules, i) for i in (0, 1, 0)] == [(1, 0), (1, 1), (1, 2)]
    assert not rules.is_validated(1)
    rules.share_reported(1)
    rules.remove(1)  # what it has reported counts
    assert not rules.is_validated(1)
    rules.remove(0)  # while it validates the share of 2, which is the trainer's own again
    assert not rules.is_validated(1)
    push(rules, 2, 1)
    assert share_of(rules, 2) == (1, 2)
    rules.share_reported(2)
    assert (rules.is_validated(1), rules.is_validated(2)) == (True, False)
    assert share_of(rules, 2) == (2, 0)


def test_a_validation_without_any_trainer_is_made_by_the_first_that_joins():
    rules = Async(terms(2, validate_every=1))
    take_step(rules, 0)
    assert share_of(rules, 0) == (1, 0)
    rules.remove(1)
    rules.remove(0)
    rules.join(0)
    assert not rules.is_validated(1)
    assert [share_of(rules, 0), share_of(rules, 0)] == [(1, 0), (1, 1)]
    free(rules, 0)
    assert rules.is_validated(1)


def test_a_validation_under_way_delays_no_other_after_its_trainer_left():
    rules = Async(terms(2, validate_every=1))
    take_step(rules, 0)
    free(rules, 0, Verdict.VALIDATE)
    take_step(rules, 0)
    free(rules, 0, Verdict.VALIDATE)
    assert announce(rules, 0) == {}  # 1 and 2 are retained for trainer 1
    rules.remove(1)
    assert rules.pop_decisions() == {0: Decision(Verdict.VALIDATE, (), 1, 2, share=1)}
    assert share_of(rules, 0) == (2, 1)
    free(rules, 0)


@pytest.mark.parametrize("replaced", [True, False])
def test_the_data_of_a_lost_trainer_is_waited_for_until_it_is_forgotten(replaced):
    rules = Async(terms(2))
    rules.remove(1)
    assert announce(rules, 0, DRAINED) == {}
    if replaced:
        rules.join(1)
        take_step(rules, 1)
        assert announce(rules, 1, DRAINED) == dict.fromkeys((0, 1), Verdict.END)
    else:
        rules.give_up(1)
        assert {i: (d.verdict, d.reason) for i, d in rules.pop_decisions().items()} == {
            0: (Verdict.END, "all data was served")
        }


def test_the_end_does_not_wait_for_a_trainer_that_left_after_its_data_had_ended():
    rules = Async(terms(2))
    announce(rules, 1, DRAINED)
    rules.remove(1)
    assert announce(rules, 0, DRAINED) == {0: Verdict.END}


def test_data_that_ends_first_ends_the_run_also_while_a_trainer_is_lost():
    rules = Async(terms(2, uneven_inputs="stop"))
    rules.remove(1)
    rules.announce(0, DRAINED)
    assert rules.pop_decisions()[0].reason == "trainer 0 has no more data (training.uneven_inputs: stop)"


@pytest.mark.parametrize("rules", [Async(terms(2)), BackupSync(terms(2), 1), Sync(terms(2))])
def test_a_signal_reaches_trainers_that_wait_for_a_replacement(rules):
    rules.remove(1)
    assert announce(rules, 0, DRAINED) == {}
    rules.request_stop(Stop.SIGNAL, "signal SIGTERM")
    end = Decision(Verdict.END, (), 0, 0, "signal SIGTERM", interrupted=True)
    assert rules.pop_decisions() == {0: end}


@pytest.mark.parametrize("rules", [Async(terms(2)), Bounded(terms(2), 0), BackupSync(terms(2), 1), Sync(terms(2))])
def test_without_any_trainer_nothing_happens_until_one_joins(rules):
    rules.remove(0)
    rules.remove(1)
    assert (rules.next_update(), rules.pop_decisions(), rules.state_dict() in ({}, {"clocks": []})) == (None, {}, True)
    rules.join(3)
    free(rules, 3)
    assert push(rules, 3, 0).trainers == (3,)


# Backup trainers.


def test_the_push_of_a_backup_trainer_that_left_is_part_of_the_update_once():
    rules = backups(3, 1)
    push(rules, 0, 0, 5)
    rules.remove(0)
    assert rules.next_update() is None  # the first two of three still
    rules.join(0)
    assert announce(rules, 0) == {}  # one gradient of each trainer in a version
    assert push(rules, 2, 0, 7) == Update((0, 2), (0, 0), 0)
    assert rules.samples == 12
    assert rules.pop_decisions().keys() == {0}


@pytest.mark.parametrize("number", [1, 2])
def test_an_update_has_a_gradient_although_no_more_trainers_are_left_than_backups(number):
    rules = backups(3, number)
    rules.remove(2)
    rules.remove(1)
    assert rules.next_update() is None
    assert push(rules, 0, 0).trainers == (0,)


def test_the_last_that_has_not_pushed_leaves_and_completes_the_update():
    rules = backups(3, 0)
    push(rules, 0, 0)
    push(rules, 2, 0)
    rules.remove(1)
    assert rules.next_update() == Update((0, 2), (0, 0), 0)


@pytest.mark.parametrize(("due", "pause"), [("validate_every", Verdict.VALIDATE), ("barrier_every", Verdict.BARRIER)])
def test_no_trainer_trains_while_all_that_have_data_validate_or_save(due, pause):
    every = {"validate_every": 1} if due == "validate_every" else {"barrier_every": (1,)}
    rules = Async(RunTerms(3, NONE, "join", **every))
    verdicts = {}

    def announce(index, announcement=READY):
        rules.announce(index, announcement)
        verdicts.update((i, decision.verdict) for i, decision in rules.pop_decisions().items())

    announce(2, DRAINED)
    announce(0)
    assert (verdicts, rules.is_paused) == ({0: Verdict.GO}, False)
    rules.push(0, 0, 1)
    assert rules.next_update() is not None
    announce(0)
    assert not rules.is_paused  # trainer 1 may still train
    announce(1)
    assert (verdicts, rules.is_paused) == (dict.fromkeys(rules.trainers, pause), True)
    if pause is Verdict.VALIDATE:
        rules.share_reported(1)
    announce(1)
    assert (verdicts[1], rules.is_paused) == (Verdict.GO, False)
    for index in range(3):
        rules.remove(index)
    assert rules.is_paused


def backups(trainers: int, number: int, **options) -> BackupSync:
    """All trainers have a permit for version 0."""
    rules = BackupSync(terms(trainers, **options), number)
    assert [announce(rules, i) for i in range(trainers)] == [{i: GO} for i in range(trainers)]
    return rules


def test_the_first_that_push_make_the_update_and_the_late_one_is_dropped():
    rules = backups(3, 1)
    assert push(rules, 2, 0, 5) is None
    assert push(rules, 1, 0, 7) == Update((1, 2), (0, 0), buffers_from=1)
    assert (rules.step, rules.samples) == (1, 12)
    assert announce(rules, 1) == {1: GO}
    assert rules.push(0, 0, 3) is False
    assert (rules.next_update(), rules.dropped, rules.samples) == (None, {0: 1, 1: 0, 2: 0}, 12)
    assert announce(rules, 0) == {0: GO}


def test_a_trainer_that_has_pushed_waits_for_the_version():
    rules = backups(3, 1)
    push(rules, 2, 0)
    assert announce(rules, 2) == {}
    assert "outside a step" in rules.rejection_reason(2, 0)
    assert push(rules, 0, 0).trainers == (0, 2)
    assert rules.pop_decisions().keys() == {2}


def test_the_last_gradient_of_a_drained_trainer_counts():
    rules = backups(3, 1)
    push(rules, 0, 0)
    assert announce(rules, 0, DRAINED) == {}
    assert rules.step == 0  # a second one is needed still
    assert push(rules, 1, 0).trainers == (0, 1)
    assert announce(rules, 1) == {1: GO}
    assert push(rules, 1, 1).trainers == (1,)  # of the two that are left, one is the backup


def test_a_late_trainer_delays_no_other_near_the_limit_of_samples():
    rules = backups(3, 1, limits=Limits(max_samples=3))
    push(rules, 0, 0)
    push(rules, 1, 0)
    assert [announce(rules, 0), announce(rules, 1)] == [
        {0: GO},
        {1: GO},
    ]  # trainer 2 still brings a sample of version 0


def test_a_signal_ends_a_run_in_which_no_trainer_has_data_to_complete_the_update():
    rules = backups(3, 0)
    for index in (1, 2):
        rules.push(index, 0, 4)
    assert rules.next_update() is None
    assert announce(rules, 1, SIGNAL) == {}
    rules.push(0, 0, 4)
    assert rules.next_update().trainers == (0, 1, 2)
    rules = BackupSync(terms(3), 0)
    assert take_step(rules, 2) is None
    assert announce(rules, 1, WAITING) == {1: Verdict.WAIT}
    assert announce(rules, 2, SIGNAL) == {}
    assert announce(rules, 1, WAITING) == {}
    assert announce(rules, 0, WAITING) == dict.fromkeys(range(3), Verdict.END)
    assert (rules.step, rules.samples) == (1, 1)


def test_others_complete_an_update_after_the_end_was_requested():
    rules = BackupSync(terms(3, uneven_inputs="stop"), 1)
    take_step(rules, 0)
    assert announce(rules, 0, SIGNAL) == {}
    assert announce(rules, 1) == {1: GO}
    assert push(rules, 1, 0).trainers == (0, 1)
    assert announce(rules, 1) == {}
    assert announce(rules, 2) == dict.fromkeys(range(3), Verdict.END)


# The choice.


# A full buffer that blocks simulations.


def serve_stream(rules, held: list[int], capacity: int, samples: int) -> list[int]:
    """One client sends its samples to the trainers, 8 to each in turn, and waits for room.

    A trainer takes one sample a step. At first their buffers hold ``held`` samples. Returns how many each applied, or
    that it was too late for.
    """
    held, busy, applied, sent = list(held), {}, [0] * len(held), 0
    idle, announced, pushed = set(range(len(held))), set(), set()
    for _ in range(50 * samples):
        while sent < samples and held[to := sent // 8 % len(held)] < capacity:
            held[to] += 1
            sent += 1
        for index in list(idle):
            data = READY if held[index] else WAITING if sent < samples else DRAINED
            rules.announce(index, data)
            idle.remove(index)
            announced.add(index)
        for index, version in list(busy.items()):
            assert rules.rejection_reason(index, version) is None
            applied[index] += 1
            del busy[index]
            # As in a run, it announces again once its gradient was applied or dropped.
            (pushed if rules.push(index, version, 1) else idle).add(index)
        for index in range(len(held)):
            rules.set_blocks(index, sent < samples and index == to)
        while (update := rules.next_update()) is not None:
            idle |= set(update.trainers)
            pushed -= set(update.trainers)
        for index, decision in rules.pop_decisions().items():
            announced.remove(index)
            if index in decision.active:
                held[index] -= 1
                busy[index] = decision.step
            else:
                idle.add(index)
            if decision.verdict is Verdict.END:
                return applied
    raise AssertionError(f"all wait for one another: {held=}, {announced=}, {pushed=}, {applied=}")


@pytest.mark.parametrize("held", [[6, 0, 0], [6, 6, 0], [0, 6, 1]])
@pytest.mark.parametrize(
    "make",
    [
        Sync,
        Async,
        lambda terms: Bounded(terms, bound=0),
        lambda terms: Bounded(terms, bound=3),
        lambda terms: BackupSync(terms, backups=1),
        lambda terms: BackupSync(terms, backups=2),
    ],
    ids=["sync", "async", "bounded-0", "bounded-3", "backup-1", "backup-2"],
)
def test_a_full_buffer_that_blocks_a_client_blocks_no_run(make, held):
    """As after the loss of a trainer, whose replacement starts with an empty buffer."""
    assert sum(serve_stream(make(terms(3)), held, capacity=6, samples=90)) == sum(held) + 90


def test_a_trainer_whose_buffer_is_full_passes_those_without_samples_and_no_others():
    rules = Bounded(terms(3), bound=1)
    for _ in range(2):
        take_step(rules, 0)
    assert announce(rules, 0) == {}
    assert announce(rules, 1, WAITING) == {1: Verdict.WAIT}
    rules.set_blocks(0, True)
    assert rules.pop_decisions() == {}, "trainer 2 may be computing"
    assert announce(rules, 2, WAITING) == {0: GO, 2: Verdict.WAIT}
    assert rules.clocks == {0: 2, 1: 1, 2: 1}, "the bound holds"
    push(rules, 0, rules.step)
    rules.set_blocks(0, False)
    assert announce(rules, 0) == {}


def test_a_partial_update_does_not_wait_for_trainers_whose_samples_it_blocks():
    rules = BackupSync(terms(5), backups=1)
    for index in (0, 3, 4):
        assert announce(rules, index) == {index: GO}
    for index in (1, 2):
        assert announce(rules, index, WAITING) == {index: Verdict.WAIT}
    assert push(rules, 0, 0) is None
    rules.set_blocks(0, True)
    assert rules.next_update() is None, "of the gradients of 3 and 4 one counts"
    assert push(rules, 3, 0).trainers == (0, 3)


def test_every_value_of_the_key_has_a_class():
    field = next(f for f in dataclasses.fields(ServerConfig) if f.name == "consistency")
    assert tuple(CLASSES) == field.metadata["rule"].choices


def made(server: ServerConfig, best=None, every=None):
    training = TrainingConfig(max_steps=9, validate_every=5, batch_size=3, uneven_inputs="join")
    checkpoint = CheckpointConfig(every=every, best=best)
    return make_consistency(Config(task="m:T", training=training, server=server, checkpoint=checkpoint), 4, 1, 2)


@pytest.mark.parametrize(
    ("server", "kind", "option"),
    [
        (ServerConfig(), Sync, {}),
        (ServerConfig(backup_trainers=2), BackupSync, {"backups": 2}),
        (ServerConfig(consistency="bounded", staleness_bound=3), Bounded, {"bound": 3}),
        (ServerConfig(consistency="async"), Async, {}),
    ],
)
def test_the_configuration_chooses(server, kind, option):
    rules = made(server, every=2)
    assert type(rules) is kind
    assert option.items() <= vars(rules).items()
    assert (rules.step, rules.samples, rules.terms.num_trainers) == (1, 2, 4)
    assert rules.lockstep is (kind is Sync)
    apart = kind in (Async, Bounded)
    every = ((2,), 5) if apart else ((2, 5), 0)  # barriers, validations of a retained version
    assert rules.terms == RunTerms(4, Limits(max_steps=9), "join", 3, *every)


def test_what_is_saved_as_the_best_is_validated_at_a_barrier():
    rules = made(ServerConfig(consistency="async"), best={"metric": "accuracy", "mode": "max"})
    assert (set(rules.terms.barrier_every), rules.terms.validate_every) == ({5}, 0)
    assert made(ServerConfig(consistency="async")).terms.barrier_every == (5,)  # checkpoints follow validations
