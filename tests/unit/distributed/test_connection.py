"""A connection between two ranks: messages in order, and how soon the loss of a peer is detected."""

import select
import socket
import struct
import threading
import time
import weakref
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from tcp_pairs import connected_pair

from paramserver.distributed import control_channel
from paramserver.distributed.control_channel import _HEADER, Connection, ControlChannel
from paramserver.errors import PeerLost

LONG_S = 20.0
SHORT_S = 0.4
MB = 2**20
HEARTBEAT = _HEADER.pack(0, 0)


def channel(own_rank, *connections, heartbeat_s=0.05, on_lost=lambda: None):
    """The channel of a rank with these connections."""
    made = ControlChannel(own_rank, heartbeat_s, on_lost)
    for connection in connections:
        made.add(connection)
    return made


class Ends:
    """The channel of a rank with one peer, rank 1, and the bare socket at the other end."""

    def __init__(self, lost_after_s, heartbeat_s=0.05, peers=(1,), own_rank=0):
        pairs = {peer: connected_pair() for peer in peers}
        self.others = {peer: other for peer, (_, other) in pairs.items()}
        self.other = self.others[peers[0]]
        self.lost = threading.Event()
        connections = [Connection(one, peer, lost_after_s) for peer, (one, _) in pairs.items()]
        self.channel = channel(own_rank, *connections, heartbeat_s=heartbeat_s, on_lost=self.lost.set)

    def send(self, kind, body=b"", peer=1):
        self.others[peer].sendall(_HEADER.pack(kind, len(body)) + body)


@contextmanager
def ends(lost_after_s=LONG_S, **options):
    made = Ends(lost_after_s, **options)
    try:
        yield made
    finally:
        made.channel.close()
        for other in made.others.values():
            other.close()


@contextmanager
def pair(lost_after_s=LONG_S):
    """The channels of rank 0 and rank 1, connected to each other."""
    one, other = connected_pair()
    to_one = channel(0, Connection(one, 1, lost_after_s))
    to_zero = channel(1, Connection(other, 0, lost_after_s))
    try:
        yield to_one, to_zero
    finally:
        to_one.close()
        to_zero.close()


