"""What one process of a run knows of itself, and how it is asked to stop.

Code that only one trainer runs.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from paramserver.cluster import ProcessIdentity
from paramserver.config import Config, Role
from paramserver.consistency import Stop
from paramserver.devices import Placement
from paramserver.online.spec import ReceiverSpec

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Remembers the first signal that asks this process to stop; a second SIGINT leaves at once.

    Args:
        restore: put the earlier handlers back at the end. A process that ends with its rank keeps these: a signal to
            all ranks may come when one has just finished, and must not make a good end look like a death.
    """

    def __init__(self, restore: bool = True) -> None:
        self._restore = restore
        self.event = threading.Event()
        self._reason = ""

    def request(self, reason: str) -> None:
        self._reason = self._reason or reason
        self.event.set()

    def state(self) -> tuple[Stop, str]:
        return (Stop.SIGNAL, self._reason) if self.event.is_set() else (Stop.NO, "")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.event.is_set():
            os._exit(1)
        self.request(f"signal {signal.Signals(number).name}")

    def __enter__(self) -> StopRequest:
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items() if self._restore else ():
            signal.signal(number, handler)

    _previous: dict[int, Any]


class StartupTimer:
    """Where the time from the command to the first step goes.

    Args:
        began: ``time.time()`` of the command; of this process where nobody says so.
    """

    def __init__(self, began: float | None = None) -> None:
        self._last = process_started() if began is None else began
        self.phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """The time since the last mark belongs to ``phase``."""
        now = time.time()
        self.phases[phase] = self.phases.get(phase, 0.0) + max(now - self._last, 0.0)
        self._last = now


def process_started() -> float:
    """``time.time()`` of the moment at which the kernel started this process."""
    with open("/proc/self/stat", encoding="ascii") as stat:  # noqa: PTH123 - a kernel file
        ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))


@dataclass(frozen=True)
class ProcessContext:
    """One process of a run: who it is, where it computes, and who may stop it."""

    config: Config
    identity: ProcessIdentity
    role: Role
    trainers: int
    placement: Placement
    stop: StopRequest = field(default_factory=StopRequest)
    start_clock: StartupTimer = field(default_factory=StartupTimer)
    post: ReceiverSpec | None = None
    """Where this trainer receives samples of simulations; None where there are none."""

    @property
    def trainer_index(self) -> int:
        assert self.role.trainer_index is not None
        return self.role.trainer_index


def seed_all(*entropy: int) -> None:
    """Seed torch, numpy and random from several whole numbers, so that nearby ones give unrelated streams."""
    words = np.random.SeedSequence(entropy).generate_state(4)
    torch.manual_seed((int(words[0]) << 32 | int(words[1])) & (2**63 - 1))
    np.random.seed(int(words[2]))
    random.seed(int(words[3]))


def random_states() -> dict[str, Any]:
    """The states of all random generators of this process, in types that ``torch.load(weights_only=True)`` takes."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, float(cached)],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["random"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


P = ParamSpec("P")
T = TypeVar("T")

_trainer_index: int | None = None


def set_trainer_index(trainer_index: int | None) -> None:
    """Say which trainer this process is; None for none."""
    global _trainer_index
    _trainer_index = trainer_index


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Call ``function`` on the first trainer alone (in rpc that is not rank 0, which is a server); None elsewhere."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if _trainer_index in (0, None) else None

    return called
