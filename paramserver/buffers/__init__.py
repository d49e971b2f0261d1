"""The three buffers between the thread that reads samples and the trainer. Names load on first use."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from paramserver.buffers.base import (
        Buffer as Buffer,
    )
    from paramserver.buffers.batch import (
        Batch as Batch,
        BufferInfo as BufferInfo,
    )
    from paramserver.buffers.factory import (
        make_buffer as make_buffer,
    )
    from paramserver.buffers.fifo import (
        Fifo as Fifo,
    )
    from paramserver.buffers.firo import (
        Firo as Firo,
    )
    from paramserver.buffers.reservoir import (
        Reservoir as Reservoir,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
