"""Lockstep: every combination of announcements of three trainers, and steps against a model."""

import itertools
import random

import pytest

from paramserver.consistency import (
    Announcement,
    Decision,
    Readiness,
    RunTerms,
    Stop,
    Sync,
    Update,
    Verdict,
    decide,
    module_buffer_owner,
)
from paramserver.limits import Limits

READY, WAITING, DRAINED = Readiness.READY, Readiness.WAITING, Readiness.DRAINED
STATES = [(READY, 1), (READY, 2), (WAITING, 1), (DRAINED, 1)]
NONE = Limits()
GO = Announcement(READY)


def every_announcement() -> list[dict[int, Announcement]]:
    """All combinations of readiness, batches and stop of three trainers."""
    one = [Announcement(r, b, s, f"{s.name} requested") for (r, b), s in itertools.product(STATES, Stop)]
    return [dict(enumerate(announced)) for announced in itertools.product(one, repeat=3)]


ALL = every_announcement()
STOPLESS = [announced for announced in ALL if all(a.stop is Stop.NO for a in announced.values())]


def readiness(announced: dict[int, Announcement]) -> list[Readiness]:
    return [a.readiness for a in announced.values()]


def all_decisions(many, limits=NONE, uneven_inputs="join"):
    return [(announced, decide(announced, 3, 96, limits, uneven_inputs)) for announced in many]


def test_the_enumeration_is_complete():
    assert len(ALL) == 16**3
    assert len(STOPLESS) == 4**3


@pytest.mark.parametrize("limits", [Limits(max_steps=3), Limits(max_samples=96), Limits(max_samples=90)])
@pytest.mark.parametrize("uneven_inputs", ["stop", "join"])
def test_a_limit_ends_the_run_whatever_is_announced(limits, uneven_inputs):
    for _, decision in all_decisions(ALL, limits, uneven_inputs):
        assert decision == Decision(Verdict.END, (), 3, 96, decision.reason, interrupted=False)
        assert "reached" in decision.reason


def test_a_limit_that_is_not_reached_changes_nothing():
    near = Limits(max_steps=4, max_samples=97, max_seconds=1e-9)  # seconds are not for the ranks to count
    assert all_decisions(STOPLESS, near) == all_decisions(STOPLESS)


@pytest.mark.parametrize("uneven_inputs", ["stop", "join"])
def test_a_stop_dominates_and_the_largest_counts(uneven_inputs):
    for announced, decision in all_decisions(ALL, uneven_inputs=uneven_inputs):
        stops = {a.stop for a in announced.values()}
        if stops != {Stop.NO}:
            assert decision.verdict is Verdict.END
            assert decision.interrupted == (Stop.SIGNAL in stops)
            assert decision.resizes == (max(stops) is Stop.RESIZE)
            assert decision.reason == f"{max(stops).name} requested"


def test_the_reason_is_that_of_the_first_trainer_that_has_one():
    announced = {2: Announcement(READY, stop=Stop.SIGNAL, reason="second"), 1: Announcement(READY, stop=Stop.SIGNAL)}
    announced[0] = Announcement(READY, stop=Stop.LIMIT, reason="smaller")
    assert decide(announced, 0, 0, NONE, "stop").reason == "second"
    announced[1] = Announcement(READY, stop=Stop.SIGNAL, reason="first")
    assert decide(announced, 0, 0, NONE, "stop").reason == "first"


@pytest.mark.parametrize("uneven_inputs", ["stop", "join"])
def test_without_a_stop_the_readiness_decides(uneven_inputs):
    for announced, decision in all_decisions(STOPLESS, uneven_inputs=uneven_inputs):
        readiness_of_all = readiness(announced)
        if set(readiness_of_all) == {DRAINED} or (DRAINED in readiness_of_all and uneven_inputs == "stop"):
            expected = Verdict.END
        else:
            expected = Verdict.WAIT if WAITING in readiness_of_all else Verdict.GO
        assert decision.verdict is expected, announced
        assert not decision.interrupted


