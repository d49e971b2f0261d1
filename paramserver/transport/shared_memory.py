"""Transport in shared memory: trainers on the server's host read parameters and write gradients without copies.

The version that a trainer pulls is in its own memory, so nothing is recorded in the context of the step: the backward
in it, ``dist_autograd.backward``, is local.

``ServerSharedMemory`` decides for a server what is shared. Trainers read a version that stays unchanged meanwhile: from
``LiveParameters`` in lockstep, from ``RingSnapshots`` otherwise.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from paramserver.config import ServerConfig
from paramserver.devices import CPU
from paramserver.errors import ParamserverError, UnsupportedConfiguration
from paramserver.parameters.flat import FlatLayout, has_gaps
from paramserver.parameters.tables import RowSegment
from paramserver.transport.base import ServerTransport, TrainerTransport
from paramserver.transport.compression import make_codec
from paramserver.transport.messages import VersionView
from paramserver.transport.segments import SegmentHost, attach

T = TypeVar("T")

log = logging.getLogger("paramserver")

# The parameters themselves, where several servers own them together and trainers read snapshots.
LIVE_KEY = "parameters/live"


def parameters_key(slot: int) -> str:
    """Return the key of the segment of a snapshot."""
    return f"parameters/{slot}"


def gradients_key(trainer_index: int, incarnation: int = 1) -> str:
    """Return the key of the segment that a trainer writes gradients to.

    Each incarnation has its own: one that was taken for lost and is not dead may still write.
    """
    return f"gradients/{trainer_index}/{incarnation}"


def socket_key(trainer_index: int, incarnation: int) -> str:
    """Return the key of the socket over which a trainer makes the calls of its steps."""
    return f"calls/{trainer_index}/{incarnation}"


class LiveParameters:
    """Where trainers of this host read versions: the server's own parameters. Called under the server's lock.

    In lockstep no version is applied before every trainer has pushed, so no trainer reads while they change.
    """

    num_slots = 1

    def pin(self) -> int:
        """Return the slot of the current version, which stays unchanged until ``unpin``."""
        return 0

    def unpin(self, slot: int) -> None:
        """Undo one ``pin``. Here it does nothing: the server waits for all trainers."""


@dataclass
class _RingSlot:
    version: int | None = None
    pins: int = 0


class SnapshotRing:
    """A ring of ``slots`` snapshots. A reader pins a slot; neither a pinned slot nor the newest is overwritten.

    Readers that pin one slot each always leave one free for the next version if there are two slots more than readers:
    one for each reader, one for the newest version, and one for the version that replaces it.

    Not thread-safe: the caller's lock covers ``publish`` and the writing of the slot that it returns, so that no reader
    pins a version that is written only in part. There are at least 2 slots.
    """

    def __init__(self, slots: int) -> None:
        if slots < 2:
            raise ParamserverError(
                f"slots ({slots}) must be at least 2, the newest version and the next; use 2 or more"
            )
        self._slots = [_RingSlot() for _ in range(slots)]
        self._newest: int | None = None

    def publish(self, version: int) -> int:
        """Return the slot that holds ``version`` from now on: a free one, preferably unused, else the oldest version.

        Raises:
            ParamserverError: ``version`` is not above the newest, or no slot is free; nothing has changed.
        """
        if self._newest is not None and version <= (newest := self._slots[self._newest].version or 0):
            raise ParamserverError(
                f"version ({version}) must be above {newest}, the newest, which slot {self._newest} holds; publish "
                "each version once, in order"
            )
        # The newest is never overwritten, pinned or not: ``pin()`` without a version must always find one.
        free = [i for i, slot in enumerate(self._slots) if slot.pins == 0 and i != self._newest]
        if not free:
            raise ParamserverError(
                f"version ({version}) must find a free slot, and has none: {self._describe()}; unpin what is no longer "
                "read, or use more slots"
            )
        # Unused slots first and then the oldest version: a version that is not pinned stays available as long as
        # possible.
        chosen = min(free, key=lambda i: (self._slots[i].version is not None, self._slots[i].version or 0))
        # The first changes; every check is above, so a refusal leaves the ring as it was.
        self._slots[chosen].version = version
        self._newest = chosen
        return chosen

    def pin(self, version: int | None = None) -> tuple[int, int]:
        """Retain a version, or the newest, until ``unpin`` has been called as often. Return its slot and the version.

        Raises:
            ParamserverError: no slot holds it (any more).
        """
        versions = [slot.version for slot in self._slots]
        index = self._newest if version is None else versions.index(version) if version in versions else None
        if index is None:
            wanted = "the newest version" if version is None else f"version ({version})"
            raise ParamserverError(f"{wanted} must be in a slot to be pinned: {self._describe()}; pin the newest")
        self._slots[index].pins += 1
        pinned = versions[index]
        assert pinned is not None
        return index, pinned

    def unpin(self, slot: int) -> None:
        """Undo one ``pin``.

        Raises:
            ParamserverError: there is no such slot, or it is not pinned.
        """
        if not 0 <= slot < len(self._slots):
            raise ParamserverError(f"slot ({slot}) must be from 0 to {len(self._slots) - 1}; unpin the one pinned")
        # An additional ``unpin`` would release the slot of another reader, which would then read a version half
        # overwritten.
        if self._slots[slot].pins == 0:
            raise ParamserverError(
                f"slot ({slot}) must be pinned to be unpinned: {self._describe()}; unpin once for each pin"
            )
        self._slots[slot].pins -= 1

    def _describe(self) -> str:
        return ", ".join(
            f"slot {i} is empty" if slot.version is None else f"slot {i} holds {slot.version} with {slot.pins} pin(s)"
            for i, slot in enumerate(self._slots)
        )


class RingSnapshots(LiveParameters):
    """Snapshots in a ring of two slots more than readers; a version that is never pulled is never copied.

    ``readers`` read at the same time, at most.
    """

    def __init__(
        self, host: SegmentHost, layout: FlatLayout, readers: int, current: Callable[[], tuple[int, Sequence[Tensor]]]
    ) -> None:
        # One slot for each reader, one for the newest version and one for its successor: ``publish`` always finds one
        # free.
        self.num_slots = readers + 2
        self._current = current
        self._ring = SnapshotRing(self.num_slots)
        self._flats = [host.allocate(parameters_key(slot), layout) for slot in range(self.num_slots)]
        self._version: int | None = None

    def pin(self) -> int:
        version, flats = self._current()
        if version != self._version:
            # Copied only when a trainer pulls it: a version that an update replaces before that costs nothing.
            slot = self._ring.publish(version)
            # Under the server's lock: no update is applied, and no trainer pins the slot, until the copy is complete.
            with torch.no_grad():
                for snapshot, flat in zip(self._flats[slot], flats, strict=False):  # tables follow all others
                    snapshot.copy_(flat)
            self._version = version
        return self._ring.pin(version)[0]

    def unpin(self, slot: int) -> None:
        self._ring.unpin(slot)


class SharedMemoryServerTransport(ServerTransport):
    """Retains the version that the trainer reads, and names the segment of its gradients.

    The snapshots are shared by the transports of all trainers of this host.
    """

    zero_copy = True

    def __init__(self, snapshots: LiveParameters, segment_key: str = gradients_key(0)) -> None:
        self.segment_key = segment_key
        self._snapshots = snapshots
        self._pinned: int | None = None

    def pin_version(self) -> int:
        self.unpin()
        # At most one pin for each trainer; the number of slots relies on it.
        self._pinned = self._snapshots.pin()
        return self._pinned

    def view_version(self) -> tuple[int, Sequence[Tensor]]:
        return self.pin_version(), ()

    def unpin(self) -> None:
        if self._pinned is not None:
            self._snapshots.unpin(self._pinned)
            self._pinned = None


class SharedMemoryTrainerTransport(TrainerTransport):
    """Makes the model's parameters views of the server's snapshots, or copies of them on another device.

    The parameters are in the order of the layout. ``timeout_s`` is for each segment. Embedding tables are among them if
    this process reads the parameters themselves: in ``lockstep`` and on the CPU.
    """

    name = "shared_memory"
    zero_copy = True

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Sequence[Tensor],
        address: str,
        num_slots: int,
        trainer_index: int,
        timeout_s: float,
        incarnation: int = 1,
        lockstep: bool = True,
    ) -> None:
        key = gradients_key(trainer_index, incarnation)
        gradients = attach(address, key, layout.of_gradients(), timeout_s)
        self.gradient_views = list(layout.views(gradients).values())
        self.tables, self._rows = layout.tables, RowSegment(layout, gradients)
        self._on_cpu = self.shares_parameters = all(p.device.type == "cpu" for p in parameters)
        dense = layout.without_tables()
        attached = layout if lockstep else dense
        snapshots = [attach(address, parameters_key(slot), attached, timeout_s) for slot in range(num_slots)]
        self.shares_rows = lockstep and self._on_cpu
        if not self.shares_rows:  # tables follow all others
            parameters = [p for number, p in enumerate(parameters) if number not in layout.tables]
            layout, snapshots = dense, [flats[: len(dense.sizes)] for flats in snapshots]
        self._layout = layout
        self._parameters = list(parameters)
        self._snapshots = [list(layout.views(flats).values()) for flats in snapshots]
        # Parameters with gaps in memory: kernels may round differently over the slot's memory, which has none.
        slots = enumerate(zip(parameters, layout.slots, strict=True))
        self._copied = [n for n, (p, s) in slots if self._on_cpu and n not in layout.tables and has_gaps(p, s)]
        self._slot: int | None = None

    @torch.no_grad()
    def map_version(self, slot: int) -> None:
        # On the CPU a slot that is mapped already holds the new version too, so only copies are to be made.
        if not self._on_cpu or slot != self._slot:
            self._set_parameters(self._snapshots[slot])
        else:
            self._copy(self._copied, self._snapshots[slot])
        self._slot = slot

    @torch.no_grad()
    def load(self, flats: Sequence[Tensor]) -> None:
        self._set_parameters(list(self._layout.views(flats).values()))
        # The parameters are no views of a slot now, so the next ``map_version`` must assign them again.
        self._slot = None

    def load_updated(self, view: VersionView, numbers: Collection[int]) -> None:
        # What the server wrote is in place already, and autograd of this process does not know of it.
        if self._on_cpu:
            torch.autograd.graph.increment_version([self._parameters[number] for number in numbers])
        with torch.no_grad():
            self._copy([n for n in numbers if not self._on_cpu or n in self._copied], self._snapshots[0])

    def _set_parameters(self, views: list[Tensor]) -> None:
        if not self._on_cpu:
            torch._foreach_copy_(self._parameters, views)
            return
        self._copy(self._copied, views)
        for number, (parameter, view) in enumerate(zip(self._parameters, views, strict=True)):
            # Assigning ``data`` keeps the parameter objects that the optimizer, hooks and the user's references have.
            # It hides a change from autograd, so it is done between steps only, when no graph is alive.
            if number not in self._copied:
                parameter.data = view

    def _copy(self, numbers: Iterable[int], views: Sequence[Tensor]) -> None:
        for number in numbers:
            self._parameters[number].copy_(views[number])

    def write_rows(self, number: int, gradient: Tensor | None) -> None:
        self._rows.write(number, gradient)

    def step_bytes(self, pulled: Sequence[Tensor]) -> int:
        return 0


class ServerSharedMemory:
    """What a server shares with processes of its host; with too little memory, everything is sent in messages.

    Args:
        host: of the segments; None if nothing is to be shared.
        lockstep: trainers read the parameters themselves instead of snapshots, if these are on the CPU.
        connect: returns a socket for the calls of a trainer, by its name; None if these are made over RPC too.
    """

    def __init__(
        self,
        host: SegmentHost | None,
        config: ServerConfig,
        lockstep: bool,
        on_note: Callable[[str], None],
        device: torch.device = CPU.device,
        connect: Callable[[str], socket.socket] | None = None,
    ) -> None:
        self._host = host
        self._config = config
        self._in_place = lockstep = lockstep and device.type == "cpu"
        self._on_note = on_note
        self._connect = connect
        self._num_over_rpc = 0
        self._snapshots: LiveParameters | None = None
        self._gradient_keys: dict[int, list[str]] = {}  # by trainer, that of its newest incarnation last
        self._gradients: dict[str, list[Tensor]] = {}  # by key
        self._socket_keys: dict[int, str] = {}
        # In lockstep slot 0 is the parameters themselves, under the key that trainers attach for a snapshot.
        self.parameters_key = parameters_key(0) if lockstep else LIVE_KEY

    @property
    def address(self) -> str | None:
        """The address that other processes attach to; None if nothing is shared (any more)."""
        return None if self._host is None else self._host.address

    def disable(self) -> None:
        """Send everything in messages from now on."""
        self._host = None

    def allocate_parameters(self, layout: FlatLayout) -> list[Tensor]:
        """Return memory for the parameters: shared, or that of this process alone."""
        return self._allocate(lambda host: host.allocate(self.parameters_key, layout)) or layout.allocate()

    def open_snapshots(
        self, layout: FlatLayout, num_trainers: int, current: Callable[[], tuple[int, Sequence[Tensor]]]
    ) -> None:
        """Prepare what trainers read; ``current`` as for ``RingSnapshots``."""
        self._num_over_rpc = num_trainers
        if self._in_place:
            self._snapshots = self._allocate(lambda _: LiveParameters())
        else:
            dense = layout.without_tables()
            self._snapshots = self._allocate(lambda host: RingSnapshots(host, dense, num_trainers, current))

    def make_transport(
        self,
        trainer_index: int,
        incarnation: int,
        layout: FlatLayout,
        in_use: Set[str | None] = frozenset(),
    ) -> tuple[SharedMemoryServerTransport, int] | None:
        """Return the transport of a trainer on this host and its number of slots; None if nothing can be shared.

        The segments of its earlier incarnations are released, except ``in_use``: other servers may attach these yet.
        """
        key = gradients_key(trainer_index, incarnation)
        gradients = self._allocate(lambda host: host.allocate(key, layout.of_gradients()))
        if gradients is None or self._snapshots is None or self._host is None:
            return None
        earlier = self._gradient_keys.get(trainer_index, [])
        for unused in set(earlier) - in_use:
            self._host.release(unused)
            del self._gradients[unused]
        self._gradients[key] = gradients
        self._gradient_keys[trainer_index] = [*(one for one in earlier if one in in_use), key]
        # Counted to the last one: a note about rounding would be wrong while anything is still sent to a trainer.
        self._num_over_rpc -= 1
        if not self._num_over_rpc and self._config.compression != "none":
            self._on_note(
                f"server.compression ({self._config.compression}) compresses nothing here, as all trainers share the "
                "server's memory; set server.transport: rpc to have it, or leave it out"
            )
        if not self._num_over_rpc and make_codec(self._config).wire_layout(layout) != layout:
            self._on_note(
                f"server.wire_dtype ({self._config.wire_dtype}) rounds nothing here, as all trainers share the "
                "server's memory; set server.transport: rpc to have it, or leave it out"
            )
        if self._connect is not None:
            self._offer_socket(trainer_index, incarnation, self._connect(f"trainer {trainer_index}"))
        return SharedMemoryServerTransport(self._snapshots, key), self._snapshots.num_slots

    def gradients(self, key: str) -> list[Tensor]:
        """Return the flat tensors of a segment that a trainer writes gradients to."""
        return self._gradients[key]

    def _offer_socket(self, trainer_index: int, incarnation: int, connected: socket.socket) -> None:
        """Pass one end of a connection to a trainer that ``make_transport`` was called for, and to no earlier one."""
        assert self._host is not None
        if (earlier := self._socket_keys.get(trainer_index)) is not None:
            self._host.release(earlier)
        key = self._socket_keys[trainer_index] = socket_key(trainer_index, incarnation)
        self._host.offer_socket(key, connected)

    def _allocate(self, make: Callable[[SegmentHost], T]) -> T | None:
        """Return what ``make`` makes in shared memory; None if there is none, or too little and transport is auto.

        Raises:
            UnsupportedConfiguration: there is too little memory, and server.transport is not auto.
        """
        if self._host is None:
            return None
        try:
            return make(self._host)
        except UnsupportedConfiguration as error:
            if self._config.transport != "auto":
                raise
            # For good, and not only for this segment: a trainer needs its snapshots and its gradients shared, or
            # neither.
            log.warning("server.transport (auto): everything is sent in messages from now on: %s", error)
            self._host = None
            return None
