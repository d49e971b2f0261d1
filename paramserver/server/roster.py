"""Which trainers take part in a run: they join, leave, are lost, and are replaced or given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from paramserver.config import Config
from paramserver.consistency import Decision, TrainerId
from paramserver.distributed.membership import Member, Members
from paramserver.distributed.rpc_calls import RemoteError
from paramserver.errors import Evicted, GenerationChanged, PeerLost, RunEnded
from paramserver.metrics.records import TrainerTotals
from paramserver.runs.checkpoint_manager import CheckpointManager
from paramserver.server.aggregator import Aggregator
from paramserver.server.coordinator import ShardCoordinator
from paramserver.server.quorum import Quorum, Staging
from paramserver.server.server_run import Network, ServerRun
from paramserver.server.trainer_sources import TrainerSources
from paramserver.transport.base import ServerTransport
from paramserver.transport.messages import Future, JoinReply, PendingReplies


@dataclass(eq=False)
class Roster:
    """The trainers of a generation.

    A trainer that is lost is taken out of what all others wait for (``Aggregator.remove``, ``Quorum.remove``), unless
    the run has to end or to return to its last checkpoint. Methods take the lock themselves, except where noted.
    """

    _config: Config
    _trainers: int
    _run: ServerRun
    _aggregator: Aggregator
    sources: TrainerSources
    _quorum: Quorum
    _staging: Staging
    coordinator: ShardCoordinator
    _checkpoints: CheckpointManager
    _welcome: Callable[[], JoinReply]  # returns the reply to a trainer that joins, without what concerns this trainer
    _new_transport: Callable[[], ServerTransport]  # returns the transport of a trainer that joins
    _network: Network
    # Called with a trainer whose place another process may take.
    _on_trainer_lost: Callable[[Member], None] = lambda member: None
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.generation = self._checkpoints.generation
        self.members = Members(self._clock)
        self.started = False  # all trainers and servers have joined
        self._epoch_samples: int | None = None  # as of the trainers that have joined
        self.totals: dict[int, TrainerTotals] = {}  # of the trainers that have left
        self.left_behind: list[str] = []  # the trainers that did not end in time after a request to stop
        self._monitor = self._checkpoints.monitor
        # Held while the loss of a trainer is handled and reported, so that another process takes its place after that.
        # Taken before the lock of the server.
        self._loss_lock = threading.Lock()
        self._joins = PendingReplies()
        self._absent_since: dict[int, float] = {}
        self._given_up: set[int] = set()
        # Contexts of distributed autograd that a process would leave behind if it died (docs/torch-notes.md).
        self._contexts: dict[TrainerId, int] = {}
        self._ends_without = False  # a stop is overdue: whatever ``server.on_loss`` is, the others end without the lost
        self._run.on_failure(lambda: list(self._joins.pop_all()[1].values()))
        self.coordinator.on_ready = self._start_if_complete
        self.coordinator.on_lost = lambda member, reason: self._return_to_checkpoint(f"{member} is lost: {reason}")

    # Who calls. With the lock.

    def admit(self, sender: TrainerId) -> int:
        """Return the index of a trainer that calls; raise if the run has failed, or takes place without it."""
        self._run.check()
        return self.index_of(sender)

    def index_of(self, sender: TrainerId) -> int:
        """Return the index of a trainer that takes part.

        Raises:
            Evicted: it was lost, also if its message was sent before that, or another process has taken its place.
        """
        if not self._aggregator.takes_part(sender):
            raise Evicted(
                f"trainer {sender.trainer_index} was taken for lost, and the run continues without this process"
            )
        return sender.trainer_index

    def note_context(self, sender: TrainerId) -> int:
        """Record the distributed-autograd context of a call, and return its id; it is released if the trainer dies."""
        context_id = self._contexts[sender] = self._network.context_id()
        return context_id

    # Joining.

    def join(self, member: Member, epoch_samples: int | None) -> Future:
        """Add a trainer; see ``ParameterServer.join``."""
        index, future = member.index, None
        while future is None:
            # Not under ``_loss_lock``, which ``lose`` takes.
            for present in self._find_earlier(member):
                self.lose(present, "another process joined in its place")
            with self._loss_lock, self._run.lock:
                # Again: of processes that join as one trainer at once, another one may have joined in between.
                if self._find_earlier(member):
                    continue
                # First: if it is refused, the one that is present keeps its incarnation.
                self.members.join(member)
                member.incarnation = self._aggregator.ledger.admit(index)
                self._epoch_samples = epoch_samples
                self._aggregator.transports[index] = self._new_transport()
                future = self._joins.add(index, None)
        # Without the lock: the liveness call is an RPC, and its callback runs in a thread of the agent.
        self._network.watch(member.name, lambda reason: self.on_disconnect(member, reason))
        self._start_if_complete()
        return future

    def _find_earlier(self, member: Member) -> list[Member]:
        """Return the process that has the place of one that joins, if there is one; raise if it may not take it."""
        index = member.index
        with self._run.lock:
            self._run.check()
            if (last := self._run.last_decision) is not None:
                if last.resizes:
                    raise GenerationChanged(last.reason)
                raise RunEnded(f"the run ended before trainer {index} joined")
            earlier = [present for present in self.members.present() if present.index == index]
            if member.generation != self.generation or any(present.worker_id > member.worker_id for present in earlier):
                raise Evicted(f"trainer {index} asked to join too late; the run continues without this process")
            return earlier

    def _start_if_complete(self) -> None:
        # Called by the last trainer or by the last server that is ready, whichever comes later; ``pop_all`` under the
        # lock makes sure that only one of them replies.
        with self._run.lock:
            is_complete = self.started or len(self._joins.parts) == self._trainers
            if self._run.error is not None or not (is_complete and self.coordinator.complete):
                return
            started, self.started = self.started, True
            futures = self._joins.pop_all()[1]
            for index in futures if not started else ():
                self._aggregator.add(index)  # also if a process was lost before the start: the first step needs it
        if not started:
            self._monitor.expect_samples(self._epoch_samples)
        self._run.complete(futures, lambda: {index: self._reply(index) for index in futures})

    def _reply(self, trainer_index: int) -> JoinReply:
        with self._run.lock:
            row, position = self._aggregator.ledger[trainer_index], self.sources.position_of(trainer_index)
            reply = replace(
                self._welcome(), generation=self.generation, incarnation=row.incarnation, data_position=position
            )
        # Without the lock: these may read or write a file.
        if position is not None:
            self._monitor.trainer_replaced(trainer_index, reply.incarnation)
        return replace(reply, stored_part=self._checkpoints.trainer_part(trainer_index, newest=position is not None))

    def missing(self) -> list[str]:
        """Return the trainers and servers that have not joined yet."""
        trainers = [f"trainer {index}" for index in self.missing_trainers()]
        return trainers + [f"server {index}" for index in self.coordinator.missing()]

    def missing_trainers(self) -> list[int]:
        """Return the indices of the trainers that have not joined yet."""
        return self.members.missing(self._trainers)

    # Leaving.

    def leave(self, trainer_index: int, totals: TrainerTotals, decision: Decision) -> None:
        """A trainer has finished; after the last one the run ends. With the lock."""
        self.members.leave(trainer_index)
        self.totals[trainer_index] = totals
        self._run.last_decision = decision
        self._finish_if_all_left()

    def _finish_if_all_left(self) -> None:
        if self._run.last_decision is not None and not self.members.present():
            self._run.finished.set()

    def all_totals(self) -> list[TrainerTotals]:
        """Return the totals that trainers reported, and for those that are lost what the ledger knows."""
        totals, rows = dict(self.totals), self._aggregator.ledger.rows
        absent = sorted(rows.keys() - totals.keys()) if self._run.error is None else []
        left = self._monitor.expected_samples
        if left is not None:
            others_left = sum(t.samples_left or 0 for t in totals.values())
            left = max(left - sum(row.samples for row in rows.values()) - others_left, 0)
        for number, index in enumerate(absent):
            # What is left of all absent trainers is known together.
            own_left = left if number == 0 or left is None else 0
            row = rows[index]
            totals[index] = TrainerTotals(index, row.samples, inner_steps=row.inner_steps, samples_left=own_left)
        return [totals[index] for index in sorted(totals)]

    # Losses.

    def check_heartbeats(self) -> None:
        """Count each trainer and server as lost that has been silent for ``server.lost_after_s``.

        Also fail the run if a trainer has not made a call that others wait for.
        """
        self.coordinator.check_heartbeats()
        silence_s = self._config.server.lost_after_s
        for member in self.members.overdue(silence_s):
            self.lose(member, f"no heartbeat for server.lost_after_s ({silence_s:g} s)")
        self._quorum.check_overdue()

    def on_disconnect(self, member: Member, reason: str | None) -> None:
        """A trainer's process disconnected, on purpose (None) or because it is lost."""
        self.members.mark_disconnected(member)
        with self._run.lock:
            context_id = self._contexts.pop(TrainerId(member.index, self.generation, member.incarnation), None)
        if reason is None:
            self._release(member)
            return
        try:
            self.lose(member, reason)
            # Not as soon as it is silent: a process that lives would lose the context of its step too.
            if context_id is not None:
                self._network.release_context(context_id)
                self.coordinator.release_context(context_id)
        except Exception as error:  # noqa: BLE001 - torch only prints what a callback raises
            self._run.fail_with(error)

    def _release(self, member: Member) -> None:
        """Wait no longer for a trainer that ended because it had come too late to take part."""
        with self._run.lock:
            absent = member.index not in self._aggregator.rules.participants
            if self._aggregator.ended and absent and member in self.members.present():
                self.members.leave(member.index)
                self._finish_if_all_left()

    def lose(self, member: Member, reason: str) -> None:
        """Continue without a trainer, or as ``server.on_loss`` requires; nothing if that was done before."""
        index, on_loss = member.index, self._config.server.on_loss
        with self._loss_lock:
            with self._run.lock:
                if self._run.error is not None or not self.members.lose(member):
                    return
                loss = f"{member} is lost: {reason}{self._describe_round(index)}"
                # A run that ends at the loss may be started again: then it returns to a checkpoint for this loss.
                ends = on_loss == "fail" and not self._ends_without
                if ends:
                    self._run.fail(PeerLost(loss))
                elif self.started and not self._can_continue_without(index):
                    self._change_generation(loss)
                else:
                    self._remove(index)
                returns = ends or isinstance(self._run.error, GenerationChanged)
            # Without the lock: it writes a file.
            self._monitor.trainer_lost(index, loss, returns)
            self._on_trainer_lost(member)

    def _describe_round(self, trainer_index: int) -> str:
        """Return how many local steps of a round are lost with a trainer, for the text of the loss."""
        training = self._config.training
        steps = -(-self._aggregator.batches_in_progress(trainer_index) // training.accumulate_batches)
        if not training.has_rounds or not steps:
            return ""
        return f"; of its round, of at most {steps} local steps, nothing is applied"

    def _can_continue_without(self, trainer_index: int) -> bool:
        """Whether no update needs what only the lost trainer could still send, and another process can replace it."""
        if self._run.last_decision is not None:
            return True  # one has left, so the last version is validated and staged
        returns = self._config.server.on_loss == "rollback" and not self._ends_without
        if returns or not self.sources.knows(trainer_index):
            return False  # in the latter case it is not known where its data starts
        if self._aggregator.ended and not self._ends_without:
            # Another one has to validate and save; one that has joined since takes no part in that.
            return bool(self._aggregator.rules.participants - {trainer_index})
        if self.coordinator.num_servers == 1 or (self._ends_without and not self.members.present()):
            return True
        # Its gradients may be on server 0 and not on the others, which would wait for them.
        row, transport = self._aggregator.ledger[trainer_index], self._aggregator.transports[trainer_index]
        return transport.zero_copy or row.accepted == row.decided

    def _remove(self, trainer_index: int) -> None:
        """Let all that waits for a trainer continue without it."""
        if trainer_index in self._joins.parts:
            # It may live, and another process have its place: it has no heartbeat yet that would be refused.
            evicted = Evicted(f"another process joined as trainer {trainer_index}; the run continues without this one")
            self._joins.pop(trainer_index)[0].set_result(RemoteError.of(evicted))
        self._aggregator.remove(trainer_index)
        self._staging.replace(trainer_index)
        self._quorum.remove(trainer_index)
        self._finish_if_all_left()

    def check_absences(self) -> set[int]:
        """Give up each lost trainer whose place no process took within ``cluster.timeout_s``.

        Return those whose data the others can serve, once they have it: the run has to continue without them. While
        samples of simulations are to come, a request to stop ends the run.
        """
        now, limit_s = self._clock(), self._config.cluster.timeout_s
        missing = self.missing_trainers()
        self._absent_since = {i: self._absent_since.get(i, now) for i in missing}
        late = {i for i, since in self._absent_since.items() if now - since > limit_s}
        self._given_up &= late  # one may have joined since
        if late and late == set(missing) and not self.members.present() and not self._run.finished.is_set():
            self._run.fail(
                PeerLost(f"all trainers are lost, and none joined again within cluster.timeout_s ({limit_s:g} s)")
            )
        divided = late if self.members.present() and self.can_divide_data(late) else set()
        for index in sorted(late - self._given_up - divided):
            self._given_up.add(index)
            with self._run.lock:
                self._aggregator.give_up(index)
            text = f"no process took the place of trainer {index} within cluster.timeout_s ({limit_s:g} s)"
            simulations = self._checkpoints.simulations
            if simulations is None or simulations.finished:
                self._monitor.note(f"{text}; what is left of its data is not served")
            elif self._run.error is None:
                # Each simulation waits for it: clients need the addresses of all trainers.
                self._aggregator.stop.request(f"{text}, and simulations send samples to all trainers")
        return divided

    @property
    def saves_alone(self) -> bool:
        """Whether no trainer is left, and what is applied is being saved."""
        return self._staging.saves_alone

    # Other numbers of trainers: see ``TrainerSources``. Called by the main thread.

    @property
    def knows_data(self) -> bool:
        """Whether the run has begun and every trainer has reported its data."""
        with self._run.lock:
            return self.started and self.sources.knows_all

    def can_divide_data(self, lost: Collection[int] = ()) -> bool:
        with self._run.lock:
            return self.knows_data and self.sources.can_divide({*lost, *self._given_up})

    def has_all_buffers(self) -> bool:
        """Whether a checkpoint of now has all that dividing needs, of each trainer.

        Samples that cannot be fetched again are in the buffers only. That of a trainer is missing while it is lost, and
        until the process that took its place has read what had been applied.
        """
        with self._run.lock:
            return self.sources.refetchable or (self.sources.are_read() and not self.missing_trainers())

    def has_room(self, trainers: int) -> bool:
        with self._run.lock:
            return self.sources.has_room(trainers, len(self.members.present()))

    def reconnect(self, reason: str) -> None:
        """Return all processes to the last checkpoint, with new connections: another one could not connect."""
        with self._run.lock:
            ends = self._run.last_decision is not None
        if not ends:
            self._return_to_checkpoint(reason)

    def _return_to_checkpoint(self, reason: str) -> None:
        """Return all processes to the last checkpoint for what is no loss of a trainer, and record it once."""
        with self._run.lock:
            is_first = self._run.error is None
            self._change_generation(reason)
        if is_first:
            self._monitor.add_fault(reason)  # without the lock, if the caller has none: it writes a file

    def _change_generation(self, reason: str) -> None:
        """Return all processes to the last checkpoint, if lost ones start again: this server's session ends."""
        if self._config.cluster.max_restarts == 0:
            self._run.fail(PeerLost(reason))  # no process starts again, so the next session would wait for it in vain
        else:
            self._run.fail(GenerationChanged(f"{reason}; the run returns to its last checkpoint"))

    # The end, where trainers keep a run from it.

    def end_without(self, limit: str, ranks: Sequence[int], also_waiting: bool) -> None:
        """Lose these trainers, which keep a run from ending, and save what is applied if none is left.

        The limit that has passed is for the user: see ``StopLimit.limit_text``. With ``also_waiting`` those that wait
        for a reply of this server are lost too.
        """
        self._ends_without = True
        with self._run.lock:
            waiting = (
                set() if also_waiting else self._joins.parts.keys() | self._quorum.waiting | (self._aggregator.waiting)
            )
        for member in self.members.present():
            if member.index not in waiting and not self._staging.is_in_progress(member.index):
                place = f"did not return from {member.report.place}" if member.report.place else "did not end"
                self.left_behind.append(f"rank {ranks[member.index]} (trainer {member.index}) {place} {limit}")
                self.lose(member, f"it {place} {limit}")
        if not self.members.present() and not self._run.finished.is_set():
            self._staging.save_alone(self._aggregator.stop)
