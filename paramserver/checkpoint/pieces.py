"""The content of a file that comes piece by piece. Needs no numpy to be imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Pieces"]


class Pieces:
    """The content of a file, in the order in which it came. It keeps the memory that it is given."""

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []

    def append(self, piece: npt.NDArray[np.uint8]) -> None:
        self._pieces.append(piece.data)

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._pieces)
