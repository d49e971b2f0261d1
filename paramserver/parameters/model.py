"""Building the model of a task, equally in every process, and moving weights into and out of it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paramserver.devices import Placement
from paramserver.errors import CheckpointError, TaskError, UnsupportedConfiguration
from paramserver.parameters.model_tree import is_writable, set_buffer
from paramserver.parameters.numerics import checksums
from paramserver.parameters.remote_tables import tables_without_memory
from paramserver.rng import seed_all
from paramserver.task import Task

_EXTRA_STATE = "_extra_state"  # the last part of its name in a ``state_dict()``


def build_model(task: Task, seed: int, placement: Placement, owns_tables: bool = True) -> nn.Module:
    """Build the task's model with initial weights from ``seed``: the same in every process and mode.

    A process with one device moves the model there; a task with several (``self.devices``) places it itself. A model
    whose modules have one mode, as new and loaded ones do, is put in ``train()``, whose override may keep a part in
    ``eval()``. Without ``owns_tables`` large embedding tables have neither memory nor values.

    Raises:
        TaskError: ``build_model`` returns no module, or one without trainable parameters.
    """
    task.devices = placement.devices
    seed_all(seed)
    with nullcontext() if owns_tables else tables_without_memory() as allocate_untrained:
        model = task.build_model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"{type(task).__name__}.build_model returned {type(model).__name__}; it must return a torch.nn.Module"
        )
    lazy = next((name for name, t in chain(model.named_parameters(), model.named_buffers()) if is_lazy(t)), None)
    if lazy is not None:
        raise TaskError(
            f"{type(task).__name__}.build_model returned a model whose {lazy} has no shape yet; call the model once "
            "with an example input in build_model, or give the lazy module its sizes"
        )
    if allocate_untrained is not None:
        allocate_untrained(model)
    if len({module.training for module in model.modules()}) == 1 and _has_modes(model):
        model.train()
    if not any(p.requires_grad for p in model.parameters()):
        raise TaskError(
            f"{type(task).__name__}.build_model returned a model without a parameter that requires a gradient"
        )
    for parameter in model.parameters():
        if not _is_plain(parameter):
            parameter.data = _plain(parameter)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not _is_plain(buffer):
                module._buffers[name] = _plain(buffer)
    return model.to(placement.device) if len(placement.devices) == 1 else model


def _has_modes(model: nn.Module) -> bool:
    """Whether ``train()`` of a model is that of PyTorch, and not another method of this name, or one that it lacks."""
    if any(hasattr(module, "graph") and "train" in vars(module) for module in model.modules()):
        return False  # of torch.export, which gives its modules a ``train`` that raises NotImplementedError
    try:
        inspect.signature(model.train).bind()
    except TypeError:
        return False
    return True


def refuse_synced_batch_norm(model: nn.Module, where: str) -> None:
    """Refuse ``nn.SyncBatchNorm`` where it takes no statistics over the trainers.

    Raises:
        UnsupportedConfiguration: the model has such a layer; the message names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedConfiguration(
                f"layer {name} (SyncBatchNorm) must be a BatchNorm {where}, as it takes statistics over the trainers "
                "only in mode ddp on GPUs; use BatchNorm, whose statistics are of each trainer's own batch"
            )


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor has its values, and each element some of its own.

    No step, no load and no broadcast of DDP can write to an expanded tensor, and few operations to one that is
    conjugated or negated when it is read.
    """
    return tensor.layout is not torch.strided or (is_writable(tensor) and not tensor.is_conj() and not tensor.is_neg())


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().resolve_conj().resolve_neg()


def load_weights(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    origin: str,
    late_buffers: Sequence[str] = (),
    *,
    with_optimizer: bool = False,
) -> None:
    """Copy stored weights into the model: all of them, or none if any does not fit.

    The late buffers had another shape or dtype than as built, or were not there; the model gets them as they are
    stored. A parameter may be of another dtype, unless the state of its optimizer is loaded too (``with_optimizer``).

    Raises:
        CheckpointError: they are of another model; the message names the first differences.
    """
    if not isinstance(weights, Mapping):
        raise CheckpointError(
            f"{origin} holds {type(weights).__name__}, and must hold a state_dict; give the model.pt of a checkpoint, "
            "or what torch.save(model.state_dict(), ...) wrote"
        )
    for name in late_buffers:
        value = weights.get(name)
        set_buffer(model, name, value if value is None else value.clone())
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    _check_same_model(model.state_dict(), weights, origin, trained if with_optimizer else ())
    model.load_state_dict(copy(weights))  # with their _metadata, without which modules take them for an old state


def _check_same_model(
    own: Mapping[str, Any], weights: Mapping[str, Any], origin: str, of_same_dtype: Sequence[str] = ()
) -> None:
    problems = [f"{name} is missing there" for name in own if name not in weights]
    problems += [f"{name} is not in this model" for name in weights if name not in own]
    problems += [
        f"{name} has shape {_shape(weights[name])} there and {_shape(tensor)} here"
        for name, tensor in own.items()
        if isinstance(tensor, Tensor) and name in weights and _shape(weights[name]) != _shape(tensor)
    ]
    problems += [
        f"{name} is {weights[name].dtype} there and {own[name].dtype} here, which only init_from converts"
        for name in of_same_dtype
        if isinstance(own.get(name), Tensor) and getattr(weights.get(name), "dtype", own[name].dtype) != own[name].dtype
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{origin} holds another model: {'; '.join(problems[:3])}{more}; use the task and the task_args that "
            "it was stored with"
        )


def _shape(value: object) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else f"none ({type(value).__name__})"


def detached_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's ``state_dict()``, with the versions of its modules, detached: the contents of model.pt."""
    state: dict[str, Any] = copy(model.state_dict())
    state.update({name: value.detach() for name, value in state.items() if isinstance(value, Tensor)})
    return state


