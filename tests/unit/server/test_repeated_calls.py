"""Calls that are sent again: by their number they are executed once."""

import threading

import pytest
import torch

from paramserver.consistency import TrainerId
from paramserver.server.repeated_calls import LastReplies, executed_once

FIRST = TrainerId(trainer_index=0, view=1, incarnation=1)
REPLACEMENT = TrainerId(trainer_index=0, view=1, incarnation=2)
OTHER = TrainerId(trainer_index=1, view=1, incarnation=1)


class Server:
    def __init__(self):
        self._lock = threading.RLock()
        self.last_replies = LastReplies()
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
