"""Real faults: one run for each fault, role, phase and consistency, and what became of it.

    python -m tests.measure.faults [--cells WORD ...] [--out docs/faults.csv]
    python -m tests.measure.faults --figures 5

A cell is named ``consistency/role/phase/fault``; ``--cells`` selects those whose names have all of these words. With
``--transport rpc`` or ``tcp`` parameters and gradients are messages, and that is the end of the names. Every
cell is a run of two trainers whose ranks are forked from a process that has imported torch, so that a cell takes
seconds; ``--figures`` starts interpreters. With ``--results``, cells that the file has are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # as pytest does: see tests/conftest.py

from forkserver import close_shared_server
from injected_faults import SIGNALS
from launching import (
    FinishedRun,
    differing_tensors,
    environment,
    fork_server,
    write_config,
)
from process_states import is_alive

from tests.measure.common import origin, parser_of, spread

TASK = Path(__file__).parents[1] / "helpers" / "injected_faults.py"

FAULTS = {
    "kill": "SIGKILL",
    "stop_10s": "SIGSTOP 10 s",
    "stop": "SIGSTOP for ever",
    "hold": "interpreter lock held 10 s",
    "raise": "exception in the task",
    "exit": "os._exit in a hook",
    "disk": "full disk",
}
ROLES = ("trainer", "server", "shard", "supervisor")
PHASES = ("joining", "first_step", "mid_step", "validation", "checkpoint", "shutdown")
CONSISTENCIES = ("sync", "rollback", "bounded", "async", "backup", "ddp")

LOST_AFTER_S = 2.0
LIMIT_S = 60.0
EPOCHS, SAMPLES = 2, 256
DUE = EPOCHS * SAMPLES
VALIDATION_SAMPLES = 37  # of the reference task
STOPPED_S = 10.0


@dataclass(frozen=True)
class Cell:
    """One fault: where, when and in which kind of run. ``rollback`` is ``sync`` with ``server.on_loss: rollback``.

    ``transport`` is ``server.transport``; ``auto`` is shared memory here.
    """

    consistency: str
    role: str
    phase: str
    fault: str
    transport: str = "auto"

    @property
    def name(self) -> str:
        named = (self.consistency, self.role, self.phase, self.fault)
        return "/".join(named if self.transport == "auto" else (*named, self.transport))

    @property
    def mode(self) -> str:
        return "ddp" if self.consistency == "ddp" else "rpc"

    @property
    def servers(self) -> int:
        return 0 if self.mode == "ddp" else 2 if self.role == "shard" else 1

    @property
    def target(self) -> int:
        """The rank, or -1. Of the trainers it is the second one, but for a disk, which only rank 0 uses."""
        if self.role == "trainer":
            return 0 if self.fault == "disk" else self.servers + 1
        return {"server": 0, "shard": 1, "supervisor": -1}[self.role]

    def impossible(self) -> str | None:
        """Why there is no such cell; None if there is one."""
        if self.mode == "ddp" and (self.role in ("server", "shard") or self.transport != "auto"):
            return "ddp has no servers"
        if self.role == "supervisor" and self.fault not in SIGNALS:
            return "the supervisor runs no code of the task, and writes a file only if rank 0 could not"
        if self.fault == "disk" and (self.role == "shard" or (self.role == "trainer" and self.mode != "ddp")):
            return "only rank 0 writes the run's folder"
        if self.role in ("server", "shard") and self.fault in ("hold", "raise", "exit"):
            if self.phase == "shutdown":
                return "a server calls no code of the task when the run ends"
            if self.role == "shard" and self.phase in ("validation", "checkpoint"):
                return "a shard server calls no code of the task for a validation or a checkpoint"
        return None

    def config(self) -> dict[str, Any]:
        """Of the run."""
        consistency = {"rollback": "sync", "backup": "sync", "ddp": "sync"}.get(self.consistency, self.consistency)
        server: dict[str, Any] = {"consistency": consistency, "lost_after_s": LOST_AFTER_S}
        server["transport"] = self.transport
        if self.consistency == "rollback":
            server["on_loss"] = "rollback"
        if self.consistency == "backup":
            server["backup_trainers"] = 1
        return {
            "mode": self.mode,
            "cluster": {"num_trainers": 2, "num_servers": max(self.servers, 1), "timeout_s": 20},
            "server": server,
            "training": {
                "max_steps": None,
                "max_epochs": EPOCHS,
                "batch_size": 8,
                "validate_every": 8,
                "uneven_inputs": "join",
            },
            "checkpoint": {"every": 5, "keep": 3},
        }


@dataclass(frozen=True)
class CellResult:
    """What became of a cell; a number is None where there is nothing to measure.

    Attributes:
        name: of the cell.
        expected: whether it ended as it must.
        outcome: ``completed``, or how it ended.
        noticed_s: from the fault to the first record or note of the loss.
        update_s: from the fault to the next update.
        replaced_s: from the fault to the first batch of the process that takes the place of the lost one; of a server,
            to the first update that it makes.
        redone: updates made again.
        samples: applied.
        equal: whether the parameters are those of a run without faults, where they must be.
        left: processes and files that are left behind.
        seconds: duration of the cell.
        problems: what was not as it must be.
    """

    name: str
    expected: bool
    outcome: str
    noticed_s: float | None
    update_s: float | None
    replaced_s: float | None
    redone: int | None
    samples: int | None
    dropped: int | None
    equal: bool | None
    left: list[str]
    seconds: float
    problems: list[str]


def all_cells() -> Iterator[Cell]:
    for consistency in CONSISTENCIES:
        for role in ROLES:
            for phase in PHASES:
                for fault in FAULTS:
                    yield Cell(consistency, role, phase, fault)


# One cell.


class Watch:
    """Reads what a run writes while it runs: when each line of its output came."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.lines: list[tuple[float, str]] = []
        self._size = 0
        self._rest = ""

    def read(self) -> None:
        if self.output.exists() and self.output.stat().st_size > self._size:
            with self.output.open() as file:
                file.seek(self._size)
                text = file.read()
                self._size = file.tell()
            *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
            self.lines += [(time.time(), line) for line in lines]


