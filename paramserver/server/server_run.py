"""What the parts of a server share: the thread of updates, its connections, its lock and how its run ends."""

from __future__ import annotations

import concurrent.futures
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import torch

from paramserver.config.deadlines import GRACE_S
from paramserver.consistency import Decision
from paramserver.context import place_of_user_code
from paramserver.distributed.membership import watch_peer
from paramserver.distributed.rpc_agent import current_context_id, release_context
from paramserver.distributed.rpc_calls import RemoteError, send, send_deferred
from paramserver.errors import ParamserverError, as_peer_error
from paramserver.metrics.profile import spanned
from paramserver.transport.messages import Future

log = logging.getLogger("paramserver")

P = ParamSpec("P")
T = TypeVar("T")

Job = Callable[[], None]
SubmitFn = Callable[[Job], None]
# Of a caller that waits.
Waiter: TypeAlias = "Future | concurrent.futures.Future[Any]"


def run_now(job: Job) -> None:
    """Run a job in the thread that submits it: for a server whose calls all come from one thread."""
    job()


class UpdateExecutor:
    """Runs jobs one after the other, in the order in which they are submitted.

    It alone writes the parameters and the optimizer's state of a server that runs. A job takes the lock of the server
    only for what follows from its result, never while it computes, so handlers, and with them liveness, do not depend
    on how long an update takes. ``close`` waits ``timeout_s`` for the job that runs.
    """

    def __init__(self, timeout_s: float) -> None:
        self.before_job: Job = lambda: None  # called in the thread
        self._timeout_s = timeout_s
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closing = False
        self._error: BaseException | None = None
        self._job_began = math.inf
        # Ends with ``close``. A job handles its own errors; one that escapes is raised there.
        self._thread = threading.Thread(target=self._run, name="updates", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run ``job`` after those that were submitted before; from any thread. It is dropped after ``close``."""
        self._jobs.put(job)

    def stuck_place(self) -> str:
        """Return where in the code of the user a job is that has run for longer than ``GRACE_S``; "" if nowhere."""
        is_long = time.monotonic() - self._job_began > GRACE_S
        return place_of_user_code([self._thread]) if is_long else ""

    def abandon(self) -> None:
        """Let ``close`` not wait for the job that runs: the run ends because it does not."""
        self._timeout_s = 0.0

    def close(self) -> None:
        """Wait for the job that runs, and end the thread; those after it are dropped, as the run has ended.

        A job that does not end in time is abandoned with its thread, so that the run ends with its own reason.

        Raises:
            BaseException: what ended the thread before.
        """
        self._closing = True
        self._jobs.put(None)
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            log.warning("the update in progress did not end within %g s; its thread is abandoned", self._timeout_s)
        elif self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None and not self._closing:
                self._job_began = time.monotonic()
                self.before_job()
                job()
                self._job_began = math.inf
        except BaseException as error:
            self._error = error
            log.exception("the thread of updates ends")

    @spanned("wait")
    def _next(self) -> Job | None:
        return self._jobs.get()


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


class Network:
    """What a server needs of its RPC agent. Tests and the simulation of the protocol derive their own from it."""

    watch = staticmethod(watch_peer)
    context_id = staticmethod(current_context_id)
    release_context = staticmethod(release_context)

    def send(
        self, name: str, timeout_s: float, handler: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> torch.futures.Future[T]:
        """Call a handler that replies immediately; see ``rpc_calls.send``."""
        return send(name, timeout_s, handler, *args, **kwargs)

    def send_deferred(
        self,
        name: str,
        handler: Callable[Concatenate[Any, P], torch.futures.Future[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> torch.futures.Future[T]:
        """Call a handler that replies later; see ``rpc_calls.send_deferred``."""
        return send_deferred(name, handler, *args, **kwargs)
