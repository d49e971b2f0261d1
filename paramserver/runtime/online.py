"""Start-up of what other programs connect to on rank 0: the coordinator of simulations, and the publisher."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.cluster import is_loopback, own_address
from paramserver.config import mode_of
from paramserver.context import ProcessContext
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.errors import GenerationChanged, Interrupted, PeerLost, UnsupportedConfiguration
from paramserver.metrics.records import make_record
from paramserver.online.spec import IngestSpec, ReceiverSpec
from paramserver.online.weights import Version
from paramserver.platform import host_number
from paramserver.runs.checkpoint_manager import CheckpointManager

if TYPE_CHECKING:
    from paramserver.online.coordinator import SimulationCoordinator
    from paramserver.online.publisher import ModelPublisher

_KEY = "coordinator"


@contextmanager
def start_coordinator(
    process: ProcessContext, checkpoints: CheckpointManager, folders: Sequence[Path], continues: bool = False
) -> Iterator[SimulationCoordinator]:
    """Run the coordinator on rank 0. After a resume it continues from the state in the checkpoint.

    The checkpoints include the state of the coordinator from now on. With ``continues`` it takes the place of a
    coordinator that ended without the run.
    """
    from paramserver.online.coordinator import CoordinatorJournal, SimulationCoordinator

    config, monitor = process.config, checkpoints.monitor
    assert config.simulations is not None

    def record(event: str, details: Mapping[str, Any]) -> None:
        if event == "failed":
            monitor.failure = details["text"]
        elif event == "refused":
            monitor.note(details["text"])
        else:
            monitor.record(make_record("simulation", monitor.step, rank=0, event=event, **details))

    coordinator = SimulationCoordinator(
        IngestSpec.of_run(config),
        process.trainers,
        config.seed,
        checkpoints.run.logs_dir,
        timeout_s=config.cluster.timeout_s,
        folders=folders,
        state=checkpoints.simulations_state,
        status=lambda: {"run": checkpoints.run.name, "step": monitor.step},
        is_stopping=process.stop.event.is_set,
        on_event=record,
        journal=CoordinatorJournal(checkpoints.run.path / "coordinator.jsonl", continues),
        publisher=None if checkpoints.publisher is None else checkpoints.publisher.address,
        record=checkpoints.run.path / "sampler.jsonl",
    )
    checkpoints.simulations = coordinator
    with coordinator:
        monitor.note(f"clients reach this run at {coordinator.address}")
        try:
            yield coordinator
        except PeerLost as loss:
            # In ddp all ranks start again after such a loss, if their launcher does so.
            if isinstance(loss, GenerationChanged) or (type(loss) is PeerLost and not mode_of(config).has_servers):
                coordinator.suspend()
            raise


@contextmanager
def start_publisher(process: ProcessContext, checkpoints: CheckpointManager) -> Iterator[ModelPublisher]:
    """Publish versions of the model on rank 0, in another generation at the same address."""
    from paramserver.online.publisher import ModelPublisher

    config, monitor, run = process.config, checkpoints.monitor, checkpoints.run
    assert config.publish is not None
    file = run.path / "publisher.json"
    publisher = ModelPublisher(config.publish, run.name, checkpoints.generation, monitor.step, file)
    checkpoints.publisher = publisher
    with publisher:
        monitor.note(f"subscribers reach this run at {publisher.address}")
        try:
            yield publisher
        except BaseException as error:
            if not isinstance(error, Interrupted):  # a launcher may start the run again
                publisher.suspend()
            raise


def publish_endpoint(
    process: ProcessContext,
    coordinator: SimulationCoordinator | None,
    publisher: ModelPublisher | None,
    rendezvous: Rendezvous | None,
) -> ReceiverSpec | None:
    """Publish what others need of the coordinator, and the publisher's generations, on rank 0; receive it elsewhere.

    Return what a trainer needs to receive samples; None on a server.

    Raises:
        UnsupportedConfiguration: this trainer does not reach the coordinator, which listens on its own host only.
    """
    simulations = process.config.simulations
    assert simulations is not None
    if coordinator is not None:
        address, token, learns = coordinator.address, coordinator.token, coordinator.learns
        of_run = () if publisher is None else publisher.starts
        if rendezvous is not None:
            rendezvous.set(_KEY, json.dumps([address, token.decode(), learns, of_run, host_number()]))
    else:
        assert rendezvous is not None
        address, text, learns, of_run, number = json.loads(rendezvous.get(_KEY))
        token = text.encode()
        if number != host_number() and is_loopback(simulations.address) and process.role.trainer_index is not None:
            raise UnsupportedConfiguration(
                f"simulations.address ({simulations.address}) must be an address of {process.identity.name(0)} that "
                "this host reaches, as a trainer receives samples here; give one, and simulations.keys"
            )
    if process.role.trainer_index is None:
        return None
    return ReceiverSpec(
        coordinator_address=address,
        token=token,
        ingest=IngestSpec.of_run(process.config),
        trainer_index=process.trainer_index,
        num_trainers=process.trainers,
        host=own_address(simulations.address),
        timeout_s=process.config.cluster.timeout_s,
        starts=tuple(Version(*start) for start in of_run),
        learns=learns,
    )
