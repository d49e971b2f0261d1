"""One rank of a run, from its identity to its exit: a server or a trainer."""

from __future__ import annotations

import logging
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.checkpoint import load_chosen, remove_leftovers
from paramserver.checkpoint.format import LATEST
from paramserver.cluster import ProcessIdentity, bind_interface, interface_to, num_usable_cores, process_environ
from paramserver.config import Config, Role, dump_yaml, mode_of, roles, server_computes, trainer_of
from paramserver.consistency import Decision
from paramserver.context import ProcessContext, StartupTimer, StopRequest, set_trainer_index
from paramserver.devices import Placement, place_server, place_trainer
from paramserver.distributed.rendezvous import Rendezvous, join_rendezvous
from paramserver.distributed.session import rpc_server
from paramserver.errors import (
    CheckpointError,
    DeadlineExceeded,
    Interrupted,
    PeerFailed,
    TrainingError,
    UnsupportedConfiguration,
)
from paramserver.importing import load_object
from paramserver.metrics import FanOut, JsonLines, Sink, TensorBoard
from paramserver.metrics.records import TrainerTotals, make_record
from paramserver.runs.attempt import reserve_run, start_transaction
from paramserver.runs.checkpoint_manager import CheckpointManager, load_for_resume
from paramserver.runs.monitor import RunMonitor, kinds_recorded_later
from paramserver.runs.rundir import (
    RunDir,
    environment_record,
    supersede_metrics,
    write_json,
    write_text,
)
from paramserver.runtime.online import publish_endpoint, start_coordinator
from paramserver.task import Task, make_task

if TYPE_CHECKING:
    from trainers import Trainer

log = logging.getLogger("paramserver")


@dataclass(frozen=True)
class RankPlan:
    """What a rank is started with.

    Args:
        config: effective.
        identity: who this process is.
        folders: where a task's file or module is looked for.
        shown: receives records beside the run's folder (a progress line, a supervisor's pipe).
        run: the folder, where somebody made it already.
        resume: go on from the newest checkpoint of ``run``.
        listener: the socket of rank 0's store, where somebody bound it already.
        task_class: the task, where the caller holds it; loaded by ``config.task`` otherwise.
        logs: write logs/rank-<N>.log here; a supervisor does it for its ranks.
        is_last_act: this process ends with the rank, so that its signal handlers may stay.
        began: ``time.time()`` of the command that started the run.
        command: for environment.json.
    """

    config: Config
    identity: ProcessIdentity
    folders: Sequence[Path]
    shown: Sequence[Sink] = ()
    run: RunDir | None = None
    resume: bool = False
    listener: socket.socket | None = None
    task_class: type[Task] | None = None
    logs: bool = True
    is_last_act: bool = False
    began: float | None = None
    command: Sequence[str] = ()


def run_rank(plan: RankPlan) -> dict[str, Any] | None:
    """Do this rank's part of a run.

    Returns:
        The summary on rank 0, None elsewhere.

    Raises:
        ParamserverError: what ended the run; rank 0 has written its summary by then.
    """
    config, identity = plan.config, plan.identity
    role = roles(config, identity.world_size)[identity.global_rank]
    trainers = identity.world_size - sum(r.kind == "server" for r in roles(config, identity.world_size))
    clock = StartupTimer(plan.began)
    clock.mark("interpreter and imports")
    with StopRequest(restore=not plan.is_last_act) as stop, ExitStack() as stack:
        task = make_task(config, plan.folders, plan.task_class)
        process = ProcessContext(config, identity, role, trainers, _place(config, identity, role), stop, clock)
        clock.mark("task")
        rendezvous = _meet(plan, process)
        clock.mark("rendezvous")
        checkpoints = stack.enter_context(_open_checkpoints(plan, process)) if identity.global_rank == 0 else None
        name = checkpoints.run.name if checkpoints is not None else ""
        if rendezvous is not None:
            name = _share_run_name(rendezvous, checkpoints)
        if plan.logs:
            run = RunDir(Path(config.logging.run_dir) / name) if checkpoints is None else checkpoints.run
            stack.enter_context(_log_file(run, identity.global_rank))
        if (told := config.simulations) is not None:
            desk = (
                None
                if checkpoints is None
                else stack.enter_context(start_coordinator(process, checkpoints, told, plan.folders))
            )
            process = replace(process, receiver_spec=publish_endpoint(process, desk, rendezvous))
        devices = ", ".join(str(device) for device in process.placement.devices)
        log.info("rank %d of %d: %s on %s, run %s", identity.global_rank, identity.world_size, role, devices, name)
        task.devices, task.config = process.placement.devices, config
        set_trainer_index(role.trainer_index)
        stack.callback(set_trainer_index, None)
        if role.kind == "server":
            assert rendezvous is not None
            if checkpoints is not None:
                return _serve(process, task, checkpoints, rendezvous)
            _serve_shard(process, task, rendezvous)
            return None
        return _train(process, task, checkpoints, rendezvous, plan.folders)


