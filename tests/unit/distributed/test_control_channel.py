"""How the links of a run are made: who is let in, who is not, and where rank 0 listens meanwhile."""

import logging
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from paramserver.cluster import ProcessIdentity
from paramserver.config import ClusterConfig, Config, ServerConfig
from paramserver.distributed import control_channel as star_module
from paramserver.distributed.control_channel import Handshake, connect_ranks
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.distributed.rpc_calls import host_identity
from paramserver.errors import DeadlineExceeded, PeerLost

HOST = "127.0.0.1"
LONG_S = 20.0
TOKEN = bytes(range(16))
CONFIG = Config(
    task="module:Task", cluster=ClusterConfig(interface="lo"), server=ServerConfig(heartbeat_s=0.05, lost_after_s=0.5)
)


def hello(rank, token=TOKEN):
    return token + struct.pack("!I", rank)


def met(store, rank, world_size, timeout_s=LONG_S):
    identity = ProcessIdentity(rank, world_size, rank, world_size, 0, HOST, 29500, False, "test", "flags")
    return Rendezvous(store, identity, timeout_s, host_identity())


@pytest.fixture
def door():
    with socket.create_server((HOST, 0)) as listener:
        visitors = []

        def visit(*words):
            visitor = socket.create_connection(listener.getsockname(), timeout=LONG_S)
            visitors.append(visitor)
            for said in words:
                visitor.sendall(said)
            return visitor

        yield listener, visit
        for visitor in visitors:
            visitor.close()


def test_strangers_are_refused_and_keep_nobody_out(door, caplog):
    listener, visit = door
    silent = visit()
    gone = visit(hello(1)[:7])
    gone.close()
    refused = [visit(hello(1, bytes(16))), visit(b"GET / HTTP/1.1\r\n\r\n....."), visit(hello(9)), visit(hello(0))]
    guest = visit(hello(1)[:3])
    again = visit(hello(2), b"first words")
    twice = visit(hello(2))
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1, "peer-") as pool:
        with Handshake(listener, TOKEN, {1, 2}) as reception:
            later = pool.submit(reception.receive, LONG_S)
            guest.sendall(hello(1)[3:])
            found = later.result(LONG_S)
        assert sorted(found) == [1, 2]
        assert found[2].recv(99) == b"first words"
        assert found[1].getpeername() == guest.getsockname()
        assert found[2].getpeername() == again.getsockname()
        for stranger in (silent, *refused, twice):
            assert stranger_is_out(stranger)
    for connection in found.values():
        connection.close()
    assert "somebody who does not belong to this run was refused" in caplog.text


def stranger_is_out(stranger):
    stranger.settimeout(LONG_S)
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_does_not_come_is_named(door):
    listener, visit = door
    visit(hello(2))
    with Handshake(listener, TOKEN, {1, 2, 3}) as reception, pytest.raises(DeadlineExceeded, match="rank 1, 3 did not"):
        reception.receive(0.3)


def test_ranks_are_linked_to_rank_zero_and_nobody_else_is_let_in():
    store, missed = HashStore(), []

    def other(rank):
        with connect_ranks(met(store, rank, 3), CONFIG, lambda: missed.append(rank)) as links:
            assert links.peers == (0,)
            links.attend(True)
            links.send(0, rank, bytes([rank] * 3))
            kind = links.receive().kind
            links.leave()
            return kind

    with ThreadPoolExecutor(2, "peer-") as pool:
        answers = [pool.submit(other, rank) for rank in (1, 2)]
        with connect_ranks(met(store, 0, 3), CONFIG, lambda: missed.append(0)) as links:
            host, port, token = store.get("star").decode().split()
            assert (host, len(bytes.fromhex(token))) == (HOST, 16)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, int(port)), timeout=LONG_S)
            found = [links.receive() for _ in range(2)]
            assert sorted((m.peer, m.kind, m.body.tolist()) for m in found) == [(1, 1, [1] * 3), (2, 2, [2] * 3)]
            links.await_loss(1.2)  # for longer than lost_after_s, in which there are only signs of life
            for rank in links.peers:
                links.send(rank, 9)
            assert [answer.result(LONG_S) for answer in answers] == [9, 9]
    assert missed == []


def test_a_rank_zero_that_is_not_there_is_told(monkeypatch):
    store = HashStore()
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    store.set(star_module._KEY, f"{HOST} {port} {TOKEN.hex()}")
    with (
        pytest.raises(PeerLost, match=f"rank 0 cannot be reached at {HOST}:{port}"),
        connect_ranks(met(store, 1, 2), CONFIG, print),
    ):
        pass
