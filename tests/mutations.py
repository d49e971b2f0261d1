"""``python -m tests.mutations``: faults that are put into a copy of the package, each of which the tests must find.

Each mutation takes a check out of the protocol or of the checkpoints, or changes it. The tests that concern it run in a
copy of the tree, then the simulation of ``tests/simulation``, until one fails. A mutation that neither finds is a check
that no test needs. The command prints a line for each, and ends with 1 if one was not found.

A mutation names the text that it replaces. Where the code has changed so that the text is not there once, the command
ends before it runs anything, and the mutation is to be written anew.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("paramserver", "trainers", "tests", "setup.cfg", "README.md")
_LIMIT_S = 3600


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        name: what is wrong then.
        file: relative to the repository.
        old: the text that is replaced; it is in the file once.
        new: the text in its place.
        tests: files or folders of the tests that concern it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied_to(self, text: str) -> str:
        """Return the text of the file with this fault.

        Raises:
            ValueError: the text to replace is not there once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: its text must be in {self.file} once, and is there {count} times:\n{self.old}"
            )
        return text.replace(self.old, self.new)


AGGREGATOR = "paramserver/server/aggregator.py"
LEDGER = "paramserver/consistency/ledger.py"
LOCKSTEP = "paramserver/consistency/lockstep.py"
SHARD = "paramserver/server/shard.py"
TRANSPORT = "paramserver/transport/rpc.py"

