"""What a process of a run knows about itself: identity, role, devices, requests to stop, and start-up times."""

from __future__ import annotations

import functools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from paramserver.cluster import ProcessIdentity
from paramserver.config import Config, Role
from paramserver.consistency import Stop
from paramserver.devices import Placement
from paramserver.online.spec import ReceiverSpec

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


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


class StopRequest:
    """Records the first request to stop this process, made by a signal or by :meth:`request`.

    As a context manager it installs handlers for SIGTERM, SIGINT and SIGUSR1, if used in the main thread. A SIGINT
    after the first request ends the process at once.

    Args:
        restore: install the previous handlers again on exit. A process that ends with its rank keeps these handlers: a
            signal to all ranks may arrive when one has just finished, and must not turn its success into a failure.

    Example::

        >>> with StopRequest() as stop:
        ...     signal.raise_signal(signal.SIGUSR1)
        >>> stop.state()
        (<Stop.SIGNAL: 3>, 'signal SIGUSR1')
    """

    def __init__(self, restore: bool = True) -> None:
        self._restore = restore
        self.event: threading.Event = _SignalEvent()
        self._reason = ""

    def request(self, reason: str) -> None:
        """Request a stop. The first reason is kept."""
        # The reason before the event: ``state`` reads it once the event is set. No lock, as a signal handler may
        # interrupt its holder.
        self._reason = self._reason or reason
        self.event.set()

    def state(self) -> tuple[Stop, str]:
        """Return whether a stop was requested, and the reason."""
        return (Stop.SIGNAL, self._reason) if self.event.is_set() else (Stop.NO, "")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.event.is_set():
            # Not an exception: one that is raised inside a callback or a ``finally`` might be caught, and exit handlers
            # may wait.
            os._exit(1)
        self.request(f"signal {signal.Signals(number).name}")

    def __enter__(self) -> StopRequest:
        self._previous = {}
        # Python allows handlers in the main thread only; a run inside another thread leaves signals to its owner.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items() if self._restore else ():
            signal.signal(number, handler)

    _previous: dict[int, Any]


class StartupTimer:
    """Divides the time from the command to the first step into named phases.

    Args:
        began: ``time.time()`` of the command; None = of this process.

    Example::

        >>> timer = StartupTimer(began=time.time())
        >>> timer.mark("imports")
        >>> list(timer.phases)
        ['imports']
    """

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
    with open("/proc/self/stat", encoding="ascii") as stat:  # noqa: PTH123 - a kernel file
        # Field 22 of proc(5); the command in field 2 may hold spaces, so count from its closing parenthesis.
        ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
    # The kernel counts a process's start from boot, including the time that the machine was suspended.
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))


@dataclass
class Kept:
    """What a trainer keeps from one session to the next.

    Attributes:
        callbacks: of the task, by name.
        has_started: ``on_train_start`` was called.
        partition: the trainer's share, for which the rest was made.
        train: what ``Task.train_source`` returned; None if it cannot be read again.
        validation: batches; None if there are none.
    """

    callbacks: Mapping[str, Any] = field(default_factory=dict)
    has_started: bool = False
    partition: Any = None
    train: Any = None
    validation: Any = None


@dataclass(frozen=True)
class ProcessContext:
    """One process of a run.

    Args:
        config: effective configuration.
        identity: rank and addresses.
        role: server or trainer, with its index.
        trainers: number of trainers in the run.
        placement: devices on which this process computes.
        stop: request to stop this process.
        startup_timer: times of the start-up.
        receiver_spec: how this trainer receives samples of simulations; None where there are none.
        session: how often this process has joined the run before.
        is_newcomer: this trainer joins a running job, and has not taken part yet: the others continue if it fails.
        kept: from one session to the next.
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
    end_now: Callable[[Exception], None] | None = None

    @property
    def trainer_index(self) -> int:
        assert self.role.trainer_index is not None
        return self.role.trainer_index


P = ParamSpec("P")
T = TypeVar("T")

_trainer_index: int | None = None


def set_trainer_index(trainer_index: int | None) -> None:
    """Set the index of the trainer that this process is; None = no trainer."""
    global _trainer_index
    _trainer_index = trainer_index


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate ``function`` so that it runs on the first trainer only; elsewhere it returns None.

    In rpc mode rank 0 is a server, so the first trainer is not rank 0. Outside of a run the function is called.

    Example::

        >>> @rank_zero_only
        ... def report():
        ...     return "reported"
        >>> report()
        'reported'
        >>> set_trainer_index(1)
        >>> report()
        >>> set_trainer_index(None)
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if _trainer_index in (0, None) else None

    return called
