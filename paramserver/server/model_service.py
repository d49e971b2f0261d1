"""The model as trainers call it on the server (``server.compute: server``), all of them at once.

A module that several threads use cannot serve several versions, also not through ``functional_call``. So each call of a
step has a skeleton: a copy of the module whose parameters are leaves of its own, in memory that a snapshot lends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paramserver.config import Config
from paramserver.devices import CPU, move_to_device, place_server
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.metrics.records import StepReport
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.model import build_model, detached_state_dict, load_weights
from paramserver.rng import PrivateRng, random_states
from paramserver.server.parameter_store import ParameterStore
from paramserver.task import Task
from paramserver.transport.autograd import send_outputs
from paramserver.transport.base import ServerTransport
from paramserver.transport.messages import ModelCall, ModelReply, VersionView

Flats: TypeAlias = Sequence[Tensor]

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))


class ModelReplica:
    """A copy of a model for one call at a time: it costs objects, and no memory for parameters.

    Args:
        model: as the task built it.
        trained: the names of the parameters that are trained; the others are shared with ``model``.
        buffers: the module buffers that it uses and changes, by name.

    Raises:
        UnsupportedConfiguration: the model cannot be copied so.
    """

    def __init__(self, model: nn.Module, trained: Sequence[str], buffers: Mapping[str, Tensor]) -> None:
        parameters = dict(model.named_parameters())
        # By ``data``: a leaf that shares the version counter of the server's own would fail at every update of that.
        self.leaves = {name: nn.Parameter(parameters[name].data) for name in trained}
        memo: dict[int, Any] = {id(parameter): parameter for parameter in parameters.values()}
        memo |= {id(parameters[name]): leaf for name, leaf in self.leaves.items()}
        memo |= {id(buffer): buffers[name] for name, buffer in model.named_buffers()}
        self.module = _copied(model, memo)
        self._check()
        self._built = [(module, module.training) for module in self.module.modules()]
        self._held: Mapping[str, Tensor] | None = None

    def _check(self) -> None:
        own = dict(self.module.named_parameters())
        for name, leaf in self.leaves.items():
            if own.get(name) is not leaf:
                raise UnsupportedConfiguration(
                    f"parameter {name} of the model ({type(self.module).__name__}) cannot be replaced in a copy; "
                    "use server.compute: trainer"
                )

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with these parameters from now on; what was computed before must have had its backward."""
        if self._held is tensors:
            return
        for name, leaf in self.leaves.items():
            leaf.data = tensors[name]
        self._held = tensors

    def set_training(self, training: bool | None) -> None:
        """``train()`` or ``eval()``; with None as the task built it."""
        for module, built in self._built:
            module.training = built if training is None else training


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise UnsupportedConfiguration(
            f"the model ({type(model).__name__}) cannot be copied ({type(error).__name__}: {error}), which a server "
            "that many trainers call must do; use server.compute: trainer"
        ) from error


