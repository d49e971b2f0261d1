"""Parameters read in place and gradients written in place: for trainers on the server's own host.

A one-element ticket still goes down and up the distributed-autograd edge: its gradient, which
``dist_autograd.backward`` brings, says that the gradients are in their place.

Where trainers of the server's host find the versions that they read in place.

The memory that a server shares with processes of its host, where there is enough of it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paramserver.config import ServerConfig
from paramserver.distributed.rpc_calls import tensor_bytes
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.sharding import Shard
from paramserver.transport.autograd import pull, push_root
from paramserver.transport.base import ServerTransport, TrainerTransport
from paramserver.transport.segments import SegmentHost, attach
from paramserver.transport.snapshot_ring import SnapshotRing

# The parameters themselves, where trainers read copies of them, and several servers own them together.
LIVE_KEY = "parameters/live"


def parameters_key(slot: int) -> str:
    return f"parameters/{slot}"


def gradients_key(trainer_index: int) -> str:
    return f"gradients/{trainer_index}"


class SnapshotSource(ABC):
    """Where trainers of this host find versions."""

    num_slots: int

    @abstractmethod
    def pin(self) -> int:
        """The slot of the current version, which stays as it is until ``unpin``."""

    @abstractmethod
    def unpin(self, slot: int) -> None:
        """One reader less."""


class LiveParameters(SnapshotSource):
    """The server's own parameters: nobody changes them while anybody reads them, because all step together."""

    slots = 1

    def pin(self) -> int:
        return 0

    def unpin(self, slot: int) -> None:
        """The server itself waits for all readers."""


class RingSnapshots(SnapshotSource):
    """Snapshots in a ring of two more than there are readers; a version that nobody pulls is never copied.

    Args:
        host: allocates them.
        layout: of the parameters.
        readers: how many trainers at most read at once.
        current: gives the version's number and its flat tensors.
    """

    def __init__(
        self, host: SegmentHost, layout: FlatLayout, readers: int, current: Callable[[], tuple[int, Sequence[Tensor]]]
    ) -> None:
        self.num_slots = readers + 2
        self._current = current
        self._ring = SnapshotRing(self.num_slots)
        self._flats = [host.allocate(parameters_key(slot), layout) for slot in range(self.num_slots)]
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


class SharedMemoryServerTransport(ServerTransport):
    """Hands out tickets, and finds gradients in the trainer's own segment.

    Args:
        shelf: of all trainers of this host.
        gradients: the flat tensors that the trainer writes to between a pull and the push that follows, or of several
            servers this one's ranges of them.
        arrived: called when a ticket has come back.
    """

    in_place = True

    def __init__(self, shelf: SnapshotSource, gradients: list[Tensor], arrived: Callable[[], None]) -> None:
        self._shelf = shelf
        self._gradients = gradients
        self._arrived = arrived
        self._is_back = False
        self._leaf = torch.zeros(1, requires_grad=True)
        self._pinned: int | None = None

    def pin_version(self) -> int:
        self.unpin()
        self._pinned = self._shelf.pin()
        return self._pinned

    def pull(self) -> tuple[Tensor, ...]:
        return tuple(pull([self._leaf], [torch.zeros(1)], self._ticket_came))

    def _ticket_came(self) -> None:
        self._is_back = True
        self._arrived()

    def view_version(self) -> tuple[int, Sequence[Tensor]]:
        return self.pin_version(), ()

    def collect_gradients(self, held: Mapping[Tensor, Tensor]) -> list[Tensor] | None:
        return list(self._gradients) if self._is_back or self._leaf in held else None

    def unpin(self) -> None:
        self._is_back = False
        if self._pinned is not None:
            self._shelf.unpin(self._pinned)
            self._pinned = None


