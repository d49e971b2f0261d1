"""Many SIGKILLs at random instants: every run completes, and its accounts close.

    python -m tests.measure.kills [--count 100] [--roles server trainer] [--optimizers sgd adam]
    python -m tests.measure.kills --roles server --consistencies sync --optimizers adam --seed 7 --count 1 --keep /tmp/7
    python -m tests.measure.kills --sample 10 --count 300 --per_run 300 --consistencies async --optimizers adam

For each role, consistency and optimizer, runs of one server and two trainers until so many SIGKILLs were sent: to
server 0, or to one of the trainers. Three of four kills come while the run trains, at a random instant of the next
``ALIVE_S`` seconds; the fourth at a random instant of the ``RETURN_S`` seconds after the kill before, so it may meet a
return. Ranks are forked from a process that has imported torch and start again without a delay.

Each run must complete, with every sample applied once per pass by the positions in the server's ledger, every accepted
push applied or dropped, and each step recorded once; nothing may be left behind. After kills of the server in ``sync``,
and of a trainer in ``rollback`` (``sync`` with ``server.on_loss: rollback``), the parameters must be bit-equal to those
of a run without kills. A run that fails is kept with ``--keep``; ``--seed`` repeats its draws, but not the instants of
the processes.

With ``--sample N`` only the last trainer is killed, if the role is ``trainer``, and memory (RSS), shared memory
(RssShmem), memory files (memfd), threads and descriptors of the supervisor and of the ranks that are not killed are
read before every N-th kill: from the ``SETTLED``-th kill on they must not grow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # as pytest does: see tests/conftest.py

import psutil
from forkserver import SHORT_LIFE, close_shared_server
from launching import FinishedRun, differing_tensors, environment, fork_server, write_config
from process_states import is_alive
from supervised_tasks import ranks_of

from tests.measure.common import origin, parser_of, verdict
from tests.measure.faults import LIMIT_S, TASK, Cell, References, left_behind

SAMPLES = 256
ALIVE_S, RETURN_S = 0.8, 1.2
COMPUTE_S = 0.02
EPOCHS_OF_A_KILL = {"server": 0.7, "trainer": 1.0}
"""About as many as the run makes between two kills."""
SETTLED = 30
ROLES, CONSISTENCIES, OPTIMIZERS = ("server", "trainer"), ("sync", "rollback", "bounded", "async"), ("sgd", "adam")


@dataclass(frozen=True)
class Kills:
    """Seeded SIGKILLs of one role at random instants of one run.

    Attributes:
        role: ``server`` or ``trainer``.
        consistency: of ``CONSISTENCIES``.
        optimizer: of ``OPTIMIZERS``.
        seed: of the draws.
        count: the run ends soon after so many kills, or before.
        sample_every: read what the other processes hold before every so many kills; 0 for never.
        transport: as that of a ``Cell``.
    """

    role: str
    consistency: str
    optimizer: str
    seed: int
    count: int
    sample_every: int = 0
    transport: str = "auto"

    @property
    def targets(self) -> list[int]:
        """The ranks that are killed."""
        return [0] if self.role == "server" else [2] if self.sample_every else [1, 2]

    @property
    def epochs(self) -> int:
        return 1 + round(EPOCHS_OF_A_KILL[self.role] * self.count)

    def config(self) -> dict[str, Any]:
        """Of the run."""
        config = Cell(self.consistency, self.role, "mid_step", "kill", self.transport).config()
        config["cluster"]["max_restarts"] = self.count
        config["training"]["max_epochs"] = self.epochs
        return config

    @property
    def options(self) -> dict[str, Any]:
        """Of the task."""
        return {"samples": SAMPLES, "optimizer": self.optimizer, "compute_s": COMPUTE_S}

    @property
    def must_equal(self) -> bool:
        return self.consistency == "rollback" or (self.consistency == "sync" and self.role == "server")


@dataclass(frozen=True)
class Held:
    """What a process holds: bytes of memory, bytes of shared memory, memory files, threads, descriptors."""

    rss: int
    shared: int
    memory_files: int
    threads: int
    descriptors: int

    @classmethod
    def of(cls, process: psutil.Process) -> Held:
        files = 0
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                files += link.readlink().name.startswith("memfd:")
        with process.oneshot():
            memory = process.memory_info()
            return cls(memory.rss, memory.shared, files, process.num_threads(), process.num_fds())


@dataclass
class KillResult:
    """What became of a run.

    Attributes:
        kills: that were sent.
        problems: what was not as it must be.
        seconds: that the run took.
        held: for each role that was not killed, (kills before, what it held).
    """

    kills: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    held: dict[str, list[tuple[int, Held]]] = field(default_factory=dict)


class Killer:
    """Sends the kills of one run.

    Args:
        kills: the plan.
        pid: of the supervisor.
        rows: the file to which the task adds a line for each batch that begins.
        outcome: receives what is sent and read.
    """

    def __init__(self, kills: Kills, pid: int, rows: Path, outcome: KillResult) -> None:
        self.kills, self.pid, self.rows, self.outcome = kills, pid, rows, outcome
        self.draw = random.Random(kills.seed)
        self.deadline = time.monotonic() + LIMIT_S * (2 + kills.count / 4)

    def send_all(self) -> None:
        self._wait_for_rows(since=0.0)
        while self.outcome.kills < self.kills.count:
            time.sleep(self.draw.uniform(0, ALIVE_S))
            every = self.kills.sample_every
            if every and self.outcome.kills % every == 0:
                self._read_held()
            rank = self.draw.choice(self.kills.targets)
            killed = self._kill(rank)
            if killed is None:
                return
            if self.draw.random() < 0.25:
                time.sleep(self.draw.uniform(0, RETURN_S))
            elif not self._wait_until_trains(rank, killed):
                return

    def _goes_on(self) -> bool:
        return is_alive(self.pid) and time.monotonic() < self.deadline

    def _kill(self, rank: int) -> int | None:
        """Kill the rank, and return its process; None if the run has ended."""
        while self._goes_on():
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                process = ranks_of(self.pid)[rank]
                process.kill()
                self.outcome.kills += 1
                return int(process.pid)
            time.sleep(0.02)  # it is being replaced
        return None

    def _wait_until_trains(self, rank: int, killed: int) -> bool:
        while self._goes_on():
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                process = ranks_of(self.pid)[rank]
                if process.pid != killed:
                    # A batch that had begun before the kill may end a little later.
                    pid = process.pid if self.kills.role == "trainer" else None
                    return self._wait_for_rows(process.create_time() + 0.2, pid)
            time.sleep(0.02)
        return False

    def _wait_for_rows(self, since: float, pid: int | None = None) -> bool:
        while self._goes_on():
            for at, row_pid in self._last_rows():
                if at > since and pid in (None, row_pid):
                    return True
            time.sleep(0.02)
        return False

    def _last_rows(self) -> Iterator[tuple[float, int]]:
        if self.rows.exists():
            with self.rows.open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
                lines = file.read().decode().split("\n")[1:-1]
            yield from ((float(words[0]), int(words[1])) for words in map(str.split, lines) if len(words) == 4)

    def _read_held(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):  # the run has just ended
            processes = {"supervisor": psutil.Process(self.pid)}
            ranks = ranks_of(self.pid)
            for rank in sorted(ranks.keys() - set(self.kills.targets)):
                processes["server" if rank == 0 else f"trainer {rank - 1}"] = ranks[rank]
            for name, process in processes.items():
                self.outcome.held.setdefault(name, []).append((self.outcome.kills, Held.of(process)))


def run_kills(kills: Kills, folder: Path, references: References) -> KillResult:
    """Make the run in ``folder``, and check it."""
    began, outcome = time.monotonic(), KillResult()
    (folder / "tmp").mkdir(parents=True)
    arguments = {"folder": str(folder), **kills.options}
    file = write_config(folder, task=f"{TASK}:Injected", task_args=arguments, **kills.config())
    finished = FinishedRun(0, "", folder / "runs" / "run")
    environ = environment(TMPDIR=str(folder / "tmp"), **{SHORT_LIFE: "0"})
    with fork_server().start(["--config", file, "--set", "logging.name=run"], folder, environ) as run:
        killer = Killer(kills, run.pid, folder / "rows", outcome)
        killer.send_all()
        try:
            code = run.wait(max(killer.deadline - time.monotonic(), 1))
        except AssertionError:
            outcome.problems.append("no end in time")
            return outcome
        outcome.seconds = time.monotonic() - began
        outcome.problems += [f"left: {what}" for what in left_behind(run.pid, folder)]
        output = run.output.read_text()
    if code != 0:
        outcome.problems.append(f"exit code {code}: {output.rpartition('error: ')[2][:300]}")
    else:
        outcome.problems += problems_of_accounts(finished, kills.epochs * SAMPLES)
        if kills.must_equal:
            reference = references.of(kills.config(), kills.options)
            if differing_tensors(finished.load("model"), reference.load("model")):
                outcome.problems.append("the parameters differ from those of the run without kills")
    return outcome


def problems_of_accounts(finished: FinishedRun, due: int, resharded: bool = False) -> list[str]:
    """Return what is wrong with the figures of a completed run.

    Args:
        finished: the run.
        due: samples.
        resharded: trainers joined or left, so that positions in the ledger count from then on.
    """
    summary, problems = finished.summary, []
    if summary["status"] != "completed" or summary["samples"] != due:
        problems.append(f"{summary['status']}, {summary['samples']} samples applied, {due} due")
    rows = finished.load("run")["ledger"]["rows"].values()
    # No position is applied twice: ``AppliedPositions.add`` raises.
    once, more = sum(row["positions"]["low"] for row in rows), [len(row["positions"]["positions"]) for row in rows]
    if (once != due and not resharded) or any(more):
        problems.append(f"the ledger has {once} positions applied, {due} due, and after a gap {more}")
    accepted, staleness = sum(row["pushes"] for row in rows), summary["staleness"]
    applied = sum(staleness["histogram"].values())
    if accepted != applied + staleness["dropped"]:
        problems.append(f"{accepted} pushes accepted, {applied} applied, {staleness['dropped']} dropped")
    steps = [record["step"] for record in finished.of_kind("train")]
    if steps != list(range(1, summary["steps"] + 1)):
        problems.append(f"{summary['steps']} steps, recorded: {len(steps)}, of which {len(set(steps))} differ")
    return problems


# What is printed.


def report_case(case: tuple[str, str, str], arguments: argparse.Namespace, folder: Path, references: References) -> int:
    """Make runs until so many kills were sent; return how many runs failed."""
    sent, failed, runs, seed = 0, 0, 0, arguments.seed
    began, name = time.monotonic(), " ".join(case)
    while sent < arguments.count and failed < arguments.most:
        kills = Kills(*case, seed, min(arguments.per_run, arguments.count), arguments.sample)
        run_folder = folder / f"{'-'.join(case)}-{seed}"
        outcome = run_kills(kills, run_folder, references)
        runs, sent, failed = runs + 1, sent + outcome.kills, failed + bool(outcome.problems)
        if outcome.problems:
            print(f"  {name}, seed {seed}: {outcome.kills} kills: {'; '.join(outcome.problems)}", flush=True)
        else:
            shutil.rmtree(run_folder)
            failed += bool(arguments.sample and not print_held(outcome))
        seed += 1
    equal = ", parameters equal" if kills.must_equal and not failed else ""
    print(
        f"{name:22}{sent:5} kills, {runs:3} runs, {failed} failed, {time.monotonic() - began:4.0f} s"
        f"{equal}: {verdict(not failed)}",
        flush=True,
    )
    return failed


# An allocator's noise, and connections of a return that is still under way.
NOISE = {"rss": 0.03, "shared": 0.03, "memory_files": 2, "threads": 2, "descriptors": 4}


def print_held(outcome: KillResult) -> bool:
    """Print first values, last values and growth for 100 kills; whether nothing grows."""
    flat = True
    for name, readings in outcome.held.items():
        settled = [(kills, held) for kills, held in readings if kills >= SETTLED]
        if len(settled) < 9:
            raise ValueError(f"{len(settled)} readings of the {name} must be 9 or more; raise --count")
        for what, noise in NOISE.items():
            values = [float(getattr(held, what)) for _, held in settled]
            slope = statistics.linear_regression([float(kills) for kills, _ in settled], values).slope * 100
            third = len(values) // 3
            first, last = statistics.median(values[:third]), statistics.median(values[-third:])
            met = last - first <= (noise * first if isinstance(noise, float) else noise)
            flat &= met
            unit, form = (1e6, ".1f") if what in ("rss", "shared") else (1.0, ".0f")
            print(
                f"  {name:11} {what + (' MB' if unit > 1 else ''):13} {first / unit:8{form}} -> {last / unit:8{form}}, "
                f"{slope / unit:+.2f} per 100 kills (from {settled[0][0]} to {settled[-1][0]}): {verdict(met)}"
            )
    return flat


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=100, help="kills of each case")
    parser.add_argument("--per_run", type=int, default=25, help="kills of one run")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--consistencies", nargs="+", choices=CONSISTENCIES, default=list(CONSISTENCIES))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--seed", type=int, default=0, help="of the first run of each case")
    parser.add_argument("--sample", type=int, default=0, help="read what the other processes hold before every N-th")
    parser.add_argument("--most", type=int, default=3, help="end a case after so many failed runs")
    parser.add_argument("--keep", type=Path, help="make the runs in this folder, and keep those that fail")
    arguments = parser.parse_args(words)
    print(origin())
    failed = 0
    with ExitStack() as stack:
        stack.callback(close_shared_server)
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        references = References(folder / "references")
        for consistency in arguments.consistencies:
            for role in arguments.roles:
                if consistency == "rollback" and role == "server":
                    continue  # as in sync
                for optimizer in arguments.optimizers:
                    failed += report_case((role, consistency, optimizer), arguments, folder, references)
    print(json.dumps({"failed": failed}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
