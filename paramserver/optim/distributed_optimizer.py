"""The ``DistributedOptimizer`` that all trainers share."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.distributed.optim import DistributedOptimizer
else:

    def _import_class() -> type:
        """Import ``torch.distributed.optim.optimizer`` without the package around it.

        The package imports FSDP, and with it sympy, which takes most of a second in every process. It stays importable.
        """
        name = "torch.distributed.optim"
        package = None if name in sys.modules else importlib.util.find_spec(name)
        if package is not None:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = package.submodule_search_locations
        try:
            return importlib.import_module(f"{name}.optimizer").DistributedOptimizer
        finally:
            if package is not None:
                del sys.modules[name]

    with warnings.catch_warnings():
        # torch scripts its functional optimizers while it imports this module; none of them is used here.
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.", category=DeprecationWarning)
        DistributedOptimizer = _import_class()


class PendingPush(Protocol):
    """A push whose reply has not been awaited yet."""

    def wait(self) -> Any: ...


class _FailedPush:
    """A push that could not be sent."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> Any:
        raise self._error


class OptimizerClient(Protocol):
    """The part of ``ServerClient`` that reaches the one optimizer."""

    def push(self, context_id: int, *report: Any) -> Any: ...

    def push_in_place(self, *report: Any) -> PendingPush: ...

    def optimizer_state(self) -> dict[str, Any]: ...


class SharedOptimizer(DistributedOptimizer):
    """Steps the one optimizer of the server, for all trainers.

    torch's ``DistributedOptimizer`` builds an optimizer on the server for each trainer (docs/torch-notes.md, "One
    optimizer per caller"). This class keeps its contract, ``step(context_id)`` after
    ``dist_autograd.backward(context_id, ...)``, and attaches to the optimizer that exists.

    Args:
        client: reaches the server.

    Example::

        >>> class Client:
        ...     def push(self, context_id, *report): return f"context {context_id} applied"
        ...     def optimizer_state(self): return {"state": {}, "param_groups": [{"lr": 0.1}]}
        >>> optimizer = SharedOptimizer(Client())
        >>> optimizer.step(7)
        'context 7 applied'
        >>> optimizer.param_groups
        [{'lr': 0.1}]
    """

    def __init__(self, client: OptimizerClient) -> None:
        # The base class would build remote optimizers; its contract is kept, its constructor is not called.
        self.client = client
        self.is_functional_optim = False
        self._begun: tuple[int, PendingPush] | None = None

    def begin_step(self, context_id: int, *report: Any) -> None:
        """Send the push of a context from within its backward: for gradients in shared memory, which are complete."""
        try:
            self._begun = context_id, self.client.push_in_place(*report)
        except Exception as error:  # noqa: BLE001 - kept for ``step``
            # ``step`` raises it: distributed autograd would make a RuntimeError of it, which looks like a lost server.
            self._begun = context_id, _FailedPush(error)

    def step(self, context_id: int, *report: Any) -> Any:
        """Apply the gradients of a context, with those of other trainers if the consistency model requires it.

        Returns:
            The reply of the server: a ``StepGrant`` with a ``StepResult``.
        """
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] == context_id:
            return begun[1].wait()
        return self.client.push(context_id, *report)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the shared optimizer, in the form of ``torch.optim.Optimizer.state_dict``."""
        return self.client.optimizer_state()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.client.optimizer_state()["param_groups"]
        return groups
