"""The control plane of a trainer of the parameter server: calls of server 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paramserver.checkpoint import write_chunks
from paramserver.checkpoint.writer import BackgroundSender
from paramserver.config import num_servers_of
from paramserver.consistency import Decision
from paramserver.distributed.membership import Member, release_liveness_calls
from paramserver.distributed.remote_error import RemoteError
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.distributed.session import TrainerAgent, connect_tcp, rpc_trainer
from paramserver.distributed.tcp_calls import TcpCaller
from paramserver.errors import Evicted, GenerationChanged, PeerFailed, PeerLost, PeerRefused, RunEnded, Unreachable
from paramserver.metrics.records import Record, TrainerTotals, WeightedSums
from paramserver.server.client import InFlightCall, ServerClient
from paramserver.trainers.control import Control
from paramserver.transport.messages import JoinReply, ValidationReply

log = logging.getLogger("paramserver")

_SEND_RECORDS_EVERY_S = 1.0


class ServerControl(Control):
    """Server 0 decides, merges and saves; see ``Control``. Use ``connected`` before anything that is sent."""

    rendezvous: Rendezvous
    agent: TrainerAgent
    server: ServerClient
    sender: BackgroundSender

    knows_saved = True

    _stack: ExitStack
    _leave_request: str | None = None
    _sending_records: InFlightCall[None] | None = None
    _records_sent = 0.0
    _chunk_sent = 0.0  # when server 0 acknowledged the last one of a part of a checkpoint

    @contextmanager
    def connected(self, blocks: Callable[[], bool]) -> Iterator[ServerClient]:
        """Start the RPC agent and connect to the servers. ``blocks``: whether this trainer's full buffer blocks others.

        The servers are notified at the exit that this process leaves deliberately.
        """
        config = self.config
        with ExitStack() as self._stack:
            stack = self._stack
            self.agent = stack.enter_context(rpc_trainer(self.rendezvous, self.trainer_index, num_servers_of(config)))
            stack.callback(release_liveness_calls)
            # With cluster.elastic a signal lets this trainer leave.
            stop_limit = None if config.cluster.elastic else self.process.stop_limit
            worker_id, addresses = self.agent.worker_id, self.agent.server_addresses
            server = ServerClient(config, self.trainer_index, worker_id, addresses, blocks, stop_limit)
            self.server, self._records_sent = stack.enter_context(closing(server)), time.monotonic()
            self.sender = stack.enter_context(BackgroundSender(config.checkpoint.background, lambda: self._chunk_sent))
            yield server

    def connect_tcp(self) -> bool:
        """Make the calls that a step waits for over TCP connections from now on; return False if there can be none."""
        try:
            with ExitStack() as stack:
                caller = stack.enter_context(TcpCaller(self.config.cluster.timeout_s))
                self.server.use_tcp(connect_tcp(self.rendezvous, caller, num_servers_of(self.config)))
                self._stack.push(stack.pop_all())
        except Unreachable as error:
            log.warning(
                "trainer %d: everything is sent over RPC, as it cannot connect to %s", self.trainer_index, error
            )
            return False
        return True

    def join(self, epoch_samples: int | None) -> JoinReply:
        """Join the run; returns once all trainers have joined."""
        rendezvous, agent = self.rendezvous, self.agent
        member = Member(
            self.trainer_index, agent.name, agent.worker_id, rendezvous.host_and_pid, generation=rendezvous.generation
        )
        self.server.start_heartbeat()
        reply = self.server.join(member, epoch_samples)
        self.joined = True
        if self.process.session:
            # The server may have noticed the loss of the earlier session only now, and let another process have it.
            rendezvous.claim_again()
        return reply

    def signal_ends_run(self) -> bool:
        if not self.config.cluster.elastic:
            return True
        # Rank 0 lets this trainer leave and the others continue, unless it has a signal too.
        if self._leave_request is None:
            self._leave_request = self.rendezvous.request_leave()
        elif self._leave_request and (reason := self.rendezvous.refused(self._leave_request)):
            self._leave_request = ""
            log.warning("this trainer continues, as it cannot leave: %s", reason)
        return False

    def all_gather(
        self, value: Any, call: tuple[int, ...], active: tuple[int, ...] | None, has_limit: bool = True
    ) -> list[Any]:
        return self.server.all_gather(value, call, active, has_limit)

    def report_validation(
        self, step: int, shares: Mapping[int, WeightedSums], since: int | None, waits: bool = True
    ) -> ValidationReply:
        if waits:
            return self.server.report_validation(step, shares)
        ((share, sums),) = shares.items()
        self.server.report_validation_share(step, share, sums)
        return ValidationReply(sums.means())

    def record(self, record: Record) -> None:
        self.records.append(record)
        if time.monotonic() - self._records_sent > _SEND_RECORDS_EVERY_S or len(self.records) > 1000:
            self.flush_records()

    def flush_records(self) -> InFlightCall[None]:
        """Send all records, and return the call."""
        if self._sending_records is not None:
            self._sending_records.wait()  # it is sent again if it is lost, and has long been received otherwise
        self._records_sent = time.monotonic()
        records, self.records = self.records, []
        self._sending_records = self.server.send_records(records)
        return self._sending_records

    def send_part(self, step: int, part: Mapping[str, Any], since: float) -> None:
        """Send this trainer's part of a checkpoint to server 0, which has staged it.

        ``since`` is ``time.perf_counter()`` when training stopped for it.
        """
        pause_s = time.perf_counter() - since

        # Both run in the thread of the sender. Each chunk is acknowledged before the next, so that messages of a step
        # pass.
        def send_chunk(chunk: npt.NDArray[np.uint8]) -> None:
            self.server.send_part_chunk(step, torch.from_numpy(chunk))
            self._chunk_sent = time.monotonic()

        def send() -> None:
            write_chunks(dict(part), send_chunk)
            self.server.finish_part(step, pause_s)

        self.sender.submit(send)

    def leave(self, totals: TrainerTotals, decision: Decision) -> None:
        self.flush_records().wait()
        self.server.leave(totals, decision)

    def report_failure(self, error: BaseException) -> BaseException:
        failure = RemoteError.reported_by(f"trainer {self.trainer_index}", error)
        if not self.joined and self.process.is_newcomer:
            if not isinstance(error, (PeerFailed, RunEnded, GenerationChanged)):
                self.rendezvous.request_leave()
        elif not self.joined:
            # Also a server that could not be reached: nothing watches it before it has joined. A process that joins
            # again tries to reach it until it gives up.
            joins_again = isinstance(error, PeerLost if self.process.session else Unreachable)
            if not joins_again and not isinstance(error, (PeerRefused, Evicted, RunEnded, GenerationChanged)):
                self.rendezvous.report_failure(failure)
        elif not isinstance(error, (PeerLost, PeerRefused)):  # these come from the server
            self.sender.abort()
            self.server.report_failure(failure)
        return error
