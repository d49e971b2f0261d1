"""One rank of a run, from its identity to its exit: server 0, a shard server, or a trainer."""

from __future__ import annotations

import errno
import faulthandler
import gc
import json
import logging
import math
import os
import resource
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paramserver._trainers import FORMER_NAME_NOTE, former_name_is_used
from paramserver.checkpoint import load_chosen, remove_leftovers
from paramserver.checkpoint.format import LATEST, step_name
from paramserver.checkpoint.memory import check_memory_folder, move_to_disk
from paramserver.cluster import (
    ProcessIdentity,
    allocated_gpus,
    bind_listener,
    choose_interface,
    chosen_interface,
    process_environ,
)
from paramserver.config import (
    Config,
    Role,
    dump_yaml,
    mode_of,
    num_servers_of,
    roles,
    server_computes,
    trainer_of,
    with_trainers,
    world_size_of,
)
from paramserver.config.deadlines import GRACE_S, HURRY_S, LAST_WRITE_S
from paramserver.consistency import Decision
from paramserver.context import (
    ProcessContext,
    StartupTimer,
    StopLimit,
    StopRequest,
    place_of_user_code,
    set_role,
)
from paramserver.devices import Placement, place_server, place_trainer, require_visible_gpus
from paramserver.distributed.backends import require_rpc
from paramserver.distributed.remote_error import RemoteError
from paramserver.distributed.rendezvous import LeftRun, Rendezvous, job_store, join_rendezvous
from paramserver.distributed.resize import OVER, ResizeRequest, mark_carried_out, pending_requests, refuse, resized
from paramserver.distributed.timeouts import call_with_timeout
from paramserver.errors import (
    CheckpointError,
    DeadlineExceeded,
    Evicted,
    GenerationChanged,
    Interrupted,
    MissingRanks,
    ParamserverError,
    PeerFailed,
    PeerLost,
    RunEnded,
    SourceError,
    TrainingError,
    Unreachable,
    UnsupportedConfiguration,
    kind_and_message,
)
from paramserver.fileio import explain_not_writable
from paramserver.importing import load_object, source_file
from paramserver.metrics import Csv, FanOut, JsonLines, Prometheus, Sink, TensorBoard, make_sinks
from paramserver.metrics.profile import StepProfiler
from paramserver.metrics.records import Record, TrainerTotals, make_record
from paramserver.metrics.sinks import read_records
from paramserver.platform import num_usable_cores
from paramserver.process_utils import Watchdog
from paramserver.runs.attempt import furthest_step, reserve_run
from paramserver.runs.checkpoint_manager import CheckpointManager, load_for_resume
from paramserver.runs.losses import LossLog
from paramserver.runs.monitor import RunMonitor, kinds_recorded_later
from paramserver.runs.resume import launch_name
from paramserver.runs.rundir import (
    RunDir,
    check_log_folder,
    environment_record,
    read_mapping,
    supersede_metrics,
    write_json,
    write_text,
)
from paramserver.runtime.online import publish_endpoint, start_coordinator, start_publisher
from paramserver.sources.expected import Origin
from paramserver.task import Task, make_callbacks, make_task

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paramserver.distributed.membership import Member
    from paramserver.server.parameter_server import ParameterServer
    from paramserver.server.server_run import UpdateExecutor
    from paramserver.trainers import Trainer

log = logging.getLogger("paramserver")

# Once the run has ended, other processes have this long to disconnect.
_DISCONNECT_S = 5.0
# For the summary of a process whose main thread does not react.
_CLOSE_S = 5.0

# Of a rank with few peers: sockets, pipes, records and shared memory.
_DESCRIPTORS = 64

# Between two attempts to join servers that are lost: how soon is limited by the start of a process anyway.
_REJOIN_S = 0.2


@dataclass(frozen=True)
class RankPlan:
    """What a rank is started with."""

    config: Config
    identity: ProcessIdentity
    folders: Sequence[Path]
    sinks: Sequence[Sink] = ()  # receive records in addition to the run folder (a progress line, a supervisor's pipe)
    run: RunDir | None = None
    resume: bool = False  # continue from the newest checkpoint of ``run``
    listener: socket.socket | None = None  # the socket of rank 0's store, if it is bound already
    create_task: Callable[..., Task] | None = None  # see ``launch_local``
    writes_log: bool = True  # write logs/rank-<N>.log here; a supervisor does it for its ranks
    ends_process: bool = False  # this process ends with the rank, so its signal handlers stay installed
    began: float | None = None  # ``time.time()`` of the command that started the run
    command: Sequence[str] = ()
    restarted: bool = False
    replaces: bool = False  # an earlier process of this rank is dead
    joins: bool = False  # a trainer that joins the run while it takes place
    # Reports the error that ends this process, and returns its exit code; called where the main thread cannot. None if
    # the process outlives the rank.
    report: Callable[[BaseException], int] | None = None
    # Called with the role and the task before the process joins the run.
    on_task: Callable[[Role, Task], None] = lambda role, task: None


def _check_descriptors() -> None:
    """Refuse to start a rank with too few descriptors: TensorPipe aborts the process where it finds none.

    Raises:
        OSError: ``describe_error`` makes a sentence of it.
    """
    used, (limit, _) = len(list(Path("/dev/fd").iterdir())), resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit - used < _DESCRIPTORS:
        raise OSError(errno.EMFILE, f"{used} are open, and a rank needs {_DESCRIPTORS} more")


