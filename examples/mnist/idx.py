"""Files in IDX, the format of MNIST (http://yann.lecun.com/exdb/mnist/), plain or compressed with gzip.

A file consists of a header of big-endian numbers and the values in C order. The header has two zero bytes, a byte for
the type of the values, a byte for the number of dimensions, and four bytes for the length of each dimension.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paramserver.errors import TaskError

Bytes = npt.NDArray[np.uint8]

_UINT8 = 0x08
_TYPES = {_UINT8: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}
_FIXED = 4  # bytes of the header before the dimensions


def read_idx(path: Path, dims: int) -> Bytes:
    """Read a uint8 file with ``dims`` dimensions; a plain file is memory-mapped, a .gz is loaded.

    Raises:
        TaskError: the file cannot be read, has another format, or has another length than its header states.
    """
    content = _unpacked(path) if path.suffix == ".gz" else _mapped(path)
    start = _FIXED + 4 * dims
    shape = _shape(path, content[:start].tobytes(), dims)
    held, wanted = len(content) - start, math.prod(shape)
    if held != wanted:
        sizes = " x ".join(map(str, shape))
        raise _refusal(path, f"must hold {wanted} values ({sizes}), as its header states, and holds {held}")
    return content[start:].reshape(shape)


def _mapped(path: Path) -> Bytes:
    try:
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise _refusal(path, f"must be a file that can be read ({error})") from error


def _unpacked(path: Path) -> Bytes:
    try:
        with gzip.open(path) as file:
            return np.frombuffer(file.read(), np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise _refusal(path, f"must be a whole gzip file ({error})") from error


def _shape(path: Path, header: bytes, dims: int) -> tuple[int, ...]:
    """Parse the dimensions from the header of a file that should have ``dims`` of them."""
    if len(header) < _FIXED or header[:2] != b"\0\0" or header[2] not in _TYPES:
        begins = header[:4].hex(" ", 2) or "nothing"
        raise _refusal(path, f"must begin like an IDX file (0000 08{dims:02x}), and begins with {begins}")
    if header[2] != _UINT8:
        raise _refusal(path, f"must hold values of type uint8, and holds {_TYPES[header[2]]}")
    if header[3] != dims:
        raise _refusal(path, f"must have {dims} dimension(s), and has {header[3]}")
    if len(header) < _FIXED + 4 * dims:
        raise _refusal(path, f"must have a header of {_FIXED + 4 * dims} bytes, and ends after {len(header)}")
    return tuple(int(length) for length in np.frombuffer(header, ">u4", dims, _FIXED))


def _refusal(path: Path, rule: str) -> TaskError:
    return TaskError(f"{path} {rule}; remove it to download it again, or copy it again")
