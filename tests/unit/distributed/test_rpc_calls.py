"""Errors on their way across RPC, what names a host, and where a type of the wire means something."""

import pickle

import pytest
import torch
from launching import launch

from paramserver import errors
from paramserver.config import config_from_mapping
from paramserver.distributed.rpc_calls import (
    RemoteError,
    completed_future,
    host_identity,
    returns_errors,
    returns_errors_async,
    tensor_bytes,
)

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


def test_a_handler_returns_what_it_raises():
    @returns_errors
    def divide(a: int, b: int = 1) -> float:
        """Divides."""
        if b < 0:
            raise errors.PeerLost("gone")
        return a / b

    assert divide(6, b=3) == 2
    assert divide(1, -1) == RemoteError("PeerLost", "gone")
    assert "ZeroDivisionError" in divide(1, 0).message
    assert (divide.__name__, divide.__doc__) == ("divide", "Divides.")


def test_a_handler_never_hides_that_the_process_is_to_end():
    @returns_errors
    def leave() -> None:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        leave()


def test_a_handler_that_answers_later_gives_its_error_as_a_future():
    @returns_errors_async
    def later(fails: bool) -> torch.futures.Future:
        if fails:
            raise errors.TrainingError("refused")
        return pending

    pending = torch.futures.Future()
    assert later(False) is pending
    assert not pending.done()
    refused = later(True)
    assert refused.done()
    assert refused.value() == RemoteError("TrainingError", "refused")
    assert completed_future(7).value() == 7


def test_bytes_are_those_of_the_values():
    assert tensor_bytes([torch.zeros(3, 2), torch.zeros(5, dtype=torch.bfloat16), torch.empty(0)]) == 34
    assert tensor_bytes(torch.zeros(8, dtype=torch.float64)[:2] for _ in range(2)) == 32
    assert tensor_bytes([]) == 0


def test_a_host_is_named_the_same_twice_and_by_its_network():
    assert host_identity() == host_identity()
    assert "net:[" in host_identity()


# The type of the wire, where nothing goes over it.


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_a_wire_type_with_shared_memory_is_refused(narrow):
    def read(mode, transport, wire_dtype, **server):
        server = {"transport": transport, "wire_dtype": wire_dtype, **server}
        return config_from_mapping({"task": "a:B", "mode": mode, "server": server})

    said = rf"^server\.wire_dtype \({narrow}\) must be float32 with server\.transport shared_memory, .*choose rpc$"
    with pytest.raises(errors.UnsupportedConfiguration, match=said):
        read("rpc", "shared_memory", narrow)
    for mode, transport, given in (
        ("rpc", "shared_memory", "float32"),
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
