"""Rendezvous of the ranks of a run: a store on rank 0, one process per rank, one configuration, a full world."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from paramserver.cluster import (
    ProcessIdentity,
    bind_listener,
    chosen_interface,
    host_and_port,
    is_loopback,
    process_environ,
)
from paramserver.config import (
    Config,
    config_from_mapping,
    differences,
    dump_yaml,
    num_servers_of,
    read_dumped,
    with_trainers,
)
from paramserver.config.deadlines import FROZEN_S
from paramserver.distributed.abort_sockets import OpenedSockets
from paramserver.distributed.remote_error import RemoteError
from paramserver.distributed.resize import OVER, ResizeRequest, has_left, refusal, send_request
from paramserver.distributed.store_relay import (
    CURE,
    NoStore,
    StoreGuard,
    StoreTunnel,
    asks_for_token,
    disable_name_lookups,
)
from paramserver.distributed.timeouts import call_with_timeout, poll_until
from paramserver.errors import (
    DeadlineExceeded,
    Evicted,
    Interrupted,
    MissingRanks,
    PeerLost,
    RunEnded,
    Unreachable,
    UnsupportedConfiguration,
)
from paramserver.platform import host_number, start_ticks

log = logging.getLogger("paramserver")

# How often rank 0 looks for the others.
_POLL_S = 0.02
_QUIET_S = 2.0  # after which a process prints what it waits for

# A store answers a ping within this time, or is asked again.
_ANSWER_S = 1.0

_FAILED = "failed"
_UNREACHABLE = "unreachable"
# Rank 0 alone decides that the world is full: a rank that a later attempt waits for may have a holder that is dead.
_FULL = "full"

# Keys that may differ between the ranks of a run: where each one finds its own devices, interfaces and folders.
_OWN_KEYS = (
    "device.",
    "logging.run_dir",
    "logging.progress",
    "cluster.master_",
    "cluster.interface",
    "cluster.token_file",
)


def host_identity() -> str:
    """Return what two processes share if they run on one host and in one network namespace."""
    return f"{socket.gethostname()}/{host_number()}"


class _LaterAttempt(Exception):  # noqa: N818 - not a failure
    """Ranks have started again, and wait for this one in a later attempt."""


class LeftRun(Exception):  # noqa: N818 - not a failure
    """This process left the run at its own request."""


@dataclass(frozen=True)
class Rendezvous:
    """A key-value store that all ranks of the run share. :func:`join_rendezvous` returns it."""

    store: Store  # with the prefix of this run
    identity: ProcessIdentity
    timeout_s: float
    host: str
    generation: int = 1
    base: Store | None = None  # the store without the prefix
    # Global ranks of the trainers of this generation, in the order of their indices.
    trainer_ranks: tuple[int, ...] = ()
    # Of this rank's connection to the store; their end ends a wait for a key.
    sockets: OpenedSockets = field(default_factory=OpenedSockets)

    @property
    def host_and_pid(self) -> str:
        """Host and process id of this rank, for messages."""
        return _host_and_pid()

    @property
    def root(self) -> Store:
        """The store of the job; see ``job_store``."""
        assert self.base is not None
        return job_store(self.base, self.identity)

    def set(self, key: str, value: str) -> None:
        """Set ``key``.

        Raises:
            PeerLost: rank 0 is gone.
        """
        with detect_lost_store():
            self.store.set(key, value)

    def get(self, key: str) -> str:
        """Return the value of ``key``; waits until a rank sets it.

        Raises:
            DeadlineExceeded: no rank set it within ``timeout_s``.
            PeerLost: rank 0 is gone.
        """
        with detect_lost_store():
            return _get(self.store, key, self.timeout_s, f"the store's answer for {key}")

    def set_first(self, key: str, value: str) -> str:
        """Set ``key`` unless a rank has set it; return the value that it has then: that of the first rank.

        Raises:
            DeadlineExceeded: the store did not answer within ``timeout_s``.
            PeerLost: rank 0 is gone.
        """
        with detect_lost_store():
            limit_s = self.timeout_s + FROZEN_S
            what = f"the store's answer for {key}"
            held: bytes = call_with_timeout(limit_s, what, lambda: self.store.compare_set(key, "", value))
        return held.decode()

    @property
    def _run_of_launch(self) -> str:
        return f"paramserver/{self.identity.launch}/run"

    def earlier_run(self) -> str | None:
        """Return the run of an earlier attempt of the launcher (``ProcessIdentity.launch``); None in the first one."""
        if self.base is None or not self.identity.launch or not self.base.check([self._run_of_launch]):
            return None
        return _get(self.base, self._run_of_launch, self.timeout_s, "the run of the earlier attempt")

    def record_run(self, name: str) -> None:
        """Record the run of this attempt, for the next attempts of the launcher."""
        if self.base is not None and self.identity.launch:
            self.base.set(self._run_of_launch, name)

    def holder_of_rank(self, global_rank: int) -> str:
        """Return host and process id of a rank that has joined."""
        return self.get(f"rank/{global_rank}")

    def replaced(self, processes: Mapping[int, str]) -> list[int]:
        """Return the trainers' ranks that other processes hold than ``processes``, which has host and process id."""
        return [r for r in self.trainer_ranks if r in processes and self.holder_of_rank(r) != processes[r]]

    def release_rank(self, global_rank: int, holder: str) -> None:
        """Let another process join as this rank, whose process ``holder`` is lost."""
        # Only if it still has the rank: another one, or itself, may have joined meanwhile.
        self.store.compare_set(f"rank/{global_rank}", holder, "")

    def request_leave(self) -> str:
        """Ask rank 0 to let the run continue without this trainer; return the key of the request."""
        with detect_lost_store():
            return send_request(self.root, ResizeRequest("leave", self.identity.global_rank))

    def refused(self, request: str) -> str | None:
        """Return why rank 0 refused the request of that key; nothing if it did not."""
        with detect_lost_store():
            return refusal(self.root, request)

    def claim_again(self) -> None:
        """Claim this rank again, once the servers have accepted this process."""
        self.set(f"rank/{self.identity.global_rank}", self.host_and_pid)

    def report_failure(self, failure: RemoteError) -> None:
        """Report why this rank failed, when it cannot reach the server over RPC."""
        try:
            self.set(_FAILED, f"{failure.kind} {failure.message}")
        except PeerLost as loss:
            log.warning("%s; it was not informed of a failure here", str(loss))

    def report_unreachable(self, error: Unreachable) -> None:
        """Report that a server accepts no connection of this rank, so that all make new ones.

        Raises:
            PeerLost: rank 0 is gone.
        """
        self.set(_UNREACHABLE, str(error))

    def unreachable(self) -> str | None:
        """Return why a rank could not connect in this generation, if one reported that."""
        return self.get(_UNREACHABLE) if self.store.check([_UNREACHABLE]) else None

    def reported_failure(self) -> RemoteError | None:
        if not self.store.check([_FAILED]):
            return None
        kind, _, message = self.get(_FAILED).partition(" ")
        return RemoteError(kind, message)


