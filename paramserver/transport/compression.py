"""How parameters and gradients are represented in messages: their dtype, and always in memory of the CPU.

To add a codec, subclass ``WireCodec``, let ``make_codec`` choose it, and add its name or its key to the server section
of config/schema.py. Servers and trainers of a run have the same configuration, so both ends make the same codec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from paramserver.config import ServerConfig
from paramserver.devices import CPU, to_cpu
from paramserver.errors import NotFinite
from paramserver.parameters.flat import FlatLayout


class WireCodec(ABC):
    """Converts flat tensors to and from the tensors that are sent; each element stays one element.

    A trainer encodes a gradient and decodes a parameter by ``Tensor.copy_`` between a tensor of the model and a view of
    a tensor of ``wire_layout``. The conversions in the other directions are ``encode`` and ``decode``. They also move a
    tensor from the device of the server's parameters to the CPU, and back.
    """

    name: str

    @abstractmethod
    def wire_layout(self, layout: FlatLayout) -> FlatLayout:
        """Return the layout of the tensors that are sent for flat tensors of ``layout``."""

    @abstractmethod
    def encode(self, layout: FlatLayout, flats: list[Tensor]) -> list[Tensor]:
        """Return what is sent for the parameters of a version, on the CPU; ``flats`` if nothing is converted.

        Raises:
            NotFinite: see ``check_fits``.
        """

    def encode_one(self, layout: FlatLayout, number: int, flat: Tensor) -> Tensor:
        """Return what is sent for flat tensor ``number`` of ``layout`` alone; see ``encode``."""
        slots = tuple(replace(slot, group=0) for slot in layout.slots if slot.group == number)
        return self.encode(FlatLayout((layout.dtypes[number],), (layout.sizes[number],), slots), [flat])[0]

    @abstractmethod
    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a received flat gradient in the ``dtype`` of its parameters, and on their device."""

    @abstractmethod
    def check_fits(self, what: str, exact: Tensor, wire: Tensor) -> None:
        """Check that encoding turned no finite element into an infinite one.

        Raises:
            NotFinite: an element is too large.
        """


class CastCodec(WireCodec):
    """Rounds to ``dtype`` where that is smaller (``server.wire_dtype``), and nothing if it is None."""

    name = "cast"

    def __init__(self, dtype: torch.dtype | None, device: torch.device = CPU.device) -> None:
        self.dtype = dtype
        self.device = device

    def wire_layout(self, layout: FlatLayout) -> FlatLayout:
        own = self.dtype
        if own is None:
            return layout
        dtypes = tuple(own if not d.is_complex and own.itemsize < d.itemsize else d for d in layout.dtypes)
        return replace(layout, dtypes=dtypes)

    def encode(self, layout: FlatLayout, flats: list[Tensor]) -> list[Tensor]:
        wire = self.wire_layout(layout)
        if wire == layout:
            return to_cpu(flats)
        rounded = [flat.to(dtype) for flat, dtype in zip(flats, wire.dtypes, strict=True)]
        if not all(bool(flat.isfinite().all()) for flat in rounded):
            views = wire.views(rounded)
            for name, exact in layout.views(flats).items():
                self.check_fits(f"parameter {name}", exact, views[name])
        return to_cpu(rounded)

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        return wire.to(self.device, dtype)

    def check_fits(self, what: str, exact: Tensor, wire: Tensor) -> None:
        overflowed = exact.isfinite() & ~wire.to(exact.device).isfinite()  # a gradient may be on a GPU
        if bool(overflowed.any()):
            largest = float(exact[overflowed].abs().max())
            kind = str(wire.dtype).removeprefix("torch.")
            raise NotFinite(
                f"{what} has a value of {largest:.4g}, which is too large for server.wire_dtype ({kind}); "
                "use bfloat16 or float32, or a smaller learning rate"
            )


def make_codec(config: ServerConfig, device: torch.device = CPU.device) -> WireCodec:
    """Return the codec of a run: the only place that turns keys of the server section into one."""
    return CastCodec(None if config.wire_dtype is None else getattr(torch, config.wire_dtype), device)