class SharedMemoryTrainerTransport(TrainerTransport):
    """Makes the model's parameters views of the server's snapshots; on another device, copies of them.

    Args:
        layout: how the parameters lie in the flat tensors.
        parameters: the model's, in the order of the layout.
        address: of the server's segments.
        slots: how many snapshots there are.
        trainer_index: whose gradients are written.
        timeout_s: for each segment.
    """

    name = "shared_memory"
    in_place = True

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Sequence[Tensor],
        address: str,
        slots: int,
        trainer_index: int,
        timeout_s: float,
    ) -> None:
        self._names = [slot.name for slot in layout.slots]
        self._parameters = list(parameters)
        self._on_cpu = all(p.device.type == "cpu" for p in parameters)
        self._snapshots = [
            list(layout.views(attach(address, parameters_key(slot), layout, timeout_s)).values())
            for slot in range(slots)
        ]
        gradients = attach(address, gradients_key(trainer_index), layout, timeout_s)
        self.gradient_views = list(layout.views(gradients).values())
        self._layout = layout
        self._place: int | None = None
        self._counts: list[int] = []

    @torch.no_grad()
    def map_version(self, place: int) -> None:
        if not self._on_cpu:
            torch._foreach_copy_(self._parameters, self._snapshots[place])
        elif place != self._place:
            self._move(self._snapshots[place])
        self._place = place
        self._counts = [parameter._version for parameter in self._parameters]

    @torch.no_grad()
    def load(self, flats: Sequence[Tensor]) -> None:
        views = list(self._layout.views(flats).values())
        if self._on_cpu:
            self._move(views)
        else:
            torch._foreach_copy_(self._parameters, views)
        self._place = None

    def _move(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.data = view

    def backward_root(self, pulled: Sequence[Tensor]) -> Tensor:
        if self._on_cpu:
            self._check_unchanged()
        return push_root([torch.ones(1)], pulled)

    def _check_unchanged(self) -> None:
        for name, parameter, count in zip(self._names, self._parameters, self._counts, strict=True):
            if parameter._version != count:
                raise TaskError(
                    f"parameter {name} was changed in place on a trainer, and belongs to the server; change it in "
                    "build_model or through the optimizer, or use server.transport: rpc, where such a change is lost"
                )

    def step_bytes(self, pulled: Sequence[Tensor]) -> int:
        return 2 * tensor_bytes(pulled)


T = TypeVar("T")

log = logging.getLogger("paramserver")


class SharedMemory:
    """Gives memory that others read and write in place; where there is too little, all goes over RPC.

    Args:
        host: of the segments; None where nothing is to be shared.
        config: of the server.
        lockstep: trainers read the parameters themselves, and no copies.
        note: takes what the user should know, in one sentence.
    """

    def __init__(
        self, host: SegmentHost | None, config: ServerConfig, lockstep: bool, note: Callable[[str], None]
    ) -> None:
        self._host = host
        self._config = config
        self._lockstep = lockstep
        self._note = note
        self._outside = 0
        self._shelf: SnapshotSource | None = None
        self.parameters_key = parameters_key(0) if lockstep else LIVE_KEY

    @property
    def address(self) -> str | None:
        """Where others find the memory; None where none is shared (any more)."""
        return None if self._host is None else self._host.address

    def location(self) -> tuple[str | None, str]:
        """Address and key of the parameters themselves."""
        return self.address, self.parameters_key

    def disable(self) -> None:
        """From now on all goes over RPC."""
        self._host = None

    def allocate_parameters(self, layout: FlatLayout) -> list[Tensor]:
        """Memory for the parameters that others can reach, or of this process alone."""
        return self._made(lambda host: host.allocate(self.parameters_key, layout)) or layout.allocate()

    def open_snapshots(
        self, layout: FlatLayout, trainers: int, current: Callable[[], tuple[int, Sequence[Tensor]]]
    ) -> None:
        """Where trainers find versions; ``current`` as for ``RingSnapshots``."""
        self._outside = trainers
        if self._lockstep:
            self._shelf = self._made(lambda _: LiveParameters())
        else:
            self._shelf = self._made(lambda host: RingSnapshots(host, layout, trainers, current))

    def make_transport(
        self, trainer_index: int, layout: FlatLayout, shard: Shard, arrived: Callable[[], None]
    ) -> tuple[SharedMemoryServerTransport, int] | None:
        """A trainer's way through this memory, and how many snapshots there are for it; None where there is none."""
        gradients = self._made(lambda host: host.allocate(gradients_key(trainer_index), layout))
        if gradients is None or self._shelf is None:
            return None
        self._outside -= 1
        wire_dtype = self._config.wire_dtype
        if not self._outside and layout.narrowed(getattr(torch, wire_dtype)) != layout:
            self._note(
                f"server.wire_dtype ({wire_dtype}) rounds nothing here, as all trainers share the server's memory; "
                "set server.transport: rpc to have it, or leave it out"
            )
        return SharedMemoryServerTransport(self._shelf, shard.slice_flats(gradients), arrived), self._shelf.num_slots

    def _made(self, make: Callable[[SegmentHost], T]) -> T | None:
        """What ``make`` makes in shared memory; None where there is none. All goes over RPC then, if the user lets it.

        Raises:
            UnsupportedConfiguration: there is too little memory, and ``server.transport`` is not auto.
        """
        if self._host is None:
            return None
        try:
            return make(self._host)
        except UnsupportedConfiguration as error:
            if self._config.transport != "auto":
                raise
            log.warning("server.transport (auto): all goes over RPC from here on: %s", error)
            self._host = None
            return None