def test_the_active_ones_are_those_with_data_and_take_the_smallest_number_of_batches():
    for announced, decision in all_decisions(ALL):
        assert (decision.step, decision.samples) == (3, 96)
        if decision.verdict is Verdict.GO:
            assert decision.active == tuple(i for i in announced if announced[i].readiness is READY)
            assert decision.active
            assert decision.batches == min(announced[i].batches for i in decision.active)
        else:
            assert (decision.active, decision.batches) == ((), 0)


def test_the_first_drained_trainer_is_named_where_all_stop():
    announced = {0: GO, 1: Announcement(DRAINED), 2: Announcement(DRAINED)}
    assert decide(announced, 5, 7, NONE, "stop").reason == "trainer 1 has no more data (training.uneven_inputs: stop)"
    assert decide(dict.fromkeys(range(2), Announcement(DRAINED)), 5, 7, NONE, "join").reason == "all data was served"


def test_the_order_of_arrival_does_not_matter():
    for announced in ALL[::7]:
        backwards = dict(reversed(announced.items()))
        assert decide(backwards, 1, 2, NONE, "join") == decide(announced, 1, 2, NONE, "join")


def test_the_module_buffers_are_those_of_ddp():
    assert module_buffer_owner((1, 2, 4), "stop") == 1
    assert module_buffer_owner((1, 2, 4), "join") == 4


# The rounds of a step.


def announce(rules: Sync, index: int, announcement: Announcement = GO) -> Decision | None:
    """Return the decision that follows from an announcement: none, or the same for all."""
    rules.announce(index, announcement)
    decisions = rules.pop_decisions()
    assert set(decisions) in (set(), rules.trainers)
    assert len(set(decisions.values())) <= 1
    assert rules.pop_decisions() == {}  # each is answered once
    return decisions.get(index)


def pushed(rules: Sync, index: int, samples: int) -> Update | None:
    assert rules.push(index, rules.step, samples)
    update = rules.next_update()
    assert rules.next_update() is None
    return update


def round_of(trainers: int = 2, step: int = 0, samples: int = 0, limits=NONE, uneven_inputs="stop") -> Sync:
    return Sync(RunTerms(trainers, limits, uneven_inputs), step, samples)


def started(trainers: int = 2, **options) -> Sync:
    """A step in which all take part."""
    rules = round_of(trainers, **options)
    decisions = [announce(rules, i) for i in range(trainers)]
    assert decisions[:-1] == [None] * (trainers - 1)
    assert decisions[-1].verdict is Verdict.GO
    return rules


def test_a_step_is_complete_with_the_last_push_in_the_order_of_trainers():
    rules = started(3)
    assert pushed(rules, 2, 5) is None
    assert pushed(rules, 0, 7) is None
    assert (rules.step, rules.samples) == (0, 0)  # nothing is applied yet
    assert pushed(rules, 1, 1) == Update((0, 1, 2), (0, 0, 0), buffers_from=0)
    assert (rules.step, rules.samples) == (1, 13)


def test_a_step_with_a_push_that_is_not_finite_makes_no_version_and_is_taken_again():
    rules = started(samples=10)
    rules.push(1, 0, 3, finite=False)
    rules.push(0, 0, 3)
    update = rules.next_update()
    assert update is not None
    assert (update.trainers, update.is_skipped) == ((0, 1), True)
    assert (rules.step, rules.samples, rules.in_step) == (0, 10, False)
    for index in (0, 1):
        announce(rules, index)
    for index in (1, 0):
        rules.push(index, 0, 3)
    assert rules.next_update() == Update((0, 1), (0, 0), 0)
    assert (rules.step, rules.samples) == (1, 16)


def test_a_second_push_is_refused():
    rules = started()
    pushed(rules, 1, 4)
    assert rules.rejection_reason(1, 0) == "trainer 1 pushed twice in step 0"
    assert rules.rejection_reason(0, 0) is None


@pytest.mark.parametrize("version", [-1, 1])
def test_a_gradient_of_another_version_is_refused(version):
    assert started().rejection_reason(0, version) == f"trainer 0 pushed a gradient of version {version} to version 0"


