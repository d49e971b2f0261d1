"""How parameters and gradients are represented in messages: by a codec, or gradients by a compressor in fewer bytes.

To add a codec, change ``CastCodec`` and ``make_codec``, and add its name or its key to the server section of
config/schema.py. Servers and trainers of a run have the same configuration, so both ends make the same codec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from paramserver.config import ServerConfig
from paramserver.devices import CPU, to_cpu
from paramserver.errors import NotFinite
from paramserver.parameters.flat import FlatLayout


class CastCodec:
    """Converts flat tensors to and from the tensors that are sent; each element stays one element.

    It rounds to ``dtype`` where that is smaller (``server.wire_dtype``), and nothing if it is None.

    A trainer encodes a gradient and decodes a parameter by ``Tensor.copy_`` between a tensor of the model and a view of
    a tensor of ``wire_layout``. The conversions in the other directions are ``encode`` and ``decode``. They also move a
    tensor from the device of the server's parameters to the CPU, and back.
    """

    def __init__(self, dtype: torch.dtype | None, device: torch.device = CPU.device) -> None:
        self.dtype = dtype
        self.device = device

    def wire_layout(self, layout: FlatLayout) -> FlatLayout:
        """Return the layout of the tensors that are sent for flat tensors of ``layout``."""
        own = self.dtype
        if own is None:
            return layout
        dtypes = tuple(own if not d.is_complex and own.itemsize < d.itemsize else d for d in layout.dtypes)
        return replace(layout, dtypes=dtypes)

    def encode(self, layout: FlatLayout, flats: list[Tensor]) -> list[Tensor]:
        """Return what is sent for the parameters of a version, on the CPU; ``flats`` if nothing is converted.

        Raises:
            NotFinite: see ``check_fits``.
        """
        wire = self.wire_layout(layout)
        if wire == layout:
            return to_cpu(flats)
        rounded = [flat.to(dtype) for flat, dtype in zip(flats, wire.dtypes, strict=True)]
        if not all(bool(flat.isfinite().all()) for flat in rounded):
            views = wire.views(rounded)
            for name, exact in layout.views(flats).items():
                self.check_fits(f"parameter {name}", exact, views[name])
        return to_cpu(rounded)

    def encode_one(self, layout: FlatLayout, number: int, flat: Tensor) -> Tensor:
        """Return what is sent for flat tensor ``number`` of ``layout`` alone; see ``encode``."""
        slots = tuple(replace(slot, group=0) for slot in layout.slots if slot.group == number)
        return self.encode(FlatLayout((layout.dtypes[number],), (layout.sizes[number],), slots), [flat])[0]

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a received flat gradient in the ``dtype`` of its parameters, and on their device."""
        return wire.to(self.device, dtype)

    def check_fits(self, what: str, exact: Tensor, wire: Tensor) -> None:
        """Check that encoding turned no finite element into an infinite one.

        Raises:
            NotFinite: an element is too large.
        """
        overflowed = exact.isfinite() & ~wire.to(exact.device).isfinite()  # a gradient may be on a GPU
        if bool(overflowed.any()):
            largest = float(exact[overflowed].abs().max())
            kind = str(wire.dtype).removeprefix("torch.")
            raise NotFinite(
                f"{what} has a value of {largest:.4g}, which is too large for server.wire_dtype ({kind}); "
                "use bfloat16 or float32, or a smaller learning rate"
            )


def make_codec(config: ServerConfig, device: torch.device = CPU.device) -> CastCodec:
    """Return the codec of a run: the only place that turns keys of the server section into one."""
    return CastCodec(None if config.wire_dtype is None else getattr(torch, config.wire_dtype), device)


# Gradients in fewer bytes, and the feedback of what that loses. A flat tensor consists of pieces, one after the other:
# slices of parameters, given by their lengths. A ``Compressor`` represents them, and ``ErrorFeedback`` adds what one
# push of a trainer loses to its next push. To add a compressor, subclass it and add an entry to ``COMPRESSORS``.