def join_rendezvous(
    config: Config,
    identity: ProcessIdentity,
    interrupted: threading.Event,
    listener: socket.socket | None = None,
    *,
    generation: int = 1,
    store: Store | None = None,
    replaces: bool = False,
    resources: ExitStack | None = None,
    trainer_ranks: Sequence[int] | None = None,
    newcomers: Collection[int] = (),
    joins: bool = False,
) -> Rendezvous:
    """Open the store, compare the configuration with rank 0's, claim this rank, and wait for all ranks.

    In a later generation than the first the run continues without trainers that do not come back in time.

    Args:
        config: this rank's; keys that may differ between hosts are not compared.
        listener: on rank 0, the socket for the store if it is bound already.
        generation: on rank 0, the generation that begins; elsewhere, the first that this rank may join.
        store: on rank 0, that of an earlier generation.
        replaces: an earlier process of this rank is dead.
        resources: receives what has to be closed after the last use of the store. Required with a token.
        trainer_ranks: on rank 0, the trainers of the generation that begins, if it is a later one than the first.
        newcomers: on rank 0, those of them that have asked to join. They are waited for ``server.lost_after_s`` only.
        joins: a trainer of a running job, which asks to join it if it takes no part.

    Raises:
        LeftRun: the generation has begun that this process asked to leave before.
        Evicted: the run continues without this rank.
        UnsupportedConfiguration: the port is taken, the rank is taken, the configurations differ, or rank 0 has another
            job token.
        DeadlineExceeded: rank 0 cannot be reached, or ranks are missing, within ``cluster.timeout_s``.
        PeerLost: rank 0 ended meanwhile.
        RunEnded: the run ends, which this process asked to join.
    """
    timeout_s = config.cluster.timeout_s
    deadline = time.monotonic() + timeout_s
    sockets = OpenedSockets()
    # Rank 0 keeps its store as long as its process lives. The others connect anew: it may be another process.
    base = store if identity.global_rank == 0 and store is not None else None
    base = base or open_store(identity, timeout_s, deadline, interrupted, listener, sockets, resources)
    with detect_lost_store():
        while True:
            attempt = _Attempt(base, enter_attempt(base, identity), config, interrupted)
            try:
                if identity.global_rank == 0:
                    generation, ranks = attempt.begin(generation, trainer_ranks, newcomers)
                else:
                    generation, ranks = attempt.join(generation, replaces, joins)
                break
            except _LaterAttempt:
                log.info("other ranks have started again; this rank waits for them anew")
    prefixed = _in_generation(base, attempt.identity, generation)
    return Rendezvous(prefixed, attempt.identity, timeout_s, host_identity(), generation, base, ranks, sockets)


