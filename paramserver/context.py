"""What a process of a run knows about itself: identity, role, devices, requests to stop, and start-up times."""

from __future__ import annotations

import functools
import logging
import math
import os
import select
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from paramserver.cluster import ProcessIdentity
from paramserver.config import Config, Role
from paramserver.config.deadlines import GRACE_S, HURRY_S, SAME_SIGNAL_S
from paramserver.consistency import Stop
from paramserver.devices import Placement
from paramserver.errors import ParamserverError
from paramserver.metrics.profile import StepProfiler
from paramserver.online.spec import ReceiverSpec
from paramserver.platform import start_ticks
from paramserver.process_utils import STOP_SIGNALS, discard_output_without_terminal, recorded_signals, stop_signals

log = logging.getLogger("paramserver")


class _SignalEvent(threading.Event):
    """An event that a signal handler may set, in whatever call of it the handler interrupts its thread.

    ``threading.Event.set`` takes the event's lock, which the interrupted thread may hold; this one takes none. A wait
    notices it within a short time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._is_set and (left_s := deadline - time.monotonic()) > 0:
            super().wait(min(left_s, 0.02))
        return self._is_set


# Those that are entered; the last one has installed its handlers last.
_entered: list[StopRequest] = []


def _restore_in_child() -> None:
    """Let signals do to a forked child what they did before the run: no loop there looks at the request to stop.

    multiprocessing ends its workers by SIGTERM, and waits for them without a limit.
    """
    if _entered:
        signal.set_wakeup_fd(-1)  # of ``StopLimit``
    while _entered:
        _entered.pop().restore_handlers()


os.register_at_fork(after_in_child=_restore_in_child)


_ends = threading.Lock()  # taken once, by whichever thread ends the process


def _end_at_once(number: int) -> None:
    """End this process at a second signal of the user: print a line, and nothing that could wait."""
    if _ends.acquire(blocking=False):
        name = signal.Signals(number).name
        with suppress(OSError):
            if select.select([], [2], [], 0)[1]:
                os.write(2, f"signal {name} again: this process ends at once, without a checkpoint\n".encode())
        # Not an exception: one that is raised inside a callback or a ``finally`` might be caught, and exit handlers may
        # wait.
        os._exit(1)


class StopRequest:
    """Records the first request to stop this process, made by a signal or by :meth:`request`.

    As a context manager it installs handlers for ``stop_signals()``, if used in the main thread. A SIGINT after the
    first request ends the process at once. A forked child has the previous handlers.

    Args:
        restore: install the previous handlers again on exit. A process that ends with its rank keeps these handlers: a
            signal to all ranks may arrive when one has just finished, and must not turn its success into a failure.
    """

    def __init__(self, restore: bool = True) -> None:
        self._restore = restore
        self.event: threading.Event = _SignalEvent()
        self._reason = ""
        self._handled = 0
        self._error: Exception | None = None
        self._previous: dict[int, Any] = {}
        self.on_request: Callable[[], None] = lambda: None

    def request(self, reason: str) -> None:
        """Request a stop. The first reason is kept."""
        # The reason before the event: ``state`` reads it once the event is set. No lock, as a signal handler may
        # interrupt its holder.
        self._reason = self._reason or reason
        self.event.set()
        self.on_request()

    def state(self) -> tuple[Stop, str]:
        return (Stop.SIGNAL, self._reason) if self.event.is_set() else (Stop.NO, "")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if number == signal.SIGHUP:
            discard_output_without_terminal()
        self._handled += 1
        # Not by the event, which the thread of ``StopLimit`` may have set for this very signal.
        if number == signal.SIGINT and self._handled > 1:
            _end_at_once(number)
        self.request(f"signal {signal.Signals(number).name}")

    def __enter__(self) -> StopRequest:
        # Python allows handlers in the main thread only; a run inside another thread leaves signals to its owner.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in stop_signals()}
            while recorded_signals:
                self.request(f"signal {signal.Signals(recorded_signals.pop(0)).name}")
        _entered.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._restore:
            self.restore_handlers()
            _entered.remove(self)

    def handles(self, number: int) -> bool:
        """Return whether the handler of this object is installed for a signal: the task may install one of its own."""
        return signal.getsignal(number) == self._handle

    def restore_handlers(self) -> None:
        """Install the previous handlers in place of those of this object."""
        for number, handler in self._previous.items():
            if self.handles(number):
                signal.signal(number, handler)

    def raise_in_main_thread(self, error: Exception) -> None:
        """Raise ``error`` in the main thread, if it runs code in Python or waits in it; from another thread."""
        self._error = error
        number = next((number for number in self._previous if self.handles(number)), None)
        if number is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, number)


_POLL_S = 0.1
_CLOSE_S = 5.0


class StopLimit:
    """Limits the time from a request to stop this process to its end. A context manager around the work of a rank.

    A hook that never returns keeps the main thread from ending the run, and a call into C that does not return keeps it
    from running the handlers of signals. So a thread waits for requests. It learns of signals by Python's wake-up
    descriptor, which is written at the instant of the signal, whatever the main thread does.

    After ``limit_s``, or at a second signal, it calls ``at_limit``, and ``end`` once ``GRACE_S`` have passed without a
    sign that the main thread ends the run: ``beat``, or a wait inside of ``paused``. If the main thread is in no code
    of the user, it waits for another process, which has its own limit, and gets twice that time.

    Args:
        limit_s: ``cluster.stop_within_s``; infinite if a signal does not end the run.

    Attributes:
        end: called with where the process stands. Ends it; if it returns, this object does nothing more.
        at_limit: called in the thread with where the main thread stands; "" if in no code of the user.
        is_over: the limit has passed.
        limit_text: which limit that is, such as "within cluster.stop_within_s (15 s)".
    """

    def __init__(
        self,
        stop: StopRequest,
        limit_s: float,
        acknowledge: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.stop, self.limit_s, self.grace_s = stop, limit_s, GRACE_S
        self.at_limit: Callable[[str], None] = lambda place: None
        self.end: Callable[[str], None] = lambda place: None
        self.is_over = False
        self.limit_text = f"within cluster.stop_within_s ({limit_s:g} s)"
        self._acknowledge = acknowledge
        self._main = threading.current_thread()
        self._signals = 0
        self._requested_at = self._over_at = math.inf
        self._alive_at = 0.0
        self._pauses = 0
        self._paused_at = 0.0  # when the first of them began
        self._closed = False

    def beat(self) -> None:
        """Note that the main thread is ending the run."""
        self._alive_at = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context for what may take any time and has a limit of its own, such as writing a checkpoint.

        It does not pause the time of the code of the user that is called in it, such as the ``state_dict`` of an
        optimizer: that has ``GRACE_S`` at least.
        """
        if not self._pauses:
            self._paused_at = time.monotonic()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self.beat()

    def hurry(self) -> None:
        """End soon after the limit, as the others continue without this process. From any thread."""
        if self.is_over and not self._closed:
            self.grace_s = min(self.grace_s, HURRY_S)
            self._wake()

    def end_now(self, reason: str, limit_text: str) -> None:
        """Request a stop whose limit has passed: that of another process has. From any thread."""
        if not self.is_over:
            # Also where a second signal is about to arrive here, which has arrived there.
            self._over_at, self.limit_text = 0.0, limit_text
            self.stop.request(reason)

    def _wake(self) -> None:
        # Non-blocking: a byte that does not fit into the pipe is not needed.
        with suppress(BlockingIOError):
            os.write(self._writing, b"\0")

    def __enter__(self) -> StopLimit:
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_fd: int | None = None
        if self._main is threading.main_thread():
            self._previous_fd = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self.stop.on_request = self._wake
        # Takes no lock. Ends with ``__exit__``.
        self._thread = threading.Thread(target=self._run, name="stop-limit", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed = True
        self.stop.on_request = lambda: None
        if self._previous_fd is not None:
            signal.set_wakeup_fd(self._previous_fd)
        self._wake()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():  # otherwise ``end`` is about to end this process
            os.close(self._reading)
            os.close(self._writing)

    # The thread.

    def _run(self) -> None:
        while not self.stop.event.is_set():
            self._receive(None)
            if self._closed:
                return
        self._requested_at = time.monotonic()
        self._over_at = min(self._over_at, self._requested_at + self.limit_s)
        limited = (
            "" if math.isinf(self.limit_s) else f", or without it after cluster.stop_within_s ({self.limit_s:g} s)"
        )
        _attempt(
            self._acknowledge,
            f"{self.stop.state()[1]}: this process ends once the present step or hook returns{limited}; a second "
            "Ctrl-C ends it at once",
        )
        if not self._wait_until(lambda: self._over_at):
            return
        self.is_over, self._over_at = True, time.monotonic()
        _attempt(self.at_limit, self.place())
        if self._wait_until(lambda: max(self._over_at, self._alive_at) + self.grace_s * (1 if self.place() else 2)):
            self.end(self.place() or place_of_user_code())

    def _wait_until(self, due: Callable[[], float]) -> bool:
        """Return True at that time, unless it is paused, or False once this object is closed."""
        while not self._closed:
            left_s = due() - time.monotonic()
            if left_s <= 0 and (not self._pauses or self._is_in_hook_of_pause()):
                return True
            self._receive(None if math.isinf(left_s) else max(left_s, _POLL_S))
        return False

    def _is_in_hook_of_pause(self) -> bool:
        return time.monotonic() - self._paused_at > GRACE_S and bool(self.place())

    def _receive(self, timeout_s: float | None) -> None:
        if not select.select([self._reading], [], [], timeout_s)[0]:
            return
        with suppress(BlockingIOError):
            for number in os.read(self._reading, 64):
                if number in STOP_SIGNALS:
                    self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        if not self.stop.handles(number):
            return
        self._signals += 1
        if number == signal.SIGHUP:
            discard_output_without_terminal()  # before this thread prints
        if self._signals == 1:
            self.stop.request(f"signal {signal.Signals(number).name}")
        elif number == signal.SIGINT:
            _end_at_once(number)
        elif number == signal.SIGHUP:
            return  # another one for the same terminal
        elif time.monotonic() - self._requested_at > SAME_SIGNAL_S and not self.is_over:
            self._over_at, self.limit_text = 0.0, "before a second signal"
            _attempt(self._acknowledge, f"signal {signal.Signals(number).name} again: this process ends now")

    def place(self) -> str:
        """Return where in the code of the user the main thread is; "" if nowhere."""
        return place_of_user_code([self._main])


def _attempt(call: Callable[[str], None], text: str) -> None:
    """Call what may fail, such as a write to a full disk: the process has to end all the same."""
    try:
        call(text)
    except Exception:
        log.exception("the process ends without what fails here")


_FOLDER = Path(__file__).parent
_OWN = (f"{_FOLDER}{os.sep}", f"{_FOLDER.with_name('trainers')}{os.sep}")
# A virtual environment may use the packages of another one, or of the system.
_INSTALLED = tuple(
    {
        *(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")),
        *(path + os.sep for path in sys.path if Path(path).name in ("site-packages", "dist-packages")),
    }
)
_COLLECTIVES = tuple(
    f"{path}torch{os.sep}{name}{os.sep}" for path in _INSTALLED for name in ("distributed", f"nn{os.sep}parallel")
)
# What this package calls itself. Other installed packages may hold the task.
_USED = tuple(
    f"{path}{name}{os.sep}" for path in _INSTALLED for name in ("torch", "numpy", "zmq", "tqdm", "tensorboard", "yaml")
)
_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})


