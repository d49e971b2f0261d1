"""Calls of ``trainer.all_gather`` that trainers have made and others have not yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from paramserver.errors import TaskError
from paramserver.server.quorum import JointCall
from paramserver.server.server_run import ServerRun
from paramserver.transport.messages import Future, PendingReplies


class Gathers(JointCall):
    """The values of each call until all trainers that make it have sent theirs, for ``limit_s`` at most.

    ``participants`` returns the trainers of the last decision that are not lost.
    """

    def __init__(self, run: ServerRun, participants: Callable[[], Collection[int]], limit_s: float) -> None:
        self._run = run
        self._participants = participants
        self._limit_s = limit_s
        self._calls: dict[tuple[int, ...], tuple[Collection[int] | None, PendingReplies]] = {}

    @property
    def tables(self) -> list[PendingReplies]:
        return [table for _, table in self._calls.values()]

    def add(self, trainer_index: int, value: Any, call: tuple[int, ...], active: Collection[int] | None) -> Future:
        """Add a trainer's value and return the future of its reply: all values, in the order of trainers.

        All participants make the call if ``active`` is None.
        """
        return self._calls.setdefault(call, (active, PendingReplies()))[1].add(trainer_index, value)

    def evaluate(self) -> None:
        """Reply to the calls that all have made."""
        with self._run.lock:
            participants = self._participants()
            complete = [
                call for call, (active, table) in self._calls.items() if table.has_all(_made_by(active, participants))
            ]
            popped = [self._calls.pop(call)[1].pop_all() for call in complete]
        for values, futures, _ in popped:
            in_order = [values[index] for index in sorted(values)]
            for future in futures.values():
                future.set_result(in_order)

    def check_overdue(self) -> None:
        """Fail the run if a trainer has not made a call that others wait for."""
        now = time.perf_counter()
        with self._run.lock:
            participants = self._participants()
            late = [
                _made_by(active, participants) - table.parts.keys()
                for active, table in self._calls.values()
                if any(now - arrival_s > self._limit_s for arrival_s in table.arrival_s.values())
            ]
        if missing := sorted(set().union(*late)):
            names = ", ".join(map(str, missing))
            self._run.fail(
                TaskError(
                    f"trainer.all_gather was not called by trainer {names} within cluster.timeout_s "
                    f"({self._limit_s:g} s) of the others; call it on all trainers, at the same places"
                )
            )


def _made_by(active: Collection[int] | None, participants: Collection[int]) -> set[int]:
    """Return the trainers that are expected to make a call; a lost one is not among them."""
    return set(participants) if active is None else set(active).intersection(participants)