def enter_attempt(base: Store, identity: ProcessIdentity) -> ProcessIdentity:
    """Return the identity in the latest attempt of a launcher whose store outlives its ranks; else ``identity``.

    An attempt is at least one later than the one in which an earlier process of this rank was. The restarts that the
    launcher counts are no such number: agents of several hosts may differ in them.
    """
    if not identity.launch:
        return identity
    latest, own = _attempt_key(identity), f"{_attempt_key(identity)}/{identity.global_rank}"
    # The process id alone may be that of the earlier process: a container reuses its few ids.
    number, process = 0, f"{_host_and_pid()}, start {start_ticks(os.getpid())}"
    if base.check([own]):
        last, _, holder = base.get(own).decode().partition(" ")
        number = int(last) + (holder != process)
    # compare_set is atomic: another rank may raise the number meanwhile.
    while (held := int(base.compare_set(latest, "", str(number)))) < number:
        base.compare_set(latest, str(held), str(number))
    base.set(own, f"{held} {process}")
    return replace(identity, job=f"{identity.job}-{held}")


def _attempt_key(identity: ProcessIdentity) -> str:
    return f"paramserver/{identity.launch}/attempt"


def job_store(base: Store, identity: ProcessIdentity) -> Store:
    """Return the store of the job, which keeps its keys from one generation to the next."""
    return PrefixStore(f"paramserver/{identity.job}", base)


def _in_generation(base: Store, identity: ProcessIdentity, generation: int) -> Store:
    """Return the store of a generation. Nothing of an earlier generation can be taken for something of this one."""
    return PrefixStore(f"paramserver/{identity.job}/{generation}", base)


