"""Validations: the shares that trainers have reported, until there are those of all trainers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

from paramserver.metrics.records import WeightedSums, merge_sums
from paramserver.server.aggregator import Aggregator
from paramserver.server.quorum import JointCall
from paramserver.server.server_run import ServerRun
from paramserver.transport.messages import Future, PendingReplies, ValidationReply


class Validations(JointCall):
    """The shares of each version, and the trainers that wait for its result; every use holds the server's lock.

    A share is named by the index of its trainer. That of a lost trainer is evaluated by one of the others, which wait
    for each other in lockstep and at barriers: it gets the indices of such shares in reply to its own. ``last`` is the
    version that was validated last, and its means: a trainer that joined afterwards does not do it again.
    """

    def __init__(self, aggregator: Aggregator, run: ServerRun, trainers: int) -> None:
        self.last: tuple[int, dict[str, float]] = -1, {}
        self._aggregator = aggregator
        self._run = run
        self._trainers = trainers
        self._shares: dict[int, dict[int, WeightedSums]] = {}
        self._waiting: dict[int, PendingReplies] = {}

    @property
    def tables(self) -> list[PendingReplies]:
        """The trainers that wait for the result of each version."""
        return list(self._waiting.values())

    def report(self, trainer_index: int, version: int, shares: Mapping[int, WeightedSums]) -> Future:
        """Add shares, by the indices of their trainers; reply to the trainer once there are all of them.

        One that was evaluated twice counts once, as both are equal.
        """
        self._shares.setdefault(version, {}).update(shares)
        future = self._waiting.setdefault(version, PendingReplies()).add(trainer_index, None)
        self.evaluate()
        return future

    def report_share(self, version: int, share: int, sums: WeightedSums) -> None:
        """Add a share for which no trainer waits."""
        self._shares.setdefault(version, {})[share] = sums
        self.evaluate()

    def evaluate(self) -> None:
        """Record the validations of which there are all shares, in the order of versions, and reply to those that wait.

        Where trainers wait for each other and none of them evaluates, they get the missing shares to evaluate.
        """
        # With the lock until they are recorded: another handler could record a later version first. While no update is
        # computed: schedules follow a validation, and an update reads what they set.
        self._aggregator.run_exclusively(self._finish)

    def _finish(self, release: Callable[[], None]) -> None:
        rules, store = self._aggregator.rules, self._aggregator.store
        for version in sorted(self._shares):
            if not rules.lockstep and version in store.retained_versions:
                complete = rules.is_validated(version)
            else:
                self._request_missing(version, rules.participants)
                complete = not self.missing(version)
            if complete:
                # In the order of trainers, not of arrival: floating-point sums depend on the order.
                sums = merge_sums(self._shares.pop(version))
                _, futures, _ = self._waiting.pop(version, PendingReplies()).pop_all()
                self._run.complete(futures, partial(self._record, version, sums, futures))
        release()

    def missing(self, version: int) -> tuple[int, ...]:
        """Return the indices of the shares that were not reported."""
        return tuple(i for i in range(self._trainers) if i not in self._shares.get(version, ()))

    def _request_missing(self, version: int, participants: Collection[int]) -> None:
        """Divide the missing shares over the trainers that wait, unless one of ``participants`` still evaluates."""
        waiting = self._waiting.get(version)
        if waiting is None or not waiting.has_all(set(participants)):
            return
        missing, trainers = self.missing(version), sorted(waiting.parts)
        for number, trainer_index in enumerate(trainers):
            if shares := missing[number :: len(trainers)]:
                waiting.pop(trainer_index)[0].set_result(ValidationReply(missing=shares))

    def _record(self, version: int, sums: WeightedSums, trainers: Collection[int]) -> dict[int, ValidationReply]:
        """Record a validation and step the schedules that follow it; return the reply to each of ``trainers``."""
        store, since = self._aggregator.store, self._aggregator.batch_began
        store.drop(version)
        means, improved = sums.means(), self._aggregator.monitor.record_validation(version, sums, since)
        store.updater.on_validation_end(version, means, since)
        self.last = version, means
        return dict.fromkeys(trainers, ValidationReply(means, improved))
