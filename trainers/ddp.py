"""The same task through DistributedDataParallel: gradients are averaged by all-reduce while backward runs.

Communication hooks of DDP that compress gradients, by the names of ``ddp.comm_hook``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from paramserver.checkpoint.sender import BackgroundSender
from paramserver.consistency import Announcement, Decision, Readiness, Verdict, decide, module_buffer_owner
from paramserver.context import ProcessContext
from paramserver.distributed.abort_sockets import OpenedSockets
from paramserver.distributed.control_channel import ControlChannel, connect_ranks
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.distributed.session import all_gather_objects, process_group
from paramserver.errors import PeerLost
from paramserver.limits import Limits
from paramserver.metrics.records import Record, StepReport, StepResult, TrainerTotals, WeightedSums, merge_sums
from paramserver.optim.updater import Updater
from paramserver.parameters.model import build_model
from paramserver.runs.checkpoint_manager import CheckpointManager, StagedCheckpoint
from paramserver.task import Task
from trainers.base import Trainer
from trainers.ddp_control import AgreedStep, PartGather, StepAgreement, StepTotals, translate_peer_loss


def _none(model: DistributedDataParallel) -> None:
    """DDP's own all-reduce."""


def _fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, fp16_compress_hook)


def _bf16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, bf16_compress_hook)


def _powersgd(model: DistributedDataParallel) -> None:
    # Vogels et al., "PowerSGD", NeurIPS 2019. The first steps, in which DDP rebuilds its buckets, go uncompressed.
    state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=10)
    model.register_comm_hook(state, powerSGD_hook)


_HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "none": _none,
    "fp16": _fp16,
    "bf16": _bf16,
    "powersgd": _powersgd,
}


def register_comm_hook(model: DistributedDataParallel, name: str) -> None:
    _HOOKS[name](model)


# Rank 0 asks for the others' records about so often; it costs one gather.
_COLLECT_EVERY_S = 1.0
# A collective may fail so long before it is told who is lost.
_NAMED_AFTER_S = 1.0


