"""``--dry_run``: prints the effective config, the role and devices of each rank, and expected samples and batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paramserver.cluster import allocated_gpus, process_environ
from paramserver.cluster.resolve import environment_class
from paramserver.config import Config, Deadlines, Role, dump_yaml, mode_of, roles, world_size_of
from paramserver.devices import place_server, place_trainer, require_visible_gpus
from paramserver.distributed.backends import require_rpc
from paramserver.importing import source_file
from paramserver.metrics import make_sinks
from paramserver.online.process_runner import LaunchCommand
from paramserver.online.sampler import sampler_of_run
from paramserver.online.spec import IngestSpec, check_keys
from paramserver.runtime.rank import trainer_class
from paramserver.sources import Partition, make_source
from paramserver.sources.expected import expected_batches, expected_samples
from paramserver.sources.factory import check_watermark, resolve_reading
from paramserver.sources.loader import WorkerOptions
from paramserver.task import Task, make_callbacks, make_task, sampler_of
from paramserver.trainers.validation import validation_batches


def plan_text(config: Config, folders: Sequence[Path], launcher: str | None) -> str:
    """Describe a run of ``config`` with all ranks on this machine. Starts nothing; reads the task's data.

    The launcher starts the ranks, as in ``ProcessIdentity.source``; None is the local supervisor.
    """
    require_rpc(mode_of(config))
    task = make_task(config, folders)
    trainer_class(config, folders)
    make_sinks(config.logging.sinks, folders)
    ranks = roles(config, world_size_of(config))
    trainers = sum(role.kind == "trainer" for role in ranks)
    require_visible_gpus(config, allocated_gpus(process_environ()))
    lines = [dump_yaml(config).rstrip(), "", f"task {type(task).__name__}, defined in {source_file(type(task))}"]
    lines += [f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}, mode {config.mode}:"]
    lines += [f"  rank {role.global_rank}: {_rank_text(role, config, task, trainers)}" for role in ranks]
    make_callbacks(task)
    if config.publish is not None:
        from paramserver.online.connections import resolve_listen_address

        check_keys("publish", config.publish.address, config.publish.keys)
        resolve_listen_address(config.publish.address, "publish.address")
    lines += _simulations_lines(config, folders)
    lines += [f"limits: {_limits_text(config)}"]
    lines += loss_lines(config, launcher)
    return "\n".join(lines)


def _rank_text(role: Role, config: Config, task: Task, trainers: int) -> str:
    if role.trainer_index is None:
        return f"{role} on {', '.join(str(device) for device in place_server(config).devices)}"
    placement = place_trainer(config, role.trainer_index, trainers)
    task.devices, task.config = placement.devices, config
    partition = Partition(role.trainer_index, trainers)
    reading = resolve_reading(task.train_source(partition), partition, config, sampler=sampler_of(task, partition))
    validation_batches(task, partition, config)
    source, config = make_source(reading, partition, config), reading.config
    if config.training.loader_workers:
        source.use_workers(WorkerOptions(config.training.loader_workers, reading.init_fn or task.worker_init_fn))
    watermark = config.buffer.watermark
    devices = ", ".join(str(device) for device in placement.devices)
    total = expected_samples(source, partition, config)
    if total is None:
        return f"{role} on {devices}, samples until {'the last simulation ends' if config.simulations else 'a limit'}"
    batches = expected_batches(total, config)
    check_watermark(watermark, total, partition)
    first = f", the first from {watermark} samples on" if watermark else ""
    if reading.gives_batches:
        return f"{role} on {devices}, {batches} whole batches{first}"
    number = "an unknown number of" if batches is None else batches
    return f"{role} on {devices}, {total} samples, {number} batches of {config.training.batch_size}{first}"


def _simulations_lines(config: Config, folders: Sequence[Path]) -> list[str]:
    """Describe the simulations, after the checks that the start of a run makes."""
    simulations = config.simulations
    if simulations is None:
        return []
    spec = IngestSpec.of_run(config)
    sampler_of_run(spec, config.seed, folders)
    if not spec.is_managed:
        return [f"simulations: {'any number of' if simulations.count is None else simulations.count} from outside"]
    assert simulations.count is not None
    LaunchCommand(spec, folders, process_environ())
    waiting_mib = -(-simulations.at_once * spec.window * spec.sample_bytes // 2**20)
    text = f"simulations: {simulations.count}, {simulations.at_once} at a time"
    return [f"{text}, whose samples take up to {waiting_mib} MiB in front of the buffer of each trainer"]


def _limits_text(config: Config) -> str:
    training = config.training
    named = ("max_epochs", "max_steps", "max_samples", "max_seconds", "patience")
    found = [f"{name} {getattr(training, name)}" for name in named if getattr(training, name) is not None]
    return ", ".join(found) or "the end of the data"


def loss_lines(config: Config, launcher: str | None) -> list[str]:
    """Describe what follows from the loss of a process, and the limits of the waits for one."""
    mode, server, cluster = mode_of(config), config.server, config.cluster
    if mode.single_process:
        return []
    silent = f"a silent one after server.lost_after_s ({server.lost_after_s:g} s)"
    deadlines, limit_s = Deadlines.of(config), cluster.timeout_s
    lines = [
        f"losses: a dead process is noticed at once, {silent}",
        f"  heartbeats every {server.heartbeat_s:g} s; calls, and the return of a server, may take cluster.timeout_s "
        f"({limit_s:g} s)",
        f"  a process writes its stacks to its log when no Python code ran for {deadlines.stacks_s:g} s, or after "
        f"{limit_s:g} s without a step",
    ]
    restarts = f"up to cluster.max_restarts ({cluster.max_restarts}) times"
    if launcher is None:
        lines.append(f"  a process that does nothing while it starts is ended after {deadlines.starting_s:g} s")
    if launcher is not None and environment_class(launcher).ends_all_ranks:
        return [
            *lines,
            f"  {launcher} ends all ranks after any loss; those that it starts again resume from the last checkpoint",
        ]
    who = "the supervisor starts it again" if launcher is None else "the scheduler must start it again"
    if not mode.has_servers:
        again = f"all ranks start again from the last checkpoint, {restarts}" if launcher is None else "the run ends"
        return [*lines, f"  a lost rank: {again}"]
    reactions = {
        "continue": f"the other trainers continue; {who}, {restarts}",
        "rollback": f"all return to the last checkpoint; {who}, {restarts}",
        "fail": "the run ends",
    }
    lines.append(f"  a lost trainer (server.on_loss: {server.on_loss}): {reactions[server.on_loss]}")
    lines.append(
        f"  a lost server: all return to the last checkpoint; {who}, {restarts}"
        if cluster.max_restarts
        else "  a lost server: the run ends"
    )
    return lines