@dataclass(frozen=True)
class Finished:
    """A run with a fault that has ended.

    Attributes:
        run: what it left.
        watch: its output.
        fired: the fault's mark: ``time`` and ``pid``; None if it did not fire.
        code: exit code; None if the supervisor was killed, ``hung`` if the run was still alive at the limit.
        left: what it left behind.
    """

    run: FinishedRun
    watch: Watch
    fired: dict[str, Any] | None
    code: int | str | None
    left: list[str]


def run_cell(cell: Cell, folder: Path, references: References, start: Any = None) -> CellResult:
    """Run one cell in ``folder``, which must be empty."""
    began = time.monotonic()
    ended = _run(cell, folder, start or fork_server().start)
    finished, watch, fired, code, left = ended.run, ended.watch, ended.fired, ended.code, ended.left
    problems = [] if fired else ["the fault did not fire"]
    if code == "hung":
        problems.append(f"no end within {LIMIT_S:g} s")
    by_hand = cell.role == "supervisor" and cell.fault == "kill" and code != "hung"
    if by_hand and (finished.run_dir / "checkpoints" / "latest").exists():
        code = fork_server().run(["--resume", finished.run_dir], folder, LIMIT_S, environment())[0]
    summary = finished.summary if (finished.run_dir / "summary.json").exists() else {}
    at = fired["time"] if fired else time.time()
    rows = _rows(folder)
    problems += _problems_of_end(cell, code, summary, finished)
    problems += [
        f"a trainer uses {used}" for used in _transports(finished) - {cell.transport} if cell.transport != "auto"
    ]
    completed = code == 0 and summary.get("status") == "completed"
    outcome = "completed" if completed else f"code {code}: {_last_error(watch)}"
    samples = summary.get("samples") if completed else None
    dropped = ((summary.get("staleness") or {}).get("dropped")) if completed else None
    counted = cell.consistency == "backup" and samples is not None and samples + 8 * (dropped or 0) >= DUE
    if samples not in (None, DUE) and not counted:
        problems.append(f"{samples} samples applied, {DUE} due")
    validations = [record for record in _records(finished) if record["kind"] == "validation"]
    problems += [
        f"the validation of step {record['step']} covers {record['samples']} of {VALIDATION_SAMPLES} samples"
        for record in validations
        if record["samples"] != VALIDATION_SAMPLES
    ]
    if completed and summary["steps"] not in {record["step"] for record in validations}:
        problems.append("the last step was not validated")
    equal = None
    if completed and _must_equal(cell):
        equal = (
            differing_tensors(finished.load("model"), references.of(cell.config(), {"samples": SAMPLES}).load("model"))
            == []
        )
        if not equal:
            problems.append("the parameters differ from those of the undisturbed run")
    problems += [f"left: {what}" for what in left]
    return CellResult(
        cell.name,
        not problems,
        outcome,
        _noticed(watch, finished, at),
        _next_update(finished, at),
        _replaced(cell, finished, rows, at, fired),
        _redone(rows, at),
        samples,
        dropped,
        equal,
        left,
        round(time.monotonic() - began, 1),
        problems,
    )


