"""How a trainer sends its gradients to the servers: in buckets, while backward continues, and with the push."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paramserver.devices import synchronize
from paramserver.distributed.rpc_agent import distributed_backward
from paramserver.metrics.profile import span, spanned
from paramserver.metrics.records import StepReport
from paramserver.server.client import InFlightCall
from paramserver.server.shared_optimizer import SharedOptimizer
from paramserver.trainers.pull import VersionPull, bytes_of
from paramserver.transport.autograd import local_root
from paramserver.transport.base import GradientBucket, TrainerTransport
from paramserver.transport.messages import Push, StepGrant


class GradientBuckets:
    """Packs the gradients of a step into the transport's memory, and sends each bucket once it is complete.

    Between ``start`` and ``finish`` a gradient is packed when it has been accumulated, and a bucket is sent with the
    last of its gradients, which distributed autograd would delay (docs/torch-notes.md, "Backward does not overlap with
    sending"). ``finish`` packs and sends the rest, and again what has changed since, so that the server receives what
    the parameters hold at the end. The parameters are in the order of the layout. A second ``send`` of the same bucket
    replaces the first.
    """

    def __init__(
        self, transport: TrainerTransport, parameters: Sequence[Tensor], send: Callable[[GradientBucket], None]
    ) -> None:
        self._transport = transport
        self._parameters = list(parameters)
        self._devices = {parameter.device for parameter in parameters}
        self._send = send
        self._started = False
        self._packed: dict[int, tuple[Tensor, int]] = {}  # by parameter: its gradient, and the version of that tensor
        self._missing: dict[GradientBucket, int] = {}
        self._buckets_of: list[list[GradientBucket]] = [[] for _ in parameters]
        for bucket, numbers in transport.buckets.items():
            for number in set(numbers):
                self._buckets_of[number].append(bucket)
        self._hooks = {
            number: parameter.register_post_accumulate_grad_hook(self._make_hook(number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(parameters)
            if self._buckets_of[number]
        }

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks.values():
            hook.remove()

    def start(self) -> None:
        """Pack and send gradients from now on as they are accumulated. Call it before the last backward of a step."""
        self._missing = {bucket: len(set(numbers)) for bucket, numbers in self._transport.buckets.items()}
        self._started = True

    def _make_hook(self, number: int) -> Callable[[Tensor], None]:
        def on_accumulated(parameter: Tensor) -> None:
            if not self._started or number in self._packed:
                return
            gradient = parameter.grad
            # A GPU tensor would have to be waited for here; ``finish`` packs it.
            if gradient is None or gradient.layout is not torch.strided or gradient.device.type != "cpu":
                return
            # A hook of the user after this one may change ``grad.data``, which no version counter shows.
            hooks: Mapping[int, object] = parameter._post_accumulate_grad_hooks
            if next(reversed(hooks)) != self._hooks[number].id:
                return
            with torch.no_grad():
                self._transport.gradient_views[number].copy_(gradient)
            self._packed[number] = gradient, gradient._version
            for bucket in self._buckets_of[number]:
                self._missing[bucket] -= 1
                if not self._missing[bucket]:
                    self._send(bucket)

        return on_accumulated

    def finish(self) -> tuple[bool, ...] | None:
        """Pack and send what remains; return whether each parameter has a gradient, or None if all have."""
        self._started = False
        remaining = []
        for number, parameter in enumerate(self._parameters):
            gradient, version = self._packed.get(number, (None, 0))
            if gradient is None or gradient is not parameter.grad or gradient._version != version:
                remaining.append(number)
        self._pack(remaining)
        self._packed.clear()
        not_packed = set(remaining)
        for bucket, numbers in self._transport.buckets.items():
            if not not_packed.isdisjoint(numbers):  # every bucket that was not sent has a gradient that was not packed
                self._send(bucket)
        used = tuple(parameter.grad is not None for parameter in self._parameters)
        return None if all(used) else used

    @torch.no_grad()
    def _pack(self, numbers: Sequence[int]) -> None:
        views, gradients = [], []
        for number in numbers:
            view, gradient = self._transport.gradient_views[number], self._parameters[number].grad
            if number in self._transport.tables:
                self._transport.write_rows(number, gradient)
            elif gradient is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(gradient)
        if views:
            torch._foreach_copy_(views, gradients, non_blocking=True)
        synchronize(self._devices)  # the memory is sent as soon as this returns


class GradientPush:
    """Pushes the gradients of a step, for the version that was pulled."""

    def __init__(self, pull: VersionPull) -> None:
        self._pull = pull
        self._server = pull.server
        self._transport = pull.transport
        self._sent: dict[GradientBucket, list[InFlightCall[Tensor | None]]] = {}
        self._parameters = list(pull.model_copy.parameters.values())
        self._local_root = local_root()
        self.buckets = GradientBuckets(pull.transport, self._parameters, self._send_bucket)

    @spanned("push")
    def _send_bucket(self, bucket: GradientBucket) -> None:
        sent = self._sent.setdefault(bucket, [])
        gradient = self._transport.bucket_tensor(bucket)
        if sent:
            self._pull.wire_bytes += gradient.nbytes  # ``step_bytes`` counts it once
        has_all = all(self._parameters[number].grad is not None for number in self._transport.buckets[bucket])
        sent.append(self._server.send_bucket(self._pull.version, bucket, gradient, len(sent), has_all))
        if len(sent) > 1:
            # It replaces the one before, in whichever order they arrive, and must be there before the push.
            sent[-1].wait()

    @spanned("push")
    def finish_buckets(self, report: StepReport) -> tuple[StepReport, tuple[bool, ...] | None]:
        """Send the rest of the buckets.

        Return the report of the step with the rows that its gradients have of tables, and whether each parameter has a
        gradient, or None if all have.
        """
        self._pull.model_copy.check_gradients()
        self._pull.model_copy.check_unchanged()
        ids, rows = self._pull.model_copy.coalesce_rows()
        return replace(report, table_ids=ids, table_rows=rows) if ids else report, self.buckets.finish()

    @torch.enable_grad()  # a task may have left it switched off
    def send(self, optimizer: SharedOptimizer, push: Push) -> StepGrant:
        """Step the optimizer that all trainers share with a push, and with what the buckets have not sent of it yet.

        Raises:
            NotFinite: a gradient does not fit into server.wire_dtype.
        """
        sent = {bucket: calls[-1] for bucket, calls in self._sent.items()}
        self._sent = {}
        pulled, transport = self._pull.pulled, self._transport

        with span("push"):
            root = transport.backward_root(pulled) if transport.recorded else None
            # Before the backward: where that sends the last gradients, the servers accept the push once they have them.
            # Where it sends nothing, they make the update meanwhile.
            optimizer.begin_step(self._pull.context.id, push, list(sent.values()))
            self._pull.wire_bytes += transport.step_bytes(() if push.report.optimizer else pulled)
            self._pull.wire_bytes += bytes_of(push.buffers) + bytes_of(self._pull.grant.buffers)
            if sent:
                self._pull.clock.add_hidden(max(call.in_flight_s() for call in sent.values()))
            if root is not None:
                self._server.backward(self._pull.context.id, root)
            else:
                distributed_backward(self._pull.context.id, [self._local_root])
        with span("wait"):
            grant = optimizer.step(self._pull.context.id)
        for bucket, call in sent.items():
            if (updated := call.wait()) is not None:
                self._pull.early[bucket] = updated
        return grant
