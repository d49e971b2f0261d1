"""What trainers do together: a call waits until all that take part have made it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from paramserver.server.server_run import ServerRun
from paramserver.transport.messages import Future, PendingReplies


class JointCall(ABC):
    """One kind of call that all trainers make, such as that of a validation."""

    @property
    @abstractmethod
    def tables(self) -> Sequence[PendingReplies]:
        """The trainers that wait for others."""

    @abstractmethod
    def evaluate(self) -> None:
        """Reply to those whose calls are complete; called when one has arrived, and when a trainer is lost."""

    def check_overdue(self) -> None:
        """Fail the run if a trainer has not made a call in time that others wait for. Called without the lock."""


class Quorum:
    """All joint calls of a run. Every method is called with the lock of the server.

    If the run fails, all that wait get the error. ``calls`` are evaluated in their order when a trainer is lost.
    """

    def __init__(self, run: ServerRun, *calls: JointCall) -> None:
        self._calls = calls
        run.on_failure(self._pop_waiters)

    @property
    def _tables(self) -> list[PendingReplies]:
        return [table for call in self._calls for table in call.tables]

    @property
    def waiting(self) -> set[int]:
        """The trainers that wait for others."""
        return {index for table in self._tables for index in table.parts}

    def check_overdue(self) -> None:
        """Fail the run if a call is overdue. The lock need not be held."""
        for call in self._calls:
            call.check_overdue()

    def remove(self, trainer_index: int) -> None:
        """Wait no longer for a trainer that is lost."""
        for table in self._tables:
            if trainer_index in table.parts:
                table.pop(trainer_index)
        for call in self._calls:
            call.evaluate()

    def _pop_waiters(self) -> list[Future]:
        return [future for table in self._tables for future in table.pop_all()[1].values()]