Lengths: TypeAlias = tuple[int, ...]
"""The number of elements of each piece of a flat tensor. They are hashed at each call, as layouts are cached."""


class Compressor(ABC):
    """Represents a flat tensor of floating point numbers on the CPU in fewer bytes, with loss.

    Each piece is encoded independently of the others, and each of its blocks too. A parameter that is divided at
    multiples of the block is therefore decoded to the same bits as a whole one.
    """

    name: str

    block: int = 1
    """How many values are encoded together: parameters are divided at multiples of it."""

    def encode(self, values: Tensor, lengths: Lengths, name_of: Callable[[int], str] = "piece {}".format) -> Tensor:
        """Return the representation of ``values``, which are not changed, as a tensor of uint8.

        Args:
            values: one-dimensional, of any floating point dtype.
            lengths: of the pieces of ``values``.
            name_of: returns what a piece, given by its index, is called in an error.

        Raises:
            NotFinite: a value is NaN or infinite, or would be after ``decode``.
        """
        encoded = self._encode(values, lengths)
        if encoded is None:
            parts = values.split_with_sizes(lengths)
            refused = next(n for n, part in enumerate(parts) if self._encode(part, (len(part),)) is None)
            worst = float(parts[refused].abs().max())  # nan if there is one
            raise NotFinite(
                f"{name_of(refused)} has a value of {worst:.4g}, which {self.name} does not represent; "
                "use a smaller learning rate, or send gradients without compression"
            )
        return encoded

    @abstractmethod
    def _encode(self, values: Tensor, lengths: Lengths) -> Tensor | None:
        """Do what ``encode`` does; return None if a value cannot be represented."""

    @abstractmethod
    def decode(self, encoded: Tensor, lengths: Lengths, dtype: torch.dtype) -> Tensor:
        """Return the values that ``encoded`` represents, in new memory; every process computes the same bits.

        ``dtype`` is that of the values that were encoded.
        """


class Bfloat16Compressor(Compressor):
    """Rounds each value to bfloat16: two bytes."""

    name = "bfloat16"

    def _encode(self, values: Tensor, lengths: Lengths) -> Tensor | None:
        rounded = torch.empty(len(values), dtype=torch.bfloat16).copy_(values)
        # A NaN is the least and the largest value. Those of float16 may be rounded to 65536, which is infinite there.
        if len(values) and not bool(torch.stack(rounded.aminmax()).to(values.dtype).isfinite().all()):
            return None
        return rounded.view(torch.uint8)

    def decode(self, encoded: Tensor, lengths: Lengths, dtype: torch.dtype) -> Tensor:
        return _elements_of(encoded, torch.bfloat16).to(dtype)


