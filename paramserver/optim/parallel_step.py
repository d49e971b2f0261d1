"""Optimizer steps in parallel: over threads of one server, or over the shards of several servers.

While a server applies an update, its trainers wait, and so do the cores of those on its host. torch's own threads round
the ends of their parts of a tensor differently than one thread does. Here each parameter is stepped by one thread, and
sums are split at multiples of a kernel's stride, so no bit changes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from paramserver.errors import TaskError
from paramserver.optim.averaging import AverageParameters
from paramserver.optim.named_optimizers import optimizers_of
from paramserver.optim.row_wise_adagrad import RowWiseAdagrad
from paramserver.rng import update_generators

_OPTIM = torch.optim
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    *(_OPTIM.SGD, _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.NAdam, _OPTIM.RAdam, _OPTIM.Adamax),
    *(_OPTIM.Adadelta, _OPTIM.Adagrad, _OPTIM.ASGD, _OPTIM.RMSprop, _OPTIM.Rprop),
)
"""Optimizers that update each element independently, apart from scalars of the whole parameter."""

PER_PARAMETER: tuple[type[torch.optim.Optimizer], ...] = (
    _OPTIM.Adafactor,
    _OPTIM.Muon,
    _OPTIM.SparseAdam,
    RowWiseAdagrad,
)
"""Optimizers that update each parameter independently, but only as a whole."""

OWN_HOOKS: tuple[type[Any], ...] = (AverageParameters,)
"""Classes of hooks, before or after a step, that treat each parameter that is stepped by itself."""

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def has_foreign_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has step hooks that may read anything: others than ``OWN_HOOKS``."""
    return any(not isinstance(hook, OWN_HOOKS) for name in _HOOKS for hook in getattr(optimizer, name).values())


_ATTRIBUTE = "updates_each"


def is_elementwise(optimizer: torch.optim.Optimizer, servers: int) -> bool:
    """Return whether several servers may each own a part of one parameter; otherwise each owns whole ones.

    The classes of torch are known. A derived class that does not override ``step`` still updates each parameter
    independently. Any other declares it by the class attribute ``updates_each``: "element" or "parameter"; so does one
    with step hooks, which may read anything.

    Raises:
        TaskError: the optimizer does not declare it.
    """
    if (several := optimizers_of(optimizer)) != [optimizer]:
        kinds = [is_elementwise(own, servers) for own in several]  # each is checked
        return all(kinds)
    kind = type(optimizer)
    if any(
        getattr(kind, name) is not getattr(torch.optim.Optimizer, name) for name in ("state_dict", "load_state_dict")
    ):
        raise TaskError(
            f"optimizer ({kind.__name__}) must keep its state by parameter, with state_dict and load_state_dict of "
            f"torch.optim.Optimizer, with cluster.num_servers ({servers}), as each server has a part of it; set "
            "cluster.num_servers: 1"
        )
    declared = None if has_foreign_hooks(optimizer) and not hasattr(kind, _ATTRIBUTE) else _declared_kind(kind)
    if declared not in ("element", "parameter"):
        raise TaskError(
            f"optimizer ({kind.__name__}) must look at no two parameters together, in step() or in hooks of it, with "
            f"cluster.num_servers ({servers}), as each server steps a part of them; if it does not, declare it by the "
            f'class attribute {_ATTRIBUTE} = "element" or "parameter", or set cluster.num_servers: 1'
        )
    return bool(declared == "element")


def _declared_kind(kind: type) -> Any:
    """Return "element" or "parameter" for a class of torch, or what the class that defines ``step`` declares."""
    if kind in ELEMENTWISE:
        return "element"
    for cls in kind.__mro__:
        if _ATTRIBUTE in vars(cls):
            return vars(cls)[_ATTRIBUTE]
        if cls in (*ELEMENTWISE, *PER_PARAMETER):
            return "parameter"
        inherited = (_plain(vars(base)["step"]) for base in cls.__mro__[1:] if "step" in vars(base))
        if "step" in vars(cls) and _plain(vars(cls)["step"]) is not next(inherited, None):
            return None
    return None


def _plain(step: Any) -> Any:
    """Return a ``step`` without the wrapper that torch adds, also to an inherited one."""
    while inspect.isfunction(step) and step.__code__.co_filename == inspect.getfile(torch.optim.Optimizer):
        if not hasattr(step, "__wrapped__"):
            break
        step = step.__wrapped__
    return step


# Below this size one thread has finished before another has started.
WORTHWHILE_BYTES = 1 << 20
# More threads wait for memory bandwidth.
_MAX_THREADS = 8
# In elements; a multiple of every kernel's vector width, so that a split changes no rounding.
_STRIDE = 4096