class DdpTrainer(Trainer):
    """One rank of a process group. All ranks hold the model, the optimizer and the schedule.

    For each step the ranks reduce one small vector: how far each is with its data, whether one wants to stop, and the
    loss and samples of the step before. So they all take the same decision from the same numbers. All of that is known
    before the last backward of a step, so the reduction runs beside it. Only where somebody had no data by then, or a
    validation or checkpoint came between, the ranks agree anew before they go on.
    """

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
        self.limits = Limits.of(self.config.training)
        self.joins = self.config.training.uneven_inputs == "join"
        self.samples = 0
        self._active: tuple[int, ...] = tuple(range(process.trainers))
        self._behind = False
        self._collected = time.monotonic()
        self._connections = OpenedSockets()
        self._links: ControlChannel | None = None

    def run(self) -> Decision:
        try:
            return super().run()
        except PeerLost as error:
            if self._links is None or self._links.lost in (None, error):
                raise
            raise self._links.lost from error  # it names the rank, which a collective cannot

    def report_failure(self, error: BaseException) -> None:
        if isinstance(error, PeerLost) and self._links is not None:
            self._links.wait_loss(_NAMED_AFTER_S)

    # The connection and the model.

    def init_connection(self) -> None:
        if self.process.placement.device.type == "cuda":
            torch.cuda.set_device(self.process.placement.device)  # nccl's collectives use the current device
        with self._connections.record():
            self.enter_context(process_group(self.rendezvous, self.process.placement.backend))
            self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.rendezvous.timeout_s))
        self._agreement = StepAgreement(self._control, self.process.trainers, self.trainer_index)
        # Where somebody is lost, the loop may wait for it in a collective, and would until its own timeout.
        self._links = links = self.enter_context(connect_ranks(self.rendezvous, self.config, self._connections.abort))
        self._collection = PartGather(links)
        self._sender = self.enter_context(
            BackgroundSender(self.config.checkpoint.background, "a part of a checkpoint", lambda: links.last_progress)
        )
        model = build_model(self.task, self.config.seed, self.process.placement)
        if self.checkpoints is not None:
            self.checkpoints.restore_model(model)
        placement = self.process.placement
        device_ids = [placement.device] if placement.device.type == "cuda" and len(placement.devices) == 1 else None
        self.model = self.configure_ddp(model, device_ids)
        self.updater = Updater(self.task, self.unwrapped_model, self.config.training)
        if self.joins:
            # Making the context switches the collectives of joining on; it is never entered: the loop here decides.
            self._join = self._ddp().join(divide_by_initial_world_size=False)
            self._shadow = self._ddp().join_hook(divide_by_initial_world_size=False)  # type: ignore[no-untyped-call]
        self._start_together()
        self.on_after_setup_optimizers()

    def _start_together(self) -> None:
        """Rank 0's step, optimizer and stored parts, to every rank; the model came with DDP's constructor."""
        self.prepare_data()
        start: list[Any] = [None]
        if self.checkpoints is not None and self.monitor is not None:
            start = [(self.monitor.step, self.monitor.samples, self.checkpoints.updater_state())]
        dist.broadcast_object_list(start, src=0, group=self._control)
        self.step, self.samples, state = start[0]
        if state is not None:
            self.updater.load_state_dict(state)
        part: list[Any] = [None]
        parts = (
            [self.checkpoints.trainer_part(i) for i in range(self.process.trainers)]
            if self.checkpoints is not None
            else None
        )
        dist.scatter_object_list(part, parts, src=0, group=self._control)
        self.seed_or_restore(part[0])

    def configure_ddp(self, model: nn.Module, device_ids: list[torch.device] | None) -> nn.Module:
        """Wrap the model. Override to wrap it otherwise."""
        options = self.config.ddp
        wrapped = DistributedDataParallel(
            model,
            device_ids=device_ids,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            bucket_cap_mb=options.bucket_cap_mb,
            **options.extra,
        )
        register_comm_hook(wrapped, options.comm_hook)
        return wrapped

    def _ddp(self) -> DistributedDataParallel:
        assert isinstance(self.model, DistributedDataParallel)
        return self.model

    @property
    def unwrapped_model(self) -> nn.Module:
        model = self.model
        return model.module if isinstance(model, DistributedDataParallel) else model

    @property
    def data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        return self._ddp().no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    # A step.

    def step_scope(self) -> AbstractContextManager[Any]:
        return translate_peer_loss()

    def agree(self) -> Decision:
        decision = self._decide() if self._agreement.started else None
        if decision is None or decision.verdict is Verdict.WAIT:
            self._begin_agreement(self.announcement())
            decision = self._decide()
        if decision.active:
            self._active = decision.active
        self.clock.lap("wait")
        return decision

    def on_last_loss(self, loss: float, samples: int) -> None:
        # What is said now holds until the next batch is taken: samples that are there stay, and an end is an end.
        announcement = self.announcement_if_ready() or self.with_stop(Announcement(Readiness.WAITING))
        self._begin_agreement(announcement, StepTotals(loss, samples))

    def _begin_agreement(self, announcement: Announcement, done: StepTotals | None = None) -> None:
        collect = self.monitor is not None and time.monotonic() - self._collected > _COLLECT_EVERY_S
        self._agreement.start(announcement, done, collect)

    def _decide(self) -> Decision:
        agreed = self._finish_agreement()
        return decide(agreed.announcements, self.step, self.samples, self.limits, self.config.training.uneven_inputs)

    def _finish_agreement(self) -> AgreedStep:
        """The words of all; the step that they belong to is accounted for."""
        agreed = self._agreement.wait()
        if agreed.totals is not None:
            self.samples += agreed.totals.samples
            if self.monitor is not None:
                lr = self.updater.lr
                self.monitor.update_applied(StepResult(self.step, self.samples, agreed.totals.loss, lr, self.seconds))
        if agreed.collect_records:
            self._collect(all_gather_objects(list(self.records), self._control))
        return agreed

    def step_optimizer(self, report: StepReport) -> None:
        self.updater.apply(report.version + 1)
        self.updater.optimizer.zero_grad()
        self.clock.lap("apply")

    def idle(self, decision: Decision) -> None:
        """Answer the collectives of those who still have data, as DDP's join does."""
        self._begin_agreement(self.with_stop(Announcement(Readiness.DRAINED)))
        with translate_peer_loss():
            for _ in range(decision.batches):
                dist.all_reduce(torch.zeros(1, device=self._ddp().join_device))  # "one process that has no data"
                self._shadow.main_hook()
        self._behind = True

    def on_epoch_ended(self, epoch: int) -> None:
        self.updater.on_epoch_end()

    # Validation, checkpoints, records.

    def sync_model(self) -> None:
        """The same model and module buffers on all ranks, before they are validated or saved."""
        if self._agreement.started:
            self._finish_agreement()  # for the figures of the last step; what it said of the next one may be too old
        source = module_buffer_owner(self._active, self.config.training.uneven_inputs)
        with translate_peer_loss():
            for buffer in self.unwrapped_model.buffers():
                dist.broadcast(buffer, src=source)
            if len(self._active) == self.process.trainers:
                return
            # Those whose data ended did not step; they take over what the others made.
            for parameter in self.unwrapped_model.parameters():
                dist.broadcast(parameter.data, src=source)
            state: list[Any] = [self.updater.state_dict() if self.trainer_index == source else None]
            dist.broadcast_object_list(state, src=source, group=self._control)
        if self._behind:
            self.updater.load_state_dict(state[0])
            self._behind = False

    def merge_validation(self, sums: WeightedSums) -> tuple[Mapping[str, float], bool]:
        with translate_peer_loss():
            shares = all_gather_objects((sums, list(self.records)), self._control)
            self._collect([records for _, records in shares])
            merged = merge_sums({index: share for index, (share, _) in enumerate(shares)})
            verdict = [self.monitor is not None and self.monitor.validated(self.step, merged)]
            dist.broadcast_object_list(verdict, src=0, group=self._control)
        self.updater.on_validation_end(self.step, merged.means())
        return merged.means(), verdict[0]

    def save_part(self, reason: str, since: float) -> None:
        self.wait_saved()  # all ranks end the same travel, and so meet again
        self._attend(True)
        self.sync_model()
        with translate_peer_loss():
            self._collect(all_gather_objects(list(self.records), self._control))
        part = self.state_dict()
        checkpoints = self.checkpoints
        if checkpoints is None:
            pause_s = time.perf_counter() - since
            self._carry(lambda: self._collection.send(part, pause_s))
            return

        def collect(staged: StagedCheckpoint) -> None:
            own_s = time.perf_counter() - since
            self._carry(lambda: self._complete(checkpoints, staged, part, own_s))

        checkpoints.save(self.step, self.unwrapped_model, self.updater, reason, since, collect)

    def _attend(self, attentive: bool) -> None:
        """While a part travels, a rank that falls silent is lost."""
        assert self._links is not None
        self._links.watch_silence(attentive)

    def _carry(self, job: Callable[[], None]) -> None:
        def carried() -> None:
            job()
            self._attend(False)

        self._sender.submit(carried)

    def _complete(
        self, checkpoints: CheckpointManager, staged: StagedCheckpoint, part: Mapping[str, Any], pause_s: float
    ) -> None:
        """On rank 0: the other ranks' parts, and then the checkpoint. Whatever happens, they are answered."""
        taken = False
        try:
            parts, others_s = self._collection.receive()
            checkpoints.commit(staged, {self.trainer_index: part, **parts}, max(pause_s, others_s))
            taken = True
        finally:
            self._collection.acknowledge(taken)

    def wait_saved(self) -> None:
        self._sender.wait()

    def send_records(self, records: Sequence[Record]) -> None:
        if self.monitor is not None:
            self._collect([list(records)])

    def _collect(self, gathered: Sequence[Sequence[Record]]) -> None:
        self.records.clear()
        self._collected = time.monotonic()
        if self.monitor is not None:
            for records in gathered:
                for record in records:
                    self.monitor.record(record)

    def leave(self, totals: TrainerTotals, decision: Decision) -> None:
        with translate_peer_loss():
            everything = all_gather_objects((totals, list(self.records)), self._control)
        self._collect([records for _, records in everything])
        self.all_totals = [one for one, _ in everything]
        if self._links is not None:
            self._links.leave()

    def optimizer_state(self) -> dict[str, Any]:
        return self.updater.optimizer.state_dict()
