"""The stream between two ranks: what comes over it, and how soon it tells that the other end is gone or frozen."""

import socket
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from paramserver import link as link_module
from paramserver.errors import PeerLost
from paramserver.link import _BEAT, _HEAD, Link, messages

LONG_S = 20.0
SHORT_S = 0.4
MB = 2**20


def connected():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@contextmanager
def linked(lost_after_s=LONG_S, peer=1):
    """A link to rank ``peer``, and the bare socket at its other end."""
    one, other = connected()
    link = Link(one, peer, lost_after_s)
    try:
        yield link, other
    finally:
        link.close()
        other.close()


@contextmanager
def at_once(*works):
    """Run each in a thread of its own until the block ends; each is told when that is."""
    over = threading.Event()
    threads = [threading.Thread(target=work, args=(over,), name=f"peer-{i}") for i, work in enumerate(works)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(LONG_S)


def beating(link, every_s=0.05):
    def work(over):
        while not over.wait(every_s):
            link.beat()

    return work


def elapsed(call, match):
    """Seconds until ``call`` told that a peer is lost."""
    began = time.monotonic()
    with pytest.raises(PeerLost, match=match):
        call()
    return time.monotonic() - began


def taken(link, count):
    """The next messages of one link."""
    coming = messages([link])
    return [next(coming)[1:] for _ in range(count)]


def test_messages_of_every_length_come_in_order_between_beats():
    rng = np.random.default_rng(3)
    bodies = [rng.integers(0, 256, n, np.uint8) for n in (0, 1, 5, 20 * MB, 0, 70_000)]
    with linked() as (sender, other):
        receiver = Link(other, 0, LONG_S)

        def send(over):
            for kind, body in enumerate(bodies, start=1):
                sender.beat()
                sender.send(kind, body.data)

        with at_once(send, beating(sender, 0.0001), beating(receiver, 0.0001)):
            found = taken(receiver, len(bodies))
    assert [kind for kind, _ in found] == [1, 2, 3, 4, 5, 6]
    assert all(np.array_equal(body, sent) for (_, body), sent in zip(found, bodies, strict=True))


@pytest.mark.parametrize("in_between", [False, True])
def test_the_end_of_a_process_is_noticed_at_once(in_between):
    with linked(peer=3) as (link, other):
        other.sendall(_BEAT + _HEAD.pack(1, 10) + b"12345" if in_between else _BEAT)
        other.close()
        assert elapsed(lambda: taken(link, 1), "rank 3 is lost: its connection was closed") < 2
        assert "rank 3" in str(link.lost)
        elapsed(lambda: taken(link, 1), "rank 3 is lost")


def test_silence_is_noticed_and_signs_of_life_count_as_none_of_it():
    with linked(SHORT_S) as (link, other):
        peer = Link(other, 0, SHORT_S)
        with at_once(beating(peer)):
            time.sleep(3 * SHORT_S)  # longer than the limit, which nobody listens to
            link.attend()
            began = time.monotonic()
            threading.Timer(3 * SHORT_S, lambda: peer.send(7)).start()
            assert taken(link, 1)[0][0] == 7
            assert time.monotonic() - began > 2 * SHORT_S
        silent_s = elapsed(
            lambda: taken(link, 1), r"rank 1 is lost: it gave no sign of life for server.lost_after_s \(0"
        )
        assert SHORT_S / 2 < silent_s < SHORT_S + 2


def test_a_message_may_take_longer_than_the_limit_as_long_as_it_moves():
    message = _HEAD.pack(2, 20) + bytes(range(20))
    with linked(SHORT_S) as (link, other):

        def trickle(over):
            for i in range(len(message)):
                over.wait(SHORT_S / 5)
                other.send(message[i : i + 1])

        began = time.monotonic()
        with at_once(trickle):
            kind, body = taken(link, 1)[0]
    assert (kind, body.tolist()) == (2, list(range(20)))
    assert time.monotonic() - began > 2 * SHORT_S


def test_who_sends_waits_for_one_who_lives_and_does_not_read():
    with linked(SHORT_S) as (link, other):
        peer = Link(other, 0, LONG_S)
        received = []

        def read_later(over):
            over.wait(4 * SHORT_S)
            received.extend(taken(peer, 1))

        began = time.monotonic()
        with at_once(beating(peer), read_later):
            link.send(1, bytes(30 * MB))
            assert time.monotonic() - began > 2 * SHORT_S
            threading.Event().wait(0.1)
            link.beat()
        assert len(received[0][1]) == 30 * MB


def test_who_sends_notices_silence_an_end_and_a_refusal():
    body = bytes(30 * MB)
    with linked(SHORT_S) as (link, other):
        assert elapsed(lambda: link.send(1, body), "no sign of life") < SHORT_S + 2
    with linked() as (link, other):
        threading.Timer(0.2, other.close).start()
        assert elapsed(lambda: link.send(1, body), "rank 1 is lost: its connection was closed") < 2
    with linked() as (link, other):
        threading.Timer(0.2, other.sendall, [_HEAD.pack(3, 0)]).start()
        assert elapsed(lambda: link.send(1, body), "rank 1 could not take what was sent") < 2
        assert link.lost is None


def test_one_that_dies_is_noticed_beside_one_that_sends_without_a_pause():
    with linked(peer=1) as (busy, sending), linked(peer=2) as (dying, other):
        threading.Timer(0.3, other.close).start()
        peer = Link(sending, 0, LONG_S)

        def flood(over):
            while not over.is_set():
                try:
                    peer.send(1, bytes(100_000))
                except PeerLost:
                    return

        def take_all():
            for _ in messages([busy, dying]):
                pass

        with at_once(flood):
            assert elapsed(take_all, "rank 2 is lost") < 3
            busy.close()
        assert busy.lost is None


def test_those_that_have_ended_are_not_watched():
    with linked(peer=1) as (one, first), linked(SHORT_S, peer=2) as (two, second):
        second.sendall(_HEAD.pack(2, 0))
        threading.Timer(3 * SHORT_S, first.sendall, [_HEAD.pack(2, 0)]).start()
        coming, order = {one, two}, []
        for link, _, _ in messages(coming):
            order.append(link.peer)
            coming.remove(link)
        assert order == [2, 1]


def test_others_are_not_blamed_while_this_process_stands_still(monkeypatch):
    """As after SIGSTOP and SIGCONT of all ranks: the wait is over late, and the peer's beats come after it."""
    ready, stood_still = link_module._ready, []

    def late(links, events, timeout_s):
        found = ready(links, events, 0.0)
        if not stood_still:
            stood_still.append(time.sleep(3 * SHORT_S))
        return found

    with linked(SHORT_S) as (link, other):
        monkeypatch.setattr(link_module, "_ready", late)
        threading.Timer(3.2 * SHORT_S, other.sendall, [_HEAD.pack(5, 0)]).start()
        assert taken(link, 1)[0][0] == 5
        assert stood_still


def test_beats_that_nobody_reads_never_block_nor_tear_a_message():
    with linked() as (link, _):
        began = time.monotonic()
        link.beat()
        filler = np.zeros(MB, np.uint8)
        with suppress(BlockingIOError):
            while True:
                link._socket.send(filler.data)
        for _ in range(1000):
            link.beat()
        assert time.monotonic() - began < 5
        link.close()
        link.beat()  # after the end: said by who sends or receives
        with pytest.raises(PeerLost, match="its connection was closed"):
            link.send(1)