def test_a_push_outside_a_step_is_refused():
    rules = round_of(2)
    assert "outside a step" in rules.rejection_reason(0, 0)
    announce(rules, 0)
    assert "outside a step" in rules.rejection_reason(0, 0)  # not all have spoken
    announce(rules, 1)
    assert rules.rejection_reason(0, 0) is None
    assert "trainer 2 pushed outside" in rules.rejection_reason(2, 0)
    pushed(rules, 0, 1)
    pushed(rules, 1, 1)
    assert "(step 1)" in rules.rejection_reason(0, 1)  # the round is over


def test_a_drained_trainer_may_not_push_while_others_continue():
    rules = round_of(2, uneven_inputs="join")
    announce(rules, 0, Announcement(DRAINED))
    assert announce(rules, 1).active == (1,)
    assert rules.rejection_reason(0, 0) is not None
    assert [rules.wants_buffers_from(i) for i in range(2)] == [False, True]
    assert pushed(rules, 1, 8) == Update((1,), (0,), buffers_from=1)
    assert not rules.wants_buffers_from(1)  # no step is under way


def test_the_update_after_the_last_is_refused():
    rules = started(2, limits=Limits(max_steps=1))
    pushed(rules, 0, 1)
    pushed(rules, 1, 1)
    announce(rules, 0)
    assert announce(rules, 1).verdict is Verdict.END
    assert rules.rejection_reason(0, 1) is not None
    assert rules.rejection_reason(1, 0) is not None
    assert rules.step == 1


def test_after_a_wait_all_trainers_announce_again():
    rules = round_of(2)
    announce(rules, 0)
    assert announce(rules, 1, Announcement(WAITING)).verdict is Verdict.WAIT
    assert rules.rejection_reason(0, 0) is not None
    assert announce(rules, 1) is None  # trainer 0 must announce again too
    assert announce(rules, 0).verdict is Verdict.GO


def test_a_resumed_run_continues_from_its_counts():
    rules = started(2, step=7, samples=100)
    assert rules.rejection_reason(0, 7) is None
    assert "version 0 to version 7" in rules.rejection_reason(0, 0)
    pushed(rules, 0, 3)
    pushed(rules, 1, 3)
    assert (rules.step, rules.samples) == (8, 106)
    assert rules.state_dict() == {}  # the counts are all


