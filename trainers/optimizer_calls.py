"""The calls of ``Trainer.optimize`` in a batch with several optimizers, which all trainers make alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from paramserver.errors import TaskError, message_of
from paramserver.trainers.control import Control
from paramserver.transport.messages import OptimizerCall


class OptimizerCalls:
    """Compares each call of a batch with those of the other trainers."""

    def __init__(self, control: Control, parameters_of: Mapping[str, Sequence[nn.Parameter]]) -> None:
        self._control = control
        self._parameters_of = parameters_of
        self.batch_began: int | None = None  # the version that the last batch began with; None before the first one
        self.made = -1  # updates in the present batch; -1 outside of ``training_step``
        self.present: list[OptimizerCall] = []  # the last call, on each trainer that has data

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Return the trained parameters of the optimizer that a call names.

        Raises:
            TaskError: there is no such optimizer, or no batch.
        """
        if not self._parameters_of:
            raise TaskError(
                f"trainer.optimize({name!r}) must have several optimizers, and build_optimizer returned one; return a "
                "dict of optimizers from it, or the loss from training_step"
            )
        if self.made < 0:
            raise TaskError(f"trainer.optimize({name!r}) must be called in training_step, where there is a batch")
        if name not in self._parameters_of:
            known = ", ".join(self._parameters_of)
            raise TaskError(f"trainer.optimize({name!r}) must name an optimizer; build_optimizer returned {known}")
        return [parameter for parameter in self._parameters_of[name] if parameter.requires_grad]

    def exchange(self, own: OptimizerCall | None) -> bool:
        """Compare a call with those of the other trainers; return whether it is not the end of a batch.

        A trainer that has no data has no call of its own, and follows.

        Raises:
            TaskError: the calls differ.
        """
        assert self.batch_began is not None
        # The third number is that of no call of ``all_gather``.
        place = self.batch_began, 1, 2, self.made
        control = self._control
        gathered = [(control.trainer_index, own)]
        if control.process.trainers > 1:
            gathered = control.all_gather(gathered[0], place, None)
        made = [(index, call) for index, call in gathered if call is not None]
        for index, call in made[1:]:
            if call.name != made[0][1].name:
                raise TaskError(
                    f"all trainers must make the same calls of trainer.optimize in the same order; call "
                    f"{self.made + 1} of a batch is {made[0][1]} on trainer {made[0][0]}, and {call} on trainer "
                    f"{index}. Let self.trainer.step decide about it, which all trainers have alike, and not batch_idx"
                )
        self.present = [call for _, call in made]
        return bool(made and made[0][1].name)


def run_backward(name: str, loss: Tensor, parameters: Sequence[nn.Parameter], retain_graph: bool) -> None:
    """Compute the gradients of the parameters of the optimizer ``name``, and of no others.

    Raises:
        TaskError: an update has replaced values that ``loss`` depends on.
    """
    try:
        loss.backward(inputs=parameters, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "modified by an inplace operation" not in message_of(error):
            raise
        raise TaskError(
            f"optimize({name!r}, loss): the loss was computed before an update of parameters that its gradient "
            "depends on; compute it, or the part that uses these parameters, after the call that updates them"
        ) from error
