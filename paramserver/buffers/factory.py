"""The registry of buffers: from a kind of the config to a class."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from paramserver.buffers.base import Buffer, check_at_least
from paramserver.buffers.fifo import Fifo, Firo
from paramserver.buffers.reservoir import Reservoir

# The config lists the same kinds and their options (BUFFERS in config/schema.py): it may not import this folder.
REGISTRY: dict[str, type[Buffer]] = {
    "fifo": Fifo,
    "firo": Firo,
    "reservoir": Reservoir,
}


def buffer_class(kind: str) -> type[Buffer]:
    """Return the class of a kind of the config, which declares what holds for it."""
    return REGISTRY[kind]


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
    """Make a buffer of this kind.

    Args:
        kind: fifo | firo | reservoir.
        capacity: samples held at most.
        seed: of the draws.
        watermark: samples held before the first get.
        pseudo_epochs: fifo, firo: servings of each sample.
        max_bytes: bytes of samples held at most.
        min_new_per_batch: reservoir: unseen samples per batch, at least, while input continues.
        batch_size: samples per batch, if it is known.

    Raises:
        ValueError: a value out of its range, of another kind, or one with which a wait could never end.

    Example::

        >>> buffer = make_buffer("reservoir", capacity=100, min_new_per_batch=2, batch_size=8)
        >>> buffer.kind, len(buffer)
        ('reservoir', 0)
        >>> make_buffer("fifo", capacity=100, min_new_per_batch=2)
        Traceback (most recent call last):
        ValueError: min_new_per_batch (2) must be 0 with fifo; use it with reservoir
    """
    if kind not in REGISTRY:
        near = get_close_matches(str(kind), REGISTRY, n=1)
        hint = f'did you mean "{near[0]}"?' if near else "choose one of them"
        raise ValueError(f"kind ({kind}) must be one of {', '.join(REGISTRY)}; {hint}")
    options: dict[str, Any] = {}
    check_at_least("pseudo_epochs", pseudo_epochs, 1, "use 1 to serve each sample once")
    for name, value, neutral in (("pseudo_epochs", pseudo_epochs, 1), ("min_new_per_batch", min_new_per_batch, 0)):
        if name in REGISTRY[kind].options:
            options[name] = value
        elif value != neutral:
            kinds = " or ".join(other for other, buffer in REGISTRY.items() if name in buffer.options)
            raise ValueError(f"{name} ({value}) must be {neutral} with {kind}; use it with {kinds}")
    return REGISTRY[kind](
        capacity, seed=seed, watermark=watermark, max_bytes=max_bytes, batch_size=batch_size, **options
    )
