"""How stale applied gradients were."""

from __future__ import annotations


def scale(staleness: int, rule: str) -> float:
    return 1.0 / (1 + staleness) if rule == "inverse" else 1.0