@dataclass
class _Attempt:
    """One attempt of the rank ``identity`` to take part: rank 0 begins a generation, the others join it."""

    base: Store
    identity: ProcessIdentity
    config: Config
    interrupted: threading.Event

    def __post_init__(self) -> None:
        self.root = job_store(self.base, self.identity)
        self.timeout_s = self.config.cluster.timeout_s
        self.servers = num_servers_of(self.config)

    def _check_latest(self) -> None:
        """Raise ``_LaterAttempt`` if this attempt is no longer the latest."""
        identity = self.identity
        if identity.launch and identity.job.rpartition("-")[2] != self.base.get(_attempt_key(identity)).decode():
            raise _LaterAttempt

    def begin(
        self, generation: int, trainer_ranks: Sequence[int] | None, newcomers: Collection[int]
    ) -> tuple[int, tuple[int, ...]]:
        """On rank 0: begin a generation, and wait for all ranks; return it, and the trainers that take part in it."""
        config, identity, servers = self.config, self.identity, self.servers
        ranks = tuple(range(servers, identity.world_size) if trainer_ranks is None else trainer_ranks)
        continues = trainer_ranks is not None and config.server.on_loss != "fail" and config.simulations is None
        while True:
            store = _in_generation(self.base, identity, generation)
            store.set("trainers", json.dumps(ranks))
            publish_config(store, config, identity)
            claim_rank(store, identity, replaces=False)
            self.root.set("view", str(generation))
            late = self._wait_for_ranks(store, [*range(1, servers), *ranks], newcomers)
            if not late:
                self._check_latest()
                store.set(_FULL, "")
                return generation, ranks
            # Trainers that are late are left out, in another generation: those that have joined this one wait for all
            # of it. A server cannot be left out, and of the first trainers none where the run does not continue without
            # one.
            remaining = tuple(r for r in ranks if r not in late)
            if not remaining or not (continues or set(late) <= set(newcomers)) or min(late) < servers:
                raise self._missing_ranks(late)
            log.warning("the run continues without %s, which did not join in time", identity.name(*late))
            generation, ranks = generation + 1, remaining

    def _wait_for_ranks(self, store: Store, missing: list[int], newcomers: Collection[int]) -> list[int]:
        """Wait until the ``missing`` ranks have joined the generation of ``store``; return those that are late.

        Newcomers are late after ``server.lost_after_s``, as the others wait for them; all ranks after
        ``cluster.timeout_s``.

        Raises:
            Interrupted: while ranks are missing.
        """
        timeout_s, began = self.timeout_s, time.monotonic()
        noted_at = began + _QUIET_S
        while missing:
            self._check_latest()
            missing = [r for r in missing if not store.check([f"rank/{r}"])]
            # All that are missing, or the newcomers among them, which have the shorter limit.
            waited_s = time.monotonic() - began
            late = missing if waited_s >= timeout_s else []
            if waited_s >= self.config.server.lost_after_s:
                late = late or [r for r in missing if r in newcomers]
            is_interrupted = self.interrupted.wait(_POLL_S if missing and not late else 0.0)
            if missing and is_interrupted:
                raise Interrupted("interrupted while waiting for the other ranks")
            if late:
                return late
            if missing and time.monotonic() >= noted_at:
                log.info("waiting up to %g s for %s", timeout_s, self.identity.name(*missing))
                noted_at = math.inf
        return []

    def join(self, generation: int, replaces: bool, joins: bool) -> tuple[int, tuple[int, ...]]:
        """Join the first generation from ``generation`` on, or ask to join a later one; return it, and its trainers."""
        identity, servers, timeout_s = self.identity, self.servers, self.timeout_s
        rank, request = identity.global_rank, None
        while True:
            try:
                generation = self._wait_for_generation(generation, request)
            except Interrupted:
                if request is not None:
                    self.root.delete_key(request)
                raise
            store = _in_generation(self.base, identity, generation)
            # Compare before claiming: a rank that is refused can be started again with the right configuration.
            ranks = tuple(json.loads(_get(store, "trainers", timeout_s, "the list of trainers")))
            same_world = generation == 1 and not joins
            compare_config(store, self.config, identity, timeout_s, None if same_world else len(ranks))
            if rank < servers or rank in ranks:
                claim_rank(store, identity, replaces)
                everyone = [*range(servers), *ranks]
                if self._wait_for_world(store, generation, everyone):
                    return generation, ranks
            elif has_left(self.root, rank):
                raise LeftRun
            elif not joins:
                raise Evicted(f"{identity.name()} takes no part in the run any more, which continues without it")
            else:
                request = send_request(self.root, ResizeRequest("join", rank))
            generation += 1

    def _wait_for_generation(self, first: int, request: str | None) -> int:
        """Return the servers' generation once it is at least ``first``, unless they refuse ``request``, a key."""
        store, identity, timeout_s = self.root, self.identity, self.timeout_s

        def current() -> int | None:
            self._check_latest()
            if identity.launch and not store.check(["view"]):
                return None  # rank 0 may begin it in a later attempt
            if request is not None and (reason := refusal(store, request)):
                raise RunEnded(reason) if reason == OVER else UnsupportedConfiguration(reason)
            try:
                generation = int(_get(store, "view", timeout_s, "the start of rank 0"))
            except DeadlineExceeded as error:
                where = host_and_port(identity.master_addr, identity.master_port)
                raise MissingRanks(
                    f"{error}; the store at {where} answers, and may be that of another run: start {identity.name(0)}, "
                    "or correct --master_addr and --master_port"
                ) from error
            return generation if generation >= first else None

        generation = poll_until(time.monotonic() + timeout_s, current, self.interrupted)
        if generation is not None:
            return generation
        if self.interrupted.is_set():
            raise Interrupted("interrupted while waiting for rank 0")
        again = " again" if first > 1 else ""
        raise MissingRanks(
            f"{identity.name(0)} did not start{again} within cluster.timeout_s ({timeout_s:g} s); look for its own "
            "error in its log, logs/rank-0.log of the run, and raise cluster.timeout_s if it was still starting"
        )

    def _wait_for_world(self, store: Store, generation: int, ranks: Sequence[int]) -> bool:
        """Wait until all ``ranks`` have joined once; return False if a later generation begins meanwhile."""

        def joined() -> bool | None:
            self._check_latest()
            if int(self.root.get("view")) > generation:
                return False
            return True if store.check([_FULL]) else None

        # Rank 0, which may continue without some, waits for ``timeout_s``.
        all_joined = poll_until(time.monotonic() + self.timeout_s + FROZEN_S, joined, self.interrupted)
        if all_joined is not None:
            return all_joined
        if self.interrupted.is_set():
            raise Interrupted("interrupted while waiting for the other ranks")
        missing = [r for r in ranks if not store.check([f"rank/{r}"])]
        raise self._missing_ranks(missing or [0])

    def _missing_ranks(self, missing: Sequence[int]) -> MissingRanks:
        identity, fewer = self.identity, "lower --world_size"
        if identity.servers is not None:
            kinds = {"server" if rank < identity.servers else "trainer" for rank in missing}
            fewer = f"correct {' and '.join(f'--num_{kind}s' for kind in sorted(kinds))}"
        return MissingRanks(
            f"{identity.name()} waited cluster.timeout_s ({self.timeout_s:g} s) for a world of {identity.world_size}; "
            f"missing: {identity.name(*missing)}. Start them, or {fewer}"
        )


