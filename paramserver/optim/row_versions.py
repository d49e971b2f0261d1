"""The version that changed each row of an embedding table last, as an int32 for each row."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from paramserver.optim.named_optimizers import optimizers_of

ROW_VERSION = "row_version"
"""In the optimizer's state of a table, so that it is sharded, staged, stored and restored like that."""


def record_rows(optimizer: torch.optim.Optimizer, version: int) -> None:
    """Record that ``version`` has changed the rows for which the sparse gradients in ``.grad`` have values.

    They are coalesced. Call it after the step, as an optimizer may make its state in the first one only if it is empty.
    """
    for own in optimizers_of(optimizer):
        if not isinstance(getattr(own, "state", None), MutableMapping):
            continue  # a wrapper with a state of its own kind
        for parameter in (p for group in own.param_groups for p in group["params"]):
            if parameter.grad is None or not parameter.grad.is_sparse:
                continue
            state = own.state.setdefault(parameter, {})
            if ROW_VERSION not in state:
                state[ROW_VERSION] = torch.zeros(len(parameter), dtype=torch.int32, device=parameter.device)
            state[ROW_VERSION].index_fill_(0, parameter.grad._indices()[0], version)
