"""How the ranks of a process group agree before each step: one small reduction, begun while they still compute.

How the parts of a checkpoint reach rank 0 in ddp, while the ranks train.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from paramserver.checkpoint import ChunkedFile, write_chunks
from paramserver.consistency import Announcement, Readiness, Stop
from paramserver.distributed.control_channel import ControlChannel
from paramserver.errors import PeerLost, TrainingError

# After a time-out gloo closes what it had, and who uses it next hears no more than the second.
_OF_GLOO = ("gloo", "caused pair closure")


@dataclass(frozen=True)
class StepTotals:
    """What the ranks that took part in the step before did: the mean of their losses, all their samples."""

    loss: float
    samples: int


@dataclass(frozen=True)
class AgreedStep:
    """What every rank knows after a reduction.

    ``announced`` is each trainer's word; ``done`` the step that the reduction belongs to, None where there was none;
    ``collect`` says that rank 0 wants the others' records now.
    """

    announced: dict[int, Announcement]
    done: StepTotals | None
    collect: bool


class StepAgreement:
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

    def begin(self, own: Announcement, done: StepTotals | None = None, collect: bool = False) -> None:
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

    def finish(self) -> AgreedStep:
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
        return AgreedStep(announced, StepTotals(loss / takers, int(samples)) if takers else None, bool(collect))


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


# Kinds of messages.
_PIECE, _END, _FAILED, _TAKEN = 1, 2, 3, 4
_PAUSE = struct.Struct("!d")


class PartGather:
    """One rank's end of it. Each other rank calls ``send``, rank 0 ``receive`` and ``answer``, once per checkpoint.

    A part comes as pieces and an end. Rank 0 answers all when it has handed the checkpoint to its writer, so that no
    rank is far ahead of another when they meet again.

    Args:
        links: this rank's, used by this object alone and by one thread.
    """

    def __init__(self, links: ControlChannel) -> None:
        self._links = links

    def send(self, part: Mapping[str, Any], pause_s: float) -> None:
        """Give this rank's part to rank 0, and wait until rank 0 has those of all.

        Raises:
            PeerLost: rank 0 is gone, or could not take it.
        """
        try:
            write_chunks(dict(part), self._send_piece)
        except PeerLost:
            raise
        except BaseException:
            self._links.send(0, _FAILED)
            raise
        self._links.send(0, _END, _PAUSE.pack(pause_s))
        if self._links.receive().kind != _TAKEN:
            raise PeerLost("rank 0 could not take a checkpoint; look for its own error")

    def _send_piece(self, piece: npt.NDArray[np.uint8]) -> None:
        self._links.send(0, _PIECE, piece.data)

    def receive(self) -> tuple[dict[int, ChunkedFile], float]:
        """The parts of the other ranks, and the longest of their pauses, in seconds.

        Raises:
            PeerLost: a rank is gone.
            TrainingError: a rank could not send its own.
        """
        pauses_s: dict[int, float] = {}
        parts = {rank: ChunkedFile() for rank in self._links.peers}
        while len(pauses_s) < len(parts):
            rank, kind, body = self._links.receive()
            if kind == _PIECE:
                self._take_piece(parts[rank], body)
            elif kind == _END:
                pauses_s[rank] = float(_PAUSE.unpack(body.data)[0])
            else:
                raise TrainingError(f"trainer {rank} could not store its part of a checkpoint; look for its own error")
        return parts, max(pauses_s.values(), default=0.0)

    def _take_piece(self, pieces: ChunkedFile, piece: npt.NDArray[np.uint8]) -> None:
        pieces.append(piece)

    def answer(self, taken: bool) -> None:
        """Tell the other ranks that they may go on to the next checkpoint, or that this one failed."""
        failures = []
        for rank in self._links.peers:
            try:
                self._links.send(rank, _TAKEN if taken else _FAILED)
            except PeerLost as failure:
                failures.append(failure)  # those after it are answered all the same
        if failures:
            raise failures[0]
