"""Sample buffers between the feeder thread and the trainer: FIFO, FIRO and reservoir."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from paramserver.buffers.base import Buffer as Buffer, BufferInfo as BufferInfo
    from paramserver.buffers.factory import make_buffer as make_buffer
    from paramserver.buffers.fifo import Fifo as Fifo, Firo as Firo
    from paramserver.buffers.reservoir import Reservoir as Reservoir
    from paramserver.buffers.storage import Batch as Batch
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
