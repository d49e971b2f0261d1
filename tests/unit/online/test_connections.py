"""Connections of a ROUTER that are ended, by the number of a file descriptor that may belong to another one by then."""

import socket
import time

import zmq

from paramserver.online.connections import connection_of, end_connection, receive_parts

TIMEOUT_S = 20


def accepted(router, peer):
    """Send one message of a peer; returns the descriptor of its connection on the side of the router."""
    peer.send(b"x")
    assert router.poll(1000 * TIMEOUT_S)
    return router.recv_multipart(copy=False)[0].get(zmq.SRCFD)


def test_a_connection_whose_number_belongs_to_another_one_now_is_left_alone():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        first = context.socket(zmq.DEALER)
        first.connect(address)
        fd = accepted(router, first)
        parts = [bytes(1000)] * 7
        first.send_multipart(parts)
        assert router.poll(1000 * TIMEOUT_S)
        # The message has arrived; its connection ends, and its number is that of the next connection.
        first.close()
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            with connection_of(router, fd) as connection:
                if connection is None:
                    break
            assert time.monotonic() < deadline, "the connection has not ended"
            time.sleep(0.01)
        with context.socket(zmq.DEALER) as second:
            second.linger = 0
            second.connect(address)
            second.send(b"x")
            while True:
                with connection_of(router, fd) as connection:
                    if connection is not None:
                        break
                assert time.monotonic() < deadline, "the number was not used again"
                time.sleep(0.01)
            assert len(receive_parts(router, max_parts=3)) == 1  # too many parts: only the routing id is returned
            assert router.poll(1000 * TIMEOUT_S)
            name, word = receive_parts(router)
            router.send_multipart([name.bytes, b"y"])
            assert second.poll(1000 * TIMEOUT_S), "the second connection was ended"
            assert (word.bytes, second.recv()) == (b"x", b"y")
            assert end_connection(router, fd, 1) == "127.0.0.1"  # and this ends it


def test_a_connection_that_never_was_has_no_end():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, socket.socket() as other:
        router.bind("tcp://127.0.0.1:*")
        assert end_connection(router, other.fileno(), 0) is None
