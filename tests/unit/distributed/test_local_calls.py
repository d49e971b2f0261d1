"""Calls over a unix socket: replies that come later, calls of any size, and the end of a connection."""

import errno
import os
import socket
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from late_replies import LateReplies

from paramserver.distributed.local_calls import MAX_PACKET_BYTES, LocalCallServer, LocalConnection
from paramserver.distributed.rpc_calls import completed_future
from paramserver.transport.segments import SegmentHost, attach_socket

TIMEOUT_S = 10.0
TARGET = ("Server", "handler")


@contextmanager
def connected(handle):
    """A server with this handler, and a caller's connection to it."""
    with LocalCallServer(handle, TIMEOUT_S) as server, closing(LocalConnection(server.connect("trainer 0"))) as caller:
        yield server, caller


def receive_all(caller):
    """Receive until no call waits, in a thread that is given up after a while."""
    no_reply = torch.futures.Future()
    thread = threading.Thread(target=caller.receive_until, args=(no_reply,), daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_replies_come_when_they_are_ready_in_any_order_and_from_any_thread():
    with connected(LateReplies(*TARGET)) as (_, caller):
        calls = [caller.call((*TARGET, number), {"twice": True}) for number in range(3)]
        receive_all(caller)
        assert [call.value() for call in calls] == [0, 10, 20]


@pytest.mark.parametrize("passed", [False, True])
def test_a_default_timeout_that_the_task_sets_ends_no_wait(passed):
    """A reply may take as long as the slowest trainer; the trainer's process wraps the socket anew."""
    before, reply, replies = socket.getdefaulttimeout(), torch.futures.Future(), threading.Event()
    socket.setdefaulttimeout(0.05)
    try:
        with LocalCallServer(lambda *call: replies.set() or reply, TIMEOUT_S) as server:
            end = server.connect("trainer 0")
            with closing(LocalConnection(socket.socket(fileno=end.detach()) if passed else end)) as caller:
                call = caller.call(TARGET, {})
                assert replies.wait(TIMEOUT_S)
                timer = threading.Timer(0.3, reply.set_result, [4])
                timer.start()
                receive_all(caller)
                timer.join()
                assert call.value() == 4
    finally:
        socket.setdefaulttimeout(before)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(7),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.zeros(2, requires_grad=True),
    ],
)
def test_tensors_arrive_as_they_were_sent(tensor):
    with connected(lambda owner, name, value: completed_future([value, value + value])) as (_, caller):
        reply = caller.call((*TARGET, tensor), {})
        receive_all(caller)
        same, doubled = reply.value()
    assert torch.equal(same, tensor)
    assert same.dtype == tensor.dtype
    assert not same.requires_grad
    assert torch.equal(doubled, tensor + tensor)