def run_rank(plan: RankPlan) -> dict[str, Any] | None:
    """Run one rank: find its role, join the others, open the run, then serve or train until the run ends.

    Return the summary on rank 0, None elsewhere.

    Raises:
        ParamserverError: what ended the run; rank 0 has written its summary by then.
    """
    config, identity = plan.config, plan.identity
    timer = StartupTimer(plan.began)
    timer.mark("interpreter and imports")
    require_rpc(mode_of(config))
    if not mode_of(config).single_process:
        _check_descriptors()
    with StopRequest(restore=not plan.ends_process) as stop, ExitStack() as stack:
        for sink in plan.sinks:
            stack.callback(sink.close)
        acknowledge = partial(print, file=sys.stderr, flush=True)  # of a supervised rank: its log
        limit = stack.enter_context(StopLimit(stop, config.cluster.stop_within_s, acknowledge))
        limit.end = partial(_end_interrupted, plan, limit, None, ())
        # Role, task and devices. Errors of the user's input are raised here, before any process waits for another.
        ranks = roles(config, identity.world_size)
        role, trainers = ranks[identity.global_rank], sum(r.kind == "trainer" for r in ranks)
        if config.cluster.elastic and role.kind == "trainer":
            limit.limit_s = math.inf  # a signal asks it to leave, which may be refused
        set_role(role)
        stack.callback(set_role, None)
        task = make_task(config, plan.folders, plan.create_task)
        plan.on_task(role, task)
        log.info("task %s, defined in %s", type(task).__name__, source_file(type(task)))
        if identity.restarts_all:
            # The launcher starts all ranks again after a loss: those that live must not wait for others.
            cluster, server = replace(config.cluster, max_restarts=0), replace(config.server, on_loss="fail")
            config = replace(config, cluster=cluster, server=server)
        placement = place_rank(identity, ranks, config)
        process = ProcessContext(config, identity, role, trainers, placement, stop, timer, stop_limit=limit)
        if role.kind == "trainer":
            task.devices, task.config = process.placement.devices, config
            process.kept.callbacks = make_callbacks(task)
        if plan.writes_log and identity.global_rank != 0:
            check_log_folder(Path(config.logging.run_dir))
        timer.mark("task")
        if not mode_of(config).single_process:
            # TensorPipe and gloo read the interface from the environment when they start.
            choose_interface(process_environ(), config.cluster.interface, identity.master_addr)
        session = RankSession(plan, process, task, stack)
        while True:
            try:
                return session.run()
            except PeerLost as loss:
                session = session.after(loss)
            # The frames of the session, which its error holds, have to go before the next one connects.
            gc.collect()


@dataclass(frozen=True)
class Resize:
    """The trainers with which a run continues from a checkpoint.

    Their global ranks are in the order of their indices; the requests that are carried out, by their keys in the store.
    """

    trainer_ranks: tuple[int, ...]
    requests: Mapping[str, ResizeRequest]

    @property
    def newcomers(self) -> set[int]:
        return {request.global_rank for request in self.requests.values() if request.kind == "join"}


