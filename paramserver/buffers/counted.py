"""Buffers that serve every sample a known number of times."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.buffers.base import Buffer, check_at_least
from paramserver.buffers.slots import Slots
from paramserver.errors import CheckpointError


class CountedBuffer(Buffer):
    """Each sample is served exactly ``pseudo_epochs`` times; until the last of them it goes back and keeps its slot.

    While input goes on a batch holds no sample twice. At the end of a drain it may, where fewer samples than ``n`` are
    left but more servings, so that the number of batches is ``ceil(samples * pseudo_epochs / n)``.

    Args:
        pseudo_epochs: servings of each sample.
        capacity, seed, watermark, max_bytes, batch_size: as of ``Buffer``.
    """

    def __init__(
        self,
        capacity: int,
        *,
        seed: int | Sequence[int] = 0,
        watermark: int = 0,
        pseudo_epochs: int = 1,
        max_bytes: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(capacity, seed=seed, watermark=watermark, max_bytes=max_bytes, batch_size=batch_size)
        check_at_least("pseudo_epochs", pseudo_epochs, 1, "use 1 to serve each sample once")
        self.pseudo_epochs = pseudo_epochs

    def expected_batches(self, samples: int, batch_size: int) -> int | None:
        return -(-samples * self.pseudo_epochs // batch_size)

    @abstractmethod
    def _round(self, n: int) -> tuple[Slots, Slots, int]:
        """Serve n different samples once: their slots, those now removed, and how many were new."""

    def _is_done(self, slots: Slots) -> npt.NDArray[np.bool_]:
        done: npt.NDArray[np.bool_] = self._contents.served[slots] >= self.pseudo_epochs
        return done

    def _draw(self, n: int) -> tuple[Slots, Slots, int]:
        slots, gone, new = self._round(min(n, len(self)))
        # Only in a drain: fewer samples than n are left but more servings, so some come a second time.
        while len(slots) < n and len(self) > len(gone):
            more, more_gone, _ = self._round(min(n - len(slots), len(self) - len(gone)))
            slots, gone = np.concatenate([slots, more]), np.concatenate([gone, more_gone])
        return slots, gone, new

    def _servings_held(self) -> int:
        held = self._contents
        return held.count * self.pseudo_epochs - int(held.served[self._order()].sum())

    def _own_state(self) -> dict[str, Any]:
        return {"pseudo_epochs": self.pseudo_epochs}

    def _check_state(self, state: dict[str, Any], fetch: Callable[[Any], Any] | None) -> None:
        super()._check_state(state, fetch)
        if state["pseudo_epochs"] != self.pseudo_epochs:
            raise CheckpointError(
                f"pseudo_epochs ({self.pseudo_epochs}) must be {state['pseudo_epochs']}, as in the "
                "checkpoint; set it to that"
            )
