"""What server 0 knows of the data of its trainers: where it continues after a loss, and who else can serve it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from paramserver.buffers.kinds import buffer_class
from paramserver.config import Config
from paramserver.consistency import Consistency, Ledger
from paramserver.runs.monitor import RunMonitor
from paramserver.transport.messages import DataPosition


class TrainerSources:
    """The sources of a generation's trainers, as they have reported them. Every call holds the lock of the server."""

    def __init__(self, config: Config, trainers: int, rules: Consistency, ledger: Ledger, monitor: RunMonitor) -> None:
        self._config = config
        self._trainers = trainers
        self._rules = rules
        self._ledger = ledger
        self._monitor = monitor
        # Where the data of each trainer began in this generation: what a process that takes its place needs of it.
        self._reported: dict[int, DataPosition] = {}
        # The last position that was applied before a process began with an empty buffer; it may have to read so far.
        self._read_before: dict[int, int] = {}

    def report(self, trainer_index: int, position: DataPosition) -> None:
        """Record where the data of a trainer starts in this generation, before its first announcement."""
        row = self._ledger[trainer_index]
        if not row.accepted:  # otherwise this message was overtaken by a push
            self._reported[trainer_index] = position
            row.positions.load_state_dict(position.applied)
            names = "batch_idx", "samples_served", "inner_steps"
            row.batches, row.samples, row.inner_steps = (position.counters.get(name, 0) for name in names)
            self._read_before[trainer_index] = max(row.positions.above, default=-1)

    def knows(self, trainer_index: int) -> bool:
        """Whether the trainer has reported its data."""
        return trainer_index in self._reported

    def position_of(self, trainer_index: int) -> DataPosition | None:
        """Return where a process continues that takes the place of a trainer now; None if it is the first one."""
        if (reported := self._reported.get(trainer_index)) is None:
            return None
        row = self._ledger[trainer_index]
        self._read_before[trainer_index] = max(row.positions.above, default=-1)
        return DataPosition(reported.source, row.positions.state_dict(), self._progress_of(trainer_index))

    def substitute_parts(self) -> dict[int, dict[str, Any]]:
        """Return, for each trainer, what its part of a checkpoint is replaced with if it is lost before that is sent.

        Such a part has no buffer: the trainer's data continues after what has been applied. Its task's state is added
        by ``CheckpointManager.commit``.
        """
        parts = {}
        for index, reported in self._reported.items():
            parts[index] = {
                "trainer_index": index,
                "buffer": None,
                "applied": self._ledger[index].positions.state_dict(),
                "source": reported.source,
                "random": None,
                "resumes": self._monitor.resumes + 1,
                "counters": self._progress_of(index),
            }
        return parts

    def _progress_of(self, trainer_index: int) -> dict[str, Any]:
        """Return the counters with which another process continues as a lost trainer; see ``TrainerProgress``."""
        row = self._ledger[trainer_index]
        return {
            "batch_idx": row.batches,
            "samples_served": row.samples,
            "epoch": self._monitor.epoch,
            "epoch_end": self._monitor.epoch_end,
            "seconds": self._monitor.seconds,
            "steps": self._rules.step,
            "inner_steps": row.inner_steps,
        }

    # Other numbers of trainers.

    @property
    def knows_all(self) -> bool:
        """Whether every trainer has reported its data."""
        return self._reported.keys() == set(range(self._trainers))

    def can_divide(self, lost: Collection[int]) -> bool:
        """Whether other trainers than today's, and without those that are lost, can serve the rest of the data."""
        can_reshard = all(reported.can_reshard for reported in self._reported.values())
        return can_reshard and all(self._reported[index].refetchable for index in lost)

    @property
    def refetchable(self) -> bool:
        """Whether all samples that were not applied can be fetched again."""
        return all(reported.refetchable for reported in self._reported.values())

    def are_read(self) -> bool:
        """Whether each process that took the place of another one has read what had been applied before."""
        rows = self._ledger.rows
        return not any(rows[index].positions.low <= last for index, last in self._read_before.items() if last >= 0)

    def has_room(self, trainers: int, present: int) -> bool:
        """Whether the buffers of so many trainers can hold what those of the present ones must keep, however full."""
        buffer = self._config.buffer
        keeps = not self.refetchable
        # What does not fit by number is read again; the size of samples is known to the buffers only.
        keeps |= buffer.max_bytes is not None and (buffer_class(buffer.kind).repeats or buffer.pseudo_epochs > 1)
        return not keeps or trainers >= present
