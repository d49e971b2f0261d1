"""What a trainer does while it stands at a step: validation and checkpoints."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from paramserver.checkpoint import CopyMemory, check_storable, private_copy
from paramserver.limits import due
from paramserver.process import Process, random_states, restore_random_states, seed_all
from paramserver.records import PhaseClock, WeightedSums
from paramserver.task import Task
from trainers.counters import Counters
from trainers.overridable import Overridable
from trainers.validation import evaluate

# Why a checkpoint is taken after which there is none.
_LAST = ("end", "interrupted")


class Standing(Overridable):
    """Where a trainer is, and what is due there. How the trainers do it together is for the mode to say.

    Args:
        process: who this trainer is.
        task: the user's.
    """

    def __init__(self, process: Process, task: Task) -> None:
        self.process = process
        self.config = process.config
        self.task = task
        self.trainer_index = process.trainer_index
        self.clock = PhaseClock()
        self.counters = Counters()
        self.step = 0
        self.validation_loader: Iterable[tuple[Any, int]] | None = None
        self._memory = CopyMemory()
        self._validated_step: int | None = None
        self._saved_step: int | None = None

    # What a mode says.

    @abstractmethod
    def merge_validation(self, sums: WeightedSums) -> tuple[Mapping[str, float], bool]:
        """The means over the shares of all trainers, and whether they are the best so far."""

    @abstractmethod
    def deposit(self, reason: str, since: float) -> None:
        """Take part in a checkpoint of the current step: copy now, in the pause that began at ``since``; see ``part``.

        What follows, serialisation, travel and writing, is not for the pause, unless ``checkpoint.background`` is off.
        """

    def settle(self) -> None:
        """Wait until rank 0 has all that this trainer has deposited."""

    def refresh(self) -> None:
        """Bring ``unwrapped_model`` to the current version before it is validated or saved."""

    # What is due.

    @property
    def seconds(self) -> float:
        """How long this trainer has trained, validation and checkpoints left out; also before it was resumed."""
        return self.counters.seconds + self.clock.steps.total_s

    def is_due(self, step: int) -> bool:
        """Whether something is done at this step, at which all trainers stand."""
        return due(step, self.config.training.validate_every) or due(step, self._save_every)

    @property
    def _save_every(self) -> int:
        every = self.config.checkpoint.every
        return self.config.training.validate_every if every is None else every

    def _validate_and_save(self) -> None:
        """What is due at this step, at which all trainers stand."""
        improved = due(self.step, self.config.training.validate_every) and self.validate()
        if improved or due(self.step, self._save_every):
            self.save("best" if improved else "periodic")

    def validate(self) -> bool:
        """Validate this trainer's share of the current version; True where the mean over all is the best so far."""
        if self._validated_step == self.step:
            return False
        self._validated_step = self.step
        self.refresh()
        loader = self.validation_loader
        if loader is None:
            sums = WeightedSums()  # without data of its own it still takes part: the others wait for its word
        else:
            self.task.on_validation_start(self.counters.batch_idx)
            sums = self._evaluate(loader)
        _, improved = self.merge_validation(sums)
        if loader is not None:
            self.task.on_validation_end(self.counters.batch_idx)
        self.clock.skip()
        return improved

    def _evaluate(self, batches: Iterable[tuple[Any, int]]) -> WeightedSums:
        return evaluate(
            self.task,
            self.unwrapped_model,
            batches,
            self.counters.batch_idx,
            self.on_before_forward,
            self.config.training.precision,
            self.process.placement.device,
        )

    def save(self, reason: str) -> None:
        """Take part in a checkpoint of the current step, unless there is one; the last of a run also arrives."""
        if self._saved_step != self.step:
            self._saved_step = self.step
            self.deposit(reason, time.perf_counter())
            self.clock.skip()
        if reason in _LAST:
            self.settle()

    def part(self) -> dict[str, Any]:
        """What this trainer stores, copied once: nothing of it changes when training goes on."""
        own: dict[str, Any] = {}
        self.task.on_checkpoint(own)
        own = private_copy(own, self._memory)
        check_storable(own, type(self.task).__name__)
        stream = self.data.state_dict(self._memory)
        self._memory.trim()
        return {
            "trainer_index": self.trainer_index,
            **stream,
            "random": random_states(),
            "counters": vars(self.counters) | {"seconds": self.seconds},
            "task": own,
        }

    def _load_part(self, part: Mapping[str, Any]) -> None:
        self.data.load_state_dict(part)
        self.counters = Counters(**part["counters"])
        self._saved_step = self.step
        if part["random"] is None:  # a trainer that the checkpoint has not got
            seed_all(self.config.seed, part["resumes"], 1 + self.trainer_index)
            return
        restore_random_states(part["random"])
        self.task.on_resume(part["task"])
