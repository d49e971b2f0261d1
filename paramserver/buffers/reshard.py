"""The states of several buffers as those of another number of buffers: what they held is dealt in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from paramserver.buffers.batch import ServingCounts
from paramserver.buffers.storage import join_states
from paramserver.errors import CheckpointError

State: TypeAlias = Mapping[str, Any]
_Place: TypeAlias = tuple[int, int]
"""Which state, and which of its samples."""


def reshard_buffers(
    states: Sequence[State], count: int, *, capacity: int, entropy: Sequence[int]
) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """Deal what buffers held to ``count`` others.

    Samples that can be read again (a state without their values) and were never served are not dealt: their keys are
    returned, for their source to deal anew. A reservoir may lose samples that were served before, as it does at every
    put; nothing else is ever lost. Counts of puts and gets begin anew, with what is held at first.

    Args:
        states: as ``state_dict`` gives them, of buffers of one kind.
        count: of the new buffers.
        capacity: of each of them.
        entropy: seeds what is drawn here, and the draws of buffers beyond the old ones.

    Returns:
        The new states, and for each old one the keys of its samples that were never served and are not dealt.

    Raises:
        CheckpointError: more samples must stay than fit.
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
    kept = _fitting(states, kept, count * capacity, entropy)
    return [_state(states, kept[i::count], i, entropy) for i in range(count)], unserved


def _fitting(states: Sequence[State], kept: list[_Place], room: int, entropy: Sequence[int]) -> list[_Place]:
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
    gone = set(rng.choice(np.flatnonzero(served), excess, replace=False).tolist())
    return [place for n, place in enumerate(kept) if n not in gone]


def _state(states: Sequence[State], places: list[_Place], index: int, entropy: Sequence[int]) -> dict[str, Any]:
    """The state of new buffer ``index``; what only the kind knows is that of the old one in its place."""
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
        "gone": {},
        "samples": join_states([state["samples"] for state in states], places),
    }
