"""The ``DistributedOptimizer`` that all trainers share."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paramserver.optim.named_optimizers import stored_groups

if TYPE_CHECKING:
    from torch.distributed.optim import DistributedOptimizer

    from paramserver.server.client import InFlightCall, ServerClient
    from paramserver.transport.messages import Push, StepGrant
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


class SharedOptimizer(DistributedOptimizer):
    """Steps the one optimizer of the server, for all trainers.

    torch's ``DistributedOptimizer`` builds an optimizer on the server for each trainer (docs/torch-notes.md, "One
    optimizer per caller"). This class keeps its contract, ``step(context_id)`` after
    ``dist_autograd.backward(context_id, ...)``, and attaches to the optimizer that exists.
    """

    def __init__(self, client: ServerClient) -> None:
        # The base class would build remote optimizers; its contract is kept, its constructor is not called.
        self.client = client
        self.is_functional_optim = False
        self._begun: tuple[int, InFlightCall[StepGrant] | Exception] | None = None

    def begin_step(self, context_id: int, push: Push, buckets: Sequence[InFlightCall[Any]] = ()) -> None:
        """Report the push of a context whose backward has begun, or is about to. ``buckets`` send its gradients."""
        try:
            self._begun = context_id, self.client.push(push, buckets)
        except Exception as error:  # noqa: BLE001 - kept for ``step``
            # ``step`` raises it: distributed autograd would make a RuntimeError of it, which looks like a lost server.
            self._begun = context_id, error

    def step(self, context_id: int, push: Push | None = None) -> StepGrant:
        """Apply the gradients of a context, with those of other trainers if the consistency model requires it.

        The backward has ended. ``push`` is None if ``begin_step`` has reported it. The reply has a ``StepResult``.
        """
        begun, self._begun = self._begun, None
        if begun is None or begun[0] != context_id:
            assert push is not None, "a step is reported by begin_step, or here"
            return self.client.push(push, has_gradients=True).wait()
        if isinstance(begun[1], Exception):
            raise begun[1]
        return begun[1].wait()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the shared optimizer, in the form of ``torch.optim.Optimizer.state_dict``."""
        return self.client.optimizer_state()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return stored_groups(self.client.optimizer_state())
