"""The ledger of pushes: which push of each trainer was decided last, so that none is applied twice or skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from paramserver.buffers.positions import AppliedPositions, Key


@dataclass(frozen=True)
class TrainerId:
    """Names one process that takes part as a trainer, in each of its calls. No other one ever has the same id.

    ``incarnation`` counts how often a process had joined as this trainer. The generation of the servers: see
    ``Ledger``.
    """

    trainer_index: int
    generation: int
    incarnation: int


@dataclass(frozen=True)
class PushId(TrainerId):
    """Names a push in a run: the ``sequence``-th, counted from 1, of one incarnation of a trainer."""

    sequence: int


class PushState(Enum):
    """What the ledger knows about a push that arrives.

    ``NEW``: the next one; accept it. ``PENDING``: it was accepted and is not decided yet. ``DECIDED``: it was applied
    or dropped; reply as before. ``EVICTED``: of an earlier generation or incarnation, which takes no part any more.
    ``GAP``: one before it is missing.
    """

    NEW = "new"
    PENDING = "pending"
    DECIDED = "decided"
    EVICTED = "evicted"
    GAP = "gap"


@dataclass
class LedgerRow:
    """What is known of one trainer."""

    incarnation: int = 0  # of the process that takes part now, or took part last
    decided: int = 0  # sequence of its last push that was applied or dropped
    # Sequence of its last push that was accepted; larger than ``decided`` by one while that is pending.
    accepted: int = 0
    version: int = 0  # that the last push was computed at
    pushes: int = 0  # accepted from all incarnations, and from trainers that no longer exist, which this one stands for
    # How far the trainer is: what it reports at its start, of whatever mode the checkpoint is, and its pushes since.
    # Positions are of its own samples, in its order; of a stream, their keys.
    batches: int = 0
    samples: int = 0
    inner_steps: int = 0  # local steps of rounds
    positions: AppliedPositions = field(default_factory=AppliedPositions)


class Ledger:
    """One row for each trainer. No clock, no thread; every call holds the lock of the server. Part of each checkpoint.

    A trainer has one push in flight, so a row needs the last sequence only. A push is taken exactly if its sequence
    follows the last one that was decided: a repeated message finds the decision that was made, and a message of a
    process that was replaced is refused by its number, however late it arrives.

    A *generation* is the time from one start of server 0 to the next. Servers that come back from a checkpoint have
    forgotten the updates after it, and what was sent to them before; each start begins another generation, so such
    messages are refused. Records and losses.json call its number ``view``. ``times_due`` is how often each sample is
    served (``buffer.pseudo_epochs``); None for a reservoir, which repeats them.
    """

    def __init__(self, times_due: int | None = 1, generation: int = 1) -> None:
        self.times_due = times_due
        self.generation = generation
        self.rows: dict[int, LedgerRow] = {}

    def __getitem__(self, trainer_index: int) -> LedgerRow:
        return self.rows[trainer_index]

    def admit(self, trainer_index: int) -> int:
        """Return the incarnation of a process that joins as a trainer; its pushes count from 1."""
        row = self.rows.setdefault(trainer_index, LedgerRow())
        row.incarnation += 1
        row.decided = row.accepted = 0
        return row.incarnation

    def is_current(self, sender: TrainerId) -> bool:
        """Return whether a process has joined in this generation, and no later one as the same trainer."""
        row = self.rows.get(sender.trainer_index)
        return row is not None and sender.generation == self.generation and sender.incarnation == row.incarnation

    def state_of(self, push: PushId) -> PushState:
        """Return what is known about a push; it changes nothing."""
        if not self.is_current(push):
            return PushState.EVICTED
        row = self.rows[push.trainer_index]
        if push.sequence == row.decided + 1:
            return PushState.NEW if row.accepted == row.decided else PushState.PENDING
        return PushState.DECIDED if push.sequence == row.decided else PushState.GAP

    def accept(
        self,
        push: PushId,
        version: int,
        samples: int,
        positions: Sequence[int],
        keys: Sequence[Key] = (),
        inner_steps: int = 0,
        batches: int = 1,
    ) -> None:
        """Record a new push, which is held until it is decided.

        Its samples count from now on: an accepted push is applied or dropped in this generation, also if its trainer
        dies, so the process that takes its place must not serve them again.
        """
        assert self.state_of(push) is PushState.NEW, push
        row = self.rows[push.trainer_index]
        row.accepted = push.sequence
        row.version = version
        row.pushes += 1
        row.batches += batches
        row.samples += samples
        row.inner_steps += inner_steps
        row.positions.add(positions, self.times_due)
        row.positions.add_keys(keys)

    def decide(self, push: PushId) -> None:
        """Record that a push was applied or dropped; nothing if another process has joined as the trainer since."""
        row = self.rows[push.trainer_index]
        if row.incarnation == push.incarnation:
            row.decided = push.sequence

    def state_dict(self) -> dict[str, Any]:
        """Return all rows for a checkpoint; nothing is pending then."""
        rows = sorted(self.rows.items())
        return {"rows": {str(i): {**vars(row), "positions": row.positions.packed_state_dict()} for i, row in rows}}

    def load_state_dict(self, state: Mapping[str, Any], num_trainers: int | None = None) -> None:
        """Restore ``state_dict()``. How far trainers are is in the parts that they load, and they report it anew.

        If the run that continues may have fewer trainers (``num_trainers``), the pushes and samples of trainer i are
        counted for trainer i modulo that number, as ``reshard_parts`` does.
        """
        self.rows = {}
        for index, row in sorted((int(index), row) for index, row in state["rows"].items()):
            own = self.rows.setdefault(index % (num_trainers or index + 1), LedgerRow(row["incarnation"]))
            # Earlier versions store apart what is of trainers that no longer exist.
            own.pushes += row["pushes"] + row.get("moved_pushes", 0)
            own.samples += row["samples"]
            own.inner_steps += row.get("inner_steps", 0) + row.get("moved_inner_steps", 0)
