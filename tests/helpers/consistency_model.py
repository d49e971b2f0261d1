"""A model checker: trainers without lockstep as small state machines, and what must hold in every order of events."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from random import Random

from paramserver.consistency import Announcement, Async, Bounded, Decision, Readiness, RunTerms, Stop, Update, Verdict
from paramserver.consistency.free_running import MAX_RETAINED_VERSIONS, BackupSync, Buffered
from paramserver.limits import Limits

KINDS = ("async", "bounded", "backup", "buffered")
EVENTS = 20_000
BATCH_SIZE = 4


@cache
def multiples(after: int, last: int, every: tuple[int, ...]) -> list[int]:
    return [n for n in range(after + 1, last + 1) if any(e and n % e == 0 for e in every)]


@dataclass
class Trainer:
    """At a ``boundary`` it announces, ``busy`` it pushes; ``announced`` or ``held`` it waits; ``gone`` it has left."""

    batches: list[int]  # samples of each that is left
    speed: float
    state: str = "boundary"
    announcement: Announcement | None = None
    version: int = 0
    clock: int = 0
    joined: int = 0  # the step; its share of versions from then on is its own to validate
    drained: bool = False
    validating: tuple[int, int] | None = None  # a version and a share, until it reports

    @property
    def waits(self) -> bool:
        """Whether it had no samples when it announced last."""
        may = self.state in ("boundary", "announced") and self.announcement is not None
        return may and self.announcement.readiness is Readiness.WAITING


class SimulatedRun:
    """A run of one kind in a random order of events; each event is checked against counts kept here.

    ``nonfinite`` is the probability that a push is not finite, and is skipped.
    ``churn`` is the probability that the next event is a trainer that leaves, joins or is given up.
    """

    def __init__(self, random: Random, kind: str, churn: float = 0.0, nonfinite: float = 0.0) -> None:
        self.random, self.kind, self.churn, self.nonfinite = random, kind, churn, nonfinite
        number = random.randint(1, 6)
        longest = random.choice((5, 20, 100))
        self.trainers = [self._trainer(longest) for _ in range(number)]
        self.bound = random.randint(0, 3)
        self.backups = random.randint(0, number - 1)
        self.uneven = random.choice(("stop", "join", "join"))
        self.limits = Limits(
            max_steps=random.choice((None, None, random.randint(1, 80))),
            max_samples=random.choice((None, None, random.randint(1, 300))),
        )
        self.barrier_every = random.choice(((), (0,), (random.randint(1, 9),), (random.randint(1, 9), 6)))
        self.validate_every = random.choice((0, 1, 3, random.randint(1, 12)))
        self.waits = random.choice((0.0, 0.2, 0.6))
        self.waits_for_version = random.random() < 0.5  # does not announce while its push is held
        self._choose_stop()
        self.arrivals = random.randint(1, 4) if kind == "buffered" else 1
        self.step = self.samples = self.start = 0
        self.rules = self._make_rules()
        self.barriers: list[int] = []
        self.staleness: list[int] = []
        self.distance = -1
        self.most_retained = 0
        self._begin()

    def _trainer(self, longest: int) -> Trainer:
        full = self.random.randint(0, longest)
        sizes = [BATCH_SIZE] * full + [self.random.randint(1, BATCH_SIZE)] * (full > 0)
        return Trainer(sizes, speed=self.random.choice((0.05, 1.0, 1.0, 3.0)))

    def _choose_stop(self) -> None:
        """Some are requested to stop at some event, with or without a source that delivers no more samples then."""
        indices = range(len(self.trainers))
        self.stop = self.random.choice((Stop.NO, Stop.NO, Stop.LIMIT, Stop.SIGNAL))
        self.stop_at = self.random.randint(0, 300)
        self.stopped = set(self.random.sample(indices, self.random.randint(1, len(indices))))
        self.silent: set[int] = set()
        if self.stop is not Stop.NO and self.random.random() < 0.5:
            self.stopped = set(indices)
            self.silent = {i for i in indices if self.random.random() < 0.7}

    def _make_rules(self):
        number, every = len(self.trainers), (self.barrier_every, self.validate_every)
        self.shares = range(number)
        terms = RunTerms(number, self.limits, self.uneven, BATCH_SIZE, *every)
        if self.kind == "async":
            return Async(terms, self.step, self.samples)
        if self.kind == "buffered":
            return Buffered(terms, self.arrivals, self.step, self.samples)
        if self.kind == "bounded":
            return Bounded(terms, self.bound, self.step, self.samples)
        return BackupSync(terms, self.backups, self.step, self.samples)

    def _begin(self) -> None:
        self.events = self.served = self.lost = self.skipped = 0
        self.start, self.samples_before = self.step, self.samples
        self.arrived: list[tuple[int, int, int]] = []
        self.summed: list[int] = []  # samples of the gradients that were added to the next version
        self.dropped: Counter[int] = Counter()
        self.dropped_of: Counter[int] = Counter()
        self.stop_requested = Stop.NO
        self.ending = False
        self.end: Decision | None = None
        self.at_barrier: set[int] = set()  # those whose barrier is in progress
        self.awaited: set[int] = set()  # those that left with data, and may come back
        self.forgotten: set[int] = set()
        self.left: Counter[str] = Counter()  # how often a trainer left in each state
        self.blocking: set[int] = set()  # those whose full buffers block simulations
        self.reported: set[tuple[int, int]] = set()  # versions and shares
        self.for_others = 0  # how many of them by a trainer whose own they are not
        self.shorter = 0  # how often a version had fewer gradients than others
        self.passed = 0  # how often one of these did not wait for one without samples

    def resume(self) -> None:
        """Continue where a signal ended the run, from what a checkpoint contains; no other signal follows."""
        assert self.end.interrupted
        state = json.loads(json.dumps(self.rules.state_dict()))
        self.rules = self._make_rules()
        self.rules.load_state_dict(state)
        self.stop, self.silent, self.barriers = Stop.NO, set(), []
        slowest = min((t.clock for t in self.live.values()), default=0)
        for trainer in self.trainers:
            trainer.clock = slowest if trainer.state == "gone" else trainer.clock
            trainer.state, trainer.drained, trainer.validating = "boundary", False, None
            trainer.joined, trainer.announcement = self.step, None
        self._begin()

    # Events.

    def run(self) -> "SimulatedRun":
        while self.end is None:
            assert self.events < EVENTS, f"the run never ends: {self.trainers}"
            self._act()
        self._check_end()
        return self

    def _act(self) -> None:
        able = [i for i, t in enumerate(self.trainers) if t.state in ("boundary", "busy")]
        self.events += 1
        if self.random.random() < self.waits / 4:
            self._change_blocking(self.random.randrange(len(self.trainers)))
        if not able or (self.churn and self.random.random() < self.churn):
            self._change(must_help=not able)
        else:
            index = self.random.choices(able, [self.trainers[i].speed for i in able])[0]
            if self.trainers[index].validating is not None:
                self._report(index)
            elif self.trainers[index].state == "boundary":
                self._announce(index)
            else:
                self._push(index)
        self._note_ending()
        while (update := self.rules.next_update()) is not None:
            self._apply(update)
        self._pass_waiting()
        decisions = self.rules.pop_decisions()
        self._check_together(decisions)
        for i, decision in decisions.items():
            self._receive(i, decision)
        assert self.rules.pop_decisions() == {}
        self.most_retained = max(self.most_retained, self.retained)
        assert self.retained <= MAX_RETAINED_VERSIONS or self.kind == "backup"
        self._check_validations()
        self._check_waiting()

    def _change_blocking(self, index: int) -> None:
        if index in self.live:
            self.blocking ^= {index}
            self.rules.set_blocks(index, index in self.blocking)
            assert self.rules.blocks(index) is (index in self.blocking)

    def _change(self, must_help: bool) -> None:
        """A trainer leaves, joins or is given up; with ``must_help`` all wait for that."""
        gone = [i for i, t in enumerate(self.trainers) if t.state == "gone" and i not in self.forgotten]
        if must_help:
            assert all(t.drained for t in self.live.values()), f"all wait for one another: {self.trainers}"
            assert self.awaited or not self.live, f"all wait for one another: {self.trainers}"
            assert not (self.live and self.ending), "the end waits for a trainer that left"
            candidates = sorted(self.awaited) or gone or sorted(self.forgotten)
        choice = self.random.random()
        if self.awaited and choice < 0.1:
            self._give_up(self.random.choice(sorted(self.awaited)))
        elif must_help:
            self._join(self.random.choice(candidates))
        elif gone and choice < 0.55:
            self._join(self.random.choice(gone))
        elif choice < 0.6 and len(self.trainers) < 9 and not self.ending:
            self.trainers.append(self._trainer(20))
            self.trainers[-1].state = "gone"
            self._join(len(self.trainers) - 1)
        elif self.live:
            self._lose(self.random.choice(sorted(self.live)))

    def _lose(self, index: int) -> None:
        trainer = self.trainers[index]
        at_barrier = index in self.at_barrier
        self.left["barrier" if at_barrier else "validating" if trainer.validating else trainer.state] += 1
        self.left["drained"] += trainer.drained
        self.left["pushed"] += index in {i for i, _, _ in self.arrived}
        if not trainer.drained:
            self.awaited.add(index)
        # What it did not push is not lost: its replacement serves it.
        trainer.state, trainer.drained, trainer.validating = "gone", False, None
        self.at_barrier.discard(index)
        if at_barrier and not self.at_barrier:
            self.barriers.remove(self.step)  # the next ones do what is due
        self.blocking.discard(index)
        self.rules.remove(index)
        assert self.rules.rejection_reason(index, trainer.version) is not None

    def _join(self, index: int) -> None:
        trainer, running = self.trainers[index], [t.clock for t in self.live.values() if not t.drained]
        trainer.clock = min(running or [t.clock for t in self.live.values()], default=0)
        trainer.state, trainer.joined, trainer.announcement = "boundary", self.step, None
        self.awaited.discard(index)
        self.rules.join(index)
        assert self.rules.rejection_reason(index, self.step) is not None

    def _give_up(self, index: int) -> None:
        self.awaited.discard(index)
        self.forgotten.add(index)
        self.rules.give_up(index)

    def _note_ending(self) -> None:
        """From now on no trainer starts a step, except to complete an update."""
        drained = [t.drained for t in self.live.values()]
        all_served = all(drained) and not self.awaited
        self.ending |= self.stop_requested is not Stop.NO or all_served or (self.uneven == "stop" and any(drained))

    def _report(self, index: int) -> None:
        trainer = self.trainers[index]
        self.reported.add(trainer.validating)
        trainer.validating = None
        self.rules.share_reported(index)

    def _announce(self, index: int) -> None:
        trainer = self.trainers[index]
        if index in self.at_barrier:  # a barrier is over when one of them returns from it
            self.at_barrier = set()
        due = self.events > self.stop_at
        stop = self.stop if due and index in self.stopped else Stop.NO
        if not trainer.batches:
            readiness, trainer.drained = Readiness.DRAINED, True
        elif (due and index in self.silent) or self.random.random() < self.waits:
            readiness = Readiness.WAITING
        else:
            readiness = Readiness.READY
        batches = self.random.randint(1, max(1, min(2, len(trainer.batches))))
        trainer.announcement = Announcement(readiness, batches, stop, f"{stop.name} requested")
        trainer.state, self.stop_requested = "announced", max(self.stop_requested, stop)
        self.rules.announce(index, trainer.announcement)

    def _push(self, index: int) -> None:
        trainer = self.trainers[index]
        taken, trainer.batches = (
            trainer.batches[: trainer.announcement.batches],
            trainer.batches[trainer.announcement.batches :],
        )
        assert self.rules.rejection_reason(index, trainer.version) is None
        assert self.rules.rejection_reason(index, trainer.version + self.random.choice((-1, 1))) is not None
        late = self.kind == "backup" and trainer.version < self.step
        finite = not (self.nonfinite and self.random.random() < self.nonfinite)
        assert self.rules.push(index, trainer.version, sum(taken), finite) is (finite and not late)
        assert self.rules.rejection_reason(index, trainer.version) is not None  # once is enough
        trainer.clock += 1
        self.served += sum(taken)
        trainer.state = "boundary"
        if not finite:
            self.lost += sum(taken)
            self.skipped += 1
        elif late:
            self.lost += sum(taken)
            self.dropped[index] += 1
            self.dropped_of[trainer.version] += 1
        else:
            self.arrived.append((index, trainer.version, sum(taken)))
            trainer.state = "held" if self.kind == "backup" and self.waits_for_version else "boundary"

    def _apply(self, update: Update) -> None:
        assert self.end is None
        assert self.limit is None, "a step after the limit"
        assert not self.is_barrier_due, "a step where a barrier is due"
        assert not self.at_barrier, "a step while others are at a barrier"
        if self.kind == "backup":
            assert len(self.arrived) >= self.needed  # and fewer after each event: see ``_check_waiting``
            self.passed += not self.ending and any(t.waits for t in self.live.values()) and self._holds_blocking
            taken, self.arrived = sorted(self.arrived), []
        else:
            taken = [self.arrived.pop(0)] if update.trainers else []
        assert update.trainers == tuple(index for index, _, _ in taken)
        assert update.staleness == tuple(self.step - version for _, version, _ in taken)
        assert update.buffers_from == (update.trainers[0] if taken else -1)
        self.staleness += update.staleness
        self.summed += [samples for _, _, samples in taken]
        if taken:
            assert update.completes is (self.kind == "backup" or len(self.summed) == self.arrivals)
        else:
            assert self.summed
            assert not any(t.state == "busy" for t in self.live.values())
            assert self.ending or self.limits.reached(self.step, self.samples + sum(self.summed))
            self.shorter += 1
        if update.completes:
            self.step += 1
            self.samples += sum(self.summed)
            self.summed = []
        assert (self.rules.step, self.rules.samples) == (self.step, self.samples)
        for index in update.trainers:
            if self.trainers[index].state == "held":
                self.trainers[index].state = "boundary"

    def _receive(self, index: int, decision: Decision) -> None:
        trainer = self.trainers[index]
        assert trainer.state == "announced"
        assert decision.samples == self.samples
        trainer.state = "boundary"
        if decision.verdict is Verdict.WAIT:
            assert trainer.announcement.readiness is Readiness.WAITING
        elif decision.verdict is Verdict.VALIDATE:
            self._check_share(index, decision.step, decision.share)
            trainer.validating = decision.step, decision.share
        elif decision.verdict is Verdict.GO:
            self._check_start(index, decision)
            trainer.state, trainer.version = "busy", self.step

    # What must hold.

    @property
    def live(self) -> dict[int, Trainer]:
        return {i: t for i, t in enumerate(self.trainers) if t.state != "gone"}

    @property
    def limit(self) -> str | None:
        return self.limits.reached(self.step, self.samples)

    @property
    def is_barrier_due(self) -> bool:
        return self.step in self._multiples(*self.barrier_every) and self.step not in self.barriers

    def _multiples(self, *every: int) -> list[int]:
        return multiples(self.start, self.step, every)

    @property
    def retained(self) -> int:
        """Versions of which some share is not reported, or one of an earlier version."""
        versions = self._multiples(self.validate_every)
        return next((len(versions[i:]) for i, n in enumerate(versions) if not self._is_validated(n)), 0)

    def _is_validated(self, version: int) -> bool:
        return all((version, share) in self.reported for share in self.shares)

    def _own(self, index: int) -> set[tuple[int, int]]:
        """What a live trainer validates whoever leaves."""
        versions = self._multiples(self.validate_every) if index in self.shares else []
        return {(n, index) for n in versions if n > self.trainers[index].joined}

    @property
    def needed(self) -> int:
        """Gradients that make an update: those of all trainers that can still push one, less the backups."""
        able = {i for i, t in self.live.items() if not self._pushes_none(t)}
        return max(1, len(able | {index for index, _, _ in self.arrived}) - self.backups)

    def _pushes_none(self, trainer: Trainer) -> bool:
        return trainer.drained or (trainer.waits and (self.ending or self._holds_blocking))

    @property
    def _holds_blocking(self) -> bool:
        return any(index in self.blocking for index, _, _ in self.arrived)

    def distance_of(self, index: int) -> int:
        clocks = [t.clock for t in self.live.values() if not t.drained]
        return self.trainers[index].clock - min(clocks)

    def _pass_waiting(self) -> None:
        """A trainer whose full buffer blocks simulations does not wait for those that have no samples."""
        for trainer in (self.trainers[i] for i in self.blocking):
            ready = trainer.state == "announced" and trainer.announcement.readiness is Readiness.READY
            behind = [t for t in self.live.values() if not t.drained and t.clock < trainer.clock - self.bound]
            if self.kind == "bounded" and ready and all(t.waits for t in behind):
                for passed in behind:
                    passed.clock = trainer.clock - self.bound
                    self.passed += 1

    def _check_start(self, index: int, decision: Decision) -> None:
        announcement = self.trainers[index].announcement
        assert announcement.readiness is Readiness.READY
        assert decision == Decision(Verdict.GO, (index,), self.step, self.samples, batches=announcement.batches)
        assert self.limit is None
        assert not self.is_barrier_due
        assert not self.ending or self.arrived, "no trainer starts once the run is to end, except to complete an update"
        if self.kind == "bounded":
            self.distance = max(self.distance, self.distance_of(index))
            assert self.distance <= self.bound
        if self.kind == "backup":
            assert index not in {i for i, _, _ in self.arrived}, "two gradients of one version"

    def _check_together(self, decisions: dict[int, Decision]) -> None:
        """At a barrier and at the end all trainers get one decision, and no push is in flight."""
        verdicts = {d.verdict for d in decisions.values()}
        if not verdicts & {Verdict.BARRIER, Verdict.END}:
            return
        assert set(decisions) == set(self.live) == self.rules.participants
        assert len(set(decisions.values())) == 1
        assert all(t.state == "announced" for t in self.live.values())
        assert self.arrived == self.summed == []
        decision = next(iter(decisions.values()))
        assert (decision.active, decision.step) == ((), self.step)
        if decision.verdict is Verdict.BARRIER:
            assert self.is_barrier_due
            self.barriers.append(self.step)
            self.at_barrier = set(decisions)
        else:
            self.end = decision

    def _check_share(self, index: int, version: int, share: int) -> None:
        """Each share of a version is validated by one trainer at a time, its own one if that was there."""
        assert (version, share) not in self.reported
        assert all(t.validating != (version, share) for t in self.live.values())
        assert version in self._multiples(self.validate_every)
        assert share in self.shares
        self.for_others += share != index
        assert share == index or share not in self.live or (version, share) not in self._own(share)

    def _check_validations(self) -> None:
        for n in self._multiples(self.validate_every)[-2 * MAX_RETAINED_VERSIONS :]:
            up_to = [m for m in self._multiples(self.validate_every) if m <= n]
            assert self.rules.is_validated(n) is all(map(self._is_validated, up_to))

    def _check_waiting(self) -> None:
        """A trainer without a decision has a reason to wait; a pending validation is none."""
        if self.ending or self.limit is not None or self.at_barrier:
            return
        waiting = {i: t for i, t in self.live.items() if t.state == "announced"}
        assert all(self._own(i) <= self.reported for i in waiting)
        if self.kind == "backup":
            assert not self.arrived or len(self.arrived) < self.needed
        last = [self.step - self.step % every + every for every in self.barrier_every if every]
        last += [self.limits.max_steps] if self.limits.max_steps else []
        busy = [t for t in self.trainers if t.state == "busy"]
        coming = (len(self.summed) + len(busy)) // self.arrivals
        full = self.kind != "backup" and any(self.step + coming >= n for n in last)
        following = range(self.step + 1, self.step + len(busy) + 2) if self.validate_every else ()
        crowded = self.retained + sum(n % self.validate_every == 0 for n in following) > MAX_RETAINED_VERSIONS
        if self.is_barrier_due or full or crowded or (self.limits.max_samples and busy and self.kind != "backup"):
            return
        for index, trainer in waiting.items():
            if trainer.drained:
                continue
            held = index in {i for i, _, _ in self.arrived}
            ahead = self.kind == "bounded" and self.distance_of(index) > self.bound
            assert held or ahead, f"trainer {index} waits for nothing"

    def _check_end(self) -> None:
        end = self.end
        assert self.limit or self.ending
        assert self.rules.trainers == set(self.live)
        assert end.interrupted == (self.stop_requested is Stop.SIGNAL and self.limit is None)
        assert end.reason == (self.limit or end.reason)
        if end.interrupted:
            assert end.reason == "SIGNAL requested"
        assert self.barriers == self._multiples(*self.barrier_every)
        assert all(self._is_validated(n) for n in self._multiples(self.validate_every))
        assert self.served - self.lost == self.samples - self.samples_before
        assert self.rules.dropped == {i: self.dropped[i] for i in range(len(self.trainers))}
        assert all(count <= self.backups for count in self.dropped_of.values())
        if self.limit is None and self.stop_requested is Stop.NO and self.uneven == "join":
            served = [t for i, t in enumerate(self.trainers) if i not in self.forgotten]
            assert not any(t.batches for t in served), "not all data was served"
        assert all(self.rules.rejection_reason(i, self.step) for i in range(len(self.trainers)))
