"""Memory without a name, with the flat tensors of a layout in it: a memfd that other processes can map too."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from paramserver.flat import ALIGNMENT_BYTES, Layout
from paramserver.transport.memory import require_memory, too_little_memory

# A holder of the descriptor could else cut the file, and kill all others at their next touch.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)


def new_pages(what: str, layout: Layout) -> int:
    """The descriptor of zeros for ``layout``. Its pages are there: with too little, this fails and not the first touch.

    Raises:
        UnsupportedConfiguration: there is too little memory; ``what`` needs it.
    """
    size_bytes = pages_bytes(layout)
    require_memory(what, size_bytes)
    descriptor = os.memfd_create("paramserver-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with _refused(what, size_bytes):
            os.ftruncate(descriptor, size_bytes)
            os.posix_fallocate(descriptor, 0, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_pages(what: str, descriptor: int, layout: Layout) -> list[Tensor]:
    """Flat tensors in this memory, with starts aligned to 64 bytes; they need the descriptor no more afterwards.

    The mapping ends with the last of them. Each has the whole memory as its storage: clone before ``torch.save``.

    Raises:
        UnsupportedConfiguration: the system refuses the mapping.
    """
    size_bytes = pages_bytes(layout)
    with _refused(what, size_bytes):
        # torch, when it is refused, keeps the descriptor that it opened, and with it the memory: so this asks first.
        mmap.mmap(descriptor, size_bytes).close()
    whole = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size_bytes, dtype=torch.uint8)
    pairs = zip(_places(layout), layout.dtypes, strict=True)
    return [whole[begin:end].view(dtype) for (begin, end), dtype in pairs]


def pages_bytes(layout: Layout) -> int:
    """At least one line of the cache: nothing at all cannot be mapped."""
    return max([ALIGNMENT_BYTES, *(end for _, end in _places(layout))])


@contextlib.contextmanager
def _refused(what: str, size_bytes: int) -> Iterator[None]:
    """Inside ``with``, a system that has no room is the error of this package."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise too_little_memory(what, size_bytes, str(error.strerror)) from error
        raise


def _places(layout: Layout) -> list[tuple[int, int]]:
    """Begin and end of each flat tensor in the memory, in bytes."""
    places, begin = [], 0
    for dtype, size in zip(layout.dtypes, layout.sizes, strict=True):
        end = begin + size * dtype.itemsize
        places.append((begin, end))
        begin = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places
