"""Training with DistributedDataParallel: gradients are averaged by all-reduce during the backward."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from paramserver.checkpoint import stage_copy
from paramserver.consistency import Announcement, Decision, Readiness, Verdict, module_buffer_owner
from paramserver.errors import TaskError, TrainingError, UnsupportedConfiguration, message_of
from paramserver.limits import is_due
from paramserver.metrics.profile import span
from paramserver.metrics.records import StepReport, StepResult, StepTotals, combine
from paramserver.optim.outer import round_weights
from paramserver.parameters.flat import trainable_parameters
from paramserver.parameters.model import build_model, extra_state_dict, load_part_of_state, refuse_synced_batch_norm
from paramserver.parameters.model_tree import mean_buffers, set_buffer
from paramserver.parameters.numerics import checksums, divide_
from paramserver.parameters.tables import find_tables, refuse_max_norm
from paramserver.platform import SHARES_MEMORY
from paramserver.trainers.base import overrides
from paramserver.trainers.ddp_control import AgreedStep, DdpControl, translate_peer_loss
from paramserver.trainers.local import ReplicaTrainer
from paramserver.trainers.local_steps import LocalSteps
from paramserver.transport.all_reduce import SharedAllReduce
from paramserver.transport.messages import OptimizerCall

# The ranks compare their parameters at every so many collections of records.
_COMPARE_EVERY = 10


class DdpTrainer(ReplicaTrainer):
    """One rank of a process group. All ranks hold the model, the optimizer and the schedule.

    For each step the ranks exchange a few numbers: the data that each one has, whether one wants to stop, and loss
    and samples of the current step. So all take the same decision from the same numbers. These are known before the
    last backward of a step: on one host each rank writes them to shared memory then, and reads those of the others once
    its gradients are reduced; on several hosts they are reduced during the backward. The ranks agree again before a
    step only if one had no data by then, or if a validation or checkpoint came between.

    Example::

        >>> from paramserver.trainers import DdpTrainer
        >>> class Bf16(DdpTrainer):
        ...     def configure_ddp(self, model, device_ids):
        ...         wrapped = super().configure_ddp(model, device_ids)
        ...         wrapped.register_comm_hook(None, bf16_compress_hook)
        ...         return wrapped
    """

    for_mode = "ddp"

    control_class = DdpControl

    control: DdpControl

    # Of gradients, in shared memory; None if they are reduced over the process group.
    all_reduce: SharedAllReduce | None = None

    _known: AgreedStep | None = None  # that was awaited in the step during which it was exchanged
    _buckets: list[tuple[torch.futures.Future[Tensor], Tensor]]  # of the present backward
    _missed_updates = False
    _went_through_wrapper = False
    # Ranks that had no data in a step since all of them were brought to the same model.
    _idle_ranks: frozenset[int] = frozenset()
    _uses_hook: bool  # one that compresses, or one of the user, which divides by the number of all ranks
    _uneven_inputs: str  # as in ``module_buffer_owner``
    _may_be_idle = False  # whether a step may go without ranks that have no data
    # Where it may not, and the full buffer of this rank blocks simulations: what all have received, and since when.
    _stalled: tuple[int, float] | None = None
    _received = 0
    _buffers_differ = False  # forwards gave a module buffer another shape on one rank than on another
    _broadcasts_buffers = False  # in place of DistributedDataParallel, whose forwards ranks without data do not know
    _is_first_forward = False  # the next one, of its step
    _has_common_step = False  # a step that all ranks had data for
    _wrapped_without_buffers = False
    _collections = 0

    # The connection and the model.

    @translate_peer_loss()  # another rank may be lost, or refused for a model or a data set of its own
    def init_connection(self) -> None:
        self.control.check_equal(
            "cluster.backend",
            [self.process.placement.backend],
            "must be the same on all hosts",
            "give each host a GPU for each of its trainers, or set device.kind: cpu on all of them",
        )
        self._active = tuple(range(self.process.trainers))
        self.resources.enter_context(self.control.connected())
        self._build_model()
        self._broadcast_start()
        self.on_after_setup_optimizers()

    def _build_model(self) -> None:
        placement = self.process.placement
        model = build_model(self.task, self.config.seed, placement)
        if placement.device.type == "cpu":
            refuse_synced_batch_norm(model, "in mode ddp on the CPU")
        if self.process.trainers > 1:
            refuse_max_norm(model)
        # DDP broadcasts and reduces by position, and would end with an error of the collective.
        self.control.check_equal(
            "build_model",
            [
                f"{name} of shape {tuple(tensor.shape)} and {tensor.dtype}"
                for name, tensor in chain(model.named_parameters(), model.named_buffers())
            ],
            "must build the same model in every process",
            "let nothing in it depend on the rank or on time",
        )
        if self.checkpoints is not None:
            self.checkpoints.restore_model(model)  # on rank 0; the constructor of DDP broadcasts it
        self._broadcast_late_buffers(model)
        _separate_elements(model)
        # DDP would end with an error of the collective. What the task excludes itself stays excluded.
        fixed = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
        tensors = {**fixed, **dict(model.named_buffers())}
        own = {name: tensor for name, tensor in tensors.items() if tensor.dtype not in _COLLECTIVE_DTYPES}
        if own:
            model._ddp_params_and_buffers_to_ignore = [*getattr(model, _IGNORED, ()), *own]  # type: ignore[assignment]
            for tensor in own.values():
                _broadcast(tensor, 0)
        self._trained_names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._sends_bytes = any(buffer.dtype not in _COLLECTIVE_DTYPES for buffer in model.buffers())
        self._wrapped_without_buffers = not any(True for _ in model.buffers())
        device_ids = [placement.device] if placement.device.type != "cpu" and len(placement.devices) == 1 else None
        self.model = self._built_model = model  # ``configure_ddp`` may wrap it in several modules
        self.make_optimizer(model)
        self._share_all_reduce(model)
        self._uneven_inputs = self.config.training.uneven_inputs
        # A rank that waits for samples of simulations is idle while another one's full buffer blocks these.
        is_fed = self.process.receiver_spec is not None
        if self.updater.parameters_of or self.local_steps is not None:
            self._check_not_wrapped()
            # Not wrapped: a loss has gradients for a part of the model, or for a local step of this rank alone. What
            # all ranks share is reduced afterwards.
            for tensor in (*model.parameters(), *model.buffers()):  # what the constructor of DDP does
                _broadcast(tensor, 0)
            self._may_be_idle = self._broadcasts_buffers = is_fed or self._uneven_inputs == "join"
            return
        for name in self._tables:
            # Of tables whose outputs are added it is one memory, which DDP would divide in place for each of them.
            model.get_parameter(name).register_hook(Tensor.clone)  # type: ignore[no-untyped-call]
        self.model = wrapped = self.configure_ddp(model, device_ids)
        if not isinstance(wrapped, DistributedDataParallel):
            if self._uneven_inputs == "join":
                raise UnsupportedConfiguration(
                    "training.uneven_inputs (join) must be stop where configure_ddp returns no "
                    "DistributedDataParallel, as a trainer without data takes part in its collectives; return one, or "
                    "set stop"
                )
            return
        if is_fed:
            self._uneven_inputs = "join"
        self._may_be_idle = self._uneven_inputs == "join"
        wrapped.register_forward_pre_hook(self._on_wrapper_forward)
        self._register_comm_hook(wrapped)
        if self._may_be_idle:
            self._broadcasts_buffers, wrapped.forward_sync_buffers = wrapped.forward_sync_buffers, False

    def _register_comm_hook(self, wrapped: DistributedDataParallel) -> None:
        """Reduce gradients in shared memory, or over the ranks that have data, unless the wrapper has a hook."""
        self._uses_hook |= bool(wrapped._comm_hooks)
        # DDP refuses annotations that are strings; a lambda has none.
        if self.all_reduce is not None:
            wrapped.register_comm_hook(None, lambda _, bucket: self._reduce_bucket(bucket))
        elif self._may_be_idle and self.process.trainers > 1 and not wrapped._comm_hooks:
            try:
                wrapped.register_comm_hook(None, lambda _, bucket: self._reduce_over_group(bucket))
            except RuntimeError:
                if not overrides(self, DdpTrainer.configure_ddp):
                    raise
                self._uses_hook = True  # a built-in one, which only the reducer knows

    def _share_all_reduce(self, model: nn.Module) -> None:
        """Reduce gradients in shared memory, if neither the user, a device nor a sparse gradient needs another way."""
        options, placement = self.config.ddp, self.process.placement
        self._uses_hook = options.comm_hook != "none" or "mixed_precision" in options.extra
        if (
            self.process.trainers > 1
            and SHARES_MEMORY
            and options.shared_memory == "auto"
            and placement.device.type == "cpu"
            and not (self._uses_hook or overrides(self, DdpTrainer.configure_ddp) or self._tables)
        ):
            parameters = list(trainable_parameters(model).values())
            self.all_reduce = self.control.shared_all_reduce(parameters, self.resources)
        self.record("transport", transport="shared_memory" if self.all_reduce else placement.backend)

    def _reduce_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce the gradients of DistributedDataParallel, all buckets at once after the backward of the last one.

        Before, the other ranks still compute, and to wait for them would hold up this backward.
        """
        if bucket.index() == 0:
            self._buckets = []
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._buckets.append((future, bucket.buffer()))
        if bucket.is_last():
            assert self.all_reduce is not None
            self.all_reduce.average([buffer for _, buffer in self._buckets], self._active)
            for reduced, buffer in self._buckets:
                reduced.set_result(buffer)
        return future

    def _reduce_over_group(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce a bucket of gradients to the mean over the ranks that have data."""
        buffer = bucket.buffer()
        buffer /= len(self._active)
        reduced: torch.futures.Future[Any] = dist.all_reduce(buffer, async_op=True).get_future()

        def finish(done: torch.futures.Future[Any]) -> Tensor:
            done.value()  # raises the error of the collective
            return buffer  # type: ignore[no-any-return]

        return reduced.then(finish)

    def _broadcast_late_buffers(self, model: nn.Module) -> None:
        """Give all ranks the stored module buffers that have another shape than as built, as DDP refuses them."""
        late: dict[str, Tensor | None] = {}
        if self.checkpoints is not None:
            stored = dict(model.named_buffers(remove_duplicate=False))
            late = {name: stored.get(name) for name in self.checkpoints.late_buffers(model)}
        late = self.control.broadcast(late)
        for name, value in late.items() if self.checkpoints is None else ():
            set_buffer(model, name, value)

    def _check_not_wrapped(self) -> None:
        if overrides(self, DdpTrainer.configure_ddp) or self.config.ddp.comm_hook != "none":
            several = f"several optimizers ({', '.join(self.updater.parameters_of)})"
            raise UnsupportedConfiguration(
                f"ddp.comm_hook ({self.config.ddp.comm_hook}) must be none, and configure_ddp not overridden, with "
                f"{'training.local_steps and training.outer' if self.local_steps else several}, as the model is not "
                "wrapped in DistributedDataParallel; remove it"
            )

    def _broadcast_start(self) -> None:
        """Send step, extra state of modules, optimizer state and stored parts from rank 0 to every rank."""
        self.prepare_data()
        start: Any = None
        parts: list[Any] | None = None
        if self.checkpoints is not None and self.monitor is not None:
            # DDP broadcasts tensors only.
            extra_state = stage_copy(extra_state_dict(self.unwrapped_model))
            counts = self.monitor.step, self.monitor.samples, self.monitor.skipped
            start = counts, self.checkpoints.updater_state(), extra_state, self.monitor.validated_step
            parts = [self.checkpoints.trainer_part(i) for i in range(self.process.trainers)]
        (self.step, self.samples, self.skipped), state, extra_state, validated_step = self.control.broadcast(start)
        if extra_state:
            load_part_of_state(self.unwrapped_model, extra_state)
        if state is not None:
            self.updater.load_state_dict(state)
        part: list[Any] = [None]
        dist.scatter_object_list(part, parts, src=0, group=self.control.group)
        self.seed_or_restore(part[0], validated_step)

    def configure_ddp(self, model: nn.Module, device_ids: list[torch.device] | None) -> nn.Module:
        """Return the model wrapped in DistributedDataParallel. Override to wrap it differently.

        Args:
            model: as ``Task.build_model`` returned it, on its devices.
            device_ids: one GPU; None on the CPU, or if the model spans several devices.
        """
        options = self.config.ddp
        arguments: dict[str, Any] = {"module": model, "device_ids": device_ids}
        further = inspect.signature(DistributedDataParallel).parameters.keys() - arguments
        if unknown := sorted(options.extra.keys() - further):
            raise UnsupportedConfiguration(
                f"ddp.extra ({', '.join(unknown)}) must be arguments of DistributedDataParallel that the trainer does "
                f"not give itself; choose from {', '.join(sorted(further))}"
            )
        wrapped = DistributedDataParallel(**arguments, **{"gradient_as_bucket_view": True, **options.extra})
        try:
            _COMM_HOOKS[options.comm_hook](wrapped)
        except TypeError as error:  # of DistributedDataParallel, about devices and backend
            raise UnsupportedConfiguration(
                f"ddp.comm_hook ({options.comm_hook}) must be one that the devices and the backend of the run support "
                f"({error}); set none, or another one"
            ) from error
        return wrapped

    @property
    def unwrapped_model(self) -> nn.Module:
        return self._built_model

    @property
    def data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    # A step.

    def step_scope(self) -> AbstractContextManager[Any]:
        return translate_peer_loss()

    def agree(self) -> Decision:
        decision = self._decide() if self._has_announced else None
        if decision is None or decision.verdict is Verdict.WAIT:
            # Not within a step: there a rank does not wait for its data, so another one must not continue without it.
            announcement, may_be_idle = self.announcement(), self._may_be_idle
            received = 0 if may_be_idle else self.data.received
            blocks, kinds = may_be_idle and self.data.blocks, self.tree.buffer_kinds()
            self.control.agreement.start(
                announcement, None, self.control.is_collection_due, blocks=blocks, received=received, buffer_kinds=kinds
            )
            decision = self._decide()
        self._check_progress(decision)
        if decision.verdict is Verdict.WAIT and self._idle_ranks:
            # What makes samples may wait for the newest model, and rank 0 publishes none while it lacks updates.
            self._synchronize()
        if decision.verdict is Verdict.END and self.monitor is not None:
            # A reason does not fit into the exchange of numbers.
            decision = replace(decision, reason=self.control.set_first("stop", decision.reason))
        if decision.active:
            if self._idle_ranks.intersection(decision.active):
                self._synchronize()
            self._keep_module_buffers(decision.active)
            self._active = decision.active
            self._idle_ranks |= set(range(self.process.trainers)).difference(decision.active)
            if len(self._active) == self.process.trainers:
                self._has_common_step = True
            elif isinstance(self.model, DistributedDataParallel):
                self._prepare_shadowed(self.model)
        self.clock.lap("wait")
        return decision

    def _check_progress(self, decision: Decision) -> None:
        """End a run that may not continue without a rank whose samples are behind the full buffer of this one.

        They are not where samples still come: simulations that live send some in this time, unless they are blocked.
        """
        if decision.verdict is not Verdict.WAIT or self._may_be_idle or not self.data.blocks:
            self._stalled = None
            return
        simulations = self.config.simulations
        assert simulations is not None
        now, limit_s = time.monotonic(), max(self.config.cluster.timeout_s, simulations.timeout_s)
        if self._stalled is None or self._stalled[0] != self._received:
            self._stalled = self._received, now
        elif now - self._stalled[1] > limit_s:
            raise TrainingError(
                f"the buffer of trainer {self.trainer_index} is full, no trainer has received a sample for {limit_s:g} "
                "s (cluster.timeout_s, simulations.timeout_s), as another one waits for those of the simulations that "
                "it blocks, and no update can be made without a trainer as configure_ddp returns no "
                "DistributedDataParallel; return one, or raise buffer.capacity"
            )

    @cached_property
    def _tables(self) -> list[str]:
        return find_tables(self.unwrapped_model)

    def _prepare_shadowed(self, wrapper: DistributedDataParallel) -> None:
        """Prepare a step in which ranks without data know of the last backward of the others, and of no forward."""
        without = next(index for index in range(self.process.trainers) if index not in self._active)
        if wrapper.static_graph and not self._has_common_step:
            raise TaskError(
                "ddp.extra: {static_graph: true} must have a first step that all trainers have data for, and trainer "
                f"{without} has none; remove it"
            )
        if self._tables:
            raise TaskError(
                f"sparse gradients ({', '.join(self._tables)}) must have a step that all trainers have data for, and "
                f"trainer {without} has none for step {self.step + 1}; leave out sparse=True, or set "
                "training.uneven_inputs: stop, or mode: rpc"
            )
        with _named_causes():
            # Otherwise a collective of the first forward with gradients.
            wrapper._has_rebuilt_buckets |= wrapper.reducer._rebuild_buckets()

    def _decide(self) -> Decision:
        agreed = self._agreed()
        self._received = agreed.received
        return self.decide(agreed.announcements, agreed.blocking)

    def _keep_module_buffers(self, active: tuple[int, ...]) -> None:
        """Continue with the module buffers that the last step kept, also where another rank's are kept from now on."""
        source = module_buffer_owner(self._active, self._uneven_inputs)
        if self._may_be_idle:
            if self._broadcasts_buffers or source != module_buffer_owner(active, self._uneven_inputs):
                self._send_buffers(source)
            return
        self._is_first_forward = True
        # DDP does it in that forward, but not with several optimizers, where the model is not wrapped, nor if it found
        # no buffers at first.
        everything = not isinstance(self.model, DistributedDataParallel) or self._wrapped_without_buffers
        if self._buffers_differ:
            if everything or self._broadcasts_buffers:
                self._send_buffers(source)
            return
        _separate_elements(self.unwrapped_model)
        if everything or self._sends_bytes:
            for buffer in self.unwrapped_model.buffers():
                if everything or buffer.dtype not in _COLLECTIVE_DTYPES:
                    _broadcast(buffer, source)

    def _send_buffers(self, source: int) -> None:
        """Give all ranks the module buffers of one, which forwards may have reshaped or registered since."""
        if self.process.trainers == 1:
            return
        packed = self.tree.pack_buffers() if self.trainer_index == source else None
        with translate_peer_loss():
            packed = self.control.broadcast(packed, source)
        if self.trainer_index != source:
            self.tree.load_buffers(packed)

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        try:
            with _named_causes():
                yield
        except RuntimeError:
            if not self._may_be_idle:  # otherwise buffers of any type are sent
                self._check_buffer_types()
            raise
        except (AttributeError, TypeError) as error:
            if "'DistributedDataParallel' object" not in message_of(error):
                raise
            raise TaskError(
                f"training_step may only call the model, which mode ddp wraps ({error}); write what it does with its "
                "parts into the forward of the model"
            ) from error

    def backward_batch(self, loss: Tensor, batches: int) -> None:
        try:
            super().backward_batch(loss, batches)
        except NotImplementedError as error:
            if "SparseTensorImpl" not in message_of(error):  # the gradient that DDP was to reduce
                raise
            raise TaskError(
                "a gradient is sparse, and that of no nn.Embedding or nn.EmbeddingBag with sparse=True; use one of "
                "these, or dense gradients (sparse=False)"
            ) from error

    def _check_buffer_types(self) -> None:
        """Name a module buffer that DDP cannot send, as it has another type than when the model was built."""
        for name, buffer in self.unwrapped_model.named_buffers():
            if buffer.dtype not in _COLLECTIVE_DTYPES and name in getattr(self.model, "named_module_buffers", {}):
                raise TaskError(
                    f"module buffer {name} has become {buffer.dtype}, which is broadcast only where it has that type "
                    "from the start; give it the type in build_model"
                )

    def _on_wrapper_forward(self, wrapper: DistributedDataParallel, inputs: Any) -> None:
        self._went_through_wrapper |= torch.is_grad_enabled() and wrapper.require_backward_grad_sync
        # DDP broadcasts module buffers in each forward that follows one with gradients. A step has the forwards that a
        # task calls, with and without gradients; as in ``rpc`` all take the buffers over once.
        wrapper.require_forward_param_sync, self._is_first_forward = self._is_first_forward, False

    def _check_step(self) -> None:
        """Refuse what would let the parameters of the ranks diverge."""
        if isinstance(self.model, DistributedDataParallel) and not self._went_through_wrapper:
            raise TaskError(
                "training_step did not call the model that it was given, so its gradients would not be averaged over "
                "the trainers; call model(...), not model.module or self.trainer.unwrapped_model"
            )
        self._went_through_wrapper = False
        if self.process.trainers > 1 and not getattr(self.model, "find_unused_parameters", True):
            # DDP would wait for the gradients of these, and reduce none of their bucket.
            frozen = {id(p) for p in self.updater.parameters if not p.requires_grad}
            for name, parameter in self.unwrapped_model.named_parameters() if frozen else ():
                if id(parameter) in frozen:
                    raise TaskError(
                        f"parameter {name} was frozen after the start of the run, and gradients would not be averaged "
                        "over the trainers; set ddp.extra: {find_unused_parameters: true}"
                    )

    def on_last_loss(self, totals: StepTotals) -> None:
        self._check_step()
        if self.local_steps is None:
            self._announce_in_step(totals)

    def _announce_in_step(self, totals: StepTotals | None) -> None:
        # The announcement holds until the next batch is taken: samples in the buffer stay, and an end is final.
        # It is made again after a validation or a checkpoint.
        is_followed = is_due(self.step + 1, *self.due_every, since=self.optimizer_calls.batch_began)
        announcement = None if is_followed else self.announcement_if_ready()
        announcement = announcement or self.control.with_stop(Announcement(Readiness.WAITING), self.seconds)
        collects, kinds = self.control.is_collection_due, self.tree.buffer_kinds()
        self.control.agreement.start(announcement, totals, collects, before_collective=True, buffer_kinds=kinds)

    @property
    def _has_announced(self) -> bool:
        """Whether this rank has announced its next step, of which nothing was decided yet."""
        return self._known is not None or self.control.agreement.started

    def _skipped(self) -> StepResult | None:
        """Decide, as all ranks do, whether the step that they have computed is skipped; return the result if it is.

        A mean that is finite is one of finite gradients.
        """
        if not self.updater.skipping.is_possible:
            return None
        agreed = self.control.agreement.wait()
        assert agreed.totals is not None
        has_mean = self.trainer_index in self._active
        cause = self.find_nonfinite(agreed.totals.loss) if has_mean else ""
        if len(self._active) < self.process.trainers:  # a rank without data has no gradient
            cause = next(filter(None, self.control.exchange(cause)), "")
        if not cause:
            self._known = agreed
            self.updater.skipping.update_made(self._active, self.loss_scale)
            return None
        self._known = replace(agreed, totals=None)
        return self.skip_step(self._active, agreed.totals.samples, cause)

    def _agreed(self) -> AgreedStep:
        """Wait for the announcements of all ranks, and count the step during which they were exchanged."""
        with span("wait"):
            agreed, self._known = self._known or self.control.agreement.wait(), None
        if agreed.buffers_differ and not self._buffers_differ:
            self._buffers_differ = True
            if isinstance(self.model, DistributedDataParallel) and not self._may_be_idle:
                # It broadcasts by position and size. Without ``broadcast_buffers`` each rank has its own.
                wrapped = self.model
                self._broadcasts_buffers, wrapped.forward_sync_buffers = wrapped.forward_sync_buffers, False
        if agreed.totals is not None:
            self.samples += agreed.totals.samples
            self.count_skipped(agreed.totals.skipped)
            self.control.update_applied(self.make_result(self.step, [agreed.totals], self.seconds))
        if agreed.collect_records:
            self.control.collect_records()
            self._collections += 1
            if self._collections % _COMPARE_EVERY == 0 and not self._idle_ranks:
                self._compare_parameters()
        return agreed

    def step_optimizer(self, report: StepReport) -> StepResult | None:
        if report.optimizer:
            return self._update_one()
        if self.local_steps is not None:
            totals = StepTotals(samples=report.samples, skipped=report.skipped, **combine([report]))
            self._announce_in_step(totals)
            self._reduce_round(self.local_steps, report.samples)
        elif (skipped := self._skipped()) is not None:
            return skipped
        elif self._uses_hook and len(self._active) < self.process.trainers:
            # A hook that compresses has divided by the number of all ranks.
            for gradient in (one.grad for one in self.updater.parameters if one.grad is not None):
                gradient.mul_(self.process.trainers / len(self._active))
        self.updater.apply(report.version + 1)
        self.updater.clear_gradients()
        self.clock.lap("apply")
        return None

    def follow_update(self) -> int:
        self.updater.clear_gradients()
        result = self._update_one()
        if not result.dropped:
            self.control.update_applied(result)
        return result.step

    def _update_one(self) -> StepResult:
        """Step the one of several optimizers that was called, with the mean of the gradients of those that have data.

        Ranks without data make the same update.
        """
        present = self.optimizer_calls.present
        calls = list(present.values())
        name, samples = calls[0].name, sum(call.samples for call in calls)
        if cause := self.optimizer_calls.nonfinite:
            return self.skip_step(list(present), samples, cause)
        self.updater.skipping.update_made(present, self.loss_scale)
        if self.process.trainers > 1:
            self._reduce_gradients(name, present)
        self.clock.lap("push")
        self.updater.apply(self.step + 1, name)
        self.updater.clear_gradients()
        self.clock.lap("apply")
        self.samples += samples
        return self.make_result(self.step + 1, calls, self.seconds, name)

    @torch.no_grad()
    def _reduce_round(self, local_steps: LocalSteps, samples: int) -> None:
        """Take the means, over the ranks that have data, of what their rounds changed, and of their module buffers."""
        if self.process.trainers == 1:
            return
        has_data = self.trainer_index in self._active
        if self.config.training.weights_samples:
            of_ranks = self.control.exchange(samples)
            own = round_weights(self.config.training, [of_ranks[index] for index in self._active])
            for parameter in local_steps.parameters if has_data else ():
                assert parameter.grad is not None
                parameter.grad *= own[self._active.index(self.trainer_index)]
        self._reduce_dense(local_steps.parameters, self._active)
        # As a server does it; they are few, and forwards may have reshaped or registered them.
        mean = mean_buffers(self.control.exchange(self.tree.pack_buffers() if has_data else None))
        assert mean is not None
        self.tree.load_buffers(mean)
        self.clock.lap("push")

    @torch.no_grad()
    def _reduce_gradients(self, name: str, calls: Mapping[int, OptimizerCall]) -> None:
        dense: list[nn.Parameter] = []
        for number, parameter in enumerate(self.optimizer_calls.parameters(name)):
            # All ranks decide alike. A gradient that is sparse on some only is reduced as a dense one.
            kinds = {call.sparse[number] for call in calls.values() if call.used[number]}
            if kinds and min(kinds) == max(kinds) > 0:
                self._reduce_sparse(parameter, kinds.pop(), len(calls))
            elif kinds:
                dense.append(parameter)
        self._reduce_dense(dense, calls)

    def _reduce_dense(self, parameters: Sequence[Tensor], active: Collection[int]) -> None:
        """Replace the gradients of some parameters by their means over the ranks of ``active``; called by all ranks."""
        of_dtype = [
            [parameter for parameter in parameters if parameter.dtype == dtype]
            for dtype in sorted({parameter.dtype for parameter in parameters}, key=str)
        ]
        flats = []
        for own in of_dtype:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in own]
            flats.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        if self.all_reduce is not None:
            self.all_reduce.average(flats, active)
        else:
            for flat in flats:
                with translate_peer_loss(), span("push"):
                    dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat)
                if len(active) > 1:
                    divide_([flat], len(active))
        for own, flat in zip(of_dtype, flats, strict=True):
            for parameter, mean in zip(own, torch.split(flat, [p.numel() for p in own]), strict=True):
                parameter.grad = mean.view(parameter.shape)

    def _reduce_sparse(self, parameter: nn.Parameter, sparse_dim: int, count: int) -> None:
        gradient = parameter.grad
        if gradient is None:
            shape = parameter.shape
            indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
            gradient = torch.sparse_coo_tensor(indices, parameter.new_empty(0, *shape[sparse_dim:]), shape)
        gradient = gradient.coalesce()
        with translate_peer_loss(), span("push"):
            dist.all_reduce(gradient)
        parameter.grad = gradient / count

    def wait_version(self, version: int) -> int:
        """Take part in the collectives of ranks that still have data, as ``DistributedDataParallel.join`` does."""
        self._announce_in_step(None)
        self.tree.clear_gradients()
        if self.local_steps is not None:
            self._reduce_round(self.local_steps, samples=0)
            self.updater.apply(version)
            self.updater.clear_gradients()
            return version
        self._shadow_backward()
        if self._skipped() is not None:
            return version - 1
        self._missed_updates = True
        self.updater.on_missed_update()
        return version

    def _shadow_backward(self) -> None:
        """Take part in the collectives of the last backward of the others, as the ``main_hook`` of ``join_hook``."""
        ddp: Any = self.model
        ddp._match_all_reduce_for_bwd_pass()
        if ddp.find_unused_parameters and not ddp.static_graph:
            # It has the parameters that all ranks have used in another step.
            ddp.reducer._get_local_used_map().zero_()
            ddp._match_unused_params_allreduce()
        ddp.reducer._push_all_rebuilt_params()

    # Validation and checkpoints.

    def publish_version(self) -> None:
        if not self._missed_updates:  # otherwise the model is an earlier version until ``sync_model``
            super().publish_version()

    def sync_model(self) -> None:
        """Bring all ranks to the same model and module buffers, before they are validated or saved."""
        if self._has_announced:
            self._agreed()  # for the totals of the last step; its announcements may be outdated by now
        self._synchronize()

    def _synchronize(self) -> None:
        source = module_buffer_owner(self._active, self._uneven_inputs)
        sends = self._may_be_idle or self._buffers_differ
        if sends:
            self._send_buffers(source)
        _separate_elements(self.unwrapped_model)
        with translate_peer_loss():
            for buffer in () if sends else self.unwrapped_model.buffers():
                _broadcast(buffer, source)
            if not self._idle_ranks:
                self._compare_parameters()
                return
            # Ranks without data made no updates; they receive those of the others, of which the source is one.
            for parameter in self.unwrapped_model.parameters():
                _broadcast(parameter, source)
            # On the CPU: a tensor of a GPU would be made again on that one, which belongs to another rank.
            own = stage_copy(self.updater.state_dict()) if self.trainer_index == source else None
            state = self.control.broadcast(own, source)
        if self._missed_updates:
            self.updater.load_state_dict(state)
            self._missed_updates = False
        self._idle_ranks = frozenset()

    def _compare_parameters(self) -> None:
        """Refuse parameters that differ between the ranks: these train different models without a sign of it."""
        if overrides(self, DdpTrainer.configure_ddp):
            return  # a comm hook of the user may average the parameters only now and then
        # What a task makes of frozen ones, as those of a target network, is its own on each rank.
        own = checksums({name: p for name, p in self.unwrapped_model.named_parameters() if name in self._trained_names})
        gathered = self.control.exchange(own)
        for rank, sums in enumerate(gathered):
            for name, value in sums.items():
                if value != gathered[0][name]:
                    if isinstance(self.model, DistributedDataParallel):
                        with _named_causes():
                            self.model.reducer._rebuild_buckets()  # raises where the last reduction is not complete
                    raise TaskError(
                        f"parameter {name} of rank {rank} differs from that of rank 0 after step {self.step}; change "
                        "parameters through gradients only, or in the same way on every rank"
                    )


