"""Random numbers of a process: seeding, saving and restoring all generators, and private streams for one thread.

A trainer seeds its generators once per run (:func:`seed_all`) and stores their states in its part of a checkpoint
(:func:`random_states`). A server that runs forward passes for several trainers gives each one its own stream
(:class:`PrivateRng`). Reads of a data set are seeded one by one (:func:`seed_read`), and leave the generators as they
were (:class:`GeneratorStates`); so do a validation (:func:`validation_generators`) and an update
(:func:`update_generators`).
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paramserver.errors import TaskError

# What is drawn from the seed of a run, with the words that it is mixed with:
#
#   the model; the same in every process           seed
#   a trainer, its buffer                          seed, [number of resumes or incarnation,] 1 + its index
#   buffers of another number of trainers          seed, number of resumes[, index]
#   parameters of simulations (online/sampler.py)  0x51, seed[, index]
#   everything else                                seed, ..., one of the words below
#
# SeedSequence takes (0, 1) and (0, 1, 0) for the same; these words are no index of a trainer.
_READ = 0x72656164  # seed, epoch, index: the read of a sample
_GROUP = 0x67726F75  # seed, index, worker, number: a group that a worker reads of an IterableDataset
_ORDER = 0x6F726472  # seed, epoch: the order of a pass
_VALIDATION = 0x76616C69  # seed, version, index: what a validation of a trainer's share draws
_UPDATE = 0x75706474  # seed, version, index: what the optimizer of a server draws in the update that makes a version
CONSTRUCTOR = 0x7461736B  # seed: the constructor of a task; the same in every process
LOADERS = 0x6C6F6164  # seed: the loaders that a LightningModule makes; likewise


def seed_all(*entropy: int) -> None:
    """Seed the generators of torch, numpy and ``random`` from several whole numbers.

    The numbers are mixed by ``numpy.random.SeedSequence``, so that neighboring ones, such as the indices of two
    trainers, give unrelated streams.
    """
    words = np.random.SeedSequence(entropy).generate_state(4)
    seed = (int(words[0]) << 32 | int(words[1])) & (2**63 - 1)
    # torch.manual_seed formats the stack for each kind of device, also in a build of torch that has none.
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    np.random.seed(int(words[2]))
    random.seed(int(words[3]))


def random_states(devices: Sequence[torch.device] = ()) -> dict[str, Any]:
    """Return the states of all generators, also of GPUs in ``devices``, for ``torch.load(weights_only=True)``."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        # In a tensor, as each value of a list costs time when it is stored.
        "random": [version, torch.tensor(numbers), gauss],
        # torch.load refuses numpy arrays, and torch has no arithmetic for uint32: store the keys as int64.
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, float(cached)],
    }
    if gpus := [device for device in devices if device.type != "cpu"]:
        states["gpus"] = [torch.get_device_module(device).get_rng_state(device) for device in gpus]
    return states


