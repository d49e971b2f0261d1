"""Sockets that were opened in a block are aborted, and no others."""

import os
import socket
import subprocess
import sys

from tcp_pairs import connected_pair

from paramserver.distributed.abort_sockets import OpenedSockets, is_own_connection


def is_open(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


def test_sockets_opened_in_the_block_are_aborted_and_no_others():
    opened = OpenedSockets()
    before = connected_pair()
    with opened.record():
        inside, listener = connected_pair(), socket.create_server(("127.0.0.1", 0))
        pipe = os.pipe()
    with opened.record():
        later = connected_pair()
    after = connected_pair()
    opened.abort()
    assert [is_open(one) for pair in (before, inside, later, after) for one in pair] == [
        *(True, True),
        *(False, False),
        *(False, False),
        *(True, True),
    ]
    with socket.create_connection(listener.getsockname(), timeout=5), listener.accept()[0] as accepted:
        assert is_open(accepted)  # a listener stays open
    for descriptor in pipe:
        os.close(descriptor)
    for one in (*before, *inside, *later, *after, listener):
        one.close()
    opened.abort()


def test_a_reused_descriptor_is_left_alone():
    opened = OpenedSockets()
    with opened.record():
        old = connected_pair()
    numbers = {one.fileno() for one in old}
    for one in old:
        one.close()
    new = connected_pair()
    assert numbers & {one.fileno() for one in new}
    opened.abort()
    assert all(is_open(one) for one in new)
    for one in new:
        one.close()


def test_a_connection_of_another_process_is_not_an_own_one():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = f"import socket; c = socket.create_connection(('127.0.0.1', {listener.getsockname()[1]})); c.recv(1)"
        other = subprocess.Popen([sys.executable, "-c", code])
        try:
            listener.settimeout(60)
            with listener.accept()[0] as accepted:
                assert not is_own_connection(accepted)
        finally:
            other.kill()
            other.wait(60)


def test_a_connection_through_a_socket_of_ipv6_is_an_own_one():
    """As that of a client of TCPStore."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET6) as own:
        own.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        with listener.accept()[0] as accepted:
            assert is_own_connection(accepted)