class BlockCompressor(Compressor):
    """Represents each block of values by a scale and an integer for each value, ``round(value / scale)``.

    The scale is the largest magnitude of the block, divided by ``levels``; a value changes by half of it at most. It is
    sent as float32, for values of float64 too, and all arithmetic is that of float64 for these and of float32 for
    others. A block of zeros has the scale 0, and so does one whose scale is too small for float32: it is decoded to
    zeros. Where the scale is denormal, it is coarse, and values may change by more than half of it.

    A message consists of the scales of all blocks, then of the integers of all pieces.

    Args:
        block: the number of values that share a scale, counted from the start of each piece; the last block of a piece
            may have fewer.
    """

    levels: int

    def __init__(self, block: int) -> None:
        self.block = block

    @abstractmethod
    def _pack(self, integers: Tensor) -> Tensor:
        """Return integers of int8 in as few bytes as they need, as uint8."""

    @abstractmethod
    def _unpack(self, packed: Tensor, count: int) -> Tensor:
        """Return ``count`` integers of int8: the inverse of ``_pack``."""

    def _encode(self, values: Tensor, lengths: Lengths) -> Tensor | None:
        layout = _block_layout(lengths, self.block)
        blocks = layout.to_blocks(values, torch.promote_types(values.dtype, torch.float32))
        scales = (blocks.abs().amax(dim=1) / self.levels).to(torch.float32)
        exact_scales = scales.to(blocks.dtype)
        # A scale may be rounded up, so that the largest value of float32 would be decoded to an infinite one.
        if not bool((exact_scales * self.levels).isfinite().all()):
            return None
        divisors = exact_scales.masked_fill(exact_scales == 0, 1)  # the integers are 0 then
        blocks.div_(divisors.unsqueeze(1)).round_().clamp_(-self.levels, self.levels)
        return torch.cat([scales.view(torch.uint8), self._pack(layout.from_blocks(blocks, torch.int8))])

    def decode(self, encoded: Tensor, lengths: Lengths, dtype: torch.dtype) -> Tensor:
        layout = _block_layout(lengths, self.block)
        scales = _elements_of(encoded[: layout.scales_bytes], torch.float32)
        integers = self._unpack(encoded[layout.scales_bytes :], layout.num_values)
        blocks = layout.to_blocks(integers, torch.promote_types(dtype, torch.float32))
        return layout.from_blocks(blocks.mul_(scales.unsqueeze(1)), dtype)


class Int8Compressor(BlockCompressor):
    """Represents values by integers from -127 to 127: a byte for each value, and four for each block."""

    name = "int8"
    levels = 127

    def _pack(self, integers: Tensor) -> Tensor:
        return integers.view(torch.uint8)

    def _unpack(self, packed: Tensor, count: int) -> Tensor:
        return packed.view(torch.int8)


