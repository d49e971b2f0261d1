"""Errors on their way across RPC, and what names a host."""

import pickle

import pytest
import torch

from paramserver import errors
from paramserver.transport.wire import Failure, answers, answers_later, host_identity, settled, tensor_bytes

CLASSES = [c for c in vars(errors).values() if isinstance(c, type)]


class OwnError(errors.TaskError):
    pass


def there_and_back(error: BaseException) -> BaseException:
    return pickle.loads(pickle.dumps(Failure.of(error))).error()


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
    assert type(Failure(kind, "x").error()) is errors.TrainingError
    assert str(there_and_back(OwnError("mine"))) == "mine"


def test_a_handler_returns_what_it_raises():
    @answers
    def divide(a: int, b: int = 1) -> float:
        """Divides."""
        if b < 0:
            raise errors.PeerLost("gone")
        return a / b

    assert divide(6, b=3) == 2
    assert divide(1, -1) == Failure("PeerLost", "gone")
    assert "ZeroDivisionError" in divide(1, 0).message
    assert (divide.__name__, divide.__doc__) == ("divide", "Divides.")


def test_a_handler_never_hides_that_the_process_is_to_end():
    @answers
    def leave() -> None:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        leave()


def test_a_handler_that_answers_later_gives_its_error_as_a_future():
    @answers_later
    def later(fails: bool) -> torch.futures.Future:
        if fails:
            raise errors.TrainingError("refused")
        return pending

    pending = torch.futures.Future()
    assert later(False) is pending
    assert not pending.done()
    refused = later(True)
    assert refused.done()
    assert refused.value() == Failure("TrainingError", "refused")
    assert settled(7).value() == 7


def test_bytes_are_those_of_the_values():
    assert tensor_bytes([torch.zeros(3, 2), torch.zeros(5, dtype=torch.bfloat16), torch.empty(0)]) == 34
    assert tensor_bytes(torch.zeros(8, dtype=torch.float64)[:2] for _ in range(2)) == 32
    assert tensor_bytes([]) == 0


def test_a_host_is_named_the_same_twice_and_by_its_network():
    assert host_identity() == host_identity()
    assert "net:[" in host_identity()
