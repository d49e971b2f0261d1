"""``paramserver benchmark predict``: from measured runs of few trainers to the throughput of many.

Measured runs become deployments that can be simulated, and the costs of the simulator are fitted to explain them.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from operator import attrgetter
from pathlib import Path

import torch
import yaml

from paramserver.config import MODES, Config, Mode, config_from_mapping, dump_yaml, mode_of, server_computes
from paramserver.consistency.factory import consistency_class
from paramserver.errors import UnsupportedConfiguration
from paramserver.fileio import explain_not_writable
from paramserver.launch import CommandParser, add_overrides
from paramserver.parameters.flat import FlatLayout
from paramserver.process_utils import print_output
from paramserver.tools.bench.cases import Case, RequestedCases, add_case_flags, make_cases, parse_positive
from paramserver.tools.bench.link_probe import LinkSpeed, communication_s
from paramserver.tools.bench.processes import parse_bandwidth
from paramserver.tools.bench.simulation import Costs, Deployment, Throughput, simulate
from paramserver.tools.bench.slowdown import SlowdownSpec, parse_slowdown
from paramserver.tools.report.page import CHOOSE_OUT, table, write_report
from paramserver.tools.report.results import COMPLETED, RESULTS_FILE, CaseResult, Results, append_result, read_results
from paramserver.tools.report.tables import Table
from paramserver.transport.compression import make_codec

# From measured runs to a deployment that can be simulated: its compute, its size, and the costs that explain it.

JITTER = 0.05
"""By what the compute of a step varies where nothing else is known; without it trainers would stay in step for ever."""

TRANSFER_JITTER = 0.3
"""By what transfers vary: TCP does not give each the same rate. Chosen with measurements (docs/scale.md)."""

MeasuredRun = tuple[Deployment, float]
"""A run of the benchmark, for the simulator, and its samples per second."""

_COMPUTES = ("data", "forward")
# How often a parameter is tried at this multiple of its value, and at its reciprocal.
_FACTORS = (3.0, 1.4, 1.1)
# The costs of a message and of its bytes take the place of each other, so a search parameter by parameter ends between
# them. It begins at the best of these multiples of both.
_STARTS = (0.3, 1.0, 3.0, 10.0)
_MOST_STARTS = 2
# A cost that is 4 times its default counts like an error of 4 % in each run: what runs do not show keeps its default.
_PRIOR = (0.04 / math.log(4.0)) ** 2
_STEPS, _WARM_STEPS = 12, 3


def deployment_of(result: CaseResult, link: LinkSpeed, cores: int, costs: Costs | None = None) -> Deployment:
    """Return what a measured run is for the simulator.

    ``result`` is a completed one, of a mode with servers; ``link`` is of an interface of the hosts,
    which are on one machine and share the ``cores``. ``costs`` are those that were fitted; None for the defaults.

    Raises:
        UnsupportedConfiguration: the result lacks what the simulator needs, or is of a run that it has no model of.
    """
    where = f"the result {result.case}, repeat {result.repeat},"
    text = result.environment.get("config")
    if not isinstance(text, str):
        raise UnsupportedConfiguration(f"{where} must have the config of its run; benchmark again")
    config = config_from_mapping(yaml.safe_load(text))
    if not mode_of(config).has_servers or server_computes(config):
        raise UnsupportedConfiguration(
            f"{where} must be of mode rpc with server.compute: trainer, which the simulator models; measure that"
        )
    _check_without_rounds(config, where)
    phases, size = result.phases_ms, result.model_bytes
    if not result.is_completed or not size or not result.samples or not result.steps or not phases.get("forward"):
        raise UnsupportedConfiguration(
            f"{where} must be complete, with model_bytes, steps, samples and phases_ms; benchmark again"
        )
    samples = config.training.batch_size * config.training.batches_per_step
    if not config.has_given("batch_size"):  # a DataLoader of the task may have another one than the default
        per_update = consistency_class(config.server).gradients_per_update(config.server, result.trainers)
        samples = round(result.samples / (result.steps * per_update))
    return Deployment(
        config=config,
        message_bytes=size * _sent_share(config),
        forward_s=sum(phases.get(name) or 0.0 for name in _COMPUTES) / 1e3,
        backward_s=(phases.get("backward") or 0.0) / 1e3,
        link=link,
        samples=samples,
        costs=costs or Costs(),
        cores=cores,
        one_machine=True,
        slow=SlowdownSpec(**result.scenario["slow"]) if result.scenario.get("slow") else None,
        jitter=JITTER,
        transfer_jitter=TRANSFER_JITTER,
        seed=result.repeat,
    )


def _sent_share(config: Config) -> float:
    """Return the bytes of the parameters as they are sent, as a share of their own."""
    if not mode_of(config).has_servers:
        return 1.0
    # The type of the parameters is not in a result; it is float32 with few exceptions.
    exact = FlatLayout((torch.float32,), (1,), ())
    return make_codec(config.server).wire_layout(exact).dtypes[0].itemsize / exact.dtypes[0].itemsize


def error_of(deployment: Deployment, samples_per_second: float, steps: int = _STEPS, warm: int = _WARM_STEPS) -> float:
    """Return the simulated throughput over the measured one, less 1."""
    return simulate(deployment, steps, warm).samples_per_second / samples_per_second - 1


def fit(measured: Sequence[MeasuredRun]) -> Costs:
    """Return the costs with which the simulator explains measured runs best, starting from those of the first.

    The sum of the squared errors is minimized parameter by parameter, from several starts; a parameter on which no run
    depends keeps its value.
    """
    first = measured[0][0].costs
    default = asdict(first)

    def loss(values: dict[str, float]) -> float:
        costs = Costs(**values)
        errors = [error_of(replace(deployment, costs=costs), rate) for deployment, rate in measured]
        far = sum(math.log(values[name] / default[name]) ** 2 for name in default)
        return sum(math.log1p(error) ** 2 for error in errors) + _PRIOR * far

    starts = [
        {**default, "message_s": default["message_s"] * message, "byte_s": default["byte_s"] * byte}
        for message, byte in product(_STARTS, _STARTS)
    ]
    found = [_descend(loss, start) for start in sorted(starts, key=loss)[:_MOST_STARTS]]
    return Costs(**min(found, key=loss))


def _descend(loss: Callable[[dict[str, float]], float], start: dict[str, float]) -> dict[str, float]:
    """Return the values to which a search parameter by parameter comes from ``start``."""
    best, values = loss(start), dict(start)
    for factor in _FACTORS:
        improved = True
        while improved:
            improved = False
            for name in start:
                for tried in (values[name] * factor, values[name] / factor):
                    if name == "link_share" and tried > 1.0:
                        continue
                    candidate = {**values, name: tried}
                    if (found := loss(candidate)) < best * 0.99:
                        best, values, improved = found, candidate, True
    return values


# The command.

SIMULATED = "Simulated, not measured"
# Keys on which the compute of a step and the size of the model depend, which are not simulated.
_MEASURED = (
    "task_args",
    "device.kind",
    "training.batch_size",
    "training.accumulate_batches",
    "training.precision",
)
_ROUNDS = 200  # of steps of an all-reduce with random compute
_MOST_SERVERS = 4  # times as many as trainers, when the number to break even is searched


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver benchmark predict",
        description="Simulate how fast the benchmarked task would train with other numbers of trainers and servers, "
        "other consistencies and another network. The simulator's costs are fitted on the results in mode rpc.",
        epilog="docs/scale.md describes the model and its errors. Exit codes: 0 done, 2 the input is wrong.",
    )
    parser.add_argument("results", type=Path, metavar="RESULTS", help="a results.jsonl, or the folder that holds it")
    add_case_flags(parser, "as measured")
    add_overrides(parser)
    parser.add_argument("--bandwidth", metavar="RATE", help="of each host, as 10gbit (default: as measured)")
    parser.add_argument("--latency_us", metavar="U", help="of a message (default: as measured)")
    parser.add_argument("--cores", metavar="N", help="of each host (default: those of the measured machine)")
    parser.add_argument(
        "--jitter", metavar="SHARE", default=str(JITTER), help="standard deviation of a step's compute (default: 0.05)"
    )
    parser.add_argument(
        "--failures", metavar="every=S[,restart=S]", help="a trainer fails every S seconds on average (restart: 10)"
    )
    parser.add_argument("--break_even", action="store_true", help="also the servers with which sync is as fast as ddp")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write results and a report with plots here")
    return parser


@dataclass(frozen=True)
class Prediction:
    """A case, its simulated throughput, and the share of it that is kept with failures."""

    case: Case
    found: Throughput
    kept: float | None = None


def predict(words: Sequence[str]) -> int:
    arguments = make_parser().parse_args(words)
    measured = read_results(arguments.results)
    used = usable(measured)
    # All that can be wrong comes before the fit, which takes seconds.
    slow = None if arguments.slow is None else parse_slowdown(arguments.slow)
    failures, jitter = _failures(arguments.failures), _number("--jitter", arguments.jitter, 0.0, 1.0)
    first, measured_rate = used[0]
    link, cores = first.link, first.cores
    if arguments.bandwidth is not None:
        link = replace(link, bandwidth=parse_bandwidth(arguments.bandwidth))
    if arguments.latency_us is not None:
        link = replace(link, latency=_number("--latency_us", arguments.latency_us, 0.0) * 1e-6)
    if arguments.cores is not None:
        cores = parse_positive(arguments.cores, "--cores")
    with tempfile.TemporaryDirectory() as folder:
        # As a file, so that the flags are those of the benchmark, with the same rules and messages.
        file = Path(folder) / "config.yaml"
        file.write_text(dump_yaml(first.config), encoding="utf-8")
        requested = RequestedCases(
            file, arguments.modes, arguments.trainers, arguments.overrides, arguments.sweep, slow
        )
        cases = [case for case in make_cases(requested) if case.baseline is None]
    _check_simulated(cases, arguments.modes)
    for where, config in (
        *(("each result", deployment.config) for deployment, _ in used),
        *((f"the case {case.name}", case.config) for case in cases),
    ):
        _check_measured(where, config, first.config)
    if arguments.out is not None:
        if (arguments.out / RESULTS_FILE).resolve() == Path(measured.source).resolve():
            raise UnsupportedConfiguration(
                f"--out {arguments.out} must be another folder than that of the results, which it would replace; name "
                "another"
            )
        with explain_not_writable(str(arguments.out), CHOOSE_OUT):
            arguments.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=arguments.out).close()
    base, notes = calibrated(used, measured.source)
    costs = base.costs
    if arguments.bandwidth is not None:  # of the interface, of which tensors have a share; a probe measures that share
        costs = replace(costs, link_share=costs.link_share * Costs().link_share)
    target = replace(base, link=link, cores=cores, one_machine=False, jitter=jitter, costs=costs)
    predictions = [_predicted(case, target, failures) for case in cases]
    network = f"{link.bandwidth / 1e6:.0f} MB/s, {link.latency * 1e6:.0f} us a message"
    lines = [*notes, f"{SIMULATED}: each host with {cores} cores and {network}"]
    lines += ["", table(_table(predictions, measured_rate)).markdown, ""]
    if arguments.break_even:
        lines += list(_break_even(cases, target))
    if arguments.out is not None:
        lines += _written(predictions, arguments.out, notes)
    print_output("\n".join(lines))
    return 0


def usable(results: Results) -> list[MeasuredRun]:
    """Return the runs that the simulator can be fitted on.

    Raises:
        UnsupportedConfiguration: there is none, or one lacks what the simulator needs.
    """
    with_servers = [name for name, mode in MODES.items() if mode.has_servers]
    # The phases of a run with --slow include the waits of its slow trainer, which the simulator would add again.
    used = [
        one
        for one in results.results
        if one.mode in with_servers and one.baseline is None and one.is_completed and not one.scenario
    ]
    if not used:
        raise UnsupportedConfiguration(
            f"{results.source} must hold a completed case of mode rpc without --slow, and holds none; benchmark again "
            "with --modes rpc"
        )
    return [(_deployed(one), one.samples_per_second or 0.0) for one in used]


def calibrated(measured: Sequence[MeasuredRun], source: str) -> tuple[Deployment, tuple[str, ...]]:
    """Return what was measured, with the mean compute of all runs and fitted costs, and sentences about the fit."""
    costs = fit(measured)
    errors = [abs(error_of(replace(deployment, costs=costs), rate)) for deployment, rate in measured]
    deployments, names = [deployment for deployment, _ in measured], ("forward_s", "backward_s")
    compute = {name: statistics.mean(getattr(one, name) for one in deployments) for name in names}
    base = replace(deployments[0], costs=costs, slow=None, seed=0, **compute)
    costs_text = ", ".join(f"{name} {value:.2g}" for name, value in asdict(costs).items())
    return base, (
        f"fitted on {len(measured)} runs of {source}: {costs_text}",
        f"the fit reproduces these runs with an error of {statistics.median(errors):.1%} in the median, "
        f"{max(errors):.1%} at most",
    )


def _deployed(result: CaseResult) -> Deployment:
    found = result.predicted or {}
    bandwidth, latency = found.get("bandwidth_bytes_s"), found.get("latency_s")
    if not bandwidth or latency is None:
        raise UnsupportedConfiguration(
            f"the result {result.case}, repeat {result.repeat}, must have the speed of its link; "
            "benchmark again with this version"
        )
    moved, size = result.wire_bytes_per_step or 0.0, result.model_bytes or 0
    if moved < size / 2:
        raise UnsupportedConfiguration(
            f"the result {result.case}, repeat {result.repeat}, must be of tensors in messages, and they were in "
            "shared memory; benchmark again with --bandwidth, or with --set server.transport=rpc"
        )
    cores = result.environment.get("cores")
    # The bandwidth is that of a tensor: headers and gaps are part of it.
    costs = replace(Costs(), link_share=1.0)
    return deployment_of(result, LinkSpeed(bandwidth, latency), cores or 1, costs)


def _predicted(case: Case, target: Deployment, failures: tuple[float, float] | None) -> Prediction:
    deployment = replace(_with_config(target, case.config), slow=case.slow)
    if not case.mode.has_servers:
        return Prediction(case, all_reduce(case.mode, deployment))
    found = simulate(deployment)
    if failures is None:
        return Prediction(case, found)
    every_s, restart_s = failures
    # At least ten failures on average, and as long as a restart takes.
    lasts_s = max(10 * every_s / case.trainers, 5 * restart_s)
    failing = replace(deployment, failure_every_s=every_s, restart_s=restart_s)
    kept = simulate(failing, seconds=lasts_s).samples_per_second / found.samples_per_second
    return Prediction(case, found, kept)


def _with_config(deployment: Deployment, config: Config) -> Deployment:
    message_bytes = deployment.message_bytes / _sent_share(deployment.config) * _sent_share(config)
    return replace(deployment, config=config, message_bytes=message_bytes)


def all_reduce(mode: Mode, deployment: Deployment) -> Throughput:
    """Return the throughput of trainers that compute, and then reduce their gradients around a ring."""
    trainers, slow, draw = deployment.trainers, deployment.slow, random.Random(deployment.seed)

    def compute_s(index: int, batch: int) -> float:
        factor = slow.factor if slow is not None and slow.slows(deployment.seed, index, batch) else 1.0
        if deployment.jitter:
            factor *= draw.lognormvariate(-(deployment.jitter**2) / 2, deployment.jitter)
        return (deployment.forward_s + deployment.backward_s) * factor + deployment.costs.step_s

    rounds = _ROUNDS if slow is not None or deployment.jitter else 1
    computes_s = [max(compute_s(index, batch) for index in range(trainers)) for batch in range(rounds)]
    bandwidth = deployment.link.bandwidth * deployment.costs.link_share
    step_s = statistics.mean(computes_s) + communication_s(
        mode, deployment.message_bytes, trainers, 0, bandwidth, deployment.link.latency
    )
    return Throughput(step_s, trainers * deployment.samples / step_s, 0)


def _break_even(cases: Sequence[Case], target: Deployment) -> Iterator[str]:
    """For each number of trainers, the least number of servers with which ``sync`` is as fast as all-reduce."""
    ddp = {case.trainers: case for case in cases if case.mode.has_process_group}
    for trainers, case in ddp.items():
        limit = all_reduce(case.mode, _with_config(target, case.config)).step_s
        rpc = next((one.config for one in cases if one.trainers == trainers and one.mode.has_servers), None)
        if rpc is None:
            continue
        found = break_even_servers(_with_config(target, rpc), limit)
        yield f"servers with which sync is as fast as ddp, {trainers} trainers: {found or 'none'}"


def break_even_servers(deployment: Deployment, limit_s: float) -> int | None:
    """Return the least number of servers with which a step of ``sync`` lasts no longer than ``limit_s``; None for none.

    More servers are taken to be no slower, so it is found by halving.
    """
    config = replace(deployment.config, server=replace(deployment.config.server, consistency="sync", backup_trainers=0))

    def lasts_s(servers: int) -> float:
        cluster = replace(config.cluster, num_servers=servers)
        return simulate(replace(deployment, config=replace(config, cluster=cluster)), 4, 2).step_s

    low, high = 0, _MOST_SERVERS * deployment.trainers
    if lasts_s(high) > limit_s:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if lasts_s(middle) <= limit_s else (middle, high)
    return high


def _table(predictions: Sequence[Prediction], measured: float) -> Table:
    fails = any(one.kept is not None for one in predictions)
    titles = ("case", "servers", "step (ms)", "samples/s", "of measured", *(["kept with failures"] if fails else []))
    rows = []
    for one in predictions:
        step_ms, rate = one.found.step_s * 1e3, one.found.samples_per_second
        row = [one.case.name, str(one.case.servers), f"{step_ms:.1f}", f"{rate:.1f}", f"{rate / measured:.2f}"]
        rows.append([*row, *(["-" if one.kept is None else f"{one.kept:.1%}"] if fails else [])])
    return Table(titles, rows)


def _written(predictions: Sequence[Prediction], out: Path, notes: Sequence[str]) -> list[str]:
    results = []
    for one in predictions:
        case, found = one.case, one.found
        results.append(
            CaseResult(
                case.name,
                0,
                case.mode.name,
                case.trainers,
                case.servers,
                COMPLETED,
                overrides=dict(case.overrides),
                scenario={} if case.slow is None else {"slow": asdict(case.slow)},
                samples_per_second=found.samples_per_second,
                per_process=found.samples_per_second / (case.trainers + case.servers),
                step_ms={"mean": found.step_s * 1e3},
            )
        )
    (out / RESULTS_FILE).unlink(missing_ok=True)
    for result in results:
        append_result(out / RESULTS_FILE, result)
    pages = write_report(Results(str(out / RESULTS_FILE), tuple(results), (f"{SIMULATED}.", *notes)), out, SIMULATED)
    return [f"written: {page}" for page in pages]


def _number(flag: str, word: str, least: float, most: float = sys.float_info.max) -> float:
    try:
        number = float(word)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        upper = "on" if most == sys.float_info.max else f"to {most:g}"
        raise UnsupportedConfiguration(f"{flag} ({word}) must be a number from {least:g} {upper}; correct it")
    return number


def _check_simulated(cases: Sequence[Case], modes: str | None) -> None:
    if not cases:
        raise UnsupportedConfiguration(f"--modes ({modes}) must have rpc or ddp, as one process needs no prediction")
    if any(server_computes(case.config) for case in cases):
        raise UnsupportedConfiguration(
            "server.compute (server) must be trainer for a prediction, as the model has no forward on the server; "
            "leave it out"
        )
    for case in cases:
        _check_without_rounds(case.config, f"the case {case.name}")


def _check_measured(where: str, config: Config, measured: Config) -> None:
    for key in _MEASURED:
        value, expected = attrgetter(key)(config), attrgetter(key)(measured)
        if value != expected:
            raise UnsupportedConfiguration(
                f"{where} must have {key} ({value}) as the first result ({expected}) for a prediction, which takes the "
                "compute and the size from the results; leave it out, or benchmark with that value only"
            )


def _check_without_rounds(config: Config, where: str) -> None:
    if config.training.has_rounds or config.server.compression != "none":
        raise UnsupportedConfiguration(
            f"{where} must be without training.local_steps, training.outer and server.compression for a prediction, as "
            "the model has steps of one batch and messages of one size; leave them out, or benchmark without them"
        )


def _failures(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    given = {"restart": "10"}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in ("every", "restart"):
            raise UnsupportedConfiguration(
                f"--failures {text}: {part or 'an empty part'} must be every=SECONDS or restart=SECONDS; write for "
                "example --failures every=86400,restart=10"
            )
        given[name] = value
    if "every" not in given:
        raise UnsupportedConfiguration(f"--failures {text}: every is missing; write for example --failures every=86400")
    every_s = _number("--failures every", given["every"], 1.0)
    return every_s, _number("--failures restart", given["restart"], 0.0)
