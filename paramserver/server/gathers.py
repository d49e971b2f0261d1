"""Calls of ``trainer.all_gather`` that trainers have made and others have not yet."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from paramserver.transport.messages import Future, PendingReplies


class Gathers:
    """The values of each call until all trainers that make it have sent theirs; every use holds the server's lock.

    ``participants`` are the trainers of the last decision that are not lost.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[int, ...], tuple[Collection[int] | None, PendingReplies]] = {}

    @property
    def tables(self) -> list[PendingReplies]:
        return [table for _, table in self._calls.values()]

    def add(self, trainer_index: int, value: Any, call: tuple[int, ...], active: Collection[int] | None) -> Future:
        """Add a trainer's value and return the future of its reply.

        Args:
            trainer_index: the trainer.
            value: its own.
            call: names the call, alike for all trainers.
            active: the trainers that make it; None for all participants.
        """
        return self._calls.setdefault(call, (active, PendingReplies()))[1].add(trainer_index, value)

    def pop_complete(self, participants: Collection[int]) -> list[tuple[Future, list[Any]]]:
        """Remove the calls that all have made; return the future of each trainer with its reply."""
        complete = [
            call for call, (active, table) in self._calls.items() if table.has_all(_made_by(active, participants))
        ]
        replies = []
        for call in complete:
            values, futures, _ = self._calls.pop(call)[1].pop_all()
            in_order = [values[index] for index in sorted(values)]
            replies += [(future, in_order) for future in futures.values()]
        return replies

    def overdue(self, participants: Collection[int], limit_s: float) -> list[int]:
        """Return the trainers for whose call another one has waited for longer than ``limit_s``."""
        now = time.perf_counter()
        late = [
            _made_by(active, participants) - table.parts.keys()
            for active, table in self._calls.values()
            if any(now - arrival_s > limit_s for arrival_s in table.arrival_s.values())
        ]
        return sorted(set().union(*late))


def _made_by(active: Collection[int] | None, participants: Collection[int]) -> set[int]:
    """Return the trainers that are expected to make a call; a lost one is not among them."""
    return set(participants) if active is None else set(active).intersection(participants)