@contextmanager
def connect_to_job(identity: ProcessIdentity, limit_s: float) -> Iterator[tuple[Store, list[int]]]:
    """Connect to the store of a running job; yield it, and the global ranks of the job's trainers.

    The rank of ``identity`` is not used.

    Raises:
        DeadlineExceeded: rank 0 cannot be reached.
        UnsupportedConfiguration: rank 0 has another job token.
    """
    with _connect_to_generation(identity, limit_s) as (base, generation):
        ranks = _get(generation, "trainers", limit_s, "the list of trainers")
        yield job_store(base, identity), json.loads(ranks)


def fetch_config(identity: ProcessIdentity, limit_s: float) -> str:
    """Return the config of rank 0, as YAML; waits for rank 0 to start.

    Raises:
        DeadlineExceeded: rank 0 cannot be reached.
        UnsupportedConfiguration: rank 0 has another job token.
    """
    with _connect_to_generation(identity, limit_s) as (_, generation):
        return _get(generation, "config", limit_s, "rank 0's configuration")


@contextmanager
def _connect_to_generation(identity: ProcessIdentity, limit_s: float) -> Iterator[tuple[Store, Store]]:
    """Connect to rank 0; yield its store, and that of the present generation."""
    deadline = time.monotonic() + limit_s
    with ExitStack() as resources, detect_lost_store():
        base = open_store(identity, limit_s, deadline, threading.Event(), None, OpenedSockets(), resources)
        attempt = enter_attempt(base, identity)
        generation = int(_get(job_store(base, attempt), "view", limit_s, "the start of rank 0"))
        yield base, _in_generation(base, attempt, generation)


