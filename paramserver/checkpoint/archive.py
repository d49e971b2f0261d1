"""Objects as files that ``torch.load(weights_only=True)`` reads: tensors, plain values and numpy arrays."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from paramserver.errors import CheckpointError

__all__ = ["load_archive", "refused_types", "write_archive"]

# numpy moved these two functions between its versions, so they are asked for, not named.
_NUMPY_FUNCTIONS: list[Any] = [np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
_NUMPY_TYPES: list[Any] = [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUVmM"}]
_NUMPY: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [*_NUMPY_FUNCTIONS, *_NUMPY_TYPES]
_NUMPY_NAMES = {f"{known.__module__}.{known.__name__}" for known in (*_NUMPY_FUNCTIONS, *_NUMPY_TYPES)}


class Writable(Protocol):
    """What ``torch.save`` needs of a file."""

    def write(self, data: bytes | bytearray | memoryview) -> int: ...

    def flush(self) -> None: ...


def write_archive(obj: Any, file: Writable) -> None:
    """``torch.save`` of ``obj`` in one pass; it never seeks, so a digest of what was written is that of the result."""
    torch.save(obj, cast(IO[bytes], file))


def refused_types(path: Path) -> list[str]:
    """Name what in the archive at ``path`` would be refused when it is loaded. Reads its small pickle only."""
    try:
        return sorted(set(get_unsafe_globals_in_checkpoint(str(path))) - _NUMPY_NAMES)
    except pickle.UnpicklingError as error:
        return [str(error)]


def load_archive(path: Path) -> Any:
    """Return the object in the archive at ``path``, its tensors on the CPU.

    Raises:
        CheckpointError: it is no such archive, or holds objects of other types.
    """
    try:
        with safe_globals(_NUMPY):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        cause = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{path} cannot be loaded ({type(error).__name__}: {cause})") from error
