"""How ranks connect to rank 0: which connections are accepted, which are refused, and where rank 0 listens."""

import logging
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
from torch._C._distributed_c10d import HashStore

from paramserver.cluster import ProcessIdentity
from paramserver.config import ClusterConfig, Config, ServerConfig
from paramserver.distributed import control_channel
from paramserver.distributed.control_channel import accept_ranks, connect_ranks
from paramserver.distributed.remote_error import RemoteError
from paramserver.distributed.rendezvous import Rendezvous, host_identity
from paramserver.errors import DeadlineExceeded, Interrupted, PeerLost, PeerRefused, UnsupportedConfiguration

HOST = "127.0.0.1"
LONG_S = 20.0
NEVER = threading.Event()
TOKEN = bytes(range(16))
CONFIG = Config(task="module:Task", cluster=ClusterConfig(interface="lo"), server=ServerConfig(lost_after_s=0.5))


def hello(rank, token=TOKEN):
    return token + struct.pack("!I", rank)


def joined(store, rank, world_size, timeout_s=LONG_S):
    identity = ProcessIdentity(rank, world_size, rank, world_size, 0, HOST, 29500, False, "test", "flags")
    return Rendezvous(store, identity, timeout_s, host_identity())


@pytest.fixture
def listening():
    with socket.create_server((HOST, 0)) as listener:
        connections = []

        def connect(*sent):
            connection = socket.create_connection(listener.getsockname(), timeout=LONG_S)
            connections.append(connection)
            for data in sent:
                connection.sendall(data)
            return connection

        yield listener, connect
        for connection in connections:
            connection.close()


def test_unauthenticated_connections_are_refused_and_keep_no_rank_out(listening, caplog):
    listener, connect = listening
    silent = connect()
    gone = connect(hello(1)[:7])
    gone.close()
    refused = [
        connect(hello(1, bytes(16))),
        connect(b"GET / HTTP/1.1\r\n\r\n....."),
        connect(hello(9)),
        connect(hello(0)),
    ]
    rank_one = connect(hello(1)[:3])
    rank_two = connect(hello(2), b"first message")
    twice = connect(hello(2))
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1, "peer-") as pool:
        later = pool.submit(lambda: dict(accept_ranks(listener, TOKEN, {1, 2}, LONG_S)))
        rank_one.sendall(hello(1)[3:])
        found = later.result(LONG_S)
        assert sorted(found) == [1, 2]
        assert found[2].recv(99) == b"first message"
        assert found[1].getpeername() == rank_one.getsockname()
        assert found[2].getpeername() == rank_two.getsockname()
        for other in (silent, *refused, twice):
            assert is_closed(other)
    for connection in found.values():
        connection.close()
    assert "refused a connection that does not belong to this run" in caplog.text


def is_closed(connection):
    connection.settimeout(LONG_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def close_all(accepted):
    for _, connection in accepted:
        connection.close()


def test_missing_ranks_are_named(listening):
    listener, connect = listening
    connect(hello(2))
    with pytest.raises(DeadlineExceeded, match="rank 1, 3 did not"):
        close_all(accept_ranks(listener, TOKEN, {1, 2, 3}, 0.3))


def test_rank_zero_does_not_wait_for_a_rank_that_has_failed():
    store = HashStore()
    error = UnsupportedConfiguration("logging.run_dir (/x) must be a folder")
    joined(store, 1, 2).report_failure(RemoteError.reported_by("rank 1", error))
    with pytest.raises(PeerRefused, match=r"^rank 1 failed: UnsupportedConfiguration: logging.run_dir \(/x\) must be"):
        connect_ranks(joined(store, 0, 2), CONFIG, print, NEVER).__enter__()


def test_ranks_connect_to_rank_zero_and_its_listener_closes():
    store, lost = HashStore(), []

    def other(rank):
        with connect_ranks(joined(store, rank, 3), CONFIG, lambda: lost.append(rank), NEVER) as channel:
            assert channel.peers == (0,)
            channel.send(0, rank, bytes([rank] * 3))
            kind = channel.receive().kind
            channel.leave()
            return kind

    with ThreadPoolExecutor(2, "peer-") as pool:
        answers = [pool.submit(other, rank) for rank in (1, 2)]
        with connect_ranks(joined(store, 0, 3), CONFIG, lambda: lost.append(0), NEVER) as channel:
            host, port, token = store.get("control-channel").decode().split()
            assert (host, len(bytes.fromhex(token))) == (HOST, 16)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, int(port)), timeout=LONG_S)
            found = [channel.receive() for _ in range(2)]
            assert sorted((m.peer, m.kind, m.body.tolist()) for m in found) == [(1, 1, [1] * 3), (2, 2, [2] * 3)]
            channel.wait_loss(1.2)  # for longer than lost_after_s, in which there are only heartbeats
            for rank in channel.peers:
                channel.send(rank, 9)
            assert [answer.result(LONG_S) for answer in answers] == [9, 9]
    assert lost == []


