"""How a trainer gets the version of a step from the servers, inside of the step's distributed-autograd context."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from paramserver.distributed.local_calls import LocalConnection
from paramserver.distributed.rpc_agent import autograd_context
from paramserver.distributed.rpc_calls import note_repeated
from paramserver.errors import UnsupportedConfiguration
from paramserver.metrics.profile import spanned
from paramserver.metrics.records import PhaseClock
from paramserver.parameters.model_tree import PackedBuffers
from paramserver.parameters.sharding import full_shard
from paramserver.server.client import CallFailed, InFlightCall
from paramserver.trainers.model_copy import ModelCopy
from paramserver.trainers.row_lookup import RowLookup
from paramserver.trainers.server_control import ServerControl
from paramserver.transport.base import GradientBucket, TrainerTransport
from paramserver.transport.compression import make_codec, make_compressor
from paramserver.transport.messages import JoinReply, StepGrant, VersionView
from paramserver.transport.rpc import RpcTrainerTransport
from paramserver.transport.segments import attach_socket, can_attach
from paramserver.transport.shared_memory import SharedMemoryTrainerTransport, socket_key


class StepContext:
    """The distributed-autograd context of a step."""

    def __init__(self) -> None:
        self.id = 0
        self._entered = ExitStack()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Return the context of a step, in which ``renew`` may be called."""
        with self._entered:
            self.renew()
            yield

    def renew(self) -> None:
        """Enter a new context, in the place of the one that was entered before in this step."""
        self._entered.close()
        self.id = self._entered.enter_context(autograd_context())


