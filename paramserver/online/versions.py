"""The versions of the model with which samples were made, and how old they are, in updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.online.weights import NO_VERSION, Version, effective_step


class SampleVersions:
    """Checks the versions of a trainer's samples, and counts how stale those are that it serves.

    The staleness of a sample is the number of updates between its version and that of a step. For a version that was
    taken back it counts from the checkpoint that was returned to.

    Threads: the receiver thread calls ``reason_to_refuse``, the training thread sets ``step`` and ``limit``, which are
    single numbers; the rest belongs to the training thread.

    Args:
        starts: the first version of each generation of the run, in order.
        max_staleness: ``buffer.max_staleness``.

    Attributes:
        step: of the version that the next batch is for.
        limit: step of the newest version that there can be by now; None if it is not known.
        newest: the newest version that was received.
    """

    def __init__(self, starts: Sequence[Version], max_staleness: int | None) -> None:
        self.starts = tuple(starts)
        self.max_staleness = max_staleness
        self.step = self.starts[-1].step
        self.limit: int | None = None
        self.newest = NO_VERSION
        self._first_steps = {start.generation: start.step for start in self.starts}
        self._served: Counter[int] = Counter()

    def reason_to_refuse(self, version: Sequence[int]) -> str | None:
        """Return why a sample with this version must be refused; None if it must not."""
        generation, step = found = Version(*map(int, version))
        if found == NO_VERSION:
            if self.max_staleness is None:
                return None
            return "version (0, 0) must be that of the weights with buffer.max_staleness; send weights.version"
        if step < self._first_steps.get(generation, step + 1):
            begins = ", ".join(f"({start.generation}, {start.step})" for start in self.starts)
            return (
                f"version ({generation}, {step}) must be one of this run, whose generations begin with {begins}; send "
                "weights.version"
            )
        if self.limit is not None and generation == self.starts[-1].generation and step > self.limit:
            return f"version ({generation}, {step}) must not be newer than the model ({generation}, {self.limit})"
        self.newest = max(self.newest, found)
        return None

    @property
    def oldest(self) -> int | None:
        """The oldest step that may be served; None = any."""
        return None if self.max_staleness is None else self.step - self.max_staleness

    def step_of(self, sample: Any) -> int:
        """Return the step from which the staleness of a sample counts."""
        step = effective_step(sample["version"].tolist(), self.starts)
        # A step that is beyond all is one that no model had, and that sample must not be kept for ever.
        return step if self.max_staleness is None else min(step, self.step + self.max_staleness + 1)

    def count_served(self, versions: npt.NDArray[np.int64]) -> None:
        """Count the staleness of the samples of a batch; of those that have a version."""
        for version, count in zip(*np.unique(versions, axis=0, return_counts=True), strict=True):
            if tuple(version) != NO_VERSION:
                # A version that is newer than the step was made while this trainer prepared it.
                self._served[max(0, self.step - effective_step(version.tolist(), self.starts))] += int(count)

    def pop_histogram(self) -> dict[str, int]:
        """Return {staleness: samples that were served} since the last call."""
        served, self._served = self._served, Counter()
        return {str(staleness): count for staleness, count in sorted(served.items())}

    def describe_starvation(self, trainer_index: int, refused: int) -> str:
        """Return the sentence for the user where no batch can be made, as samples are too old."""
        generation, step = self.newest
        return (
            f"trainer {trainer_index} waits for data: {refused} samples were refused since its last batch, as they "
            f"are older than buffer.max_staleness ({self.max_staleness} updates); the newest version that was received "
            f"is ({generation}, {step}), and the model has step {self.step}; let what sends them take newer weights, "
            "or raise buffer.max_staleness"
        )
