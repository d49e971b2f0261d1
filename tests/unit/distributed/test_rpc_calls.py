"""Errors on their way across RPC, what names a host, and where a type of the wire means something."""

import pickle
import re
import threading
from pathlib import Path

import pytest
import torch
from launching import launch

from paramserver import errors
from paramserver.config import config_from_mapping
from paramserver.distributed import rpc_calls
from paramserver.distributed.remote_error import RemoteError
from paramserver.distributed.rendezvous import host_identity
from paramserver.distributed.rpc_calls import completed_future
from paramserver.server import client
from paramserver.server.coordinator import ShardCoordinator
from paramserver.server.parameter_server import ParameterServer
from paramserver.server.shard import ShardHandlers
from paramserver.server.shard_server import ShardServer

CLASSES = [c for c in vars(errors).values() if isinstance(c, type)]


class OwnError(errors.TaskError):
    pass


def there_and_back(error: BaseException) -> BaseException:
    return pickle.loads(pickle.dumps(RemoteError.of(error))).error()


@pytest.mark.parametrize("error_class", CLASSES)
def test_every_error_of_the_package_arrives_as_itself(error_class):
    arrived = there_and_back(error_class("server.key (3) must be 4; use 4"))
    assert type(arrived) is error_class
    assert str(arrived) == "server.key (3) must be 4; use 4"


@pytest.mark.parametrize("error", [ValueError("no such row"), KeyError("x"), MemoryError(), AssertionError()])
def test_any_other_error_arrives_with_its_traceback(error):
    def deep_inside():
        raise error

    try:
        deep_inside()
    except (ValueError, KeyError, MemoryError, AssertionError) as caught:
        arrived = there_and_back(caught)
    assert type(arrived) is errors.TrainingError
    assert str(arrived).startswith(f"the server raised {type(error).__name__}: {error}\nTraceback")
    assert "in deep_inside" in str(arrived)


@pytest.mark.parametrize("kind", ["OwnError", "NoSuchError", ""])
def test_a_class_that_the_other_end_lacks_becomes_a_training_error(kind):
    assert type(RemoteError(kind, "x").error()) is errors.TrainingError
    assert str(there_and_back(OwnError("mine"))) == "mine"


def test_a_host_is_named_the_same_twice_and_by_its_network():
    assert host_identity() == host_identity()
    assert "net:[" in host_identity()


# Handlers are found by reference.


class Server:
    def add(self, a, b=1):
        return a + b

    def later(self):
        return completed_future("late")

    def divide(self, a, b=1):
        if b < 0:
            raise errors.PeerLost("gone")
        return a / b

    def leave(self):
        raise SystemExit(1)

    def refuse_later(self):
        raise errors.TrainingError("refused")


class Derived(Server):
    def add(self, a, b=1):
        return -super().add(a, b)


@pytest.fixture
def local_calls(monkeypatch):
    """Calls that stay in this process, as they are on the wire: names and arguments."""

    def rpc_async(to, function, args, kwargs, timeout):
        arrived = pickle.loads(pickle.dumps((args, kwargs)))
        result = function(*arrived[0], **arrived[1])
        return result if isinstance(result, torch.futures.Future) else completed_future(result)

    monkeypatch.setattr(rpc_calls.rpc, "rpc_async", rpc_async)
    yield
    rpc_calls.unregister_servers()


def test_a_call_reaches_the_method_of_the_object_that_is_registered(local_calls):
    rpc_calls.register_server(Server())
    assert rpc_calls.send("server0", 1.0, Server.add, 2, b=3).value() == 5
    assert rpc_calls.send_deferred("server0", Server.later).value() == "late"
    rpc_calls.register_server(Derived())
    assert rpc_calls.send("server0", 1.0, Server.add, 2).value() == -3


def test_a_handler_returns_what_it_raises(local_calls):
    rpc_calls.register_server(Server())
    assert rpc_calls.send("server0", 1.0, Server.divide, 6, b=3).value() == 2
    assert rpc_calls.send("server0", 1.0, Server.divide, 1, -1).value() == RemoteError("PeerLost", "gone")
    assert "ZeroDivisionError" in rpc_calls.send("server0", 1.0, Server.divide, 1, 0).value().message