@dataclass
class RankSession:
    """One time of joining the run and taking part in it. A process has several if servers return to a checkpoint."""

    plan: RankPlan
    process: ProcessContext
    task: Task
    resources: ExitStack  # of the process, closed after its last session
    min_generation: int = 1  # the first generation of the servers that this session may join
    give_up_at: float | None = None  # ``time.monotonic()`` at which the servers must have returned; None before a loss
    store: Store | None = None  # on rank 0, that of an earlier session
    trainer_ranks: tuple[int, ...] | None = None
    resize: Resize | None = None  # on rank 0, the reason why this session begins, if that is a request
    # On rank 0, the processes of the trainers that were not lost, by their ranks; those of the earlier session first.
    processes: Mapping[int, str] = field(default_factory=dict)
    next_resize: Resize | None = field(default=None, init=False)
    generation: int = field(default=0, init=False)
    joined: bool = field(default=False, init=False)
    peer: str = field(default="", init=False)
    replaced: Sequence[int] = field(default=(), init=False)
    late: Sequence[int] = field(default=(), init=False)  # on rank 0, trainers that the generation was to have

    def run(self) -> dict[str, Any] | None:
        """Take part in the run until it ends; returns and raises as ``run_rank``."""
        plan, process = self.plan, self.process
        config, identity, timer = plan.config, plan.identity, process.startup_timer
        with ExitStack() as stack:
            rendezvous = None
            self._continue_generations()
            if not mode_of(config).single_process:
                if identity.global_rank == 0:
                    self._report("view")  # ranks that have finished must come back before the rendezvous is complete
                    if self.resize is not None and self.store is not None:
                        # Before the generation begins: a trainer that finds itself left out must know why.
                        mark_carried_out(job_store(self.store, identity), self.resize.requests)
                try:
                    rendezvous = join_rendezvous(
                        config,
                        identity,
                        threading.Event() if self._is_leaving else process.stop.event,
                        plan.listener,
                        generation=self.generation if identity.global_rank == 0 else self.min_generation,
                        store=self.store,
                        # Only a process that was started in the place of a dead one takes its rank; one that joins
                        # again ends if another process has its rank by now.
                        replaces=plan.replaces and not process.session,
                        resources=self.resources if identity.global_rank == 0 else stack,
                        trainer_ranks=self.trainer_ranks,
                        newcomers=() if self.resize is None else self.resize.newcomers,
                        joins=plan.joins,
                    )
                except LeftRun:
                    self._report("left")
                    log.info("rank %d has left the run, which continues without it", identity.global_rank)
                    return None
                # Again: the name of rank 0 may be known only now.
                choose_interface(process_environ(), config.cluster.interface, identity.master_addr)
                self.generation, self.store = rendezvous.generation, rendezvous.base
                self.late = [rank for rank in self.trainer_ranks or () if rank not in rendezvous.trainer_ranks]
                self.trainer_ranks, self.replaced = rendezvous.trainer_ranks, rendezvous.replaced(self.processes)
                process = replace(_in_generation(process, rendezvous), is_newcomer=self._is_newcomer)
                set_role(process.role)
                self.peer = rendezvous.holder_of_rank(0)
                if identity.global_rank != 0:
                    self._report("view")
            timer.mark("rendezvous")

            # The run folder belongs to rank 0. Its name also informs the other ranks that rank 0 is ready.
            checkpoints = None
            if identity.global_rank == 0:
                if plan.run is None:
                    self.plan = plan = self._with_run(rendezvous)
                checkpoints = stack.enter_context(_open_run(plan, process, self))
                run = checkpoints.run
                if rendezvous is not None:
                    rendezvous.record_run(run.name)
                    rendezvous.set("trainers_with_state", json.dumps(checkpoints.trainers_with_state))
                    rendezvous.set("origin", json.dumps(vars(checkpoints.origin)))
                    rendezvous.set("run", run.name)
            else:
                assert rendezvous is not None
                name = rendezvous.get("run")
                run = plan.run or RunDir(Path(config.logging.run_dir) / name)
            with self._reports_failure(rendezvous):
                if plan.writes_log:
                    stack.enter_context(_log_file(run, identity.global_rank))
                if process.role.kind == "trainer" and rendezvous is not None:
                    self._renew_task(process, json.loads(rendezvous.get("trainers_with_state")))
                if config.publish is not None and checkpoints is not None:
                    stack.enter_context(start_publisher(process, checkpoints))
                if config.simulations is not None:
                    coordinator = None
                    if checkpoints is not None:
                        coordinator = stack.enter_context(
                            start_coordinator(process, checkpoints, plan.folders, plan.restarted)
                        )
                    publisher = None if checkpoints is None else checkpoints.publisher
                    endpoint = publish_endpoint(process, coordinator, publisher, rendezvous)
                    process = replace(process, receiver_spec=endpoint)
            return self._work(process, checkpoints, rendezvous, run, stack)

    def _renew_task(self, process: ProcessContext, with_state: Sequence[int]) -> None:
        """Make the task anew if it has trained in an earlier generation, and this one begins without a state of it.

        The checkpoint that this generation begins with has the states of these trainers; none if there is none.
        """
        kept, earlier = process.kept, process.kept.generation
        kept.generation = self.generation
        has_trained = kept.started is self.task and earlier != self.generation
        if not has_trained or process.trainer_index in with_state:
            return
        plan, self.task = self.plan, make_task(self.plan.config, self.plan.folders, self.plan.create_task)
        plan.on_task(process.role, self.task)
        self.task.devices, self.task.config = process.placement.devices, process.config
        kept.callbacks = make_callbacks(self.task)
        kept.partition = kept.train = kept.validation = None

    @contextmanager
    def _reports_failure(self, rendezvous: Rendezvous | None) -> Iterator[None]:
        """Report an error in the block to rank 0, which waits for this rank."""
        try:
            yield
        except Exception as error:
            rank = self.plan.identity.global_rank
            if rendezvous is not None and rank != 0 and not isinstance(error, (PeerLost, Interrupted)):
                rendezvous.report_failure(RemoteError.reported_by(f"rank {rank}", error))
            raise

    def _continue_generations(self) -> None:
        """On rank 0, continue the count of generations, and with the trainers of the last one, also after a restart."""
        if self.process.identity.global_rank != 0 or self.plan.run is None:
            self.generation = self.min_generation
            return
        stored = LossLog(self.plan.run.losses_file)
        self.generation = max(self.min_generation, stored.generation + 1)
        if self.resize is not None:
            self.trainer_ranks = self.resize.trainer_ranks
        elif mode_of(self.plan.config).has_servers and self.plan.restarted and stored.trainer_ranks:
            self.trainer_ranks = tuple(stored.trainer_ranks)
        elif self.plan.config.cluster.elastic and self._returns_by_hand:
            # Others than the first trainers may wait for it, and of the first some may have left.
            servers, world_size = num_servers_of(self.plan.config), self.plan.identity.world_size
            first = range(servers, world_size)
            self.trainer_ranks = tuple(dict.fromkeys([*first, *stored.trainer_ranks]))

    @property
    def _returns_by_hand(self) -> bool:
        """Whether rank 0 was started again after its death, and not by a supervisor."""
        plan = self.plan
        return plan.writes_log and plan.resume and plan.run is not None and not plan.run.summary_file.exists()

    @property
    def _is_newcomer(self) -> bool:
        return self.plan.joins and self.process.kept.started is None

    @property
    def _is_leaving(self) -> bool:
        """Whether a signal to this process asks it to leave the run, which continues without it."""
        process = self.process
        elastic = process.config.cluster.elastic and process.role.kind == "trainer"
        return elastic and process.stop.event.is_set() and process.session > 0

    def _report(self, kind: str) -> None:
        """Report that this process begins a generation, or has left the run."""
        self._write(make_record(kind, None, rank=self.plan.identity.global_rank, view=self.generation))

    def _write(self, record: Record) -> None:
        """Write a record to what shows the run, not to the run folder."""
        for sink in self.plan.sinks:
            sink.write(record)

    def _with_run(self, rendezvous: Rendezvous | None) -> RankPlan:
        """On rank 0: continue the run of an earlier attempt of the launcher, or reserve the folder of a new one."""
        config = self.plan.config
        earlier = None if rendezvous is None else rendezvous.earlier_run()
        run = None if earlier is None else RunDir(Path(config.logging.run_dir) / earlier)
        if run is None or not run.config_file.is_file():  # a start that was refused removes its folder
            run = self.resources.enter_context(reserve_run(config))
            return replace(self.plan, run=run)
        self.resources.enter_context(run.reserve(resuming=True))
        resume = run.has_checkpoint()
        where = "its last checkpoint" if resume else "its beginning, as it has no checkpoint yet"
        log.warning("the ranks were started again: run %s continues from %s", run.name, where)
        return replace(self.plan, run=run, resume=resume, restarted=True)

    def _work(
        self,
        process: ProcessContext,
        checkpoints: CheckpointManager | None,
        rendezvous: Rendezvous | None,
        run: RunDir,
        stack: ExitStack,
    ) -> dict[str, Any] | None:
        config, identity, role, task = process.config, process.identity, process.role, self.task
        devices = ", ".join(str(device) for device in process.placement.devices)
        log.info("rank %d of %d: %s on %s, run %s", identity.global_rank, identity.world_size, role, devices, run.name)
        task.devices, task.config = process.placement.devices, config
        if checkpoints is not None:
            task.steps_origin = checkpoints.origin
        elif rendezvous is not None:
            task.steps_origin = Origin(**json.loads(rendezvous.get("origin")))

        trace_file = run.trace_file(identity.global_rank)
        process = replace(process, profiler=stack.enter_context(StepProfiler(config.profile, trace_file)))
        totals: list[TrainerTotals] = []
        work: Callable[[], Decision]
        if self.plan.report is not None:
            process = replace(process, end_now=partial(_end_now, self.plan.report, checkpoints, totals))
        limit = process.stop_limit
        # In a hook of its own such a process does nothing for others, and no other one can end the run.
        ends_alone = role.kind == "server" or mode_of(config).single_process
        limit.at_limit = partial(_on_limit, run.log_file(identity.global_rank), limit if ends_alone else None)
        limit.end = partial(_end_interrupted, self.plan, limit, checkpoints, totals)
        if role.kind == "trainer":
            own_class = trainer_class(config, self.plan.folders)
            # Other ranks than those of a supervisor have the log on the console.
            supervised_first = not (self.plan.writes_log or self.plan.replaces or process.session)
            if supervised_first and role.trainer_index == 0 and former_name_is_used():
                self._write(make_record("note", None, rank=identity.global_rank, text=FORMER_NAME_NOTE))
            trainer = own_class(process, task, checkpoints, rendezvous)
            work = partial(_train, trainer, totals, self)
            self._watch(stack, run, lambda: (trainer.step, trainer.progress.batch_idx))
        else:
            assert rendezvous is not None
            if checkpoints is not None:
                monitor = checkpoints.monitor
                self._watch(stack, run, lambda: monitor.step)
            work = partial(_serve, process, task, checkpoints, rendezvous, totals, self, stack)
        if checkpoints is not None:
            return _run_and_summarize(checkpoints, work, totals, limit)
        try:
            _reason(work())
        except Interrupted as interrupted:
            raise Interrupted(f"interrupted ({interrupted})") from interrupted
        return None

    def _watch(self, stack: ExitStack, run: RunDir, progress: Callable[[], object]) -> None:
        """Write the stacks of this process to its log if it makes no step for long."""
        if self.plan.ends_process:
            config, log_file = self.plan.config, run.log_file(self.process.identity.global_rank)
            log_file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(Watchdog(log_file, progress, config.cluster.timeout_s))

    def mark_joined(self) -> None:
        """Record that the servers have accepted this process."""
        self.joined = True

    def after(self, loss: PeerLost) -> RankSession:
        """Return the session that follows a loss; raise ``loss`` if the run cannot continue here."""
        plan, process = self.plan, self.process
        self._check_interrupt(loss)
        # Without servers no process holds the state of the run that the others could return to.
        if not mode_of(process.config).has_servers:
            raise loss
        min_generation, give_up_at = self._next_generation(loss)

        # The limit counts from the loss, through all attempts to join that have failed since then.
        now, timeout_s = time.monotonic(), process.config.cluster.timeout_s
        if self.joined or give_up_at is None:
            give_up_at = now + timeout_s
        if now > give_up_at:
            raise MissingRanks(f"{loss}; it did not return within cluster.timeout_s ({timeout_s:g} s)") from loss
        log.warning("%s; this process joins again", loss)
        process.stop.event.wait(_REJOIN_S)

        # Rank 0 keeps its store, and continues from the last checkpoint.
        store = None
        if process.identity.global_rank == 0:
            assert plan.run is not None
            plan, store = replace(plan, resume=plan.run.has_checkpoint(), restarted=True), self.store
        return replace(
            self,
            plan=plan,
            process=replace(process, session=process.session + 1),
            min_generation=min_generation,
            give_up_at=give_up_at,
            store=store,
            resize=self.next_resize,
        )

    def _check_interrupt(self, loss: PeerLost) -> None:
        """Raise what a signal that this process has received makes of a loss."""
        process = self.process
        # A signal ends this process, unless it asks a trainer to leave: that one joins again, to ask again.
        leaves = process.config.cluster.elastic and process.role.kind == "trainer"
        if leaves or not process.stop.event.is_set():
            return
        if isinstance(loss, GenerationChanged):
            raise Interrupted(f"interrupted ({process.stop.state()[1]}) between two generations of the run") from loss
        raise loss

    def _next_generation(self, loss: PeerLost) -> tuple[int, float | None]:
        """Return which generation to join after a loss, and until when; raise ``loss`` if this process does not join.

        The time is None if it counts from now.
        """
        if isinstance(loss, GenerationChanged):
            return self.generation + 1, None
        if not self._may_join_after(loss):
            raise loss
        if isinstance(loss, Unreachable):
            return self.generation + 1, self.give_up_at  # rank 0 begins it, as this was reported
        min_generation = max(self.generation, self.min_generation)
        if isinstance(loss, Evicted):
            # By the rendezvous, where the process of rank 0 is not known yet: no later generation has this rank. Or by
            # a living server that knows this process's contexts by an id that it has used.
            if not self.peer or server_computes(self.process.config):
                raise loss
            return min_generation, None
        # A supervisor ends a server that is frozen and starts another one; elsewhere the scheduler must.
        rank = self.process.identity.global_rank
        self._write(make_record("lost", None, rank=rank, peer=self.peer, text=str(loss)))
        return min_generation, self.give_up_at

    def _may_join_after(self, loss: PeerLost) -> bool:
        """Return whether this process may join another generation after a loss that ended its session."""
        if isinstance(loss, (PeerFailed, RunEnded)):
            return False
        is_unreachable = isinstance(loss, Unreachable)
        if self._is_newcomer and is_unreachable:
            return False
        if self.process.identity.global_rank == 0 or self.process.config.cluster.max_restarts == 0:
            return False
        # Before the first time, the user learns at once that rank 0 is gone; a supervisor starts it again.
        is_first_time = not (self.joined or is_unreachable) and self.give_up_at is None
        return not (self.plan.writes_log and is_first_time)


