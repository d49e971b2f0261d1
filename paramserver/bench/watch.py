"""What the kernel counts while a run goes on: CPU time of its processes, bytes on the interfaces of its hosts."""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Sequence
from pathlib import Path

from paramserver.bench.network import Hosts
from paramserver.bench.stamps import signed_in


class CpuWatch:
    """Samples the processes that signed in to some folders.

    Args:
        folders: where they do.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._samples: dict[int, list[tuple[float, float]]] = {}
        self._ticks = os.sysconf("SC_CLK_TCK")

    def look(self) -> None:
        """Take one sample of each that is alive."""
        for pid in (pid for folder in self._folders for pid in signed_in(folder)):
            used_s = self._used_s(pid)
            if used_s is not None:
                self._samples.setdefault(pid, []).append((time.perf_counter(), used_s))

    def _used_s(self, pid: int) -> float | None:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return (int(fields[11]) + int(fields[12])) / self._ticks  # user and system time (proc(5))

    def used_s(self, pid: int, begin: float, end: float) -> float | None:
        """Seconds between two moments of ``time.perf_counter``; None where the process was not seen twice."""
        samples = self._samples.get(pid, ())
        if len(samples) < 2:
            return None
        return interpolated(samples, end) - interpolated(samples, begin)

    def all_used_s(self, pids: Sequence[int], begin: float, end: float) -> float | None:
        """Of several processes together; None where one is not known, or there is none."""
        each = [self.used_s(pid, begin, end) for pid in pids]
        known = [seconds for seconds in each if seconds is not None]
        return sum(known) if known and len(known) == len(each) else None


class WireWatch:
    """Samples the counters of some hosts' interfaces, added up.

    Args:
        hosts: made already.
        count: of the first so many.
    """

    def __init__(self, hosts: Hosts, count: int) -> None:
        self._hosts, self._count = hosts, count
        self._samples: list[tuple[float, float]] = []

    def look(self) -> None:
        """Take one sample."""
        moved = sum(self._hosts.moved_bytes(number) for number in range(self._count))
        self._samples.append((time.perf_counter(), float(moved)))

    def moved(self, begin: float, end: float) -> float:
        """Bytes sent and received between two moments of ``time.perf_counter``."""
        return interpolated(self._samples, end) - interpolated(self._samples, begin)


def interpolated(samples: Sequence[tuple[float, float]], moment: float) -> float:
    """The value at a moment, on the line between its neighbours; beyond the ends, the end's."""
    place = bisect.bisect_left(samples, (moment, 0.0))
    if place == 0 or place == len(samples):
        return samples[min(place, len(samples) - 1)][1]
    (t0, v0), (t1, v1) = samples[place - 1 : place + 1]
    return v0 + (v1 - v0) * (moment - t0) / (t1 - t0)