class VersionPull:
    """Pulls versions of the parameters, and loads them into a trainer's copy of the model.

    ``parameters_of`` has the names of the parameters of each optimizer, if there are several. ``rows`` are those of
    embedding tables, where their memory is not shared.
    """

    def __init__(
        self,
        control: ServerControl,
        transport: TrainerTransport,
        model_copy: ModelCopy,
        context: StepContext,
        clock: PhaseClock,
        parameters_of: Mapping[str, Sequence[str]],
        rows: RowLookup | None = None,
    ) -> None:
        self.grant = StepGrant()
        self.version = 0  # that the next push is for
        self.pulled: tuple[Tensor, ...] = ()
        # Buckets of the next version that arrived before that was complete. The model holds them once it was granted.
        self.early: dict[GradientBucket, Tensor] = {}
        self.wire_bytes = 0  # of the pushes too, without ``rows``
        self.server = control.server
        self.transport = transport
        self.model_copy = model_copy
        self.context = context
        self.clock = clock
        self.rows = rows
        self._timeout_s = control.config.cluster.timeout_s
        self._calls: list[InFlightCall[tuple[Tensor, ...]]] = []
        self._loaded: int | None = None  # the version that the model is known to hold
        self._is_loaded = False  # the version that was requested
        transport.sends_unused = not parameters_of
        numbers = {name: number for number, name in enumerate(model_copy.parameters)}
        # Of each of several optimizers: the numbers of its parameters, and the ranges without one, which are neither
        # pushed nor loaded.
        self._numbers_of = {name: {numbers[of] for of in own if of in numbers} for name, own in parameters_of.items()}
        ranges = transport.ranges.items()
        self._left_out = {n: [r for r, of in ranges if own.isdisjoint(of)] for n, own in self._numbers_of.items()}

    def start(self, grant: StepGrant) -> None:
        """Request the version that was granted, unless calls of several optimizers request it."""
        assert grant.decision is not None
        self.grant, self.version = grant, grant.decision.step
        self._is_loaded = False
        if not self._numbers_of and not self.transport.zero_copy:  # otherwise it is in shared memory
            self._begin()

    @torch.enable_grad()  # a task may have left it switched off
    def _begin(self) -> None:
        """Request the version of this step, inside its context; it is awaited when it is needed."""
        # With several optimizers the model holds the version, and only its gradients are to return.
        received = self.transport.ranges if self._numbers_of else self.early
        self._calls = self.server.pull(self.version, received, self.transport.recorded)

    def finish(self) -> None:
        """Wait for the version that was requested; it is then in ``pulled``."""
        self.clock.add_hidden(max(call.in_flight_s() for call in self._calls))
        give_up_at: float | None = None
        while True:
            try:
                pulled = [call.wait_once() for call in self._calls]
                break
            except CallFailed as failure:
                give_up_at = give_up_at or time.monotonic() + self._timeout_s
                self.server.wait_before_repeat(failure, give_up_at)
                note_repeated("pull")
                # The server may have recorded the pull. Distributed autograd would wait for its gradient too.
                self.context.renew()
                self._begin()
        self.pulled = tuple(
            flat if flat.numel() else self.early.get(GradientBucket(server_index, flat_index), flat)
            for server_index, flats in enumerate(pulled)
            for flat_index, flat in enumerate(flats)
        )
        self.early = {}

    @spanned("pull")
    def load(self, batches: Sequence[Any] = ()) -> None:
        """Load the version of this step, for these batches."""
        rows = None if self._numbers_of else self.rows
        if rows is not None:
            rows.prefetch(self.version, batches)
        self.load_values()
        if rows is not None:
            rows.wait()

    def load_values(self) -> None:
        """Load the parameters of this step's version, unless that was done before hooks between two steps."""
        if self._numbers_of:
            if self._loaded != self.version:
                self.load_step(self.version, values=False)
            return
        self.model_copy.check_unchanged(between_steps=True)
        if self.transport.zero_copy and not self._is_loaded:
            self.transport.map_version(self.grant.slot)
        elif not self._is_loaded:
            self.finish()
            self.transport.load(self.pulled)
            if not self.transport.recorded:
                # The model has the values; their memory is for the next version, which arrives during the push.
                self._calls, self.pulled = [], tuple(flat.to("meta") for flat in self.pulled)
        self._is_loaded = True
        self.model_copy.loaded.note()

    def load_step(self, step: int, values: bool = True) -> VersionView:
        """Load the parameters of the present version, which is that of ``step``, and return it."""
        view = self.server.view_version(step)
        self.load_view(view, values)
        self.end_step()
        self._loaded = step
        return view

    def end_step(self) -> None:
        """Look up the newest rows from now on, as no step is in progress."""
        if self.rows is not None:
            self.rows.prefetch(None)

    def load_view(self, view: VersionView, values: bool = True) -> None:
        """Load the parameters of a view; with ``values`` later changes of values are noticed too."""
        self.model_copy.check_unchanged(between_steps=True)
        if view.slot is None:
            self.transport.load(view.parameters)
        else:
            self.transport.map_version(view.slot)
        self.model_copy.loaded.note(values)

    # Several optimizers.

    @spanned("pull")
    def pull_now(self, version: int) -> None:
        """Pull, in a context of its own, the version to which a call of one of several optimizers is applied.

        The model holds it, so without a recorded pull there is nothing to be pulled.
        """
        self.version = version
        self.context.renew()
        if self.transport.recorded:
            self._begin()
            self.finish()

    @spanned("pull")
    def load_updated(self, optimizer: str, step: int) -> None:
        """Load the parameters that an optimizer changed.

        Module buffers stay those of this trainer until the next batch, as a graph of this one may need them.
        """
        view = VersionView(0, (), None)
        if not self.transport.zero_copy:
            view = self.server.view_version(step, self._left_out[optimizer])
            self.wire_bytes += sum(flat.nbytes for flat in view.parameters if flat.is_contiguous())
            self.wire_bytes += bytes_of(view.buffers)
        self.end_step()
        self.transport.load_updated(view, self._numbers_of[optimizer])
        self.model_copy.loaded.note()
        self._loaded = step


def make_transport(control: ServerControl, reply: JoinReply, parameters: Sequence[Tensor]) -> TrainerTransport:
    """Choose shared memory if this process can reach the server's, else messages, over TCP if it can connect."""
    layout, server, timeout_s = reply.parameter_layout, control.server, control.config.cluster.timeout_s
    index, address = control.trainer_index, reply.segments_address
    if address is not None and can_attach(address, timeout_s) and (slots := server.share_segments()):
        key = socket_key(index, reply.incarnation)
        server.use_local(LocalConnection(attach_socket(address, key, timeout_s)))
        return SharedMemoryTrainerTransport(
            layout, parameters, address, slots, index, timeout_s, reply.incarnation, reply.lockstep
        )
    if control.config.server.must_share_memory:
        raise UnsupportedConfiguration(
            f"server.transport (shared_memory) must have all ranks on one host; trainer {index} "
            f"({control.rendezvous.host_and_pid}) cannot reach the server's memory; use auto, tcp or rpc"
        )
    if reply.shards:
        server.use_shards(len(reply.shards))
    shards = reply.shards or (full_shard(layout),)
    options = control.config.server
    connected = options.connects and control.connect_tcp()
    return RpcTrainerTransport(layout, shards, make_codec(options), parameters, make_compressor(options), connected)


def bytes_of(buffers: PackedBuffers | None) -> int:
    """Return the size of module buffers in a message, which may have none."""
    return 0 if buffers is None else buffers.nbytes
