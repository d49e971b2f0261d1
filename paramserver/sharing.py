"""The memory that a server shares with processes of its host, where there is enough of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paramserver.config import ServerConfig
from paramserver.errors import UnsupportedConfiguration
from paramserver.flat import Layout
from paramserver.shards import Shard
from paramserver.transport.over_memory import MemoryServerEnd
from paramserver.transport.segments import SegmentHost
from paramserver.transport.shelves import LIVE_KEY, LiveShelf, RingShelf, Shelf, gradients_key, parameters_key

T = TypeVar("T")

log = logging.getLogger("paramserver")


class Sharing:
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
        self._shelf: Shelf | None = None
        self.parameters_key = parameters_key(0) if lockstep else LIVE_KEY

    @property
    def address(self) -> str | None:
        """Where others find the memory; None where none is shared (any more)."""
        return None if self._host is None else self._host.address

    def where(self) -> tuple[str | None, str]:
        """Address and key of the parameters themselves."""
        return self.address, self.parameters_key

    def stop(self) -> None:
        """From now on all goes over RPC."""
        self._host = None

    def allocate_parameters(self, layout: Layout) -> list[Tensor]:
        """Memory for the parameters that others can reach, or of this process alone."""
        return self._made(lambda host: host.allocate(self.parameters_key, layout)) or layout.allocate()

    def open_shelf(self, layout: Layout, trainers: int, current: Callable[[], tuple[int, Sequence[Tensor]]]) -> None:
        """Where trainers find versions; ``current`` as for ``RingShelf``."""
        self._outside = trainers
        if self._lockstep:
            self._shelf = self._made(lambda _: LiveShelf())
        else:
            self._shelf = self._made(lambda host: RingShelf(host, layout, trainers, current))

    def make_end(
        self, trainer_index: int, layout: Layout, shard: Shard, arrived: Callable[[], None]
    ) -> tuple[MemoryServerEnd, int] | None:
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
        return MemoryServerEnd(self._shelf, shard.ranges_of(gradients), arrived), self._shelf.slots

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