@pytest.mark.claim("large-buffers")
def test_calls_and_replies_of_any_size_arrive_and_leave_no_descriptor():
    before = open_descriptors()
    with connected(lambda owner, name, value: completed_future(value * 2)) as (_, caller):
        for length in (1, MAX_PACKET_BYTES - 300, MAX_PACKET_BYTES, 3_000_000, 5):
            values = [torch.arange(float(length // 4 + 1)) for _ in range(3)]
            replies = [caller.call((*TARGET, value), {}) for value in values]
            receive_all(caller)
            assert all(torch.equal(reply.value(), value * 2) for reply, value in zip(replies, values, strict=True))
    assert open_descriptors() == before


def open_descriptors():
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.claim("large-buffers")
def test_a_long_call_without_a_descriptor_left_is_left_to_rpc_and_the_connection_stays(monkeypatch):
    with connected(lambda owner, name, value: completed_future(len(value))) as (_, caller):
        monkeypatch.setattr(os, "memfd_create", no_descriptor)
        assert caller.call((*TARGET, bytes(MAX_PACKET_BYTES)), {}) is None
        reply = caller.call((*TARGET, bytes(MAX_PACKET_BYTES - 1000)), {})
        receive_all(caller)
        assert reply.value() == MAX_PACKET_BYTES - 1000


def no_descriptor(*_):
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_reply_that_cannot_be_sent_fails_the_call_and_later_ones_are_left_to_rpc(monkeypatch):
    with connected(lambda owner, name: completed_future(bytes(MAX_PACKET_BYTES))) as (_, caller):
        monkeypatch.setattr(os, "memfd_create", no_descriptor)
        reply = caller.call(TARGET, {})
        receive_all(caller)
        with pytest.raises(RuntimeError, match="the connection to the server's process was closed"):
            reply.value()
        assert caller.call(TARGET, {}) is None


def test_a_connection_is_broken_off_while_a_thread_waits_for_a_reply():
    called = threading.Event()

    def handle(owner, name):
        called.set()
        return torch.futures.Future()  # never completed

    with connected(handle) as (_, caller):
        reply = caller.call(TARGET, {})
        waiting = threading.Thread(target=caller.receive_until, args=(reply,))
        waiting.start()
        assert called.wait(TIMEOUT_S)
        caller.shut_down()
        waiting.join(TIMEOUT_S)
        assert not waiting.is_alive()
        with pytest.raises(RuntimeError):
            reply.value()


def test_the_end_of_the_server_ends_calls_that_wait():
    with closing(LocalConnection(open_and_close())) as caller:
        assert caller.call(TARGET, {}) is None
    held = torch.futures.Future()
    called = threading.Event()

    def handle(owner, name):
        called.set()
        return held

    with LocalCallServer(handle, TIMEOUT_S) as server:
        caller = LocalConnection(server.connect("trainer 0"))
        reply = caller.call(TARGET, {})
        assert called.wait(TIMEOUT_S)
    held.set_result(1)  # too late; the socket is closed
    receive_all(caller)
    caller.close()
    with pytest.raises(RuntimeError):
        reply.value()


def open_and_close():
    with LocalCallServer(lambda owner, name: completed_future(None), TIMEOUT_S) as server:
        return server.connect("trainer 0")


def test_a_process_that_takes_the_place_of_another_ends_its_connection():
    with (
        connected(lambda owner, name: completed_future(5)) as (server, first),
        closing(LocalConnection(server.connect("trainer 0"))) as second,
    ):
        assert first.call(TARGET, {}) is None
        reply = second.call(TARGET, {})
        receive_all(second)
        assert reply.value() == 5


def test_a_packet_that_is_no_call_ends_its_connection_and_no_other(caplog):
    with connected(lambda owner, name: completed_future(5)) as (server, caller):
        with closing(server.connect("trainer 1")) as damaged:
            damaged.send(b"no call")
            damaged.settimeout(TIMEOUT_S)
            assert damaged.recv(10) == b""
        reply = caller.call(TARGET, {})
        receive_all(caller)
        assert reply.value() == 5
    assert "UnpicklingError" in caplog.text


def test_a_socket_is_passed_to_a_process_that_knows_its_key():
    with SegmentHost("test", TIMEOUT_S) as host, LocalCallServer(lambda o, n: completed_future(5), TIMEOUT_S) as server:
        host.offer_socket("calls/0/1", server.connect("trainer 0"))
        with closing(LocalConnection(attach_socket(host.address, "calls/0/1", TIMEOUT_S))) as caller:
            reply = caller.call(TARGET, {})
            receive_all(caller)
            assert reply.value() == 5
        host.release("calls/0/1")


# Callers of an endpoint that serves no more.


@pytest.mark.claim("local-calls")
def test_a_connection_that_is_made_after_the_thread_has_ended_has_ended_too(monkeypatch):
    def call_after_the_end():
        with connected(lambda owner, name: completed_future(5)) as (server, first):
            monkeypatch.setattr(server, "_close_unknown", lambda: "never")
            if (lost := first.call(TARGET, {})) is not None:  # it ends before, or after it has served that
                receive_all(first)
                assert lost.done()
            server._thread.join(TIMEOUT_S)
            assert not server._thread.is_alive()
            for caller in ("trainer 0", "trainer 1"):
                with closing(LocalConnection(server.connect(caller))) as late:
                    assert late.call(TARGET, {}) is None

    with pytest.raises(TypeError):
        call_after_the_end()


@pytest.mark.claim("local-calls")
def test_a_connection_that_is_made_after_the_server_was_closed_has_ended_too():
    with LocalCallServer(lambda owner, name: completed_future(5), TIMEOUT_S) as server:
        pass
    with closing(LocalConnection(server.connect("trainer 0"))) as late:
        assert late.call(TARGET, {}) is None


class Unpicklable:
    def __reduce__(self):
        raise TypeError("it holds a lock")


@pytest.mark.claim("local-calls")
@pytest.mark.parametrize("value", [lambda: None, threading.Lock(), Unpicklable()], ids=["lambda", "lock", "reduce"])
def test_a_reply_that_cannot_be_pickled_does_not_leave_its_caller_waiting(value):
    with connected(lambda owner, name: completed_future(value)) as (_, caller):
        reply = caller.call(TARGET, {})
        receive_all(caller)
        with pytest.raises(RuntimeError):
            reply.value()
        assert caller.call(TARGET, {}) is None  # the next one goes over RPC


def test_no_reply_is_awaited_to_a_call_that_cannot_be_pickled():
    """The next call may be one that is left to RPC: its reply does not arrive here, nor does one to this call."""
    with connected(LateReplies(*TARGET)) as (_, caller):
        with pytest.raises(AttributeError, match="pickle"):
            caller.call((*TARGET, lambda: None), {})
        receive_all(caller)
