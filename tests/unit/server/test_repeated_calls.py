"""Calls that are sent again: by their number they are executed once."""

import threading
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from types import SimpleNamespace

import pytest
import torch

from paramserver.consistency import TrainerId
from paramserver.distributed.rpc_calls import LastReplies, executed_once

FIRST = TrainerId(trainer_index=0, generation=1, incarnation=1)
REPLACEMENT = TrainerId(trainer_index=0, generation=1, incarnation=2)
OTHER = TrainerId(trainer_index=1, generation=1, incarnation=1)


class Server:
    def __init__(self):
        self._lock = threading.RLock()
        self.last_replies = LastReplies()
        self.roster = SimpleNamespace(index_of=lambda sender: sender.trainer_index)
        self.executed = []

    @executed_once
    def announce(self, sender, what):
        if what == "late":
            raise ValueError("the run has ended")
        self.executed.append((sender, what))
        return torch.futures.Future()

    @executed_once
    def stage(self, sender, what):
        self.executed.append((sender, what))


def test_a_call_that_is_repeated_gets_the_same_future_and_is_executed_once():
    server = Server()
    reply = server.announce(FIRST, "step 1", number=1)
    assert server.announce(FIRST, "step 1", number=1) is reply
    assert server.announce(FIRST, "step 1", number=2) is not reply
    assert len(server.executed) == 2


def test_none_is_a_reply():
    server = Server()
    assert server.stage(FIRST, "periodic", number=1) is None
    assert server.stage(FIRST, "periodic", number=1) is None
    assert len(server.executed) == 1


def test_calls_are_those_of_one_handler_one_trainer_and_one_process():
    server = Server()
    replies = [server.announce(sender, "step 1", number=1) for sender in (FIRST, OTHER, REPLACEMENT)]
    server.stage(REPLACEMENT, "periodic", number=1)
    assert len({id(reply) for reply in replies}) == 3
    assert len(server.executed) == 4
    assert server.announce(OTHER, "step 1", number=1) is replies[1]


def test_a_call_without_a_number_is_always_executed():
    server = Server()
    assert server.announce(FIRST, "step 1") is not server.announce(FIRST, "step 1")


def test_a_call_that_raised_raises_again():
    server = Server()
    for _ in range(2):
        with pytest.raises(ValueError, match="ended"):
            server.announce(FIRST, "late", number=1)


class Gate(Server):
    """A handler that waits inside of its first call."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error
        self.entered, self.leave = threading.Event(), threading.Event()

    @executed_once
    def receive(self, sender, chunk):
        self.executed.append(chunk)
        if not self.entered.is_set():
            self.entered.set()
            assert self.leave.wait(20)
            if self.error is not None:
                raise self.error
        return len(self.executed)


def while_running(server, number):
    """The replies to a call and to a second one that arrives in another thread while the first one runs."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(server.receive, FIRST, "chunk", number=1)
        assert server.entered.wait(20)
        second = threads.submit(server.receive, FIRST, "chunk", number=number)
        try:
            with pytest.raises(TimeoutError):
                second.result(0.1)
        finally:
            server.leave.set()
        return first, second


def test_a_call_that_is_repeated_while_the_first_one_runs_is_executed_once():
    server = Gate()
    first, second = while_running(server, number=1)
    assert (first.result(20), second.result(20)) == (1, 1)
    assert server.executed == ["chunk"]


def test_the_next_call_is_executed_after_the_one_that_runs():
    server = Gate()
    first, second = while_running(server, number=2)
    assert (first.result(20), second.result(20)) == (1, 2)


def test_a_call_whose_first_one_raises_meanwhile_is_executed():
    server = Gate(ValueError("the run has ended"))
    first, second = while_running(server, number=1)
    with pytest.raises(ValueError, match="ended"):
        first.result(20)
    assert second.result(20) == 2
