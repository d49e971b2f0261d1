"""What the parts of server 0 share: its lock, how its run ends, and what is computed without the lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from paramserver.consistency import Decision
from paramserver.distributed.rpc_calls import RemoteError
from paramserver.errors import ParamserverError, as_peer_error
from paramserver.server.update_executor import SubmitFn, run_now
from paramserver.transport.messages import Future

T = TypeVar("T")


class Waiter(Protocol):
    """A future of a caller that waits."""

    def set_result(self, result: Any, /) -> None: ...


class ServerRun:
    """The lock of a server, and the end of its run.

    The lock is held by every handler that touches tables, and never while an update is computed or a checkpoint staged:
    those are jobs of the update thread. They have parameters, optimizer and schedule to themselves, because
    ``Aggregator`` begins nothing else before they are done. It is re-entrant: an error inside a handler calls ``fail``,
    which takes it again. Futures are completed outside of it where their callbacks could take long. The trainers that
    have left ended with ``last_decision``; ``readers`` wait for the current parameters.
    """

    def __init__(self, submit: SubmitFn = run_now) -> None:
        self.lock = threading.RLock()
        self.finished = threading.Event()
        self.error: ParamserverError | None = None
        self.last_decision: Decision | None = None
        self.readers: list[Waiter] = []
        self.submit = submit
        self._pop_waiters: list[Callable[[], Sequence[Waiter]]] = []

    def on_failure(self, pop_waiters: Callable[[], Sequence[Waiter]]) -> None:
        """Reply with the error to all that ``pop_waiters`` removes from its tables, if the run fails."""
        self._pop_waiters.append(pop_waiters)

    def fail(self, error: ParamserverError) -> None:
        """End the run: every waiting trainer gets the error, and so does every later call."""
        with self.lock:
            if self.error is None:
                self.error = error
            reply = RemoteError.of(as_peer_error(self.error))
            # Removed from the tables under the lock, so that each future is completed once.
            waiting = [*self.readers, *(waiter for pop in self._pop_waiters for waiter in pop())]
            self.readers.clear()
        for waiter in waiting:
            waiter.set_result(reply)
        self.finished.set()

    def fail_with(self, error: BaseException) -> ParamserverError:
        """End the run with any error, and return what it ends with."""
        failure = RemoteError.of(error).error()
        self.fail(failure)
        return failure

    def check(self) -> None:
        """Raise the error of the run, if it has failed."""
        if self.error is not None:
            raise as_peer_error(self.error)

    def compute(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Run ``work`` without the lock, after what was submitted before, and then ``then`` with it.

        An error ends the run, also one of a user that is no ``Exception``, as the thread must continue. If the
        run has failed meanwhile, every caller has its reply, and the result is dropped.
        """

        def job() -> None:
            try:
                result = work()
                with self.lock:
                    if self.error is None:
                        then(result)
            except BaseException as error:  # noqa: BLE001 - ends the run and is sent to every trainer
                self.fail_with(error)

        self.submit(job)

    def complete(self, futures: Mapping[int, Future], make_replies: Callable[[], Mapping[int, Any]]) -> None:
        """Reply to each trainer with its own value; an error ends the run and is the reply to all."""
        # The futures are out of their table already, so ``fail`` does not complete them.
        try:
            replies = make_replies()
        except Exception as error:  # noqa: BLE001 - ends the run and is sent to every trainer
            # As everywhere: a trainer that raised the error itself would be reported as its cause.
            replies = dict.fromkeys(futures, RemoteError.of(as_peer_error(self.fail_with(error))))
        for trainer_index, future in futures.items():
            future.set_result(replies[trainer_index])
