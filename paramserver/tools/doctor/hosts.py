"""The check between the hosts of a run: the same addresses, interfaces, store and job token as the run would have.

Of each link between two hosts it finds out whether each can connect to the other, how long a message takes, and how
fast it is. One host listens at the address and interface that a run would choose, the other one connects, and then the
other way round. A message is its size (8 bytes) and as many bytes; the answer to it is the time of the listening host.
"""

from __future__ import annotations

import json
import logging
import platform
import secrets
import select
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from paramserver import __version__
from paramserver.cluster import (
    ProcessIdentity,
    bind_listener,
    choose_interface,
    chosen_interface,
    own_address,
    process_environ,
)
from paramserver.cluster.base import list_numbers
from paramserver.cluster.network import list_interfaces
from paramserver.config import Config, is_colocated, mode_of, num_servers_of, world_size_of
from paramserver.devices import num_gpus
from paramserver.distributed.abort_sockets import OpenedSockets
from paramserver.distributed.rendezvous import (
    claim_rank,
    compare_config,
    detect_lost_store,
    enter_attempt,
    host_identity,
    job_store,
    open_store,
    publish_config,
)
from paramserver.distributed.timeouts import poll_until
from paramserver.errors import DeadlineExceeded, UnsupportedConfiguration
from paramserver.platform import num_usable_cores
from paramserver.tools.doctor.diagnosis import Diagnosis, Finding, Subject

T = TypeVar("T")

# One link.

CONNECT_S = 5.0
"""For a connection to be accepted, and for an answer."""

PROBE_S = 15.0
"""For all messages of one direction."""

_ACCEPT_S = CONNECT_S + 2.0
DIRECTION_S = _ACCEPT_S + PROBE_S
"""For one direction of a link, whatever happens."""

TOKEN_BYTES = 16
_NUMBER, _TIME = struct.Struct("!Q"), struct.Struct("!d")
_PINGS = 20
_ZEROS = memoryview(bytes(2**20))
_FIRST_BYTES, _MOST_BYTES, _LONG_ENOUGH_S = 64 * 2**10, 256 * 2**20, 0.2


@dataclass(frozen=True)
class Link:
    """What one host measured towards another; ``error`` is empty if everything arrived.

    Attributes:
        source, target: numbers of the hosts.
        round_trip_s: median of a message without content.
        bytes_per_s: of a long message.
        clock_offset_s: how far the clock of the target is ahead.
        connected: the connection was accepted, and small messages arrived.
    """

    source: int
    target: int
    round_trip_s: float | None = None
    bytes_per_s: float | None = None
    clock_offset_s: float | None = None
    error: str = ""
    connected: bool = False