def place_of_user_code(threads: Iterable[threading.Thread] | None = None) -> str:
    """Return which function of the user one of ``threads`` is in, and where; "" if in none.

    Without ``threads`` these are all of the process, also those of torch's RPC agent, which ``threading`` may not know.

    Code of the user is what this package has called last, and is neither of Python nor of a package that it uses. It
    is not what waits in a collective: DistributedDataParallel makes some in a forward.
    """
    frames = sys._current_frames()
    # This function's own frame has ``frames``: a cycle, which would keep what other threads have in variables, such as
    # gradients, until the next garbage collection.
    del frames[threading.get_ident()]
    for ident in frames if threads is None else [thread.ident or 0 for thread in threads]:
        frame = frames.get(ident)
        inner: FrameType | None = None
        called: FrameType | None = None
        while frame is not None and not frame.f_code.co_filename.startswith(_OWN):
            if called is None and frame.f_code.co_filename.startswith(_COLLECTIVES):
                break  # it waits for another process
            if _is_of_user(file := frame.f_code.co_filename):
                # The line of the user's own file, where it is in an installed package by now.
                if inner is None or inner.f_code.co_filename.startswith(_INSTALLED) > file.startswith(_INSTALLED):
                    inner = frame
                called = frame
            frame = frame.f_back
        if frame is not None and inner is not None and called is not None:
            return f"{called.f_code.co_name} ({inner.f_code.co_filename}, line {inner.f_lineno})"
    return ""