class Int4Compressor(BlockCompressor):
    """Represents values by integers from -7 to 7: half a byte for each value, and four for each block."""

    name = "int4"
    levels = 7

    def _pack(self, integers: Tensor) -> Tensor:
        # The first half of all integers is in the low bits, and the second in the high bits. Both are contiguous.
        packed = integers[: (len(integers) + 1) // 2] & 15
        second = integers[len(packed) :]
        packed[: len(second)] |= second << 4
        return packed.view(torch.uint8)

    def _unpack(self, packed: Tensor, count: int) -> Tensor:
        signed = packed.view(torch.int8)
        return torch.cat([signed << 4 >> 4, signed >> 4])[:count]  # >> extends the sign


COMPRESSORS: dict[str, Callable[[int], Compressor]] = {
    "bfloat16": lambda block: Bfloat16Compressor(),
    "int8": Int8Compressor,
    "int4": Int4Compressor,
}
"""Each name of a compressor with what makes it, given the number of values of a block."""


def make_compressor(config: ServerConfig) -> Compressor | None:
    """Return the compressor of a config; None if gradients are sent as they are."""
    if config.compression == "none":
        return None
    return COMPRESSORS[config.compression](config.compression_block)


def block_of(config: ServerConfig) -> int:
    """Return at multiples of how many elements parameters are divided over servers and buckets."""
    compressor = make_compressor(config)
    return 1 if compressor is None else compressor.block


class BlockLayout:
    """The blocks of a flat tensor: rows of a matrix, in which the last row of each piece is padded with zeros."""

    def __init__(self, lengths: Lengths, block: int) -> None:
        self._lengths = lengths
        # Where no piece fills a block, shorter rows have the same values, and less padding.
        self._block = max(1, min(block, max(lengths, default=0)))
        self._spans = [span for length in lengths for span in (length, -length % self._block)]  # with the padding
        self.num_values = sum(lengths)
        self.num_blocks = sum(self._spans) // self._block
        self.scales_bytes = self.num_blocks * torch.float32.itemsize

    def to_blocks(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a new tensor of shape (blocks, values of a block)."""
        blocks = torch.zeros(self.num_blocks, self._block, dtype=dtype)
        if self._lengths:
            torch._foreach_copy_(self._pieces_of(blocks), values.split_with_sizes(self._lengths))
        return blocks

    def from_blocks(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values without the padding, in a new flat tensor."""
        values = torch.empty(self.num_values, dtype=dtype)
        if self._lengths:
            torch._foreach_copy_(values.split_with_sizes(self._lengths), self._pieces_of(blocks))
        return values

    def _pieces_of(self, blocks: Tensor) -> tuple[Tensor, ...] | list[Tensor]:
        return blocks.view(-1).split_with_sizes(self._spans)[::2]


# A run has few ranges, and encodes each of them at every step.
_block_layout = cache(BlockLayout)


def _elements_of(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as elements of ``dtype``; torch views them so at some offsets and strides only."""
    elements = torch.empty(len(encoded) // dtype.itemsize, dtype=dtype)
    elements.view(torch.uint8).copy_(encoded)
    return elements


class ErrorFeedback:
    """Encodes the pushes of one trainer, and adds what one push loses to the next that is applied.

    For each range, with gradient ``D``, residual ``e`` and compressor ``C``: ``a = D + e`` is sent as ``C(a)``, and the
    residual becomes ``a - decode(C(a))``. What the servers receive over many pushes then differs from the sum of the
    gradients by the last residual only. Sources: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014;
    Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019
    (https://arxiv.org/abs/1901.09847).

    Call ``encode`` for each range of a push, then ``commit`` when the push was applied, or ``discard`` when it was not:
    the residuals are then those before it, bit for bit. Residuals have the dtype of the gradients. They take the memory
    of their ranges once, and twice from ``encode`` to ``commit`` or ``discard``.

    Args:
        compressor: what the servers decode with, in the dtype of the gradients.
        lengths: of the pieces of each range.
    """

    def __init__(self, compressor: Compressor, lengths: Sequence[Lengths]) -> None:
        self._compressor = compressor
        self._lengths = list(lengths)
        # By the index of a range. Tensors are replaced and never modified, so a state remains what it was.
        self._residuals: dict[int, Tensor] = {}
        self._pending: dict[int, Tensor] = {}

    def encode(
        self,
        range_index: int,
        gradient: Tensor,
        name_of: Callable[[int], str] = "the gradient of piece {}".format,
        without: Collection[int] = (),
    ) -> Tensor:
        """Return what is sent for a range; repeat the call with a revised gradient to replace it.

        ``gradient`` is not changed. ``name_of`` is that of ``Compressor.encode``. The pieces ``without`` a gradient are
        sent as zeros, which the servers ignore, and keep their residuals.

        Raises:
            NotFinite: see ``Compressor.encode``; nothing has changed then.
        """
        lengths = self._lengths[range_index]
        residual = self._residuals.get(range_index)
        corrected = gradient.clone() if residual is None else gradient + residual
        parts = corrected.split_with_sizes(lengths) if without else ()
        for number in without:
            parts[number].zero_()
        encoded = self._compressor.encode(corrected, lengths, name_of)
        decoded = self._compressor.decode(encoded, lengths, corrected.dtype)
        pending = self._pending[range_index] = corrected.sub_(decoded)
        if residual is not None and without:
            kept = residual.split_with_sizes(lengths)
            for number in without:
                pending.split_with_sizes(lengths)[number].copy_(kept[number])
        return encoded

    def commit(self) -> None:
        """Replace the residuals by those of the push that was encoded: it was applied."""
        self._residuals.update(self._pending)
        self._pending.clear()

    def discard(self) -> None:
        """Keep the residuals before the push that was encoded: it was dropped, refused or rolled back."""
        self._pending.clear()

    def state_dict(self) -> dict[int, Tensor]:
        """Return the residual of each range that has one, without the push that is encoded and not committed."""
        return dict(self._residuals)

    def load_state_dict(self, residuals: Mapping[int, Tensor]) -> None:
        """Replace all residuals by copies of ``residuals``, and discard a push that was encoded."""
        self._residuals = {index: residual.clone() for index, residual in residuals.items()}
        self._pending.clear()
