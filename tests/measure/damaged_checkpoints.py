"""Checkpoints that are damaged at random: each is refused by the name of the file, and the one before it loads.

    python -m tests.measure.damaged_checkpoints [--count 1000] [--seed 0]

The checkpoints are those of a run of one server and two trainers, one of which was killed: they have rows of the
ledger, and parts that the server made for the lost trainer. Each is damaged once, at random: a bit of a file is
flipped, a file is cut, is removed, is exchanged with another one, or is replaced by that of the checkpoint before. Then
it is resumed from as a server does. Printed are how many of each damage were refused and how; exits with 1 where one
was not, or where the checkpoint before did not load with the content that it was written with.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # as pytest does: see tests/conftest.py

from forkserver import close_shared_server
from launching import FinishedRun, differing_tensors, fork_server, write_config
from supervised_tasks import ranks_of

from paramserver.checkpoint import read_checkpoint
from paramserver.checkpoint.format import MANIFEST
from paramserver.checkpoint.load import skipped_checkpoints
from paramserver.config import Config, load_config
from paramserver.consistency.ledger import Ledger
from paramserver.errors import CheckpointError
from paramserver.runs.checkpoint_manager import load_for_resume
from paramserver.runs.rundir import RunDir
from tests.measure.common import origin, parser_of, verdict

TASK = Path(__file__).parents[1] / "helpers" / "injected_faults.py"
LIMIT_S = 60.0
MOST_CHECKPOINTS = 200


def train(folder: Path) -> FinishedRun:
    """Make a run that keeps all of its checkpoints, and whose trainer 1 is killed and replaced."""
    file = write_config(
        folder,
        task=f"{TASK}:Injected",
        task_args={"folder": str(folder)},
        mode="rpc",
        cluster={"num_trainers": 2},
        training={"max_steps": None, "max_epochs": 4, "uneven_inputs": "join"},
        checkpoint={"every": 2, "keep": MOST_CHECKPOINTS},
    )
    finished = FinishedRun(0, "", folder / "runs" / "run")
    with fork_server().start(["--config", file, "--set", "logging.name=run"], folder) as run:
        deadline = time.monotonic() + LIMIT_S
        while len(finished.checkpoints) < 3:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no checkpoints within {LIMIT_S:g} s:\n{run.output.read_text()}")
            time.sleep(0.01)
        ranks_of(run.pid)[2].send_signal(signal.SIGKILL)
        code = run.wait(LIMIT_S)
    if code != 0:
        raise RuntimeError(f"the run ended with {code}:\n{run.output.read_text()}")
    return finished


def has_substitute(checkpoint: Path) -> bool:
    """Whether a part of the checkpoint was made by the server."""
    return any(read_checkpoint(checkpoint).load(f"trainer-{i}")["buffer"] is None for i in (0, 1))


@dataclass(frozen=True)
class Pair:
    """Two checkpoints that follow each other, copied into a run folder of their own; the newer one is to be damaged."""

    newer: Path
    older: Path

    @property
    def run(self) -> RunDir:
        return RunDir(self.newer.parents[1])


def copied(finished: FinishedRun, index: int, folder: Path) -> Pair:
    source = finished.run_dir / "checkpoints"
    names = finished.checkpoints[index : index + 2]
    folder = folder / "checkpoints"
    for name in names:
        shutil.copytree(source / name, folder / name)
    (folder / "latest").write_text(f"{names[1]}\n", encoding="ascii")
    return Pair(folder / names[1], folder / names[0])


# Damages. Each returns the names of the files that are not as they were written.


def flip(pair: Pair, file: Path, draw: random.Random) -> set[str]:
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return {file.name}


def cut(pair: Pair, file: Path, draw: random.Random) -> set[str]:
    content = file.read_bytes().rstrip(b"\n")  # a manifest without its last line feed has lost nothing
    file.write_bytes(content[: draw.randrange(len(content))])
    return {file.name}


def remove(pair: Pair, file: Path, draw: random.Random) -> set[str]:
    file.unlink()
    return {file.name}


def exchange(pair: Pair, file: Path, draw: random.Random) -> set[str]:
    other = draw.choice(sorted(path for path in pair.newer.iterdir() if path != file))
    one, two = file.read_bytes(), other.read_bytes()
    assert one != two
    file.write_bytes(two)
    other.write_bytes(one)
    return {file.name, other.name}


def replace(pair: Pair, file: Path, draw: random.Random) -> set[str]:
    older = (pair.older / file.name).read_bytes()
    assert older != file.read_bytes()
    file.write_bytes(older)
    return {file.name}


DAMAGES: dict[str, Callable[[Pair, Path, random.Random], set[str]]] = {
    "flipped bit": flip,
    "cut": cut,
    "missing": remove,
    "exchanged": exchange,
    "of the checkpoint before": replace,
}


@dataclass(frozen=True)
class DamageResult:
    """What became of one damaged checkpoint.

    Attributes:
        damage: what was done to it.
        substitute: whether it has a part that the server made.
        refusal: the sentence; of a folder that was never complete, that it is skipped.
        problems: what was not as it must be.
    """

    damage: str
    substitute: bool
    refusal: str
    problems: list[str]


def examine(seed: int, finished: FinishedRun, config: Config, folder: Path) -> DamageResult:
    """Damage one checkpoint and resume from its run, all drawn from ``seed``."""
    draw = random.Random(seed)
    pair = copied(finished, draw.randrange(len(finished.checkpoints) - 1), folder)
    substitute, damage = has_substitute(pair.newer), draw.choice(sorted(DAMAGES))
    files = sorted(path for path in pair.newer.iterdir())
    damaged = DAMAGES[damage](pair, draw.choice(files), draw)
    names = "/".join(sorted(damaged))
    if damage == "missing" and damaged == {MANIFEST}:  # the last file that is written
        refusal = "; ".join(skipped_checkpoints(pair.older))
    else:
        refusal = _refusal(config, pair)
        if f"resume from it with --resume {pair.older}" not in refusal:
            return DamageResult(
                damage, substitute, refusal, [f"{names}: the checkpoint before is not offered: {refusal}"]
            )
        shutil.rmtree(pair.newer)
    problems = _problems_of_refusal(refusal, pair, damaged)
    problems += _problems_of_older(config, pair, finished)
    return DamageResult(damage, substitute, refusal, [f"{names}: {problem}" for problem in problems])


def _refusal(config: Config, pair: Pair) -> str:
    try:
        load_for_resume(config, pair.run)
    except CheckpointError as error:
        return str(error)
    return "none: it was loaded"


def _problems_of_refusal(refusal: str, pair: Pair, damaged: set[str]) -> list[str]:
    problems = []
    if not any(str(pair.newer / name) in refusal for name in damaged):
        problems.append(f"the file is not named: {refusal}")
    if "\n" in refusal or len(refusal) > 1000:
        problems.append(f"it is no sentence: {refusal[:2000]}")
    return problems


def _problems_of_older(config: Config, pair: Pair, finished: FinishedRun) -> list[str]:
    state = load_for_resume(config, pair.run)
    problems = [] if state.checkpoint.path == pair.older else [f"{state.checkpoint.path} is loaded, not {pair.older}"]
    written = read_checkpoint(finished.run_dir / "checkpoints" / pair.older.name)
    for name in written.names:
        if differing_tensors(state.checkpoint.load(name), written.load(name)):
            problems.append(f"{name} of the checkpoint before differs from what was written")
    ledger = Ledger()
    ledger.load_state_dict(state.run["ledger"])
    if sorted(ledger.rows) != [0, 1]:
        problems.append(f"the ledger has rows of the trainers {sorted(ledger.rows)}")
    return problems


def make_source(folder: Path) -> tuple[FinishedRun, Config]:
    """Return a run with checkpoints to damage, and its config."""
    finished = train(folder)
    if not any(has_substitute(finished.run_dir / "checkpoints" / name) for name in finished.checkpoints):
        raise RuntimeError("no checkpoint has a part that the server made: the trainer was replaced too soon")
    return finished, load_config(finished.run_dir / "config.yaml")


def main() -> int:
    parser = parser_of(__doc__, count=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="damaged-") as name:
        folder = Path(name)
        try:
            finished, config = make_source(folder / "source")
        finally:
            close_shared_server()
        counts: Counter[tuple[str, str]] = Counter()
        substitutes, failed, began, made = 0, 0, time.monotonic(), len(finished.checkpoints)
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            outcome = examine(seed, finished, config, folder / "case")
            shutil.rmtree(folder / "case")
            substitutes += outcome.substitute
            failed += bool(outcome.problems)
            for problem in outcome.problems:
                print(f"seed {seed}: {outcome.damage}: {problem}", flush=True)
            counts[outcome.damage, "not refused" if outcome.problems else _cause(outcome.refusal)] += 1
    print(origin())
    print(
        f"{arguments.count} damages to {made} checkpoints, {substitutes} with a part that the server "
        f"made, {time.monotonic() - began:.0f} s: {failed} wrong, at most 0: {verdict(not failed)}"
    )
    for (damage, cause), count in sorted(counts.items()):
        print(f"  {damage:26s}{cause:42s}{count:5d}")
    return int(bool(failed))


_CAUSES: dict[str, Any] = {
    "is missing": "is missing",
    " bytes where its manifest lists ": "has a wrong size",
    "is damaged: its SHA-256": "has a wrong SHA-256",
    f"{MANIFEST} is damaged": "the manifest is damaged",
    f"{MANIFEST} cannot be read": "the manifest cannot be read",
    "has format version": "the manifest has another format version",
    "is of step": "the manifest is of another step",
}


def _cause(refusal: str) -> str:
    return next((cause for words, cause in _CAUSES.items() if words in refusal), refusal[:60])


if __name__ == "__main__":
    sys.exit(main())