def _is_of_user(file: str) -> bool:
    if file.startswith(_INSTALLED):
        return not file.startswith(_USED)
    return not file.startswith((*_STANDARD, "<frozen"))


class StartupTimer:
    """Divides the time since the command (``began``, of ``time.time()``; None = this process) into named phases."""

    def __init__(self, began: float | None = None) -> None:
        self._last = process_start_time() if began is None else began
        self.phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to ``phase``, in seconds."""
        now = time.time()
        # ``time.time()`` may be set back; it is used because the start of the command is known in no other clock that
        # processes share.
        self.phases[phase] = self.phases.get(phase, 0.0) + max(now - self._last, 0.0)
        self._last = now


def process_start_time() -> float:
    """Return ``time.time()`` of the moment at which the kernel started this process."""
    ticks = start_ticks(os.getpid())
    # The kernel counts a process's start from boot, including the time that the machine was suspended.
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))


@dataclass
class Kept:
    """What a trainer keeps from one session to the next.

    Attributes:
        started: the task whose ``on_train_start`` was called.
        generation: of the last session; 0 before the first one.
        partition: the trainer's share, for which the rest was made.
        train: what ``Task.train_source`` returned; None if it cannot be read again.
        validation: batches; None if there are none.
    """

    callbacks: Mapping[str, Any] = field(default_factory=dict)
    started: Any = None
    generation: int = 0
    partition: Any = None
    train: Any = None
    validation: Any = None


@dataclass(frozen=True)
class ProcessContext:
    """One process of a run.

    Args:
        receiver_spec: how this trainer receives samples of simulations; None where there are none.
        session: how often this process has joined the run before.
        is_newcomer: this trainer joins a running job, and has not taken part yet: the others continue if it fails.
        end_now: reports an error and ends this process, from any thread; for a loss that the main thread does not
            notice, as it waits in C++ or computes. None where the process outlives the run.
    """

    config: Config
    identity: ProcessIdentity
    role: Role
    trainers: int
    placement: Placement
    stop: StopRequest = field(default_factory=StopRequest)
    startup_timer: StartupTimer = field(default_factory=StartupTimer)
    receiver_spec: ReceiverSpec | None = None
    session: int = 0
    is_newcomer: bool = False
    kept: Kept = field(default_factory=Kept)
    stop_limit: StopLimit = field(default_factory=lambda: StopLimit(StopRequest(), math.inf))
    end_now: Callable[[ParamserverError], None] | None = None
    profiler: StepProfiler = field(default_factory=StepProfiler)

    @property
    def trainer_index(self) -> int:
        assert self.role.trainer_index is not None
        return self.role.trainer_index


P = ParamSpec("P")
T = TypeVar("T")

_role: Role | None = None


def set_role(role: Role | None) -> None:
    """Set what this process is in a run; None = there is no run."""
    global _role
    _role = role


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate ``function`` so that it runs on the first trainer only; elsewhere it returns None.

    In rpc mode rank 0 is a server, so the first trainer is not rank 0. Outside of a run the function is called.

    Example::

        >>> @rank_zero_only
        ... def report():
        ...     return "reported"
        >>> report()
        'reported'
        >>> set_role(Role(1, "trainer", trainer_index=1))
        >>> report()
        >>> set_role(None)
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if _role is None or _role.trainer_index == 0 else None

    return called
