"""A trainer whose model is on the server: it calls it, computes the loss, and sends the loss's gradient back."""

from __future__ import annotations

import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paramserver.process import restore_random_states
from paramserver.protocol import ModelAnswer, ModelCall, Welcome
from paramserver.records import StepReport, StepResult
from paramserver.transport.wire import tensor_bytes
from trainers.remote_model import RemoteModel
from trainers.rpc import RpcTrainer


class ServedTrainer(RpcTrainer):
    """PyTorch's RPC tutorial: forward by the server's RRef, ``dist_autograd.backward`` of the loss, optimizer's step.

    Only inputs, outputs and their gradients travel. The model, its module buffers and its gradients stay on the server.
    """

    computes = "server"
    model: RemoteModel

    def init_connection(self) -> None:
        self.connect()
        # Data that a task draws follows what its model drew, as where both are made in one process.
        states, training = self.remote.call("model_as_built")
        restore_random_states(states)
        self.model = RemoteModel(self._call, training)
        self.prepare_data()
        self.join(self.arrive())

    def hold(self, welcome: Welcome) -> None:
        """Nothing of the model is held here."""

    def on_loss_known(self, loss: float, samples: int) -> None:
        """Gradients are on the server; none leaves early."""

    def _call(self, call: ModelCall) -> ModelAnswer:
        answer: ModelAnswer = self.remote.call_through("compute", self.trainer_index, call)
        there_and_back = 2 if call.wants_grad else 1
        self.wire_bytes += _bytes_of((call.args, call.kwargs)) + there_and_back * _bytes_of(answer.output)
        return answer

    # A step.

    def begin_pull(self) -> None:
        """The version stays on the server, which knows it."""

    def before_batches(self) -> None:
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
        self.task.on_batch_end(self.counters.batch_idx)
        self.counters.batch_idx += 1

    def update(self, report: StepReport) -> StepResult:
        return self.conclude(self.optimizer.step(self._context_id, report, [], self.following(report.version + 1)))

    # Validation.

    def refresh(self) -> None:
        self.remote.call("look", self.trainer_index, self.step)


def _bytes_of(value: object) -> int:
    return tensor_bytes(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
