"""Redistributes the trainers' parts of a checkpoint to another number of trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paramserver.buffers.positions import AppliedPositions
from paramserver.buffers.reshard import reshard_buffers


def reshard_parts(
    parts: Sequence[Mapping[str, Any]], trainers: int, *, capacity: int, entropy: tuple[int, int]
) -> list[dict[str, Any]]:
    """Redistribute the parts of a checkpoint to ``trainers`` trainers.

    Trainer i continues with the random states, the batch number and the task state of the old trainer i. A trainer
    beyond the old ones gets new random states, and its task is not resumed. Counts of samples of the old trainer i move
    to trainer i modulo ``trainers``, so that their sums are preserved.

    Args:
        capacity: samples that the buffer of each of them holds.
        entropy: seed and number of resumes, from which new random states are derived.

    Returns:
        One part for each new trainer. Under ``leftovers`` it holds the positions of the old trainers' sources and
        the samples that were not served yet. ``buffer`` is None if no part has one: the buffers start empty then.

    Raises:
        CheckpointError: the buffers hold more samples than fit.
    """
    # A trainer that was lost when the checkpoint was made has no buffer, but the ledger's account of its samples.
    present = [part["buffer"] for part in parts if part["buffer"] is not None]
    buffers: list[dict[str, Any] | None] = [None] * trainers
    unserved: list[list[Any]] = []
    partly: list[list[tuple[Any, int]]] = []
    if present:
        buffers, unserved, partly = reshard_buffers(present, trainers, capacity=capacity, entropy=entropy)
    held = zip(unserved, partly, strict=True)
    leftovers = [
        {"state": part["source"], "position": 0, "applied": part["applied"]}
        if part["buffer"] is None
        else {
            "state": part["source"],
            "position": part["buffer"]["counters"]["puts"],
            "mark": part["buffer"]["mark"],
            **dict(zip(("unserved", "partly"), next(held), strict=True)),
        }
        for part in parts
    ]
    shared = {"applied": AppliedPositions().state_dict(), "leftovers": leftovers}
    return [_trainer_part(parts, i, trainers, entropy) | {"buffer": buffers[i], **shared} for i in range(trainers)]


def _trainer_part(
    parts: Sequence[Mapping[str, Any]], index: int, trainers: int, entropy: tuple[int, int]
) -> dict[str, Any]:
    # Every old trainer belongs to exactly one new trainer, so no count is lost or added twice.
    merged = [part["counters"] for part in parts[index::trainers]]
    known = index < len(parts)
    counters = {
        # The counters that are not replaced below continue those of the first trainer.
        **parts[0]["counters"],
        "batch_idx": parts[index]["counters"]["batch_idx"] if known else 0,
        "samples_served": sum(one["samples_served"] for one in merged),
        # The time of the run, which does not go back where the first trainer was the fastest.
        "seconds": max(part["counters"]["seconds"] for part in parts),
    }
    return {
        "trainer_index": index,
        "counters": counters,
        # None, and not a copy of another trainer's state: two trainers must not draw the same numbers.
        "random": parts[index]["random"] if known else None,
        "task": parts[index]["task"] if known else {},
        "resumes": entropy[1],
    }
