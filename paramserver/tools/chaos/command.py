"""Injects faults into a run on this machine, and checks what must hold afterwards: ``paramserver chaos``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paramserver.checkpoint import load_chosen
from paramserver.checkpoint.format import LATEST
from paramserver.cluster import RANK_PLUGIN, process_environ
from paramserver.config import Config, load_config, mode_of, num_trainers_of, roles, world_size_of
from paramserver.errors import Interrupted, ParamserverError, UnsupportedConfiguration
from paramserver.importing import code_folders
from paramserver.launch import CommandParser, add_overrides, launch_local, run_command
from paramserver.process_utils import print_output
from paramserver.tools.chaos.faults import (
    FAULT_ADDRESS,
    Fault,
    FaultDirector,
    Shot,
    name_of,
    parse_faults,
    random_faults,
    receive_faults,
)

# The load of the machine may delay a process by this, in addition to what limits a wait.
_DELAY_S = 5.0


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver chaos",
        description="Train with all ranks on this machine, inject faults, and check what must hold afterwards.",
        epilog="Exit codes: 0 all checks passed, 1 one failed, 2 the input is wrong, 3 interrupted.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="the YAML file of the run")
    parser.add_argument(
        "--faults",
        default="",
        metavar="LIST",
        help="such as: kill trainer:1 @step 50; freeze server:0 @8s for 5s; hold_gil trainer:1 for 20s; "
        "slow trainer:2 x5; lose replies 2%%; partition trainer:1 @step 80 for 3s",
    )
    parser.add_argument("--random", type=int, default=0, metavar="N", help="add N random faults")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random faults (default: 0)")
    parser.add_argument("--compare", action="store_true", help="train without faults first, and compare parameters")
    add_overrides(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: 0 if _chaos(arguments) else 1)


def _chaos(arguments: argparse.Namespace) -> bool:
    # Every update is recorded, so that instants and figures are exact.
    config = load_config(arguments.config, overrides=[*arguments.overrides, "logging.log_every=1"])
    if mode_of(config).single_process:
        raise UnsupportedConfiguration(
            f"mode ({config.mode}) must be rpc or ddp, as local is one process; add --set mode=rpc"
        )
    if arguments.random < 0:
        raise UnsupportedConfiguration(f"--random ({arguments.random}) must be at least 0; give a number of faults")
    ranks = roles(config, world_size_of(config))
    faults = parse_faults(arguments.faults, ranks, config) if arguments.faults or not arguments.random else []
    drawn = random_faults(arguments.random, arguments.seed, ranks, config)
    print_output("\n".join(["plan:", *(f"  {fault}" for fault in (*faults, *drawn))]))
    folders = code_folders(arguments.config, arguments.overrides)
    reference = None
    if arguments.compare:
        name = config.logging.name
        undisturbed = replace(config.logging, name=None if name is None else f"{name}-undisturbed")
        reference = launch_local(replace(config, logging=undisturbed), None, folders)[0].path
    outcome = run_with_faults(config, [*faults, *drawn], folders)
    checks = check_run(outcome, optional=set(map(id, drawn)), reference=reference)
    width = max(len(check.name) for check in checks)
    report = ["faults:", *(outcome.line(shot) for shot in outcome.shots), "checks:"]
    report += [f"{'pass' if check.ok else 'FAIL'}  {check.name:<{width}}  {check.detail}" for check in checks]
    print_output("\n".join(report))
    return all(check.ok for check in checks)


@dataclass
class ChaosRun:
    """A run with faults that has ended.

    ``run_dir`` is None if the run did not start. ``error`` is what ended it; None if it was completed. Calls that were
    lost are in ``lost``, and those that were sent again in ``repeated``. ``left`` has what remained after it.
    """

    config: Config
    shots: list[Shot]
    records: list[dict[str, Any]]
    run_dir: Path | None
    error: ParamserverError | None
    lost: list[str]
    repeated: list[str]
    left: list[str]

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; empty if there is none."""
        file = None if self.run_dir is None else self.run_dir / "summary.json"
        return json.loads(file.read_text()) if file is not None and file.exists() else {}

    def stored(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of a kind in metrics.jsonl, which has each step once, whatever was made again."""
        assert self.run_dir is not None
        lines = (self.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def redone(self) -> int:
        """Return how many updates were made again after the servers had returned to a checkpoint."""
        newest, redone = 0, 0
        for record in self.records:
            if record["kind"] == "start":
                redone += max(newest - (record["step"] or 0), 0)
                newest = record["step"] or 0
            elif record["kind"] == "train":
                newest = record["step"]
        return redone

    def line(self, shot: Shot) -> str:
        if shot.fired_at is None:
            return f"  {shot.fault}: did not fire, the run ended before"
        figures = self.figures(shot)
        reached = [f"{what} after {seconds:.2f} s" for what, seconds in figures.items() if seconds is not None]
        return f"  {shot.fault}: fired after step {shot.step}" + (f"; {', '.join(reached)}" if reached else "")

    def figures(self, shot: Shot) -> dict[str, float | None]:
        """Return the seconds from a fault until it was noticed, until the next update, and until its rank trains."""
        assert shot.fired_at is not None
        fired_at = shot.fired_at
        if not shot.fault.silences(self.config.server.lost_after_s):
            return {}
        ranks = roles(self.config, world_size_of(self.config))
        role = next(role for role in ranks if name_of(role) == shot.fault.target)
        after = [record for record in self.records if record["time"] > fired_at]

        def first(found: Callable[[Mapping[str, Any]], bool], since: float) -> float | None:
            times = [r["time"] for r in after if r["time"] >= since and found(r)]
            return min(times) if times else None

        def notices(record: Mapping[str, Any]) -> bool:
            if record.get("lost_rank") == role.global_rank:  # of the supervisor
                return True
            trainer = record.get("trainer")
            return record["kind"] == "lost" and (trainer == role.trainer_index if trainer is not None else True)

        noticed = first(notices, fired_at)
        begun = noticed or fired_at
        updated = first(lambda r: r["kind"] == "train", begun)
        if role.kind == "trainer":
            trains = first(lambda r: r["kind"] == "phase" and r.get("rank") == role.global_rank, begun)
            trains = trains or first(lambda r: r["kind"] == "joined" and r["trainer"] == role.trainer_index, begun)
        else:
            started = first(lambda r: r["kind"] == "start", begun)
            trains = None if started is None else first(lambda r: r["kind"] == "train", started)
        found = {"noticed": noticed, "next update": updated, "the rank trains again": trains}
        return {name: None if at is None else at - fired_at for name, at in found.items()}


def run_with_faults(config: Config, faults: Sequence[Fault], folders: Sequence[Path]) -> ChaosRun:
    """Run a config with all ranks on this machine, and inject faults.

    ``config`` is effective; ``logging.log_every`` is 1.

    Raises:
        UnsupportedConfiguration: the run was refused.
        Interrupted: a signal ended it.
    """
    environ = process_environ()
    error: ParamserverError | None = None
    descriptors = _num_descriptors()
    director = FaultDirector(faults, config)
    with director:
        environ[FAULT_ADDRESS] = director.address
        environ[RANK_PLUGIN] = f"{receive_faults.__module__}:{receive_faults.__name__}"
        try:
            launch_local(config, None, folders, command=sys.argv, sink=director)
        except (UnsupportedConfiguration, Interrupted):
            raise
        except ParamserverError as ended:
            error = ended
        finally:
            del environ[FAULT_ADDRESS], environ[RANK_PLUGIN]
    starts = [record for record in director.records if record["kind"] == "start"]
    run_dir = Path(starts[0]["run_dir"]) if starts else None
    left = _processes_with(f"{FAULT_ADDRESS}={director.address}")
    if (more := _num_descriptors() - descriptors) > 0:
        left.append(f"{more} open files of this process")
    return ChaosRun(config, director.shots, director.records, run_dir, error, director.lost, director.repeated, left)


def _num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _processes_with(variable: str) -> list[str]:
    """Return the processes that were started with an environment variable; sockets and memory end with them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or it has just ended
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"process {folder.name} ({command.strip()[:80]})")
    return found


