"""Where the clients of an online run are received: rank 0's desk, and how all ranks learn of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.cluster import own_address
from paramserver.config import SimulationsConfig
from paramserver.context import ProcessContext
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.metrics.records import make_record
from paramserver.online.spec import IngestSpec, ReceiverSpec
from paramserver.runs.checkpoint_manager import CheckpointManager

if TYPE_CHECKING:
    from paramserver.online.coordinator import SimulationCoordinator

_KEY = "desk"


@contextmanager
def start_coordinator(
    process: ProcessContext, checkpoints: CheckpointManager, told: SimulationsConfig, folders: Sequence[Path]
) -> Iterator[SimulationCoordinator]:
    """The desk of this run, which tells its address to people. What it did before a resume it takes back."""
    with _make_desk(process, checkpoints, told, folders) as desk:
        checkpoints.monitor.note(f"clients reach this run at {desk.address}")
        yield desk


def _make_desk(
    process: ProcessContext, checkpoints: CheckpointManager, told: SimulationsConfig, folders: Sequence[Path]
) -> SimulationCoordinator:
    from paramserver.online.coordinator import SimulationCoordinator

    def record(event: str, details: Mapping[str, Any]) -> None:
        checkpoints.monitor.record(make_record("simulation", checkpoints.monitor.step, rank=0, event=event, **details))

    desk = SimulationCoordinator(
        IngestSpec.of(told),
        process.trainers,
        process.config.seed,
        checkpoints.run.logs_dir,
        timeout_s=process.config.cluster.timeout_s,
        folders=folders,
        state=checkpoints.simulations_state,
        status=lambda: {"run": checkpoints.run.name, "step": checkpoints.monitor.step},
        on_event=record,
    )
    checkpoints.simulations = desk
    return desk


def publish_endpoint(
    process: ProcessContext, desk: SimulationCoordinator | None, rendezvous: Rendezvous | None
) -> ReceiverSpec | None:
    """What this trainer needs to receive samples; rank 0 tells it to the others. None on a server."""
    told = process.config.simulations
    assert told is not None
    if desk is not None:
        address, token = desk.address, desk.token
        if rendezvous is not None:
            rendezvous.set(_KEY, json.dumps([address, token.decode()]))
    else:
        assert rendezvous is not None
        address, text = json.loads(rendezvous.get(_KEY))
        token = text.encode()
    if process.role.trainer_index is None:
        return None
    return ReceiverSpec(
        desk=address,
        token=token,
        plan=IngestSpec.of(told),
        trainer_index=process.trainer_index,
        trainers=process.trainers,
        host=own_address(told.address),
        timeout_s=process.config.cluster.timeout_s,
    )
