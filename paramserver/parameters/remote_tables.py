"""Embedding tables whose rows are on servers: a trainer looks up those that its batch uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paramserver.errors import TaskError
from paramserver.parameters.tables import EMBEDDINGS, sparse_gradient

LookupFn = Callable[[Tensor, Tensor], Tensor]
"""Returns rows of a table, (number of rows, width), given the ids as they are used, and as int64, sorted and unique."""

_EMBED = {embed: inspect.signature(embed) for embed in (F.embedding, F.embedding_bag)}
# What neither reads nor writes the values of a parameter. ``backward`` and ``grad`` may be called with ``inputs``.
_METHODS = frozenset(
    {
        *("__hash__", "__len__", "backward", "dim", "element_size", "get_device", "grad", "nelement", "numel", "size"),
        *("is_complex", "is_contiguous", "is_floating_point", "is_shared", "storage_offset", "stride"),
        *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
        *("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"),
        *("empty_like", "full_like", "ones_like", "zeros_like"),
    }
)
_VALUES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})  # the other properties do not read them either


class RemoteTable(nn.Parameter):
    """A parameter without memory: ``nn.Embedding`` and ``nn.EmbeddingBag`` read the rows of their ids on the servers.

    Any other read or write of its values is refused. Its gradient is sparse, as that of the table would be. A parameter
    that a model has becomes one by ``make_remote``, so that the references to it stay.
    """

    table: str  # its name
    look_up: LookupFn

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (signature := _EMBED.get(func)) is not None:
            call = signature.bind(*args, **kwargs)
            _use_rows(call.arguments)
            return func(*call.args, **call.kwargs)
        # A property is read and written by the methods of its descriptor.
        of, name = getattr(func, "__self__", None), getattr(func, "__name__", "")
        is_allowed = name in _METHODS
        if isinstance(of, GetSetDescriptorType):
            name = of.__name__
            is_allowed = name not in _VALUES
        if is_allowed:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        table = next((f"table {own.table}" for own in args if isinstance(own, RemoteTable)), "an embedding table")
        raise TaskError(
            f"{name} of {table} must not be used in a trainer, as its rows are on the servers, and "
            "nn.Embedding and nn.EmbeddingBag look up those of a batch; read the table in the model.pt of a checkpoint"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.table}, shape={tuple(self.shape)}, dtype={self.dtype})"


def make_remote(parameter: nn.Parameter, name: str, look_up: LookupFn) -> None:
    """Make a parameter of a model a ``RemoteTable``; its memory is released."""
    parameter.data = torch.zeros(1, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    parameter.__class__ = RemoteTable
    assert isinstance(parameter, RemoteTable)
    parameter.table, parameter.look_up = name, look_up


def exclude_from_compile(model: nn.Module) -> None:
    """Let ``torch.compile`` call the modules of remote tables as they are: lookups cannot be traced."""
    for module in model.modules():
        if isinstance(module, EMBEDDINGS) and isinstance(module.weight, RemoteTable):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign, no-untyped-call]


def _use_rows(arguments: dict[str, Any]) -> None:
    """Let the arguments of a function be the rows that it uses, and their places, instead of a table and ids."""
    ids, table = arguments["input"], arguments["weight"]
    assert isinstance(table, RemoteTable)
    if not arguments.get("sparse", False) or arguments.get("scale_grad_by_freq", False):
        raise TaskError(f"table {table.table} must be used with sparse=True and without scale_grad_by_freq")
    rows, places = torch.unique(ids, return_inverse=True)
    if rows.numel() and not 0 <= int(rows[0]) <= int(rows[-1]) < len(table):
        raise IndexError("index out of range in self")  # the message of torch; see ``describe_missing_row``
    rows = rows.to(torch.int64)
    padding = arguments.get("padding_idx")
    if padding is not None:
        # Its gradient is left out, and a bag does not contain it.
        at = (rows == (padding + len(table) if padding < 0 else padding)).nonzero()
        arguments["padding_idx"] = int(at[0, 0]) if len(at) else None
    apply: Any = _RowsFunction.apply
    arguments["input"] = places.to(ids.dtype)
    arguments["weight"] = apply(table, table.look_up(ids, rows).to(table.device), rows)


class _RowsFunction(torch.autograd.Function):
    """Returns rows of a table; their gradient, which is sparse, becomes that of the table."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.shape = rows, table.shape
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (own,) = gradients
        if own is None:
            return None, None, None
        rows = ctx.rows[own._indices()[0]]
        return sparse_gradient(rows, own._values(), ctx.shape, own.is_coalesced()), None, None