@dataclass(frozen=True)
class Check:
    """Whether one thing that must hold does."""

    name: str
    ok: bool
    detail: str = ""


def check_run(outcome: ChaosRun, optional: set[int], reference: Path | None) -> list[Check]:
    """Return what must hold after a run with faults.

    ``optional`` has the ``id`` of the faults that need not have fired. ``reference`` is the folder of a run of the same
    config without faults, to compare parameters with.
    """
    config, summary = outcome.config, outcome.summary
    not_fired = [shot for shot in outcome.shots if shot.fired_at is None]
    missing = [shot for shot in not_fired if id(shot.fault) not in optional]
    fired = f"{len(outcome.shots) - len(not_fired)} of {len(outcome.shots)} fired"
    if len(not_fired) > len(missing):
        fired += f"; before {len(not_fired) - len(missing)} at random instants the run ended, as it may"
    ended = str(outcome.error).splitlines()[0] if outcome.error else str(summary.get("reason"))
    checks = [
        Check("every fault fired", not missing, fired),
        Check("the run is completed", summary.get("status") == "completed" and outcome.error is None, ended),
        _check_waits(outcome),
        Check("nothing is left behind", not outcome.left, ", ".join(outcome.left)),
    ]
    if any(shot.fault.kind == "lose" and shot.fired_at is not None for shot in outcome.shots):
        count = f"{len(outcome.lost)} lost, {len(outcome.repeated)} sent again"
        checks.append(Check("messages were lost", bool(outcome.lost), count))
    if outcome.run_dir is None or "steps" not in summary:  # rank 0 died before it could write one
        return checks
    checks.append(_check_steps(outcome, summary))
    due = _samples_due(outcome)
    if due is not None:
        applied, skipped = summary.get("samples", 0), summary.get("samples_skipped", 0)
        found = f"{applied} applied{f', {skipped} skipped' if skipped else ''}, {due} due"
        checks.append(Check("each sample is applied as often as due", applied + skipped == due, found))
    try:
        checkpoint, (weights, state) = load_chosen(outcome.run_dir, LATEST, "model", "run")
    except ParamserverError as error:
        return [*checks, Check("the checkpoint loads", False, str(error))]
    checks.append(Check("the checkpoint loads", checkpoint.step == summary["steps"], f"step {checkpoint.step}"))
    if mode_of(config).has_servers:
        checks.append(_check_ledger(outcome, state, summary))
    if reference is not None:
        _, (expected,) = load_chosen(reference, LATEST, "model")
        differing = _differing(expected, weights)
        checks.append(Check("parameters are those without faults", not differing, ", ".join(differing[:5])))
    return checks