def _in_generation(process: ProcessContext, rendezvous: Rendezvous) -> ProcessContext:
    """Return the context of a process in a generation, which may have other trainers than the run began with."""
    ranks, role, rank = rendezvous.trainer_ranks, process.role, process.identity.global_rank
    config = with_trainers(process.config, len(ranks))
    if role.kind == "trainer":
        role = replace(role, trainer_index=ranks.index(rank))
    identity = replace(process.identity, world_size=world_size_of(config))
    return replace(process, config=config, identity=identity, role=role, trainers=len(ranks))


def place_rank(identity: ProcessIdentity, ranks: Sequence[Role], config: Config) -> Placement:
    """Return the devices of a rank.

    Raises:
        UnsupportedConfiguration: they are not there.
    """
    require_visible_gpus(config, allocated_gpus(process_environ()))
    if ranks[identity.global_rank].kind == "server":
        return place_server(config)
    # Servers of this host do not count: the trainers divide its GPUs.
    trainers_here = [rank for rank in identity.ranks_here if ranks[rank].kind == "trainer"]
    return place_trainer(config, trainers_here.index(identity.global_rank), len(trainers_here))


@contextmanager
def _log_file(run: RunDir, global_rank: int) -> Iterator[None]:
    """Write the log of this rank on its own host. An error that ends the rank is the last entry."""
    with explain_not_writable(f"run folder {run.path}"):
        run.logs_dir.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(run.log_file(global_rank), encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("paramserver").addHandler(handler)
    try:
        yield
    except BaseException as error:
        # To this file only: the console prints the error of the run once, at the end.
        text, stack = kind_and_message(error), None if isinstance(error, Interrupted) else sys.exc_info()
        handler.emit(log.makeRecord(log.name, logging.ERROR, __file__, 0, "%s", (text,), stack))
        raise
    finally:
        logging.getLogger("paramserver").removeHandler(handler)
        handler.close()


# Rank 0: the run folder and the summary.


def _begin_losses(
    plan: RankPlan, process: ProcessContext, session: RankSession, run: RunDir, first_step: int
) -> LossLog:
    """Record that a session begins at ``first_step``, and why; return the account of the losses of the run."""
    losses, generation, ranks = LossLog(run.losses_file), session.generation, session.trainer_ranks or ()
    if session.resize is not None:
        losses.resize(generation, ranks)
    elif plan.restarted:
        # A process that has served before recorded the loss; this one takes the place of one that could not.
        names_itself = mode_of(process.config).has_servers and plan.replaces and not process.session
        lost = f"{process.role} started again" if names_itself else ""
        losses.return_to(first_step, furthest_step(run.metrics_file), generation, ranks, lost)
    else:
        losses.begin(generation, ranks)
    if late := sorted(set(session.late) - (set() if session.resize is None else session.resize.newcomers)):
        losses.add_fault(first_step, f"{process.identity.name(*late)} did not join; the run continues without")
    for rank in session.replaced:  # no server noticed it: the trainer had left the earlier generation
        text = "is lost between two generations of the run, and another process takes its place"
        losses.add_fault(first_step, f"trainer {ranks.index(rank)} {text}")
        losses.add_restart()
    return losses


@contextmanager
def _open_run(plan: RankPlan, process: ProcessContext, session: RankSession) -> Iterator[CheckpointManager]:
    """Create or lock the run folder, write its files, and yield the manager of its checkpoints."""
    config, run = process.config, plan.run
    assert run is not None
    with ExitStack() as stack:
        stack.enter_context(run.lock(plan.resume))
        from_memory = move_to_disk(run.path)
        # Read everything that a resume or init_from needs before the first file changes.
        resume = load_for_resume(config, run) if plan.resume else None
        weights = _initial_weights(config) if resume is None else None
        if config.checkpoint.memory_every is not None and not plan.restarted:
            check_memory_folder(Path(config.checkpoint.memory_folder))
        own_sinks = make_sinks(config.logging.sinks, plan.folders)
        prometheus: Prometheus | None = None
        if (port := config.logging.prometheus_port) is not None:
            host, interface = process.identity.master_addr, chosen_interface(process_environ())
            listener = bind_listener(host, port, interface, "logging.prometheus_port")
            prometheus = Prometheus(listener, run.name)
            stack.callback(prometheus.close)
            own_sinks.append(prometheus)
        first_step = 0 if resume is None else resume.checkpoint.step
        losses = _begin_losses(plan, process, session, run, first_step)
        remove_leftovers(run.checkpoints_dir)
        run.remove_half_written()
        run.summary_file.unlink(missing_ok=True)
        # As the user gave them; see ``run_rank``.
        cluster = replace(config.cluster, max_restarts=plan.config.cluster.max_restarts)
        server = replace(config.server, on_loss=plan.config.server.on_loss)
        write_text(run.config_file, dump_yaml(replace(config, cluster=cluster, server=server)))
        about = environment_record(list(plan.command))
        if plan.restarted:  # a further session of the same start
            about["started"] = read_mapping(run.environment_file, json.loads).get("started", about["started"])
        if not mode_of(config).single_process:
            identity = process.identity
            address = {"master_addr": identity.master_addr, "master_port": identity.master_port}
            about["store"] = {**address, "job": identity.job}
            about["launch"] = launch_name(identity)
        about["name"] = run.name  # a copy of the run is in a folder of another name
        about["folders"] = [str(folder.resolve()) for folder in plan.folders]
        about["task"] = source_file(type(session.task))
        write_json(run.environment_file, {**about, "device": str(process.placement.device)})
        purge_step = first_step if resume is not None or plan.restarted else None
        if purge_step is not None:
            supersede_metrics(run.metrics_file, purge_step, () if resume is None else kinds_recorded_later(resume.run))
        sinks: list[Sink] = [JsonLines(run.metrics_file)]
        if config.logging.tensorboard:
            kept = [] if purge_step is None else list(read_records(run.metrics_file, purge_step))
            sinks.append(TensorBoard(run.tensorboard_dir, purge_step, kept))
        if "csv" in config.logging.sinks:
            sinks.append(Csv(run.csv_file, run.metrics_file))
        fan_out = FanOut([*sinks, *own_sinks], kept=plan.sinks)
        monitor = RunMonitor(config, fan_out, run.summary_file, losses)
        fan_out.on_failure = monitor.sink_failed
        checkpoints = CheckpointManager(config, run, monitor, resume, weights, session.generation)
        monitor.run_started(
            make_record(
                "start",
                monitor.step,
                rank=0,
                first_step=monitor.step if losses.first_step is None else losses.first_step,
                name=run.name,
                mode=config.mode,
                world_size=process.identity.world_size,
                total_steps=config.training.max_steps,
                total_samples=config.training.max_samples,
                run_dir=str(run.path),
                resumed=resume is not None,
            )
        )
        if from_memory is not None:
            monitor.note(from_memory)
        if session.late:
            monitor.note(f"{process.identity.name(*session.late)} did not join; the run continues without")
        if (backups := config.server.backup_trainers) != (given := plan.config.server.backup_trainers):
            monitor.note(f"server.backup_trainers is {backups} and not {given}, as there are too few trainers for more")
        if prometheus is not None:
            monitor.note(f"Prometheus can scrape this run at {prometheus.address}")
        try:
            yield checkpoints
        except BaseException:
            if not checkpoints.is_closed:  # such as an error before the work began, which has no summary
                checkpoints.suspend()
            raise


def _initial_weights(config: Config) -> tuple[Any, str, Sequence[str]] | None:
    """Load the weights that ``init_from`` names: a model.pt, or the verified one of a run's newest checkpoint."""
    if config.init_from is None:
        return None

    path = Path(config.init_from)
    try:
        if path.is_dir():
            checkpoint, (weights, run) = load_chosen(path, LATEST, "model", "run")
            return weights, str(checkpoint.file_path("model")), run.get("late_buffers", ())
        return _state_dict(path), str(path), ()
    except (CheckpointError, OSError) as error:  # OSError: such as a name that is too long for a file
        raise CheckpointError(
            f"init_from ({path}): {error}; give a run, the model.pt of a checkpoint, or what "
            "torch.save(model.state_dict(), ...) wrote"
        ) from error


# Under these names other frameworks keep the weights, together with other things.
_INNER = ("state_dict", "model_state_dict", "model", "module", "weights", "net")


def _state_dict(path: Path) -> Any:
    """Load what a file of ``torch.save`` holds.

    Raises:
        CheckpointError: it is another file, or holds weights together with other things.
    """
    from paramserver.checkpoint.serialization import load_archive

    found = load_archive(path)  # ``load_weights`` compares it with the model
    held = found if isinstance(found, Mapping) else {}
    if inner := next((name for name in _INNER if isinstance(held.get(name), Mapping)), None):
        raise CheckpointError(
            f"{path} holds the weights under {inner!r}, together with other things; store that entry in a file of "
            "its own"
        )
    return found


def _run_and_summarize(
    checkpoints: CheckpointManager, work: Callable[[], Decision], totals: Sequence[TrainerTotals], limit: StopLimit
) -> dict[str, Any]:
    """Run ``work``, which returns the decision that ended the run, and write the summary, however it ends.

    ``work`` fills ``totals``. The limit is paused while files are written.
    """
    try:
        reason = _reason(work())
    except GenerationChanged:
        checkpoints.suspend()  # the run continues in another session
        raise
    except Interrupted as interrupted:
        failure = checkpoints.monitor.failure
        with limit.paused():
            if failure is None:
                checkpoints.close("interrupted", totals, str(interrupted))
            else:
                checkpoints.close("failed", totals, error=failure)
        raise _interruption(checkpoints, str(interrupted)) from interrupted
    except BaseException as error:
        # A PeerFailed already names the rank and its error.
        text = str(error) if isinstance(error, PeerFailed) else kind_and_message(error)
        checkpoints.close("failed", totals, error=text)
        raise
    with limit.paused():
        summary = checkpoints.close("completed", totals, reason)
    if summary["status"] == "failed":
        raise TrainingError(summary["error"])
    return summary


def _interruption(checkpoints: CheckpointManager, reason: str) -> ParamserverError:
    """Return the error of a run that ends for ``reason``, with what was saved. ``checkpoints`` are closed.

    It is another one where simulations failed.
    """
    step, started_from, last = checkpoints.monitor.step, checkpoints.checkpoint, checkpoints.last_checkpoint
    saved = "nothing was saved yet"
    if started_from is not None and step == started_from.step:
        command = f"python -m paramserver.launch --resume {shlex.quote(str(started_from.path))}"
        saved = f"no step was made, so the run is as it was before. Resume with: {command}"
        if checkpoints.writer.written:
            saved = f"no step was made, and its checkpoint has what was received. Resume with: {command}"
    elif last is not None:
        is_last = last == step_name(step)
        which = "its checkpoint is written" if is_last else f"the last checkpoint is {last}"
        saved = f"{which}. Resume with: {checkpoints.run.resume_command}"
    if checkpoints.monitor.failure is not None:
        error = SourceError(f"no more samples come: {checkpoints.monitor.failure}; after step {step}: {saved}")
        error.self_explanatory = True
        return error
    return Interrupted(f"interrupted ({reason}) after step {step}; {saved}")


def _on_limit(log_file: Path, limit: StopLimit | None, place: str) -> None:
    """If this process is in a hook, append all stacks to its log; end it soon if that is the main thread.

    Without ``limit`` only the main thread counts, and it is not ended sooner.
    """
    if place and limit is not None:
        limit.hurry()
    elif limit is not None:
        place = place_of_user_code()  # such as an update on a server
    if place and log_file.parent.is_dir():
        with log_file.open("a") as file:
            print(f"a request to stop has not ended {place}:", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)


def _end_interrupted(
    plan: RankPlan,
    limit: StopLimit,
    checkpoints: CheckpointManager | None,
    totals: Sequence[TrainerTotals],
    place: str,
) -> None:
    """End this process, which has not ended by itself, in the thread of ``StopLimit``."""
    what = f"did not return from {place}" if place else "did not end"
    reason = f"{limit.stop.state()[1]}; {plan.identity.name()} {what} {limit.limit_text}"
    if plan.report is not None:
        _end_now(plan.report, checkpoints, totals, Interrupted(reason))
    limit.stop.raise_in_main_thread(Interrupted(reason))


def _end_now(
    report: Callable[[BaseException], int],
    checkpoints: CheckpointManager | None,
    totals: Sequence[TrainerTotals],
    error: ParamserverError,
) -> NoReturn:
    """End this process in another thread than the main one, which does not react."""
    try:
        log.warning("the main thread of this process waits or computes, so the process ends without it")
        if checkpoints is not None and not checkpoints.is_closed:
            status = "interrupted" if isinstance(error, Interrupted) else "failed"
            texts = (str(error), None) if isinstance(error, Interrupted) else ("", kind_and_message(error))
            # The main thread may hold any lock, so this may never return.
            limit_s = LAST_WRITE_S if checkpoints.writer.pending() else _CLOSE_S
            with suppress(DeadlineExceeded):
                call_with_timeout(limit_s, "the summary", lambda: checkpoints.close(status, totals, *texts))
        if isinstance(error, Interrupted):
            interrupted = Interrupted(f"interrupted ({error})")
            error = interrupted if checkpoints is None else _interruption(checkpoints, str(error))
    finally:
        try:
            report(error)
            sys.stderr.flush()
        finally:
            os._exit(error.exit_code)


def _reason(decision: Decision) -> str:
    """Return why the run ended; raise ``Interrupted`` if that was a signal, ``GenerationChanged`` if it continues."""
    if decision.resizes:
        raise GenerationChanged(decision.reason)
    if decision.interrupted:
        raise Interrupted(decision.reason)
    return decision.reason


# The work of each role.


def _serve(
    process: ProcessContext,
    task: Task,
    checkpoints: CheckpointManager | None,
    rendezvous: Rendezvous,
    totals: list[TrainerTotals],
    session: RankSession,
    stack: ExitStack,
) -> Decision:
    """Serve until the run ends. ``stack`` closes what this opens, after the last checkpoint and the summary.

    The shutdown of torch's RPC agent is what may still crash or hang by then (docs/torch-notes.md).
    """
    # Imported here: trainers start without these modules.
    from paramserver.distributed.local_calls import LocalCallServer
    from paramserver.distributed.membership import release_liveness_calls
    from paramserver.distributed.rpc_calls import handle_deferred, register_server, unregister_servers
    from paramserver.distributed.session import SERVER_NAME, rpc_server, tcp_server
    from paramserver.optim.parallel_step import ThreadTeam, num_spare_threads
    from paramserver.server.build import build_server
    from paramserver.server.server_run import UpdateExecutor
    from paramserver.server.shard_process import serve_shard
    from paramserver.transport.segments import SegmentHost

    if checkpoints is None:
        return serve_shard(process, task, rendezvous, session.mark_joined)
    config = process.config

    def on_trainer_lost(member: Member) -> None:
        # First: from here on simulations wait for the process that takes this place.
        if checkpoints.simulations is not None:
            checkpoints.simulations.trainer_lost(member.index)
        rendezvous.release_rank(rendezvous.trainer_ranks[member.index], member.host_and_pid)

    segments = local_calls = None
    if config.server.shares_memory:
        segments = stack.enter_context(SegmentHost("paramserver", config.cluster.timeout_s))
        local_calls = stack.enter_context(LocalCallServer(handle_deferred, config.cluster.timeout_s))
    updates = stack.enter_context(closing(UpdateExecutor(config.cluster.timeout_s)))
    server = build_server(
        task,
        config,
        process.trainers,
        checkpoints,
        process.stop,
        segments,
        on_trainer_lost,
        local_calls,
        updates.submit,
    )
    updates.before_job = lambda: process.profiler.enter_step(server.shard.version)
    # Registered before the agent starts: its first call may arrive at once.
    register_server(server)
    register_server(server.roster.coordinator)
    stack.callback(unregister_servers)
    # Spare cores help with an update only while all trainers wait for it.
    idle = num_servers_of(config) == 1 and server.aggregator.rules.lockstep
    if idle and (helpers := num_spare_threads(num_usable_cores())):
        server.shard.use_threads(stack.enter_context(closing(ThreadTeam(helpers))))
    stack.enter_context(rpc_server(rendezvous, process.trainers * server_computes(config)))
    if config.server.connects:
        stack.enter_context(tcp_server(rendezvous, SERVER_NAME))
    try:
        _wait_until_finished(server, process, rendezvous, session, updates)
        server.roster.members.wait_for_disconnects(_DISCONNECT_S)  # no live trainer needs this server any more
    finally:
        totals.extend(server.roster.all_totals())
        members = server.roster.members.not_lost()
        session.processes = {rendezvous.trainer_ranks[one.index]: one.host_and_pid for one in members}
        if num_servers_of(config) > 1:
            with process.stop_limit.paused():
                checkpoints.wait_written(LAST_WRITE_S)  # writers may read rows of the other servers
            if checkpoints.writer.lost is not None:
                server.run.fail(checkpoints.writer.lost)
        server.roster.coordinator.shut_down(server.run.error or server.run.last_decision, _DISCONNECT_S)
        # While the agent still runs: without it trainers would take the end for a loss.
        release_liveness_calls()
        # Before the caller closes the checkpoints and the summary: nothing is applied or staged after that.
        updates.close()
    if server.run.error is not None:
        if server.roster.started:
            session.next_resize = None  # its requests are read again in the next generation
        raise server.run.error
    decision = server.run.last_decision
    assert decision is not None
    return replace(decision, reason="; ".join([decision.reason, *server.roster.left_behind]))


def _wait_until_finished(
    server: ParameterServer,
    process: ProcessContext,
    rendezvous: Rendezvous,
    session: RankSession,
    updates: UpdateExecutor,
) -> None:
    """Check heartbeats and requests until the server has finished; fail it if not all processes join in time."""
    config, limit = process.config, process.stop_limit
    deadline = time.monotonic() + config.cluster.timeout_s
    over_at: float | None = None
    while not server.run.finished.wait(config.server.heartbeat_s):
        limit.beat()
        server.roster.check_heartbeats()
        if server.run.finished.is_set():
            continue
        if (unreachable := rendezvous.unreachable()) is not None:
            server.roster.reconnect(unreachable)
            continue
        if server.roster.started:
            _resize(server, process, rendezvous, session, server.roster.check_absences())
            if process.stop.event.is_set():
                with server.run.lock:
                    server.aggregator.request_stop()
            if limit.is_over:
                over_at = over_at or time.monotonic()
                over_s = time.monotonic() - over_at
                if not _end_stuck_update(server, process, updates, over_s):
                    _end_without(server, limit, rendezvous.trainer_ranks, over_s)
            continue
        missing = server.roster.missing()
        if missing and (late := _absent(server, rendezvous, session, time.monotonic() > deadline)):
            text = f"{process.identity.name(*late)} did not join; the run continues without"
            newcomers = set() if session.resize is None else session.resize.newcomers
            session.next_resize = Resize(tuple(r for r in rendezvous.trainer_ranks if r not in late), {})
            report = server.aggregator.monitor.add_fault if late - newcomers else server.aggregator.monitor.note
            report(text)
            server.run.fail(GenerationChanged(text))
            continue
        # Once all have joined, failures reach the server over RPC.
        if missing and (failure := rendezvous.reported_failure()) is not None:
            server.run.fail(failure.error())
        elif missing and process.stop.event.is_set():
            server.run.fail(Interrupted(f"{process.stop.state()[1]} before {', '.join(missing)} had arrived"))
        elif missing and time.monotonic() > deadline:
            names, limit_s = ", ".join(missing), config.cluster.timeout_s
            server.run.fail(MissingRanks(f"{names} did not arrive within cluster.timeout_s ({limit_s:g} s)"))


def _end_stuck_update(server: ParameterServer, process: ProcessContext, updates: UpdateExecutor, over_s: float) -> bool:
    """End the run, soon after the limit of a request to stop, if an update on a server does not return from a hook.

    Return whether there is such an update. No trainer is lost for it.
    """
    places = server.roster.coordinator.stuck_places()
    if own := updates.stuck_place():
        places[0] = own
    if places and over_s > HURRY_S and not server.run.finished.is_set():
        index, text = min(places), process.stop_limit.limit_text
        stuck = f"rank {index} (server {index}) did not return from {places[index]} {text}"
        server.run.fail(Interrupted(f"{process.stop.state()[1]}; {stuck}"))
        updates.abandon()
    return bool(places)


def _end_without(server: ParameterServer, limit: StopLimit, ranks: Sequence[int], over_s: float) -> None:
    """End the run without the trainers that do not, ``over_s`` seconds after the limit of a request to stop."""
    if over_s < 2 * GRACE_S:
        server.roster.end_without(limit.limit_text, ranks, also_waiting=over_s >= GRACE_S)
    elif not (server.roster.members.present() or server.roster.saves_alone):
        # An update that is in no code of the user does not end.
        reason = "; ".join([limit.stop.state()[1], *server.roster.left_behind])
        server.run.fail(Interrupted(f"{reason}; an update that was in progress did not end {limit.limit_text}"))


def _absent(server: ParameterServer, rendezvous: Rendezvous, session: RankSession, is_late: bool) -> set[int]:
    """Return the ranks of trainers without which a generation has to begin anew: the others have joined, or will.

    These are newcomers that failed, and in a later generation than the first all that are late.
    """
    config, missing = server.config, {rendezvous.trainer_ranks[i] for i in server.roster.missing_trainers()}
    requests = pending_requests(rendezvous.root)
    withdrawn = {key: r for key, r in requests.items() if r.kind == "leave" and r.global_rank in missing}
    mark_carried_out(rendezvous.root, withdrawn)
    absent = {request.global_rank for request in withdrawn.values()}
    if is_late and len(missing) == len(server.roster.missing()):
        newcomers = set() if session.resize is None else session.resize.newcomers
        continues = rendezvous.generation > 1 and config.server.on_loss != "fail" and config.simulations is None
        absent |= missing if continues else missing & newcomers
    return absent if len(absent) < len(rendezvous.trainer_ranks) else set()


def _resize(
    server: ParameterServer, process: ProcessContext, rendezvous: Rendezvous, session: RankSession, given_up: set[int]
) -> None:
    """Carry out the requests of trainers, and continue without those that are given up, in another generation."""
    config, ranks = process.config, rendezvous.trainer_ranks
    requests = pending_requests(rendezvous.root)
    if server.aggregator.ended:
        if server.aggregator.ends_run:
            refuse(rendezvous.root, requests, OVER)
        return
    if requests and not _can_resize(server, config, rendezvous, requests):
        requests = {}

    # With which trainers the run continues. Those that are given up are left out; one that asks to leave is refused
    # where the others cannot do without it.
    lost = [ResizeRequest("leave", ranks[index]) for index in sorted(given_up)]
    wanted = resized(ranks, [*requests.values(), *lost])
    if too_few := _why_too_few(server, config, wanted):
        leaves = [key for key, request in requests.items() if request.kind == "leave"]
        refuse(rendezvous.root, leaves, too_few)
        requests = {key: request for key, request in requests.items() if key not in leaves}
        wanted = resized(ranks, [*requests.values(), *lost])

    # What follows: the end of the run, nothing, or another generation, for which all trainers stop after their step.
    if not wanted:
        mark_carried_out(rendezvous.root, requests)
        process.stop.request("all trainers leave")
        return
    if wanted == ranks:
        mark_carried_out(rendezvous.root, requests)
        return
    if session.next_resize is None or session.next_resize.trainer_ranks != wanted:
        limit_s = config.cluster.timeout_s
        reasons = [str(request) for request in requests.values()]
        reasons += [f"no process took the place of rank {one.global_rank} within {limit_s:g} s" for one in lost]
        reason = ", ".join(reasons)
        session.next_resize = Resize(wanted, requests)
        trainers = "1 trainer" if len(wanted) == 1 else f"{len(wanted)} trainers"
        server.aggregator.monitor.note(f"{reason}: the run continues with {trainers}")
        with server.run.lock:
            server.aggregator.request_resize(reason)


def _can_resize(
    server: ParameterServer, config: Config, rendezvous: Rendezvous, requests: Mapping[str, ResizeRequest]
) -> bool:
    """Return whether requests can be carried out now: refused ones are answered, those that have to wait read again."""
    if not config.cluster.elastic:
        refuse(rendezvous.root, requests, "cluster.elastic (False) must be true for trainers to join or leave; set it")
        return False
    if not server.roster.knows_data:
        return False  # later
    if not server.roster.can_divide_data():
        refuse(
            rendezvous.root,
            requests,
            "the data of this run cannot be divided among other trainers; give a map-style data set, or an iterable "
            "with state_dict, load_state_dict and reshard",
        )
        return False
    return server.roster.has_all_buffers()  # else later


def _why_too_few(server: ParameterServer, config: Config, wanted: Sequence[int]) -> str:
    """Return why the run cannot continue with so few trainers, and the cure; empty if it can, or if all leave."""
    if wanted and not server.roster.has_room(len(wanted)):
        return (
            "the buffers of the trainers that remain may have no room for the samples that must stay; let as many join "
            "as leave, or give a map-style data set, without buffer.max_bytes"
        )
    if wanted and len(wanted) <= (backups := config.server.backup_trainers):
        return (
            f"server.backup_trainers ({backups}) must be less than the trainers that remain ({len(wanted)}); let as "
            "many join as leave"
        )
    return ""


def trainer_class(config: Config, folders: Sequence[Path]) -> type[Trainer]:
    """Import the trainer of a run.

    Raises:
        UnsupportedConfiguration: it is no trainer, or for another mode or the other value of ``server.compute``.
    """
    from paramserver.trainers import Trainer

    found = load_object(trainer_of(config), "trainer", folders)
    if not (isinstance(found, type) and issubclass(found, Trainer)):
        raise UnsupportedConfiguration(
            f"trainer ({config.trainer}) must be a class derived from one in paramserver.trainers; derive it, or leave "
            "the key out"
        )
    if found.for_mode not in (None, config.mode):
        raise UnsupportedConfiguration(
            f"trainer ({config.trainer}) is for mode {found.for_mode}, and the config has {config.mode}; derive it "
            "from the class in paramserver.trainers that fits, or change mode"
        )
    if found.computes not in (None, config.server.compute):
        raise UnsupportedConfiguration(
            f"trainer ({config.trainer}) is for server.compute: {found.computes}, and the config has "
            f"{config.server.compute}; derive it from the class in paramserver.trainers that fits, or change "
            "server.compute"
        )
    return found


def _train(trainer: Trainer, totals: list[TrainerTotals], session: RankSession) -> Decision:
    from paramserver.trainers.base import TrainingLoop

    try:
        return TrainingLoop(trainer).run()
    except SystemExit as error:
        # Otherwise the other ranks would take this one's exit for a success.
        raise TrainingError(
            f"trainer {trainer.trainer_index}: the task ended its process (SystemExit: {error.code}) before the "
            "run was over; raise an exception instead"
        ) from error
    finally:
        session.joined = session.joined or trainer.control.joined
        totals.extend(trainer.control.all_totals)
