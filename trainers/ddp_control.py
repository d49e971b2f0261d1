"""How the ranks of a ddp run decide and save together, next to DDP's all-reduce of gradients."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from paramserver.checkpoint import write_chunks
from paramserver.checkpoint.writer import BackgroundSender
from paramserver.consistency import Announcement, Decision, Readiness, Stop
from paramserver.distributed.control_channel import ControlChannel, connect_ranks
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.distributed.timeouts import call_with_timeout, poll_until
from paramserver.errors import Interrupted, PeerLost, TrainingError, UnsupportedConfiguration
from paramserver.metrics.records import QUANTITIES, StepTotals, TrainerTotals, combine
from paramserver.optim.updater import Updater
from paramserver.parameters.flat import FlatLayout
from paramserver.runs.checkpoint_manager import PartCollector
from paramserver.trainers.control import ReplicaControl
from paramserver.transport.all_reduce import Barrier, SharedAllReduce, area_layout
from paramserver.transport.segments import SegmentHost, attach, attach_socket

T = TypeVar("T")


@dataclass(frozen=True)
class AgreedStep:
    """What every rank knows after an exchange.

    ``totals`` are of the step during which the exchange ran, over the ranks that took part in it; None if there was
    none. ``blocking`` are the ranks whose full buffers block simulations, ``received`` counts what all have received.
    ``buffers_differ`` is whether module buffers have other names, shapes or dtypes on one rank than on another.
    """

    announcements: dict[int, Announcement]
    totals: StepTotals | None
    collect_records: bool
    blocking: frozenset[int] = frozenset()
    received: int = 0
    buffers_differ: bool = False


# A rank's row: readiness, batches and stop of its announcement; whether rank 0 collects records; whether its full
# buffer blocks simulations, and how many samples it has received; the kinds of its module buffers; 1 if the rank takes
# part in the current step, its samples, those that it skipped, and its quantities.
_QUANTITIES = tuple(one.name for one in QUANTITIES)
_ROW = 10 + len(_QUANTITIES)


class SharedRows:
    """A row of numbers per rank, in memory that all ranks map, so that they exchange rows without messages.

    A rank writes its row before it takes part in a collective, and reads all of them after it: by then each of the
    others takes part too, and has written. There are two places for each row, used in turns: a rank that writes for the
    second time has completed a collective that no rank enters before it has read. ``memory`` is float64 of (2, ranks, 1
    + ``_ROW``), zeros at first. A row begins with its number, counted from 1. ``read`` waits ``timeout_s``, where a
    collective does not imply that the others take part.
    """

    def __init__(self, memory: torch.Tensor, rank: int, check: Callable[[], None], timeout_s: float) -> None:
        self._memory = memory.numpy()
        self._rank = rank
        self._check = check
        self._timeout_s = timeout_s
        self._written = 0

    def write(self, row: Sequence[float]) -> None:
        self._written += 1
        own = self._memory[self._written % 2, self._rank]
        own[1:] = row
        own[0] = self._written  # last: a reader that finds the number finds the row

    def read(self) -> list[list[float]]:
        """Return the rows that all ranks wrote in the same turn as this one its last.

        Raises:
            PeerLost: a rank is lost, or has not written in time.
        """
        rows = self._read_or_none()
        if rows is None:
            rows = poll_until(time.monotonic() + self._timeout_s, self._read_or_none, threading.Event(), every_s=0.001)
        if rows is None:
            raise PeerLost(f"a rank has not announced its next step within {self._timeout_s:g} s (cluster.timeout_s)")
        return rows

    def _read_or_none(self) -> list[list[float]] | None:
        numbered: list[list[float]] = self._memory[self._written % 2].tolist()
        if all(number == self._written for number, *_ in numbered):
            return [row for _, *row in numbered]
        self._check()
        return None


def share_memory(
    group: Any, name: str, layout: FlatLayout, timeout_s: float, connects: bool = False
) -> tuple[list[torch.Tensor], Barrier]:
    """Return memory that all ranks of a process group map, and with ``connects`` a barrier of theirs.

    The group is of gloo. Called by all of its ranks.

    Raises:
        UnsupportedConfiguration: a rank runs on another host, or may not map the memory. All ranks raise it.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    distances = Barrier.distances(ranks) if connects else []
    failure, address = "", [""]
    flats: list[torch.Tensor] = []
    with ExitStack() as until_attached, ExitStack() as on_failure, translate_peer_loss():
        if rank == 0:
            host = until_attached.enter_context(SegmentHost(f"ddp-{name}", timeout_s))
            try:
                host.allocate(name, layout)
                for distance, one in product(distances, range(ranks)):
                    to, of = socket.socketpair()
                    host.offer_socket(f"{one} to {distance}", to)
                    host.offer_socket(f"{(one + distance) % ranks} of {distance}", of)
                address = [host.address]
            except (UnsupportedConfiguration, OSError) as error:  # too little memory, or too few descriptors
                failure = str(error)
        dist.broadcast_object_list(address, src=0, group=group)
        connected: dict[str, list[socket.socket]] = {"to": [], "of": []}
        if address[0]:
            try:
                flats = attach(address[0], name, layout, timeout_s)
                for (direction, sockets), distance in product(connected.items(), distances):
                    sockets.append(attach_socket(address[0], f"{rank} {direction} {distance}", timeout_s))
            except (PeerLost, UnsupportedConfiguration, TrainingError, OSError) as error:  # too few descriptors too
                failure = str(error)
        barrier = Barrier(connected["to"], connected["of"], timeout_s)
        on_failure.callback(barrier.close)
        failures: list[Any] = [None] * ranks
        dist.all_gather_object(failures, failure, group=group)
        if any(failures):
            raise UnsupportedConfiguration(next(filter(None, failures)))
        on_failure.pop_all()
    return flats, barrier