def _check_waits(outcome: ChaosRun) -> Check:
    """Check that no fault stopped the run for longer than its limits allow."""
    config = outcome.config
    noticed_s = config.server.lost_after_s + _DELAY_S
    limits = {
        "noticed": noticed_s,
        "next update": noticed_s + config.cluster.timeout_s,
        "the rank trains again": noticed_s + config.cluster.timeout_s,
    }
    late, ended_at = [], max((record["time"] for record in outcome.records), default=0.0)
    for shot in outcome.shots:
        if shot.fired_at is None:
            continue
        # A silence that is hardly longer than the limit may pass between two heartbeats, and a rank whose restarts are
        # used up does not train again; all else must happen unless the run ends before.
        long_enough = shot.fault.for_s is None or shot.fault.for_s > 2 * config.server.lost_after_s
        for what, seconds in outcome.figures(shot).items():
            never = seconds is None and long_enough and what != "the rank trains again"
            waited_s = ended_at - shot.fired_at if never else seconds or 0.0
            if waited_s > limits[what] + (shot.fault.for_s or 0.0):
                late.append(f"{shot.fault}: {what} {'not ' if never else ''}after {waited_s:.1f} s")
    limit = ", ".join(f"{what} within {limit_s:g} s" for what, limit_s in limits.items())
    return Check("no wait exceeds its limit", not late, "; ".join(late) or limit)


def _check_steps(outcome: ChaosRun, summary: Mapping[str, Any]) -> Check:
    """Check that metrics.jsonl has each step once, whatever was made again."""
    trains = outcome.stored("train")
    steps = [record["step"] for record in trains]
    max_steps, reason = outcome.config.training.max_steps, f"{summary['steps']} steps, {outcome.redone()} made again"
    # With several optimizers, which have their own losses, the other calls of the last batch are made too.
    whole = max_steps is None or summary["steps"] <= max_steps or any("losses" in one for one in trains)
    return Check("each step is recorded once", whole and steps == list(range(1, summary["steps"] + 1)), reason)


def _samples_due(outcome: ChaosRun) -> int | None:
    """Return how many samples the run must have applied; None where its config does not determine that."""
    from paramserver.buffers.kinds import buffer_class  # imports torch, which a launch does without
    from paramserver.consistency.factory import consistency_class

    config = outcome.config
    expected = [record["total_samples"] for record in outcome.records if record["kind"] == "expected"]
    training = config.training
    limits = training.max_steps, training.max_samples, training.max_seconds, training.patience
    together = training.uneven_inputs == "join" or num_trainers_of(config) == 1
    drops = consistency_class(config.server).drops_pushes
    determined = not buffer_class(config.buffer.kind).repeats and together and not drops
    if not expected or not determined or any(limit is not None for limit in limits):
        return None
    return int(expected[-1])


def _check_ledger(outcome: ChaosRun, state: Mapping[str, Any], summary: Mapping[str, Any]) -> Check:
    """Check that each push that the ledger accepted is in one update, or was dropped or skipped, and counted."""
    rows = state["ledger"]["rows"].values()
    accepted = sum(row["pushes"] for row in rows)
    samples = sum(row["samples"] for row in rows)
    applied, dropped = sum(summary["staleness"]["histogram"].values()), summary["staleness"]["dropped"]
    # One with `trainer` is of a local step of a round, whose push is applied.
    skipped = sum(len(record["trainers"]) for record in outcome.stored("skipped") if "trainer" not in record)
    due = summary["samples"] + summary.get("samples_skipped", 0)
    ok = accepted == applied + dropped + skipped and (bool(dropped) or samples == due)
    counts = f"{applied} applied, {dropped} dropped{f', {skipped} skipped' if skipped else ''}"
    return Check("each push is applied once", ok, f"{accepted} accepted, {counts}; {samples} samples")


def _differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that differ in any bit."""
    import torch

    names = sorted(expected.keys() | found.keys())
    return [n for n in names if n not in expected or n not in found or not torch.equal(expected[n], found[n])]