def frozen_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the part of the state that no step changes: frozen parameters and extra state."""
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return {**frozen, **extra_state_dict(model)}


def load_frozen_state(model: nn.Module, state: Mapping[str, Any], origin: str) -> None:
    """Load ``frozen_state_dict()`` of the same model, which a ``state_dict()`` of the user may leave out.

    Raises:
        CheckpointError: it is of another model; the message names the first differences.
    """
    own = {**dict(model.named_parameters()), **extra_state_dict(model)}
    _check_same_model(own, {**own, **state}, origin)
    load_part_of_state(model, state)


def extra_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the part of the state that modules define by ``get_extra_state``, by its names in a ``state_dict()``."""
    return {
        f"{name}.{_EXTRA_STATE}".lstrip("."): module.get_extra_state()
        for name, module in model.named_modules(remove_duplicate=False)
        if _has_extra_state(module)
    }


def _has_extra_state(module: nn.Module) -> bool:
    return getattr(type(module), "get_extra_state", nn.Module.get_extra_state) is not nn.Module.get_extra_state


@torch.no_grad()
def load_part_of_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load some parameters and extra state of modules; a ``load_state_dict`` of the user may need a whole state.

    Extra state that the model has no module for is left out: a trainer without a model has none.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, value in state.items():
        module, _, last = name.rpartition(".")
        if last == _EXTRA_STATE:
            if module in modules and _has_extra_state(modules[module]):
                modules[module].set_extra_state(value)
        else:
            parameters[name].copy_(value)


