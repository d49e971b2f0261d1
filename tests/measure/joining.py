"""Sixteen trainers that join at once, a quarter of which are killed within a second of joining.

    python -m tests.measure.joining [--trainers 16] [--later 8] [--repeats 3] [--consistencies sync bounded async]

The task sleeps for its compute, so that two cores carry so many trainers; ranks are forked from a process that has
imported torch. A trainer has joined when its process builds the model. Every process that lives must train, also those
that take the places of the killed, and the run must complete with every sample applied once per pass. When the first
processes train, ``--later`` more join at once (``paramserver join``). Printed are the seconds from the start of the run
until all have joined and until all train, from each kill until its replacement trains, and from the start of the later
ones until each of them trains.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # as pytest does: see tests/conftest.py

from forkserver import close_shared_server
from launching import FinishedRun, environment, fork_server, write_config
from supervised_tasks import ranks_of

from tests.measure.common import origin, spread, verdict
from tests.measure.faults import TASK, is_alive, left_behind
from tests.measure.kills import problems_of_accounts

LIMIT_S = 180.0
WITHIN_S = 1.0
COMPUTE_S, EPOCHS, EPOCHS_WITH_LATER, BATCHES, BATCH_SIZE = 0.2, 2, 8, 12, 8


@dataclass
class JoinResult:
    """What became of a run.

    Attributes:
        joined_s, trained_s: from its start until all first processes that were not killed had joined, and trained.
        replaced_s: from each kill until its replacement trained.
        later_s: from the start of the later ones until each of them trained.
        problems: what was not as it must be.
    """

    joined_s: float = 0.0
    trained_s: float = 0.0
    replaced_s: list[float] = field(default_factory=list)
    later_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def config(consistency: str, trainers: int, later: int) -> dict[str, Any]:
    return {
        "mode": "rpc",
        "cluster": {"num_trainers": trainers, "timeout_s": 60, "elastic": later > 0},
        "server": {"consistency": consistency},
        "training": {
            "max_steps": None,
            "max_epochs": epochs(later),
            "batch_size": BATCH_SIZE,
            "uneven_inputs": "join",
        },
        "checkpoint": {"every": 10},
    }


def epochs(later: int) -> int:
    return EPOCHS_WITH_LATER if later else EPOCHS


def processes_of(folder: Path) -> dict[int, tuple[int, float]]:
    """Of the processes that have joined: their rank, and when."""
    found = {}
    for path in folder.glob("joined-*-*"):
        _, rank, pid = path.name.split("-")
        found[int(pid)] = -1 if rank == "None" else int(rank), path.stat().st_mtime  # a later one draws its rank
    return found


def first_batches(folder: Path) -> dict[int, float]:
    """When each process began its first batch."""
    found: dict[int, float] = {}
    lines = (folder / "rows").read_text().splitlines() if (folder / "rows").exists() else []
    for at, pid, *_ in map(str.split, lines):
        found.setdefault(int(pid), float(at))
    return found


def run(consistency: str, trainers: int, later: int, seed: int, folder: Path) -> JoinResult:
    """Make the run, and check it."""
    draw, outcome = random.Random(seed), JoinResult()
    due = {rank: draw.uniform(0, WITHIN_S) for rank in draw.sample(range(1, trainers + 1), trainers // 4)}
    killed: dict[int, tuple[int, float]] = {}  # by rank, the process and when
    samples = BATCHES * BATCH_SIZE * trainers
    (folder / "tmp").mkdir(parents=True)
    arguments = {"folder": str(folder), "compute_s": COMPUTE_S, "samples": samples, "validation": 0}
    file = write_config(folder, task=f"{TASK}:Injected", task_args=arguments, **config(consistency, trainers, later))
    finished = FinishedRun(0, "", folder / "runs" / "run")
    began = time.time()
    environ = environment(TMPDIR=str(folder / "tmp"))
    with ExitStack() as stack:
        started = stack.enter_context(
            fork_server().start(["--config", file, "--set", "logging.name=run"], folder, environ)
        )
        while due and is_alive(started.pid) and time.time() < began + LIMIT_S:
            for pid, (rank, joined) in processes_of(folder).items():
                if rank in due and time.time() >= joined + due[rank]:
                    process = ranks_of(started.pid)[rank]
                    assert process.pid == pid, "it was replaced before it was killed"
                    process.kill()
                    killed[rank] = pid, time.time()
                    del due[rank]
            time.sleep(0.005)
        joined_at, joiners = 0.0, list[int]()
        if later:
            alive = set(range(1, trainers + 1))
            while {rank for pid, (rank, _) in processes_of(folder).items() if pid in first_batches(folder)} < alive:
                if not is_alive(started.pid) or time.time() > began + LIMIT_S:
                    break
                time.sleep(0.05)
            joined_at = time.time()
            for _ in range(later):
                one = fork_server().start([finished.run_dir], folder, environ, program="elastic", function="join_main")
                joiners.append(stack.enter_context(one).pid)
        try:
            code = started.wait(max(began + LIMIT_S - time.time(), 1))
        except AssertionError:
            outcome.problems.append(f"no end within {LIMIT_S:g} s")
            return outcome
        outcome.problems += [f"left: {what}" for what in left_behind(started.pid, folder)]
        output = started.output.read_text()
    if code != 0:
        outcome.problems.append(f"exit code {code}: {output.rpartition('error: ')[2][:300]}")
        return outcome
    outcome.problems += problems_of_accounts(finished, epochs(later) * samples, resharded=later > 0)
    trained = first_batches(folder)
    outcome.later_s = [trained[pid] - joined_at for pid in joiners if pid in trained]
    if len(outcome.later_s) != later:
        outcome.problems.append(f"{len(outcome.later_s)} of the later trainers trained, and {later} must")
    _measure(outcome, folder, trainers, killed, began)
    return outcome


def _measure(
    outcome: JoinResult, folder: Path, trainers: int, killed: dict[int, tuple[int, float]], began: float
) -> None:
    joined, trained = processes_of(folder), first_batches(folder)
    dead = {pid for pid, _ in killed.values()}
    if len(dead) != trainers // 4:
        outcome.problems.append(f"{len(dead)} killed, must be {trainers // 4}")
    for rank in range(1, trainers + 1):
        alive = [pid for pid, (of, _) in joined.items() if of == rank and pid not in dead]
        if len(alive) != 1 or alive[0] not in trained:
            outcome.problems.append(f"trainer {rank - 1}: {len(alive)} processes lived, and must be one that trained")
        elif rank in killed:
            outcome.replaced_s.append(trained[alive[0]] - killed[rank][1])
        else:
            outcome.joined_s = max(outcome.joined_s, joined[alive[0]][1] - began)
            outcome.trained_s = max(outcome.trained_s, trained[alive[0]] - began)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=16)
    parser.add_argument("--later", type=int, default=8, help="trainers that join when the others train")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--consistencies", nargs="+", default=["sync", "bounded", "async"])
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat")
    parser.add_argument("--keep", type=Path, help="make the runs in this folder, and keep them")
    arguments = parser.parse_args(words)
    print(origin())
    failed = 0
    with ExitStack() as stack:
        stack.callback(close_shared_server)
        fork_server()  # its start is no part of a run
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="joining-")))
        for consistency in arguments.consistencies:
            outcomes = []
            for seed in range(arguments.seed, arguments.seed + arguments.repeats):
                outcomes.append(
                    run(consistency, arguments.trainers, arguments.later, seed, folder / f"{consistency}-{seed}")
                )
                for problem in outcomes[-1].problems:
                    print(f"  {consistency}, seed {seed}: {problem}", flush=True)
            wrong = sum(bool(outcome.problems) for outcome in outcomes)
            failed += wrong
            print(
                f"{consistency}: {arguments.trainers} trainers, {arguments.trainers // 4} killed within {WITHIN_S:g} s "
                f"of joining, {arguments.later} later, {len(outcomes)} runs, {wrong} failed: {verdict(not wrong)}"
            )
            for title, values in (
                ("all have joined", [o.joined_s for o in outcomes]),
                ("all train", [o.trained_s for o in outcomes]),
                ("a later one trains", [seconds for o in outcomes for seconds in o.later_s]),
                ("a replacement trains", [seconds for o in outcomes for seconds in o.replaced_s]),
            ):
                print(f"  {title:22}{spread(values)} s" if values else f"  {title:22}-", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
