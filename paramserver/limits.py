"""When a run ends, and where its epochs begin: functions of what has been applied."""

from __future__ import annotations

from dataclasses import dataclass

from paramserver.config import TrainingConfig


@dataclass(frozen=True)
class Limits:
    """The first limit that is reached ends the run. ``None`` is no limit."""

    max_steps: int | None = None
    max_samples: int | None = None
    max_seconds: float | None = None

    @classmethod
    def of(cls, training: TrainingConfig) -> Limits:
        return cls(training.max_steps, training.max_samples, training.max_seconds)

    def reached(self, steps: int, samples: int) -> str | None:
        """The limit that these counts reach, in words; the same on every rank that has the same counts."""
        if self.max_steps is not None and steps >= self.max_steps:
            return f"training.max_steps ({self.max_steps}) reached"
        if self.max_samples is not None and samples >= self.max_samples:
            return f"training.max_samples ({self.max_samples}) reached"
        return None

    def reached_time(self, seconds: float) -> str | None:
        if self.max_seconds is not None and seconds >= self.max_seconds:
            return f"training.max_seconds ({self.max_seconds:g}) reached"
        return None


def epoch_of(samples: int, epoch_samples: int | None) -> int:
    """The epoch that the next sample belongs to.

    Args:
        samples: applied so far, by all trainers.
        epoch_samples: what one pass over the source serves to all trainers; None where that is unknown (one epoch).
    """
    return samples // epoch_samples if epoch_samples else 0


def is_due(step: int, every: int) -> bool:
    """Whether what happens every so many steps happens after this one; 0 is never."""
    return every > 0 and step % every == 0
