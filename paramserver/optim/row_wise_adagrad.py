"""Adagrad with one accumulator for each row, for embedding tables; the base of optimizers of single parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from paramserver.errors import TaskError


class PerParameterOptimizer(torch.optim.Optimizer):
    """An optimizer that ``_update``s each parameter by itself, from its gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; ``closure`` computes the loss again, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None: ...


class RowWiseAdagrad(PerParameterOptimizer):
    """Adagrad whose state is one number for each row of a parameter: a table of D columns needs 1/D of the memory.

    Use it for the tables of ``nn.Embedding`` and ``nn.EmbeddingBag``, with another optimizer for the other parameters
    in the list that ``Task.build_optimizer`` returns. A step with gradient ``g`` updates row ``r`` by::

        sum[r] += mean(g[r] ** 2)
        parameter[r] -= lr * g[r] / (sqrt(sum[r]) + eps)

    which is ``EXACT_ROWWISE_ADAGRAD`` of `FBGEMM <https://github.com/pytorch/FBGEMM>`_. A gradient may be dense or
    sparse (``nn.Embedding(sparse=True)``), coalesced or not. Of a sparse one, only the rows that it has are read and
    written. The result is the same: a row whose gradient is zero does not change.

    The state of a parameter of shape ``(rows, D)`` is ``sum``, of shape ``(rows,)``, in float32 or in the type of the
    parameter if that has more digits. Each row is updated by itself. With several servers each parameter is on one of
    them, but for embedding tables, which are divided between rows.

    Args:
        params: parameters of two dimensions, or groups of them.
        lr: the learning rate.
        eps: is added to the root, so that it must be positive.
        initial_accumulator_value: of each element of ``sum``.
        maximize: ascend instead of descend.

    Raises:
        TaskError: an argument is out of its range, or a parameter does not have two dimensions or is not of floating
            point.

    Example::

        >>> table = torch.nn.Embedding(4, 2, sparse=True)
        >>> optimizer = RowWiseAdagrad(table.parameters(), lr=0.5)
        >>> before = table.weight.detach().clone()
        >>> table(torch.tensor([3, 1, 3])).sum().backward()
        >>> optimizer.step()
        >>> (table.weight != before).any(dim=1)
        tensor([False,  True, False,  True])
        >>> optimizer.state[table.weight]["sum"]
        tensor([0., 1., 0., 4.])
    """

    steps_rows: ClassVar[bool] = True
    """Whether a step with a sparse gradient reads and writes only the rows that the gradient has."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-8,
        initial_accumulator_value: float = 0.0,
        maximize: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("initial_accumulator_value", initial_accumulator_value)):
            if not value >= 0:
                raise TaskError(f"{name} ({value}) must be at least 0; use a larger one")
        if not eps > 0:
            raise TaskError(f"eps ({eps}) must be above 0, as rows without a gradient are divided by it; use 1e-8")
        defaults = {
            "lr": lr,
            "eps": eps,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Raises ``TaskError`` as the constructor does."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() != 2 or not parameter.is_floating_point():
                raise TaskError(
                    f"a parameter of shape {tuple(parameter.shape)} and {parameter.dtype} must have two dimensions and "
                    "be of floating point for RowWiseAdagrad; give it to another optimizer"
                )

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "sum" not in state:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            initial = group["initial_accumulator_value"]
            state["sum"] = torch.full(parameter.shape[:1], initial, dtype=dtype, device=parameter.device)
        accumulated: Tensor = state["sum"]
        if not gradient.is_sparse:
            _update_rows(parameter, accumulated, gradient, group)
            return
        if gradient.sparse_dim() != 1:
            raise TaskError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} has {gradient.sparse_dim()} sparse "
                "dimensions; it must have one, that of the rows, as the gradient of nn.Embedding(sparse=True) has"
            )
        gradient = gradient.coalesce()  # a row must not be updated twice
        rows = gradient.indices()[0]
        own, sums = parameter[rows], accumulated[rows]
        _update_rows(own, sums, gradient.values(), group)
        parameter.index_copy_(0, rows, own)
        accumulated.index_copy_(0, rows, sums)


def _update_rows(parameter: Tensor, accumulated: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
    gradient = gradient.to(accumulated.dtype)
    # No mean(), which is NaN without columns.
    accumulated += gradient.square().sum(dim=1) / max(gradient.shape[1], 1)
    rate = float(group["lr"]) if group["maximize"] else -float(group["lr"])
    # One operation, which rounds each element alike wherever it is in memory: no multiplication is fused with a sum.
    parameter.addcdiv_(gradient, (accumulated.sqrt() + group["eps"]).unsqueeze(1), value=rate)
