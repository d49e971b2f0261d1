"""Where trainers of the server's host find the versions that they read in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paramserver.flat import Layout
from paramserver.transport.ring import Ring
from paramserver.transport.segments import SegmentHost

# The parameters themselves, where trainers read copies of them, and several servers own them together.
LIVE_KEY = "parameters/live"


def parameters_key(slot: int) -> str:
    return f"parameters/{slot}"


def gradients_key(trainer_index: int) -> str:
    return f"gradients/{trainer_index}"


class Shelf(ABC):
    """Where trainers of this host find versions."""

    slots: int

    @abstractmethod
    def pin(self) -> int:
        """The slot of the current version, which stays as it is until ``unpin``."""

    @abstractmethod
    def unpin(self, slot: int) -> None:
        """One reader less."""


class LiveShelf(Shelf):
    """The server's own parameters: nobody changes them while anybody reads them, because all step together."""

    slots = 1

    def pin(self) -> int:
        return 0

    def unpin(self, slot: int) -> None:
        """The server itself waits for all readers."""


class RingShelf(Shelf):
    """Snapshots in a ring of two more than there are readers; a version that nobody pulls is never copied.

    Args:
        host: allocates them.
        layout: of the parameters.
        readers: how many trainers at most read at once.
        current: gives the version's number and its flat tensors.
    """

    def __init__(
        self, host: SegmentHost, layout: Layout, readers: int, current: Callable[[], tuple[int, Sequence[Tensor]]]
    ) -> None:
        self.slots = readers + 2
        self._current = current
        self._ring = Ring(self.slots)
        self._flats = [host.allocate(parameters_key(slot), layout) for slot in range(self.slots)]
        self._version: int | None = None

    def pin(self) -> int:
        version, flats = self._current()
        if version != self._version:
            slot = self._ring.publish(version)
            with torch.no_grad():
                for mine, theirs in zip(self._flats[slot], flats, strict=True):
                    mine.copy_(theirs)
            self._version = version
        return self._ring.pin(version)[0]

    def unpin(self, slot: int) -> None:
        self._ring.unpin(slot)
