"""The stream between two ranks: what comes over it, and how soon it tells that the other end is gone or frozen."""

import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from tcp_pairs import connected

from paramserver.distributed import control_channel as links_module
from paramserver.distributed.control_channel import _HEAD, Connection, ControlChannel
from paramserver.errors import PeerLost

LONG_S = 20.0
SHORT_S = 0.4
MB = 2**20
BEAT = _HEAD.pack(0, 0)


class Ends:
    """A rank with one peer, rank 1: its links, and the bare socket at the other end."""

    def __init__(self, lost_after_s, beat_s=0.05, peers=(1,)):
        pairs = {peer: connected() for peer in peers}
        self.others = {peer: other for peer, (_, other) in pairs.items()}
        self.other = self.others[peers[0]]
        self.cut = threading.Event()
        made = {peer: Connection(one, peer, lost_after_s) for peer, (one, _) in pairs.items()}
        self.links = ControlChannel(made, beat_s, self.cut.set)

    def say(self, kind, body=b"", peer=1):
        self.others[peer].sendall(_HEAD.pack(kind, len(body)) + body)


@contextmanager
def ends(lost_after_s=LONG_S, **options):
    made = Ends(lost_after_s, **options)
    try:
        yield made
    finally:
        made.links.close()
        for other in made.others.values():
            other.close()


@contextmanager
def pair(lost_after_s=LONG_S):
    """The links of rank 0 and rank 1, each to the other."""
    one, other = connected()
    with_one = ControlChannel({1: Connection(one, 1, lost_after_s)}, 0.05, lambda: None)
    with_zero = ControlChannel({0: Connection(other, 0, lost_after_s)}, 0.05, lambda: None)
    try:
        yield with_one, with_zero
    finally:
        with_one.close()
        with_zero.close()