class TrainingFlags:
    """What a task may switch while it trains: ``requires_grad`` of trained parameters, and ``eval()`` of modules.

    Made of a model as ``build_model`` returned it.

    Attributes:
        trained: the parameters that are trained, by name, also while they are frozen.
        stored: the state of a checkpoint, which ``begin`` restores; empty if there is none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.stored: Mapping[str, Any] = {}
        self.trained = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}

        self._began = self._switched()

    def _switched(self) -> dict[str, list[str]]:
        """Return the names of the parameters that are frozen, and of the modules that are in ``eval()``."""
        return {
            "frozen": [name for name, parameter in self.trained.items() if not parameter.requires_grad],
            "eval": [name for name, module in self._model.named_modules() if not module.training],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what is switched now, and what was after ``on_train_start``."""
        return {**self._switched(), "began": self._began}

    def begin(self) -> None:
        """Restore what is stored, after ``on_train_start``; names that the model lacks are left out.

        What that hook switches otherwise than in the run that stored it stays: a run may be resumed to train other
        layers.
        """
        began, stored = self._switched(), self.stored
        self._began = began
        if not stored:
            return
        before = stored.get("began", began)
        kept = {kind: set(began[kind]) ^ set(before[kind]) for kind in began}
        for name, parameter in self.trained.items():
            if name not in kept["frozen"]:
                parameter.requires_grad_(name not in stored["frozen"])
        for name, module in self._model.named_modules():
            if name not in kept["eval"]:
                module.training = name not in stored["eval"]


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return a context of mixed precision if ``precision`` is of 16 bits, otherwise one that does nothing."""
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


# A change through ``data`` shows in the values only. To compare these in each step would cost up to a tenth of it.
_FIRST_WITH_VALUES = 8
_VALUES_EVERY = 64
_ROWS = 256  # of a table


class LoadedParameters:
    """Notices that a task changes trained parameters, which belong to the servers: the next version would replace it.

    An operation in place and an assignment of ``data`` are noticed in the step in which they happen. A change through
    ``data`` in place (``p.data.clamp_(-1, 1)``) is noticed where values are compared: in the first steps of a process,
    in each 64th, and around the hooks between steps. ``owned``: their memory is that of this process alone. A change
    that is undone, as by an optimizer of the task that looks at neighbouring points, is then none; in memory of the
    server other trainers might have read it. Of embedding ``tables`` the values of some rows are compared, as these may
    be larger than all else.
    """

    def __init__(self, parameters: Mapping[str, Tensor], owned: bool, tables: Collection[str] = frozenset()) -> None:
        self._parameters = dict(parameters)
        self._tables = tables
        self._owned = owned
        self._noted = 0
        self._known: list[tuple[int, int]] = []  # of each parameter: the version of its tensor, and its place
        self._sums: dict[str, int] | None = None
        self._are_restored = False  # the task changes them and restores their values

    def note(self, values: bool = False) -> None:
        """Remember the parameters as they are, after a version was loaded; with ``values`` their values in any case."""
        self._noted += 1
        # The writes of a server come from another process and do not count as changes here.
        self._known = self._read()
        is_due = self._noted <= _FIRST_WITH_VALUES or not self._noted % _VALUES_EVERY
        self._sums = self._checksums() if values or is_due or self._are_restored else None

    def _read(self) -> list[tuple[int, int]]:
        # On a GPU, modules such as LSTM move their parameters without a change.
        return [(p._version, p.data_ptr() if p.device.type == "cpu" else 0) for p in self._parameters.values()]

    def _checksums(self) -> dict[str, int]:
        rows = {name: p[:: 1 + len(p) // _ROWS] for name, p in self._parameters.items() if name in self._tables}
        return checksums({**self._parameters, **rows})

    def check(self, values: bool = True) -> None:
        """Check that the parameters are as they were noted.

        Values are not compared where a server may have written to the memory since then.

        Raises:
            TaskError: the task changed one; the message names it.
        """
        changed, in_memory = self.find_changed(values)
        # Torch counts the changes of this process only. In memory of the server these may be of another trainer, which
        # reads the same version, so either of them may be the first to notice.
        whose = "; all trainers of this host read its memory, so another one may have changed it" if in_memory else ""
        if changed is not None:
            raise TaskError(
                f"parameter {changed} was changed by the task, and belongs to the servers: the next version would "
                "replace it; change parameters in build_model, or in the step of the optimizer (a subclass whose "
                f"step() changes them after super().step()), which every mode makes once{whose}"
            )

    def find_changed(self, values: bool = True) -> tuple[str | None, bool]:
        """Return the name of one that changed, or None, and whether only its values show it, in shared memory."""
        if not self._known:
            return None, False
        found = self._read()
        changed = None
        if found != self._known:
            noted = zip(self._parameters, self._known, found, strict=True)
            changed = next(name for name, before, now in noted if before != now)
            if self._owned and values and self._sums is not None:
                changed, self._are_restored = None, True  # unless the values differ
        if changed is not None or not values or self._sums is None:
            return changed, False
        now = self._checksums()
        return next((name for name in now if now[name] != self._sums[name]), None), not self._owned
