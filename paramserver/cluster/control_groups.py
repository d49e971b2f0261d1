"""The control groups of this process (cgroups(7)), by which a container or a scheduler limits it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's group and of its ancestors, each with whether it is of version 1."""
    lines = [line.split(":", 2) for line in read_text(root / "proc/self/cgroup").splitlines()]
    paths = {tuple(controllers.split(",")): path for _, controllers, path in lines}
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        (top, mountpoint), (kind, _, options) = before.split()[3:5], after.split()[:3]
        is_v1 = kind == "cgroup" and controller in options.split(",")
        if not is_v1 and kind != "cgroup2":
            continue
        listed = controller if is_v1 else ""
        path = next((path for controllers, path in paths.items() if listed in controllers), "/")
        for folder in _ancestors(root / mountpoint.lstrip("/"), top, path):
            yield folder, is_v1


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Return how many cores the groups let this process use at a time; None without a limit."""
    limits = []
    for folder, is_v1 in group_folders("cpu", root):
        if is_v1:
            words = [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        else:
            words = read_text(folder / "cpu.max").split()
        # Without a limit, the quota is "max", or -1 in version 1.
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much this process may still allocate: the host's MemAvailable, or less if a control group limits it.

    As in MemAvailable, the page cache does not count as usage of a control group, because the kernel reclaims it.
    ``proc`` and the control groups are mounted in ``root``.
    """
    fields = dict(line.split(":", 1) for line in read_text(root / "proc/meminfo").splitlines())
    mem_available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([mem_available, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield limit minus usage of this process's memory group and of its ancestors, version 1 or 2."""
    for folder, is_v1 in group_folders("memory", root):
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
        limit, usage = (read_text(folder / name).strip() for name in files)
        if limit not in ("", "max") and usage:
            counts = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
            names = (f"{'total_' if is_v1 else ''}{name}" for name in ("inactive_file", "active_file"))
            yield int(limit) - int(usage) + sum(int(counts.get(name, 0)) for name in names)


def read_text(file: Path) -> str:
    """Return the text of a file; empty if it does not exist, as in the root group or one that was just removed."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _ancestors(mountpoint: Path, top: str, path: str) -> Iterator[Path]:
    """Yield the folders of a group and of its ancestors that are mounted: a container mounts its own only."""
    inner = PurePosixPath(path)
    inner = inner.relative_to(top) if inner.is_relative_to(top) else PurePosixPath()
    folder = mountpoint / inner
    while folder != mountpoint:
        yield folder
        folder = folder.parent
    yield mountpoint