def test_a_handler_never_hides_that_the_process_is_to_end(local_calls):
    rpc_calls.register_server(Server())
    with pytest.raises(SystemExit):
        rpc_calls.send("server0", 1.0, Server.leave)


def test_a_handler_that_answers_later_gives_its_error_as_a_future(local_calls):
    server, pending = Server(), torch.futures.Future()
    server.later = lambda: pending
    rpc_calls.register_server(server)
    assert rpc_calls.send_deferred("server0", Server.later) is pending
    assert not pending.done()
    refused = rpc_calls.send_deferred("server0", Server.refuse_later)
    assert refused.value() == RemoteError("TrainingError", "refused")


def test_a_call_without_a_registered_object_is_an_error(local_calls):
    for refused in (rpc_calls.send("server0", 1.0, Server.add, 2), rpc_calls.send_deferred("server0", Server.later)):
        assert refused.value() == RemoteError("TrainingError", "this process has no Server (not yet, or not any more)")


def test_a_client_has_one_method_for_each_handler():
    """Each handler is named in the client, by reference, and nothing that is no handler is."""
    source = Path(client.__file__).read_text()
    for owner in (ParameterServer, ShardCoordinator, ShardServer, ShardHandlers):
        named = set(re.findall(rf"\b{owner.__name__}\.(\w+)", source))
        assert named
        assert named <= {name for name in vars(owner) if not name.startswith("_")}


@pytest.mark.parametrize(
    "transfer",
    [
        lambda server: [call.wait() for call in server.pull(0)],
        lambda server: server.view_version(0),
        lambda server: server.compute(None),
    ],
    ids=["pull", "view_version", "compute"],
)
def test_parameters_may_take_longer_than_the_timeout(monkeypatch, transfer):
    monkeypatch.setattr(client, "server_rref", lambda name: None)
    monkeypatch.setattr(client, "watch_peer", lambda name, on_end: None)
    config = config_from_mapping({"mode": "rpc", "task": "m:T", "cluster": {"num_trainers": 1, "timeout_s": 0.01}})
    limits, replies = [], []

    def send_late(to, handler, args, kwargs, timeout_s, *options):
        limits.append(timeout_s)
        replies.append(torch.futures.Future())
        threading.Timer(0.1, replies[-1].set_result, ["late"]).start()
        return replies[-1]

    monkeypatch.setattr(client, "send_call", send_late)
    transfer(client.ServerClient(config, 0, 0, []))
    assert limits == [rpc_calls.NO_TIMEOUT_S]


# The type of the wire, where nothing goes over it.


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_a_wire_type_with_shared_memory_is_refused(narrow):
    def read(mode, transport, wire_dtype, **server):
        server = {"transport": transport, "wire_dtype": wire_dtype, **server}
        return config_from_mapping({"task": "a:B", "mode": mode, "server": server})

    said = rf"^server\.wire_dtype \({narrow}\) must be null or float32 with server\.transport shared_memory, .*rpc$"
    with pytest.raises(errors.UnsupportedConfiguration, match=said):
        read("rpc", "shared_memory", narrow)
    for mode, transport, given in (
        ("rpc", "shared_memory", "float32"),
        ("rpc", "shared_memory", None),
        ("rpc", "auto", narrow),
        ("rpc", "rpc", narrow),
        ("ddp", "shared_memory", narrow),  # which knows no server
    ):
        assert read(mode, transport, given).server.wire_dtype == given


@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "dtype", "servers", "notes"),
    [("auto", "float32", 1, 1), ("auto", "float32", 2, 1), ("rpc", "float32", 1, 0), ("auto", "bfloat16", 1, 0)],
)
def test_a_wire_type_that_rounds_nothing_is_noted_once(tmp_path, transport, dtype, servers, notes):
    finished = launch(
        tmp_path,
        mode="rpc",
        task_args={"dtype": dtype, "batch_norm": False},
        cluster={"num_trainers": 2, "num_servers": servers, "timeout_s": 30},
        server={"transport": transport, "wire_dtype": "bfloat16"},
        training={"max_steps": 3},
    )
    assert finished.code == 0, finished.output
    said = "server.wire_dtype (bfloat16) rounds nothing here, as all trainers share the server's memory; set"
    assert finished.output.count(said) == len(finished.of_kind("note")) == notes
