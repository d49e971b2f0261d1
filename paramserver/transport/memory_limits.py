"""How much memory this host still has for a segment, and the refusal where that is too little."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from paramserver.errors import UnsupportedConfiguration

_MIB = 2**20


def available_bytes(root: Path = Path("/")) -> int:
    """What a process may still take: the host's MemAvailable, or what its control groups leave where that is less.

    Of a control group's usage the page cache does not count, as in MemAvailable: the kernel takes it back.

    Args:
        root: where ``proc`` and the control groups are found.
    """
    return max(0, min([_mem_available(root), *_left_in_groups(root)]))


def require_memory(what: str, needed_bytes: int) -> None:
    """Refuse ``what`` before it is allocated: the kernel would promise the memory, and kill who touches it.

    Raises:
        UnsupportedConfiguration: fewer than ``needed_bytes`` are available.
    """
    if needed_bytes > available_bytes():
        raise insufficient_memory(what, needed_bytes)


def insufficient_memory(what: str, needed_bytes: int, reason: str = "") -> UnsupportedConfiguration:
    """The error, for raising; ``reason`` is the system's own where it refused."""
    said = f" and the system refused it ({reason})" if reason else ""
    return UnsupportedConfiguration(
        f"{what} needs {needed_bytes / _MIB:.1f} MiB of shared memory, {available_bytes() / _MIB:.1f} MiB are "
        f"available{said}; use server.transport: rpc, a smaller model, or a larger memory limit"
    )


def _mem_available(root: Path) -> int:
    fields = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _left_in_groups(root: Path) -> Iterator[int]:
    """Limit minus usage of this process's memory group and of those above it, version 1 or 2 (cgroups(7))."""
    paths = {tuple(line.split(":", 2)[1].split(",")): line.split(":", 2)[2] for line in _own_groups(root)}
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        (top, mountpoint), (kind, _, options) = before.split()[3:5], after.split()[:3]
        is_v1 = kind == "cgroup" and "memory" in options.split(",")
        if not is_v1 and kind != "cgroup2":
            continue
        wanted = "memory" if is_v1 else ""
        path = next((path for controllers, path in paths.items() if wanted in controllers), "/")
        for folder in _upwards(root / mountpoint.lstrip("/"), top, path):
            yield from _left_v1(folder) if is_v1 else _left_v2(folder)


def _own_groups(root: Path) -> list[str]:
    return _read(root / "proc/self/cgroup").splitlines()


def _upwards(mountpoint: Path, top: str, path: str) -> Iterator[Path]:
    """The folders of a group and of those above it, as far as they are mounted: a container sees its own part only."""
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
    """Its text; nothing where it is not there, as in the root group or one that has just been removed."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
