"""Code that only one trainer runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_trainer_index: int | None = None


def set_trainer_index(trainer_index: int | None) -> None:
    """Say which trainer this process is; None for none."""
    global _trainer_index
    _trainer_index = trainer_index


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Call ``function`` on the first trainer alone (in rpc that is not rank 0, which is a server); None elsewhere."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if _trainer_index in (0, None) else None

    return called