def _run(cell: Cell, folder: Path, start: Any) -> Finished:
    (folder / "tmp").mkdir(parents=True)
    file = write_config(folder, task=f"{TASK}:Injected", task_args=_task_args(cell, folder), **cell.config())
    arguments = ["--config", file, "--set", "logging.name=run"]
    finished = FinishedRun(0, "", folder / "runs" / "run")
    mark = folder / "mark"
    fired: dict[str, Any] | None = None
    continued = False
    with start(arguments, folder, environment(TMPDIR=str(folder / "tmp"))) as run:
        watch, deadline, code = Watch(run.output), time.monotonic() + LIMIT_S, "hung"
        stopped_for_ever = cell.role == "supervisor" and cell.fault == "stop"
        while time.monotonic() < deadline:
            watch.read()
            fired = fired or _mark(mark)
            due = fired is not None and cell.fault == "stop_10s" and time.time() > fired["time"] + STOPPED_S
            if due and not continued:
                continued = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(fired["pid"], signal.SIGCONT)
            if stopped_for_ever and fired is not None and not _alive_ranks(run.pid):
                summary = finished.summary if (finished.run_dir / "summary.json").exists() else {}
                code = 0 if summary.get("status") == "completed" else "stopped"
                break
            with contextlib.suppress(AssertionError):
                code = run.wait(0.01)
                break
        watch.read()
        fired = fired or _mark(mark)
        if stopped_for_ever:
            os.kill(run.pid, signal.SIGKILL)
        left = left_behind(run.pid, folder) if code != "hung" else []
    return Finished(finished, watch, fired, code, left)


def _mark(file: Path) -> dict[str, Any] | None:
    text = file.read_text() if file.exists() else ""
    mark: dict[str, Any] | None = json.loads(text) if text.endswith("\n") else None
    return mark


def _task_args(cell: Cell, folder: Path) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "fault": cell.fault,
        "target": cell.target,
        "phase": cell.phase,
        "samples": SAMPLES,
    }


def _of_session(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(path.name)) == pid and is_alive(int(path.name)):
                    found.append(int(path.name))
    return found


def _alive_ranks(supervisor: int) -> list[int]:
    return [pid for pid in _of_session(supervisor) if pid != supervisor]


def _guards(supervisor: int) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0") if path.name.isdigit() else []
            if any(w.endswith(b"rank_guard.py") for w in words) and str(supervisor).encode() in words:
                found.append(int(path.name))
    return found


def left_behind(supervisor: int, folder: Path) -> list[str]:
    """What is left of a run soon after its end: the guard kills ranks that outlive the supervisor for too long."""
    deadline = time.monotonic() + LOST_AFTER_S + 8
    while True:
        left = [f"process {pid}" for pid in _of_session(supervisor)]
        left += [f"guard {pid}" for pid in _guards(supervisor)]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    # torch keeps a folder of its compiler.
    left += [f"file {path.name}" for path in (folder / "tmp").iterdir() if "torchinductor" not in path.name]
    run_dir = folder / "runs" / "run"
    if run_dir.exists():
        left += [f"file {p.name}" for p in run_dir.rglob("*") if ".tmp" in p.name or "launch" in p.name]
    return left


def _rows(folder: Path) -> list[tuple[float, int, int, int]]:
    """Time, pid, rank and step of each batch."""
    if not (folder / "rows").exists():
        return []
    words = [line.split() for line in (folder / "rows").read_text().splitlines()]
    return sorted((float(w[0]), int(w[1]), int(w[2]), int(w[3])) for w in words if len(w) == 4)


def _transports(finished: FinishedRun) -> set[str]:
    """What the trainers exchange parameters and gradients by."""
    logs = [file.read_text() for file in (finished.run_dir / "logs").glob("rank-*.log")]
    return {used for log in logs for used in re.findall(r"transport of parameters and gradients: (\w+)", log)}


def _records(finished: FinishedRun) -> list[dict[str, Any]]:
    file = finished.run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _last_error(watch: Watch) -> str:
    errors = [line for _, line in watch.lines if "error: " in line]
    return errors[-1].partition("error: ")[2][:200] if errors else "no message"


_LOSS = (" is lost", "no sign of life", "failed after its end", "error: ")


def _noticed(watch: Watch, finished: FinishedRun, at: float) -> float | None:
    moments = [moment for moment, line in watch.lines if moment >= at and any(word in line for word in _LOSS)]
    moments += [r["time"] for r in _records(finished) if r["kind"] == "lost" and r["time"] >= at]
    return round(min(moments) - at, 3) if moments else None


