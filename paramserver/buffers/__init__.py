"""The three buffers between the thread that reads samples and the trainer. Names load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paramserver.buffers.base import Buffer
    from paramserver.buffers.batch import Batch, BufferInfo
    from paramserver.buffers.factory import make_buffer
    from paramserver.buffers.fifo import Fifo
    from paramserver.buffers.firo import Firo
    from paramserver.buffers.reservoir import Reservoir

_HOMES = {
    "Batch": "batch",
    "Buffer": "base",
    "BufferInfo": "batch",
    "Fifo": "fifo",
    "Firo": "firo",
    "Reservoir": "reservoir",
    "make_buffer": "factory",
}

__all__ = ["Batch", "Buffer", "BufferInfo", "Fifo", "Firo", "Reservoir", "make_buffer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