@contextmanager
def _named_causes() -> Iterator[None]:
    """Name the cause and the cure where DistributedDataParallel finds that its last reduction is not complete."""
    try:
        yield
    except RuntimeError as error:
        if "find_unused_parameters" not in message_of(error):
            raise
        raise TaskError(
            "some parameters had no part in the loss of an earlier step; set ddp.extra: {find_unused_parameters: "
            "true}, or use all parameters in each step"
        ) from error


# What gloo and NCCL both send; any other type is sent as bytes.
_COLLECTIVE_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
}
_IGNORED = "_ddp_params_and_buffers_to_ignore"


@torch.no_grad()
def _broadcast(tensor: Tensor, source: int) -> None:
    tensor = tensor.detach()
    if tensor.dtype in _COLLECTIVE_DTYPES:
        dist.broadcast(tensor, src=source)
        return
    flat = tensor.flatten().contiguous()
    dist.broadcast(flat.view(torch.uint8), src=source)
    tensor.copy_(flat.view(tensor.shape))


def _separate_elements(model: nn.Module) -> None:
    """Give each element of an expanded module buffer memory of its own, as a collective writes to it.

    And to a buffer that was made in ``torch.inference_mode()``, which nothing else may write to.

    Raises:
        UnsupportedConfiguration: a module buffer is sparse.
    """
    copies: dict[Tensor, Tensor] = {}
    for name, buffer in [*model.named_buffers(remove_duplicate=False)]:
        if buffer.layout is not torch.strided:
            raise UnsupportedConfiguration(f"{name} is a sparse tensor; parameters and buffers must be dense")
        if buffer.is_inference():
            set_buffer(model, name, copies.setdefault(buffer, buffer.clone()))
        elif any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
            buffer.data = buffer.data.contiguous()  # by ``data``: a module may have it under two names


def _register_powersgd(model: DistributedDataParallel) -> None:
    # Vogels et al., "PowerSGD", NeurIPS 2019. The first steps, in which DDP rebuilds its buckets, go uncompressed.
    for name, parameter in model.module.named_parameters():
        if not parameter.dim():
            raise UnsupportedConfiguration(
                f"parameter {name} must have at least one dimension with ddp.comm_hook (powersgd), whose rows are "
                "those of the first one; give it the shape (1,), or set another hook"
            )
    state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=10)
    model.register_comm_hook(state, powerSGD_hook)


# Compression of gradients, by the values of ``ddp.comm_hook``.
_COMM_HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "none": lambda model: None,  # DDP's own all-reduce
    "fp16": lambda model: model.register_comm_hook(None, fp16_compress_hook),
    "bf16": lambda model: model.register_comm_hook(None, bf16_compress_hook),
    "powersgd": _register_powersgd,
}
