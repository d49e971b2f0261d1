"""How the ranks of a process group agree before each step: one small reduction, begun while they still compute."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paramserver.consistency import Announcement, Readiness, Stop
from paramserver.errors import PeerLost

# After a time-out gloo closes what it had, and who uses it next hears no more than the second.
_OF_GLOO = ("gloo", "caused pair closure")


@dataclass(frozen=True)
class Done:
    """What the ranks that took part in the step before did: the mean of their losses, all their samples."""

    loss: float
    samples: int


@dataclass(frozen=True)
class Agreed:
    """What every rank knows after a reduction.

    ``announced`` is each trainer's word; ``done`` the step that the reduction belongs to, None where there was none;
    ``collect`` says that rank 0 wants the others' records now.
    """

    announced: dict[int, Announcement]
    done: Done | None
    collect: bool


class Agreement:
    """The reduction of one rank, at most one at a time.

    All ranks begin theirs at the same places of the loop. It runs in a group of its own, so that its order beside the
    gradients' does not matter.

    Args:
        group: of gloo; the words are numbers on the CPU.
        trainers: how many ranks there are.
        me: which of them this is.
    """

    def __init__(self, group: Any, trainers: int, me: int) -> None:
        self.group = group
        self.trainers = trainers
        self.me = me
        self._words: torch.Tensor | None = None
        self._work: Any = None
        self._own: Announcement | None = None

    @property
    def begun(self) -> bool:
        return self._work is not None

    def begin(self, own: Announcement, done: Done | None = None, collect: bool = False) -> None:
        """Give this rank's words, and go on.

        Args:
            own: for the step that comes next.
            done: this rank's loss and samples of the step that ends; None where it has none.
            collect: on rank 0, whether it wants the records.
        """
        assert self._work is None
        row = [0.0] * (3 * self.trainers)
        row[self.me :: self.trainers] = own.readiness, own.batches, own.stop
        row += (0.0, 0.0, 0.0) if done is None else (done.loss, done.samples, 1.0)
        words = torch.tensor([*row, collect], dtype=torch.float64)
        with peers_may_be_lost():
            self._work = dist.all_reduce(words, group=self.group, async_op=True)
        self._words, self._own = words, own

    def finish(self) -> Agreed:
        """Wait for all ranks' words."""
        assert self._words is not None
        with peers_may_be_lost():
            self._work.wait()
        words, own, self._work = self._words.tolist(), self._own, None
        loss, samples, takers, collect = words[3 * self.trainers :]
        announced = {}
        for i in range(self.trainers):
            readiness, batches, stop = (int(word) for word in words[i : 3 * self.trainers : self.trainers])
            reason = own.reason if own is not None and i == self.me else f"a signal to trainer {i}"
            announced[i] = Announcement(Readiness(readiness), batches, Stop(stop), reason)
        return Agreed(announced, Done(loss / takers, int(samples)) if takers else None, bool(collect))


@contextmanager
def peers_may_be_lost() -> Iterator[None]:
    """Say so where a collective fails because another rank is gone; torch raises a bare RuntimeError from gloo."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(word in str(error) for word in _OF_GLOO):
            raise PeerLost(f"another rank of the process group is lost: {_told(error)}") from error
        raise


def _told(error: RuntimeError) -> str:
    """What it says to people: its first line, without the place in gloo's source."""
    return re.sub(r"^\[\S+\.(cc|h):\d+\] ", "", str(error).splitlines()[0])
