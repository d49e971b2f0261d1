"""The guard of rank 0's store and the tunnels to it, over real sockets and a real TCPStore on the loopback."""

import logging
import socket
import struct
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from paramserver.cluster import bind_listener
from paramserver.cluster.network import JobToken
from paramserver.distributed import store_relay
from paramserver.distributed.store_relay import StoreGuard, StoreTunnel, asks_for_token
from paramserver.distributed.timeouts import poll_until
from paramserver.errors import UnsupportedConfiguration

HOST = "127.0.0.1"
LONG_S = 60.0
SECRET = b"the token of these tests"
TOKEN = JobToken("PARAMSERVER_TOKEN", SECRET)
OTHER = JobToken("cluster.token_file (elsewhere)", b"another token, just as long")


@contextmanager
def store(port=0):
    listener = bind_listener(HOST, port)
    port = listener.getsockname()[1]
    yield TCPStore(
        HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=LONG_S),
        master_listen_fd=listener.detach(),
    )


def client(port):
    return TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LONG_S))


class Guarded:
    """A store behind a guard."""

    def __init__(self, stack, token=TOKEN):
        self.stack = stack
        self.store = stack.enter_context(store())
        stack.callback(setattr, self, "store", None)  # closes it
        listener = bind_listener(HOST, 0)
        self.port = listener.getsockname()[1]
        self.guard = stack.enter_context(closing(StoreGuard(listener, self.store.port, token)))

    def connect(self):
        return self.stack.enter_context(socket.create_connection((HOST, self.port), timeout=LONG_S))

    def tunnel(self, token=TOKEN, rank=1, port=None):
        return self.stack.enter_context(closing(StoreTunnel(HOST, port or self.port, token, rank)))


@pytest.fixture
def guarded():
    with ExitStack() as stack:
        yield Guarded(stack)
    assert [thread for thread in threading.enumerate() if thread.name == "store-relay"] == []


def receive(connection, size):
    data = b""
    while len(data) < size and (chunk := connection.recv(size - len(data))):
        data += chunk
    return data


