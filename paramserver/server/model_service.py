"""The model as trainers call it on the server (``server.compute: server``), many of them at the same time.

Threads that share a module cannot use several versions of its parameters (docs/torch-notes.md, "functional_call is not
thread-safe"). So each call of a step has a replica of the module, whose parameters are separate leaves in the memory of
a snapshot.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paramserver.config import Config
from paramserver.devices import CPU, move_to_device, place_server
from paramserver.distributed.rpc_agent import distributed_gradients
from paramserver.errors import TaskError, UnsupportedConfiguration, kind_and_message
from paramserver.metrics.records import StepReport
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.model import build_model, frozen_state_dict, load_part_of_state
from paramserver.parameters.model_tree import ModelTree, PackedBuffers, set_buffer
from paramserver.rng import PrivateRng, random_states
from paramserver.server.parameter_store import ParameterStore
from paramserver.task import Task
from paramserver.transport.autograd import send_outputs
from paramserver.transport.base import ServerTransport
from paramserver.transport.messages import ModelCall, ModelReply, VersionView

Flats: TypeAlias = Sequence[Tensor]

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))


class ModelReplica:
    """A copy of a model for one call at a time. It consists of Python objects, without memory for parameters.

    The parameters that are not ``trained`` are shared with ``model``.

    Raises:
        UnsupportedConfiguration: the model cannot be copied, the copy does not use the new parameters, or a parameter
            has a hook on its gradient.
    """

    def __init__(self, model: nn.Module, trained: Sequence[str]) -> None:
        parameters = dict(model.named_parameters())
        for name in trained:
            # Each call has a leaf of its own, and the gradient of a step, which a hook would see, is their sum.
            if parameters[name]._backward_hooks or parameters[name]._post_accumulate_grad_hooks:
                raise UnsupportedConfiguration(
                    f"parameter {name} of the model ({type(model).__name__}) must have no hook on its gradient with "
                    "server.compute: server, where none is called; use a hook of its module, or server.compute: trainer"
                )
        # By ``data``: a leaf that shares the server's version counter would fail in backward after every update.
        self.leaves = {name: nn.Parameter(parameters[name].data) for name in trained}
        # deepcopy takes what the memo contains as the copy, so no memory of parameters is copied.
        memo: dict[int, Any] = {id(parameter): parameter for parameter in parameters.values()}
        memo |= {id(parameters[name]): leaf for name, leaf in self.leaves.items()}
        try:
            self.module = copy.deepcopy(model, memo)
        except Exception as error:
            raise UnsupportedConfiguration(
                f"the model ({type(model).__name__}) cannot be copied ({kind_and_message(error)}), which a "
                "server that many trainers call must do; use server.compute: trainer"
            ) from error
        own = dict(self.module.named_parameters())
        for name, leaf in self.leaves.items():
            if own.get(name) is not leaf:
                raise UnsupportedConfiguration(
                    f"parameter {name} of the model ({type(self.module).__name__}) cannot be replaced in a copy; "
                    "use server.compute: trainer"
                )
        self.tree = ModelTree(self.module)  # of the replica, whose module buffers are its own
        self._training_as_built = [(module, module.training) for module in self.module.modules()]
        self._bound: Mapping[str, Tensor] | None = None

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with these parameters from now on. The backward of every earlier call must be done."""
        if self._bound is tensors:
            return
        for name, leaf in self.leaves.items():
            leaf.data = tensors[name]
        self._bound = tensors

    def take_buffers(self, other: ModelReplica) -> None:
        """Compute with the module buffers of another replica from now on: with its tensors themselves."""
        own = self.tree.buffers()
        for name, buffer in other.tree.buffers().items():
            if own.get(name) is not buffer:
                set_buffer(self.module, name, buffer)

    def set_training(self, training: bool | None) -> None:
        """Call ``train()`` or ``eval()``; None restores the mode in which the task built each module."""
        for module, as_built in self._training_as_built:
            module.training = as_built if training is None else training


