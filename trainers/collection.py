"""How the parts of a checkpoint reach rank 0 in a process group, while the ranks train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from paramserver.checkpoint import Pieces, send_archive
from paramserver.errors import PeerLost, TrainingError
from trainers.agreement import peers_may_be_lost

_FAILED = -1


class Collection:
    """One rank's end of it. Each rank calls ``send``, rank 0 ``receive`` and ``answer``, once per checkpoint.

    A part comes as pieces, each after its length; 0 ends it. Rank 0 answers all when it has handed the checkpoint to
    its writer, so that no rank is far ahead of another when they meet again.

    Args:
        group: of gloo, used by this object alone and by one thread of each rank.
        trainers: how many ranks there are.
    """

    def __init__(self, group: Any, trainers: int) -> None:
        self._group = group
        self._others = range(1, trainers)

    def send(self, part: Mapping[str, Any], pause_s: float) -> None:
        """Give this rank's part to rank 0, and wait until rank 0 has those of all.

        Raises:
            PeerLost: rank 0 is gone, or could not take it.
        """
        with peers_may_be_lost():
            self._send_number(pause_s)
            try:
                send_archive(dict(part), self._send_piece)
            except BaseException:
                self._send_number(_FAILED)
                raise
            self._send_number(0)
            taken = self._receive_number(0)
        if not taken:
            raise PeerLost("rank 0 could not take a checkpoint; look for its own error")

    def _send_piece(self, piece: npt.NDArray[np.uint8]) -> None:
        self._send_number(len(piece))
        dist.send(torch.from_numpy(piece), 0, group=self._group)

    def _send_number(self, number: float, to: int = 0) -> None:
        dist.send(torch.tensor([number], dtype=torch.float64), to, group=self._group)

    def _receive_number(self, source: int) -> float:
        number = torch.empty(1, dtype=torch.float64)
        dist.recv(number, source, group=self._group)
        return float(number)

    def receive(self) -> tuple[dict[int, Pieces], float]:
        """The parts of the other ranks, and the longest of their pauses, in seconds.

        Raises:
            PeerLost: a rank is gone.
            TrainingError: a rank could not send its own.
        """
        pauses_s = [0.0]
        parts = {}
        with peers_may_be_lost():
            for rank in self._others:
                pauses_s.append(self._receive_number(rank))
                parts[rank] = self._receive_pieces(rank)
        return parts, max(pauses_s)

    def _receive_pieces(self, rank: int) -> Pieces:
        pieces = Pieces()
        while (length := int(self._receive_number(rank))) > 0:
            piece = torch.empty(length, dtype=torch.uint8)
            dist.recv(piece, rank, group=self._group)
            pieces.append(piece.numpy())
        if length == _FAILED:
            raise TrainingError(f"trainer {rank} could not store its part of a checkpoint; look for its own error")
        return pieces

    def answer(self, taken: bool) -> None:
        """Tell the other ranks that they may go on to the next checkpoint, or that this one failed."""
        failures = []
        for rank in self._others:
            try:
                with peers_may_be_lost():
                    self._send_number(taken, rank)
            except PeerLost as failure:
                failures.append(failure)  # those after it are answered all the same
        if failures:
            raise failures[0]