def _next_update(finished: FinishedRun, at: float) -> float | None:
    later = [r["time"] for r in _records(finished) if r["kind"] == "train" and r["time"] > at]
    return round(min(later) - at, 3) if later else None


def _replaced(cell: Cell, finished: FinishedRun, rows: Any, at: float, fired: Any) -> float | None:
    if fired is None or cell.role == "supervisor":
        return None
    if cell.role == "trainer":
        later = [t for t, pid, rank, _ in rows if rank == cell.target and pid != fired["pid"] and t > at]
    else:
        starts = [r["time"] for r in _records(finished) if r["kind"] == "start" and r["time"] > at]
        began = max(starts, default=None)
        if began is None:
            return None
        later = [r["time"] for r in _records(finished) if r["kind"] == "train" and r["time"] > began]
    return round(min(later) - at, 3) if later else None


def _redone(rows: Any, at: float) -> int | None:
    before = [step for t, _, _, step in rows if t <= at]
    return 0 if not before else _largest_return(rows)


def _largest_return(rows: Any) -> int:
    """By how many versions a trainer went back at most."""
    total, highest = 0, dict[int, int]()
    for _, _, rank, step in rows:
        if step < highest.get(rank, step):
            total = max(total, highest[rank] - step)
        highest[rank] = step
    return total


def _problems_of_end(cell: Cell, code: Any, summary: dict[str, Any], finished: FinishedRun) -> list[str]:
    if cell.fault in ("raise", "disk"):
        return [] if code == 1 else [f"exit code {code}, must be 1"]
    killed = cell.role == "supervisor" and cell.fault == "kill"
    if killed and code is None and not (finished.run_dir / "checkpoints" / "latest").exists():
        return []  # nothing was saved yet, so nothing is resumed
    return [] if code == 0 and summary.get("status") == "completed" else [f"must complete, ended with {code}"]


def _must_equal(cell: Cell) -> bool:
    if cell.consistency in ("rollback", "ddp"):
        return True
    return cell.consistency == "sync" and (cell.role != "trainer" or cell.fault not in FAULTS)


class References:
    """Runs without a fault, each made once, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, FinishedRun] = {}
        self._lock = threading.Lock()

    def of(self, config: dict[str, Any], options: dict[str, Any]) -> FinishedRun:
        """The run of this configuration with these options of the task."""
        key = json.dumps([config, options], sort_keys=True)
        with self._lock:
            if key not in self._runs:
                folder = self.folder / str(len(self._runs))
                file = write_config(
                    folder, task=f"{TASK}:Injected", task_args={"folder": str(folder), **options}, **config
                )
                code, output = fork_server().run(["--config", file, "--set", "logging.name=run"], folder, 10 * LIMIT_S)
                if code != 0:
                    raise RuntimeError(f"a run without a fault ended with {code}:\n{output}")
                self._runs[key] = FinishedRun(code, output, folder / "runs" / "run")
            return self._runs[key]


# The table.


def describe(result: dict[str, Any]) -> str:
    """A cell of the table."""
    if not result["expected"]:
        return "FAILED: " + "; ".join(result["problems"])
    numbers = [_number(result[name]) for name in ("noticed_s", "update_s", "replaced_s")]
    if result["outcome"] != "completed":
        return f"ended {numbers[0]}"
    redone = f", {result['redone']} redone" if result["redone"] else ""
    lost = "" if result["samples"] in (DUE, None) else f", {DUE - result['samples']} dropped"
    return " / ".join(numbers) + redone + lost


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def table(results: dict[str, dict[str, Any]]) -> str:
    """The contents of docs/faults.csv, of which the site makes the tables of docs/losses.md."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    by_rpc = [r for r in results.values() if r["name"].endswith("/rpc")]
    ran = [r for r in results.values() if r not in by_rpc]
    made = ORIGIN.format(
        date=time.strftime("%Y-%m-%d"),
        commit=commit,
        minutes=sum(r["seconds"] for r in ran) / 60,
        origin=origin().splitlines()[1],
        cells=len(ran),
        failed=sum(not r["expected"] for r in ran),
        longest=max((r["seconds"] for r in ran), default=0),
    )
    if by_rpc:
        made += ORIGIN_RPC.format(cells=len(by_rpc), failed=sum(not r["expected"] for r in by_rpc))
    file = io.StringIO(newline="")
    file.writelines(f"{line}\n" for line in textwrap.wrap(made, 119, initial_indent="# ", subsequent_indent="# "))
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["role", "phase", "fault", *CONSISTENCIES])
    for role, phase, fault in itertools.product(ROLES, PHASES, FAULTS):
        cells = [Cell(consistency, role, phase, fault) for consistency in CONSISTENCIES]
        texts = [
            "n/a" if cell.impossible() else describe(results[cell.name]) if cell.name in results else ""
            for cell in cells
        ]
        if any(text not in ("", "n/a") for text in texts):
            title = "Shard server" if role == "shard" else role.capitalize()
            rows.writerow([title, phase.replace("_", " "), FAULTS[fault], *texts])
    return file.getvalue()


