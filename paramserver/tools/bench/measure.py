"""Measures one case in one repeat: runs it in fresh processes and makes the record from the steps of its trainers.

Figures are of the time after the warm-up, during which all trainers train. CPU time of the processes and bytes on the
interfaces of hosts are sampled from the kernel's counters during the run.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paramserver.config import Config, dump_yaml, is_colocated, num_commands_of
from paramserver.config.schema import sends
from paramserver.consistency.factory import why_never_by_bucket
from paramserver.errors import Interrupted, ParamserverError, TrainingError
from paramserver.importing import find_file
from paramserver.metrics.records import PHASES, DurationHistogram
from paramserver.platform import cpu_ticks
from paramserver.tools.bench.cases import Case, require_first_reached
from paramserver.tools.bench.link_probe import LinkSpeed, predict_communication, ring_bytes
from paramserver.tools.bench.processes import PORT, NetworkHosts, ProcessGroup, host_address
from paramserver.tools.bench.step_stamps import (
    COLUMNS,
    StepStamp,
    StepStamps,
    read_stamps,
    registered_pids,
    server_pids,
)
from paramserver.tools.report.formatting import plural
from paramserver.tools.report.from_runs import Run, read_run
from paramserver.tools.report.results import (
    COMPUTED_RING,
    COMPUTED_SHARED,
    COUNTED_BY_KERNEL,
    CaseResult,
    Target,
    curve_fields,
)
from paramserver.tools.report.statistics import interpolated

# The first steps allocate what later ones reuse: buffers, buckets, caches. Local steps count, in whole rounds.
WARM_STEPS = 3


@dataclass(frozen=True)
class MeasuredWindow:
    """The measured time, between two values of ``time.perf_counter()``."""

    begin: float
    end: float


def measured_window(trainers: Sequence[StepStamps], warm_s: float, warm_steps: int = WARM_STEPS) -> MeasuredWindow:
    """The window from the end of the last trainer's warm-up to the first trainer's last step.

    The warm-up of a trainer ends with the step at which it has trained ``warm_s`` seconds, but not before step
    ``warm_steps``.

    Raises:
        TrainingError: a trainer has no step in the window.
    """
    # From the slowest start to the earliest end: outside of it a trainer may run without the load of the others.
    warm = [_warm_at(one, warm_s, warm_steps) for one in trainers]
    begin = max((moment for moment in warm if moment is not None), default=0.0)
    end = min((one.steps[-1].end for one in trainers if one.steps), default=0.0)
    window = MeasuredWindow(begin, end)
    if None in warm or not all(_inside(one, window) for one in trainers):
        counts = ", ".join(str(len(one.steps)) for one in trainers)
        longest_s = max((step.seconds for one in trainers for step in one.steps), default=0.0)
        raise TrainingError(
            f"after a warm-up of {warm_s:g} s and {plural(warm_steps, 'step')} no trainer may be without a step, and "
            f"of up to {longest_s:.2g} s they made {counts} in all; raise --seconds, or give data that lasts longer"
        )
    return window


def _warm_at(one: StepStamps, warm_s: float, warm_steps: int) -> float | None:
    trained_s = 0.0
    for count, step in enumerate(one.steps, start=1):
        trained_s += step.seconds
        if trained_s >= warm_s and count >= warm_steps:
            return step.end
    return None


def _inside(one: StepStamps, window: MeasuredWindow) -> list[StepStamp]:
    """The steps that end in the window."""
    return [step for step in one.steps if window.begin < step.end <= window.end]


def _share(step: StepStamp, window: MeasuredWindow) -> float:
    """The share of a step that lies in the window; the window begins during a step of other trainers."""
    inside_s = min(step.end, window.end) - max(step.begin, window.begin)
    # Clamped: the first steps end before the window, and some begin after it.
    return min(max(inside_s / step.seconds, 0.0), 1.0) if step.seconds else 0.0


def step_figures(
    trainers: Sequence[StepStamps],
    window: MeasuredWindow,
    applied: float = 1.0,
    updates: float = 1.0,
    processes: int = 1,
) -> dict[str, Any]:
    """The fields of a record that are computed from steps.

    ``applied`` is the share of the trainers' samples that became part of an update; ``updates`` are per step of a
    trainer: 1 / T where T trainers make one together.
    """
    # Rates count a step at the edge with its share inside of the window; durations and phases are of whole steps only.
    shares = [[(step, _share(step, window)) for step in one.steps] for one in trainers]
    seconds = [sum(step.seconds * share for step, share in own) for own in shares]
    samples = [applied * sum(step.samples * share for step, share in own) for own in shares]
    mean_s = sum(seconds) / len(seconds)
    rate = sum(samples) / mean_s
    whole = [step for one in trainers for step in _inside(one, window)]
    durations = DurationHistogram()
    for step in whole:
        durations.add(step.seconds)
    return {
        "seconds": mean_s,
        "steps": round(len(whole) * updates),
        "samples": round(sum(samples)),
        "samples_per_second": rate,
        "per_trainer": tuple(n / s for n, s in zip(samples, seconds, strict=True)),
        "per_process": rate / processes,
        "step_ms": durations.summary_ms(),
        "step_bins": dict(sorted(durations.bins.items())),
        "phases_ms": _phases_ms(whole),
        "wire_bytes_per_step": sum(step.wire_bytes for step in whole) / len(whole),
    }


def _phases_ms(steps: Sequence[StepStamp]) -> dict[str, float]:
    """Mean milliseconds per step and trainer. All but ``hidden``, which overlaps them, sum to the step."""
    assert COLUMNS[: len(PHASES)] == PHASES
    sums = [sum(values) for values in zip(*(step.phases for step in steps), strict=True)]
    return {name: total / len(steps) * 1e3 for name, total in zip(COLUMNS, sums, strict=True)}


class KernelSampler:
    """Samples counters of the kernel: the CPU time of registered processes, and the bytes of interfaces of hosts.

    ``hosts`` are those whose interfaces count, the first ``count`` of them; None for none.
    """

    def __init__(self, folders: Sequence[Path], hosts: NetworkHosts | None, count: int) -> None:
        self._folders, self._hosts, self._count = folders, hosts, count
        self._samples: dict[int, list[tuple[float, float]]] = {}  # CPU seconds, by process
        self._moved: list[tuple[float, float]] = []  # bytes that all interfaces sent and received
        self._ticks = os.sysconf("SC_CLK_TCK")

    def sample(self) -> None:
        for pid in (pid for folder in self._folders for pid in registered_pids(folder)):
            # A process that has ended has no more samples; ``interpolated`` then holds its last value.
            with suppress(FileNotFoundError, ProcessLookupError):
                used_s = cpu_ticks(pid) / self._ticks
                self._samples.setdefault(pid, []).append((time.perf_counter(), used_s))
        if self._hosts is not None:
            moved = sum(self._hosts.moved_bytes(number) for number in range(self._count))
            self._moved.append((time.perf_counter(), float(moved)))

    def used_s(self, pids: Sequence[int], window: MeasuredWindow) -> float | None:
        """CPU seconds of several processes; None without processes, or where one has fewer than two samples."""
        each = [self._samples.get(pid, []) for pid in pids]
        # One sample gives no difference: the process was alive for hardly longer than one interval.
        return sum(_between(one, window) for one in each) if each and min(map(len, each)) > 1 else None

    def moved_bytes(self, window: MeasuredWindow) -> float | None:
        """Bytes that the interfaces sent and received; None without hosts."""
        return None if self._hosts is None else _between(self._moved, window)


def _between(samples: Sequence[tuple[float, float]], window: MeasuredWindow) -> float:
    return interpolated(samples, window.end) - interpolated(samples, window.begin)


# The time for imports, rendezvous and the last validation on a busy machine.
_STARTUP_AND_SHUTDOWN_S = 180.0
_TIMES_AS_LONG = 4


@dataclass(frozen=True)
class MeasuringMethod:
    """The settings of a benchmark that all cases share.

    The files of a run are kept in ``out`` only if it fails. ``seconds`` are measured, after ``warm_s`` seconds of
    warm-up. There is one of ``hosts`` for each rank that communicates; None for this machine.
    """

    out: Path
    folders: Sequence[Path]
    environ: Mapping[str, str]
    seconds: float
    warm_s: float
    target: Target | None = None
    hosts: NetworkHosts | None = None
    speeds: Mapping[str, LinkSpeed] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)


def measure(case: Case, repeat: int, method: MeasuringMethod) -> CaseResult:
    """Run a case once and return its record, also if it fails.

    Raises:
        Interrupted: ``method.stop`` was set.
    """
    started, began = time.time(), time.perf_counter()
    folder, number = method.out / "runs" / folder_name(case, repeat), 1
    while folder.exists():  # of a case that failed, whose name is the same in plain characters
        folder, number = folder.with_name(f"{folder_name(case, repeat)}-{number + 1}"), number + 1
    found: dict[str, Any] = {"status": "completed"}
    try:
        # A case that fails must not end the benchmark: the other cases are still worth their time.
        found |= _run(case, repeat, method, folder)
        shutil.rmtree(folder)  # the files of a run that fails stay, and its error names them
    except Interrupted:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except (ParamserverError, OSError) as error:
        found = {"status": "failed", "error": f"{error}; its files are in {folder}"}
    return CaseResult(
        case=case.name,
        repeat=repeat,
        mode=case.mode.name,
        trainers=case.trainers,
        servers=case.servers,
        overrides=dict(case.overrides),
        scenario={} if case.slow is None else {"slow": asdict(case.slow)},
        baseline=case.baseline,
        started=started,
        wall_s=time.perf_counter() - began,
        target=None if method.target is None else {method.target.name: method.target.value},
        environment={**method.environment, "config": dump_yaml(case.config)},
        **found,
    )


def folder_name(case: Case, repeat: int) -> str:
    """The name of the folder of a run, of plain characters."""
    return f"{re.sub(r'[^A-Za-z0-9.=_-]+', '-', case.name).strip('-.')[:100]}-{repeat}"


def run_config(case: Case, repeat: int, method: MeasuringMethod, folder: Path, number: int) -> Config:
    """The user's config with other limits, without checkpoints, and with the instrumented task.

    There is no periodic validation, unless the benchmark has a target. The limits of the user's run are removed: the
    run ends with the time or the data.
    """
    config, training = case.config, case.config.training
    assert config.task is not None
    reference, (place, _, name) = config.task, config.task.rpartition(":")
    if place.endswith(".py"):  # with the absolute path, as the ranks do not know the folders
        reference = f"{find_file(place, 'task', method.folders)}:{name}"
    observer: dict[str, Any] = {
        "folder": str(folder),
        "slow": None if case.slow is None else asdict(case.slow),
        # A seed for each repeat: the slow batches of one repeat are the same in all cases.
        "seed": repeat,
        "number": number if case.runs > 1 else None,
        "of": case.runs,
    }
    max_seconds = method.warm_s + method.seconds
    if training.has_rounds:  # a round may take long, and several are measured
        observer["stop_after_s"], max_seconds = max_seconds, _TIMES_AS_LONG * max_seconds
    limits: dict[str, Any] = dict.fromkeys(("max_epochs", "max_steps", "max_samples", "patience"))
    # In local steps and not in rounds: curves of all cases have points at similar numbers of samples.
    validate_every, log_every = (
        -(-every // training.local_steps) for every in (training.validate_every, config.logging.log_every)
    )
    limits |= {"max_seconds": max_seconds, "validate_every": 0 if method.target is None else validate_every}
    own: dict[str, Any] = {"run_dir": str(folder), "name": "run", "log_every": log_every, "tensorboard": False}
    own["prometheus_port"] = None
    return replace(
        config,
        task="paramserver.tools.bench.instrumentation:InstrumentedTask",
        task_args={
            "task": reference,
            "task_args": config.task_args,
            "observer": observer,
            "limits": {name: getattr(training, name) for name in limits},
        },
        training=replace(training, **limits, min_delta=0.0),
        # Writing checkpoints takes CPU time and disk bandwidth from the steps that are measured.
        checkpoint=replace(config.checkpoint, every=0, memory_every=None, best=None),
        logging=replace(config.logging, **own, sinks=(), progress="off"),
        profile=None,
        # Of several runs at once each needs a port of its own.
        publish=None if config.publish is None else replace(config.publish, port=0),
    )


def _run(case: Case, repeat: int, method: MeasuringMethod, folder: Path) -> dict[str, Any]:
    """Run a case once and return the fields of its record that the run determines."""
    places = [folder / str(number) for number in range(case.runs)]
    commands = []
    for number, place in enumerate(places):
        # Each run has its own folder and config, also where a case has a run for each trainer.
        place.mkdir(parents=True)
        file = place / "config.yaml"
        file.write_text(dump_yaml(run_config(case, repeat, method, place, number)), encoding="utf-8")
        commands += rank_commands(case, method, file)
    # torch does not report the bytes that DistributedDataParallel sends.
    kernel = KernelSampler(places, method.hosts if case.mode.has_process_group else None, case.trainers)
    timeout_s = _STARTUP_AND_SHUTDOWN_S + _TIMES_AS_LONG * (method.warm_s + method.seconds)
    # The timeout is generous, as a slowed trainer takes several times as long: it ends a run that hangs, not a slow
    # one.
    with ProcessGroup(commands, method.environ, folder, method.stop) as running:
        running.wait(timeout_s, kernel.sample)
    return _outcome(case, method, places, kernel)


def rank_commands(case: Case, method: MeasuringMethod, config_file: Path) -> list[list[str]]:
    """The commands that start one run: a supervisor of all ranks, or with hosts one command for each of them."""
    command = [sys.executable, "-m", "paramserver.launch", "--config", str(config_file)]
    command += [word for one in method.folders for word in ("--folder", str(one))]
    if method.hosts is None or case.mode.single_process:
        return [command]
    hosts = num_commands_of(case.config)
    command += ["--world_size", str(hosts), "--master_addr", host_address(0), "--master_port", str(PORT)]
    return [method.hosts.command_on(rank, [*command, "--rank", str(rank)]) for rank in range(hosts)]


def _outcome(case: Case, method: MeasuringMethod, places: Sequence[Path], kernel: KernelSampler) -> dict[str, Any]:
    each = case.trainers // case.runs
    stamps = [one for place in places for one in read_stamps(place, each)]
    runs = [_read_run(place) for place in places]
    summaries = [run.summary for run in runs]
    window = measured_window(stamps, method.warm_s, -(-WARM_STEPS // case.config.training.local_steps))
    steps = sum(len(one.steps) for one in stamps)
    servers = [pid for place in places for pid in server_pids(place, stamps)]
    processes = {"servers": servers, "trainers": [one.pid for one in stamps]}
    peaks, transports = [summary["peak_rss_mb"] for summary in summaries], summaries[0]["transports"] or {}
    served, samples = (sum(summary[name] for summary in summaries) for name in ("samples_served", "samples"))
    # Samples that were served but dropped (backup trainers) or lost with a trainer must not count as throughput.
    found = step_figures(
        stamps,
        window,
        applied=samples / served if served else 1.0,
        updates=sum(summary["steps"] for summary in summaries) / steps,
        processes=case.trainers + case.servers,
    )
    if case.mode.has_process_group:
        used = transports.values()
        found |= _wire_bytes(case, stamps, window, kernel, shares_memory=bool(used) and not any(map(sends, used)))
    wire_bytes = found["wire_bytes_per_step"]
    return {
        **found,
        "wire_bytes_per_sample": wire_bytes * steps / samples if wire_bytes and samples else None,
        **_curves(method, runs[0]),
        "cpu_s": {name: kernel.used_s(pids, window) for name, pids in processes.items()},
        "peak_rss_mb": {k: max((p[k] for p in peaks if p[k] is not None), default=None) for k in ("server", "trainer")},
        "staleness": summaries[0]["staleness"],
        "transports": transports,
        "tables": summaries[0].get("tables", {}),
        "model_bytes": stamps[0].model_bytes,
        "predicted": _predicted(case, method, stamps[0], wire_bytes or 0.0),
    }


def _wire_bytes(
    case: Case,
    stamps: Sequence[StepStamps],
    window: MeasuredWindow,
    kernel: KernelSampler,
    shares_memory: bool = False,
) -> dict[str, float | str | None]:
    """Bytes per step of a trainer in a process group: counted by the kernel, or computed."""
    moved = kernel.moved_bytes(window)
    if moved is None and shares_memory:
        return {"wire_bytes_per_step": 0.0, "wire_bytes_source": COMPUTED_SHARED}
    if moved is None:
        computed = ring_bytes(stamps[0].model_bytes, case.trainers, case.config.ddp.comm_hook)
        return {"wire_bytes_per_step": computed, "wire_bytes_source": None if computed is None else COMPUTED_RING}
    steps = sum(window.begin < step.end <= window.end for one in stamps for step in one.steps)
    # Divided by steps of all trainers, as the interfaces of all trainers were counted.
    return {"wire_bytes_per_step": moved / steps, "wire_bytes_source": COUNTED_BY_KERNEL}


def _read_run(place: Path) -> Run:
    file = place / "run" / "summary.json"
    if not file.is_file():
        raise TrainingError(f"the run ended without {file}")
    return read_run(file.parent)


def _curves(method: MeasuringMethod, run: Run) -> dict[str, Any]:
    """The learning curves; of several runs with one trainer each, those of the first."""
    curves = curve_fields(run.curves)
    met = None if method.target is None else require_first_reached(curves["validation"], method.target)
    samples, seconds = met or (None, None)
    return {**curves, "samples_to_target": samples, "time_to_target_s": seconds}


def _predicted(case: Case, method: MeasuringMethod, stamps: StepStamps, wire_bytes: float) -> dict[str, Any] | None:
    speed = method.speeds.get(case.mode.name)
    if speed is None:
        return None
    hook, size, colocated = case.config.ddp.comm_hook, stamps.model_bytes, is_colocated(case.config)
    # With an optimizer that updates each element by itself; only the servers know which it is. Rounds clip elsewhere.
    training = case.config.training
    overlap = not why_never_by_bucket(case.config) and (training.has_rounds or not training.clips)
    counts = case.trainers, case.servers
    return predict_communication(case.mode, speed, size, wire_bytes, *counts, hook, overlap, colocated)
