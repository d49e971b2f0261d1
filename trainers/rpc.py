"""A trainer of the parameter server: pull a version, compute, push the gradients."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor

from paramserver.checkpoint import write_chunks
from paramserver.checkpoint.sender import BackgroundSender
from paramserver.consistency import Announcement, Decision, Verdict
from paramserver.context import ProcessContext
from paramserver.distributed.membership import Member, release_liveness_calls
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.distributed.rpc_calls import RemoteError, tensor_bytes
from paramserver.distributed.session import rpc_trainer
from paramserver.errors import PeerLost, PeerRefused, TaskError, UnsupportedConfiguration
from paramserver.metrics.records import Record, StepReport, StepResult, TrainerTotals, WeightedSums
from paramserver.optim.distributed_optimizer import SharedOptimizer
from paramserver.parameters.flat import FlatLayout, module_buffers, trainable_parameters
from paramserver.parameters.model import build_model, load_weights, detached_state_dict
from paramserver.runs.checkpoint_manager import CheckpointManager
from paramserver.server.client import ServerClient
from paramserver.task import Task
from paramserver.transport.base import GradientBucket, TrainerTransport
from paramserver.transport.messages import JoinReply, StepGrant, VersionView
from paramserver.transport.rpc import RpcTrainerTransport, ShardedTrainerTransport
from paramserver.transport.segments import can_attach
from paramserver.transport.shared_memory import SharedMemoryTrainerTransport
from trainers.base import Trainer, overrides
from trainers.gradient_buckets import GradientBuckets

log = logging.getLogger("paramserver")

_SEND_EVERY_S = 1.0


class InFlightCall:
    """A call that is under way while this trainer does something else.

    Args:
        future: of its answer.
    """

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self.future = future
        self._began_s = time.perf_counter()
        self._answered_s: float | None = None
        future.add_done_callback(self._note)

    def _note(self, _: torch.futures.Future[Any]) -> None:
        self._answered_s = time.perf_counter()

    def beside_s(self) -> float:
        """How long it went on until now, or until it was answered."""
        return (self._answered_s or time.perf_counter()) - self._began_s


class RpcTrainer(Trainer):
    """Steps a ``DistributedOptimizer`` that all trainers share; each step is one distributed-autograd context."""

    computes = "trainer"

    def __init__(
        self,
        process: ProcessContext,
        task: Task,
        checkpoints: CheckpointManager | None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        super().__init__(process, task, checkpoints)
        assert rendezvous is not None
        self.rendezvous = rendezvous
        self._arrived = False
        self._context_id = 0
        self._next: StepGrant | None = None
        self._sent = time.monotonic()
        self._leaving: dict[GradientBucket, InFlightCall] = {}
        # What is changed through ``grad.data`` after backward cannot be noticed, so nothing leaves before those hooks.
        self._sends_early = not overrides(task, Task.on_batch_end) and not overrides(self, Trainer.on_after_backward)

    # The connection.

    def init_connection(self) -> None:
        self.model = build_model(self.task, self.config.seed, self.process.placement)
        self.prepare_data()
        self.connect()
        self.join(self.arrive())

    def connect(self) -> None:
        """Make the servers reachable."""
        servers = self.config.cluster.num_servers
        self._name, self._worker_id = self.open(rpc_trainer(self.rendezvous, self.trainer_index, servers))
        self.remote = ServerClient(self.config, self.trainer_index)
        self.open(self._goodbye())
        self._courier = self.open(BackgroundSender(self.config.checkpoint.background, "a part of a checkpoint"))

    def arrive(self) -> JoinReply:
        """Take a place among the trainers, once this one is ready to step."""
        member = Member(self.trainer_index, self._name, self._worker_id, self.rendezvous.host_and_pid)
        self.remote.start_heartbeat()
        welcome: JoinReply = self.remote.call_later(
            "arrive", member, self.data.epoch_samples, timeout_s=self.config.cluster.timeout_s
        )
        self._arrived = True
        return welcome

    def join(self, welcome: JoinReply) -> None:
        """Begin where the server is."""
        self.step = welcome.step
        self.lockstep = welcome.lockstep
        self.hold(welcome)
        self.optimizer = SharedOptimizer(self.remote)
        self.on_after_setup_optimizers()
        self.begin_stream(welcome.stored_part)
        self.process.startup_timer.mark("connection")

    def hold(self, welcome: JoinReply) -> None:
        """Make the model that of the server, and open the way by which it stays so."""
        load_weights(self.model, {**detached_state_dict(self.model), **welcome.model}, "the server")
        self._lay_out(welcome.parameter_layout, welcome.buffer_layout)
        self.way = self._way(welcome)
        self._departures = self.open(closing(GradientBuckets(self.way, self._parameters, self._send_early)))
        log.info("trainer %d: parameters and gradients travel by %s", self.trainer_index, self.way.name)
        # Trainers that run freely may have gone on since the welcome; each step pulls its own version.
        self._show(self.remote.view_version(None))

    def _lay_out(self, parameters: FlatLayout, buffers: FlatLayout) -> None:
        """Where each tensor of the model lies in what travels; gradients leave from memory that is used again."""
        self._layout, self._buffer_layout = parameters, buffers
        own, own_buffers = trainable_parameters(self.model), module_buffers(self.model)
        for slot in parameters.slots:
            if slot.name not in own or tuple(own[slot.name].shape) != slot.shape:
                raise TaskError(
                    f"build_model must build the same model in every process, and parameter {slot.name} of shape "
                    f"{slot.shape} is on the server only; let nothing in it depend on the rank or on time"
                )
        self._parameters = [own[slot.name] for slot in parameters.slots]
        self._buffers = [own_buffers[slot.name] for slot in buffers.slots]
        laid_out = {id(parameter) for parameter in self._parameters}
        self._frozen = [(n, p) for n, p in self.model.named_parameters() if id(p) not in laid_out]

    def _way(self, welcome: JoinReply) -> TrainerTransport:
        """How parameters and gradients travel: through the server's memory where this process can reach it."""
        wanted, timeout_s = self.config.server.transport, self.config.cluster.timeout_s
        address = welcome.segments_address
        if address is not None and can_attach(address, timeout_s):
            slots = self.remote.call("share_segments", self.trainer_index)
            if slots:
                return SharedMemoryTrainerTransport(
                    welcome.parameter_layout, self._parameters, address, slots, self.trainer_index, timeout_s
                )
        if wanted == "shared_memory":
            raise UnsupportedConfiguration(
                f"server.transport (shared_memory) must have all ranks on one host; trainer {self.trainer_index} "
                f"({self.rendezvous.host_and_pid}) cannot reach the server's memory; use auto or rpc"
            )
        if welcome.shards:
            self.remote.spread(len(welcome.shards))
            wire_dtype = getattr(torch, self.config.server.wire_dtype)
            return ShardedTrainerTransport(welcome.parameter_layout, welcome.shards, wire_dtype, self._parameters)
        return RpcTrainerTransport(welcome.parameter_layout, welcome.wire_layout, self._parameters)

    @contextmanager
    def _goodbye(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.remote.close()
            release_liveness_calls()

    # A step.

    def step_scope(self) -> AbstractContextManager[Any]:
        return self._context()

    @contextmanager
    def _context(self) -> Iterator[None]:
        with dist_autograd.context() as self._context_id:
            yield

    def agree(self, announcement: Announcement) -> Decision:
        if self._next is None:
            self._next = self.remote.call_later("begin", self.trainer_index, announcement)
            self.clock.lap_shared("pull", wait=self._next.held_s)
        self._round, self._next = self._next, None
        assert self._round.decision is not None
        if self.trainer_index in self._round.decision.active:
            self.begin_pull()
        return self._round.decision

    def begin_pull(self) -> None:
        """Ask for the version of this step, inside its context; for some transports the answer can wait."""
        assert self._round.decision is not None
        self._pulling = InFlightCall(self.remote.begin_pull(self._round.decision.step))

    def before_batches(self) -> None:
        if self.way.zero_copy:
            self.way.map_version(self._round.slot)
        else:
            self._pulled = self._end_pull()
            self.way.load(self._pulled)
        self._take_buffers(self._round.buffers)
        for parameter in self._parameters:
            parameter.grad = None
        self.clock.lap("pull")

    @torch.no_grad()
    def _take_buffers(self, buffers: Sequence[Tensor]) -> None:
        for own, value in zip(self._buffers, self._buffer_layout.views(buffers).values(), strict=True):
            own.copy_(value)

    def on_loss_known(self, loss: float, samples: int) -> None:
        if self._sends_early:
            self._departures.begin()

    def _send_early(self, early: GradientBucket) -> None:
        assert self._round.decision is not None
        again = early in self._leaving
        if again:
            self._await_early(early)  # the server may take two messages in any order
        gradient = self.way.bucket_tensor(early)
        self.wire_bytes += again * tensor_bytes([gradient])  # ``bytes_of`` counts it once
        future = self.remote.begin_early(self._round.decision.step, early, gradient)
        self._leaving[early] = InFlightCall(future)

    def _await_early(self, early: GradientBucket) -> None:
        self.remote.end_early(self._leaving.pop(early).future)

    def update(self, report: StepReport) -> StepResult:
        self._check_gradients()
        used = self._departures.finish()
        if self.way.zero_copy:
            self._pulled = self._end_pull()
        seal = self.way.backward_root(self._pulled)
        buffers = self._pack_buffers() if self._round.wants_buffers else []
        report = StepReport(**{**vars(report), "used": used})
        self.wire_bytes += self.way.step_bytes(self._pulled) + tensor_bytes([*buffers, *self._round.buffers])
        words = report, buffers, self.following(report.version + 1)
        if self.way.zero_copy:
            self.optimizer.request(self._context_id, *words)
        if self._leaving:
            self.clock.add_hidden(max(leaving.beside_s() for leaving in self._leaving.values()))
        self.remote.backward(self._context_id, seal)
        for early in list(self._leaving):
            self._await_early(early)
        return self.conclude(self.optimizer.step(self._context_id, *words))

    def conclude(self, answer: StepGrant) -> StepResult:
        """Take in what the step of the optimizer has brought."""
        assert answer.result is not None
        self._next = answer if answer.decision is not None and answer.decision.verdict is not Verdict.WAIT else None
        self.clock.lap_shared("push", wait=answer.result.held_s + answer.held_s, apply=answer.result.apply_s)
        return answer.result

    def _end_pull(self) -> tuple[Tensor, ...]:
        self.clock.add_hidden(self._pulling.beside_s())
        return self.remote.end_pull(self._pulling.future)

    def following(self, step: int) -> Announcement | None:
        """The word for the step after this one, where nothing comes between: it saves a call and the wait for it."""
        if (self.lockstep and self.is_due(step)) or not self.data.is_ready():
            return None
        return self.with_stop(self.data_available())

    def idle(self, decision: Decision) -> None:
        """Wait for the version that the others make, which may be validated or saved next."""
        self.remote.call_later("follow", self.trainer_index, decision.step + 1)
        self.clock.lap("wait")

    def _check_gradients(self) -> None:
        """Refuse what would be lost on the way, by name."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise TaskError(
                    f"parameter {name} was frozen when the run began and is not now; the server would not train it. "
                    "Leave it trainable in build_model, and give it a learning rate of 0 until it is to be trained"
                )
        for slot, trained in zip(self._layout.slots, self._parameters, strict=True):
            if trained.grad is not None and trained.grad.layout is not torch.strided:
                raise TaskError(f"the gradient of parameter {slot.name} is sparse; use dense ones (sparse=False)")

    @torch.no_grad()
    def _pack_buffers(self) -> list[Tensor]:
        flats = self._buffer_layout.allocate()
        for own, view in zip(self._buffers, self._buffer_layout.views(flats).values(), strict=True):
            view.copy_(own)
        return flats

    # Validation, checkpoints, records.

    def refresh(self) -> None:
        self._show(self.remote.view_version(self.step))

    def _show(self, look: VersionView) -> None:
        if look.slot is None:
            self.way.load(look.parameters)
        else:
            self.way.map_version(look.slot)
        self._take_buffers(look.buffers)

    def merge_validation(self, sums: WeightedSums) -> tuple[Mapping[str, float], bool]:
        assert self._round.decision is not None
        if self._round.decision.verdict is Verdict.VALIDATE:
            self.remote.call("take_share", self.trainer_index, self.step, sums)
            return sums.means(), False
        means, improved = self.remote.call_later("report_validation", self.trainer_index, self.step, sums)
        return means, improved

    def deposit(self, reason: str, since: float) -> None:
        self.settle()
        told = self._flush()
        cut = self.remote.begin("cut", self.trainer_index, reason)  # the server copies while this trainer does
        step, part = self.step, self.part()
        self.remote.end("cut", cut)
        self.remote.end("take_records", told)  # records from before the cut are there before the checkpoint is
        pause_s = time.perf_counter() - since
        self._courier.carry(lambda: self._send_part(step, part, pause_s))

    def _send_part(self, step: int, part: Mapping[str, Any], pause_s: float) -> None:
        """Piece by piece, each answered before the next, so that the messages of a step find room between them."""
        write_chunks(
            dict(part),
            lambda piece: self.remote.call("deposit", self.trainer_index, step, torch.from_numpy(piece)),
        )
        self.remote.call_later("complete_deposit", self.trainer_index, step, pause_s)

    def settle(self) -> None:
        self._courier.finish()

    def deliver(self, records: Sequence[Record]) -> None:
        if time.monotonic() - self._sent > _SEND_EVERY_S or len(records) > 1000:
            self._flush()

    def _flush(self) -> torch.futures.Future[Any]:
        self._sent = time.monotonic()
        records, self.records = self.records, []
        return self.remote.begin_now("take_records", records)

    def leave(self, totals: TrainerTotals, decision: Decision) -> None:
        self.remote.call("take_records", self.records)
        self.remote.call("leave", totals, decision)

    def give_up(self, error: BaseException) -> None:
        if isinstance(error, (PeerLost, PeerRefused)):
            return
        told = RemoteError.told_by(f"trainer {self.trainer_index}", error)
        if self._arrived:
            self._courier.wind_up()
            self.remote.call("give_up", self.trainer_index, told)
        else:
            self.rendezvous.report_failure(told)

    def optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()
