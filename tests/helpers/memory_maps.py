"""The shared memory that a process has mapped."""

from pathlib import Path


def shared_maps(pid):
    """The lines of /proc/<pid>/maps that are shared, writable and named (those of an io_uring have no name)."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    rights = [(line, line.split()[1]) for line in lines]
    return [line for line, may in rights if may.startswith("rw") and may.endswith("s") and "anon_inode:" not in line]