def rounds(items: Sequence[T]) -> Iterator[list[tuple[T, T]]]:
    """Yield each pair once, in rounds in which no item is in two: the circle method for round-robin tournaments."""
    count = len(items) + len(items) % 2
    order = list(range(count))
    for _ in range(count - 1):
        pairs = ((order[i], order[count - 1 - i]) for i in range(count // 2))
        # Of an odd number, the last one stands for a pause.
        yield [(items[min(pair)], items[max(pair)]) for pair in pairs if max(pair) < len(items)]
        order = [order[0], order[-1], *order[1:-1]]


def measure_link(source: int, target: int, address: tuple[str, int], token: bytes) -> Link:
    """Measure the link to a host that calls ``serve_link`` with this token; both hosts are given by number."""
    give_up_at = time.monotonic() + PROBE_S
    try:
        connection = socket.create_connection(address, timeout=CONNECT_S)
    except OSError as error:
        return Link(source, target, error=_reason(error))
    round_trips: list[tuple[float, float]] = []
    with closing(connection):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token)
            round_trips = [_exchange(connection, 0) for _ in range(_PINGS)]
        except OSError as error:
            return Link(source, target, error=f"accepts a connection and does not answer: {_reason(error)}")
        round_trip_s, offset_s = statistics.median(s for s, _ in round_trips), min(round_trips)[1]
        size, took_s = 0, 0.0
        try:
            while took_s < _LONG_ENOUGH_S and size < _MOST_BYTES and time.monotonic() < give_up_at:
                size = size * 4 or _FIRST_BYTES
                took_s = _exchange(connection, size)[0]
        except OSError as error:
            text = f"small messages arrive, and one of {size // 2**10} KiB does not: {_reason(error)}"
            return Link(source, target, round_trip_s, None, offset_s, text, True)
    return Link(source, target, round_trip_s, size / max(took_s - round_trip_s, 1e-9), offset_s, "", True)


def serve_link(listener: socket.socket, token: bytes) -> bool:
    """Answer the messages of one connection; return whether one with the token came in time."""
    accept_until = time.monotonic() + _ACCEPT_S
    while (left_s := accept_until - time.monotonic()) > 0 and select.select([listener], [], [], left_s)[0]:
        connection, _ = listener.accept()
        with closing(connection):
            connection.settimeout(_ACCEPT_S)  # longer than the other host waits, which reports what failed
            try:
                if _receive(connection, TOKEN_BYTES) != token:
                    continue
                _answer(connection, time.monotonic() + PROBE_S)
            except OSError:
                pass  # the other host reports why
            return True
    return False


def _answer(connection: socket.socket, until: float) -> None:
    buffer = memoryview(bytearray(len(_ZEROS)))
    while time.monotonic() < until and (number := _receive(connection, _NUMBER.size)):
        left = int(_NUMBER.unpack(number)[0])
        if left > _MOST_BYTES:
            return
        while left:
            if not (received := connection.recv_into(buffer[:left])):
                return
            left -= received
        connection.sendall(_TIME.pack(time.time()))


def _exchange(connection: socket.socket, size: int) -> tuple[float, float]:
    """Send a message of so many bytes; return how long the answer took, and how far the other host's clock is ahead."""
    clock, began = time.time(), time.perf_counter()
    connection.sendall(_NUMBER.pack(size))
    for start in range(0, size, len(_ZEROS)):
        connection.sendall(_ZEROS[: size - start])
    answer = _receive(connection, _TIME.size)
    took_s = time.perf_counter() - began
    if not answer:
        raise ConnectionResetError("the connection was closed")
    return took_s, float(_TIME.unpack(answer)[0]) - (clock + took_s / 2)


def _receive(connection: socket.socket, count: int) -> bytes:
    """Return so many bytes; none if the connection ends before."""
    received = b""
    while len(received) < count:
        if not (part := connection.recv(count - len(received))):
            return b""
        received += part
    return received


def _reason(error: OSError) -> str:
    return f"no answer within {CONNECT_S:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)


# All hosts.

_POLL_S = 0.05
# For the other processes to read the result, before rank 0 ends and its store with it.
_READ_S = 10.0
_CLOCKS_AGREE_S = 1.0


@dataclass(frozen=True)
class Participant:
    """One process of the check.

    ``rank`` is the global rank by which it takes part: that of the server, where one command starts both. ``ranks`` are
    all that its command would start. It listens at ``address`` and ``port``, over ``interface``.
    """

    rank: int
    ranks: list[int]
    name: str
    host: str
    address: str
    port: int
    interface: str
    mtu: int
    cores: int
    gpus: int
    versions: dict[str, str]
    findings: list[dict[str, Any]]


@dataclass(frozen=True)
class Host:
    """A host of the run, and the process that measures its links."""

    number: int
    title: str
    leader: Participant
    ranks: list[int]


def check_hosts(found: Diagnosis, config: Config, identity: ProcessIdentity) -> bool:
    """Meet the other processes, measure the links between hosts, and bring all results to rank 0.

    On rank 0, what all have found is added to ``found``. Return whether the result is complete in this process: on rank
    0.

    Raises:
        DeadlineExceeded: rank 0 cannot be reached, or does not answer in time.
        PeerLost: rank 0 is gone.
        UnsupportedConfiguration: another process has this rank, or rank 0 another job token.
    """
    timeout_s = config.cluster.timeout_s
    with ExitStack() as stack, detect_lost_store():
        interrupted = threading.Event()  # never set: Ctrl-C raises in the main thread
        if identity.global_rank == 0:
            print(f"waiting up to {timeout_s:g} s for all {identity.world_size} ranks", file=sys.stderr, flush=True)
        base = open_store(identity, timeout_s, time.monotonic() + timeout_s, interrupted, None, OpenedSockets(), stack)
        attempt = enter_attempt(base, identity)
        store = job_store(base, replace(attempt, job=f"{attempt.job}/doctor"))
        meeting = _Meeting(store, timeout_s)
        claim_rank(store, identity, replaces=False)
        if identity.global_rank == 0:
            publish_config(store, config, identity)
        else:
            try:
                compare_config(store, config, identity, timeout_s)
            except UnsupportedConfiguration as error:
                found.refusal(error)
            except DeadlineExceeded as late:  # the first message that does not fit into one packet
                raise DeadlineExceeded(
                    f"{late}, although rank 0 answered: large messages do not reach this host, as if the path had a "
                    "smaller MTU than the interfaces"
                ) from late
        choose_interface(process_environ(), config.cluster.interface, identity.master_addr)
        interface = chosen_interface(process_environ())
        address = own_address(identity.master_addr, interface)
        listener = stack.enter_context(closing(bind_listener(address, 0)))
        own = _introduce(found, config, identity, interface or "", listener)
        store.set(f"participant/{own.rank}", json.dumps(asdict(own)))
        if identity.global_rank == 0:
            _gather(found, config, identity, meeting)
        participants = [Participant(**one) for one in json.loads(meeting.get("participants", 2 * timeout_s))]
        hosts = group_hosts(participants)
        schedule = [[(a, b) for a, b in one if exchanges(config, a.ranks, b.ranks)] for one in rounds(hosts)]
        token = bytes.fromhex(meeting.get("token", timeout_s))
        links = []
        for number, pairs in enumerate(schedule):
            for pair in pairs:
                if own.rank in (one.leader.rank for one in pair):
                    links += _measure(meeting, number, pair, own.rank, listener, token)
        store.set(f"links/{own.rank}", json.dumps([asdict(link) for link in links]))
        limit_s = timeout_s + 2 * DIRECTION_S * len(schedule)
        if identity.global_rank:
            found.findings += [Finding(**one) for one in json.loads(meeting.get("result", limit_s))]
            store.set(f"read/{own.rank}", "")
            return False
        for host in hosts:
            try:
                received = json.loads(meeting.get(f"links/{host.leader.rank}", limit_s))
                links += [] if host.leader.rank == own.rank else [Link(**one) for one in received]
            except DeadlineExceeded as late:
                found.problem(f"{host.title}: {late}", "look for the error of the process that was started there")
        conclude(found, config, hosts, participants, links)
        store.set("result", json.dumps([asdict(one) for one in found.findings]))
        for one in participants[1:]:
            meeting.has(f"read/{one.rank}", _READ_S)
        return True


class _Meeting:
    """Waits for keys of a store that all processes share."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self.store, self.timeout_s = store, timeout_s

    def has(self, key: str, limit_s: float) -> bool:
        """Return whether ``key`` is set within ``limit_s``."""
        check: Callable[[], bool | None] = lambda: True if self.store.check([key]) else None  # noqa: E731
        return poll_until(time.monotonic() + limit_s, check, threading.Event(), _POLL_S) is not None

    def get(self, key: str, limit_s: float) -> str:
        """Return the value of ``key``.

        Raises:
            DeadlineExceeded: it is not set within ``limit_s``.
        """
        if not self.has(key, limit_s):
            raise DeadlineExceeded(f"no {key.partition('/')[0]} came within {limit_s:g} s")
        value: bytes = self.store.get(key)
        return value.decode()


def ranks_of_command(config: Config, global_rank: int) -> list[int]:
    """Return the ranks that the command of a rank starts: with ``cluster.colocate``, the server and the trainer."""
    servers = num_servers_of(config)
    return [global_rank, global_rank + servers] if is_colocated(config) and global_rank < servers else [global_rank]


def group_hosts(participants: Sequence[Participant]) -> list[Host]:
    """Return the hosts of the participants, in the order of their lowest ranks. Equal names get a number."""
    groups: dict[str, list[Participant]] = {}
    for one in participants:
        groups.setdefault(one.host, []).append(one)
    names = [group[0].name for group in groups.values()]
    return [
        Host(
            number,
            group[0].name if names.count(group[0].name) == 1 else f"{group[0].name} ({group[0].address})",
            group[0],
            [rank for one in group for rank in one.ranks],
        )
        for number, group in enumerate(groups.values())
    ]


def exchanges(config: Config, first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether ranks of two hosts exchange messages in a run: with servers, only if one of them is a server."""
    return not mode_of(config).has_servers or min(*first, *second) < num_servers_of(config)


def _introduce(
    found: Diagnosis, config: Config, identity: ProcessIdentity, interface: str, listener: socket.socket
) -> Participant:
    address, port = listener.getsockname()[:2]
    return Participant(
        rank=identity.global_rank,
        ranks=ranks_of_command(config, identity.global_rank),
        name=socket.gethostname(),
        host=host_identity(),
        address=address,
        port=port,
        interface=interface,
        mtu=next((one.mtu for one in list_interfaces() if one.name == interface), 0),
        cores=num_usable_cores(),
        gpus=num_gpus(),
        versions={"torch": str(torch.__version__), "paramserver": __version__, "Python": platform.python_version()},
        findings=[asdict(one) for one in found.findings],
    )


def _gather(found: Diagnosis, config: Config, identity: ProcessIdentity, meeting: _Meeting) -> None:
    """On rank 0: wait for the others, and publish who is there."""
    ranks = range(world_size_of(config))
    started_by_others = {other for rank in ranks for other in ranks_of_command(config, rank)[1:]}
    give_up_at = time.monotonic() + meeting.timeout_s
    there, missing = [], []
    for rank in sorted({*ranks} - started_by_others):
        if meeting.has(f"participant/{rank}", max(0.0, give_up_at - time.monotonic())):
            there.append(json.loads(meeting.store.get(f"participant/{rank}")))
        else:
            missing.append(rank)
    if missing:
        found.problem(
            f"{identity.name(*missing)} did not arrive within cluster.timeout_s ({meeting.timeout_s:g} s)",
            "start this command on every host, as the run; the error of a rank that did start is in its own output",
        )
    meeting.store.set("token", secrets.token_hex(TOKEN_BYTES))
    meeting.store.set("participants", json.dumps(there))


def _measure(
    meeting: _Meeting, number: int, pair: tuple[Host, Host], own: int, listener: socket.socket, token: bytes
) -> list[Link]:
    """Measure both directions of a link, one after the other; return what this process measured."""
    measured: list[Link] = []
    for source, target in (pair, pair[::-1]):
        peer = target if source.leader.rank == own else source
        key = f"ready/{number}/{source.number}"
        meeting.store.set(f"{key}/{own}", "")
        if not meeting.has(f"{key}/{peer.leader.rank}", meeting.timeout_s):
            text = f"its check did not begin within {meeting.timeout_s:g} s"
            return [*measured, Link(source.number, target.number, error=text)]
        if source.leader.rank == own:
            address = target.leader.address, target.leader.port
            measured.append(measure_link(source.number, target.number, address, token))
        elif not serve_link(listener, token):
            logging.getLogger("paramserver").info("no connection came from %s", source.title)
    return measured


def conclude(
    found: Diagnosis,
    config: Config,
    hosts: Sequence[Host],
    participants: Sequence[Participant],
    links: Sequence[Link],
) -> None:
    """Add what the hosts and links show: facts, and problems with their cures."""
    if len(hosts) > 1:
        own = len(participants[0].findings)
        found.findings[:own] = [replace(one, host=hosts[0].title) for one in found.findings[:own]]
    titles = {rank: host.title for host in hosts for rank in host.ranks}
    for one in participants[1:]:
        title = titles[one.rank] if len(hosts) > 1 else ""
        sent = [Finding(**{**finding, "host": title}) for finding in one.findings]
        found.findings += [finding for finding in sent if finding not in found.findings]
    _compare_versions(found, participants, titles)
    subject = Subject("hosts")
    found.subjects.insert(0, subject)
    servers = set(range(num_servers_of(config)))
    for host in hosts:
        where = f"{host.leader.address} on {host.leader.interface or '?'}, MTU {host.leader.mtu}"
        ranks = list_numbers(host.ranks)
        has = f"{host.leader.cores} cores, {host.leader.gpus} GPUs"
        how = ""
        if servers and set(host.ranks) - servers:
            together = config.server.shares_memory and servers <= set(host.ranks)
            messages = "TCP" if config.server.connects else "RPC"
            how = f"; trainers use {'shared memory' if together else messages}"
            if config.server.must_share_memory and not together:
                found.problem(
                    f"server.transport (shared_memory) must have all ranks on one host, and the trainers of "
                    f"{host.title} are not on that of the servers",
                    "use auto, tcp or rpc",
                )
        subject.add(host.title, f"rank {ranks}; {where}; {has}{how}", {**asdict(host.leader), "ranks": host.ranks})
    if len({host.leader.mtu for host in hosts}) > 1:
        found.note(
            "the interfaces of the hosts have different MTUs: " + ", ".join(f"{h.title} {h.leader.mtu}" for h in hosts),
            "set the same MTU on all, or large messages may be lost or slow",
        )
    if len(hosts) > 1:
        _describe_links(found, hosts, links)


def _compare_versions(found: Diagnosis, participants: Sequence[Participant], titles: dict[int, str]) -> None:
    first = participants[0]
    seen = set()
    for one in participants[1:]:
        for name, version in one.versions.items():
            if version != first.versions[name] and (one.host, name) not in seen:
                seen.add((one.host, name))
                found.problem(
                    f"{titles[one.rank]} has {name} {version}, and rank 0 has {first.versions[name]}",
                    "install the same versions on all hosts",
                )


def _describe_links(found: Diagnosis, hosts: Sequence[Host], links: Sequence[Link]) -> None:
    subject = Subject("links")
    found.subjects.insert(1, subject)
    reached = {(link.source, link.target) for link in links if link.connected}
    for link in sorted(links, key=lambda one: (one.source, one.target)):
        source, target = hosts[link.source], hosts[link.target]
        name = f"{source.title} -> {target.title}"
        where = target.title
        where += "" if target.leader.address in where else f" at {target.leader.address}"
        if link.connected and link.error:
            found.problem(
                f"from {source.title} to {where}: {link.error}",
                f"the path has a smaller MTU than the interfaces ({source.leader.mtu} and {target.leader.mtu}); lower "
                "theirs, or let ICMP pass",
            )
        elif link.error:
            back = (link.target, link.source) in reached
            found.problem(
                f"{source.title} cannot connect to {where}: {link.error}"
                + (f", while {target.title} reaches {source.title}" if back else ""),
                f"{'a firewall lets connections pass in one direction; ' if back else ''}let TCP pass between them on "
                "all ports above 1023, or set cluster.interface to the network that connects them",
            )
        if link.bytes_per_s is not None and link.round_trip_s is not None:
            speed = f"{link.bytes_per_s / 1e6:.0f} MB/s, round trip {link.round_trip_s * 1e3:.2f} ms"
        else:
            speed = "not measured" if link.connected else "no connection"
        subject.add(name, speed, asdict(link))
        offset_s = link.clock_offset_s
        if offset_s is not None and link.source < link.target and abs(offset_s) > _CLOCKS_AGREE_S:
            ahead = "ahead of" if offset_s > 0 else "behind"
            found.note(
                f"the clock of {target.title} is {abs(offset_s):.1f} s {ahead} that of {source.title}: times in logs "
                "and records do not agree",
                "synchronize the clocks (chrony, ntpd)",
            )
