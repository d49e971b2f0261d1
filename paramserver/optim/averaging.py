"""Exponential moving average (EMA) of the parameters: ``training.ema_decay``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

# In the optimizer's state of each parameter, so that it is sharded, staged, stored and restored like that. An optimizer
# may have an entry "average" of its own, which was the name in earlier versions.
_AVERAGE = "ema_average"
_EARLIER = "average"


class AverageParameters:
    """A post hook of ``Optimizer.step``: moves the average of each parameter that was stepped.

    The numbers are those of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``, updated after
    each step: the first average of a parameter is its value after its first update. A parameter without a gradient is
    not stepped, and its average stays as it is. Each element depends on itself only.
    """

    def __init__(self, decay: float) -> None:
        self._update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        moved: list[tuple[Tensor, Tensor]] = []
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            state = optimizer.state[parameter]
            if _AVERAGE in state:
                moved.append((state[_AVERAGE], parameter))
            else:
                state[_AVERAGE] = parameter.detach().clone()
        if moved:
            own, current = zip(*moved, strict=True)
            self._update(own, current, None)


def averages(states: Mapping[int, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Tensor]:
    """Return the average of each parameter that has one, by name. The names are in the order of the optimizer."""
    return {
        names[number]: state[_AVERAGE]
        for number, state in states.items()
        if isinstance(state, Mapping) and _AVERAGE in state
    }


def restore_averages(optimizer: torch.optim.Optimizer, keep: bool) -> None:
    """Give the averages of an earlier version, in a state that was loaded, the present name; drop all or ``keep`` them.

    Optimizers of torch have no averages of their own.
    """
    is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
    for state in optimizer.state.values():
        if not isinstance(state, dict):  # a further entry, such as a count of the optimizer's steps
            continue
        if is_of_torch and _EARLIER in state:
            state[_AVERAGE] = state.pop(_EARLIER)
        if not keep:
            state.pop(_AVERAGE, None)


def averaged_state_dict(model: nn.Module, average_of: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the model's ``state_dict()`` with averages in the place of parameters, also of tied ones."""
    by_id = {id(p): average_of[name] for name, p in model.named_parameters() if name in average_of}
    state: dict[str, Any] = copy(model.state_dict(keep_vars=True))
    state.update({key: by_id.get(id(t), t.detach()) for key, t in state.items() if isinstance(t, Tensor)})
    return state
