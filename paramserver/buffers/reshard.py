"""Resharding: the states of n buffers as the states of m buffers, when a run resumes with other trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from paramserver.buffers.base import ServingCounts
from paramserver.buffers.storage import join_states
from paramserver.errors import CheckpointError

State: TypeAlias = Mapping[str, Any]
_Place: TypeAlias = tuple[int, int]
"""Index of the state, index of the sample in it."""


def reshard_buffers(
    states: Sequence[State], count: int, *, capacity: int, entropy: Sequence[int]
) -> tuple[list[dict[str, Any] | None], list[list[Any]], list[list[tuple[Any, int]]]]:
    """Distribute the samples that buffers held to ``count`` new buffers, in turn.

    Samples that can be fetched again (a state without their values) and were never served are left out: their keys are
    returned, and their source distributes them again; so it does with those that do not fit. A reservoir may lose
    samples that were served before, as at every put; nothing else is ever lost. Puts and gets are counted from the
    resharding on, starting with what is held.

    Args:
        states: from ``state_dict``, of buffers of one kind.
        count: number of new buffers.
        capacity: of each of them.
        entropy: seeds the evictions here and the draws of buffers beyond the old ones.

    Returns:
        The new states, and for each old one what is not distributed: the keys of its samples that were never served,
        and (key, times served) of others.

    Raises:
        CheckpointError: more samples must be kept than fit, and they cannot be fetched again.
    """
    kept: list[_Place] = []
    unserved: list[list[Any]] = [[] for _ in states]
    longest = max(len(state["keys"]) for state in states)
    for i in range(longest):
        for which, state in enumerate(states):
            if i >= len(state["keys"]):
                continue
            if state["samples"] is None and not int(state["served"][i]):
                unserved[which].append(state["keys"][i])
            else:
                kept.append((which, i))
    partly: list[list[tuple[Any, int]]] = [[] for _ in states]
    room = count * capacity
    if states[0]["kind"] == "reservoir" or any(states[which]["samples"] is not None for which, _ in kept):
        kept = _evict_excess(states, kept, room, entropy)
    else:
        for which, i in kept[room:]:
            partly[which].append((states[which]["keys"][i], int(states[which]["served"][i])))
        kept = kept[:room]
    return [_new_state(states, kept[i::count], i, entropy) for i in range(count)], unserved, partly


def _evict_excess(states: Sequence[State], kept: list[_Place], room: int, entropy: Sequence[int]) -> list[_Place]:
    """Return ``kept`` without the served samples of reservoirs for which there is no room."""
    excess = len(kept) - room
    if excess <= 0:
        return kept
    served = [bool(states[which]["served"][i]) for which, i in kept]
    if states[0]["kind"] != "reservoir" or sum(served) < excess:
        needed = -(-len(kept) // max(room, 1))
        raise CheckpointError(
            f"the buffers of the checkpoint hold {len(kept)} samples that must stay, and there is room for {room}; "
            f"use at least {needed} times the trainers, or {needed} times the buffer.capacity"
        )
    rng = np.random.default_rng(list(entropy))
    evicted = set(rng.choice(np.flatnonzero(served), excess, replace=False).tolist())
    return [place for n, place in enumerate(kept) if n not in evicted]


def _new_state(states: Sequence[State], places: list[_Place], index: int, entropy: Sequence[int]) -> dict[str, Any]:
    """Return the state of new buffer ``index``, with the extra state of the old buffer of that index."""
    own = states[index] if index < len(states) else states[0]
    if own["kind"] == "reservoir":
        places = sorted(places, key=lambda place: bool(states[place[0]]["served"][place[1]]))  # unseen ones come first
    served = [int(states[which]["served"][i]) for which, i in places]
    rng = np.random.default_rng([*entropy, index])
    return {
        **own,
        "finished": False,
        "mark": None,
        "rng": own["rng"] if index < len(states) else rng.bit_generator.state,
        "counters": vars(ServingCounts(puts=len(places), gets=sum(served))),
        "keys": [states[which]["keys"][i] for which, i in places],
        "served": torch.tensor(served, dtype=torch.int64),
        "positions": torch.arange(len(places)),
        "removed": {},
        "samples": join_states([state["samples"] for state in states], places),
    }
