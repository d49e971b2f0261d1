"""Sample buffers between the feeder thread and the trainer: FIFO, FIRO and reservoir."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from paramserver.buffers.base import Buffer as Buffer, BufferInfo as BufferInfo
    from paramserver.buffers.kinds import (
        Fifo as Fifo,
        Firo as Firo,
        Reservoir as Reservoir,
        make_buffer as make_buffer,
    )
    from paramserver.buffers.storage import Batch as Batch
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
