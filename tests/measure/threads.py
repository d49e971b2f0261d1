"""Shows what each thread does in a step: CPU time, wake-ups, waits for a core and for the interpreter lock.

    python -m tests.measure.threads [--model digits] [--steps 600] [--warm 100] [--cases loop local loop-ddp ddp rpc]

One run of each case of ``tests.measure.overhead``, observed from another process between the first trainer's batches
``--warm`` and ``--steps``. Per step and thread: milliseconds on a core, milliseconds runnable without a core (both by
the kernel's scheduler), wake-ups (voluntary context switches, of which there is one for each time that the thread
slept), preemptions (involuntary ones), and the percentage of samples, every 5 ms, in which it waited for the
interpreter lock of its process. Threads of Python have their names, the others that of the kernel. Threads that did
nothing in 100 steps are left out. The observer takes a few percent of a core.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import paramserver
from tests.measure.common import (
    DEADLINE_S,
    Measured,
    Stamp,
    measured_config,
    measuring_environment,
    origin,
    parsed,
)
from tests.measure.overhead import BY_HAND, TRAINERS, make_parser, run_loop, run_loop_ddp

_EVERY_S = 0.005
# The interpreter's state, which has the lock, is one variable of this size at most.
_RUNTIME_BYTES = 1 << 20
_START, _END = "start", "end"


# In the processes that are observed.


def introduce(folder: Path) -> None:
    """Let the observer know this process: where its interpreter's state is, and the names of its threads."""
    runtime = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    (folder / f"process-{os.getpid()}").write_text(str(runtime))
    for thread in threading.enumerate():
        _name(thread.native_id, thread.name)
    begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def named(thread: threading.Thread) -> None:
        _name(threading.get_native_id(), thread.name)
        begin(thread)

    threading.Thread._bootstrap_inner = named  # type: ignore[attr-defined]


def _name(thread_id: int | None, name: str) -> None:
    Path(f"/proc/self/task/{thread_id}/comm").write_text(name[:15])


class Marks(list[Stamp]):
    """Stamps of a trainer, which marks the first and the last step that are observed by files in ``folder``."""

    def __init__(self, folder: Path, warm: int, steps: int) -> None:
        super().__init__()
        self.files = {warm: folder / _START, steps - 1: folder / _END}

    def append(self, stamp: Stamp) -> None:
        super().append(stamp)
        if len(self) in self.files:
            self.files[len(self)].touch()


class Observed(Measured):
    """``Measured``, which lets the observer know each process.

    Args:
        model, folder: see ``Measured``.
        warm, steps: see ``Marks``.
    """

    def __init__(self, model: str, folder: str, warm: int, steps: int) -> None:
        super().__init__(model, folder)
        introduce(Path(folder))
        self.stamps = Marks(Path(folder), warm, steps)


def be_child(arguments: argparse.Namespace) -> None:
    case, folder, steps = arguments.child, arguments.folder, arguments.steps
    if case in BY_HAND:
        introduce(folder)
        run = run_loop if case == "loop" else run_loop_ddp
        run(arguments.model, steps, folder, arguments.rank, Marks(folder, arguments.warm, steps))
        return
    task_args = {"model": arguments.model, "folder": str(folder), "warm": arguments.warm, "steps": steps}
    paramserver.run(Observed, measured_config(case, folder, steps, TRAINERS, task_args))


# The observer.


@dataclass(frozen=True)
class Counts:
    """What the kernel has counted of a thread: nanoseconds on a core and runnable without one, and switches."""

    name: str
    on_core_ns: int
    runnable_ns: int
    slept: int
    preempted: int