def test_the_limit_that_has_passed_in_one_rank_reaches_all_with_its_reason():
    """Between two ranks that are not rank 0, through that."""
    store, told, all_listen = HashStore(), SimpleQueue(), threading.Barrier(3, timeout=LONG_S)

    def rank_of_three(rank):
        with connect_ranks(joined(store, rank, 3), CONFIG, lambda: None, NEVER) as channel:
            arrived = threading.Event()
            channel.on_over = lambda *over: (told.put((rank, *over)), arrived.set())
            all_listen.wait()
            if rank == 1:
                channel.send_over("signal SIGTERM", "before a second signal")
            assert arrived.wait(LONG_S)
            channel.leave()

    with ThreadPoolExecutor(3, "peer-") as pool:
        for done in [pool.submit(rank_of_three, rank) for rank in range(3)]:
            done.result(LONG_S)
    over = ("signal SIGTERM", "before a second signal")
    assert {told.get() for _ in range(told.qsize())} == {(rank, *over) for rank in range(3)}  # rank 0 may be told twice


def joining(store, rank, timeout_s=LONG_S, interrupted=NEVER):
    """Connect as ``rank`` of three; return what it raised, and the seconds that it took."""
    began = time.monotonic()
    try:
        with connect_ranks(joined(store, rank, 3, timeout_s), CONFIG, lambda: None, interrupted) as channel:
            channel.leave()
    except (PeerLost, DeadlineExceeded, Interrupted) as error:
        return str(error), time.monotonic() - began
    return None, time.monotonic() - began


def test_a_rank_that_waits_for_a_later_one_is_kept_alive():
    store = HashStore()
    with ThreadPoolExecutor(3, "peer-") as pool:
        early = [pool.submit(joining, store, rank) for rank in (0, 1)]
        store.get("control-channel")
        time.sleep(2.5 * CONFIG.server.lost_after_s)  # rank 2 starts so much later
        assert joining(store, 2)[0] is None
        for one in early:
            error, seconds = one.result(LONG_S)
            assert error is None
            assert seconds > 2 * CONFIG.server.lost_after_s


def test_a_rank_that_never_connects_is_named_by_all():
    store = HashStore()
    with ThreadPoolExecutor(2, "peer-") as pool:
        zero, one = pool.submit(joining, store, 0, 1.0), pool.submit(joining, store, 1)
        assert zero.result(LONG_S)[0] == "rank 2 did not connect to rank 0 within cluster.timeout_s (1 s)"
        assert one.result(LONG_S)[0].startswith(
            "rank 2 is lost: it did not connect to rank 0 within cluster.timeout_s (1 s)"
        )


def test_a_rank_that_dies_while_others_are_missing_is_named_at_once():
    store = HashStore()
    with ThreadPoolExecutor(1, "peer-") as pool:
        zero = pool.submit(joining, store, 0)
        host, port, token = store.get("control-channel").decode().split()
        with socket.create_connection((host, int(port)), timeout=LONG_S) as dying:
            dying.sendall(hello(1, bytes.fromhex(token)))
            assert dying.recv(1)  # its first heartbeat: it is accepted
        error, seconds = zero.result(LONG_S)
        assert error.startswith("rank 1 is lost: its connection was closed")
        assert seconds < LONG_S / 4


def test_a_signal_ends_the_wait_for_ranks_that_are_missing():
    store, interrupted = HashStore(), threading.Event()
    with ThreadPoolExecutor(2, "peer-") as pool:
        zero, one = pool.submit(joining, store, 0, LONG_S, interrupted), pool.submit(joining, store, 1)
        store.get("control-channel")
        interrupted.set()
        assert zero.result(LONG_S)[0] == "interrupted while waiting for the other ranks"
        assert one.result(LONG_S)[1] < LONG_S / 4


def test_an_unreachable_rank_zero_is_reported(monkeypatch):
    store = HashStore()
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    store.set(control_channel._KEY, f"{HOST} {port} {TOKEN.hex()}")
    with (
        pytest.raises(PeerLost, match=f"rank 0 cannot be reached at {HOST}:{port}"),
        connect_ranks(joined(store, 1, 2), CONFIG, print, NEVER),
    ):
        pass
