"""Threads that do one piece of work together, and an optimizer whose parameters they step at the same time.

While a server makes an update, its trainers wait, and so do the cores of those that are on its host. torch's own
threads would round the ends of their parts of a tensor otherwise than one thread does. Here each parameter is stepped
by one thread, and sums are cut where no kernel notices, so every bit stays as it is.

What an optimizer looks at together: elements, whole parameters, or all of them, which no part of a server can.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

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


def is_elementwise(optimizer: torch.optim.Optimizer, servers: int) -> bool:
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


# Of less than this, one thread is done before another one has begun.
WORTHWHILE_BYTES = 1 << 20
# More wait for memory.
_LARGEST = 8
# What any kernel takes in whole strides, in elements.
_STRIDE = 4096


def num_spare_threads(cores: int) -> int:
    """How many helpers find a core of so many, each with as many of torch's threads as the one that asks."""
    return max(min(cores // torch.get_num_threads(), _LARGEST) - 1, 0)


class ThreadTeam:
    """The thread that asks, and so many helpers. Used by one thread at a time.

    Args:
        helpers: at least 1.
    """

    def __init__(self, helpers: int) -> None:
        self.size = helpers + 1
        self._pool = ThreadPoolExecutor(helpers, thread_name_prefix="crew")

    def run(self, parts: Sequence[Callable[[], object]]) -> None:
        """Do all parts, the first one here; back when all are done.

        Raises:
            BaseException: what the first of the parts that failed has raised.
        """
        others = [self._pool.submit(part) for part in parts[1:]]
        try:
            if parts:
                parts[0]()
        finally:
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        self._pool.shutdown()

    def slices(self, flats: Sequence[Tensor]) -> list[list[slice]]:
        """For each member a range of each flat tensor, together all of it; the last ones may be empty."""
        shares = [-(-flat.numel() // (self.size * _STRIDE)) * _STRIDE for flat in flats]
        return [[slice(k * share, (k + 1) * share) for share in shares] for k in range(self.size)]


class ParallelStep:
    """``optimizer.step()``, with the parameters dealt to a crew.

    The members step copies of the optimizer that have some of its parameters and its own state, so its groups and its
    state are what they would be.

    Args:
        optimizer: one that ``can_part``.
        crew: does it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, crew: ThreadTeam) -> None:
        self._optimizer = optimizer
        self._crew = crew

    @staticmethod
    def supports(optimizer: torch.optim.Optimizer) -> bool:
        """Whether parameters are known to be stepped by themselves: it is torch's, without hooks and with its step."""
        own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        hooks = own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        return type(optimizer) in (*ELEMENTWISE, *PER_PARAMETER) and not hooks and _steps_itself(optimizer)

    def __call__(self) -> None:
        if not self.supports(self._optimizer):  # a hook came later
            self._optimizer.step()
            return
        stepped = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        fresh = [p for p in stepped if p not in self._optimizer.state]
        self._crew.run([self._part(ids).step for ids in _dealt(stepped, self._crew.size)])
        self._put_in_order(fresh)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what a schedule asks after

    def _put_in_order(self, fresh: Sequence[Tensor]) -> None:
        """New states follow one another as the parameters do, and not as threads came to them."""
        state = self._optimizer.state
        for parameter in fresh:
            if parameter in state:
                state[parameter] = state.pop(parameter)

    def _part(self, ids: set[int]) -> torch.optim.Optimizer:
        part = copy.copy(self._optimizer)
        part.__dict__.pop("step", None)  # what a schedule has put around the step of the whole
        groups = [
            {**group, "params": [p for p in group["params"] if id(p) in ids]} for group in self._optimizer.param_groups
        ]
        part.param_groups = [group for group in groups if group["params"]]
        return part


def _steps_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` is that of its class, which a schedule may have wrapped, and nobody has put another in place."""
    own = vars(optimizer).get("step")
    return own is None or getattr(own, "__wrapped__", None) is type(optimizer).step


def _dealt(parameters: Sequence[Tensor], members: int) -> list[set[int]]:
    """The ids of each member's parameters: the largest first, to whom has least."""
    loads = [0] * members
    dealt: list[set[int]] = [set() for _ in range(members)]
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
        member = loads.index(min(loads))
        loads[member] += parameter.numel()
        dealt[member].add(id(parameter))
    return [ids for ids in dealt if ids]