class SimulatedRun:
    """Trainers that act in random order, and what must follow.

    ``churn`` is the probability that the next event is a trainer that leaves, joins or is given up.
    """

    def __init__(self, seed: int, churn: float = 0.0) -> None:
        self.random, self.churn = random.Random(seed), churn
        number = self.random.randint(1, 5)
        self.left = {i: self.random.randint(0, 6) for i in range(number)}  # batches of each
        self.joins = self.random.random() < 0.5
        self.max_steps = self.random.randint(1, 8 + int(40 * churn))
        # A run that does not join ends with its shortest supply.
        supply = self.left.values()
        self.expected = min(self.max_steps, max(supply) if self.joins else min(supply))
        uneven = "join" if self.joins else "stop"
        self.rules = round_of(number, limits=Limits(max_steps=self.max_steps), uneven_inputs=uneven)
        self.live, self.lost, self.forgotten = set(range(number)), set(), set()
        self.to_announce, self.announced = set(self.live), {}
        self.active, self.to_push, self.pushed, self.idle = False, set(), {}, set()
        self.together: set[int] = set()
        self.drained: set[int] = set()
        self.samples = 0
        self.seen: set[str] = set()
        self.end: Decision | None = None

    def run(self) -> "SimulatedRun":
        for _ in range(5000):
            if self.end is not None:
                break
            self.act()
        assert self.end is not None
        assert self.rules.samples == self.samples
        assert self.rules.trainers == self.live
        assert all(self.rules.rejection_reason(i, self.rules.step) for i in self.left)
        return self

    def act(self) -> None:
        able = sorted(self.to_announce | self.to_push)
        self.intrude()
        if not able:
            assert not self.live or (self.lost and self.live == self.drained), "all wait for one another"
        if not able or self.random.random() < self.churn:
            self.change(must_help=not able)
        elif (index := self.random.choice(able)) in self.to_push:
            self.push(index)
        else:
            self.announce(index)
        self.follow()

    def announce(self, index: int) -> None:
        self.to_announce.discard(index)
        if self.left[index] == 0:
            self.announced[index] = Announcement(DRAINED)
            self.drained.add(index)
        else:
            self.announced[index] = GO if self.random.random() < 0.8 else Announcement(WAITING)
        self.rules.announce(index, self.announced[index])

    def push(self, index: int) -> None:
        assert self.rules.rejection_reason(index, self.rules.step) is None
        self.to_push.discard(index)
        self.left[index] -= 1
        self.pushed[index] = self.random.randint(1, 32)
        assert self.rules.push(index, self.rules.step, self.pushed[index])

    def change(self, must_help: bool) -> None:
        gone = sorted(set(self.left) - self.live - self.forgotten)
        choice = self.random.random()
        if self.lost and choice < 0.1:
            index = self.random.choice(sorted(self.lost))
            self.lost.remove(index)
            self.forgotten.add(index)
            self.rules.give_up(index)
            self.seen.add("forgotten")
        elif must_help or (gone and choice < 0.5):
            self.join(self.random.choice(sorted(self.lost) or gone or sorted(self.forgotten)))
        elif choice < 0.55 and len(self.left) < 8:
            index = len(self.left)
            self.left[index] = self.random.randint(0, 6)
            self.join(index)
        elif self.live:
            self.leave(self.random.choice(sorted(self.live)))

    def join(self, index: int) -> None:
        self.live.add(index)
        self.lost.discard(index)
        self.to_announce.add(index)
        self.rules.join(index)

    def leave(self, index: int) -> None:
        states = {"announced": self.announced, "to_push": self.to_push, "pushed": self.pushed, "idle": self.idle}
        self.seen |= {name for name, members in states.items() if index in members}
        if index not in self.drained:
            self.lost.add(index)
        for members in (self.live, self.drained, self.to_announce, self.to_push, self.idle, self.together):
            members.discard(index)
        self.announced.pop(index, None)
        self.rules.remove(index)

    def follow(self) -> None:
        """What follows from an event: an update, an abandoned step, one decision for all live trainers, or nothing."""
        update = self.rules.next_update()
        assert self.rules.next_update() is None
        assert (update is not None) == (self.active and not self.to_push and bool(self.pushed))
        if update is not None:
            assert update.trainers == tuple(sorted(self.pushed))
            assert update.buffers_from == module_buffer_owner(update.trainers, "join" if self.joins else "stop")
            self.samples += sum(self.pushed.values())
        if self.active and not self.to_push:
            self.seen |= set() if update else {"abandoned"}
            # Those that pushed announce next, and those that waited for the version.
            self.to_announce |= (self.pushed.keys() & self.together) | self.idle
            self.active, self.pushed, self.idle = False, {}, set()
        assert self.rules.in_step == self.active
        decisions = self.rules.pop_decisions()
        assert self.rules.pop_decisions() == {}
        complete = not self.active and bool(self.live) and self.live == self.announced.keys()
        held = bool(self.lost) and self.live == self.drained and self.joins and self.rules.step < self.max_steps
        self.seen |= {"held"} if complete and held else set()
        assert set(decisions) == (self.live if complete and not held else set())
        if decisions:
            assert len(set(decisions.values())) == 1
            self.receive(next(iter(decisions.values())))
        assert self.rules.participants == self.together

    def receive(self, decision: Decision) -> None:
        assert (decision.step, decision.samples) == (self.rules.step, self.samples)
        ready = {i for i, a in self.announced.items() if a.readiness is READY}
        self.announced = {}
        if decision.verdict is Verdict.WAIT:
            self.to_announce = set(self.live)
            return
        self.together = set(self.live)
        if decision.verdict is Verdict.END:
            self.end = decision
            return
        assert decision.active == tuple(sorted(ready))
        assert ready
        assert decision.step < self.max_steps
        self.active, self.to_push, self.idle = True, ready, self.live - ready

    def intrude(self) -> None:
        """Pushes of trainers outside of a step are refused, and pushes for another version."""
        index = self.random.randrange(len(self.left) + 1)
        wrong = self.rules.step + self.random.choice((-2, -1, 1))
        assert self.rules.rejection_reason(index, wrong) is not None
        if index not in self.to_push:
            assert self.rules.rejection_reason(index, self.rules.step) is not None


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_events_gives_the_same_run(seed):
    run = SimulatedRun(seed).run()
    assert run.rules.step == run.expected