def restore_random_states(states: dict[str, Any], devices: Sequence[torch.device] = ()) -> None:
    """Set all generators to the states that :func:`random_states` returned.

    The states are of this process, or of one before it that may have had other devices: the first GPU of ``devices``
    continues the first of them, whatever their numbers, and a generator without a state keeps its own.
    """
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["random"]
    random.setstate((version, tuple(map(int, numbers)), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    gpus = (device for device in devices if device.type != "cpu")
    for device, state in zip(gpus, states.get("gpus", ()), strict=False):
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def validation_generators(seed: int, version: int, index: int, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Return a context in which all generators of this process are those of one validation; restored at its exit.

    So what a validation draws neither depends on the training before it nor changes the training after it. ``index`` is
    that of the trainer whose share is evaluated, whichever trainer evaluates it.
    """
    with _generators(devices, seed, version, index, _VALIDATION):
        yield


@contextmanager
def update_generators(seed: int, version: int, index: int = 0, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Return a context in which all generators of this process are those of one update; restored at its exit.

    So what an optimizer draws in ``step()`` is the same in every mode, on every rank of ddp, and after a resume.
    ``version`` is that which the update makes, and ``index`` that of the server; 0 where there is none.
    """
    # Trainers may call the model of a server meanwhile, with random numbers of their own: see ``PrivateRng``.
    with _generator_lock, _generators(devices, seed, version, index, _UPDATE):
        yield


@contextmanager
def _generators(devices: Sequence[torch.device], *entropy: int) -> Iterator[None]:
    if any(device.type != "cpu" for device in devices):
        states = random_states(devices)
        seed_all(*entropy)
        try:
            yield
        finally:
            restore_random_states(states, devices)
        return
    # The same numbers, in a third of the time.
    before = GeneratorStates.take(gauss=True)
    _seed_default(*entropy)
    try:
        yield
    finally:
        before.restore()


_MT19937_BYTES = 2500  # 624 words and the position


def seed_read(seed: int, epoch: int, index: int) -> None:
    """Seed the CPU generators of torch, numpy and ``random`` for the read of one sample."""
    _seed_default(seed, epoch, index, _READ)


def seed_group(seed: int, trainer_index: int, worker: int, number: int) -> None:
    """Seed the CPU generators of torch, numpy and ``random`` for a group that a worker reads; 0 is before the first."""
    _seed_default(seed, trainer_index, worker, number, _GROUP)


def seed_order(seed: int, epoch: int) -> None:
    """Seed the CPU generators of torch, numpy and ``random`` for the order of one pass over a data set."""
    _seed_default(seed, epoch, _ORDER)


def _seed_default(*entropy: int) -> None:
    words = np.random.SeedSequence(entropy).generate_state(4)
    # Not torch.manual_seed, which takes 100 times as long because it prepares the seeds of all devices.
    torch.default_generator.manual_seed((int(words[0]) << 32 | int(words[1])) & (2**63 - 1))
    if _numpy_is_legacy():
        np.random.seed(int(words[2]))
    random.seed(int(words[3]))


@dataclass(frozen=True)
class GeneratorStates:
    """The states of the CPU generators, to find out whether something was drawn, and to undo it."""

    torch: bytes
    random: tuple[Any, ...]
    numpy: bytes
    gauss: tuple[int, float] = (0, 0.0)

    @classmethod
    def take(cls, gauss: bool = False) -> GeneratorStates:
        """Return the present states, with the number that ``np.random.normal`` keeps for its next call if ``gauss``.

        That number takes longer than all the rest. It changes without anything else only if it is drawn.
        """
        kept = (0, 0.0)
        if gauss and _numpy_is_legacy():
            _, _, _, has_gauss, cached = np.random.get_state(legacy=True)
            kept = (int(has_gauss), float(cached))
        return cls(torch.default_generator.get_state().numpy().tobytes(), random.getstate(), _numpy_words(), kept)

    def restore(self) -> None:
        torch.default_generator.set_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        random.setstate(self.random)
        if self.numpy and _numpy_is_legacy():
            words = np.frombuffer(self.numpy, np.uint32)
            np.random.set_state(("MT19937", words[:-1], int(words[-1]), *self.gauss))


def _numpy_is_legacy() -> bool:
    """Whether numpy's default generator is its own; another one is that of the program that set it."""
    return bool(_numpy_words())


def _numpy_words() -> bytes:
    """Return the memory of numpy's default generator: ``np.random.get_state`` takes 100 times as long."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stub does not list it
    legacy = isinstance(bits, np.random.MT19937)
    return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES) if legacy else b""


# torch has one CPU generator for all threads of a process. Code that swaps its state holds this lock.
_generator_lock = threading.Lock()


class PrivateRng(TorchDispatchMode):
    """A context in which the operations of this thread use a random state of their own.

    Dropout and similar operations take no generator argument. Inside the context, each operation that torch tags as
    random swaps the state of the process's generator for as long as it runs; all other operations of all threads run
    concurrently. The generators of ``random``, numpy and of devices other than the CPU are not touched. ``state`` is
    one of torch's CPU generator (``torch.get_rng_state()``), and is updated in place of that generator.
    """

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state = state

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        _refuse_recomputation()
        with _generator_lock:
            process_state = torch.get_rng_state()
            torch.set_rng_state(self.state)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.state = torch.get_rng_state()
                torch.set_rng_state(process_state)


def _refuse_recomputation() -> None:
    """Raise inside activation checkpointing: it recomputes in the backward, with the process's state, not this one."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise TaskError(
                "the model draws random numbers (dropout) inside torch.utils.checkpoint, which a server that many "
                "trainers call cannot draw again in the backward; use server.compute: trainer"
            )
