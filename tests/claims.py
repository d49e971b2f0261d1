"""Claims about the behaviour of paramserver, each with the tests that show it; prints one line for each claim.

    python -m tests.claims [results | endings | messages | tests ...] [--claim NAME ...] [--processes 2]

A test names the claim that it shows with ``@pytest.mark.claim("name of the claim")``; a claim holds if all of its
tests pass. The exit code is 0 if all claims that were asked for hold. ``tests/laws/test_claims.py`` checks that each
claim has a test, and that each marker names a claim.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

CLAIMS: dict[str, dict[str, str]] = {
    "results": {
        "assigned-buffers": "a module buffer that a forward assigns anew has the same values in every mode",
        "replaced-modules": "a parameter or layer that is replaced, added or removed in mid-run is refused by name",
        "changed-parameters": "trained parameters that a task changes itself are refused by name in each transport",
        "late-buffers": "a buffer that gets its shape at the first forward is trained, stored and resumed",
        "buffer-types": "module buffers of every type, and expanded ones, are the same in every mode",
        "eval-buffers": "buffers that change in eval() are kept in every mode",
        "wire-dtype": "over messages parameters and gradients keep their own dtype unless another one is asked for",
        "validation-draws": "random draws of a validation do not change training",
        "resumed-validations": "a validation made because a run ended is no record of the run that resumes",
        "optimizer-draws": "an optimizer that draws random numbers draws the same in every mode and after a resume",
        "time-after-losses": "seconds and samples/s cover all sessions of a start; time lost between them is a field",
        "all-reduce": "ddp in shared memory has the bits of rpc for any number of trainers; gloo reduces elsewhere",
        "strided-parameters": "parameters with gaps in memory are bit-equal over shared memory, rpc and ddp",
        "shared-memory-of-tensors": "two tensors of a model that share memory, one of them trained, are refused in rpc",
        "empty-parameters": "parameters without elements have an entry in optimizer.pt with any number of servers",
        "loss-names": "each loss has one name in summary, progress, records, report and TensorBoard",
    },
    "endings": {
        "any-optimizer": "runs with optimizers of torch and of others are stopped, killed and resumed in every mode",
        "optimizer-lr-none": "a group with lr: None, and a wrapper without Optimizer.__init__, train and resume",
        "optimizer-modes": "optimizers with train() and eval() are switched around validations and checkpoints",
        "optimizer-exits": "SystemExit and KeyboardInterrupt in an optimizer end a run by name within seconds",
        "slow-update": "no living trainer is lost while an update takes longer than cluster.lost_after_s",
        "forked-workers": "a forked worker that a task leaves open does not keep a run from ending",
        "second-signal": "a second signal ends a run that does not react to the first",
        "stuck-hook": "a hook that never returns ends with a checkpoint and exit code 3 within cluster.stop_within_s",
        "one-join": "of two processes that join as one trainer at once, exactly one trains",
        "local-calls": "a caller of a closed or failing local endpoint gets an error, and does not wait",
        "late-bucket": "a bucket of an older version does not change the present push",
        "name-server": "a silent name server does not delay a start; ranks resolve the names of hosts",
        "users-trainers": "a folder or module of the user named trainers is the one that the task imports",
        "old-trainers-import": "from trainers import RpcTrainer works and names paramserver.trainers",
        "memory-of-deaths": "the server keeps no futures of the liveness calls of dead trainers",
        "rounds": "rounds of local steps are the same in local, ddp and rpc, and exact after stops and losses",
        "compression": "compressed pushes do not depend on servers and buckets; residuals are stored and restored",
        "tables": "embedding tables train by rows in rpc, equal to local and ddp bit for bit",
        "ddp-sparse": "ddp trains several optimizers with sparse gradients",
        "early-interrupt": "Ctrl-C before training is acknowledged at once",
    },
    "messages": {
        "transport-used": "records, summary and report name each trainer's transport; comparing different ones warns",
        "rpc-faults": "the fault matrix, spares and losses while saving hold with transport: rpc too",
        "large-buffers": "module buffers of any size are sent beside shared memory",
        "complex-loss": "a complex loss",
        "cyclic-state": "a checkpoint hook that stores the state in itself",
        "few-descriptors": "too few file descriptors",
        "empty-losses": "an empty losses.json",
        "immutable-run-folder": "a run folder that cannot be written, and EPERM and ESTALE",
        "dead-rank-0": "rank 0 has ended while its supervisor still holds the port",
        "full-disk": "a disk that is full before the first checkpoint",
        "foreign-pickle": "a file that is a pickle of another program",
        "logged-vector": "self.log with a vector",
        "failing-item": "an error in __getitem__ names the index of the data set and the position",
        "given-config": "a config that was given is not called the stored one",
        "learning-rate-key": "lr and training.learning_rate point to task_args.lr",
        "precision-names": "precisions of other frameworks",
        "no-best": "evaluate --checkpoint best without one",
        "wrong-shape": "a simulation that sends a wrong shape",
        "float64-parameters": "a batch of float64 simulation parameters",
        "empty-start-log": "a rank that ends without a line in start.log",
        "failing-sink": "a sink that fails in rpc is named on the console and in the summary",
        "interrupt-line": "no empty error line before an interrupt",
        "wrong-port": "a port of another service or of another run",
        "failed-step-time": "a failed run prints no step time that it did not measure",
        "simulation-folder": "a relative simulations.command is one of the config's folder",
        "async-buffers": "module buffers in async are as documented",
        "clipping-hook": "clipping in on_batch_end acts as documented",
        "unfinished-message": "unfinished messages of simulations take a bounded amount of memory",
    },
    "tests": {
        "push-all-buckets": "a push completes only with all of its buckets",
        "inbox-cleared": "the inbox of a trainer that goes is cleared",
        "remove-incomplete": "a trainer that is removed leaves no incomplete push",
        "apply-before-reply": "an update is applied before its reply is sent",
        "refused-key": "a client or trainer whose key is refused ends within its deadline",
        "send-deadlines": "every send to a client or trainer has a deadline",
    },
}
"""By part: name of a claim and its text."""


def files_of(names: Iterable[str]) -> list[Path]:
    """The files whose tests show one of these claims."""
    marker = re.compile(rf"pytest\.mark\.claim\([^)]*\"({'|'.join(map(re.escape, names))})\"")
    return sorted(file for file in (ROOT / "tests").rglob("test_*.py") if marker.search(file.read_text()))


class Outcomes:
    """Records the outcome of each test by claim. A plugin of pytest."""

    def __init__(self) -> None:
        self.claims_of: dict[str, list[str]] = {}
        self.passed: dict[str, set[str]] = defaultdict(set)
        self.failed: dict[str, dict[str, str]] = defaultdict(dict)
        self.skipped: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name in (value for key, value in report.user_properties if key == "claim"):
            self.seconds[name] += report.duration
            if report.failed:
                self.failed[name][report.nodeid] = report.longreprtext
            elif report.skipped:
                self.skipped[name].add(report.nodeid)
            elif report.when == "call":
                self.passed[name].add(report.nodeid)

    def line(self, part: str, name: str) -> str:
        passed, failed, skipped = len(self.passed[name]), len(self.failed[name]), len(self.skipped[name])
        verdict = "fails" if failed else "held" if passed else "no test"
        counts = (
            f"{passed} passed" + (f", {failed} failed" if failed else "") + (f", {skipped} skipped" if skipped else "")
        )
        return f"{verdict:<8}{part:<9} {name:<22} {CLAIMS[part][name]} ({counts}, {self.seconds[name]:.0f} s)"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", choices=[[], *CLAIMS], help="parts of the claims (default: all)")
    parser.add_argument("--claim", action="append", default=[], help="a claim by its name; may be repeated")
    parser.add_argument("--processes", type=int, default=2, help="tests at the same time (default: 2)")
    options = parser.parse_args(arguments)
    known = {name: part for part, claims in CLAIMS.items() for name in claims}
    for name in options.claim:
        if name not in known:
            parser.error(f"--claim ({name}) must be one of: {', '.join(known)}")
    asked = options.claim or [name for name, part in known.items() if part in (options.parts or CLAIMS)]
    outcomes = Outcomes()
    output = io.StringIO()
    command = ["--all_cases", "-n", str(options.processes), "--claims", ",".join(asked), *map(str, files_of(asked))]
    with contextlib.redirect_stdout(output):
        code = pytest.main(command, plugins=[outcomes])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(output.getvalue(), file=sys.stderr)
        return 2
    for name in asked:
        print(outcomes.line(known[name], name))
    for name in asked:
        for test, text in outcomes.failed[name].items():
            print(f"\n{name}: {test}\n{text}", file=sys.stderr)
    held = sum(bool(outcomes.passed[name]) and not outcomes.failed[name] for name in asked)
    print(f"{held} of {len(asked)} claims held")
    return 0 if held == len(asked) else 1


if __name__ == "__main__":
    sys.exit(main())
