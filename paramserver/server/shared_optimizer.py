"""The ``DistributedOptimizer`` that all trainers share."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paramserver.optim.named_optimizers import stored_groups

if TYPE_CHECKING:
    from torch.distributed.optim import DistributedOptimizer

    from paramserver.server.client import InFlightCall, ServerClient
    from paramserver.transport.messages import Push, StepGrant
else:

    class _FunctionalOptimizers(Mapping):
        """torch's table of optimizers in TorchScript, which are compiled when it is imported: when it is first read."""

        @property
        def _table(self) -> Mapping[type, type]:
            return importlib.import_module("torch.distributed.optim.utils").functional_optim_map

        def __getitem__(self, optimizer: type) -> type:
            return self._table[optimizer]

        def __iter__(self) -> Iterator[type]:
            return iter(self._table)

        def __len__(self) -> int:
            return len(self._table)

    def _import_class() -> type:
        """Import ``torch.distributed.optim.optimizer`` without the package around it, and without the table.

        The package imports FSDP, and with it sympy, and the table compiles eight optimizers, which takes most of a
        second in every process. Both stay importable.
        """
        name = "torch.distributed.optim"
        if name in sys.modules or (found := importlib.util.find_spec(name)) is None:
            return importlib.import_module(f"{name}.optimizer").DistributedOptimizer
        package, table = ModuleType(name), ModuleType(f"{name}.utils")
        package.__path__ = found.submodule_search_locations
        table.functional_optim_map = _FunctionalOptimizers()
        sys.modules.update({name: package, table.__name__: table})
        try:
            return importlib.import_module(f"{name}.optimizer").DistributedOptimizer
        finally:
            del sys.modules[name], sys.modules[table.__name__]

    with warnings.catch_warnings():
        # torch scripts a class while it imports this module; it is not used here.
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
        self._begun: tuple[int, InFlightCall[StepGrant]] | None = None

    def begin_step(self, context_id: int, push: Push, buckets: Sequence[InFlightCall[Any]] = ()) -> None:
        """Report the push of a context whose backward is about to begin. ``buckets`` send its gradients."""
        self._begun = context_id, self.client.push(push, buckets)

    def step(self, context_id: int, push: Push | None = None) -> StepGrant:
        """Apply the gradients of a context, with those of other trainers if the consistency model requires it.

        The backward has ended. ``push`` is None if ``begin_step`` has reported it. The reply has a ``StepResult``.
        """
        begun, self._begun = self._begun, None
        if begun is None or begun[0] != context_id:
            assert push is not None, "a step is reported by begin_step, or here"
            return self.client.push(push, has_gradients=True).wait()
        return begun[1].wait()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the shared optimizer, in the form of ``torch.optim.Optimizer.state_dict``."""
        return self.client.optimizer_state()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return stored_groups(self.client.optimizer_state())
