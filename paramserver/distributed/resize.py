"""Trainers that join a running job or leave it: their requests, which rank 0 reads from the store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from torch._C._distributed_c10d import Store

_COUNT = "requests"
_RANKS = "ranks"

OVER = "the run is over"
"""The answer to requests that come when the run ends."""


@dataclass(frozen=True)
class ResizeRequest:
    """A trainer asks to join the run, or to leave it."""

    kind: Literal["join", "leave"]
    global_rank: int

    def __str__(self) -> str:
        return f"rank {self.global_rank} {'joins' if self.kind == 'join' else 'leaves'}"


def resized(trainer_ranks: Sequence[int], requests: Iterable[ResizeRequest]) -> tuple[int, ...]:
    """Return the global ranks of the trainers, in the order of their indices, after ``requests``.

    A trainer that joins gets the highest index, so the others keep theirs.
    """
    ranks = list(trainer_ranks)
    for request in requests:
        if request.kind == "join" and request.global_rank not in ranks:
            ranks.append(request.global_rank)
        elif request.kind == "leave" and request.global_rank in ranks:
            ranks.remove(request.global_rank)
    return tuple(ranks)


def draw_rank(store: Store, taken: Iterable[int]) -> int:
    """Return a global rank for a trainer that joins, which no other process has drawn."""
    least = 1 + max(taken)
    while (drawn := store.add(_RANKS, 1) - 1) < least:
        pass
    return drawn


def send_request(store: Store, request: ResizeRequest) -> str:
    """Send a request to rank 0, which reads it within a second; return its key."""
    key = f"request/{store.add(_COUNT, 1)}"
    store.set(key, json.dumps(asdict(request)))
    return key


def pending_requests(store: Store) -> dict[str, ResizeRequest]:
    """Return the requests that rank 0 has not answered yet, by their keys, in their order."""
    keys = [f"request/{number}" for number in range(1, store.add(_COUNT, 0) + 1)]
    return {key: ResizeRequest(**json.loads(store.get(key))) for key in keys if store.check([key])}


def mark_carried_out(store: Store, requests: Mapping[str, ResizeRequest]) -> None:
    """Answer requests: a generation of the run begins with the trainers that follow from them."""
    for request in requests.values():
        store.set(f"left/{request.global_rank}", "1" if request.kind == "leave" else "")
    refuse(store, requests, "")


def refuse(store: Store, requests: Iterable[str], reason: str) -> None:
    """Answer the requests of these keys: they are not carried out."""
    for key in requests:
        store.set(f"answer/{key}", reason)
        store.delete_key(key)


def refusal(store: Store, key: str) -> str | None:
    """Return why a request was refused, an empty text if it is carried out, and None before the answer."""
    return store.get(f"answer/{key}").decode() if store.check([f"answer/{key}"]) else None


def has_left(store: Store, global_rank: int) -> bool:
    """Return whether a trainer has left at its own request, and not joined again."""
    return bool(store.check([f"left/{global_rank}"]) and store.get(f"left/{global_rank}"))
