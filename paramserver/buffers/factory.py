"""From the names of the config to a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from paramserver.buffers.base import Buffer, check_at_least
from paramserver.buffers.fifo import Fifo
from paramserver.buffers.firo import Firo
from paramserver.buffers.reservoir import Reservoir

_COUNTED: dict[str, type[Fifo] | type[Firo]] = {"fifo": Fifo, "firo": Firo}
KINDS = (*_COUNTED, "reservoir")


def make_buffer(
    kind: str,
    *,
    capacity: int,
    seed: int | Sequence[int] = 0,
    watermark: int = 0,
    pseudo_epochs: int = 1,
    max_bytes: int | None = None,
    min_new_per_batch: int = 0,
    batch_size: int | None = None,
) -> Buffer:
    """Make the buffer of this kind: fifo, firo or reservoir.

    Args:
        kind: fifo | firo | reservoir.
        capacity: samples held at most.
        seed: of the draws.
        watermark: samples held before the first get.
        pseudo_epochs: fifo, firo: servings of each sample.
        max_bytes: bytes of samples held at most.
        min_new_per_batch: reservoir: unseen samples per batch, at least, while input goes on.
        batch_size: samples per batch, where it is known.

    Raises:
        ValueError: a value out of its range, of another kind, or one with which a wait could never end.
    """
    if kind not in KINDS:
        near = get_close_matches(str(kind), KINDS, n=1)
        hint = f'did you mean "{near[0]}"?' if near else "choose one of them"
        raise ValueError(f"kind ({kind}) must be one of {', '.join(KINDS)}; {hint}")
    common: dict[str, Any] = {"seed": seed, "watermark": watermark, "max_bytes": max_bytes, "batch_size": batch_size}
    if kind in _COUNTED:
        if min_new_per_batch != 0:
            raise ValueError(f"min_new_per_batch ({min_new_per_batch}) must be 0 with {kind}; it is for the reservoir")
        return _COUNTED[kind](capacity, pseudo_epochs=pseudo_epochs, **common)
    check_at_least("pseudo_epochs", pseudo_epochs, 1, "use 1 with the reservoir")
    if pseudo_epochs != 1:
        raise ValueError(
            f"pseudo_epochs ({pseudo_epochs}) must be 1 with reservoir, which serves again by itself; use fifo or firo"
        )
    return Reservoir(capacity, min_new_per_batch=min_new_per_batch, **common)
