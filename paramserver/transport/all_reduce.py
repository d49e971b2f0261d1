"""All-reduce of the ranks of one host, in memory that they share.

Each rank averages one part of the elements, in the order of the ranks: a reduce-scatter, then an all-gather
(Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 4.5). So
the mean has the bits of the one that a parameter server computes, for any number of ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise

import torch
from torch import Tensor

from paramserver.errors import PeerLost
from paramserver.metrics.profile import spanned
from paramserver.parameters.flat import ALIGNMENT_BYTES, FlatLayout
from paramserver.parameters.numerics import mean_in_order


class Barrier:
    """A barrier of the ranks of one host: no rank leaves it before all have entered it.

    In round k a rank sends to the one 2**k after it, and waits for the one 2**k before it, so after log2 of the number
    of ranks each knows that all have entered: a dissemination barrier (Hensgen, Finkel and Manber, "Two Algorithms for
    Barrier Synchronization", 1988).

    Args:
        to, of: the connections of each round, to the rank after this one and of the rank before it. This object closes
            them.
        timeout_s: of each wait.
    """

    def __init__(self, to: Sequence[socket.socket], of: Sequence[socket.socket], timeout_s: float) -> None:
        self._to = to
        self._of = of
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float | None) -> None:
        """Limit each wait from now on; None: a wait ends with the connections only."""
        self._timeout_s = timeout_s
        for connection in (*self._to, *self._of):
            connection.settimeout(timeout_s)

    @staticmethod
    def distances(ranks: int) -> list[int]:
        """Return the distance between two ranks that are connected, for each round."""
        return [2**number for number in range((ranks - 1).bit_length())]

    def wait(self) -> None:
        """Wait until all ranks have called this as often.

        Raises:
            PeerLost: another rank is gone, or has not called it within ``timeout_s``.
        """
        for to, of in zip(self._to, self._of, strict=True):
            with suppress(BrokenPipeError, ConnectionResetError):  # the end of this connection is that of ``of`` too
                to.send(b"\0")
            try:
                is_open = bool(of.recv(1))
            except ConnectionResetError:
                is_open = False
            except TimeoutError as error:
                raise PeerLost(
                    f"a rank has not taken part in an all-reduce within {self._timeout_s:g} s (cluster.timeout_s)"
                ) from error
            if not is_open:
                raise PeerLost("a rank has ended its connections during an all-reduce")

    def close(self) -> None:
        """Close the connections; the ranks that wait for this one get an error."""
        for connection in (*self._to, *self._of):
            connection.close()


def area_layout(ranks: int, tensors: Iterable[Tensor]) -> FlatLayout:
    """Return the layout of the memory in which ``ranks`` reduce ``tensors``, in any number of buckets."""
    area_bytes = sum(tensor.nbytes + ALIGNMENT_BYTES for tensor in tensors)
    return FlatLayout.of(
        (str(rank), torch.empty(area_bytes, dtype=torch.uint8, device="meta")) for rank in range(ranks)
    )


class SharedAllReduce:
    """The all-reduce of one rank.

    Args:
        areas: the memory of each rank, which all of them map; see ``area_layout``.
        rank: of this process.
        barrier: of all ranks.
    """

    def __init__(self, areas: Sequence[Tensor], rank: int, barrier: Barrier) -> None:
        self._areas = areas
        self._rank = rank
        self._barrier = barrier
        # By type and size of each tensor: the parts of each area. The buckets of a model rarely change.
        self._shared: dict[tuple[tuple[torch.dtype, int], ...], list[list[list[Tensor]]]] = {}

    @spanned("push")
    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor], active: Collection[int]) -> None:
        """Replace ``tensors`` by their means over the ranks of ``active``. Called by all ranks.

        The tensors have one dimension and are contiguous; all ranks give as many of the same size and type. Those of a
        rank that is not active may have any values.

        Raises:
            PeerLost: another rank is gone, or did not take part in time.
        """
        key = tuple((tensor.dtype, len(tensor)) for tensor in tensors)
        if key not in self._shared:
            # Another rank may still read a mean from where this one gives elements of other tensors now.
            self._barrier.wait()
            self._shared = {key: [self._parts_of(area, tensors) for area in self._areas]}
        shared, own = self._shared[key], [[tensor[cut] for cut in self._cuts(tensor)] for tensor in tensors]
        # The area of a rank holds what it gives to the others and, in the part that it averages, the mean.
        for given, of_tensor in zip(shared[self._rank], own, strict=True):
            for rank, part in enumerate(of_tensor):
                if rank != self._rank and self._rank in active:
                    given[rank].copy_(part)
        self._barrier.wait()
        for number, of_tensor in enumerate(own):
            shared_parts = (area[number][self._rank] for area in shared)
            parts = [of_tensor[self._rank] if n == self._rank else part for n, part in enumerate(shared_parts)]
            mean_in_order([parts[n] for n in sorted(active)], out=shared[self._rank][number][self._rank])
        self._barrier.wait()
        # A rank writes its next mean after the first barrier of the next call: by then all have read this one.
        for number, of_tensor in enumerate(own):
            for rank, part in enumerate(of_tensor):
                part.copy_(shared[rank][number][rank])

    def _cuts(self, tensor: Tensor) -> list[slice]:
        """Return the part of each rank: whole cache lines, so that no two ranks write to one."""
        ranks, line = len(self._areas), max(ALIGNMENT_BYTES // tensor.element_size(), 1)
        of_rank = -(-len(tensor) // (ranks * line)) * line
        return [slice(begin, end) for begin, end in pairwise(rank * of_rank for rank in range(ranks + 1))]

    def _parts_of(self, area: Tensor, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the part of each rank of each tensor, in an area."""
        parts, begin = [], 0
        for tensor in tensors:
            end = begin + tensor.nbytes
            whole = area[begin:end].view(tensor.dtype)
            parts.append([whole[cut] for cut in self._cuts(tensor)])
            begin = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return parts
