"""The DistributedOptimizer that all trainers share."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

with warnings.catch_warnings():
    # torch scripts its functional optimizers while it imports this module; none of them is used here.
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.", category=DeprecationWarning)
    from torch.distributed.optim import DistributedOptimizer


class OptimizerHost(Protocol):
    """Where the one optimizer lives, as seen by a trainer."""

    def apply(self, context_id: int, *report: Any) -> Any: ...

    def begin_apply(self, *report: Any) -> Any: ...

    def end_apply(self, begun: Any) -> Any: ...

    def optimizer_state(self) -> dict[str, Any]: ...


class SharedOptimizer(DistributedOptimizer):
    """All trainers step the one optimizer of the server.

    torch's ``DistributedOptimizer`` builds an optimizer on the server for every trainer that asks: momentum and Adam's
    step count are then per trainer, and there is no state to save. This one keeps its contract, ``step(context_id)``
    after ``dist_autograd.backward(context_id, ...)``, and attaches to the optimizer that exists.

    Args:
        host: the servers' face; its ``apply`` returns when the update that holds these gradients was made.
    """

    def __init__(self, host: OptimizerHost) -> None:
        # The base class would build remote optimizers of its own; its contract is kept, its constructor is not.
        self.host = host
        self.is_functional_optim = False
        self._requested: tuple[int, Any] | None = None

    def request(self, context_id: int, *report: Any) -> None:
        """Ask for the step of a context before its backward, so that word and gradients travel side by side.

        The step is made when both are there. Only where gradients lie in memory that is shared with the host.
        """
        self._requested = context_id, self.host.begin_apply(*report)

    def step(self, context_id: int, *report: Any) -> Any:
        """Apply the gradients of this context, together with those of the other trainers where the consistency says so.

        Returns:
            What the server answers: a ``StepResult``.
        """
        requested, self._requested = self._requested, None
        if requested is not None and requested[0] == context_id:
            return self.host.end_apply(requested[1])
        return self.host.apply(context_id, *report)

    def state_dict(self) -> dict[str, Any]:
        """The state of the shared optimizer, in the standard form of torch.optim."""
        return self.host.optimizer_state()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.host.optimizer_state()["param_groups"]
        return groups
