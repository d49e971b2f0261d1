"""The trainer of the parameter server: pull a version, compute, push the gradients."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor

from paramserver.buffers.positions import AppliedPositions
from paramserver.checkpoint import stage_copy, unpack
from paramserver.config import num_servers_of
from paramserver.consistency import Announcement, Decision, Verdict, module_buffer_owner
from paramserver.context import ProcessContext
from paramserver.distributed.local_calls import LocalConnection
from paramserver.distributed.membership import Member, release_liveness_calls
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.distributed.rpc_calls import note_repeated
from paramserver.distributed.session import rpc_trainer
from paramserver.errors import (
    TaskError,
    UnsupportedConfiguration,
)
from paramserver.metrics.records import StepReport, StepResult
from paramserver.parameters.flat import FlatLayout, trainable_parameters
from paramserver.parameters.model import (
    LoadedParameters,
    build_model,
    detached_state_dict,
    extra_state_dict,
    load_weights,
)
from paramserver.parameters.model_tree import ModelTree, PackedBuffers
from paramserver.parameters.numerics import checksums
from paramserver.parameters.sharding import full_shard
from paramserver.rng import seed_all
from paramserver.runs.checkpoint_manager import CheckpointManager
from paramserver.server.client import CallFailed, InFlightCall, ServerClient
from paramserver.server.shared_optimizer import SharedOptimizer
from paramserver.task import Hooks, Task, restore_task
from paramserver.trainers.base import Trainer, TrainerProgress, overrides
from paramserver.trainers.gradient_buckets import GradientBuckets
from paramserver.trainers.server_control import ServerControl
from paramserver.transport.base import GradientBucket, TrainerTransport
from paramserver.transport.compression import make_codec
from paramserver.transport.messages import DataPosition, JoinReply, Push, StepGrant, VersionView
from paramserver.transport.rpc import RpcTrainerTransport
from paramserver.transport.segments import attach_socket, can_attach
from paramserver.transport.shared_memory import SharedMemoryTrainerTransport, socket_key

log = logging.getLogger("paramserver")


class RpcTrainer(Trainer):
    """Steps a ``DistributedOptimizer`` that all trainers share; each step is one distributed-autograd context.

    The announcement of step k + 1 is piggybacked on the push of step k, so a steady step takes one round trip for the
    pull, which is hidden behind the forward, and one for the push. docs/architecture.md shows a step as a diagram.

    Args:
        process, task, checkpoints, rendezvous: see ``Trainer``.

    Example::

        >>> from paramserver.trainers import RpcTrainer
        >>> class Clipped(RpcTrainer):
        ...     def on_after_backward(self):
        ...         torch.nn.utils.clip_grad_value_(self.unwrapped_model.parameters(), 1.0)
    """

    for_mode = "rpc"
    computes = "trainer"
    reports_served = True
    control_class = ServerControl

    control: ServerControl

    def __init__(
        self, process: ProcessContext, task: Task, checkpoints: CheckpointManager | None, rendezvous: Rendezvous
    ) -> None:
        super().__init__(process, task, checkpoints, rendezvous)
        self.rendezvous: Rendezvous = rendezvous
        self._context_id = 0
        self._context = ExitStack()
        self._grant = StepGrant()
        self._next_grant: StepGrant | None = None  # came with the reply to the last push
        self._pull: list[InFlightCall[tuple[Tensor, ...]]] = []
        self._pulled: tuple[Tensor, ...] = ()
        self._sent_buckets: dict[GradientBucket, list[InFlightCall[Tensor | None]]] = {}
        # Buckets of the next version that arrived before that was complete. The model holds them once it was granted.
        self._early: dict[GradientBucket, Tensor] = {}
        self._version = 0  # that the next push is for
        self._loaded_parameters: LoadedParameters | None = None
        self._loaded: int | None = None  # the version that the model is known to hold
        self._known_buffers: PackedBuffers | None = None  # the module buffers that the server sent, or was sent, last
        self._is_replacement = False
        self._keeps_buffers = False  # a change of them between two steps is kept
        # A change through ``grad.data`` after backward cannot be noticed, so nothing is sent before these hooks ran.
        self._overlaps_backward = not any(overrides(hooks, Hooks.on_batch_end) for hooks in self.hooks) and not (
            overrides(self, Trainer.on_after_backward)
        )

    # The connection.

    def init_connection(self) -> None:
        self.model = build_model(self.task, self.config.seed, self.process.placement)
        self.prepare_data()
        self.connect()
        self.start_from(self.join())

    def connect(self) -> None:
        """Start the RPC agent and connect to the servers."""
        servers = num_servers_of(self.config)
        agent = self.enter_context(rpc_trainer(self.rendezvous, self.trainer_index, servers))
        self._name, self._worker_id = agent.name, agent.worker_id
        # Exited after the client is closed: notifies the servers that this process leaves deliberately.
        self._resources.callback(release_liveness_calls)
        self.server = ServerClient(
            self.config,
            self.trainer_index,
            agent.worker_id,
            agent.server_addresses,
            blocks=lambda: self.data.blocks,
            # With cluster.elastic a signal lets this trainer leave.
            stop_limit=None if self.config.cluster.elastic else self.process.stop_limit,
        )
        self.enter_context(self.control.connected(self.server))

    def join(self) -> JoinReply:
        """Join the run; returns once all trainers have joined."""
        rendezvous = self.rendezvous
        member = Member(
            self.trainer_index, self._name, self._worker_id, rendezvous.host_and_pid, generation=rendezvous.generation
        )
        self.server.start_heartbeat()
        reply = self.server.join(member, self.data.epoch_samples)
        self.control.joined = True
        if self.process.session:
            # The server may have noticed the loss of the earlier session only now, and let another process have it.
            self.rendezvous.claim_again()
        return reply

    def start_from(self, reply: JoinReply) -> None:
        """Start at the server's version."""
        self.step = reply.step
        self.lockstep = reply.lockstep
        self.receive_model(reply)
        owner = module_buffer_owner(tuple(range(self.process.trainers)), self.config.training.uneven_inputs)
        self._is_replacement = reply.data_position is not None
        self._keeps_buffers = not self._is_replacement and self.trainer_index == owner
        self.optimizer = SharedOptimizer(self.server)
        self.on_after_setup_optimizers()
        self._start_data(reply)
        self.process.startup_timer.mark("connection")

    def _start_data(self, reply: JoinReply) -> None:
        """Restore this trainer's part of a checkpoint, or continue the data of a lost trainer."""
        position = reply.data_position
        if position is None:
            self.seed_or_restore(reply.stored_part)
            source, applied = self.data.source, self.data.positions().state_dict()
            self.server.report_source(
                DataPosition(
                    source.state_dict(), applied, can_reshard=source.can_reshard, refetchable=source.refetchable
                )
            )
        else:
            self.replace_lost(reply.stored_part, position, reply.incarnation)

    def replace_lost(self, part: bytes | None, position: DataPosition, incarnation: int) -> None:
        """Take the place of a trainer that was lost: continue its data after what was applied of it.

        ``part``, of the newest checkpoint, has the state of the task; None if there is none. With the incarnation the
        random numbers are not those of the lost one.
        """
        seed_all(self.config.seed, incarnation, 1 + self.trainer_index)
        applied = AppliedPositions()
        applied.load_state_dict(position.applied)
        self.data.load_after_loss({"source": position.source, "buffer": None}, applied)
        self.progress = TrainerProgress(**position.counters)
        if part is not None and (stored := unpack(part))["task"]:
            restore_task(self.task, stored["task"], self.process.kept.callbacks)

    def receive_model(self, reply: JoinReply) -> None:
        """Load the server's model, and choose the transport that keeps it current."""
        load_weights(self.model, {**detached_state_dict(self.model), **reply.model}, "the server")
        self._map_model(reply.parameter_layout)
        self.tree = ModelTree(self.model)
        self.transport = self._make_transport(reply)
        names = (slot.name for slot in reply.parameter_layout.slots)
        self._loaded_parameters = LoadedParameters(
            dict(zip(names, self._parameters, strict=True)), owned=not self.transport.shares_parameters
        )
        self.record("transport", transport=self.transport.name)
        self.set_optimizers(reply.parameters_of)
        self.validates_averages = reply.validates_averages
        self._buckets = self.enter_context(
            closing(GradientBuckets(self.transport, self._parameters, self._send_bucket))
        )
        log.info("trainer %d: transport of parameters and gradients: %s", self.trainer_index, self.transport.name)
        if not self.transport.zero_copy:
            reason = reply.why_not_by_bucket
            how = f"after all gradients: {reason}" if reason else "bucket by bucket, as gradients arrive"
            log.info("trainer %d: the server updates parameters %s", self.trainer_index, how)
        # Trainers that run freely may have made updates since the reply; each step pulls its own version.
        view = self.server.view_version(None)
        self._load_view(view)
        self._load_buffers(view.buffers)

    def _map_model(self, layout: FlatLayout) -> None:
        """Find the parameters of this model that correspond to the slots of the server's layout."""
        self._layout, own = layout, trainable_parameters(self.model)
        for slot in layout.slots:
            if slot.name not in own or tuple(own[slot.name].shape) != slot.shape:
                raise TaskError(
                    f"build_model must build the same model in every process, and parameter {slot.name} of shape "
                    f"{slot.shape} is on the server only; let nothing in it depend on the rank or on time"
                )
        self._parameters = [own[slot.name] for slot in layout.slots]
        trained = {id(parameter) for parameter in self._parameters}
        self._frozen = {n: p for n, p in self.model.named_parameters() if id(p) not in trained}
        self._frozen_sums = checksums(self._frozen)
        self._changed_frozen: set[str] = set()

    def _make_transport(self, reply: JoinReply) -> TrainerTransport:
        """Choose shared memory if this process can reach the server's, else messages."""
        layout, timeout_s = reply.parameter_layout, self.config.cluster.timeout_s
        address = reply.segments_address
        if address is not None and can_attach(address, timeout_s) and (slots := self.server.share_segments()):
            key = socket_key(self.trainer_index, reply.incarnation)
            self.server.use_local(LocalConnection(attach_socket(address, key, timeout_s)))
            return SharedMemoryTrainerTransport(
                layout, self._parameters, address, slots, self.trainer_index, timeout_s, reply.incarnation
            )
        if self.config.server.must_share_memory:
            raise UnsupportedConfiguration(
                f"server.transport (shared_memory) must have all ranks on one host; trainer {self.trainer_index} "
                f"({self.rendezvous.host_and_pid}) cannot reach the server's memory; use auto or rpc"
            )
        if reply.shards:
            self.server.use_shards(len(reply.shards))
        shards = reply.shards or (full_shard(layout),)
        return RpcTrainerTransport(layout, shards, make_codec(self.config.server), self._parameters)

    # A step.

    def _enter_autograd_context(self) -> None:
        """Enter a new context, in the place of the one that was entered before in this step."""
        self._context.close()
        self._context_id = self._context.enter_context(dist_autograd.context())

    @contextmanager
    def step_scope(self) -> Iterator[None]:
        with self._context:
            self._enter_autograd_context()
            yield

    def agree(self) -> Decision:
        grant, self._next_grant = self._next_grant, None
        if grant is None:
            announcement = self.announcement()
            grant = self.server.announce(announcement, self._changed_buffers())
            self.clock.lap_shared("pull", wait=grant.held_s)
        self._grant = grant
        assert grant.decision is not None
        if grant.decision.active:
            self._keeps_buffers = grant.wants_buffers  # with ``join`` another trainer's may be kept from now on
        if self.trainer_index in grant.decision.active:
            # Before hooks are called in which a task may change them: on_epoch_end, on_epoch_start.
            self._load_buffers(grant.buffers)
            self._version = grant.decision.step
            if not self.parameters_of:
                self.begin_pull()
        return grant.decision

    def begin_pull(self) -> None:
        """Request the version of this step, inside its context; it is awaited when it is needed."""
        if self.transport.zero_copy:
            return  # it is in shared memory
        # With several optimizers the model holds the version, and only its gradients are to return.
        held = self.transport.ranges if self.parameters_of else self._early
        self._pull = self.server.pull(self._version, held)

    def _finish_pull(self) -> None:
        self.clock.add_hidden(max(call.in_flight_s() for call in self._pull))
        give_up_at = time.monotonic() + self.config.cluster.timeout_s
        while True:
            try:
                pulled = [call.wait_once() for call in self._pull]
                break
            except CallFailed as failure:
                self.server.wait_before_repeat(failure, give_up_at)
                note_repeated("pull")
                # The server may have recorded the pull. Distributed autograd would wait for its gradient too.
                self._enter_autograd_context()
                self.begin_pull()
        self._pulled = tuple(
            flat if flat.numel() else self._early.get(GradientBucket(server_index, flat_index), flat)
            for server_index, flats in enumerate(pulled)
            for flat_index, flat in enumerate(flats)
        )
        self._early = {}

    def load_version(self) -> None:
        if not self.parameters_of:
            self._check_unchanged(between_steps=True)
            if self.transport.zero_copy:
                self.transport.map_version(self._grant.slot)
            else:
                self._finish_pull()
                self.transport.load(self._pulled)
            self._note_loaded()
        elif self._loaded != self._version:
            self._load_parameters()
        for parameter in self._parameters:
            parameter.grad = None
        self.clock.lap("pull")

    def _note_loaded(self, values: bool = False) -> None:
        if self._loaded_parameters is not None:
            self._loaded_parameters.note(values)

    def _check_unchanged(self, between_steps: bool = False) -> None:
        """Refuse changes that the task made to trained parameters since they were loaded.

        Between steps a server may have written to the memory that it shares with this process.
        """
        if self._loaded_parameters is None:
            return
        try:
            self._loaded_parameters.check(values=not (between_steps and self.transport.shares_parameters))
        except TaskError:
            # If this trainer was taken for lost, the server has gone on and changed them; the reply is an error then.
            self.control.flush_records().wait()
            raise

    @contextmanager
    def hooks_between_steps(self) -> Iterator[None]:
        if self._loaded_parameters is None:
            yield
            return
        # Memory of the server stays as it is in lockstep, until this trainer pushes; for one that has no more data the
        # others do not wait.
        decision = self._grant.decision
        waits = self.lockstep and decision is not None and self.trainer_index in decision.active
        stays = waits or not self.transport.shares_parameters
        self._check_unchanged(between_steps=True)
        self._note_loaded(values=stays)
        yield
        self._check_unchanged(between_steps=not stays)

    def on_fit_start(self) -> None:
        # By on_train_start. The others do not wait for a trainer that takes the place of a lost one.
        self._check_unchanged(between_steps=self._is_replacement or not self.lockstep)

    def validate(self, share: int) -> bool:
        improved = super().validate(share)
        self._check_unchanged(between_steps=not self.lockstep)
        return improved

    def _load_buffers(self, packed: PackedBuffers | None) -> None:
        if packed is not None and self.tree is not None:
            self.tree.load_buffers(packed)
            self._known_buffers = packed

    def _changed_buffers(self) -> PackedBuffers | None:
        """Return the module buffers that changed since the server sent or received them; None if none is kept."""
        if self.tree is None or self._known_buffers is None or not self._keeps_buffers:
            return None
        changed = self.tree.pack_changed_buffers(self._known_buffers)
        if changed is not None:
            self._known_buffers = self.tree.pack_buffers()
        return changed

    def on_last_loss(self, loss: float, samples: int) -> None:
        if self._overlaps_backward:
            self._buckets.start()

    def _send_bucket(self, bucket: GradientBucket) -> None:
        sent = self._sent_buckets.setdefault(bucket, [])
        gradient = self.transport.bucket_tensor(bucket)
        if sent:
            self.wire_bytes += gradient.nbytes  # ``step_bytes`` counts it once
        has_all = all(self._parameters[number].grad is not None for number in self.transport.buckets[bucket])
        sent.append(self.server.send_bucket(self._version, bucket, gradient, len(sent), has_all))
        if len(sent) > 1:
            # It replaces the one before, in whichever order they arrive, and must be there before the push.
            sent[-1].wait()

    def step_optimizer(self, report: StepReport) -> StepResult:
        if not report.optimizer:
            return self._push(report)
        self._version = report.version
        self._enter_autograd_context()
        self.begin_pull()
        if self._pull:
            self._finish_pull()
        result = self._push(report)
        # Load the parameters that this optimizer changed. Module buffers stay those of this trainer until the next
        # batch, as a graph of this one may need them.
        view = VersionView(0, (), None)
        if not self.transport.zero_copy:
            view = self.server.view_version(result.step, self._left_out[report.optimizer])
            self.wire_bytes += sum(flat.nbytes for flat in view.parameters if flat.is_contiguous())
            self.wire_bytes += _bytes_of(view.buffers)
        self.transport.load_updated(view, self._numbers_of[report.optimizer])
        self._note_loaded()
        self._loaded = result.step
        self.clock.lap("pull")
        return result

    def set_optimizers(self, names: Mapping[str, Sequence[str]]) -> None:
        super().set_optimizers(names)
        numbers = {slot.name: number for number, slot in enumerate(self._layout.slots)}
        self._numbers_of = {name: {numbers[of] for of in own if of in numbers} for name, own in names.items()}
        # Of each optimizer, the ranges without a parameter of it: they are neither pushed nor loaded.
        ranges = self.transport.ranges.items()
        self._left_out = {n: [r for r, of in ranges if own.isdisjoint(of)] for n, own in self._numbers_of.items()}
        self.transport.sends_unused = not names

    def _push(self, report: StepReport) -> StepResult:
        self._check_gradients()
        self._check_unchanged()
        used = self._buckets.finish()
        sent = {bucket: calls[-1] for bucket, calls in self._sent_buckets.items()}
        self._sent_buckets = {}

        def begin(*_: object) -> None:
            self.optimizer.begin_step(self._context_id, push, list(sent.values()))

        if isinstance(self.transport, SharedMemoryTrainerTransport):
            # The backward of the context is local, and sends the push.
            self._pulled = self.transport.pull(begin)
        root = self.transport.backward_root(self._pulled)
        buffers = None
        if self._grant.wants_buffers and self.tree is not None:
            buffers = self._known_buffers = self.tree.pack_buffers()
        report = self.number_push(report, used)
        push = Push(report, buffers, self.next_announcement(report.version + 1))
        self.wire_bytes += self.transport.step_bytes(() if self.parameters_of else self._pulled)
        self.wire_bytes += _bytes_of(buffers) + _bytes_of(self._grant.buffers)
        if not self.transport.zero_copy:
            # Before its gradients are complete: the servers accept the push with the last of them.
            begin()
        if sent:
            self.clock.add_hidden(max(call.in_flight_s() for call in sent.values()))
        self.server.backward(self._context_id, root)
        grant = self.optimizer.step(self._context_id)
        for bucket, call in sent.items():
            if (updated := call.wait()) is not None:
                self._early[bucket] = updated
        return self.finish_step(grant)

    def number_push(self, report: StepReport, used: tuple[bool, ...] | None = None) -> StepReport:
        """Return the report of a new push, with what names it, the samples that it holds and ``used``."""
        positions, keys = self.data.pop_served()
        return self.server.number_push(report, used=used, positions=_compact(positions), keys=keys)

    def finish_step(self, grant: StepGrant) -> StepResult:
        """Take the result of the push from the server's reply, and the grant of the next step if it has one."""
        assert grant.result is not None
        has_grant = grant.decision is not None and grant.decision.verdict is not Verdict.WAIT
        self._next_grant = grant if has_grant else None
        self.clock.lap_shared("push", wait=grant.result.held_s + grant.held_s, apply=grant.result.apply_s)
        return grant.result

    def next_announcement(self, step: int) -> Announcement | None:
        """Return the announcement to piggyback on the push before ``step``; None if it must be made separately.

        It must be if something is done between the two steps, or if this trainer does not have its data yet; also with
        several optimizers, as the next step may be of the same batch.
        """
        if self.parameters_of or (self.lockstep and self.is_due(step)):
            return None
        return self.announcement_if_ready()

    def idle(self, decision: Decision) -> int:
        """Wait for the version that the others make, which may be validated or saved next."""
        step = self.server.wait_version(decision.step + 1)
        self.clock.lap("wait")
        return step

    def _check_gradients(self) -> None:
        """Refuse, by name, what would be lost."""
        for slot, trained in zip(self._layout.slots, self._parameters, strict=True):
            if trained.grad is not None and trained.grad.layout is not torch.strided:
                raise TaskError(f"the gradient of parameter {slot.name} is sparse; use dense ones (sparse=False)")

    # Validation, checkpoints, records.

    def sync_model(self) -> None:
        view = self._load_parameters()
        # Those of the owner are the version's, and hooks may have changed them since its last push.
        if not (self.lockstep and self._keeps_buffers):
            self._load_buffers(view.buffers)

    def _load_parameters(self) -> VersionView:
        """Load the parameters of the present version, and return that."""
        view = self.server.view_version(self.step)
        self._load_view(view)
        self._loaded = self.step
        return view

    def _load_view(self, view: VersionView) -> None:
        self._check_unchanged(between_steps=True)
        if view.slot is None:
            self.transport.load(view.parameters)
        else:
            self.transport.map_version(view.slot)
        self._note_loaded(values=not self.current_step.in_batches)

    def save_part(self, reason: str, since: float) -> None:
        self.control.wait_saved()
        records = self.control.flush_records()
        # The server copies while this trainer does.
        staging = self.server.stage_checkpoint(reason, self.extra_state(), self._changed_buffers())
        step, part = self.step, self.state_dict()
        takes_part = staging.wait()
        records.wait()  # records from before the checkpoint are stored before it is
        if takes_part:
            self.control.send_part(step, part, since)

    def extra_state(self) -> dict[str, Any]:
        """Return what the model of the server lacks: ``get_extra_state`` of the modules, and changed frozen parameters.

        A task may change frozen parameters, such as those of a target network, also through ``.data``, so their values
        are compared.
        """
        sums = checksums(self._frozen)
        self._changed_frozen |= {name for name in sums if sums[name] != self._frozen_sums[name]}
        frozen = {name: self._frozen[name].detach() for name in sorted(self._changed_frozen)}
        on_cpu: dict[str, Any] = stage_copy({**extra_state_dict(self.model), **frozen})
        return on_cpu

    def averages(self) -> Mapping[str, Tensor]:
        return self.server.averages()

    def optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


def _bytes_of(buffers: PackedBuffers | None) -> int:
    return 0 if buffers is None else buffers.nbytes


def _compact(positions: npt.NDArray[np.int64]) -> Sequence[int]:
    """Return positions as they are cheapest in a message: consecutive ones, as a FIFO serves them, as a range."""
    if len(positions) and bool((np.diff(positions) == 1).all()):
        return range(int(positions[0]), int(positions[-1]) + 1)
    numbers: list[int] = positions.tolist()
    return numbers
