"""What a process shares with others by writing into it."""

from pathlib import Path


def shared_maps(pid):
    """The lines of its map that are shared, writable and have a name (an io_uring has none)."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    rights = [(line, line.split()[1]) for line in lines]
    return [line for line, may in rights if may.startswith("rw") and may.endswith("s") and "anon_inode:" not in line]
