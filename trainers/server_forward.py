"""The trainer for ``server.compute: server``: the forward runs on the server, loss and backward start here.

``ServedTrainer`` is the trainer, ``RemoteModel`` what ``training_step`` gets as its model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from paramserver.distributed.rpc_agent import distributed_backward
from paramserver.errors import ModelIsElsewhere, TaskError
from paramserver.metrics.records import StepReport, StepResult, StepTotals
from paramserver.rng import restore_random_states
from paramserver.trainers.model_copy import ModelCopy
from paramserver.trainers.rpc import RpcTrainer
from paramserver.transport.autograd import recv_outputs
from paramserver.transport.messages import JoinReply, ModelCall, ModelReply, StepGrant

_PUBLIC = frozenset({"forward", "train", "eval", "training", "modules", "begin_step", "next_batch", "end_step"})
_PUBLIC |= {"call_super_init"}  # read by the constructor of nn.Module


class RemoteModel(nn.Module):
    """A proxy of the model on the server: it can be called, and set to ``train()`` or ``eval()``. It has no parameters.

    Raises:
        ModelIsElsewhere: an attribute or a part of the model is used, which only the server has.
    """

    # Class attributes, because the constructor of nn.Module reads ``training`` before this one sets them.
    _training: bool | None = None
    _training_before: bool | None = None
    _training_as_built = True

    def __init__(self, call: Callable[[ModelCall], ModelReply], training: bool) -> None:
        super().__init__()
        self._call = call
        self._training_as_built = training  # the flag of the model as the task built it
        self._batch: int | None = None
        self._anchors: list[Tensor] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in _PUBLIC:
            raise AttributeError(name)  # Python calls __getattr__ next
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            raise _elsewhere(f"attribute {name}")
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "training" and not name.startswith("_"):
            raise _elsewhere(f"attribute {name}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise _elsewhere(f"attribute {name}")

    # The methods of a Sequential or a ModuleList: Python looks them up on the class, not through __getattr__.

    def __getitem__(self, key: Any) -> Any:
        raise _elsewhere(f"part [{key!r}]")

    def __setitem__(self, key: Any, value: Any) -> None:
        self[key]

    def __delitem__(self, key: Any) -> None:
        self[key]

    def __len__(self) -> int:
        raise _elsewhere("length")

    def __iter__(self) -> Iterator[Any]:
        raise _elsewhere("parts to go through")

    def __reversed__(self) -> Iterator[Any]:
        return iter(self)

    def __contains__(self, item: Any) -> bool:
        raise _elsewhere("parts to look into")

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "RemoteModel(the model is on the server)"

    # A step.

    def begin_step(self) -> None:
        """Record gradients from now on, until ``end_step``."""
        self._batch, self._anchors = 0, []

    def next_batch(self) -> None:
        """Count the calls that follow to another batch of the same step."""
        assert self._batch is not None
        self._batch += 1

    def end_step(self) -> list[Tensor]:
        """Return the roots of the backward in addition to the loss, one for each reply of the server.

        Distributed autograd waits for the gradients of every reply. Through its root, a reply whose outputs are not in
        the loss reports to the server that it has no gradient.
        """
        anchors, self._batch, self._anchors = self._anchors, None, []
        return anchors

    # The model.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output. Inputs are sent without gradients.

        Raises:
            TaskError: an input requires a gradient, which would be lost.
        """
        records = torch.is_grad_enabled() and self._batch is not None
        for value in tree_leaves((args, kwargs)) if records else ():
            if isinstance(value, Tensor) and value.requires_grad:
                raise TaskError(
                    f"an input of the model ({tuple(value.shape)}) has a gradient, which does not come back from the "
                    "server (server.compute: server); detach() it, or use server.compute: trainer"
                )
        sent_args, sent_kwargs = tree_map(
            lambda value: value.detach().cpu() if isinstance(value, Tensor) else value, (args, kwargs)
        )
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        reply = self._call(
            ModelCall(sent_args, sent_kwargs, self._batch or 0, self._training, records, dtype, torch.get_rng_state())
        )
        # Random numbers of the task continue after those of the model, as in one process.
        torch.set_rng_state(reply.random_state)
        if reply.token is None:
            return reply.output
        leaves, spec = tree_flatten(reply.output)
        with_grad = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        anchor, received = recv_outputs([reply.token, *(leaves[i] for i in with_grad)])
        self._anchors.append(anchor)
        for i, leaf in zip(with_grad, received, strict=True):
            leaves[i] = leaf
        return tree_unflatten(leaves, spec)

    # The training flag, which is sent with each call.

    @property
    def training(self) -> bool:
        return self._training_as_built if self._training is None else self._training

    @training.setter
    def training(self, training: bool) -> None:
        """Restore the flag before the last ``train`` or ``eval``, if it was equal; None then means "as built" again."""
        before = self._training_as_built if self._training_before is None else self._training_before
        self._training = self._training_before if before == training else training

    def train(self, mode: bool = True) -> RemoteModel:
        self._training_before, self._training = self._training, bool(mode)
        return self

    def eval(self) -> RemoteModel:
        return self.train(False)

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        yield self


