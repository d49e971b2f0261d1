"""The three buffers between the thread that reads samples and the trainer. Names load on first use."""

from typing import TYPE_CHECKING

from paramserver.first_use import on_first_use

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

__getattr__ = on_first_use(__name__, _HOMES)
