"""What a training step gets as its model where the model is on the server (``server.compute: server``).

A trainer whose model is on the server: it calls it, computes the loss, and sends the loss's gradient back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from paramserver.distributed.rpc_calls import tensor_bytes
from paramserver.errors import ModelIsElsewhere, TaskError
from paramserver.metrics.records import StepReport, StepResult
from paramserver.rng import restore_random_states
from paramserver.transport.autograd import recv_outputs
from paramserver.transport.messages import JoinReply, ModelCall, ModelReply
from trainers.rpc import RpcTrainer

_OFFERED = frozenset({"forward", "train", "eval", "training", "modules", "begin_step", "next_batch", "end_step"})
_OFFERED |= {"call_super_init"}  # asked by nn.Module's own constructor


class RemoteModel(nn.Module):
    """Stands for the model: it can be called, and switched between ``train()`` and ``eval()``. It has no parameters.

    Args:
        call: sends a call to the server.
        training: as the task built the model.
    """

    _training: bool | None = None
    _before: bool | None = None
    _built = True

    def __init__(self, call: Callable[[ModelCall], ModelReply], training: bool) -> None:
        super().__init__()
        self._call = call
        self._built = training
        self._batch: int | None = None
        self._anchors: list[Tensor] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in _OFFERED:
            raise AttributeError(name)  # Python goes on to __getattr__
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            raise ModelIsElsewhere(_elsewhere(f"attribute {name}"))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "training" and not name.startswith("_"):
            raise ModelIsElsewhere(_elsewhere(f"attribute {name}"))
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise ModelIsElsewhere(_elsewhere(f"attribute {name}"))

    # As a Sequential or a ModuleList, which Python asks past __getattr__.

    def __getitem__(self, key: Any) -> Any:
        raise ModelIsElsewhere(_elsewhere(f"part [{key!r}]"))

    def __setitem__(self, key: Any, value: Any) -> None:
        self[key]

    def __delitem__(self, key: Any) -> None:
        self[key]

    def __len__(self) -> int:
        raise ModelIsElsewhere(_elsewhere("length"))

    def __iter__(self) -> Iterator[Any]:
        raise ModelIsElsewhere(_elsewhere("parts to go through"))

    def __reversed__(self) -> Iterator[Any]:
        return iter(self)

    def __contains__(self, item: Any) -> bool:
        raise ModelIsElsewhere(_elsewhere("parts to look into"))

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "RemoteModel(the model is on the server)"

    # A step.

    def begin_step(self) -> None:
        """Gradients are recorded from now on, until ``end_step``."""
        self._batch, self._anchors = 0, []

    def next_batch(self) -> None:
        """The calls that follow are of another batch of the same step."""
        assert self._batch is not None
        self._batch += 1

    def end_step(self) -> list[Tensor]:
        """Roots of the backward beside the loss, one for each reply: a reply that is no part of it would be waited for.

        A reply whose outputs are no part of the loss thereby sends word that it has no gradient.
        """
        anchors, self._batch, self._anchors = self._anchors, None, []
        return anchors

    # The model.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output. Inputs travel without their gradients.

        Raises:
            TaskError: an input has a gradient, which would be lost.
        """
        records = torch.is_grad_enabled() and self._batch is not None
        if records:
            _refuse_gradients((args, kwargs))
        sent_args, sent_kwargs = tree_map(_plain, (args, kwargs))
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        answer = self._call(
            ModelCall(sent_args, sent_kwargs, self._batch or 0, self._training, records, dtype, torch.get_rng_state())
        )
        torch.set_rng_state(answer.random_state)
        return answer.output if answer.token is None else self._anchored(answer.output, answer.token)

    def _anchored(self, output: Any, ticket: Tensor) -> Any:
        leaves, form = tree_flatten(output)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        anchor, arrived = recv_outputs([ticket, *(leaves[place] for place in places)])
        self._anchors.append(anchor)
        for place, leaf in zip(places, arrived, strict=True):
            leaves[place] = leaf
        return tree_unflatten(leaves, form)

    # Training or not: it travels with each call.

    @property
    def training(self) -> bool:
        return self._built if self._training is None else self._training

    @training.setter
    def training(self, training: bool) -> None:
        """Puts back what was before ``train`` or ``eval``, where that is the same."""
        before = self._built if self._before is None else self._before
        self._training = self._before if before == training else training

    def train(self, mode: bool = True) -> RemoteModel:
        self._before, self._training = self._training, bool(mode)
        return self

    def eval(self) -> RemoteModel:
        return self.train(False)

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        yield self


def _plain(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _refuse_gradients(inputs: Any) -> None:
    for value in tree_flatten(inputs)[0]:
        if isinstance(value, Tensor) and value.requires_grad:
            raise TaskError(
                f"an input of the model ({tuple(value.shape)}) has a gradient, which does not come back from the "
                "server (server.compute: server); detach() it, or use server.compute: trainer"
            )


def _elsewhere(what: str) -> str:
    return (
        f"the model has no {what} here: it is on the server, and a step can only call it "
        "(server.compute: server); use server.compute: trainer for a task that needs more"
    )


class ServedTrainer(RpcTrainer):
    """PyTorch's RPC tutorial: forward by the server's RRef, ``dist_autograd.backward`` of the loss, optimizer's step.

    Only inputs, outputs and their gradients travel. The model, its module buffers and its gradients stay on the server.
    """

    computes = "server"
    model: RemoteModel

    def init_connection(self) -> None:
        self.connect()
        # Data that a task draws follows what its model drew, as where both are made in one process.
        states, training = self.server.model_as_built()
        restore_random_states(states)
        self.model = RemoteModel(self._call, training)
        self.prepare_data()
        self.start_from(self.join())

    def receive_model(self, welcome: JoinReply) -> None:
        """Nothing of the model is held here."""

    def on_last_loss(self, loss: float, samples: int) -> None:
        """Gradients are on the server; none leaves early."""

    def _call(self, call: ModelCall) -> ModelReply:
        answer = self.server.compute(call)
        there_and_back = 2 if call.wants_grad else 1
        self.wire_bytes += _bytes_of((call.args, call.kwargs)) + there_and_back * _bytes_of(answer.output)
        return answer

    # A step.

    def begin_pull(self) -> None:
        """The version stays on the server, which knows it."""

    def load_version(self) -> None:
        self._losses: list[Tensor] = []
        self.model.begin_step()
        self.clock.lap("pull")

    def _backward(self, loss: Tensor, batches: int) -> None:
        """One backward for all batches of a step: a second one in the same context would wait for ever."""
        self.on_before_backward(loss)
        self._losses.append(loss / batches if batches > 1 else loss)
        if len(self._losses) == batches:
            roots = [sum(self._losses[1:], self._losses[0]), *self.model.end_step()]
            dist_autograd.backward(self._context_id, roots)  # type: ignore[attr-defined]
        else:
            self.model.next_batch()
        self.on_after_backward()
        self.clock.lap("backward")
        self.task.on_batch_end(self.progress.batch_idx)
        self.progress.batch_idx += 1

    def step_optimizer(self, report: StepReport) -> StepResult:
        return self.finish_step(
            self.optimizer.step(self._context_id, report, [], self.next_announcement(report.version + 1))
        )

    # Validation.

    def sync_model(self) -> None:
        self.server.view_version(self.step)


def _bytes_of(value: object) -> int:
    return tensor_bytes(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
