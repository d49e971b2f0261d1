"""Shares of validations that trainers have reported, until there are those of all trainers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from paramserver.metrics.records import WeightedSums, merge_sums
from paramserver.transport.messages import Future, PendingReplies


class Validations:
    """The shares of each version, and the trainers that wait for its result; every use holds the server's lock.

    A share is named by the index of its trainer. That of a lost trainer is evaluated by one of the others, which wait
    for each other in lockstep and at barriers: it gets the indices of such shares in reply to its own.

    Args:
        trainers: number of shares.

    Example::

        >>> validations = Validations(trainers=2)
        >>> validations.add(100, {0: WeightedSums({"loss": 3.0}, {"loss": 2}, 2)})
        >>> future = validations.wait(100, trainer_index=0)
        >>> [(of_trainer_1, _)] = validations.pop_requests(100, {0})
        >>> of_trainer_1 is future, validations.missing(100)
        (True, (1,))
    """

    def __init__(self, trainers: int) -> None:
        self._trainers = trainers
        self._shares: dict[int, dict[int, WeightedSums]] = {}
        self._waiting: dict[int, PendingReplies] = {}

    @property
    def tables(self) -> list[PendingReplies]:
        return list(self._waiting.values())

    def versions(self) -> list[int]:
        """Return those of which shares were reported and others are missing."""
        return sorted(self._shares)

    def add(self, version: int, shares: Mapping[int, WeightedSums]) -> None:
        """Add shares, by the indices of their trainers; one that was evaluated twice counts once, as both are equal."""
        self._shares.setdefault(version, {}).update(shares)

    def wait(self, version: int, trainer_index: int) -> Future:
        """Return the future of the reply to a trainer that waits for the result."""
        return self._waiting.setdefault(version, PendingReplies()).add(trainer_index, None)

    def missing(self, version: int) -> tuple[int, ...]:
        """Return the indices of the shares that were not reported."""
        return tuple(i for i in range(self._trainers) if i not in self._shares.get(version, ()))

    def pop_requests(self, version: int, participants: Collection[int]) -> list[tuple[Future, tuple[int, ...]]]:
        """Divide the missing shares over the trainers that wait; return the future of each with its part of these.

        Nothing while one of ``participants`` still evaluates.
        """
        waiting = self._waiting.get(version)
        if waiting is None or not waiting.has_all(set(participants)):
            return []
        missing, trainers = self.missing(version), sorted(waiting.parts)
        divided = {trainer: missing[i :: len(trainers)] for i, trainer in enumerate(trainers)}
        return [(waiting.pop(trainer)[0], shares) for trainer, shares in divided.items() if shares]

    def pop(self, version: int) -> tuple[WeightedSums, dict[int, Future]]:
        """Remove a version; return its merged shares and the futures of the trainers that wait."""
        shares = self._shares.pop(version)
        _, futures, _ = self._waiting.pop(version, PendingReplies()).pop_all()
        # In the order of trainers, not of arrival: floating-point sums depend on the order.
        return merge_sums(shares), futures
