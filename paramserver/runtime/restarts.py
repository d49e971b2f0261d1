"""How often, and when, a supervisor starts a rank again."""

from __future__ import annotations

# A process that lived for longer has not died of its start.
_SHORT_LIFE_S = 10.0
_MAX_DELAY_S = 30.0


class RestartPolicy:
    """Counts the restarts of each rank. A rank starts again at once; after a second early death, with a delay.

    The delay doubles with each death soon after a start, from one second on.
    """

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self._restarts: dict[int, int] = {}
        self._short_lives: dict[int, int] = {}

    def allows(self, global_rank: int) -> bool:
        """Return whether the rank may start once more."""
        return self._restarts.get(global_rank, 0) < self.max_restarts

    def next_delay(self, global_rank: int, lived_s: float) -> tuple[float, int]:
        """Count a restart of a rank whose process lived for ``lived_s``; return the delay and the number of it."""
        number = self._restarts[global_rank] = self._restarts.get(global_rank, 0) + 1
        short = self._short_lives[global_rank] = (
            self._short_lives.get(global_rank, 0) + 1 if lived_s < _SHORT_LIFE_S and number > 1 else 0
        )
        return (min(2.0 ** (short - 1), _MAX_DELAY_S) if short else 0.0), number