def _elsewhere(what: str) -> ModelIsElsewhere:
    return ModelIsElsewhere(
        f"the model has no {what} here: it is on the server, and a step can only call it "
        "(server.compute: server); use server.compute: trainer for a task that needs more"
    )


class ServedTrainer(RpcTrainer):
    """PyTorch's RPC tutorial: forward on the server, ``dist_autograd.backward`` of the loss, step of the optimizer.

    Only inputs, outputs and their gradients are sent. The model, its module buffers and its gradients stay on the
    server.

    Example::

        >>> from paramserver.config import config_from_mapping
        >>> config = config_from_mapping({"task": "task.py:Mnist", "server": {"compute": "server"}})
        >>> config.server.compute == ServedTrainer.computes
        True
    """

    computes = "server"
    model: RemoteModel

    def init_connection(self) -> None:
        self.server = self.resources.enter_context(self.control.connected(lambda: self.data.blocks))
        # The data source continues the random numbers of build_model, as if both were made in one process.
        states, training = self.server.model_as_built()
        restore_random_states(states)
        self.model = RemoteModel(self._call, training)
        self.prepare_data()
        self.start_from(self.control.join(self.data.epoch_samples))

    def receive_model(self, reply: JoinReply) -> None:
        """Leave the model on the server, which is called by RPC."""
        self.model_copy = ModelCopy(nn.Module(), {})
        self.record("transport", transport="rpc")

    def on_last_loss(self, totals: StepTotals) -> None:
        """Do nothing: gradients are made on the server, so there are no buckets."""

    def _call(self, call: ModelCall) -> ModelReply:
        reply = self.server.compute(call)
        directions = 2 if call.wants_grad else 1  # outputs, and their gradients
        self.wire_bytes += _bytes_of((call.args, call.kwargs)) + directions * _bytes_of(reply.output)
        return reply

    # A step.

    def begin_step(self, grant: StepGrant) -> None:
        """Do nothing: the version stays on the server, which has pinned it."""

    def hooks_between_steps(self) -> AbstractContextManager[None]:
        return nullcontext()  # the model is on the server

    def load_version(self) -> None:
        self._losses: list[Tensor] = []
        self.model.begin_step()
        self.clock.lap("pull")

    def backward_batch(self, loss: Tensor, batches: int) -> None:
        # One backward for all batches of a step: a second one in the same context would never return.
        self.on_before_backward(loss)
        self._losses.append(loss / batches if batches > 1 else loss)
        if len(self._losses) == batches:
            roots = [sum(self._losses[1:], self._losses[0]), *self.model.end_step()]
            distributed_backward(self.context.id, roots)
        else:
            self.model.next_batch()
        self.on_after_backward()
        self.clock.lap("backward")

    def step_optimizer(self, report: StepReport) -> StepResult:
        return self.finish_step(self.optimizer.step(self.context.id, self.make_push(report)))

    # Validation.

    def sync_model(self) -> None:
        self.server.view_version(self.step)


def _bytes_of(value: object) -> int:
    # Not ``nbytes``, which is not defined for sparse inputs.
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
