"""How much memory this host or this container still has for a shared segment, and the error if that is too little."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paramserver.cluster.control_groups import group_folders, read_text
from paramserver.errors import UnsupportedConfiguration

_MIB = 2**20


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much this process may still allocate: the host's MemAvailable, or less if a control group limits it.

    As in MemAvailable, the page cache does not count as usage of a control group, because the kernel reclaims it.
    ``proc`` and the control groups are mounted in ``root``.
    """
    fields = dict(line.split(":", 1) for line in read_text(root / "proc/meminfo").splitlines())
    mem_available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([mem_available, *_left_in_groups(root)]))


def require_memory(what: str, needed_bytes: int) -> None:
    """Check that ``what`` fits, before it is allocated.

    The kernel overcommits: it promises the memory, and kills the process that touches it.

    Raises:
        UnsupportedConfiguration: fewer than ``needed_bytes`` are available.
    """
    if needed_bytes > available_bytes():
        raise insufficient_memory(what, needed_bytes)


def insufficient_memory(what: str, needed_bytes: int, reason: str = "") -> UnsupportedConfiguration:
    """Return the error to raise; ``reason`` is that of the system if it refused."""
    refused = f" and the system refused it ({reason})" if reason else ""
    return UnsupportedConfiguration(
        f"{what} needs {needed_bytes / _MIB:.1f} MiB of shared memory, {available_bytes() / _MIB:.1f} MiB are "
        f"available{refused}; use server.transport: rpc, a smaller model, or a larger memory limit"
    )


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield limit minus usage of this process's memory group and of its ancestors, version 1 or 2."""
    for folder, is_v1 in group_folders("memory", root):
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
        limit, usage = (read_text(folder / name).strip() for name in files)
        if limit not in ("", "max") and usage:
            counts = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
            names = (f"{'total_' if is_v1 else ''}{name}" for name in ("inactive_file", "active_file"))
            yield int(limit) - int(usage) + sum(int(counts.get(name, 0)) for name in names)