def _place(config: Config, identity: ProcessIdentity, role: Role) -> Placement:
    if role.kind == "server":
        return place_server(config)
    first_here = identity.global_rank - identity.local_rank
    here = roles(config, identity.world_size)[first_here : first_here + identity.local_world_size]
    trainers_here = [r.global_rank for r in here if r.kind == "trainer"]
    return place_trainer(config, trainers_here.index(identity.global_rank), len(trainers_here))


def _meet(plan: RankPlan, process: ProcessContext) -> Rendezvous | None:
    config, identity = plan.config, plan.identity
    if mode_of(config).single_process:
        return None
    interface = config.cluster.interface or interface_to(identity.master_addr)
    if interface is not None:
        bind_interface(process_environ(), interface)
    return join_rendezvous(config, identity, process.stop.event, plan.listener)


def _share_run_name(rendezvous: Rendezvous, checkpoints: CheckpointManager | None) -> str:
    """Rank 0 names the run; the others hear the name, and that rank 0 is ready, before they go on."""
    if checkpoints is None:
        return rendezvous.get("run")
    rendezvous.set("run", checkpoints.run.name)
    return checkpoints.run.name


@contextmanager
def _log_file(run: RunDir, global_rank: int) -> Iterator[None]:
    """This rank's own log, on the host where it runs; an error that ends the rank is its last entry."""
    run.logs_dir.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(run.log_file(global_rank), encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("paramserver").addHandler(handler)
    try:
        yield
    except BaseException as error:
        handler.emit(log.makeRecord(log.name, logging.ERROR, __file__, 0, "%r", (error,), sys.exc_info()))
        raise
    finally:
        logging.getLogger("paramserver").removeHandler(handler)
        handler.close()


# Rank 0.


@contextmanager
def _open_checkpoints(plan: RankPlan, process: ProcessContext) -> Iterator[CheckpointManager]:
    """The run's folder, locked and described, and the manager of its checkpoints."""
    config = process.config
    with ExitStack() as stack:
        run = plan.run or stack.enter_context(reserve_run(config))
        stack.enter_context(start_transaction(run) if plan.run is None else nullcontext())
        stack.enter_context(run.lock(plan.resume))
        resume = load_for_resume(config, run) if plan.resume else None
        weights = _initial_weights(config) if resume is None else None
        remove_leftovers(run.checkpoints_dir)
        run.summary_file.unlink(missing_ok=True)
        write_text(run.config_file, dump_yaml(config))
        about = environment_record(list(plan.command))
        folders = [str(folder.resolve()) for folder in plan.folders]
        write_json(run.environment_file, {**about, "device": str(process.placement.device), "folders": folders})
        if resume is not None:
            supersede_metrics(run.metrics_file, resume.checkpoint.step, kinds_recorded_later(resume.run))
        sinks: list[Sink] = [JsonLines(run.metrics_file)]
        if config.logging.tensorboard:
            sinks.append(TensorBoard(run.tensorboard_dir, None if resume is None else resume.checkpoint.step + 1))
        fan = FanOut([*sinks, *plan.shown])
        checkpoints = CheckpointManager(config, run, RunMonitor(config, fan, run.summary_file), resume, weights)
        checkpoints.monitor.run_started(
            make_record(
                "start",
                checkpoints.monitor.step,
                rank=0,
                name=run.name,
                mode=config.mode,
                world_size=process.identity.world_size,
                total_steps=config.training.max_steps,
                total_samples=config.training.max_samples,
                run_dir=str(run.path),
                resumed=resume is not None,
            )
        )
        yield checkpoints


def _initial_weights(config: Config) -> tuple[str, Any] | None:
    """The weights that ``init_from`` names: a model.pt as it is, or the checked one of a run's newest checkpoint."""
    if config.init_from is None:
        return None
    import torch

    path = Path(config.init_from)
    try:
        if path.is_dir():
            checkpoint, (weights,) = load_chosen(path, LATEST, "model")
            return str(checkpoint.file_path("model")), weights
        return str(path), torch.load(path, weights_only=True, map_location="cpu")
    except CheckpointError as error:
        raise CheckpointError(f"init_from ({path}): {error}") from error
    except Exception as error:  # torch.load raises many types for a file that is none of its own
        cause = str(error).strip().split("\n")[0].partition(". ")[0]  # torch's own advice is to trust the file
        raise CheckpointError(
            f"init_from ({path}) cannot be loaded as a model.pt ({type(error).__name__}: {cause}); give the model.pt "
            "of a checkpoint, or what torch.save(model.state_dict(), ...) wrote"
        ) from error


def _close(checkpoints: CheckpointManager, totals: Sequence[TrainerTotals], work: Callable[[], str]) -> dict[str, Any]:
    """Run ``work`` and write the summary of how it ended; ``work`` returns the reason of a regular end."""
    try:
        reason = work()
    except Interrupted as interrupted:
        checkpoints.close("interrupted", totals, str(interrupted))
        saved = "nothing was saved yet"
        if checkpoints.checkpoint is not None and checkpoints.monitor.step == checkpoints.checkpoint.step:
            command = f"python -m paramserver.launch --resume {shlex.quote(str(checkpoints.checkpoint.path))}"
            saved = f"no step was made, so the run is as it was before. Resume with: {command}"
        elif checkpoints.last_checkpoint is not None:
            saved = f"its checkpoint is written. Resume with: {checkpoints.run.resume_command}"
        raise Interrupted(
            f"interrupted ({interrupted}) after step {checkpoints.monitor.step}; {saved}"
        ) from interrupted
    except BaseException as error:
        told = str(error) if isinstance(error, PeerFailed) else f"{type(error).__name__}: {error}"
        checkpoints.close("failed", totals, error=told)
        raise
    summary = checkpoints.close("completed", totals, reason)
    if summary["status"] == "failed":
        raise TrainingError(summary["error"])
    return summary


# A server.


def _serve(
    process: ProcessContext, task: Task, checkpoints: CheckpointManager, rendezvous: Rendezvous
) -> dict[str, Any]:
    from paramserver.distributed.membership import release_liveness_calls
    from paramserver.distributed.rpc_calls import register_server, unregister_servers
    from paramserver.optim.parallel_step import ThreadTeam, num_spare_threads
    from paramserver.server.parameter_server import ParameterServer
    from paramserver.transport.segments import SegmentHost

    totals: list[TrainerTotals] = []

    def work() -> str:
        with ExitStack() as stack:
            segments = None
            if process.config.server.shares_memory:
                segments = stack.enter_context(SegmentHost("paramserver", process.config.cluster.timeout_s))
            server = ParameterServer(task, process.config, process.trainers, checkpoints, process.stop, segments)
            register_server(server)
            if server.coordinator is not None:
                register_server(server.coordinator)
            stack.callback(unregister_servers)
            if (
                server.is_whole
                and server.aggregator.rules.lockstep
                and (helpers := num_spare_threads(num_usable_cores()))
            ):
                server.store.use_threads(stack.enter_context(closing(ThreadTeam(helpers))))
            with rpc_server(rendezvous, process.trainers * server_computes(process.config)):
                try:
                    _watch_over(server, process, rendezvous)
                    server.wait_for_disconnects(_GOODBYE_S)
                finally:
                    totals.extend(t for _, t in sorted(server.totals.items()))
                    if server.coordinator is not None:
                        server.coordinator.shut_down(server.error or server.last_decision, _GOODBYE_S)
                    release_liveness_calls()
        if server.error is not None:
            raise server.error
        assert server.last_decision is not None
        return _reason_of(server.last_decision)

    return _close(checkpoints, totals, work)


def _serve_shard(process: ProcessContext, task: Task, rendezvous: Rendezvous) -> None:
    from paramserver.server.shard_process import serve_shard

    _reason_of(serve_shard(process, task, rendezvous))


_GOODBYE_S = 5.0


def _watch_over(server: Any, process: ProcessContext, rendezvous: Rendezvous) -> None:
    """Until the server has finished: look after the trainers, and give up a world that does not fill."""
    config = process.config
    deadline = time.monotonic() + config.cluster.timeout_s
    while not server.finished.wait(config.server.heartbeat_s):
        server.check_heartbeats()
        missing = server.missing()
        if missing and (told := rendezvous.reported_failure()) is not None:
            server.fail(told.error())
        elif missing and process.stop.event.is_set():
            server.fail(Interrupted(f"{process.stop.state()[1]} before {', '.join(missing)} had arrived"))
        elif missing and time.monotonic() > deadline:
            names, limit_s = ", ".join(missing), config.cluster.timeout_s
            server.fail(DeadlineExceeded(f"{names} did not arrive within cluster.timeout_s ({limit_s:g} s)"))


# A trainer.


def _train(
    process: ProcessContext,
    task: Task,
    checkpoints: CheckpointManager | None,
    rendezvous: Rendezvous | None,
    folders: Sequence[Path],
) -> dict[str, Any] | None:
    trainer: Trainer = _trainer_class(process.config, folders)(process, task, checkpoints, rendezvous)
    totals: list[TrainerTotals] = []

    def work() -> str:
        try:
            decision = trainer.run()
        except SystemExit as error:
            raise TrainingError(
                f"trainer {trainer.trainer_index}: the task ended its process (SystemExit: {error.code}) before the "
                "run was over; raise an exception instead"
            ) from error
        finally:
            totals.extend(trainer.all_totals)
        return _reason_of(decision)

    if checkpoints is not None:
        return _close(checkpoints, totals, work)
    work()
    return None


def _trainer_class(config: Config, folders: Sequence[Path]) -> Any:
    found = load_object(trainer_of(config), "trainer", folders)
    if getattr(found, "computes", None) not in (None, config.server.compute):
        raise UnsupportedConfiguration(
            f"trainer ({config.trainer}) is for server.compute: {found.computes}, and the config says "
            f"{config.server.compute}; derive it from the class in trainers that fits, or change server.compute"
        )
    return found


def _reason_of(decision: Decision) -> str:
    """Why a run ended in good order.

    Raises:
        Interrupted: because of a signal.
    """
    if decision.interrupted:
        raise Interrupted(decision.reason)
    return decision.reason