@dataclass(eq=False)
class ServedTransport(ServerTransport):
    """The forwards of one trainer: it binds versions to replicas and finds gradients at the leaves of these.

    The model is on the devices that compute; its own parameters are not used. ``snapshot`` returns the current version,
    immutable. ``context_id`` is None before the step has called the model.
    """

    sends_buffers = False

    _model: nn.Module
    _parameter_layout: FlatLayout
    _snapshot: Callable[[], tuple[Flats, PackedBuffers]]
    _device: torch.device

    def __post_init__(self) -> None:
        self.context_id: int | None = None
        self._devices = {name: parameter.device for name, parameter in self._model.named_parameters()}
        self._trained = [slot.name for slot in self._parameter_layout.slots]
        self._replicas: list[ModelReplica] = []
        # Computed last. Its module buffers are this trainer's: they change from call to call, and a push stores them.
        self._last: ModelReplica | None = None
        self._known_buffers: PackedBuffers | None = None  # that the server has, as far as this trainer changed none
        self._batches: list[int] = []  # of each call of the step that records gradients
        self._tensors: dict[str, Tensor] = {}
        self._gradients = self._parameter_layout.allocate()
        self._used: list[bool] = []
        self._pinned: tuple[Flats, PackedBuffers] | None = None  # not bound yet

    # Versions. These methods hold the server's lock, so they only note the version; the next call binds it.

    def pin_version(self) -> int:
        self._pinned = self._snapshot()
        return 0

    def view_version(self) -> tuple[int | None, Flats]:
        return self.pin_version(), ()

    def view_retained(self, parameters: Flats, buffers: PackedBuffers) -> VersionView:
        self._pinned = parameters, buffers
        return VersionView(0, (), None)

    @torch.no_grad()
    def _bind(self, parameters: Flats, buffers: PackedBuffers) -> None:
        views = self._parameter_layout.views(parameters)
        self._tensors = {name: view.to(self._devices[name]) for name, view in views.items()}
        self._batches = []
        if not self._replicas:
            self._replicas.append(ModelReplica(self._model, self._trained))
        self._last = self._replicas[0]
        self._last.tree.load_buffers(buffers)
        self._known_buffers = buffers

    # Calls, without the server's lock: trainers compute at the same time, each on its own transport.

    def compute(self, call: ModelCall) -> ModelReply:
        """Return the model's output at the version that was pinned or viewed last, and the random state after it.

        Raises:
            TaskError: the model returns something that cannot be sent.
            UnsupportedConfiguration: see ``ModelReplica``.
        """
        if self._pinned is not None:
            self._bind(*self._pinned)
            self._pinned = None
        replica = self._next_replica(call)
        args, kwargs = move_to_device((call.args, call.kwargs), self._device)
        autocast = torch.autocast(self._device.type, call.autocast_dtype, enabled=call.autocast_dtype is not None)
        with PrivateRng(call.random_state) as rng, torch.set_grad_enabled(call.wants_grad), autocast:
            output = replica.module(*args, **kwargs)
        return _reply(output, rng.state)

    def _next_replica(self, call: ModelCall) -> ModelReplica:
        """Return the replica for a call: another one for each call of a step.

        So the gradients of several calls are added in a fixed order, whichever backward is done first.
        """
        number = len(self._batches)
        if number == len(self._replicas):
            self._replicas.append(ModelReplica(self._model, self._trained))
        if call.wants_grad:
            self._batches.append(call.batch)
        replica = self._replicas[number]
        if self._last is not None and self._last is not replica:
            replica.take_buffers(self._last)
        self._last = replica
        replica.bind(self._tensors)
        replica.set_training(call.training)
        return replica

    # A push.

    def collect_gradients(self) -> list[Tensor] | None:
        if self.context_id is None:  # no call of the step recorded gradients
            return None
        return self.add_gradients(distributed_gradients(self.context_id))

    @torch.no_grad()
    def add_gradients(self, by_leaf: Mapping[Tensor, Tensor]) -> list[Tensor] | None:
        """Return the sum over all calls of the step, in flat tensors; None if no parameter has a gradient."""
        # When a module is copied, a function keeps its references: a gradient that it made is of no version, and lost.
        for name, parameter in self._model.named_parameters():
            if parameter in by_leaf:
                raise TaskError(
                    f"the model reaches parameter {name} through a function (a lambda, a hook), which no copy of the "
                    "model can follow; make it a method, or use server.compute: trainer"
                )
        calls = list(zip(self._batches, self._replicas, strict=False))
        for _, replica in calls:
            replica.tree.check_parameters()
        # In the order of a backward on a trainer: the calls of a batch from the last to the first, batch after batch.
        batches = [
            [replica for batch, replica in reversed(calls) if batch == wanted] for wanted in sorted({*self._batches})
        ]
        views = self._parameter_layout.views(self._gradients)
        self._used = []
        for name in self._trained:
            parts = [[by_leaf[r.leaves[name]] for r in batch if r.leaves[name] in by_leaf] for batch in batches]
            self._used.append(_add_up(name, [part for part in parts if part], views[name]))
        return list(self._gradients) if any(self._used) else None

    @torch.no_grad()
    def complete_push(
        self, report: StepReport, buffers: PackedBuffers | None
    ) -> tuple[StepReport, PackedBuffers | None]:
        if self._last is not None:
            buffers = self._known_buffers = self._last.tree.pack_buffers()
        return replace(report, used=None if all(self._used) else tuple(self._used)), buffers

    def changed_buffers(self) -> PackedBuffers | None:
        if self._last is None or self._known_buffers is None:
            return None
        return self._last.tree.pack_changed_buffers(self._known_buffers)

    def unpin(self) -> None:
        self.context_id = None


