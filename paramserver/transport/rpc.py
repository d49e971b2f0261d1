"""Transport in messages: parameters and gradients are sent, for trainers on any host and any number of servers.

A version is sent as a few flat tensors, whose gradients are sent as buckets while backward continues
(docs/torch-notes.md, "Backward does not overlap with sending"). Over RPC the first of each server, whose gradient is
complete last, goes through distributed autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from paramserver.devices import pins_memory, to_cpu
from paramserver.parameters.flat import FlatLayout, has_gaps
from paramserver.parameters.model_tree import PackedBuffers
from paramserver.parameters.sharding import Shard
from paramserver.parameters.tables import empty_gradient, nbytes_of_rows, slice_gradient, table_ranges
from paramserver.transport.autograd import push_root
from paramserver.transport.base import GradientBucket, ServerTransport, TrainerTransport
from paramserver.transport.compression import CastCodec, Compressor, ErrorFeedback
from paramserver.transport.messages import VersionView


class WireVersion:
    """The current version in the form in which it is sent; encoded once for all trainers.

    ``snapshot`` returns the current version, immutable, and the same list for as long as it is current.
    """

    def __init__(self, layout: FlatLayout, codec: CastCodec, snapshot: Callable[[], list[Tensor]]) -> None:
        self.codec = codec
        self._layout = layout
        self._snapshot = snapshot
        self._source: list[Tensor] | None = None
        self._encoded: list[Tensor] = []

    def current(self) -> list[Tensor]:
        """Return the current version, immutable as well."""
        flats = self._snapshot()
        if self._source is not flats:
            self._encoded, self._source = self.encode(flats), flats
        return self._encoded

    def encode(self, flats: list[Tensor]) -> list[Tensor]:
        """Return another version, which the caller retained."""
        return self.codec.encode(self._layout, flats)


@dataclass(eq=False)
class PushAssembly:
    """Collects the gradients of one push in any order. ``decompress`` returns those of a range from what was sent."""

    _leaves: Sequence[Tensor]
    _codec: CastCodec
    _decompress: Callable[[int, Tensor, torch.dtype], Tensor] | None = None

    def __post_init__(self) -> None:
        self._buckets: dict[int, tuple[int, Tensor]] = {}
        if not self._leaves[0].numel():  # of a server without parameters of its first type nothing is sent
            self._buckets[0] = 0, self._leaves[0].detach()

    def add_bucket(self, flat_index: int, gradient: Tensor, revision: int = 0) -> Tensor:
        """Add a received bucket, unless it is here with this or a later revision; return the one that is kept."""
        known = self._buckets.get(flat_index)
        if known is None or known[0] < revision:
            leaf = self._leaves[flat_index]
            if self._decompress is not None and gradient.dtype == torch.uint8:
                gradient = self._decompress(flat_index, gradient, leaf.dtype).to(leaf.device)
            elif not gradient.is_sparse:  # rows of tables are sent as they are
                gradient = self._codec.decode(gradient.contiguous(), leaf.dtype)
            known = self._buckets[flat_index] = revision, gradient
        return known[1]

    def complete(self) -> list[Tensor] | None:
        """Return all gradients in the dtypes of the parameters; None if one is missing."""
        if len(self._buckets) < len(self._leaves):
            return None
        return [self._buckets[index][1] for index in range(len(self._leaves))]


class RpcServerTransport(ServerTransport):
    """Sends versions. What a trainer sends arrives at the shard of each server; see ``ParameterShard``."""

    def __init__(self, current: Callable[[], list[Tensor]], shard: Shard | None = None) -> None:
        self._current = current
        self._shard = shard

    def pin_version(self) -> int:
        self._current()  # a parameter that does not fit into server.wire_dtype ends the run here
        return 0

    def view_version(self) -> tuple[None, Sequence[Tensor]]:
        return None, self._current()

    def view_retained(self, parameters: Sequence[Tensor], buffers: PackedBuffers) -> VersionView:
        flats = parameters if self._shard is None else self._shard.copy_flats(parameters)
        return VersionView(None, tuple(to_cpu(list(flats))), buffers)

    def unpin(self) -> None:
        """Do nothing: the shard retains what trainers were granted."""


class RpcTrainerTransport(TrainerTransport):
    """Copies received versions into the model's own parameters; gradients are sent from memory that is reused.

    The shards are in the order of servers, the parameters in that of the layout. With ``connected`` the messages of a
    step are sent over TCP connections, and autograd records none of them.
    """

    zero_copy = False

    def __init__(
        self,
        layout: FlatLayout,
        shards: Sequence[Shard],
        codec: CastCodec,
        parameters: Sequence[Tensor],
        compressor: Compressor | None = None,
        connected: bool = False,
    ) -> None:
        self.name = "tcp" if connected else "rpc"
        self.recorded = not connected
        self._layout = layout
        self._shards = list(shards)
        self._codec = codec
        self._parameters = list(parameters)
        wire_layouts = [codec.wire_layout(shard.layout) for shard in shards]
        self._is_lossy = any(wire != shard.layout for wire, shard in zip(wire_layouts, shards, strict=True))
        numbered = [(shard, number) for shard in shards for number in range(len(shard.ranges))]
        self._pieces = [shard.pieces_of_range(number) for shard, number in numbered]
        if compressor is not None:
            self.feedback = ErrorFeedback(compressor, [shard.lengths_of_range(number) for shard, number in numbered])
            self._is_lossy = False  # what is compressed has the parameters' own type
        self._sent_bytes: dict[int, int] = {}  # of the ranges of a push, where they are compressed
        # Pinned memory, so that copies from a GPU neither need a second buffer nor block.
        pinned = any(pins_memory(parameter.device) for parameter in parameters)
        self._first = list(accumulate((len(shard.ranges) for shard in shards[:-1]), initial=0))
        self._targets: list[tuple[int, int, int | None]] = []
        # Of each parameter that is split and has other strides than its slot: a tensor with those of the slot.
        self._dense: dict[int, Tensor] = {}
        self.gradient_views = self._map_gradients(codec.wire_layout(layout) if compressor is None else layout, pinned)
        self.ranges = {
            GradientBucket(server_index, flat_index): shard.slots_of_range(flat_index)
            for server_index, shard in enumerate(shards)
            for flat_index in range(len(shard.ranges))
        }
        # The gradient of the first range of each server returns through distributed autograd, unless it is compressed,
        # or nothing is recorded.
        self.buckets = {
            bucket: numbers
            for bucket, numbers in self.ranges.items()
            if bucket.flat_index or ((connected or compressor) and shards[bucket.server_index].layout.sizes[0])
        }
        self._numbers = list(self.ranges.values())
        self.tables = layout.tables
        self._rows = {self._first[own.server_index] + own.flat_index: own for own in table_ranges(layout, shards)}
        self._row_gradients: dict[int, Tensor | None] = {}  # of a step, by the number of the parameter

    def _map_gradients(self, wire: FlatLayout, pinned: bool) -> list[Tensor]:
        """Allocate what is sent, a tensor for each range, and return a view of it for each parameter.

        All ranges of a dtype are parts of one tensor, so that a parameter in several of them is one view too.
        """
        wholes = [
            torch.zeros(size, dtype=t, pin_memory=pinned)
            for size, t in zip(wire.without_tables().sizes, wire.dtypes, strict=False)  # tables follow all others
        ]
        wholes += [torch.zeros(0, dtype=t) for t in wire.dtypes[len(wholes) :]]
        self._outgoing = [
            _part(wholes[group], first, end) for shard in self._shards for group, first, end in shard.ranges
        ]
        for shard in self._shards:
            for piece in shard.slices:
                if piece.slot in self._layout.tables:
                    continue
                is_whole = shard.is_whole(piece, self._layout)
                self._targets.append((piece.slot, piece.start, None if is_whole else piece.length))
                if not is_whole:
                    self._make_dense(piece.slot)
        views = wire.views(wholes)
        return [views.get(slot.name, wholes[slot.group]) for slot in self._layout.slots]

    def _make_dense(self, number: int) -> None:
        """Give a split parameter, or a copy of it, its slot's strides: a slice of memory is then a server's."""
        parameter, slot = self._parameters[number], self._layout.slots[number]
        if has_gaps(parameter, slot) and number not in self._dense:
            # The parameter keeps its strides, as kernels may round differently over other ones.
            dense = torch.empty_strided(slot.shape, slot.stride, dtype=parameter.dtype, device=parameter.device)
            self._dense[number] = dense.copy_(parameter.detach())
        elif tuple(parameter.stride()) != slot.stride and number not in self._dense:
            parameter.data = parameter.detach().contiguous()

    def load(self, flats: Sequence[Tensor]) -> None:
        self._load(flats, None)

    def load_updated(self, view: VersionView, numbers: Collection[int]) -> None:
        # Of ranges without these parameters, no values were sent.
        flats = [flat if flat.is_contiguous() else flat.new_empty(flat.shape) for flat in view.parameters]
        self._load(flats, set(numbers))

    @torch.no_grad()
    def _load(self, flats: Sequence[Tensor], numbers: Set[int] | None) -> None:
        sources: list[Tensor] = []
        for first, shard in zip(self._first, self._shards, strict=True):
            # No values of tables are received.
            sources += shard.layout.without_tables().views(flats[first : first + len(shard.ranges)]).values()
        pairs = [
            (self._target(number, start, length), source)
            for (number, start, length), source in zip(self._targets, sources, strict=True)
            if numbers is None or number in numbers
        ]
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
        for number, dense in self._dense.items():
            if numbers is None or number in numbers:
                self._parameters[number].copy_(dense)

    def _target(self, number: int, start: int, length: int | None) -> Tensor:
        parameter = self._parameters[number]
        if length is None:
            return parameter
        dense = self._dense.get(number, parameter.detach())
        return dense.as_strided((length,), (1,), dense.storage_offset() + start)

    def write_rows(self, number: int, gradient: Tensor | None) -> None:
        # On the CPU, as all that is sent.
        self._row_gradients[number] = None if gradient is None else gradient.cpu()

    def bucket_tensor(self, bucket: GradientBucket) -> Tensor:
        index = self._first[bucket.server_index] + bucket.flat_index
        gradient = self._gather(index)
        if self.feedback is None or gradient.is_sparse or self._is_left_out(index):
            return gradient
        slots = [piece.slot for piece, _ in self._pieces[index]]
        encoded = self.feedback.encode(
            index,
            gradient,
            lambda number: f"the gradient of parameter {self._layout.slots[slots[number]].name}",
            [number for number, slot in enumerate(slots) if self._parameters[slot].grad is None],
        )
        self._sent_bytes[index] = encoded.nbytes
        return encoded

    def backward_root(self, pulled: Sequence[Tensor]) -> Tensor:
        if self.feedback is not None:
            first = [pulled[index] for index in self._first]
            return push_root(leave_out(first, range(len(first))), first)
        return push_root([self._gather(index) for index in self._first], [pulled[index] for index in self._first])

    def _gather(self, index: int) -> Tensor:
        """Return one outgoing tensor, checked."""
        flat = self._outgoing[index]
        if (own := self._rows.get(index)) is not None:
            gradient = self._row_gradients[own.slot]
            slot = self._layout.slots[own.slot]
            # In the dtype of the table, as its rows are sent.
            empty = empty_gradient(slot.shape, self._layout.dtypes[slot.group])
            return slice_gradient(empty if gradient is None else gradient, own.rows)
        if self._is_left_out(index):
            return leave_out([flat], [0])[0]
        if self._is_lossy and not bool(flat.isfinite().all()):
            # Gradients that were infinite before are the trainer's error to report, so only rounding is refused here.
            for slot, view, parameter in zip(self._layout.slots, self.gradient_views, self._parameters, strict=True):
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    self._codec.check_fits(f"the gradient of parameter {slot.name}", parameter.grad, view)
        return flat

    def step_bytes(self, pulled: Sequence[Tensor]) -> int:
        sent = {n: flat.nbytes for n, flat in enumerate(self._outgoing) if not self._is_left_out(n)} | self._sent_bytes
        self._sent_bytes = {}
        rows = [gradient for index in self._rows if (gradient := self._gather(index))._nnz()]
        return sum(flat.nbytes for flat in pulled) + sum(sent.values()) + sum(map(nbytes_of_rows, rows))

    def residuals(self) -> dict[str, Tensor]:
        """Return what compression has lost so far, by parameter: its elements in the order of the layout's memory."""
        found: dict[str, Tensor] = {}
        for index, residual in ({} if self.feedback is None else self.feedback.state_dict()).items():
            for piece, place in self._pieces[index]:
                slot = self._layout.slots[piece.slot]
                own = found.setdefault(slot.name, residual.new_zeros(slot.numel))
                own[piece.start : piece.start + piece.length] = residual[place.offset : place.offset + piece.length]
        return found

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Continue with ``residuals()``, of this or of another division of the parameters. Only with a compressor."""
        assert self.feedback is not None
        loaded = {}
        for index, pieces in enumerate(self._pieces):
            flat = torch.zeros(self._outgoing[index].shape, dtype=self._outgoing[index].dtype)
            for piece, place in pieces:
                if (own := residuals.get(self._layout.slots[piece.slot].name)) is not None:
                    flat[place.offset : place.offset + piece.length] = own[piece.start : piece.start + piece.length]
            loaded[index] = flat
        self.feedback.load_state_dict({index: flat for index, flat in loaded.items() if bool(flat.any())})

    def _is_left_out(self, index: int) -> bool:
        """Return whether an outgoing tensor has no gradient, and is not sent then."""
        return not self.sends_unused and all(self._parameters[n].grad is None for n in self._numbers[index])


def _part(whole: Tensor, first: int, end: int) -> Tensor:
    """Return elements of a tensor, as a tensor over the same memory that RPC sends without a copy."""
    # By numpy, which keeps the memory alive: RPC would copy a view, as it sends storages.
    item = whole.itemsize
    if first == end or not len(whole):  # numpy's strides of nothing are no tensor's; tables have no memory here
        return whole[first:end].clone()
    return torch.from_numpy(whole.view(torch.uint8)[first * item : end * item].numpy()).view(whole.dtype)


def leave_out(flats: Sequence[Tensor], left_out: Collection[int]) -> list[Tensor]:
    """Return ``flats`` with a tensor of one element, expanded to its shape, in the place of each in ``left_out``."""
    return [flat.new_zeros(1).expand(flat.shape) if n in left_out else flat for n, flat in enumerate(flats)]
