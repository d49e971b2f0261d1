"""Calls over TCP: replies that come later, tensors of any size, other connections, and the end of a connection."""

import secrets
import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from late_replies import LateReplies

from paramserver.distributed import tcp_calls
from paramserver.distributed.rpc_calls import completed_future
from paramserver.distributed.tcp_calls import TcpCaller, TcpCallServer

TIMEOUT_S = 10.0
TARGET = ("Server", "handler")
HOST = "127.0.0.1"


@contextmanager
def connected(handle, callers=1):
    """A server with this handler, and connections to it of as many callers."""
    with TcpCallServer(handle, TIMEOUT_S) as server, TcpCaller(TIMEOUT_S) as caller:
        address = server.listen(HOST)
        yield server, *(caller.connect(address) for _ in range(callers))


def value_of(future):
    """The reply, within a limit; torch's own wait has none."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(TIMEOUT_S), "no reply"
    return future.value()


def echo(owner, name, *values):
    return completed_future(values)


def test_replies_come_when_they_are_ready_in_any_order_and_from_any_thread():
    with connected(LateReplies(*TARGET)) as (_, connection):
        calls = [connection.call((*TARGET, number), {"twice": True}) for number in range(3)]
        assert [value_of(call) for call in calls] == [0, 10, 20]


SPARSE = torch.sparse_coo_tensor(torch.tensor([[4, 1]]), torch.ones(2, 3), (6, 3), check_invariants=True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(60_000.0).view(200, 300).t(),
        torch.ones(5000, dtype=torch.bfloat16),
        torch.tensor(7),
        torch.empty(0, 4),
        torch.arange(9000) % 2 == 0,
        torch.zeros(3000, requires_grad=True),
        SPARSE,
        SPARSE.coalesce(),
    ],
)
def test_tensors_arrive_as_they_were_sent(tensor):
    with connected(echo) as (_, connection):
        (same,) = value_of(connection.call((*TARGET, tensor), {}))
    assert (same.dtype, same.shape, same.is_sparse) == (tensor.dtype, tensor.shape, tensor.is_sparse)
    assert torch.equal(same.to_dense(), tensor.to_dense())
    assert not same.requires_grad
    assert not tensor.is_sparse or same.is_coalesced() == tensor.is_coalesced()
    if not tensor.is_sparse:
        same.zero_()  # it is writable memory of its own


def test_a_tensor_of_one_element_for_all_stays_one():
    """What stands for values that are not sent takes no bytes, and is known by its strides."""
    with connected(echo) as (_, connection):
        (same,) = value_of(connection.call((*TARGET, torch.zeros(1).expand(10_000_000)), {}))
    assert same.shape == (10_000_000,)
    assert same.untyped_storage().nbytes() == 4


def test_memory_of_a_reply_that_was_received_is_not_kept():
    """It may be all parameters, and the next reply come much later."""
    with connected(echo) as (_, connection):
        call = connection.call((*TARGET, torch.ones(5000)), {})
        (received,) = value_of(call)
        released = threading.Event()
        weakref.finalize(received.untyped_storage(), released.set)
        del call, received
        assert released.wait(TIMEOUT_S)


def test_many_large_calls_of_several_threads_arrive_whole():
    """More than the kernel keeps for a connection, in both directions at once."""

    def handle(owner, name, number, tensor):
        return completed_future((number, tensor + 1))

    def run(number):
        connection = connections[number % 2]
        tensors = [torch.full((100_000 + number,), float(number * 10 + turn)) for turn in range(20)]
        replies = [connection.call((*TARGET, number, tensor), {}) for tensor in tensors]
        for tensor, reply in zip(tensors, replies, strict=True):
            found, returned = value_of(reply)
            assert found == number
            assert torch.equal(returned, tensor + 1)

    with connected(handle, 2) as (_, *connections), ThreadPoolExecutor(6) as threads:
        list(threads.map(run, range(6)))


def without_token(server_address):
    host, port, _ = server_address.split()
    connection = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
    connection.settimeout(TIMEOUT_S)
    return connection


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1" + 3 * b"\r\n", bytes(16), bytes(100_000)], ids=["http", "token", "long"]
)
def test_another_token_is_refused_and_other_connections_stay(sent):
    with TcpCallServer(echo, TIMEOUT_S) as server, TcpCaller(TIMEOUT_S) as caller:
        address = server.listen(HOST)
        connection = caller.connect(address)
        with without_token(address) as other:
            try:
                other.sendall(sent)
                refused = other.recv(1)
            except ConnectionError:  # it was closed with bytes that it had not read
                refused = b""
            assert refused == b""
        assert value_of(connection.call((*TARGET, 5), {})) == (5,)


def test_connections_that_send_nothing_are_closed_in_time_and_others_are_accepted():
    with TcpCallServer(echo, 0.3) as server, TcpCaller(TIMEOUT_S) as caller:
        address = server.listen(HOST)
        silent = [without_token(address) for _ in range(50)]
        silent[0].sendall(b"half")
        assert value_of(caller.connect(address).call((*TARGET, 5), {})) == (5,)
        for one in silent:
            with one:
                assert one.recv(1) == b""


def test_a_server_that_does_not_accept_is_given_up():
    with socket.create_server((HOST, 0)) as listener, TcpCaller(0.3) as caller:
        address = f"{HOST} {listener.getsockname()[1]} {secrets.token_hex(16)}"
        with pytest.raises(OSError, match="timed out"):
            caller.connect(address)


def test_only_so_many_connections_without_a_token_are_kept(monkeypatch):
    monkeypatch.setattr(TcpCallServer, "most_unknown", 3)
    with TcpCallServer(echo, TIMEOUT_S) as server, TcpCaller(TIMEOUT_S) as caller:
        address = server.listen(HOST)
        silent = [without_token(address) for _ in range(8)]
        connection = caller.connect(address)
        for one in silent[:5]:
            with one:
                assert one.recv(1) == b""
        assert value_of(connection.call((*TARGET, 5), {})) == (5,)
        for one in silent[5:]:
            one.close()


class NoDescriptor:
    """A listener of a process that has no descriptor left, so many times."""

    def __init__(self, listener, times):
        self.listener, self.times = listener, times
        self.fileno, self.shutdown, self.close = listener.fileno, listener.shutdown, listener.close

    def accept(self):
        if not self.times:
            return self.listener.accept()
        self.times -= 1
        raise OSError(24, "Too many open files")


def test_without_a_descriptor_left_what_has_no_token_is_closed(monkeypatch):
    with TcpCallServer(echo, TIMEOUT_S) as server, TcpCaller(TIMEOUT_S) as caller:
        address = server.listen(HOST)
        with without_token(address) as silent:
            silent.sendall(b"half")
            assert value_of(caller.connect(address).call((*TARGET, 4), {})) == (4,)  # it has been accepted
            monkeypatch.setattr(server, "_listener", NoDescriptor(server._listener, 1))
            assert value_of(caller.connect(address).call((*TARGET, 5), {})) == (5,)
            assert silent.recv(1) == b""


def test_without_a_descriptor_left_no_more_are_accepted_and_the_others_stay(monkeypatch, caplog):
    with TcpCallServer(echo, TIMEOUT_S) as server, TcpCaller(1.0) as caller:
        address = server.listen(HOST)
        connection = caller.connect(address)
        monkeypatch.setattr(server, "_listener", NoDescriptor(server._listener, 9))
        with pytest.raises(OSError):
            caller.connect(address)
        assert value_of(connection.call((*TARGET, 5), {})) == (5,)
    assert "calls of trainers that join from now on are sent over RPC" in caplog.text


def test_a_connection_that_could_not_send_is_not_used_again(monkeypatch):
    """What was sent of a call must not be completed later, as the call is sent over RPC."""
    handled = []

    def handle(owner, name, value):
        handled.append(value)
        return completed_future(value)

    def no_memory():
        raise OSError(105, "No buffer space available")

    with connected(handle) as (_, connection):
        assert value_of(connection.call((*TARGET, 1), {})) == 1
        with monkeypatch.context() as patch:
            patch.setattr(connection, "_send_unsent", no_memory)
            assert connection.call((*TARGET, 2), {}) is None
        if (reply := connection.call((*TARGET, 3), {})) is not None:
            with pytest.raises(RuntimeError):
                value_of(reply)
    assert handled == [1]


@pytest.mark.parametrize("timeout_s", [0.1, 1e6])
def test_any_timeout_is_one_that_the_kernel_takes(timeout_s):
    with TcpCallServer(echo, timeout_s) as server, TcpCaller(TIMEOUT_S) as caller:
        assert value_of(caller.connect(server.listen(HOST)).call((*TARGET, 5), {})) == (5,)


def test_the_end_of_the_server_fails_calls_that_wait_and_later_ones_are_left_to_rpc():
    called = threading.Event()

    def handle(owner, name):
        called.set()
        return torch.futures.Future()  # never completed

    with TcpCaller(TIMEOUT_S) as caller:
        with TcpCallServer(handle, TIMEOUT_S) as server:
            connection = caller.connect(server.listen(HOST))
            reply = connection.call(TARGET, {})
            assert called.wait(TIMEOUT_S)
        with pytest.raises(RuntimeError, match="the connection to the server's process was closed"):
            value_of(reply)
        assert connection.call(TARGET, {}) is None


def test_the_end_of_the_caller_fails_its_calls():
    with TcpCallServer(lambda owner, name: torch.futures.Future(), TIMEOUT_S) as server:
        with TcpCaller(TIMEOUT_S) as caller:
            connection = caller.connect(server.listen(HOST))
            reply = connection.call(TARGET, {})
        with pytest.raises(RuntimeError, match="was closed"):
            value_of(reply)
        assert connection.call(TARGET, {}) is None


class Unpicklable:
    def __reduce__(self):
        raise TypeError("it holds a lock")


def test_a_reply_that_cannot_be_pickled_fails_its_call_and_no_other_caller(caplog):
    def handle(owner, name, value):
        return completed_future(Unpicklable() if value == "bad" else value)

    with connected(handle, 2) as (_, one, other):
        with pytest.raises(RuntimeError):
            value_of(one.call((*TARGET, "bad"), {}))
        assert value_of(other.call((*TARGET, 5), {})) == 5
    assert "a reply cannot be pickled" in caplog.text


def test_a_caller_that_does_not_read_delays_no_other():
    large = torch.zeros(8_000_000)

    def handle(owner, name, size):
        return completed_future(large[:size])

    with TcpCallServer(handle, TIMEOUT_S) as server, TcpCaller(TIMEOUT_S) as caller:
        address = server.listen(HOST)
        with without_token(address) as silent:
            silent.sendall(bytes.fromhex(address.split()[2]))
            assert silent.recv(1) == b"\x01"
            head, _ = tcp_calls.pack_apart((1, (*TARGET, len(large)), {}))
            silent.sendall(tcp_calls._HEADER.pack(len(head), 0) + head)
            connection = caller.connect(address)
            for _ in range(20):
                assert len(value_of(connection.call((*TARGET, 5000), {}))) == 5000


def test_an_error_of_one_message_ends_its_connection_and_no_other(caplog):
    def handle(owner, name, value):
        if value == "bad":
            raise ValueError("no handler")
        return completed_future(value)

    with connected(handle, 2) as (_, one, other):
        with pytest.raises(RuntimeError):
            value_of(one.call((*TARGET, "bad"), {}))
        assert value_of(other.call((*TARGET, 5), {})) == 5
    assert "no handler" in caplog.text


def test_an_error_of_the_thread_ends_all_connections_and_is_raised_at_the_end(monkeypatch, caplog):
    def call_and_end():
        with TcpCallServer(echo, TIMEOUT_S) as server, TcpCaller(TIMEOUT_S) as caller:
            address = server.listen(HOST)
            connection = caller.connect(address)
            monkeypatch.setattr(server, "_close_unknown", lambda: "never")
            reply = connection.call((*TARGET, 5), {})
            server._thread.join(TIMEOUT_S)
            assert not server._thread.is_alive()
            if reply is not None:
                value_of(reply)  # it was served first
            with pytest.raises(ConnectionError):
                caller.connect(address)

    with pytest.raises(TypeError):
        call_and_end()
    assert "calls continue over RPC" in caplog.text
