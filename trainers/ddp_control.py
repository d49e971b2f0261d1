"""How the ranks of a ddp run decide and save together, next to DDP's all-reduce of gradients.

Before each step the ranks agree by one small reduction, started while they still compute (:class:`StepAgreement`).
Parts of a checkpoint reach rank 0 over the control channel while the ranks train (:class:`PartGather`).
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


@dataclass(frozen=True)
class StepTotals:
    """The last step over the ranks that took part in it: the mean of their losses, and the sum of their samples."""

    loss: float
    samples: int


@dataclass(frozen=True)
class AgreedStep:
    """What every rank knows after a reduction.

    Attributes:
        announcements: by trainer.
        totals: of the step during which the reduction ran; None if there was none.
        collect_records: whether rank 0 collects the records of the others now.
    """

    announcements: dict[int, Announcement]
    totals: StepTotals | None
    collect_records: bool


class StepAgreement:
    """The reductions of one rank, at most one at a time.

    All ranks start theirs at the same points of the loop. They have a process group of their own, because collectives
    of one group must run in the same order on all ranks, and these overlap with the all-reduces of gradients.

    Args:
        group: of gloo; what is reduced are numbers on the CPU.
        trainers: number of ranks.
        trainer_index: of this rank.
    """

    def __init__(self, group: Any, trainers: int, trainer_index: int) -> None:
        self.group = group
        self.trainers = trainers
        self.trainer_index = trainer_index
        self._vector: torch.Tensor | None = None
        self._work: Any = None
        self._own: Announcement | None = None

    @property
    def started(self) -> bool:
        return self._work is not None

    def start(self, own: Announcement, totals: StepTotals | None = None, collect_records: bool = False) -> None:
        """Start a reduction and return.

        Args:
            own: announcement of this rank's next step.
            totals: this rank's loss and samples of the current step; None if it does not take part.
            collect_records: on rank 0, whether it collects records.
        """
        assert self._work is None
        # Readiness, batches and stop of rank i are at i, n+i and 2n+i; all other ranks contribute zeros there. Then
        # the sums of losses, samples and participants.
        row = [0.0] * (3 * self.trainers)
        row[self.trainer_index :: self.trainers] = own.readiness, own.batches, own.stop
        row += (0.0, 0.0, 0.0) if totals is None else (totals.loss, totals.samples, 1.0)
        vector = torch.tensor([*row, collect_records], dtype=torch.float64)
        with translate_peer_loss():
            self._work = dist.all_reduce(vector, group=self.group, async_op=True)
        self._vector, self._own = vector, own

    def wait(self) -> AgreedStep:
        """Wait for the announcements of all ranks."""
        assert self._vector is not None
        with translate_peer_loss():
            self._work.wait()
        numbers, own, self._work = self._vector.tolist(), self._own, None
        loss, samples, participants, collect_records = numbers[3 * self.trainers :]
        announcements = {}
        for i in range(self.trainers):
            readiness, batches, stop = (int(number) for number in numbers[i : 3 * self.trainers : self.trainers])
            reason = own.reason if own is not None and i == self.trainer_index else f"a signal to trainer {i}"
            announcements[i] = Announcement(Readiness(readiness), batches, Stop(stop), reason)
        totals = StepTotals(loss / participants, int(samples)) if participants else None
        return AgreedStep(announcements, totals, bool(collect_records))


# Messages of gloo about a lost peer. After a timeout gloo closes its connections, and later calls get the second.
_GLOO_MESSAGES = ("gloo", "caused pair closure")


@contextmanager
def translate_peer_loss() -> Iterator[None]:
    """Raise ``PeerLost`` where a collective fails because another rank is gone; gloo raises a bare RuntimeError.

    Example::

        >>> with translate_peer_loss():
        ...     raise RuntimeError("[/a/gloo/tcp/buffer.cc:78] Timed out waiting 6000ms for recv")
        Traceback (most recent call last):
            ...
        paramserver.errors.PeerLost: another rank of the process group is lost: Timed out waiting 6000ms for recv
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(message in str(error) for message in _GLOO_MESSAGES):
            # The first line, without the position in gloo's source.
            message = re.sub(r"^\[\S+\.(cc|h):\d+\] ", "", str(error).splitlines()[0])
            raise PeerLost(f"another rank of the process group is lost: {message}") from error
        raise


# Kinds of messages on the control channel.
_CHUNK, _END, _FAILED, _RECEIVED = 1, 2, 3, 4
_PAUSE_S = struct.Struct("!d")


class PartGather:
    """Gathers the parts of a checkpoint on rank 0: once per checkpoint, rank 0 receives and acknowledges, others send.

    A part arrives in chunks, followed by an end. Rank 0 acknowledges all parts once the checkpoint is with its writer,
    so no rank is more than one checkpoint ahead of another.

    Args:
        channel: of this rank; used by this object only, and by one thread (``checkpoint-sender``).
    """

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel

    def send(self, part: Mapping[str, Any], pause_s: float) -> None:
        """Send this rank's part to rank 0, and wait for the acknowledgment.

        Args:
            part: staged state of this rank.
            pause_s: seconds for which the training of this rank stopped.

        Raises:
            PeerLost: rank 0 is gone, or failed to gather the parts.
        """
        try:
            write_chunks(dict(part), self._send_chunk)
        except PeerLost:
            raise
        except BaseException:
            self._channel.send(0, _FAILED)  # rank 0 would wait for the rest
            raise
        self._channel.send(0, _END, _PAUSE_S.pack(pause_s))
        if self._channel.receive().kind != _RECEIVED:
            raise PeerLost("rank 0 could not take a checkpoint; look for its own error")

    def _send_chunk(self, chunk: npt.NDArray[np.uint8]) -> None:
        self._channel.send(0, _CHUNK, chunk.data)

    def receive(self) -> tuple[dict[int, ChunkedFile], float]:
        """Return the parts of the other ranks, by rank, and the longest of their pauses, in seconds.

        Raises:
            PeerLost: a rank is gone.
            TrainingError: a rank could not send its part.
        """
        pauses_s: dict[int, float] = {}
        parts = {rank: ChunkedFile() for rank in self._channel.peers}
        while len(pauses_s) < len(parts):
            rank, kind, body = self._channel.receive()
            if kind == _CHUNK:
                self._receive_chunk(parts[rank], body)
            elif kind == _END:
                pauses_s[rank] = float(_PAUSE_S.unpack(body.data)[0])
            else:
                raise TrainingError(f"trainer {rank} could not store its part of a checkpoint; look for its own error")
        return parts, max(pauses_s.values(), default=0.0)

    def _receive_chunk(self, part: ChunkedFile, chunk: npt.NDArray[np.uint8]) -> None:
        part.append(chunk)

    def acknowledge(self, received: bool) -> None:
        """Answer all other ranks: their parts are received, or this checkpoint failed."""
        failures = []
        for rank in self._channel.peers:
            try:
                self._channel.send(rank, _RECEIVED if received else _FAILED)
            except PeerLost as failure:
                failures.append(failure)  # the ranks after it still need their answer
        if failures:
            raise failures[0]
