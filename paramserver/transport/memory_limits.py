"""How much memory this host or this container still has for a shared segment, and the error if that is too little."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from paramserver.errors import UnsupportedConfiguration

_MIB = 2**20


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much this process may still allocate: the host's MemAvailable, or less if a control group limits it.

    As in MemAvailable, the page cache does not count as usage of a control group, because the kernel reclaims it.

    Args:
        root: where ``proc`` and the control groups are mounted.

    Example::

        >>> available_bytes() > 0
        True
    """
    fields = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines())
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
    """Yield limit minus usage of this process's memory group and of its ancestors, version 1 or 2 (cgroups(7))."""
    lines = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    paths = {tuple(controllers.split(",")): path for _, controllers, path in lines}
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        (top, mountpoint), (kind, _, options) = before.split()[3:5], after.split()[:3]
        is_v1 = kind == "cgroup" and "memory" in options.split(",")
        if not is_v1 and kind != "cgroup2":
            continue
        controller = "memory" if is_v1 else ""
        path = next((path for controllers, path in paths.items() if controller in controllers), "/")
        for folder in _ancestors(root / mountpoint.lstrip("/"), top, path):
            yield from _left_v1(folder) if is_v1 else _left_v2(folder)


def _ancestors(mountpoint: Path, top: str, path: str) -> Iterator[Path]:
    """Yield the folders of a group and of its ancestors that are mounted: a container mounts its own only."""
    inner = PurePosixPath(path)
    inner = inner.relative_to(top) if inner.is_relative_to(top) else PurePosixPath()
    folder = mountpoint / inner
    while folder != mountpoint:
        yield folder
        folder = folder.parent
    yield mountpoint


def _left_v1(folder: Path) -> Iterator[int]:
    limit, usage = _read(folder / "memory.limit_in_bytes"), _read(folder / "memory.usage_in_bytes")
    if limit and usage:
        yield int(limit) - int(usage) + _page_cache(folder, "total_")


def _left_v2(folder: Path) -> Iterator[int]:
    limit, usage = _read(folder / "memory.max").strip(), _read(folder / "memory.current")
    if limit not in ("", "max") and usage:
        yield int(limit) - int(usage) + _page_cache(folder)


def _page_cache(folder: Path, prefix: str = "") -> int:
    counts = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    return sum(int(counts.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))


def _read(file: Path) -> str:
    """Return the text of a file; empty if it does not exist, as in the root group or one that was just removed."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