@contextmanager
def in_thread(work):
    """Run ``work`` in a thread during the block; its argument is set when the block ends."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), name="peer-at-work")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LONG_S)


@contextmanager
def stopped(monkeypatch, where, channel):
    """The reading thread of ``channel`` stops once for 3 * SHORT_S: in its wait, or while it reads."""
    owner = control_channel if where == "wait_ready" else Connection
    function, in_stop = getattr(owner, where), threading.Event()

    def late(*arguments):
        found = function(*arguments)
        if threading.current_thread() is channel._thread and not in_stop.is_set():
            in_stop.set()
            time.sleep(3 * SHORT_S)
        return found

    monkeypatch.setattr(owner, where, late)
    yield in_stop


def loss(rank, why, is_stuck=False):
    """The message that a rank is lost."""
    body = struct.pack("!I?", rank, is_stuck) + why.encode()
    return _HEADER.pack(254, len(body)) + body


def received_until(end, expected):
    """What an end has received, once ``expected`` is in it."""
    received, deadline = b"", time.monotonic() + LONG_S
    while expected not in received:
        assert time.monotonic() < deadline, f"{expected!r} is not in {received!r}"  # heartbeats come on and on
        part = end.recv(MB)
        assert part, f"the connection ended without {expected!r} in {received!r}"
        received += part
    return received


def elapsed(call, match):
    """Seconds until ``call`` raises that a peer is lost."""
    began = time.monotonic()
    with pytest.raises(PeerLost, match=match):
        call()
    return time.monotonic() - began


def test_messages_of_every_length_arrive_in_order_between_heartbeats():
    rng = np.random.default_rng(3)
    bodies = [rng.integers(0, 256, n, np.uint8) for n in (0, 1, 5, 20 * MB, 0, 70_000)]
    one, other = connected_pair()
    sender = Connection(one, 1, LONG_S)
    receiver = channel(1, Connection(other, 0, LONG_S), heartbeat_s=0.001)

    def heartbeats(ended):
        while not ended.wait(0.0001):
            sender.try_send(0)

    try:
        with in_thread(heartbeats):
            for kind, body in enumerate(bodies, start=1):
                sender.send(kind, body.data)
                sender.try_send(0)
            found = [receiver.receive() for _ in bodies]
    finally:
        receiver.close()
        sender.close()
    assert [(peer, kind) for peer, kind, _ in found] == [(0, kind) for kind in (1, 2, 3, 4, 5, 6)]
    assert all(np.array_equal(message.body, sent) for message, sent in zip(found, bodies, strict=True))


@pytest.mark.parametrize("sent", [b"", HEARTBEAT, _HEADER.pack(1, 10) + b"12345"])
def test_the_end_of_a_process_is_detected_at_once_and_reported_to_the_owner(sent):
    with ends() as made:
        made.other.sendall(sent)
        made.other.close()
        assert elapsed(made.channel.receive, "rank 1 is lost: its connection was closed") < 2
        assert made.lost.wait(LONG_S)
        elapsed(lambda: made.channel.send(1, 2), "rank 1 is lost")


def test_messages_before_the_end_are_received_before_the_loss_is_raised():
    with ends() as made:
        made.send(2, b"abc")
        made.other.close()
        assert made.lost.wait(LONG_S)
        assert bytes(made.channel.receive().body) == b"abc"
        elapsed(made.channel.receive, "rank 1 is lost")


def test_a_message_that_was_received_is_not_kept():
    """It may be a part of a checkpoint, and the next message come much later."""
    one, other = connected_pair()
    connection = Connection(one, 1, LONG_S)
    other.sendall(_HEADER.pack(1, 3) + b"abc")
    assert control_channel.wait_ready([connection], select.POLLIN, LONG_S)
    message = connection.poll()
    assert bytes(message[1]) == b"abc"
    body = weakref.ref(message[1])
    del message
    assert body() is None
    connection.close()
    other.close()


def test_silence_is_a_loss_and_heartbeats_end_it():
    with pair(SHORT_S) as (here, there):
        threading.Timer(4 * SHORT_S, there.send, [0, 7]).start()
        began = time.monotonic()
        assert here.receive().kind == 7
        assert time.monotonic() - began > 2 * SHORT_S
        assert began < here.last_progress <= time.monotonic()
    with ends(SHORT_S) as made:
        silent_s = elapsed(
            made.channel.receive, r"rank 1 is lost: it gave no sign of life for server.lost_after_s \(0.4 s"
        )
        assert SHORT_S / 2 < silent_s < SHORT_S + 2
        assert made.lost.wait(LONG_S)


def test_a_message_may_take_longer_than_the_limit_as_long_as_it_moves():
    message = _HEADER.pack(2, 20) + bytes(range(20))
    with ends(SHORT_S) as made:

        def trickle(ended):
            for i in range(len(message)):
                ended.wait(SHORT_S / 5)
                made.other.send(message[i : i + 1])

        began = time.monotonic()
        with in_thread(trickle):
            _, kind, body = made.channel.receive()
            assert time.monotonic() - began > 2 * SHORT_S
    assert (kind, body.tolist()) == (2, list(range(20)))


def test_a_sender_waits_for_a_living_peer_that_does_not_read():
    with ends(SHORT_S) as made:
        read = []

        def live_and_then_read(ended):
            for _ in range(20):
                ended.wait(SHORT_S / 5)
                made.other.sendall(HEARTBEAT)
            while sum(read) < 30 * MB + _HEADER.size:
                read.append(len(made.other.recv(MB)))

        began = time.monotonic()
        with in_thread(live_and_then_read):
            made.channel.send(1, 1, bytes(30 * MB))
            assert time.monotonic() - began > 2 * SHORT_S


def test_a_sender_detects_silence_and_an_end():
    body = bytes(30 * MB)
    with ends(SHORT_S) as made:
        assert elapsed(lambda: made.channel.send(1, 1, body), "no sign of life") < SHORT_S + 2
    with ends() as made:
        threading.Timer(0.2, made.other.close).start()
        assert elapsed(lambda: made.channel.send(1, 1, body), "rank 1 is lost: its connection was closed") < 2


def test_a_death_is_detected_while_another_peer_sends_without_a_pause():
    with ends(peers=(1, 2)) as made:
        threading.Timer(0.3, made.others[2].close).start()

        def flood(ended):
            with suppress(OSError):
                while not ended.is_set():
                    made.send(1, bytes(100_000))

        with in_thread(flood):
            assert made.lost.wait(3)
            assert "rank 2 is lost" in str(made.channel.lost)


def test_a_loss_is_forwarded_to_ranks_without_a_connection_to_the_lost_one():
    with ends(peers=(1, 2)) as zero, ends() as one:
        zero.others[2].shutdown(socket.SHUT_WR)  # a close with a heartbeat unread would be a reset, and named as one
        assert zero.lost.wait(LONG_S)
        one.other.sendall(received_until(zero.others[1], loss(2, "its connection was closed")))
        assert one.lost.wait(LONG_S)
        assert str(one.channel.lost) == str(zero.channel.lost)
        one.channel.wait_loss(0.0)


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_rank_knows_whether_the_lost_one_was_asked_to_end(is_stuck):
    with ends(own_rank=1) as one:
        one.other.sendall(loss(2, "it did not return", is_stuck))
        assert one.lost.wait(LONG_S)
        assert one.channel.stuck == ("rank 2: it did not return" if is_stuck else "")


def test_the_rank_that_is_lost_finds_out_when_it_continues():
    """By the message that rank 0 sends to it too; its connection ends after that."""
    with ends(SHORT_S) as zero, ends(own_rank=1) as one:
        assert zero.lost.wait(LONG_S)
        why = "it gave no sign of life for server.lost_after_s (0.4 s)"
        one.other.sendall(received_until(zero.other, loss(1, why)))
        one.other.close()
        assert one.lost.wait(LONG_S)
        sentence = f"the other ranks ended the run without this one, rank 1: {why}; find out what stopped it"
        assert str(one.channel.lost) == sentence


def test_a_rank_that_did_not_run_blames_itself_for_connections_that_ended_meanwhile(monkeypatch):
    """A message about it may be missing: its peer was in the middle of another one."""
    with ends(SHORT_S, peers=(0,), own_rank=1) as made, stopped(monkeypatch, "wait_ready", made.channel) as in_stop:
        assert in_stop.wait(LONG_S)
        made.other.sendall(_HEADER.pack(2, 10) + b"12345")
        made.other.close()
        assert made.lost.wait(LONG_S)
        assert "without this one, rank 1: it did not run for " in str(made.channel.lost)


def test_the_owner_is_informed_of_a_loss_until_it_closes():
    with ends() as made:
        made.other.close()
        for _ in range(3):
            assert made.lost.wait(LONG_S)
            made.lost.clear()


def test_a_peer_that_left_is_not_a_loss():
    with pair() as (here, there):
        there.leave()
        there.close()
        here.wait_loss(0.5)
        assert here.lost is None
        elapsed(here.receive, "all other ranks have left")
    with ends() as made:
        made.channel.leave()
        made.other.close()  # nor is any peer a loss for a rank that left
        assert not made.lost.wait(0.3)
        assert made.channel.lost is None


@pytest.mark.parametrize("where", ["wait_ready", "poll"])
def test_peers_are_not_blamed_for_the_time_in_which_this_process_was_stopped(monkeypatch, where):
    """As after SIGSTOP and SIGCONT of all ranks, at any instant: the peer's heartbeats come after it."""
    with ends(SHORT_S) as made, stopped(monkeypatch, where, made.channel) as in_stop:
        assert in_stop.wait(LONG_S)
        time.sleep(3.25 * SHORT_S)
        made.send(5)
        assert made.channel.receive().kind == 5


def test_unread_heartbeats_never_block_nor_tear_a_message():
    one, other = connected_pair()
    connection = Connection(one, 1, LONG_S)
    began = time.monotonic()
    filler = np.zeros(MB, np.uint8)
    with suppress(BlockingIOError):
        while True:
            one.send(filler.data)
    for _ in range(1000):
        connection.try_send(0)
    assert time.monotonic() - began < 5
    connection.shut_down()
    connection.try_send(0)  # after the end: poll() reports it
    with pytest.raises(PeerLost, match="its connection was closed"):
        connection.send(1)
    connection.close()
    other.close()
