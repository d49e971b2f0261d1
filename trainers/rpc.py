"""The trainer of the parameter server: pull a version, compute, push the gradients."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paramserver.checkpoint import unpack
from paramserver.consistency import Decision, Verdict, module_buffer_owner
from paramserver.limits import is_due
from paramserver.metrics.profile import span
from paramserver.metrics.records import StepReport, StepResult, StepTotals
from paramserver.parameters.model import TrainingFlags, build_model, load_frozen_state
from paramserver.parameters.model_tree import PackedBuffers
from paramserver.parameters.remote_tables import exclude_from_compile
from paramserver.parameters.sharding import full_shard
from paramserver.parameters.tables import refuse_max_norm, row_ends
from paramserver.rng import seed_all
from paramserver.server.client import ServerClient
from paramserver.server.shared_optimizer import SharedOptimizer
from paramserver.task import Callback, Hooks, Task
from paramserver.trainers.base import Trainer, overrides
from paramserver.trainers.local_steps import LocalSteps
from paramserver.trainers.model_copy import ModelCopy, find_trained
from paramserver.trainers.pull import StepContext, VersionPull, make_transport
from paramserver.trainers.push import GradientPush
from paramserver.trainers.row_lookup import RowLookup
from paramserver.trainers.server_control import ServerControl
from paramserver.transport.messages import DataPosition, JoinReply, Push, StepGrant

log = logging.getLogger("paramserver")


class RpcTrainer(Trainer):
    """Steps a ``DistributedOptimizer`` that all trainers share; each step is one distributed-autograd context.

    The announcement of step k + 1 is piggybacked on the push of step k, so a steady step takes one round trip for the
    pull, which is hidden behind the forward, and one for the push. docs/architecture.md shows a step as a diagram.

    Attributes:
        server: the connection to the servers.
        optimizer: the ``DistributedOptimizer``.
        context: the distributed-autograd context of a step.
        model_copy: what this trainer holds of the server's model; nothing if that stays on the server.
        pull: gets the version of a step. It and ``push`` do not exist if the model stays on the server.
        push: sends the gradients of a step.

    Example::

        >>> from paramserver.trainers import RpcTrainer
        >>> class Clipped(RpcTrainer):
        ...     def on_after_backward(self):
        ...         torch.nn.utils.clip_grad_value_(self.unwrapped_model.parameters(), 1.0)
    """

    for_mode = "rpc"
    computes = "trainer"
    reports_served = True
    counts_bytes = True
    control_class = ServerControl

    control: ServerControl
    server: ServerClient

    _next_grant: StepGrant | None = None  # came with the reply to the last push
    _validates_averages = False
    _scale = 1.0  # of the losses of the present step

    # The connection.

    def init_connection(self) -> None:
        self.model = build_model(self.task, self.config.seed, self.process.placement, owns_tables=False)
        self.prepare_data()
        self.server = self.resources.enter_context(self.control.connected(lambda: self.data.blocks))
        self.start_from(self.control.join(self.data.epoch_samples))

    def start_from(self, reply: JoinReply) -> None:
        """Start at the server's version: restore a part of a checkpoint, or continue the data of a lost trainer."""
        self.step = reply.step
        self.lockstep = reply.lockstep
        self.optimizer = SharedOptimizer(self.server)
        self.context = StepContext()
        self.receive_model(reply)
        position = reply.data_position
        owner = module_buffer_owner(tuple(range(self.process.trainers)), self.config.training.uneven_inputs)
        # The others wait for this trainer between two steps, but not for one that takes the place of a lost one.
        self._is_waited_for = self.lockstep and position is None
        self.model_copy.keeps_buffers = position is None and self.trainer_index == owner
        self.on_after_setup_optimizers()
        if position is None:
            self.seed_or_restore(reply.stored_part, reply.validated_step)
            source, applied = self.data.source, self.data.positions().state_dict()
            state, counters = source.state_dict(), dict(vars(self.progress))
            self.server.report_source(DataPosition(state, applied, counters, source.can_reshard, source.refetchable))
        else:
            self.replace_lost(reply.stored_part, position, reply.incarnation)
            self.validator.validated_step = reply.validated_step  # or it would wait for the shares of the others
        self.process.startup_timer.mark("connection")

    def replace_lost(self, part: bytes | None, position: DataPosition, incarnation: int) -> None:
        """Take the place of a trainer that was lost: continue its data after what was applied of it.

        ``part``, of the newest checkpoint, has the state of the task; None if there is none. With the incarnation the
        random numbers are not those of the lost one.
        """
        seed_all(self.config.seed, incarnation, 1 + self.trainer_index)
        self.flags = TrainingFlags(self.tree.model)
        stored = {} if part is None else unpack(part)
        names = "task", "local_steps", "residuals", "extra_state", "flags", "validation"
        kept = {name: stored.get(name) for name in names}
        data = {"buffer": None, "source": position.source, "applied": position.applied, "counters": position.counters}
        # Not by an override of the user, which expects what its ``state_dict`` has added.
        Trainer.load_state_dict(self, {**kept, **data, "random": None, "resumes": incarnation})

    def receive_model(self, reply: JoinReply) -> None:
        """Load the server's model, and choose the transport that keeps it current."""
        refuse_max_norm(self.model)
        load_frozen_state(self.model, reply.model, "the server")
        trained = find_trained(self.model, reply.parameter_layout)
        transport = self.transport = make_transport(self.control, reply, list(trained.values()))
        layout, rows = reply.parameter_layout, None
        shards = reply.shards or (full_shard(layout),)
        if layout.tables and not transport.shares_rows:
            rows = RowLookup(self.server, layout, shards, list(trained.values()), self.lockstep, self.clock)
            exclude_from_compile(self.model)
        self.model_copy = ModelCopy(
            self.model,
            trained,
            transport.shares_parameters,
            lambda: self.control.flush_records().wait(),
            row_ends(layout, shards),
        )
        self.tree = self.model_copy.tree
        self.record("transport", transport=transport.name)
        self.optimizer_calls.set_optimizers(reply.parameters_of, self.model)
        self.local_steps = LocalSteps.of(self.task, self.model, self.config, self.trainer_index)
        self._validates_averages = reply.validates_averages
        self.pull = VersionPull(
            self.control, transport, self.model_copy, self.context, self.clock, reply.parameters_of, rows
        )
        self.push = GradientPush(self.pull)
        self.resources.enter_context(closing(self.push.buckets))
        log.info("trainer %d: transport of parameters and gradients: %s", self.trainer_index, transport.name)
        if not transport.zero_copy:
            reason = reply.why_not_by_bucket
            how = f"after all gradients: {reason}" if reason else "bucket by bucket, as gradients arrive"
            log.info("trainer %d: the server updates parameters %s", self.trainer_index, how)
        # Trainers that run freely may have made updates since the reply; each step pulls its own version.
        view = self.server.view_version(None)
        self.pull.load_view(view)
        self.model_copy.load_buffers(view.buffers)

    # A step.

    def step_scope(self) -> AbstractContextManager[Any]:
        return self.context.scope()

    def agree(self) -> Decision:
        grant, self._next_grant = self._next_grant, None
        if grant is None:
            began = time.perf_counter()
            announcement = self.announcement()
            announcement = replace(announcement, waited_s=time.perf_counter() - began)
            with span("wait"):
                grant = self.server.announce(announcement, self.model_copy.changed_buffers())
            self.clock.lap_shared("pull", wait=grant.held_s)
        assert grant.decision is not None
        self._is_waited_for, self._scale = self.lockstep, grant.scale
        if grant.decision.active:
            # With ``join`` another trainer's may be kept from now on.
            owner = module_buffer_owner(grant.decision.active, self.config.training.uneven_inputs)
            self.model_copy.keeps_buffers = grant.wants_buffers and self.trainer_index == owner
        if self.trainer_index in grant.decision.active:
            self.begin_step(grant)
        else:
            self.model_copy.load_buffers(grant.buffers)
        return grant.decision

    def begin_step(self, grant: StepGrant) -> None:
        """Begin a step in which this trainer has data: load the module buffers, and request the parameters."""
        # Before hooks are called in which a task may change them: on_epoch_end, on_epoch_start.
        self.model_copy.load_buffers(grant.buffers)
        self.pull.start(grant)

    @property
    def loss_scale(self) -> float:
        return self._scale if self.local_steps is None else self.local_steps.updater.skipping.scale

    def load_version(self) -> None:
        self.pull.load(self.current_step.batches)
        self.clock.lap("pull")

    def hooks_between_steps(self) -> AbstractContextManager[None]:
        decision = self.current_step.decision
        is_active = self.trainer_index in decision.active
        if decision.verdict is Verdict.END:
            self.pull.load_step(decision.step)
        elif is_active:
            self.pull.load_values()
        self.clock.lap("pull")
        # Memory of the server stays as it is in lockstep, until this trainer pushes; for one that has no more data the
        # others do not wait.
        return self.model_copy.hooks_called(self.lockstep and is_active)

    def on_hooks_called(self) -> None:
        self.model_copy.check_unchanged(between_steps=not self._is_waited_for)

    def on_last_loss(self, totals: StepTotals) -> None:
        # A change through ``grad.data`` after backward cannot be noticed, so nothing is sent before these hooks ran.
        changes_gradients = any(overrides(hooks, Hooks.on_batch_end) for hooks in self.hooks)
        # Nor before gradients are checked.
        waits = changes_gradients or self.config.training.may_skip or overrides(self, Trainer.on_after_backward)
        if self.local_steps is None and not waits:
            self.push.buckets.start()

    def step_optimizer(self, report: StepReport) -> StepResult:
        if self.local_steps is not None:
            self.model_copy.loaded.note()  # the parameters are the version again
        if report.optimizer:
            self.pull.pull_now(report.version)
        if cause := self.find_nonfinite(report.loss):
            report = replace(report, nonfinite=cause)
            for parameter in self.model_copy.parameters.values():
                parameter.grad = None  # the server uses none of them
        report, used = self.push.finish_buckets(report)
        known = self.model_copy.known_buffers
        buffers = self.model_copy.pack_buffers() if self.pull.grant.wants_buffers else None
        result = self.finish_step(self.push.send(self.optimizer, self.make_push(report, used, buffers)))
        if (feedback := self.pull.transport.feedback) is not None:
            # A push that is sent again has the same bytes; one that was dropped leaves the residual as it was.
            (feedback.discard if result.dropped else feedback.commit)()
        self.pull.end_step()
        if report.optimizer and result.dropped:
            self.model_copy.known_buffers = known  # the server has not taken those of the push
        elif report.optimizer:
            self.pull.load_updated(report.optimizer, result.step)
            self.clock.lap("pull")
        self.wire_bytes = self.pull.wire_bytes
        if self.pull.rows is not None:
            self.wire_bytes += self.pull.rows.num_bytes
        return result

    def make_push(
        self, report: StepReport, used: tuple[bool, ...] | None = None, buffers: PackedBuffers | None = None
    ) -> Push:
        """Return a push with what names it, the samples that it holds, and the announcement of the next step.

        The announcement is made separately if something is done between the two steps, or if this trainer does not have
        its data yet; also with several optimizers, as the next step may be of the same batch.
        """
        positions, keys = self.data.pop_served()
        report = replace(report, used=used, positions=_compact(positions), keys=keys)
        is_followed = self.optimizer_calls.parameters_of or (
            self.lockstep and is_due(report.version + 1, *self.due_every, since=self.optimizer_calls.batch_began)
        )
        return Push(self.server.number_push(), report, buffers, None if is_followed else self.announcement_if_ready())

    def finish_step(self, grant: StepGrant) -> StepResult:
        """Take the result of the push from the server's reply, and the grant of the next step if it has one."""
        assert grant.result is not None
        self._scale = grant.scale
        has_grant = grant.decision is not None and grant.decision.verdict is not Verdict.WAIT
        self._next_grant = grant if has_grant else None
        self.clock.lap_shared("push", wait=grant.result.held_s + grant.held_s, apply=grant.result.apply_s)
        return grant.result

    def wait_version(self, version: int) -> int:
        with span("wait"):
            step = self.server.wait_version(version)
        self.clock.lap("wait")
        return step

    # Validation, checkpoints, records.

    def sync_model(self) -> None:
        view = self.pull.load_step(self.step)
        # Those of the owner are the version's, and hooks may have changed them since its last push. After a round they
        # are not, as the version has a mean; at the end that came with the decision.
        has_mean = self.local_steps is not None and self.current_step.decision.verdict is not Verdict.END
        if not (self.lockstep and self.model_copy.keeps_buffers) or has_mean:
            self.model_copy.load_buffers(view.buffers)

    def save_part(self, reason: str, since: float) -> None:
        callbacks = self.process.kept.callbacks.values()
        if overrides(self.task, Task.on_checkpoint) or any(overrides(one, Callback.state_dict) for one in callbacks):
            self.sync_model()
        # The server copies while this trainer does.
        model = self.model_copy
        staging = self.server.stage_checkpoint(
            reason, model.extra_state(), model.changed_buffers(), ends_epoch=self.ends_epoch
        )
        step, part = self.step, self.state_dict()
        records = self.control.flush_records()  # with those of ``on_checkpoint``
        takes_part = staging.wait()
        records.wait()  # records from before the checkpoint are stored before it is
        if takes_part:
            self.control.send_part(step, part, since)

    def averages(self) -> Mapping[str, Tensor]:
        return self.server.averages() if self._validates_averages else {}

    def optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


def _compact(positions: npt.NDArray[np.int64]) -> Sequence[int]:
    """Return positions as they are cheapest in a message: consecutive ones, as a FIFO serves them, as a range."""
    numbers: list[int] = positions.tolist()
    if not numbers:
        return numbers
    consecutive = range(numbers[0], numbers[0] + len(numbers))
    return consecutive if numbers == list(consecutive) else numbers
