"""What PyTorch's RPC tutorial calls on its parameter server, off the hot path."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from paramserver.config import Config
from paramserver.edge import pulled
from paramserver.errors import UnsupportedConfiguration
from paramserver.versions import Versions


class TutorialMethods(nn.Module):
    """The public methods of the tutorial's server; ``is_whole`` says that all parameters are up to date here."""

    config: Config
    versions: Versions
    is_whole: bool
    _lock: threading.RLock

    def forward(self, *inputs: Any) -> Any:
        """The model's output at the current version, on the server; its gradient goes to the flat leaf."""
        self._require_all_parameters()
        with self._lock:
            flats = pulled(self.versions.leaves, self.versions.snapshot()[0])
        return self.versions.forward(flats, inputs)

    def get_dist_gradients(self, context_id: int) -> dict[str, Tensor]:
        """The gradients that a distributed-autograd context holds for this server's parameters, by name, on the CPU."""
        self._require_all_parameters()
        held = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        return {name: view.cpu() for name, view in self.versions.gradients_by_name(held).items()}

    def get_param_rrefs(self) -> list[Any]:
        """An RRef for each trained parameter."""
        self._require_all_parameters()
        return [rpc.RRef(parameter) for parameter in self.versions.parameters.tensors.values()]

    def _require_all_parameters(self) -> None:
        if not self.is_whole:
            raise UnsupportedConfiguration(
                f"cluster.num_servers ({self.config.cluster.num_servers}) must be 1 for ParameterServer.forward, "
                "get_dist_gradients and get_param_rrefs, as no server holds the whole model; lower it"
            )
