"""What an optimizer looks at together: elements, whole parameters, or all of them, which no part of a server can."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from paramserver.errors import TaskError

_OPTIM = torch.optim
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    *(_OPTIM.SGD, _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.NAdam, _OPTIM.RAdam, _OPTIM.Adamax),
    *(_OPTIM.Adadelta, _OPTIM.Adagrad, _OPTIM.ASGD, _OPTIM.RMSprop, _OPTIM.Rprop),
)
"""Optimizers that treat each element of a parameter by itself, beside numbers that count for all of it."""

PER_PARAMETER: tuple[type[torch.optim.Optimizer], ...] = (_OPTIM.Adafactor, _OPTIM.Muon)
"""Optimizers that treat each parameter by itself, as a whole."""

_SAYS = "updates_each"
_WORDS = ("element", "parameter")


def may_split(optimizer: torch.optim.Optimizer, servers: int) -> bool:
    """Whether several servers may each own a part of one parameter; else each has whole ones.

    What the classes of torch do is known. A class derived from one of them still treats each parameter by itself where
    it leaves ``step`` alone. Any other says what it does by the class attribute ``updates_each``: "element" or
    "parameter". So does one with step hooks, as these may look at anything.

    Raises:
        TaskError: it does not say so.
    """
    kind = type(optimizer)
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    word = None if has_hooks and not hasattr(kind, _SAYS) else _word_of(kind)
    if word not in _WORDS:
        raise TaskError(
            f"optimizer ({kind.__name__}) must look at no two parameters together, in step() or in hooks of it, with "
            f"cluster.num_servers ({servers}), as each server steps a part of them; where it does not, say so by the "
            f'class attribute {_SAYS} = "element" or "parameter", else set cluster.num_servers: 1'
        )
    return bool(word == "element")


def _word_of(kind: type) -> Any:
    """What is known of a class, or what is said by the one that defines ``step`` for it or is derived from that."""
    if kind in ELEMENTWISE:
        return "element"
    for cls in kind.__mro__:
        if _SAYS in vars(cls):
            return vars(cls)[_SAYS]
        if cls in (*ELEMENTWISE, *PER_PARAMETER):
            return "parameter"
        if "step" in vars(cls) and _plain(vars(cls)["step"]) is not _inherited_step(cls):
            return None
    return None


def _inherited_step(cls: type) -> Callable[..., Any] | None:
    return next((_plain(vars(base)["step"]) for base in cls.__mro__[1:] if "step" in vars(base)), None)


def _plain(step: Any) -> Any:
    """A ``step`` without what torch puts around it, also around one that a class has only inherited."""
    while inspect.isfunction(step) and step.__code__.co_filename == inspect.getfile(torch.optim.Optimizer):
        if not hasattr(step, "__wrapped__"):
            break
        step = step.__wrapped__
    return step
