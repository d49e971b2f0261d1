"""Steps that are skipped, as their loss or gradient is NaN or infinite, and the scale of losses that follows from them.

Gradients of float16 have a small range. So the loss is multiplied by a scale, and each gradient divided by it:
Micikevicius et al., "Mixed precision training", ICLR 2018. The scale is chosen as by ``torch.amp.GradScaler``: it is
halved where a gradient overflows, and doubled after so many updates without that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paramserver.config import TrainingConfig
from paramserver.errors import NotFinite

MOST_IN_SUCCESSION = 100

# Those of ``torch.amp.GradScaler``, and what the type of its scale holds.
_INIT_SCALE, _GROWTH, _BACKOFF, _GROWTH_INTERVAL, _MOST = 2.0**16, 2.0, 0.5, 2000, 2.0**127


class Skipping:
    """Counts the steps of each trainer that were skipped in succession, and chooses the scale of the next losses.

    All ranks that make updates have equal ones.

    It is part of the state of the ``Updater``. ``is_possible``: steps may be skipped in this run, and are checked.

    Example::

        >>> skipping = Skipping(TrainingConfig(nonfinite="skip"))
        >>> for _ in range(99):
        ...     skipping.step_skipped([0, 1], "loss", scale=1.0)
        >>> skipping.update_made([0, 1], scale=1.0)
        >>> skipping.in_succession
        {}
    """

    def __init__(self, training: TrainingConfig) -> None:
        self.is_possible = training.may_skip
        self.scale = _INIT_SCALE if training.scales_loss else 1.0
        self.in_succession: dict[int, int] = {}
        self._scales_loss = training.scales_loss
        self._updates = 0  # in succession, with this scale

    def update_made(self, trainers: Iterable[int], scale: float) -> None:
        """Note an update with gradients of these trainers, whose losses had this scale."""
        for index in trainers if self.in_succession else ():
            self.in_succession.pop(index, None)
        if self._scales_loss and scale == self.scale:
            self._updates += 1
            if self._updates == _GROWTH_INTERVAL:
                self.scale, self._updates = min(self.scale * _GROWTH, _MOST), 0

    def step_skipped(self, trainers: Iterable[int], cause: str, scale: float) -> None:
        """Note a step of these trainers that was skipped; ``cause`` and ``scale`` as in ``StepReport``.

        Raises:
            NotFinite: there were too many in succession.
        """
        for index in trainers:
            self.in_succession[index] = self.in_succession.get(index, 0) + 1
        # Not a second time for a step that was taken before the first halved it.
        if self._scales_loss and scale * _BACKOFF < self.scale:
            self.scale, self._updates = scale * _BACKOFF, 0
        if (most := max(self.in_succession.values(), default=0)) >= MOST_IN_SUCCESSION:
            key = "training.precision: float16" if self._scales_loss else "training.nonfinite: skip"
            raise NotFinite(
                f"{most} steps in succession were skipped ({key}), the last one as the {cause} was NaN or infinite; "
                "lower the learning rate, or look at the batches"
            )

    def state_dict(self) -> dict[str, Any]:
        scaling = {"scale": self.scale, "updates": self._updates} if self._scales_loss else {}
        return {"in_succession": dict(self.in_succession), **scaling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ``state_dict()``; nothing if no step may be skipped now, and no scale if losses had none."""
        if self.is_possible:
            self.in_succession = dict(state["in_succession"])
        if self._scales_loss and "scale" in state:
            self.scale, self._updates = state["scale"], state["updates"]
