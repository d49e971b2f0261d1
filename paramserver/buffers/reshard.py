"""Resharding: the parts of n trainers in a checkpoint, and their buffers, as those of m trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import torch

from paramserver.buffers.base import ServingCounts
from paramserver.buffers.kinds import buffer_class
from paramserver.buffers.positions import AppliedPositions
from paramserver.buffers.sample_tree import unpack_keys
from paramserver.buffers.storage import join_states
from paramserver.errors import CheckpointError


def reshard_parts(
    parts: Sequence[Mapping[str, Any]], trainers: int, *, capacity: int, entropy: tuple[int, int]
) -> list[dict[str, Any]]:
    """Redistribute the parts of a checkpoint to ``trainers`` trainers.

    Trainer i continues with the random states, the batch number and the task state of the old trainer i. A trainer
    beyond the old ones gets new random states, and its task is not resumed. Counts of samples of the old trainer i move
    to trainer i modulo ``trainers``, so that their sums are preserved. ``capacity`` is that of each new buffer. New
    random states are derived from ``entropy``, the seed and the number of resumes.

    Returns:
        One part for each new trainer. Under ``leftovers`` it holds the positions of the old trainers' sources and
        the samples that were not served yet. ``buffer`` is None if no part has one: the buffers start empty then.

    Raises:
        CheckpointError: the buffers hold more samples than fit.
    """
    # A trainer that was lost when the checkpoint was made has no buffer, but the ledger's account of its samples.
    present = [part["buffer"] for part in parts if part["buffer"] is not None]
    buffers: list[dict[str, Any] | None] = [None] * trainers
    divided: list[dict[str, Any]] = []
    if present:
        buffers, divided = reshard_buffers(present, trainers, capacity=capacity, entropy=entropy)
    held = iter(divided)
    leftovers = [
        {"state": part["source"], "position": 0, "applied": part["applied"]}
        if part["buffer"] is None
        else {
            "state": part["source"],
            "position": part["buffer"]["counters"]["puts"],
            "mark": part["buffer"]["mark"],
            **next(held),
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
        "inner_steps": sum(one.get("inner_steps", 0) for one in merged),
        # The time of the run, which does not go back where the first trainer was the fastest.
        "seconds": max(part["counters"]["seconds"] for part in parts),
    }
    return {
        "trainer_index": index,
        "counters": counters,
        # None, and not a copy of another trainer's state: two trainers must not draw the same numbers.
        "random": parts[index]["random"] if known else None,
        "task": parts[index]["task"] if known else {},
        "local_steps": parts[index].get("local_steps") if known else None,
        "extra_state": parts[index].get("extra_state", {}) if known else {},
        "flags": parts[index if known else 0].get("flags"),
        "validation": parts[index if known else 0].get("validation"),
        "residuals": _sum_residuals(parts[index::trainers]),
        "resumes": entropy[1],
    }


def _sum_residuals(parts: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the sum of what the compression of the gradients of some trainers has lost, by parameter."""
    total: dict[str, torch.Tensor] = {}
    for residuals in (part.get("residuals") or {} for part in parts):
        for name, residual in residuals.items():
            total[name] = total.get(name, 0) + residual
    return total


State: TypeAlias = Mapping[str, Any]
_Place: TypeAlias = tuple[int, int]
"""Index of the state, index of the sample in it."""


def reshard_buffers(
    states: Sequence[State], count: int, *, capacity: int, entropy: Sequence[int]
) -> tuple[list[dict[str, Any] | None], list[dict[str, Any]]]:
    """Distribute the samples that buffers held to ``count`` new buffers, in turn.

    Samples that can be fetched again (a state without their values) and were never served are left out: their keys are
    returned, and their source distributes them again; so it does with those that do not fit. A reservoir may lose
    samples that were served before, as at every put; nothing else is ever lost. Puts and gets are counted from the
    resharding on, starting with what is held. ``capacity`` is that of each new buffer. ``entropy`` seeds the evictions
    here and the draws of buffers beyond the old ones.

    Returns:
        The new states, and for each old one what became of its samples, see ``ResumePosition``: under ``kept`` the keys
        of those in new buffers, and of those that are not, under ``unserved`` the keys of those that were never served,
        under ``partly`` (key, times served) of others.

    Raises:
        CheckpointError: more samples must be kept than fit, and they cannot be fetched again.
    """
    states = [{**state, "keys": unpack_keys(state["keys"])} for state in states]
    divided: list[dict[str, Any]] = [{"unserved": [], "partly": [], "kept": []} for _ in states]
    kept: list[_Place] = []
    places = ([(which, i) for i in range(len(state["keys"]))] for which, state in enumerate(states))
    for which, i in (place for turn in zip_longest(*places) for place in turn if place is not None):
        state = states[which]
        if state["samples"] is None and not int(state["served"][i]):
            divided[which]["unserved"].append(state["keys"][i])
        else:
            kept.append((which, i))
    room = count * capacity
    if buffer_class(states[0]["kind"]).repeats or any(states[which]["samples"] is not None for which, _ in kept):
        kept = _evict_excess(states, kept, room, entropy)
    else:
        for which, i in kept[room:]:
            divided[which]["partly"].append((states[which]["keys"][i], int(states[which]["served"][i])))
        kept = kept[:room]
    for which, i in kept:
        divided[which]["kept"].append(states[which]["keys"][i])
    return [_new_state(states, kept[i::count], i, count, entropy) for i in range(count)], divided


def _evict_excess(states: Sequence[State], kept: list[_Place], room: int, entropy: Sequence[int]) -> list[_Place]:
    """Return ``kept`` without the served samples of reservoirs for which there is no room."""
    excess = len(kept) - room
    if excess <= 0:
        return kept
    served = [bool(states[which]["served"][i]) for which, i in kept]
    if not buffer_class(states[0]["kind"]).repeats or sum(served) < excess:
        needed = -(-len(kept) // max(room, 1))
        raise CheckpointError(
            f"the buffers of the checkpoint hold {len(kept)} samples that must stay, and there is room for {room}; "
            f"use at least {needed} times the trainers, or {needed} times the buffer.capacity"
        )
    rng = np.random.default_rng(list(entropy))
    evicted = set(rng.choice(np.flatnonzero(served), excess, replace=False).tolist())
    return [place for n, place in enumerate(kept) if n not in evicted]


def _new_state(
    states: Sequence[State], places: list[_Place], index: int, count: int, entropy: Sequence[int]
) -> dict[str, Any]:
    """Return the state of new buffer ``index``, with the extra state of the old buffer of that index."""
    own = states[index] if index < len(states) else states[0]
    if buffer_class(own["kind"]).repeats:
        places = sorted(places, key=lambda place: bool(states[place[0]]["served"][place[1]]))  # unseen ones come first
    served = [int(states[which]["served"][i]) for which, i in places]
    rng = np.random.default_rng([*entropy, index])
    stale = sum(state["counters"].get("stale", 0) for state in states[index::count])
    return {
        **own,
        "finished": False,
        "mark": None,
        "rng": own["rng"] if index < len(states) else rng.bit_generator.state,
        "counters": vars(ServingCounts(puts=len(places), gets=sum(served), stale=stale)),
        "keys": [states[which]["keys"][i] for which, i in places],
        "served": torch.tensor(served, dtype=torch.int64),
        "positions": torch.arange(len(places)),
        "removed": {},
        "samples": join_states([state["samples"] for state in states], places),
    }