class ServedTransport(ServerTransport):
    """One trainer's forwards: versions are offered to them, and gradients are found at the leaves of its skeletons.

    Args:
        model: a module on the devices that compute; its own parameters are not used.
        parameters, buffers: how both lie in flat tensors.
        snapshot: gives the current version, immutable: parameters and module buffers.
        device: that takes the inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: FlatLayout,
        buffers: FlatLayout,
        snapshot: Callable[[], tuple[Flats, Flats]],
        device: torch.device,
    ) -> None:
        self._model = model
        self._parameters, self._buffer_layout = parameters, buffers
        self._snapshot = snapshot
        self._device = device
        self._devices = {name: parameter.device for name, parameter in model.named_parameters()}
        self._trained = [slot.name for slot in parameters.slots]
        # Of this trainer alone: they go on from call to call, and a push takes them.
        self._buffers = {name: torch.empty_like(buffer) for name, buffer in model.named_buffers()}
        self._skeletons: list[ModelReplica] = []
        self._batches: list[int] = []
        self._tensors: dict[str, Tensor] = {}
        self._gradients = parameters.allocate()
        self._used: list[bool] = []
        self._offered: tuple[Flats, Flats] | None = None

    # Versions.

    def pin_version(self) -> int:
        self._offered = self._snapshot()
        return 0

    def pull(self) -> tuple[Tensor, ...]:
        return ()

    def view_version(self) -> tuple[int | None, Flats]:
        return self.pin_version(), ()

    def view_retained(self, parameters: Flats, buffers: Flats) -> VersionView:
        self._offered = parameters, buffers
        return VersionView(0, (), ())

    def buffers_to_send(self, current: Flats) -> tuple[Tensor, ...]:
        return ()

    @torch.no_grad()
    def _hold(self, parameters: Flats, buffers: Flats) -> None:
        """Done by the first call, outside of the server's lock."""
        views = self._parameters.views(parameters)
        self._tensors = {name: view.to(self._devices[name]) for name, view in views.items()}
        for name, value in self._buffer_layout.views(buffers).items():
            self._buffers[name].copy_(value)
        self._batches = []

    # Calls.

    def compute(self, call: ModelCall) -> ModelReply:
        """The model's output at the version that was offered or looked at last, and the random state after it."""
        if self._offered is not None:
            self._hold(*self._offered)
            self._offered = None
        skeleton = self._skeleton(call)
        args, kwargs = move_to_device((call.args, call.kwargs), self._device)
        autocast = torch.autocast(self._device.type, call.autocast_dtype, enabled=call.autocast_dtype is not None)
        with PrivateRng(call.random_state) as draws, torch.set_grad_enabled(call.wants_grad), autocast:
            output = skeleton.module(*args, **kwargs)
        return _answer(output, draws.state)

    def _skeleton(self, call: ModelCall) -> ModelReplica:
        """One for each call of a step, so that the gradients of several add up in one order, whichever comes first."""
        place = len(self._batches)
        if place == len(self._skeletons):
            self._skeletons.append(ModelReplica(self._model, self._trained, self._buffers))
        if call.wants_grad:
            self._batches.append(call.batch)
        skeleton = self._skeletons[place]
        skeleton.bind(self._tensors)
        skeleton.set_training(call.training)
        return skeleton

    # A push.

    @torch.no_grad()
    def collect_gradients(self, held: Mapping[Tensor, Tensor]) -> list[Tensor] | None:
        self._refuse_strangers(held)
        calls = list(zip(self._batches, self._skeletons, strict=False))
        # As where a trainer computes: each batch's calls from the last, as its backward goes, then batch after batch.
        batches = [
            [skeleton for other, skeleton in reversed(calls) if other == batch] for batch in sorted({*self._batches})
        ]
        views = self._parameters.views(self._gradients)
        self._used = []
        for name in self._trained:
            parts = [[held[s.leaves[name]] for s in batch if s.leaves[name] in held] for batch in batches]
            self._used.append(_add_up(name, [part for part in parts if part], views[name]))
        return list(self._gradients) if any(self._used) else None

    def _refuse_strangers(self, held: Mapping[Tensor, Tensor]) -> None:
        """A function keeps what it refers to when a module is copied: such a gradient is of no version, and lost."""
        for name, parameter in self._model.named_parameters():
            if parameter in held:
                raise TaskError(
                    f"the model reaches parameter {name} through a function (a lambda, a hook), which no copy of the "
                    "model can follow; make it a method, or use server.compute: trainer"
                )

    @torch.no_grad()
    def complete_push(self, report: StepReport, buffers: Flats) -> tuple[StepReport, Flats]:
        flats = self._buffer_layout.allocate()
        for name, view in self._buffer_layout.views(flats).items():
            view.copy_(self._buffers[name])
        return replace(report, used=None if all(self._used) else tuple(self._used)), flats

    def unpin(self) -> None:
        """A snapshot lives as long as somebody holds it."""


def _add_up(name: str, batches: Sequence[Sequence[Tensor]], total: Tensor) -> bool:
    """Put the sum over the batches' sums of gradients into ``total``; False where there is no gradient."""
    if any(part.layout is not torch.strided for batch in batches for part in batch):
        raise TaskError(f"the gradient of parameter {name} is sparse; use dense ones (sparse=False)")
    if not batches:
        total.zero_()
    for place, (first, *others) in enumerate(batches):
        summed = sum(others, first)
        total.add_(summed.to(total.device)) if place else total.copy_(summed)
    return bool(batches)


def _answer(output: Any, random_state: Tensor) -> ModelReply:
    """What travels back: tensors of the CPU; those that have a gradient behind one ticket.

    Raises:
        TaskError: the model returns something that is no tensor and no nested tuple, list or dictionary of tensors.
    """
    leaves, form = tree_flatten(output)
    for leaf in leaves:
        if not isinstance(leaf, _PLAIN):
            raise TaskError(
                f"the model returned a {type(leaf).__name__}; with server.compute: server it must return tensors, "
                "alone or in tuples, lists and dictionaries; return those, or use server.compute: trainer"
            )
    leaves = [leaf.to("cpu") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places:
        return ModelReply(output=tree_unflatten(leaves, form), token=None, random_state=random_state)
    ticket, *departed = send_outputs([leaves[place] for place in places])
    for place, leaf in zip(places, departed, strict=True):
        leaves[place] = leaf
    return ModelReply(output=tree_unflatten(leaves, form), token=ticket, random_state=random_state)


class ModelService:
    """The model of a server as trainers call it: built once, an end for each trainer.

    Args:
        task: builds the model again where it is to compute on other devices than the CPU.
        config: the run's.
        versions: of the parameters, which live on the CPU. Made just before this.
    """

    def __init__(self, task: Task, config: Config, versions: ParameterStore) -> None:
        states = random_states()
        states.pop("cuda", None)  # a trainer may have other devices
        self.as_built = states, versions.model.training
        self._versions = versions
        placement = place_server(config)
        self._device = placement.device
        self._model = versions.model if placement == CPU else build_model(task, config.seed, placement)

    def new_transport(self) -> ServedTransport:
        """Of a trainer that arrives; it can call the model at once."""
        if self._model is not self._versions.model:  # what is not trained never changes after the start
            load_weights(self._model, detached_state_dict(self._versions.model), "the server")
        parameters, buffers = self._versions.parameters.layout, self._versions.buffers.layout
        end = ServedTransport(self._model, parameters, buffers, self._versions.snapshot, self._device)
        end.pin_version()
        return end
