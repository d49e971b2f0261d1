"""The first server's hand over the others: who owns what, orders to all of them, and one answer when all have."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from paramserver.config import Config
from paramserver.consistency import Decision, Update
from paramserver.context import StopRequest
from paramserver.distributed import rpc_calls
from paramserver.distributed.membership import Member, Members, watch_peer
from paramserver.distributed.rpc_calls import RemoteError
from paramserver.errors import ParamserverError, PeerLost
from paramserver.optim.parallel_step import is_elementwise
from paramserver.parameters.numerics import check_norm
from paramserver.parameters.sharding import States, merge_state, plan_shards, split_state
from paramserver.server.parameter_store import ParameterStore
from paramserver.transport.messages import ApplyRequest, Future, Push, ShardAssignment, union

_log = logging.getLogger("paramserver")

# As in torch.nn.utils.clip_grad_norm_.
_TINY = 1e-6


class CollectedState:
    """The state of optimizer and schedule, from all servers."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


class ShardCoordinator:
    """Deals the parameters to all servers and keeps them at one version. Its own part is that of server 0.

    It waits for nobody: what follows an answer is called when the answer is there, under the lock of its owner, which
    covers all other calls too.

    Args:
        config: the run's.
        versions: of everything; only the first shard stays in the hands of its optimizer.
        lock: the owner's.
        stop: a signal to a server is passed on to it.
        step: the version that the run begins with.
        segments: gives where the memory of this server is, and its key; None where it is not shared.
        fail: ends the run with an error.
        all_here: called when the last server is ready.
    """

    def __init__(
        self,
        config: Config,
        versions: ParameterStore,
        lock: threading.RLock,
        stop: StopRequest,
        step: int,
        segments: Callable[[], tuple[str | None, str]],
        fail: Callable[[ParamserverError], None],
        all_here: Callable[[], None],
    ) -> None:
        self.config = config
        self.servers = config.cluster.num_servers
        self.shares_memory = True
        self._versions = versions
        self._lock = lock
        self._stop = stop
        self._step = step
        self._segments = segments
        self._fail = fail
        self._all_here = all_here
        self._members = Members()
        self._ready: set[int] = set()
        self._over = False
        self._deal()

    def _deal(self) -> None:
        versions, layout = self._versions, self._versions.parameters.layout
        optimizer, numbers, states = versions.updater.optimizer, versions.portion.numbers, versions.portion.states
        self.shards = plan_shards(layout, self.servers, is_elementwise(optimizer, self.servers))
        self._numbers = numbers
        parts = [split_state(states, numbers, layout, shard) for shard in self.shards]
        self._states = dict(enumerate(parts[1:], 1))
        dealt = {number for part in parts for number in part}
        versions.own(self.shards[0])
        versions.portion.adopt(parts[0] | {n: s for n, s in states.items() if n not in dealt})

    # A server's life.

    @property
    def complete(self) -> bool:
        return len(self._ready) == self.servers - 1

    def enroll(self, member: Member) -> ShardAssignment:
        """Take a server in, and give it its share."""
        index = member.trainer_index
        with self._lock:
            self._members.join(member)
            layout, shard = self._versions.parameters.layout, self.shards[index]
            weights = shard.copies_of(self._versions.parameters.flats)
            given = ShardAssignment(shard, layout, weights, self._states.pop(index), self._step, *self._segments())
        watch_peer(member.name, lambda reason: self._gone(member, reason))
        return given

    def ready(self, server_index: int, shares_memory: bool) -> None:
        """A server holds its share, in the memory of this one or in its own."""
        with self._lock:
            self._ready.add(server_index)
            self.shares_memory = self.shares_memory and shares_memory
        if self.complete:
            self._all_here()

    def beat(self, server_index: int) -> None:
        self._members.beat(server_index)

    def ask_to_stop(self, reason: str) -> None:
        """A server got a signal."""
        self._stop.request(reason)

    def give_up(self, server_index: int, told: RemoteError) -> None:
        """A server failed, and says why; so the run fails."""
        self._members.leave(server_index)
        self._fail(told.error())

    def missing(self) -> list[int]:
        """Servers that are not ready yet."""
        return [index for index in range(1, self.servers) if index not in self._ready]

    def look_for_silent(self) -> None:
        silence_s = self.config.server.lost_after_s
        for member in self._members.silent(silence_s):
            self._fail(PeerLost(f"{member} is lost: no heartbeat for server.lost_after_s ({silence_s:g} s)"))
            self._members.say_goodbye(member.trainer_index)  # it will say none

    def _gone(self, member: Member, reason: str | None) -> None:
        self._members.say_goodbye(member.trainer_index)
        if not member.left:
            self._fail(PeerLost(f"{member} is lost: {reason or 'it ended before this one did'}"))

    def dismiss(self, outcome: Decision | ParamserverError | None, timeout_s: float) -> None:
        """Tell all servers that the run is over, and wait until they have gone."""
        error = outcome if isinstance(outcome, ParamserverError) else PeerLost("server 0 ended the run")
        told = outcome if isinstance(outcome, Decision) else RemoteError.of(error)
        for member in self._members.here():
            self._members.leave(member.trainer_index)
            try:
                rpc_calls.send(member.name, "finish", told, timeout_s=timeout_s)
            except RuntimeError as error:  # it ended before
                _log.warning("%s could not be told that the run is over: %s", member, error)
        self._over = True
        self._members.await_goodbyes(timeout_s)

    # Versions.

    def update(
        self,
        version: int,
        update: Update,
        pushes: Sequence[Push],
        shared: Sequence[bool],
        needed: Iterable[int],
        then: Callable[[], None],
    ) -> None:
        """Have every server make the next version of its shard; ``then`` comes when all have.

        Args:
            version: its number.
            update, pushes: as for ``ParameterStore.apply``.
            shared: which gradients lie in shared memory.
            needed: versions that may still be pulled from servers.
            then: what follows.
        """
        portion, clip = self._versions.portion, self.config.training.clip_grad_norm
        named = tuple((p.report.trainer_index, p.report.version, s) for p, s in zip(pushes, shared, strict=True))
        groups = portion.groups() if clip is None else None
        used = union([push.report.used for push in pushes])
        factors = tuple(self._versions.factors(update))
        order = ApplyRequest(version, named, factors, used, groups, frozenset(needed))
        asked = [rpc_calls.send_later(name, "apply", order) for name in self._names]
        self._versions.prepare(update, pushes)

        def made(_: Sequence[Any]) -> None:
            self._versions.updater.stepped()
            self._versions.conclude(update, pushes)
            then()

        if clip is None:
            portion.step()
            self._await(asked, made)
        else:
            self._await(asked, lambda norms: self._clip(version, clip, norms, made))

    def _clip(self, version: int, most: float, norms: Sequence[float], then: Callable[[Sequence[Any]], None]) -> None:
        """The second half of an update, when every server knows the norm of its gradients."""
        portion = self._versions.portion
        total = sum(norm**2 for norm in [portion.norm(), *norms]) ** 0.5
        check_norm(total, version)
        factor = min(most / (total + _TINY), 1.0)
        asked = [self._send(name, "commit", factor, portion.groups()) for name in self._names]
        portion.scale(factor)
        portion.step()
        self._await(asked, then)

    def gather(self, then: Callable[[dict[str, Any]], None]) -> None:
        """Bring together what belongs to a checkpoint: weights into the model, states into what ``then`` gets.

        Nobody may make a version meanwhile.
        """
        asked = [self._send(name, "gather", not self.shares_memory) for name in self._names]
        self._await(asked, lambda parts: then(self._gathered(parts)))

    def _gathered(self, parts: Sequence[tuple[list[torch.Tensor] | None, States]]) -> dict[str, Any]:
        versions = self._versions
        for shard, (weights, _) in zip(self.shards[1:], parts, strict=True):
            for mine, theirs in zip(
                shard.ranges_of(versions.parameters.flats), weights or (), strict=weights is not None
            ):
                mine.copy_(theirs)
        own = versions.portion.states
        every: list[tuple[Any, Mapping[int, Mapping[str, Any]]]] = [(self.shards[0], own)]
        every += [(shard, states) for shard, (_, states) in zip(self.shards[1:], parts, strict=True)]
        joined = merge_state(every, self._numbers, versions.parameters.layout)
        state = versions.updater.state_dict()
        state["optimizer"] = {**state["optimizer"], "state": dict(sorted(({**own, **joined}).items()))}
        return state

    # Calls.

    @property
    def _names(self) -> list[str]:
        return [self._members.get(index).name for index in range(1, self.servers)]

    def _send(self, name: str, method: str, *args: Any) -> Future:
        return rpc_calls.send(name, method, *args, timeout_s=self.config.cluster.timeout_s)

    def _await(self, asked: list[Future], then: Callable[[list[Any]], None]) -> None:
        """Go on with the answers of all; what one of them fails with ends the run."""
        torch.futures.collect_all(asked).add_done_callback(lambda _: self._answered(asked, then))

    def _answered(self, asked: list[Future], then: Callable[[list[Any]], None]) -> None:
        try:
            with self._lock:
                if self._over:
                    return
                # The first error comes before the answers of others.
                values = [self._value(index, future) for index, future in enumerate(asked, 1) if future.done()]
                assert len(values) == len(asked), "what is not there yet follows an error, which was raised"
                then(values)
        except ParamserverError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - it ends the run and travels to every trainer
            self._fail(RemoteError.of(error).error())

    def _value(self, index: int, future: Future) -> Any:
        try:
            value = future.value()
        except RuntimeError as error:
            raise PeerLost(f"{self._members.get(index)} is lost: {str(error).splitlines()[0]}") from error
        if isinstance(value, RemoteError):
            raise value.error()
        return value

    def end(self) -> None:
        """The run has failed: answers that are still to come mean nothing."""
        self._over = True