def open_store(
    identity: ProcessIdentity,
    timeout_s: float,
    deadline: float,
    interrupted: threading.Event,
    listener: socket.socket | None,
    sockets: OpenedSockets,
    resources: ExitStack | None,
) -> Store:
    """Connect to the store of rank 0, which rank 0 itself opens first.

    ``timeout_s`` is that of later calls of the store; rank 0 must answer until ``deadline`` (``time.monotonic()``).
    ``resources``, which are required with a token, receive what has to be closed after the last use of the store.

    Raises:
        DeadlineExceeded: rank 0 cannot be reached.
        UnsupportedConfiguration: the port is taken, or rank 0 has another job token.
    """
    host, port, token = identity.master_addr, identity.master_port, identity.token
    where = host_and_port(host, port)
    limit = timedelta(seconds=timeout_s)
    disable_name_lookups()
    if identity.global_rank == 0 and not identity.store_is_hosted:
        if listener is None:
            _wait_for_own_name(host, timeout_s, deadline, interrupted)
            listener = bind_listener(host, port, chosen_interface(process_environ()))
        if token is None:
            if not is_loopback(host):
                log.warning("%s is open to all that reach it, as there is no job token; %s", host, CURE)
            own = listener
        else:
            host, own = "127.0.0.1", bind_listener("127.0.0.1", 0)
        port = own.getsockname()[1]
        # With a listener of ours TCPStore is reachable at its address only; otherwise it listens on all interfaces.
        with sockets.record():
            store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=own.detach()
            )
        if token is not None:
            assert resources is not None
            resources.enter_context(closing(StoreGuard(listener, port, token)))
        return store

    reach: Callable[[], bool | None] = partial(_reachable, host, port)
    if token is not None:
        assert resources is not None
        tunnel = resources.enter_context(closing(StoreTunnel(host, port, token, identity.global_rank)))
        reach = lambda: tunnel.prove(max(deadline - time.monotonic(), _POLL_S))  # noqa: E731
    try:
        reached = poll_until(min(deadline, time.monotonic() + _QUIET_S), reach, interrupted)
        if reached is None and not interrupted.is_set():
            log.info("waiting up to %g s for %s at %s", timeout_s, identity.name(0), where)
            reached = poll_until(deadline, reach, interrupted)
    except NoStore as other:
        raise UnsupportedConfiguration(
            f"{identity.name()} found no {identity.name(0)} at {where}: {other}; correct --master_addr and "
            "--master_port, or give rank 0 a port that nothing else uses"
        ) from other
    if reached is None:
        if interrupted.is_set():
            raise Interrupted("interrupted while waiting for rank 0")
        raise MissingRanks(
            f"{identity.name()} found no {identity.name(0)} at {where} within cluster.timeout_s ({timeout_s:g} s)"
            f"{why_unknown(host) or _why_silent(host, port)}; start {identity.name(0)}, or correct --master_addr and "
            "--master_port"
        )
    if not reached:
        raise UnsupportedConfiguration(
            f"{identity.name()} has no job token, and {identity.name(0)} at {where} asks for it; {CURE}"
        )
    if token is not None:
        host, port = "127.0.0.1", tunnel.port
    remaining_s = max(deadline - time.monotonic(), 1.0)
    # TCPStore's own timeout does not cover this: docs/torch-notes.md, "TCPStore and a frozen host".
    with sockets.record():
        return call_with_timeout(
            remaining_s,
            f"the connection to rank 0 at {where}",
            lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit),
            interrupted,
        )


def _wait_for_own_name(host: str, timeout_s: float, deadline: float, interrupted: threading.Event) -> None:
    """Wait on rank 0 until ``host`` has an address: a cluster may publish the name of a container after its start."""
    known = lambda: not why_unknown(host) or None  # noqa: E731
    if poll_until(min(deadline, time.monotonic() + _QUIET_S), known, interrupted) is None:
        log.info("waiting up to %g s for the address of rank 0%s", timeout_s, why_unknown(host))
        poll_until(deadline, known, interrupted)
    if interrupted.is_set():
        raise Interrupted("interrupted while waiting for the address of rank 0")


