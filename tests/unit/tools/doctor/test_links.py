"""The schedule of pairs, and what is measured between two sockets of this machine."""

import socket
import threading
from itertools import combinations

import pytest

from paramserver.tools.doctor import hosts
from paramserver.tools.doctor.hosts import measure_link, rounds, serve_link

TOKEN = bytes(range(16))


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(hosts, "CONNECT_S", 0.3)
    monkeypatch.setattr(hosts, "_ACCEPT_S", 0.5)


@pytest.mark.parametrize("count", range(10))
def test_each_pair_meets_once_and_each_host_is_in_one_pair_at_a_time(count):
    schedule = list(rounds(range(count)))
    assert sorted(pair for pairs in schedule for pair in pairs) == list(combinations(range(count), 2))
    for pairs in schedule:
        members = [one for pair in pairs for one in pair]
        assert len(members) == len(set(members))


def served(listener, client):
    """What ``client`` returns while ``serve_link`` answers, and what that returns."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(serve_link(listener, TOKEN)), daemon=True)
    thread.start()
    result = client(listener.getsockname())
    thread.join(30)
    return result, answers[0]


def test_a_link_has_a_bandwidth_a_round_trip_and_an_offset(listener):
    link, came = served(listener, lambda address: measure_link(3, 5, address, TOKEN))
    assert came
    assert (link.source, link.target, link.error, link.connected) == (3, 5, "", True)
    assert link.bytes_per_s > 1e6
    assert 0 < link.round_trip_s < 1
    assert abs(link.clock_offset_s) < 1  # one machine, one clock


def test_the_offset_is_how_far_the_other_clock_is_ahead(listener, monkeypatch):
    clock = hosts.time.time

    def of_thread():
        return clock() + (100 if threading.current_thread() is not threading.main_thread() else 0)

    monkeypatch.setattr(hosts.time, "time", of_thread)
    link, _ = served(listener, lambda address: measure_link(0, 1, address, TOKEN))
    assert link.clock_offset_s == pytest.approx(100, abs=1)


def test_a_connection_without_the_token_is_not_answered(listener):
    def client(address):
        with socket.create_connection(address, timeout=5) as stranger:
            stranger.sendall(bytes(16))
            assert stranger.recv(1) == b""
        return measure_link(0, 1, address, TOKEN)

    link, came = served(listener, client)
    assert came
    assert link.error == ""


def test_a_closed_port_is_named(listener):
    address = listener.getsockname()
    listener.close()
    link = measure_link(0, 1, address, TOKEN)
    assert (link.error, link.connected, link.bytes_per_s) == ("Connection refused", False, None)


@pytest.mark.usefixtures("soon")
def test_a_host_that_accepts_and_does_not_answer_is_named(listener):
    link = measure_link(0, 1, listener.getsockname(), TOKEN)  # the kernel accepts, no process answers
    assert link.error == "accepts a connection and does not answer: no answer within 0.3 s"
    assert not link.connected


@pytest.mark.usefixtures("soon")
def test_nobody_connects(listener):
    assert not serve_link(listener, TOKEN)


@pytest.mark.usefixtures("soon")
def test_a_path_that_loses_large_messages_only_is_told_from_no_path(listener, monkeypatch):
    monkeypatch.setattr(hosts, "_MOST_BYTES", 2**40)
    client_limit = hosts._FIRST_BYTES
    monkeypatch.setattr(hosts, "_answer", lambda connection, until: answer_small(connection, client_limit))
    link, came = served(listener, lambda address: measure_link(0, 1, address, TOKEN))
    assert came
    assert link.connected
    assert link.error == "small messages arrive, and one of 64 KiB does not: no answer within 0.3 s"
    assert link.round_trip_s is not None


def answer_small(connection, limit):
    """Answer messages without content; keep silent for the first that is as large as ``limit``."""
    with connection.makefile("rb") as reader:
        while (number := reader.read(8)) and int.from_bytes(number, "big") < limit:
            connection.sendall(hosts._TIME.pack(0.0))
        reader.read()