@contextmanager
def beside(work):
    """``work`` in a thread; it is told when the block ends."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name="peer-at-work")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LONG_S)


def elapsed(call, match):
    """Seconds until ``call`` told that a peer is lost."""
    began = time.monotonic()
    with pytest.raises(PeerLost, match=match):
        call()
    return time.monotonic() - began


def test_messages_of_every_length_come_in_order_between_beats():
    rng = np.random.default_rng(3)
    bodies = [rng.integers(0, 256, n, np.uint8) for n in (0, 1, 5, 20 * MB, 0, 70_000)]
    one, other = connected()
    sender = Connection(one, 1, LONG_S)
    receiver = ControlChannel({0: Connection(other, 0, LONG_S)}, 0.001, lambda: None)

    def beats(over):
        while not over.wait(0.0001):
            sender.beat()

    try:
        with beside(beats):
            for kind, body in enumerate(bodies, start=1):
                sender.send(kind, body.data)
                sender.beat()
            found = [receiver.receive() for _ in bodies]
    finally:
        receiver.close()
        sender.close()
    assert [(peer, kind) for peer, kind, _ in found] == [(0, kind) for kind in (1, 2, 3, 4, 5, 6)]
    assert all(np.array_equal(message.body, sent) for message, sent in zip(found, bodies, strict=True))


@pytest.mark.parametrize("said", [b"", BEAT, _HEAD.pack(1, 10) + b"12345"])
def test_the_end_of_a_process_is_noticed_at_once_and_told_to_the_owner(said):
    with ends() as made:
        made.other.sendall(said)
        made.other.close()
        assert elapsed(made.links.receive, "rank 1 is lost: its connection was closed") < 2
        assert made.cut.wait(LONG_S)
        elapsed(lambda: made.links.send(1, 2), "rank 1 is lost")


def test_what_came_before_the_end_is_taken_before_it_is_told():
    with ends() as made:
        made.say(2, b"abc")
        made.other.close()
        assert made.cut.wait(LONG_S)
        assert bytes(made.links.receive().body) == b"abc"
        elapsed(made.links.receive, "rank 1 is lost")


def test_silence_is_noticed_where_somebody_attends_and_beats_are_none():
    with pair(SHORT_S) as (here, there):
        for links in (here, there):
            links.attend(True)
        threading.Timer(4 * SHORT_S, there.send, [0, 7]).start()
        began = time.monotonic()
        assert here.receive().kind == 7
        assert time.monotonic() - began > 2 * SHORT_S
        assert began < here.moved <= time.monotonic()
    with ends(SHORT_S) as made:
        assert not made.cut.wait(3 * SHORT_S)  # nobody attends
        made.links.attend(True)
        silent_s = elapsed(
            made.links.receive, r"rank 1 is lost: it gave no sign of life for server.lost_after_s \(0.4 s"
        )
        assert SHORT_S / 2 < silent_s < SHORT_S + 2
        assert made.cut.wait(LONG_S)


def test_a_message_may_take_longer_than_the_limit_as_long_as_it_moves():
    message = _HEAD.pack(2, 20) + bytes(range(20))
    with ends(SHORT_S) as made:
        made.links.attend(True)

        def trickle(over):
            for i in range(len(message)):
                over.wait(SHORT_S / 5)
                made.other.send(message[i : i + 1])

        began = time.monotonic()
        with beside(trickle):
            _, kind, body = made.links.receive()
            assert time.monotonic() - began > 2 * SHORT_S
    assert (kind, body.tolist()) == (2, list(range(20)))


def test_who_sends_waits_for_one_who_lives_and_does_not_read():
    with ends(SHORT_S) as made:
        made.links.attend(True)
        read = []

        def live_and_then_read(over):
            for _ in range(20):
                over.wait(SHORT_S / 5)
                made.other.sendall(BEAT)
            while sum(read) < 30 * MB + _HEAD.size:
                read.append(len(made.other.recv(MB)))

        began = time.monotonic()
        with beside(live_and_then_read):
            made.links.send(1, 1, bytes(30 * MB))
            assert time.monotonic() - began > 2 * SHORT_S


def test_who_sends_notices_silence_and_an_end():
    body = bytes(30 * MB)
    with ends(SHORT_S) as made:
        made.links.attend(True)
        assert elapsed(lambda: made.links.send(1, 1, body), "no sign of life") < SHORT_S + 2
    with ends() as made:
        threading.Timer(0.2, made.other.close).start()
        assert elapsed(lambda: made.links.send(1, 1, body), "rank 1 is lost: its connection was closed") < 2


def test_one_that_dies_is_noticed_beside_one_that_sends_without_a_pause():
    with ends(peers=(1, 2)) as made:
        threading.Timer(0.3, made.others[2].close).start()

        def flood(over):
            with suppress(OSError):
                while not over.is_set():
                    made.say(1, bytes(100_000))

        with beside(flood):
            assert made.cut.wait(3)
            assert "rank 2 is lost" in str(made.links.lost)


def test_a_loss_is_told_to_those_who_have_no_connection_to_the_lost():
    with ends(peers=(1, 2)) as zero, ends() as one:
        zero.others[2].close()
        assert zero.cut.wait(LONG_S)
        told = b""
        while b"rank 2 is lost" not in told:
            told += zero.others[1].recv(MB)
        one.other.sendall(told)
        assert one.cut.wait(LONG_S)
        assert str(one.links.lost).startswith("rank 2 is lost: its connection was closed")
        one.links.await_loss(0.0)


def test_who_said_goodbye_is_not_missed():
    with pair() as (here, there):
        there.leave()
        there.close()
        here.await_loss(0.5)
        assert here.lost is None
        elapsed(here.receive, "all other ranks have said goodbye")
    with ends() as made:
        made.links.leave()
        made.other.close()  # nor does one who has left miss anybody
        assert not made.cut.wait(0.3)
        assert made.links.lost is None


def test_others_are_not_blamed_while_this_process_stands_still(monkeypatch):
    """As after SIGSTOP and SIGCONT of all ranks: the wait is over late, and the peer's beats come after it."""
    ready, stood_still = links_module.wait_ready, threading.Event()

    def late(links, events, timeout_s):
        found = ready(links, events, timeout_s)
        if not stood_still.is_set():
            time.sleep(3 * SHORT_S)
            stood_still.set()
        return found

    monkeypatch.setattr(links_module, "wait_ready", late)
    with ends(SHORT_S) as made:
        made.links.attend(True)
        assert stood_still.wait(LONG_S)
        time.sleep(SHORT_S / 4)
        made.say(5)
        assert made.links.receive().kind == 5


def test_beats_that_nobody_reads_never_block_nor_tear_a_message():
    one, other = connected()
    link = Connection(one, 1, LONG_S)
    began = time.monotonic()
    filler = np.zeros(MB, np.uint8)
    with suppress(BlockingIOError):
        while True:
            one.send(filler.data)
    for _ in range(1000):
        link.beat()
    assert time.monotonic() - began < 5
    link.end()
    link.beat()  # after the end: told by who polls
    with pytest.raises(PeerLost, match="its connection was closed"):
        link.send(1)
    link.close()
    other.close()
