"""Connections that were opened in a block are ended from outside, and no others."""

import os
import socket

from tcp_pairs import connected

from paramserver.distributed.abort_sockets import OpenedSockets


def is_open(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


def test_what_was_opened_in_the_block_is_cut_and_nothing_else():
    connections = OpenedSockets()
    before = connected()
    with connections.recorded():
        inside, listener = connected(), socket.create_server(("127.0.0.1", 0))
        pipe = os.pipe()
    with connections.recorded():
        later = connected()
    after = connected()
    connections.cut()
    assert [is_open(one) for pair in (before, inside, later, after) for one in pair] == [
        *(True, True),
        *(False, False),
        *(False, False),
        *(True, True),
    ]
    with socket.create_connection(listener.getsockname(), timeout=5), listener.accept()[0] as met:
        assert is_open(met)  # a listener goes on
    for descriptor in pipe:
        os.close(descriptor)
    for one in (*before, *inside, *later, *after, listener):
        one.close()
    connections.cut()


def test_a_number_that_is_used_again_is_somebody_elses():
    connections = OpenedSockets()
    with connections.recorded():
        old = connected()
    numbers = {one.fileno() for one in old}
    for one in old:
        one.close()
    new = connected()
    assert numbers & {one.fileno() for one in new}
    connections.cut()
    assert all(is_open(one) for one in new)
    for one in new:
        one.close()