def counts_of(pid: int) -> dict[int, Counts]:
    """The counts of all threads of a process; threads that end meanwhile are left out."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        try:
            on_core, runnable, _ = (folder / "schedstat").read_text().split()
            status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError):
            continue
        switches = int(status["voluntary_ctxt_switches"]), int(status["nonvoluntary_ctxt_switches"])
        found[int(folder.name)] = Counts(status["Name"], int(on_core), int(runnable), *switches)
    return found


def waits_for_lock(pid: int, thread: int, runtime: int) -> bool:
    """Whether a thread is in a system call on an address within the interpreter's state, which only the lock has."""
    try:
        words = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return len(words) > 2 and 0 <= int(words[1], 16) - runtime < _RUNTIME_BYTES


def observe(folder: Path, children: list[subprocess.Popen[bytes]], steps: int) -> None:
    """Print the table of one run."""
    deadline = time.monotonic() + DEADLINE_S
    _wait_for(folder / _START, children, deadline)
    processes = {int(path.name.split("-")[1]): int(path.read_text()) for path in folder.glob("process-*")}
    processes = {pid: runtime for pid, runtime in processes.items() if Path(f"/proc/{pid}").exists()}
    before = {pid: counts_of(pid) for pid in processes}
    waits, samples = Counter[tuple[int, int]](), 0
    while not (folder / _END).exists():
        samples += 1
        for pid, runtime in processes.items():
            for thread in before[pid]:
                waits[pid, thread] += waits_for_lock(pid, thread, runtime)
        _check(children, deadline)
        time.sleep(_EVERY_S)
    after = {pid: counts_of(pid) for pid in processes}
    print(f"  {'process':9s}{'thread':18s}{'core ms':>9s}{'no core':>9s}{'woken':>7s}{'preempted':>10s}{'lock %':>8s}")
    for pid in processes:
        for thread, end in sorted(after[pid].items(), key=lambda pair: -pair[1].on_core_ns):
            begin = before[pid].get(thread, Counts(end.name, 0, 0, 0, 0))
            core_ms, runnable_ms = (
                ns / 1e6 / steps for ns in (end.on_core_ns - begin.on_core_ns, end.runnable_ns - begin.runnable_ns)
            )
            woken, preempted = ((end.slept - begin.slept) / steps, (end.preempted - begin.preempted) / steps)
            if woken < 0.01 and core_ms < 0.01:
                continue
            lock = 100 * waits[pid, thread] / max(samples, 1)
            row = f"{core_ms:9.3f}{runnable_ms:9.3f}{woken:7.2f}{preempted:10.2f}{lock:8.1f}"
            print(f"  {pid:<9d}{end.name:18s}{row}", flush=True)


def _wait_for(path: Path, children: list[subprocess.Popen[bytes]], deadline: float) -> None:
    while not path.exists():
        _check(children, deadline)
        time.sleep(_EVERY_S)


def _check(children: list[subprocess.Popen[bytes]], deadline: float) -> None:
    if any(child.poll() for child in children) or time.monotonic() > deadline:
        raise RuntimeError("a run that is observed failed, or took too long; see its output above")


def measure(case: str, arguments: argparse.Namespace) -> None:
    environ = {**measuring_environment(), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as name:
        words = [sys.executable, "-m", "tests.measure.threads", "--child", case, "--folder", name]
        words += ["--model", arguments.model, "--steps", str(arguments.steps), "--warm", str(arguments.warm)]
        children = [
            subprocess.Popen([*words, "--rank", str(rank)], env=environ, stdout=subprocess.DEVNULL)
            for rank in range(BY_HAND.get(case, 1))
        ]
        try:
            observe(Path(name), children, arguments.steps - 1 - arguments.warm)
            for child in children:
                child.wait(DEADLINE_S)
        finally:
            for child in children:
                child.kill()
                child.wait()


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(model="digits", steps=600, warm=100)
    arguments = parsed(parser)
    if arguments.child is not None:
        be_child(arguments)
        return
    print(origin())
    for case in arguments.cases:
        print(f"\n{case}, {arguments.model}, per step of {arguments.steps - 1 - arguments.warm}")
        measure(case, arguments)


if __name__ == "__main__":
    main()