def num_spare_threads(cores: int) -> int:
    """Return how many more threads fit on ``cores``, if each uses as many of torch's threads as the caller."""
    return max(min(cores // torch.get_num_threads(), _MAX_THREADS) - 1, 0)


class ThreadTeam:
    """The calling thread and a pool of others. Used by one thread at a time; ``close`` ends the pool."""

    def __init__(self, others: int) -> None:
        self.size = others + 1
        # The threads take no lock: the caller holds the server's lock and waits for them.
        self._pool = ThreadPoolExecutor(others, thread_name_prefix="parallel-step")

    def run(self, parts: Sequence[Callable[[], object]]) -> None:
        """Run all parts, the first one in the calling thread, and wait for all.

        Raises:
            BaseException: of the first part that failed.
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
        """Return for each thread a slice of each flat tensor; together they cover it, and the last may be empty."""
        shares = [-(-flat.numel() // (self.size * _STRIDE)) * _STRIDE for flat in flats]
        return [[slice(k * share, (k + 1) * share) for share in shares] for k in range(self.size)]


class ParallelStep:
    """Replaces ``optimizer.step()``: each thread of a team steps some of the parameters.

    The threads step shallow copies of the optimizer that hold some of its parameters and share its state, so groups and
    state end up as after ``optimizer.step()``. ``supports`` accepts the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, team: ThreadTeam) -> None:
        self._optimizer = optimizer
        self._team = team

    @staticmethod
    def supports(optimizer: torch.optim.Optimizer) -> bool:
        """Return whether it is known to step parameters independently, without hooks; of several, whether all are."""
        if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
            return False
        return all(
            type(own) in (*ELEMENTWISE, *PER_PARAMETER) and not has_foreign_hooks(own) and _steps_itself(own)
            for own in optimizers_of(optimizer)
        )

    def __call__(self) -> None:
        if not self.supports(self._optimizer):  # a hook was added since
            self._optimizer.step()
            return
        for optimizer in optimizers_of(self._optimizer):
            self._step(optimizer)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        fresh = [p for p in stepped if p not in optimizer.state]
        self._team.run([_part(optimizer, ids).step for ids in _balance(stepped, self._team.size)])
        # A new state is inserted when its thread gets there; restore the order of the parameters.
        state = optimizer.state
        for parameter in fresh:
            if parameter in state:
                state[parameter] = state.pop(parameter)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # a schedule checks it


def _part(optimizer: torch.optim.Optimizer, ids: set[int]) -> torch.optim.Optimizer:
    """Return a copy that steps the parameters with these ids."""
    part = copy_optimizer(optimizer)
    groups = [{**group, "params": [p for p in group["params"] if id(p) in ids]} for group in optimizer.param_groups]
    part.param_groups = [group for group in groups if group["params"]]
    return part


def copy_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a shallow copy that steps a part of the parameters, with the hooks of ``optimizer``."""
    part = copy.copy(optimizer)  # without hooks
    for name in _HOOKS:
        setattr(part, name, getattr(optimizer, name))
    part.__dict__.pop("step", None)  # the wrapper of a schedule counts steps of the whole
    return part


@contextmanager
def generators_of_update(
    optimizer: torch.optim.Optimizer, seed: int, version: int, server_index: int = 0
) -> Iterator[None]:
    """Return a context for the step of an optimizer that makes ``version``; see ``rng.update_generators``.

    Its gradients get memory of their own too: an optimizer may keep one until its next step, and the memory of the run
    (the buckets of DDP, a segment) has the next gradient then. Neither is done where the optimizer is one of those
    that are known and has no hooks, as these draw no random numbers and keep no gradient.
    """
    if ParallelStep.supports(optimizer):
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
    with update_generators(seed, version, server_index, sorted({p.device for p in parameters}, key=str)):
        yield


def _steps_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``step`` is that of its class, possibly wrapped by a schedule, and was not replaced."""
    own = vars(optimizer).get("step")
    return own is None or getattr(own, "__wrapped__", None) is type(optimizer).step


def _balance(parameters: Sequence[Tensor], threads: int) -> list[set[int]]:
    """Return the ids of each thread's parameters: each next largest goes to the thread with the fewest elements."""
    loads = [0] * threads
    assigned: list[set[int]] = [set() for _ in range(threads)]
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
        thread = loads.index(min(loads))
        loads[thread] += parameter.numel()
        assigned[thread].add(id(parameter))
    return [ids for ids in assigned if ids]