def share_rows(group: Any, channel: ControlChannel, timeout_s: float) -> SharedRows | None:
    """Return rows that all ranks of a process group share; None if they run on several hosts. Called by all of them.

    The group is of gloo.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    layout = FlatLayout.of([("rows", torch.zeros(2, ranks, 1 + _ROW, dtype=torch.float64))])
    try:
        flats, _ = share_memory(group, "rows", layout, timeout_s)
    except UnsupportedConfiguration:
        return None
    return SharedRows(layout.views(flats)["rows"], rank, channel.raise_if_lost, timeout_s)


class StepAgreement:
    """The exchanges of one rank, at most one at a time: one before each step, started while the ranks still compute.

    All ranks start theirs at the same points of the loop. Reductions have a process group of their own, because
    collectives of one group must run in the same order on all ranks, and these overlap with the all-reduces of
    gradients. What is reduced, by a group of gloo, are numbers on the CPU. Without ``shared`` rows they are reduced
    always.
    """

    def __init__(self, group: Any, trainers: int, trainer_index: int, shared: SharedRows | None = None) -> None:
        self.group = group
        self.trainers = trainers
        self.trainer_index = trainer_index
        self.shared = shared
        self._matrix: torch.Tensor | None = None  # reduced at present
        self._work: Any = None
        self._own: Announcement | None = None

    @property
    def started(self) -> bool:
        return self._own is not None

    def start(
        self,
        own: Announcement,
        totals: StepTotals | None = None,
        collect_records: bool = False,
        *,
        before_collective: bool = False,
        blocks: bool = False,
        received: int = 0,
        buffer_kinds: int = 0,
    ) -> None:
        """Start an exchange and return.

        ``totals`` are of the current step; None if this rank does not take part. With ``collect_records`` rank 0
        collects records; with ``before_collective`` all ranks take part in another collective between this and
        ``wait``. ``blocks`` is whether the full buffer of this rank blocks simulations, ``received`` the number of
        samples that it has received from them, and ``buffer_kinds`` that of ``ModelTree.buffer_kinds``.
        """
        assert self._own is None
        row = [*map(float, (own.readiness, own.batches, own.stop, collect_records, blocks, received, buffer_kinds))]
        if totals is not None:
            row += [1.0, totals.samples, totals.skipped, *(getattr(totals, name) for name in _QUANTITIES)]
        row += [0.0] * (_ROW - len(row))
        self._own = own
        if before_collective and self.shared is not None:
            self.shared.write(row)
            return
        self._matrix = torch.zeros(self.trainers, _ROW, dtype=torch.float64)
        self._matrix[self.trainer_index] = torch.tensor(row, dtype=torch.float64)
        with translate_peer_loss():
            self._work = dist.all_reduce(self._matrix, group=self.group, async_op=True)

    def wait(self) -> AgreedStep:
        """Wait for the announcements of all ranks."""
        assert self._own is not None
        own, self._own = self._own, None
        if self._matrix is None:
            assert self.shared is not None
            rows = self.shared.read()
        else:
            with translate_peer_loss():
                self._work.wait()
            rows, self._matrix = self._matrix.tolist(), None
        announcements, parts, collect_records, blocking, received = {}, list[StepTotals](), False, set[int](), 0.0
        buffer_kinds = set[float]()
        for i, row in enumerate(rows):
            readiness, batches, stop, collects, blocks, came, kinds, takes_part, samples, skipped, *values = row
            buffer_kinds.add(kinds)
            received += came
            reason = own.reason if i == self.trainer_index else f"a signal to trainer {i}"
            announcements[i] = Announcement(Readiness(int(readiness)), int(batches), Stop(int(stop)), reason)
            collect_records |= bool(collects)
            if blocks:
                blocking.add(i)
            if takes_part:
                measured = dict(zip(_QUANTITIES, values, strict=True))
                parts.append(StepTotals(samples=int(samples), skipped=int(skipped), **measured))
        totals = None
        if parts:
            totals = StepTotals(
                samples=sum(part.samples for part in parts),
                skipped=sum(part.skipped for part in parts),
                **combine(parts),
            )
        return AgreedStep(
            announcements, totals, collect_records, frozenset(blocking), int(received), len(buffer_kinds) > 1
        )


@contextmanager
def process_group(rendezvous: Rendezvous, backend: str, timeout_s: float) -> Iterator[None]:
    """Run the process group of ddp, whose collectives wait for ``timeout_s`` at most.

    It is destroyed at once on an error, which ends the collectives of the others.
    """
    dist.init_process_group(
        backend,
        store=PrefixStore("group", rendezvous.store),
        rank=rendezvous.identity.global_rank,
        world_size=rendezvous.identity.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        call_with_timeout(_SHUTDOWN_S, "the end of the process group", dist.destroy_process_group)


# Messages of gloo about a lost peer. After a timeout gloo closes its connections, and later calls get the second.
_GLOO_MESSAGES = ("gloo", "caused pair closure")


@contextmanager
def translate_peer_loss() -> Iterator[None]:
    """Raise ``PeerLost`` where a collective fails because another rank is gone; gloo raises a bare RuntimeError."""
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
    """Brings the parts of a checkpoint to rank 0: once per checkpoint, rank 0 receives and acknowledges, others send.

    A part arrives in chunks, followed by an end. Rank 0 acknowledges all parts once the checkpoint is with its writer,
    so no rank is more than one checkpoint ahead of another. The channel is used by this object only, and by one thread
    (``checkpoint-sender``).
    """

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel

    def send(self, part: Mapping[str, Any], pause_s: float) -> None:
        """Send this rank's part to rank 0, and wait for the acknowledgment.

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

    def receive(self, parts: PartCollector, step: int) -> None:
        """Receive the parts of the other ranks, commit the checkpoint of ``step``, and answer them.

        Raises:
            PeerLost: a rank is gone.
            TrainingError: a rank could not send its part.
        """
        missing, received = set(self._channel.peers), False
        try:
            while missing:
                rank, kind, body = self._channel.receive()
                if kind == _CHUNK:
                    parts.add_chunk(rank, step, torch.from_numpy(body))
                elif kind == _END:
                    parts.finish_part(rank, step, float(_PAUSE_S.unpack(body.data)[0]))
                    missing.remove(rank)
                else:
                    raise TrainingError(
                        f"trainer {rank} could not store its part of a checkpoint; look for its own error"
                    )
            parts.commit_if_complete()
            received = True
        finally:
            self._acknowledge(received)  # also after a failure: the other ranks wait for the answer

    def _acknowledge(self, received: bool) -> None:
        failures = []
        for rank in self._channel.peers:
            try:
                self._channel.send(rank, _RECEIVED if received else _FAILED)
            except PeerLost as failure:
                failures.append(failure)  # the ranks after it still need their answer
        if failures:
            raise failures[0]


