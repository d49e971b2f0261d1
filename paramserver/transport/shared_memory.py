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


class RingSnapshots(LiveParameters):
    """Snapshots in a ring of segments; a version that is never pulled is never copied.

    A reader pins a slot; neither a pinned slot nor the newest is overwritten. ``readers`` read at the same time, at
    most. ``current`` returns the current version, and its flat tensors.
    """

    def __init__(
        self, host: SegmentHost, layout: FlatLayout, readers: int, current: Callable[[], tuple[int, Sequence[Tensor]]]
    ) -> None:
        # One slot for each reader, one for the newest version and one for its successor: one is always free.
        self.num_slots = readers + 2
        self._current = current
        self._flats = [host.allocate(parameters_key(slot), layout) for slot in range(self.num_slots)]
        self._versions = [-1] * self.num_slots  # -1: it is unused
        self._pins = [0] * self.num_slots
        self._newest: int | None = None  # the slot of the newest version

    def pin(self) -> int:
        """Return the slot of the current version, which stays unchanged until ``unpin`` has been called as often.

        Raises:
            ParamserverError: there are too many readers; nothing has changed.
        """
        version, flats = self._current()
        if self._newest is None or version != self._versions[self._newest]:
            slot = self._free_slot(version)
            # Under the server's lock: no update is applied, and no trainer pins the slot, until the copy is complete.
            with torch.no_grad():
                for snapshot, flat in zip(self._flats[slot], flats, strict=False):  # tables follow all others
                    snapshot.copy_(flat)
            self._versions[slot], self._newest = version, slot
        self._pins[self._newest] += 1
        return self._newest

    def _free_slot(self, version: int) -> int:
        """Return a slot for a version: an unused one, else that of the oldest version."""
        free = [slot for slot, pins in enumerate(self._pins) if not pins and slot != self._newest]
        if not free:
            raise ParamserverError(
                f"version ({version}) must find a free slot, and has none: {self._describe()}; unpin what is no longer "
                "read, or use more slots"
            )
        return min(free, key=self._versions.__getitem__)

    def unpin(self, slot: int) -> None:
        """Undo one ``pin``.

        Raises:
            ParamserverError: the slot is not pinned.
        """
        # An additional ``unpin`` would release the slot of another reader, which would then read a version half
        # overwritten.
        if self._pins[slot] == 0:
            raise ParamserverError(
                f"slot ({slot}) must be pinned to be unpinned: {self._describe()}; unpin once for each pin"
            )
        self._pins[slot] -= 1

    def _describe(self) -> str:
        return ", ".join(
            f"slot {slot} is empty" if version < 0 else f"slot {slot} holds {version} with {pins} pin(s)"
            for slot, (version, pins) in enumerate(zip(self._versions, self._pins, strict=True))
        )


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
        self._count_change(self._parameters)

    @torch.no_grad()
    def load(self, flats: Sequence[Tensor]) -> None:
        self._set_parameters(list(self._layout.views(flats).values()))
        # The parameters are no views of a slot now, so the next ``map_version`` must assign them again.
        self._slot = None
        self._count_change(self._parameters)

    def load_updated(self, view: VersionView, numbers: Collection[int]) -> None:
        self._count_change([self._parameters[number] for number in numbers])
        with torch.no_grad():
            self._copy([n for n in numbers if not self._on_cpu or n in self._copied], self._snapshots[0])

    def _count_change(self, parameters: Sequence[Tensor]) -> None:
        """Let autograd refuse a graph that needs the earlier values, as where they are replaced by a copy."""
        # What the server wrote is in place already, and an assignment of ``data`` counts as no change.
        if self._on_cpu:
            torch.autograd.graph.increment_version(parameters)

    def _set_parameters(self, views: list[Tensor]) -> None:
        if not self._on_cpu:
            torch._foreach_copy_(self._parameters, views)
            return
        self._copy(self._copied, views)
        for number, (parameter, view) in enumerate(zip(self._parameters, views, strict=True)):
            # Assigning ``data`` keeps the parameter objects that the optimizer, hooks and the user's references have.
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
        self._num_trainers = 0
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
        self._num_trainers = num_trainers
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
        # With the last one: a note about rounding would be wrong while anything is still sent to a trainer.
        is_last = not earlier and len(self._gradient_keys) == self._num_trainers
        if is_last and self._config.compression != "none":
            self._on_note(
                f"server.compression ({self._config.compression}) compresses nothing here, as all trainers share the "
                "server's memory; set server.transport: rpc to have it, or leave it out"
            )
        if is_last and make_codec(self._config).wire_layout(layout) != layout:
            self._on_note(
                f"server.wire_dtype ({self._config.wire_dtype}) rounds nothing here, as all trainers share the "
                "server's memory; set server.transport: rpc to have it, or leave it out"
            )
        if self._connect is not None:
            if (earlier_key := self._socket_keys.get(trainer_index)) is not None:
                self._host.release(earlier_key)
            self._socket_keys[trainer_index] = socket_key(trainer_index, incarnation)
            self._host.offer_socket(self._socket_keys[trainer_index], self._connect(f"trainer {trainer_index}"))
        return SharedMemoryServerTransport(self._snapshots, key), self._snapshots.num_slots

    def gradients(self, key: str) -> list[Tensor]:
        """Return the flat tensors of a segment that a trainer writes gradients to."""
        return self._gradients[key]

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
