"""Numbers that a client is given: of simulations, steps and processes."""

from __future__ import annotations

import operator
from typing import Any

from paramserver.errors import ClientError

# Below these, as a header holds them.
_MOST = {"simulation_id": 2**63, "step": 2**63, "member": 65535, "members": 65536, "attempt": 2**32}


def whole(name: str, value: Any, least: int = 0) -> int:
    """The number.

    Raises:
        ClientError: no whole number, or one that no header holds.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not least <= number < _MOST[name]:
        raise ClientError(f"{name} ({value}) must be a whole number from {least}, below {_MOST[name]}; correct it")
    return number


class Steps:
    """Which steps of a simulation were sent: all below ``_low``, and those ahead of it."""

    def __init__(self) -> None:
        self._low = 0
        self._ahead: set[int] = set()

    def check(self, step: Any, steps: int | None) -> int:
        """The number of a step that may be sent.

        Args:
            step: which.
            steps: how many the simulation has; None = not known.

        Raises:
            ClientError: it is none, beyond the last, or was sent.
        """
        number = whole("step", step)
        if steps is not None and number >= steps:
            raise ClientError(f"step ({number}) must be below the steps of a simulation ({steps}); count from 0")
        if number < self._low or number in self._ahead:
            raise ClientError(f"step ({number}) must be sent once, it was sent before; number the samples")
        return number

    def add(self, number: int) -> None:
        self._ahead.add(number)
        while self._low in self._ahead:
            self._ahead.remove(self._low)
            self._low += 1