ORIGIN = """Made by `python -m tests.measure.faults` on {date} at commit {commit}, in {minutes:.0f} minutes of runs, two
at a time, on {origin}. Of {cells} cells {failed} did not end as they must; the longest took {longest:.0f} s."""

ORIGIN_RPC = " The same faults with `server.transport: rpc`: {cells} cells, of which {failed} did not end as they must."


# Figures, with new interpreters.


class FreshRun:
    """A run under ``python -m paramserver.launch``, as ``ForkedRun`` shows one."""

    def __init__(self, arguments: Sequence[Any], folder: Path, environ: dict[str, str]) -> None:
        self.output = folder / "output"
        command = [sys.executable, "-m", "paramserver.launch", *map(str, arguments)]
        with self.output.open("w") as file:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environ, stdout=file, stderr=file, start_new_session=True
            )
        self.pid = self._process.pid

    def wait(self, timeout_s: float) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError from error

    def __enter__(self) -> FreshRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()  # its guard ends the ranks
        self._process.wait()


def report_figures(repeats: int, folder: Path) -> int:
    """Print how soon a death is noticed and made good, with ranks that are new interpreters."""
    references = References(folder / "references")
    for role in ("trainer", "server"):
        cell = Cell("sync", role, "mid_step", "kill")
        outcomes = [run_cell(cell, folder / f"{role}-{i}", references, FreshRun) for i in range(repeats)]
        bad = [problem for outcome in outcomes for problem in outcome.problems]
        print(f"SIGKILL of a {role}, sync, {repeats} runs" + (f", FAILED: {bad}" if bad else ""))
        for title, name in (
            ("noticed", "noticed_s"),
            ("next update", "update_s"),
            ("replacement trains", "replaced_s"),
        ):
            values = [value for outcome in outcomes if (value := getattr(outcome, name)) is not None]
            print(f"  {title:20} {spread(values, '.3f')} s")
    return 0


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--cells", nargs="*", default=[], help="words of names; a word may be alternatives: sync|ddp")
    transports = ["auto", "rpc", "tcp"]
    parser.add_argument("--transport", default="auto", choices=transports, help="server.transport of the cells")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--results", type=Path, help="JSON lines of results, which are added to")
    parser.add_argument("--out", type=Path, help="write the table there")
    parser.add_argument("--figures", type=int, help="print the figures of so many runs instead")
    parser.add_argument("--keep", type=Path, help="make the runs in this folder, and keep them")
    arguments = parser.parse_args(words)
    with ExitStack() as stack:
        stack.callback(close_shared_server)
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        if arguments.figures is not None:
            return report_figures(arguments.figures, folder)
        fork_server()  # its start is no part of a run
        return report_cells(arguments, folder)


def report_cells(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the cells, and write the table."""
    results: dict[str, dict[str, Any]] = {}
    if arguments.results is not None and arguments.results.exists():
        for line in arguments.results.read_text().splitlines():
            result = json.loads(line)
            results[result["name"]] = result
    cells = [replace(cell, transport=arguments.transport) for cell in all_cells()]
    chosen = [c for c in cells if not c.impossible() and _is_chosen(c, arguments.cells) and c.name not in results]
    references = References(folder / "references")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for outcome in pool.map(lambda cell: run_cell(cell, folder / cell.name, references), chosen):
            results[outcome.name] = asdict(outcome)
            print(f"{outcome.name:45} {outcome.seconds:5.1f} s  {describe(asdict(outcome))}", flush=True)
            if arguments.results is not None:
                with arguments.results.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    if arguments.out is not None:
        arguments.out.write_text(table(results))
    failed = [name for name, result in results.items() if not result["expected"]]
    print(f"{len(results)} cells, {len(failed)} failed")
    return int(bool(failed))


def _is_chosen(cell: Cell, words: Sequence[str]) -> bool:
    parts = cell.name.split("/")
    return all(any(alternative in parts for alternative in word.split("|")) for word in words)


if __name__ == "__main__":
    sys.exit(main())