# Torch takes no timeout for none.
_NO_LIMIT = timedelta(days=365)
# Rank 0 collects the records of the others this often; it costs one gather.
_COLLECT_EVERY_S = 1.0
# A collective may fail before the control channel names the lost rank: by server.lost_after_s, and by this.
_NAMED_AFTER_S = 1.0
_SHUTDOWN_S = 5.0
# After a loss the main thread has this long to end the run; then the process ends without it.
UNWIND_S = 1.0


class DdpControl(ReplicaControl):
    """The control plane of a rank of ddp: collectives, and the control channel next to them.

    In collectives the ranks exchange what all of them wait for. Over the channel a lost rank is noticed, and parts of
    checkpoints are sent, while the ranks train. The group is that of the collectives of this object.
    """

    group: Any
    agreement: StepAgreement
    rendezvous: Rendezvous
    sender: BackgroundSender

    _channel: ControlChannel | None = None
    _timeout_s: float  # of a wait for another rank
    _barrier: Barrier | None = None
    _last_collected = 0.0
    _lost_at: float | None = None

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect to the other ranks, and start the process group. Called once by all ranks."""
        sockets = self.rendezvous.sockets
        # Ranks wait for each other after as many steps as a round has; the control channel notices a loss before.
        timeout_s = self._timeout_s = self.rendezvous.timeout_s * self.config.training.local_steps
        placement, stop, limit = self.process.placement, self.process.stop, self.process.stop_limit
        self._before_limit, limit.at_limit = limit.at_limit, self._on_limit
        self._last_collected = time.monotonic()
        with ExitStack() as stack:
            # First, so that from here on a lost rank is named. Collectives, and the start of the group, wait for it
            # until their own timeout; the end of their sockets ends these waits at once.
            channel = stack.enter_context(connect_ranks(self.rendezvous, self.config, self._on_lost, stop.event))
            self._channel = channel
            channel.on_over = limit.end_now
            with sockets.record():
                stack.enter_context(process_group(self.rendezvous, placement.backend, timeout_s))
                # Only on CPUs a backward returns after its collectives.
                is_cpu = placement.device.type == "cpu"
                shared = share_rows(dist.group.WORLD, channel, timeout_s) if is_cpu else None
                # With shared memory no collective overlaps with those of the gradients. Another group would have
                # threads of its own, which wake up a hundred times a second.
                self.group = dist.group.WORLD
                if shared is None:
                    self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self.part_gather = PartGather(channel)
            self.agreement = StepAgreement(self.group, self.process.trainers, self.trainer_index, shared)
            self.sender = stack.enter_context(
                BackgroundSender(self.config.checkpoint.background, lambda: channel.last_progress)
            )
            yield

    # Collectives.

    def shared_all_reduce(self, parameters: Sequence[torch.Tensor], resources: ExitStack) -> SharedAllReduce | None:
        """Return an all-reduce of gradients in shared memory; None on several hosts. Called by all ranks.

        Its connections are closed with ``resources``.
        """
        if self.agreement.shared is None:
            return None
        layout = area_layout(self.process.trainers, parameters)
        try:
            with self.rendezvous.sockets.record():
                flats, barrier = share_memory(self.group, "gradients", layout, self._timeout_s, connects=True)
        except UnsupportedConfiguration as error:
            if self.monitor is not None:
                why = str(error).partition(";")[0]  # the cure after it is that of servers
                self.monitor.note(f"ddp.shared_memory (auto): gradients are reduced over gloo, as {why}")
            return None
        resources.callback(barrier.close)
        self._barrier = barrier
        return SharedAllReduce(list(layout.views(flats).values()), self.trainer_index, barrier)

    @contextmanager
    def waits_for_steps(self) -> Iterator[None]:
        """Inside ``with``, this rank waits for ranks that compute as long as they do; a loss ends the wait.

        It enters the collectives of a step at the begin of that, and the others after their forward. The control
        channel finds a rank that is lost. One that waits in a collective has the limit itself.
        """
        try:
            self._limit_waits(None)
            yield
        finally:
            self._limit_waits(self._timeout_s)

    def _limit_waits(self, timeout_s: float | None) -> None:
        limit = _NO_LIMIT if timeout_s is None else timedelta(seconds=timeout_s)
        for group in {dist.group.WORLD, self.group}:
            _set_pg_timeout(limit, group)
        if self._barrier is not None:
            self._barrier.set_timeout(timeout_s)

    def exchange(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.process.trainers
        with translate_peer_loss():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of the rank ``source``. Called by all ranks."""
        values = [value]
        dist.broadcast_object_list(values, src=source, group=self.group)
        return values[0]

    @property
    def is_collection_due(self) -> bool:
        """Whether rank 0 is to collect the records of the others."""
        return self.monitor is not None and time.monotonic() - self._last_collected > _COLLECT_EVERY_S

    def collect_records(self) -> None:
        super().collect_records()
        self._last_collected = time.monotonic()

    # Checkpoints.

    def save(
        self, step: int, model: nn.Module, updater: Updater, reason: str, since: float, part: Mapping[str, Any]
    ) -> None:
        if self.checkpoints is not None:
            super().save(step, model, updater, reason, since, part)
            return
        pause_s = time.perf_counter() - since
        self.sender.submit(lambda: self.part_gather.send(part, pause_s))

    def _complete_parts(self, parts: PartCollector, step: int) -> None:
        self.sender.submit(lambda: self.part_gather.receive(parts, step))

    # The end, and losses.

    def leave(self, totals: TrainerTotals, decision: Decision) -> None:
        super().leave(totals, decision)
        if self._channel is not None:
            self._channel.leave()

    def report_failure(self, error: BaseException) -> BaseException:
        """Return the error that names the lost rank, where a collective failed, which does not."""
        if self._channel is None or not isinstance(error, PeerLost):
            return error
        self._channel.wait_loss(self.config.server.lost_after_s + _NAMED_AFTER_S)
        return self._outcome(self._channel.lost or error)

    def _outcome(self, lost: PeerLost) -> PeerLost | Interrupted:
        """Return what a loss means: a run is interrupted if it was asked to end and a rank did not."""
        if self._channel is None or not self._channel.stuck:
            return lost
        return Interrupted(f"{self.process.stop.state()[1]}; {self._channel.stuck}")

    def _on_limit(self, place: str) -> None:
        """Called in the thread of ``StopLimit``: the other ranks wait for this one, or this one for another."""
        self._before_limit(place)
        if self._channel is None:
            return
        if place:
            rank, text = self.process.identity.global_rank, self.process.stop_limit.limit_text
            self._channel.report_loss(rank, f"it did not return from {place} {text}", is_stuck=True)
        else:
            self._channel.send_over(self.process.stop.state()[1], self.process.stop_limit.limit_text)

    def _on_lost(self) -> None:
        """Called again and again after a loss, in the thread of the control channel, until the channel is closed."""
        self.rendezvous.sockets.abort()
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        # A send of gloo that began when its connection had ended is not woken; a task may compute for long.
        lost = None if self._channel is None or now < self._lost_at + UNWIND_S else self._channel.lost
        if lost is not None and self.process.end_now is not None:
            self.process.end_now(self._outcome(lost))
