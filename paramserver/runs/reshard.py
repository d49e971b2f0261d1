"""What the trainers of a checkpoint stored, for another number of trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paramserver.buffers.reshard import reshard_buffers


def reshard_parts(
    parts: Sequence[Mapping[str, Any]], trainers: int, *, capacity: int, entropy: tuple[int, int]
) -> list[dict[str, Any]]:
    """Deal the parts of a checkpoint to ``trainers`` trainers.

    Trainer i goes on with the random numbers, the batch number and the task's own state of the old trainer i; one
    beyond the old ones begins with random numbers of its own, and its task is not resumed. What is counted in samples
    goes over to trainer i modulo ``trainers``, so that sums stay.

    Args:
        parts: of all trainers of the checkpoint, in their order.
        trainers: how many there are now.
        capacity: samples that each of their buffers holds.
        entropy: seed and number of resumes; new random numbers come of it.

    Raises:
        CheckpointError: the buffers hold more samples than fit.
    """
    buffers, unserved = reshard_buffers(
        [part["buffer"] for part in parts], trainers, capacity=capacity, entropy=entropy
    )
    leftovers = [
        {
            "state": part["source"],
            "position": part["buffer"]["counters"]["puts"],
            "unserved": keys,
            "mark": part["buffer"]["mark"],
        }
        for part, keys in zip(parts, unserved, strict=True)
    ]
    return [
        _part(parts, i, trainers, entropy) | {"buffer": buffers[i], "leftovers": leftovers} for i in range(trainers)
    ]


def _part(parts: Sequence[Mapping[str, Any]], index: int, trainers: int, entropy: tuple[int, int]) -> dict[str, Any]:
    adopted = [part["counters"] for part in parts[index::trainers]]
    known = index < len(parts)
    counters = {
        **parts[0]["counters"],
        "batch_idx": parts[index]["counters"]["batch_idx"] if known else 0,
        "samples_served": sum(one["samples_served"] for one in adopted),
    }
    return {
        "trainer_index": index,
        "counters": counters,
        "random": parts[index]["random"] if known else None,
        "task": parts[index]["task"] if known else {},
        "resumes": entropy[1],
    }
