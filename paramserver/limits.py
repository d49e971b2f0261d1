"""Limits that end a run, and intervals: pure functions of the steps and samples applied so far."""

from __future__ import annotations

from dataclasses import dataclass

from paramserver.config import TrainingConfig

ALL_SERVED = "all data was served"
"""Why a run ends whose trainers have no more data."""

_NO_MORE_DATA = "has no more data (training.uneven_inputs: stop)"


def no_more_data(trainer_index: int) -> str:
    """Return why a run ends where one trainer has no more data, and the others would not continue without it."""
    return f"trainer {trainer_index} {_NO_MORE_DATA}"


def end_in_words(reason: str, training: TrainingConfig, trainers: int, samples_left: int | None) -> str:
    """Return why a run ended: where its data ended after all passes that were asked for, that they are done.

    What is left is then less than a step of all trainers; where it is more, the sentence names the setting that uses
    it. ``samples_left`` is None if it is unknown.
    """
    epochs, step_samples = training.max_epochs, training.batch_size * training.batches_per_step * trainers
    data_ended = reason == ALL_SERVED or reason.endswith(_NO_MORE_DATA)
    if epochs is None or not data_ended or samples_left is None:
        return reason
    if samples_left >= step_samples:
        return reason if reason == ALL_SERVED else f"{reason}; join uses the {samples_left} samples that are left"
    done = f"{epochs} epoch{'' if epochs == 1 else 's'} done"
    if not samples_left:
        return done
    are = "sample is" if samples_left == 1 else "samples are"
    whose = {1: "the trainer", 2: "both trainers"}.get(trainers, f"all {trainers} trainers")
    return f"{done}; {samples_left} {are} less than a step of {whose}"


@dataclass(frozen=True)
class Limits:
    """The limits of a run; the first one that is reached ends it. None means no limit."""

    max_steps: int | None = None
    max_samples: int | None = None
    max_seconds: float | None = None

    @classmethod
    def of(cls, training: TrainingConfig) -> Limits:
        return cls(training.max_steps, training.max_samples, training.max_seconds)

    def reached(self, steps: int, samples: int) -> str | None:
        """Return the limit that these counts reach, as a sentence; None for none. Equal on ranks with equal counts."""
        if self.max_steps is not None and steps >= self.max_steps:
            return f"training.max_steps ({self.max_steps}) reached"
        if self.max_samples is not None and samples >= self.max_samples:
            return f"training.max_samples ({self.max_samples}) reached"
        return None

    def reached_time(self, seconds: float) -> str | None:
        """Return the time limit if ``seconds`` of training reach it, as a sentence; None otherwise."""
        if self.max_seconds is not None and seconds >= self.max_seconds:
            return f"training.max_seconds ({self.max_seconds:g}) reached"
        return None


def is_due(step: int, *intervals: int, since: int | None = None) -> bool:
    """Whether something that happens every so many steps, in one of the intervals, is due after this one; 0 is never.

    With ``since``, a step before it, also if it was due after one between the two.
    """
    before = step - 1 if since is None else since
    return any(every > 0 and step // every > before // every for every in intervals)
