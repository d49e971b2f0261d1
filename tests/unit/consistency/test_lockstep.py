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
    assert len(ALL) == 12**3
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
def test_a_stop_dominates_and_a_signal_dominates_a_limit(uneven_inputs):
    for announced, decision in all_decisions(ALL, uneven_inputs=uneven_inputs):
        stops = {a.stop for a in announced.values()}
        if stops != {Stop.NO}:
            assert decision.verdict is Verdict.END
            assert decision.interrupted == (Stop.SIGNAL in stops)
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
    assert set(decisions) in (set(), set(range(rules.terms.num_trainers)))
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
    """Trainers that act in random order, and what must follow."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.trainers = self.random.randint(1, 5)
        self.left = [self.random.randint(0, 6) for _ in range(self.trainers)]
        self.joins = self.random.random() < 0.5
        self.max_steps = self.random.randint(1, 8)
        # A run that does not join ends with its shortest supply.
        self.expected = min(self.max_steps, max(self.left) if self.joins else min(self.left))
        uneven = "join" if self.joins else "stop"
        self.rules = round_of(self.trainers, limits=Limits(max_steps=self.max_steps), uneven_inputs=uneven)
        self.to_announce, self.to_push = set(range(self.trainers)), set()
        self.samples = 0
        self.ended = False

    def announcement_of(self, index: int) -> Announcement:
        if self.left[index] == 0:
            return Announcement(DRAINED)
        return GO if self.random.random() < 0.8 else Announcement(WAITING)

    def act(self) -> None:
        index = self.random.choice(sorted(self.to_announce | self.to_push))
        self.intrude()
        if index in self.to_push:
            self.push(index)
        else:
            self.announce(index)

    def announce(self, index: int) -> None:
        self.to_announce.discard(index)
        decision = announce(self.rules, index, self.announcement_of(index))
        assert (decision is None) == bool(self.to_announce)
        if decision is not None:
            self.ended = decision.verdict is Verdict.END
            self.to_push = set(decision.active)
            self.to_announce = set(range(self.trainers)) - self.to_push if not self.to_push else set()
            self.active = decision.active

    def push(self, index: int) -> None:
        assert self.rules.rejection_reason(index, self.rules.step) is None
        self.to_push.discard(index)
        self.left[index] -= 1
        samples = self.random.randint(1, 32)
        self.samples += samples
        update = pushed(self.rules, index, samples)
        assert (update.trainers if update else None) == (None if self.to_push else self.active)
        if update is not None:
            self.to_announce = set(range(self.trainers))

    def intrude(self) -> None:
        """Pushes of trainers outside of a step are refused, and pushes for another version."""
        index = self.random.randrange(self.trainers + 1)
        wrong = self.rules.step + self.random.choice((-2, -1, 1))
        assert self.rules.rejection_reason(index, wrong) is not None
        if index not in self.to_push:
            assert self.rules.rejection_reason(index, self.rules.step) is not None


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_events_gives_the_same_run(seed):
    run = SimulatedRun(seed)
    for _ in range(5000):
        if run.ended:
            break
        run.act()
    assert run.ended
    assert run.rules.step == run.expected
    assert run.rules.samples == run.samples
    assert all(run.rules.rejection_reason(i, run.rules.step) for i in range(run.trainers))
