"""Where the clients of an online run are received: rank 0's desk, and how all ranks learn of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.cluster import own_address
from paramserver.config import SimulationsConfig
from paramserver.context import Process
from paramserver.distributed.rendezvous import Meeting
from paramserver.metrics.records import make_record
from paramserver.online.spec import Plan, Post
from paramserver.runs.checkpoint_manager import Keeper

if TYPE_CHECKING:
    from paramserver.online.coordinator import Desk

_KEY = "desk"


@contextmanager
def open_desk(process: Process, keeper: Keeper, told: SimulationsConfig, folders: Sequence[Path]) -> Iterator[Desk]:
    """The desk of this run, which tells its address to people. What it did before a resume it takes back."""
    with _make_desk(process, keeper, told, folders) as desk:
        keeper.note(f"clients reach this run at {desk.address}")
        yield desk


def _make_desk(process: Process, keeper: Keeper, told: SimulationsConfig, folders: Sequence[Path]) -> Desk:
    from paramserver.online.coordinator import Desk

    def record(event: str, details: Mapping[str, Any]) -> None:
        keeper.record(make_record("simulation", keeper.step, rank=0, event=event, **details))

    desk = Desk(
        Plan.of(told),
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


def share_post(process: Process, desk: Desk | None, meeting: Meeting | None) -> Post | None:
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
    return Post(
        desk=address,
        token=token,
        plan=Plan.of(told),
        trainer_index=process.trainer_index,
        trainers=process.trainers,
        host=own_address(told.address),
        timeout_s=process.config.cluster.timeout_s,
    )