def ends(connection):
    """Whether the other side ends the connection without sending anything more."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def challenge(connection):
    connection.sendall(store_relay.PING)
    received = receive(connection, len(store_relay._MAGIC) + 32)
    assert received.startswith(store_relay._MAGIC)
    return received


def test_the_right_token_opens_the_store(guarded):
    tunnel = guarded.tunnel()
    assert tunnel.prove() is True
    mine = client(tunnel.port)
    mine.set("of rank 1", "a" * 1_000_000)
    assert guarded.store.get("of rank 1") == b"a" * 1_000_000
    second = mine.clone()  # a connection of its own
    guarded.store.set("of rank 0", "b")
    assert (second.get("of rank 0"), mine.get("of rank 0")) == (b"b", b"b")


def test_a_wait_ends_with_the_connection_to_rank_zero(guarded):
    tunnel = guarded.tunnel()
    assert tunnel.prove()
    mine = client(tunnel.port)
    mine.set("joined", "yes")
    guarded.guard.close()
    with pytest.raises(RuntimeError):
        mine.get("never set")


def test_another_token_is_refused_with_rank_source_and_cure(guarded, caplog):
    with pytest.raises(UnsupportedConfiguration) as refused:
        guarded.tunnel(OTHER, rank=3).prove()
    assert str(refused.value) == (
        f"rank 3 has another job token, from cluster.token_file (elsewhere), than rank 0 at 127.0.0.1:{guarded.port}; "
        "give all ranks the same one, by cluster.token_file or PARAMSERVER_TOKEN"
    )
    # It is logged after the answer.
    poll_until(time.monotonic() + LONG_S, lambda: caplog.text or None, threading.Event())
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("refused a connection to the store: 127.0.0.1: rank 3 has another job token; give all")


def test_strangers_do_not_hide_a_rank_with_another_token(guarded, caplog):
    for _ in range(store_relay._MAX_REFUSALS_LOGGED + 1):
        with socket.create_connection((HOST, guarded.port), timeout=LONG_S) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert ends(stranger)
    with pytest.raises(UnsupportedConfiguration):
        guarded.tunnel(OTHER, rank=3).prove()
    poll_until(time.monotonic() + LONG_S, lambda: "rank 3" in caplog.text or None, threading.Event())
    texts = [record.getMessage() for record in caplog.records]
    assert texts[-1].startswith("refused a connection to the store: 127.0.0.1: rank 3 has another job token")
    assert len(texts) == store_relay._MAX_EQUAL_REFUSALS_LOGGED + 1


def test_nothing_shows_the_token(guarded, caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(UnsupportedConfiguration) as refused:
        guarded.tunnel(OTHER).prove()
    shown = caplog.text + str(refused.value) + repr(refused.value) + repr(TOKEN) + repr(OTHER) + str(OTHER)
    for secret in (SECRET, OTHER.secret):
        assert secret.decode() not in shown
        assert secret.hex() not in shown


def test_a_store_without_a_token_is_named_at_once():
    with ExitStack() as stack:
        plain = stack.enter_context(store())
        tunnel = stack.enter_context(closing(StoreTunnel(HOST, plain.port, TOKEN, 2)))
        with pytest.raises(
            UnsupportedConfiguration, match=r"^rank 2 has a job token, from PARAMSERVER_TOKEN, and rank 0"
        ):
            tunnel.prove()


def test_a_probe_tells_a_guarded_store_from_an_open_one(guarded):
    with socket.create_connection((HOST, guarded.store.port), timeout=LONG_S) as plain:
        assert asks_for_token(plain) is False
    assert asks_for_token(guarded.connect()) is True


def test_a_rank_zero_that_is_missing_or_silent_can_be_tried_again(guarded, monkeypatch):
    with bind_listener(HOST, 0) as silent:
        tunnel = guarded.tunnel(port=silent.getsockname()[1])
        monkeypatch.setattr(store_relay, "_PROOF_S", 0.2)
        assert tunnel.prove() is None
    assert tunnel.prove() is None  # nothing listens there now


def test_a_client_of_torch_begins_with_the_ping():
    """What ``_PING_START`` is copied from; a store that asks for no token answers it (the test above)."""
    with bind_listener(HOST, 0) as listener:
        received = []

        def answer():
            with listener.accept()[0] as near:
                near.settimeout(LONG_S)
                received.append(receive(near, len(store_relay.PING)))
                near.sendall(received[0][-len(store_relay.PING_NONCE) :])

        thread = threading.Thread(target=answer)
        thread.start()
        client(listener.getsockname()[1])
        thread.join(LONG_S)
    assert received[0].startswith(store_relay._PING_START)
    assert len(received[0]) == len(store_relay.PING)


def test_a_store_client_without_a_token_gets_nothing(guarded):
    guarded.store.set("secret", "x")
    connection = guarded.connect()
    # VALIDATE and PING, as every client of TCPStore, then a GET of the key.
    get = b"\x03" + struct.pack("<Q", 6) + b"secret"
    connection.sendall(store_relay._PING_START + b"abcd" + get.ljust(4 + 32 + 32, b"\0"))
    answer = receive(connection, 1000)
    assert answer.startswith(store_relay._MAGIC)
    assert answer[len(store_relay._MAGIC) + 32 :] == store_relay._REFUSED


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"\0\xce\xf7\x85<\x01", b"\xff"])
def test_garbage_ends_the_connection_at_once(guarded, garbage, caplog):
    connection = guarded.connect()
    started = time.monotonic()
    connection.sendall(garbage)
    assert ends(connection)
    assert time.monotonic() - started < store_relay._PROOF_S
    assert "it is no rank of a run" in caplog.text


def test_a_slow_client_is_cut_off(guarded, monkeypatch, caplog):
    monkeypatch.setattr(store_relay, "_PROOF_S", 0.3)
    connection = guarded.connect()
    connection.sendall(store_relay.PING[:3])
    assert ends(connection)
    assert "it proved no job token within 0.3 s" in caplog.text


def test_a_recorded_conversation_proves_nothing(guarded, caplog):
    """What a right rank sent is sent again; then what rank 0 sent is sent again to a right rank."""
    with bind_listener(HOST, 0) as spy:
        recorded = {}

        def relay_one():
            near = spy.accept()[0]
            with near, socket.create_connection((HOST, guarded.port), timeout=LONG_S) as far:
                near.settimeout(LONG_S)
                ping = receive(near, len(store_relay.PING))
                far.sendall(ping)
                asked = receive(far, len(store_relay._MAGIC) + 32)
                near.sendall(asked)
                answer = receive(near, 4 + 32 + 32)
                far.sendall(answer)
                admitted = receive(far, 32)
                near.sendall(admitted)
                recorded.update(rank=(ping, answer), zero=(asked, admitted))

        thread = threading.Thread(target=relay_one)
        thread.start()
        tunnel = guarded.tunnel(port=spy.getsockname()[1])
        assert tunnel.prove() is True  # the conversation that is recorded is a valid one
        thread.join(LONG_S)

        ping, answer = recorded["rank"]
        again = guarded.connect()
        again.sendall(ping)
        assert receive(again, len(store_relay._MAGIC) + 32) != recorded["zero"][0]
        again.sendall(answer)
        assert receive(again, 33) == store_relay._REFUSED
        assert "rank 1 has another job token" in caplog.text

        def replay_zero():
            with spy.accept()[0] as near:
                near.settimeout(LONG_S)
                receive(near, len(store_relay.PING))
                near.sendall(recorded["zero"][0])
                receive(near, 4 + 32 + 32)
                near.sendall(recorded["zero"][1])

        thread = threading.Thread(target=replay_zero)
        thread.start()
        with pytest.raises(UnsupportedConfiguration, match=r"^rank 1 has another job token"):
            tunnel.prove()
        thread.join(LONG_S)


def test_a_proof_is_not_valid_for_the_other_side(guarded):
    """A program without the token cannot have rank 0 or a rank compute the proof that it needs."""
    connection = guarded.connect()
    asked = challenge(connection)
    answer = store_relay._ANSWER.pack(1, bytes(32))
    connection.sendall(answer + TOKEN.sign("admits", asked + answer))
    assert receive(connection, 33) == store_relay._REFUSED

    with bind_listener(HOST, 0) as false_zero:

        def reflect():
            with false_zero.accept()[0] as near:
                near.settimeout(LONG_S)
                receive(near, len(store_relay.PING))
                near.sendall(store_relay._MAGIC + bytes(32))
                near.sendall(receive(near, 4 + 32 + 32)[-32:])

        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(UnsupportedConfiguration, match="has another job token"):
            guarded.tunnel(port=false_zero.getsockname()[1]).prove()
        thread.join(LONG_S)


def test_a_changed_rank_invalidates_the_proof(guarded):
    connection = guarded.connect()
    asked = challenge(connection)
    proof = TOKEN.sign("joins", asked + store_relay._ANSWER.pack(1, bytes(32)))
    connection.sendall(store_relay._ANSWER.pack(0, bytes(32)) + proof)
    assert receive(connection, 33) == store_relay._REFUSED


def test_200_silent_connections_keep_no_rank_out(guarded):
    silent = [guarded.connect() for _ in range(200)]
    tunnel = guarded.tunnel()
    started = time.monotonic()
    assert tunnel.prove()
    client(tunnel.port).set("a", "b")
    assert guarded.store.get("a") == b"b"
    assert time.monotonic() - started < store_relay._PROOF_S
    assert len(silent) == 200


def test_of_too_many_silent_connections_the_oldest_ends(guarded, monkeypatch):
    monkeypatch.setattr(store_relay, "_MAX_UNPROVED", 3)
    first = guarded.connect()
    challenge(first)  # it has been accepted
    rest = [guarded.connect() for _ in range(3)]
    assert ends(first)
    for connection in rest:
        assert challenge(connection)


def test_another_process_cannot_use_the_tunnel(guarded, caplog, monkeypatch):
    tunnel = guarded.tunnel()
    assert tunnel.prove()
    monkeypatch.setattr(store_relay, "is_own_connection", lambda accepted: False)
    with socket.create_connection((HOST, tunnel.port), timeout=LONG_S) as stranger:
        assert ends(stranger)
    assert "it is from another process of this host" in caplog.text


def test_refusals_are_logged_a_limited_number_of_times(guarded, monkeypatch, caplog):
    monkeypatch.setattr(store_relay, "_MAX_REFUSALS_LOGGED", 2)
    for _ in range(5):
        connection = guarded.connect()
        connection.sendall(b"garbage")
        assert ends(connection)
    assert len(caplog.records) == 2


def test_closing_ends_all_connections(guarded):
    tunnel = guarded.tunnel()
    assert tunnel.prove()
    mine = client(tunnel.port)
    mine.set("a", "b")
    unproved = guarded.connect()
    challenge(unproved)
    guarded.guard.close()
    tunnel.close()
    assert ends(unproved)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, guarded.port), timeout=LONG_S)


def test_a_listener_that_is_shared_serves_the_next_rank_zero(guarded):
    """The supervisor keeps the listener: what connects while no rank 0 lives is served by the next one."""
    with bind_listener(HOST, 0) as kept:
        first = StoreGuard(kept.dup(), guarded.store.port, TOKEN)
        first.close()
        tunnel = guarded.tunnel(port=kept.getsockname()[1])
        waiting = threading.Thread(target=tunnel.prove)
        waiting.start()
        with closing(StoreGuard(kept.dup(), guarded.store.port, TOKEN)):
            waiting.join(LONG_S)
            assert tunnel.prove() is True