@pytest.mark.parametrize("churn", [0.05, 0.1, 0.3])
def test_whatever_happens_while_trainers_leave_and_join_the_run_ends_as_it_must(churn):
    seen: set[str] = set()
    reasons = set()
    for seed in range(200):
        run = SimulatedRun(seed, churn).run()
        seen |= run.seen
        reasons.add(run.end.reason)
        if run.end.reason == "all data was served":
            assert not any(left for i, left in run.left.items() if i not in run.forgotten)
            assert not run.lost
        elif "no more data" in run.end.reason:
            assert not run.joins
            assert run.drained
        else:
            assert run.rules.step == run.max_steps
    assert seen == {"announced", "to_push", "pushed", "idle", "abandoned", "held", "forgotten"}
    assert len(reasons) > 5


# Trainers that leave and join.


@pytest.mark.parametrize("announced", [False, True])
def test_a_decision_does_not_wait_for_a_trainer_that_left(announced):
    rules = round_of(3)
    if announced:
        assert announce(rules, 1) is None
    rules.remove(1)
    assert announce(rules, 0) is None
    assert announce(rules, 2).active == (0, 2)
    assert rules.rejection_reason(1, 0) is not None


def test_the_last_that_has_not_announced_leaves():
    rules = round_of(2)
    announce(rules, 0)
    rules.remove(1)
    assert rules.pop_decisions()[0].active == (0,)
    assert rules.participants == {0}


def test_the_mean_is_over_those_that_push_when_one_leaves_before():
    rules = started(3)
    pushed(rules, 1, 5)
    pushed(rules, 2, 7)
    rules.remove(0)  # which was asked for the module buffers
    assert rules.next_update() == Update((1, 2), (0, 0), buffers_from=1)
    assert (rules.step, rules.samples, rules.participants) == (1, 12, {1, 2})


def test_the_module_buffers_are_those_of_the_last_that_pushed_where_inputs_are_joined():
    rules = started(3, uneven_inputs="join")
    assert rules.wants_buffers_from(2)
    pushed(rules, 0, 1)
    rules.remove(2)
    assert pushed(rules, 1, 1).buffers_from == 1


def test_a_push_that_was_counted_is_applied_once_after_its_trainer_left():
    rules = started(2)
    pushed(rules, 0, 5)
    rules.remove(0)
    rules.join(0)
    assert rules.next_update() is None
    assert rules.rejection_reason(0, 0) == "trainer 0 pushed twice in step 0"
    assert announce(rules, 0) is None  # the replacement takes part in the next step
    assert pushed(rules, 1, 7) == Update((0, 1), (0, 0), buffers_from=0)
    assert rules.samples == 12
    assert rules.participants == {1}
    assert announce(rules, 1).active == (0, 1)


def test_a_step_that_all_leave_before_they_push_is_abandoned_and_taken_again():
    rules = round_of(2, uneven_inputs="join")
    announce(rules, 0, Announcement(DRAINED))
    assert announce(rules, 1).active == (1,)
    assert rules.in_step
    rules.remove(1)
    assert not rules.in_step
    assert (rules.next_update(), rules.pop_decisions(), rules.step) == (None, {}, 0)
    rules.join(1)
    assert announce(rules, 1) is None
    assert announce(rules, 0, Announcement(DRAINED)).active == (1,)
    assert pushed(rules, 1, 3) == Update((1,), (0,), buffers_from=1)


