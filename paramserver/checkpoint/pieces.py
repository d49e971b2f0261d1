"""A state as a stream of bytes: cut into pieces where it leaves, kept in pieces where it arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PIECE_BYTES", "Pieces", "send_archive"]

# Small enough that what else crosses the same connection hardly waits for one, large enough that a call costs little.
PIECE_BYTES = 8 * 2**20


class Pieces:
    """The content of a file, in the order in which it came. It keeps the memory that it is given."""

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []

    def append(self, piece: npt.NDArray[np.uint8]) -> None:
        self._pieces.append(piece.data)

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._pieces)


def send_archive(obj: Any, send: Callable[[npt.NDArray[np.uint8]], None]) -> None:
    """Make the file of ``obj`` that ``torch.save`` would, and hand it on while it is made: no copy of it ever exists.

    Args:
        obj: private, as this takes its time.
        send: gets one piece after the other, at most ``PIECE_BYTES`` each; its memory is used again afterwards.

    Raises:
        Exception: what ``send`` raised, or ``torch.save``.
    """
    from paramserver.checkpoint.archive import write_archive

    cutter = _Cutter(send)
    write_archive(obj, cutter)
    cutter.finish()


class _Cutter:
    """A file that collects what is written. Copies are numpy's, which lets other threads run meanwhile."""

    def __init__(self, send: Callable[[npt.NDArray[np.uint8]], None]) -> None:
        self._send = send
        self._piece = np.empty(PIECE_BYTES, np.uint8)
        self._filled = 0
        self._error: Exception | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        source = np.frombuffer(data, np.uint8)
        start = 0
        # torch.save calls this from C++ and hides what it raises: the first error is kept for ``finish``.
        while start < len(source) and self._error is None:
            taken = source[start : start + PIECE_BYTES - self._filled]
            self._piece[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            start += len(taken)
            if self._filled == PIECE_BYTES:
                self._hand_on()
        return len(source)

    def _hand_on(self) -> None:
        try:
            self._send(self._piece[: self._filled])
        except Exception as error:  # noqa: BLE001 - raised by ``finish``
            self._error = error
        self._filled = 0

    def flush(self) -> None:
        """Nothing: ``finish`` flushes, and ``torch.save`` only wants the method to be there."""

    def finish(self) -> None:
        if self._filled and self._error is None:
            self._hand_on()
        if self._error is not None:
            raise self._error
