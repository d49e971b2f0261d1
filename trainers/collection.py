"""How the parts of a checkpoint reach rank 0 in ddp, while the ranks train."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.checkpoint import Pieces, send_archive
from paramserver.errors import PeerLost, TrainingError
from paramserver.links import Links

# Kinds of messages.
_PIECE, _END, _FAILED, _TAKEN = 1, 2, 3, 4
_PAUSE = struct.Struct("!d")


class Collection:
    """One rank's end of it. Each other rank calls ``send``, rank 0 ``receive`` and ``answer``, once per checkpoint.

    A part comes as pieces and an end. Rank 0 answers all when it has handed the checkpoint to its writer, so that no
    rank is far ahead of another when they meet again.

    Args:
        links: this rank's, used by this object alone and by one thread.
    """

    def __init__(self, links: Links) -> None:
        self._links = links

    def send(self, part: Mapping[str, Any], pause_s: float) -> None:
        """Give this rank's part to rank 0, and wait until rank 0 has those of all.

        Raises:
            PeerLost: rank 0 is gone, or could not take it.
        """
        try:
            send_archive(dict(part), self._send_piece)
        except PeerLost:
            raise
        except BaseException:
            self._links.send(0, _FAILED)
            raise
        self._links.send(0, _END, _PAUSE.pack(pause_s))
        if self._links.receive().kind != _TAKEN:
            raise PeerLost("rank 0 could not take a checkpoint; look for its own error")

    def _send_piece(self, piece: npt.NDArray[np.uint8]) -> None:
        self._links.send(0, _PIECE, piece.data)

    def receive(self) -> tuple[dict[int, Pieces], float]:
        """The parts of the other ranks, and the longest of their pauses, in seconds.

        Raises:
            PeerLost: a rank is gone.
            TrainingError: a rank could not send its own.
        """
        pauses_s: dict[int, float] = {}
        parts = {rank: Pieces() for rank in self._links.peers}
        while len(pauses_s) < len(parts):
            rank, kind, body = self._links.receive()
            if kind == _PIECE:
                self._take_piece(parts[rank], body)
            elif kind == _END:
                pauses_s[rank] = float(_PAUSE.unpack(body.data)[0])
            else:
                raise TrainingError(f"trainer {rank} could not store its part of a checkpoint; look for its own error")
        return parts, max(pauses_s.values(), default=0.0)

    def _take_piece(self, pieces: Pieces, piece: npt.NDArray[np.uint8]) -> None:
        pieces.append(piece)

    def answer(self, taken: bool) -> None:
        """Tell the other ranks that they may go on to the next checkpoint, or that this one failed."""
        failures = []
        for rank in self._links.peers:
            try:
                self._links.send(rank, _TAKEN if taken else _FAILED)
            except PeerLost as failure:
                failures.append(failure)  # those after it are answered all the same
        if failures:
            raise failures[0]
