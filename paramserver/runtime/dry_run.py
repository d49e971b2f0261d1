"""``--dry_run``: prints the effective config, the role and devices of each rank, and expected samples and batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paramserver.buffers import make_buffer
from paramserver.cluster import process_environ
from paramserver.config import Config, Role, dump_yaml, roles, world_size_of
from paramserver.devices import place_server, place_trainer
from paramserver.online.process_runner import LaunchCommand
from paramserver.online.sampler import make_sampler
from paramserver.online.spec import IngestSpec
from paramserver.sources import Partition, make_source
from paramserver.sources.factory import check_watermark
from paramserver.task import Task, make_task


def plan_text(config: Config, folders: Sequence[Path]) -> str:
    """Describe a run of ``config`` with all ranks on this machine. Starts nothing; reads the task's data."""
    task = make_task(config, folders)
    ranks = roles(config, world_size_of(config))
    trainers = sum(role.kind == "trainer" for role in ranks)
    lines = [dump_yaml(config).rstrip(), "", f"{len(ranks)} rank(s), mode {config.mode}:"]
    lines += [f"  rank {role.global_rank}: {_rank_text(role, config, task, trainers)}" for role in ranks]
    lines += _simulations_lines(config, folders)
    lines += [f"limits: {_limits_text(config)}"]
    return "\n".join(lines)


def _rank_text(role: Role, config: Config, task: Task, trainers: int) -> str:
    if role.trainer_index is None:
        return f"{role} on {', '.join(str(device) for device in place_server(config).devices)}"
    placement = place_trainer(config, role.trainer_index, trainers)
    task.devices, task.config = placement.devices, config
    partition = Partition(role.trainer_index, trainers)
    source = make_source(task.train_source(partition), partition, config)
    watermark = config.buffer.watermark
    devices = ", ".join(str(device) for device in placement.devices)
    total = source.total
    if total is None and config.simulations is not None:
        total = IngestSpec.from_config(config.simulations).expected_for(role.trainer_index, trainers)
    if total is None:
        return f"{role} on {devices}, samples until {'the last simulation ends' if config.simulations else 'a limit'}"
    buffer = make_buffer(config.buffer.kind, capacity=config.buffer.capacity, pseudo_epochs=config.buffer.pseudo_epochs)
    batches = buffer.expected_batches(total, config.training.batch_size)
    buffer.close()
    check_watermark(watermark, total, partition)
    first = f", the first from {watermark} samples on" if watermark else ""
    return f"{role} on {devices}, {total} samples, {'unknown' if batches is None else batches} batches{first}"


def _simulations_lines(config: Config, folders: Sequence[Path]) -> list[str]:
    """Describe the simulations, after the checks that the start of a run makes."""
    simulations = config.simulations
    if simulations is None:
        return []
    spec = IngestSpec.from_config(simulations)
    if not spec.is_managed:
        return [f"simulations: {'any number of' if simulations.count is None else simulations.count} from outside"]
    assert simulations.count is not None
    LaunchCommand(spec, folders, process_environ())
    make_sampler(simulations.sampler, spec.parameters, config.seed, simulations.count, folders)
    return [f"simulations: {simulations.count}, {simulations.at_once} at a time"]


def _limits_text(config: Config) -> str:
    training = config.training
    named = ("max_epochs", "max_steps", "max_samples", "max_seconds", "patience")
    found = [f"{name} {getattr(training, name)}" for name in named if getattr(training, name) is not None]
    return ", ".join(found) or "the end of the data"