def _add_up(name: str, batches: Sequence[Sequence[Tensor]], total: Tensor) -> bool:
    """Set ``total`` to the sum over the batches' sums of gradients; return False if there is no gradient."""
    if any(part.layout is not torch.strided for batch in batches for part in batch):
        raise TaskError(f"the gradient of parameter {name} is sparse; use dense ones (sparse=False)")
    if not batches:
        total.zero_()
    for number, (first, *others) in enumerate(batches):
        batch_sum = sum(others, first)
        total.add_(batch_sum.to(total.device)) if number else total.copy_(batch_sum)
    return bool(batches)


def _reply(output: Any, random_state: Tensor) -> ModelReply:
    """Return the message for an output: tensors on the CPU, those with gradients behind one token.

    Raises:
        TaskError: the output is not a tensor or a nested tuple, list or dictionary of tensors.
    """
    leaves, spec = tree_flatten(output)
    for leaf in leaves:
        if not isinstance(leaf, _PLAIN):
            # transformers returns its cache of keys and values with the loss; training does not use it.
            cure = "turn it off with use_cache=False" if type(leaf).__name__.endswith("Cache") else "return those"
            raise TaskError(
                f"the model returned a {type(leaf).__name__}; with server.compute: server it must return tensors, "
                f"alone or in tuples, lists and dictionaries; {cure}, or use server.compute: trainer"
            )
    leaves = [leaf.to("cpu") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    with_grad = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not with_grad:
        return ModelReply(output=tree_unflatten(leaves, spec), token=None, random_state=random_state)
    token, *sent = send_outputs([leaves[i] for i in with_grad])
    for i, leaf in zip(with_grad, sent, strict=True):
        leaves[i] = leaf
    return ModelReply(output=tree_unflatten(leaves, spec), token=token, random_state=random_state)


class ModelService:
    """The model of a server as trainers call it: built once, with a transport for each trainer.

    Create it right after the store: the random states of ``as_built`` are those after the model was built. It
    also has the model's ``training`` flag.
    """

    def __init__(self, task: Task, config: Config, store: ParameterStore) -> None:
        self.as_built = random_states(), store.model.training
        self._store = store
        placement = place_server(config)
        self._device = placement.device
        self._model = store.model if placement == CPU else build_model(task, config.seed, placement)

    def new_transport(self) -> ServedTransport:
        """Return the transport of a trainer that joins; it can call the model immediately."""
        if self._model is not self._store.model:  # what is not trained never changes after the start
            load_part_of_state(self._model, frozen_state_dict(self._store.model))
        transport = ServedTransport(self._model, self._store.parameters.layout, self._store.snapshot, self._device)
        transport.pin_version()
        return transport
