"""What a trainer of one's own may change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from paramserver.consistency import Announcement
from paramserver.devices import move
from paramserver.process import Process
from trainers.data import DataStream


class Overridable(ABC):
    """Hooks and properties of a trainer, under the names of Lightning's DDPPlugin."""

    model: nn.Module
    """What ``training_step`` gets."""

    process: Process
    data: DataStream

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model as the task built it."""
        return self.model

    @property
    def is_single_process_per_device(self) -> bool:
        """Whether this process computes on one device alone, so that inputs are moved there beforehand."""
        return len(self.process.placement.devices) == 1

    @property
    def sampler_kwargs(self) -> dict[str, Any]:
        """``shuffle``, ``pad``, ``drop_last`` or ``seed``, where a map-style data set is to be dealt otherwise."""
        return {}

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the trainers; None where there is none."""
        return None

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """Around the micro-batches of a step but the last: gradients stay with this trainer."""
        return nullcontext()

    def on_before_forward(self, batch: Any) -> Any:
        """The batch as the model gets it."""
        return move(batch, self.process.placement.device) if self.is_single_process_per_device else batch

    def on_after_setup_optimizers(self) -> None:
        """The optimizer exists."""

    def on_before_backward(self, loss: Tensor) -> None:
        """The loss of a micro-batch is there."""

    def on_after_backward(self) -> None:
        """Its backward is done."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state, in the standard form of torch.optim."""

    def data_available(self) -> Announcement:
        """How far this trainer is with its data: enough for a step, waiting, or drained."""
        return self.data.available()


def overrides(owner: object, method: Callable[..., Any]) -> bool:
    """Whether ``owner``, or its class, has another ``method`` than the class that ``method`` was taken from."""
    return getattr(getattr(owner, method.__name__), "__func__", None) is not method