MUTATIONS = (
    Mutation(
        "the ledger takes a push that was decided for a new one",
        LEDGER,
        "return PushState.DECIDED if push.sequence == row.decided else PushState.GAP",
        "return PushState.NEW if push.sequence == row.decided else PushState.GAP",
        ("tests/unit/consistency/test_ledger.py",),
    ),
    Mutation(
        "the bound of staleness is one larger",
        "paramserver/consistency/free_running.py",
        "self.clocks[trainer_index] - self.slowest_clock <= self.bound",
        "self.clocks[trainer_index] - self.slowest_clock <= self.bound + 1",
        ("tests/unit/consistency/test_free_running.py",),
    ),
    Mutation(
        "a push is complete before all of its buckets are there",
        TRANSPORT,
        """\
        if len(self._buckets) < len(self._leaves):
            return None
""",
        """\
        if 0 not in self._buckets:
            return None
        for index, leaf in enumerate(self._leaves):
            self._buckets.setdefault(index, (0, torch.zeros_like(leaf)))
""",
        ("tests/unit/server/test_aggregator.py",),
    ),
    Mutation(
        "a shard server admits processes that were replaced",
        SHARD,
        "if sender.generation != self._generation or sender.incarnation < known:",
        "if sender.generation != self._generation:",
        ("tests/unit/server/test_shard_server.py",),
    ),
    Mutation(
        "a push is replied to before its update is applied",
        AGGREGATOR,
        "self._updates.apply(version, update, pushes, pulled, validated, applied, self._held)",
        "applied(), self._updates.apply(version, update, pushes, pulled, validated, lambda: None, self._held)",
        ("tests/unit/server/test_aggregator.py",),
    ),
    Mutation(
        "the gradients of a push that is not complete stay when its trainer goes",
        SHARD,
        """\
        self._assemblies.pop(trainer_index, None)
        self._reported.pop(trainer_index, None)

    def is_late""",
        """\
        self._reported.pop(trainer_index, None)

    def is_late""",
        ("tests/unit/server/test_aggregator.py", "tests/unit/server/test_shard_server.py"),
    ),
    Mutation(
        "the samples of an update are counted twice",
        LOCKSTEP,
        "self.samples += sum(self._pushed.values())",
        "self.samples += 2 * sum(self._pushed.values())",
        ("tests/unit/consistency/test_lockstep.py",),
    ),
    Mutation(
        "the mean is made in the order of arrival",
        LOCKSTEP,
        "update = Update(self._active, (0,) * len(self._active), owner,",
        "update = Update(tuple(self._pushed), (0,) * len(self._active), owner,",
        ("tests/unit/consistency/test_lockstep.py",),
    ),
    Mutation(
        "a share of a validation takes the place of those before it",
        "paramserver/server/quorum.py",
        "self._shares.setdefault(version, {}).update(shares)",
        "self._shares[version] = dict(shares)",
        ("tests/simulation/test_late_messages.py",),
    ),
    Mutation(
        "the manifest is on the disk before the files that it lists",
        "paramserver/checkpoint/save.py",
        """\
            _write_file(temporary / MANIFEST, Manifest(step, created, entries, metadata).to_text().encode())
""",
        """\
            _write_file(temporary / MANIFEST, Manifest(step, created, entries, metadata).to_text().encode())
            for name, obj in files.items():
                (temporary / name).unlink()
                _write_file(temporary / name, obj)
""",
        ("tests/unit/checkpoint/test_checkpoint.py",),
    ),
    Mutation(
        "a push that is not complete stays when its trainer is removed",
        AGGREGATOR,
        "if (incomplete := self._incomplete.pop(trainer_index, None)) is not None:",
        "if (incomplete := self._incomplete.get(trainer_index)) is not None:",
        ("tests/unit/server/test_aggregator.py",),
    ),
    Mutation(
        "the ledger ignores the incarnation",
        LEDGER,
        "return row is not None and sender.generation == self.generation and sender.incarnation == row.incarnation",
        "return row is not None and sender.generation == self.generation",
        ("tests/unit/consistency/test_ledger.py",),
    ),
    Mutation(
        "what a trainer views takes the place of the version that it was granted",
        AGGREGATOR,
        "if trainer_index in self._granted and not self.rules.several_updates:",
        "if trainer_index in self._granted and self.rules.several_updates:",
        ("tests/simulation/test_late_messages.py",),
    ),
)


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of Python in a copy of the tree, which comes before an installed package."""
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *command]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )


def failing_test(tests: Sequence[str], folder: Path) -> str | None:
    """Run the fast ones of tests in a copy of the tree; return the first that fails, or None.

    Raises:
        RuntimeError: they could not be run.
    """
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--timeout", "0", "-m", "fast"]
    done = run(["-m", "pytest", *options, *tests], folder)
    if done.returncode == 0:
        return None
    failed = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode != 1 or not failed:
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed[0]


def failing_seed(seeds: int, folder: Path) -> str | None:
    """Run the simulation in a copy of the tree; return what it prints of the first seed that fails, or None."""
    done = run(["-m", "tests.simulation", "--seeds", str(seeds), "--most", "1"], folder)
    if done.returncode == 0:
        return None
    # A fault may also end the simulation itself.
    lines = [line for line in done.stdout.splitlines() if line.startswith("seed ")] or done.stderr.splitlines()[-1:]
    return lines[0] if lines else f"the simulation ended with {done.returncode}"


def found_by(mutation: Mutation, seeds: int, folder: Path) -> str | None:
    """Apply a mutation to the copy of the tree, and return what fails of it, or None; the copy is then as before."""
    file = folder / mutation.file
    text = file.read_text()
    file.write_text(mutation.applied_to(text))
    try:
        return failing_test(mutation.tests, folder) or failing_seed(seeds, folder)
    finally:
        file.write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="of the simulation, for what no test finds")
    parser.add_argument("--only", default="", help="only the mutations whose name contains this text")
    args = parser.parse_args(arguments)
    mutations = [mutation for mutation in MUTATIONS if args.only in mutation.name]
    for mutation in mutations:
        mutation.applied_to((ROOT / mutation.file).read_text())
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        folder = Path(temporary)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
            else:
                shutil.copy(source, folder / name)
        if (failed := failing_test(sorted({t for m in mutations for t in m.tests}), folder)) is not None:
            print(f"without a mutation, {failed} fails")
            return 1
        missed = 0
        for mutation in mutations:
            began = time.perf_counter()
            found = found_by(mutation, args.seeds, folder)
            missed += found is None
            print(f"{mutation.name}: {found or 'NOT FOUND'} ({time.perf_counter() - began:.0f} s)", flush=True)
    print(f"{len(mutations) - missed} of {len(mutations)} found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
