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
    process: ProcessContext, keeper: CheckpointManager, told: SimulationsConfig, folders: Sequence[Path]
) -> Iterator[SimulationCoordinator]:
    """The desk of this run, which tells its address to people. What it did before a resume it takes back."""
    with _make_desk(process, keeper, told, folders) as desk:
        keeper.note(f"clients reach this run at {desk.address}")
        yield desk


def _make_desk(
    process: ProcessContext, keeper: CheckpointManager, told: SimulationsConfig, folders: Sequence[Path]
) -> SimulationCoordinator:
    from paramserver.online.coordinator import SimulationCoordinator

    def record(event: str, details: Mapping[str, Any]) -> None:
        keeper.record(make_record("simulation", keeper.step, rank=0, event=event, **details))

    desk = SimulationCoordinator(
        IngestSpec.of(told),
        process.trainers,
        process.config.seed,
        keeper.run.logs_dir,
        timeout_s=process.config.cluster.timeout_s,
        folders=folders,
        state=keeper.simulations_state,
        status=lambda: {"run": keeper.run.name, "step": keeper.step},
        on_event=record,
    )
    keeper.simulations = desk
    return desk


def publish_endpoint(
    process: ProcessContext, desk: SimulationCoordinator | None, meeting: Rendezvous | None
) -> ReceiverSpec | None:
    """What this trainer needs to receive samples; rank 0 tells it to the others. None on a server."""
    told = process.config.simulations
    assert told is not None
    if desk is not None:
        address, token = desk.address, desk.token
        if meeting is not None:
            meeting.tell(_KEY, json.dumps([address, token.decode()]))
    else:
        assert meeting is not None
        address, text = json.loads(meeting.ask(_KEY))
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