def test_a_trainer_that_joins_during_a_step_takes_part_in_the_next():
    rules = started(1)
    rules.join(7)
    assert announce(rules, 7) is None
    assert rules.rejection_reason(7, 0) is not None
    assert pushed(rules, 0, 1).trainers == (0,)
    assert rules.pop_decisions() == {}
    assert announce(rules, 0).active == (0, 7)


def test_the_step_of_a_trainer_that_pushed_and_left_ends_before_the_next_decision():
    rules = started(1)
    rules.push(0, 0, 4)
    rules.remove(0)
    rules.join(1)
    rules.announce(1, GO)
    assert rules.pop_decisions() == {}
    assert rules.next_update() == Update((0,), (0,), buffers_from=0)
    assert rules.pop_decisions()[1] == Decision(Verdict.GO, (1,), 1, 4, batches=1)


@pytest.mark.parametrize("replaced", [True, False])
def test_the_data_of_a_lost_trainer_is_waited_for_until_it_is_forgotten(replaced):
    rules = round_of(2, uneven_inputs="join")
    rules.remove(1)
    assert announce(rules, 0, Announcement(DRAINED)) is None
    if replaced:
        rules.join(1)
        assert announce(rules, 1).active == (1,)
    else:
        rules.give_up(1)
        assert rules.pop_decisions()[0].reason == "all data was served"


def test_a_trainer_without_data_waits_while_another_waits_for_samples_and_one_is_lost():
    rules = round_of(3, uneven_inputs="join")
    rules.remove(2)
    announce(rules, 0, Announcement(DRAINED))
    assert announce(rules, 1, Announcement(WAITING)).verdict is Verdict.WAIT


def test_the_end_does_not_wait_for_a_trainer_that_left_after_its_data_had_ended():
    rules = round_of(2, uneven_inputs="join")
    announce(rules, 1, Announcement(DRAINED))
    rules.remove(1)
    assert announce(rules, 0, Announcement(DRAINED)).reason == "all data was served"


def test_data_that_ends_first_ends_the_run_also_while_a_trainer_is_lost():
    rules = round_of(2)
    rules.remove(1)
    assert "trainer 0 has no more data" in announce(rules, 0, Announcement(DRAINED)).reason


def test_those_that_wait_for_a_lost_trainer_take_no_step_without_data():
    drained = dict.fromkeys(range(2), Announcement(DRAINED))
    assert decide(drained, 0, 0, NONE, "join", some_lost=True) == Decision(Verdict.WAIT, (), 0, 0)
    assert decide(drained, 0, 0, NONE, "stop", some_lost=True).verdict is Verdict.END
    assert decide(drained | {2: GO}, 0, 0, NONE, "join", some_lost=True).active == (2,)


def test_a_trainer_whose_full_buffer_blocks_simulations_does_not_wait_for_another_ones_samples():
    ready, waiting = Announcement(Readiness.READY), Announcement(Readiness.WAITING)
    decision = decide({0: waiting, 1: ready}, 7, 56, Limits(), "join", blocking={1})
    assert (decision.verdict, decision.active) == (Verdict.GO, (1,))
    for blocking in ({0}, set()):
        assert decide({0: waiting, 1: ready}, 7, 56, Limits(), "join", blocking=blocking).verdict is Verdict.WAIT


@pytest.mark.parametrize("pushed_first", [False, True])
def test_what_is_due_when_all_are_lost_is_done_by_those_that_join(pushed_first):
    rules = Sync(RunTerms(2, NONE, barrier_every=(1,)))
    for index in (0, 1):
        rules.announce(index, GO)
    assert rules.pop_decisions()[0].active == (0, 1)
    rules.push(0, 0, 1)
    if not pushed_first:
        rules.push(1, 0, 1)
        assert rules.next_update() is not None
    for index in (0, 1):
        rules.remove(index)
        rules.next_update()
        assert rules.pop_decisions() == {}
    assert rules.step == 1
    rules.join(1)
    rules.announce(1, GO)
    assert rules.pop_decisions() == {1: Decision(Verdict.BARRIER, (), 1, rules.samples)}
    rules.announce(1, GO)
    assert rules.pop_decisions()[1].verdict is Verdict.GO