def _reachable(host: str, port: int) -> bool | None:
    """Return whether a store is there that asks for no token; None if nothing answers.

    Raises:
        NoStore: another service answers.
    """
    try:
        with socket.create_connection((host, port), timeout=_ANSWER_S) as connection:
            return not asks_for_token(connection)
    except NoStore:
        raise
    except OSError:
        return None


def _why_silent(host: str, port: int) -> str:
    """Return that something listens there that does not answer; nothing if none does."""
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except ConnectionResetError:
        pass  # accepted, and ended before the call returned
    except OSError:
        return ""
    return (
        ": what listens there does not answer as a store does; it is frozen, or rank 0 has died and its "
        "supervisor keeps the port (see logs/rank-0.log of the run), or it is another service"
    )


def why_unknown(host: str) -> str:
    """Return that and why the name of rank 0 is not known here; nothing if it is known."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f": the name {host} is not known here ({error.strerror or error})"
    return ""


@contextmanager
def detect_lost_store() -> Iterator[None]:
    """Translate the error of a store whose process is gone into ``PeerLost``."""
    try:
        yield
    except DistNetworkError as error:
        raise PeerLost(
            f"rank 0 is gone, and its store with it ({str(error).splitlines()[0]}); look for its own error"
        ) from error


def _get(store: Store, key: str, timeout_s: float, what: str) -> str:
    try:
        value: bytes = call_with_timeout(timeout_s + FROZEN_S, what, lambda: store.get(key))
    except DistStoreError as error:
        raise DeadlineExceeded(f"{what} did not come within cluster.timeout_s ({timeout_s:g} s)") from error
    return value.decode()


def publish_config(store: Store, config: Config, identity: ProcessIdentity) -> None:
    """Set on rank 0 what ``compare_config`` reads on the others."""
    store.set("job_step", identity.job_step)
    store.set("config", dump_yaml(config))


def compare_config(
    store: Store, config: Config, identity: ProcessIdentity, timeout_s: float, trainers: int | None = None
) -> None:
    """Compare with the configuration that rank 0 has put into the store.

    In a later generation than the first, rank 0 decides how many trainers there are, whatever number both have.

    Raises:
        UnsupportedConfiguration: keys differ that may not differ between hosts, or rank 0 is that of another run.
    """
    config_of_zero = config_from_mapping(read_dumped(_get(store, "config", timeout_s, "rank 0's configuration")))
    job_step = _get(store, "job_step", timeout_s, "rank 0's job step")
    # A rank without one, which was started by hand, may replace a lost one.
    if job_step and identity.job_step not in ("", job_step):
        where = host_and_port(identity.master_addr, identity.master_port)
        raise UnsupportedConfiguration(
            f"{identity.name()} is of {identity.job_step}, and {identity.name(0)} at {where} of {job_step}; give each "
            "run its own --master_port"
        )
    both = [one if trainers is None else with_trainers(one, trainers) for one in (config_of_zero, config)]
    lines = [line for line in differences(*both) if not line.startswith(_OWN_KEYS)]
    if lines:
        raise UnsupportedConfiguration(
            f"{identity.name()} has another configuration than {identity.name(0)} ({'; '.join(lines)}); "
            "start all ranks with the same one"
        )


def claim_rank(store: Store, identity: ProcessIdentity, replaces: bool) -> None:
    """Enter this process as the holder of its rank.

    Raises:
        UnsupportedConfiguration: another process has the rank.
    """
    if replaces:
        store.set(f"rank/{identity.global_rank}", _host_and_pid())
        return
    # compare_set is atomic: of two processes with the same rank, one sees the other's value.
    holder = store.compare_set(f"rank/{identity.global_rank}", "", _host_and_pid()).decode()
    if holder != _host_and_pid():
        raise UnsupportedConfiguration(
            f"{identity.name()} is taken by {holder}; give each process its own "
            f"{'--rank' if identity.servers is None else '--index'}"
        )


def _host_and_pid() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"
