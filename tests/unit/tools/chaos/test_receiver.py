"""Faults inside of a rank: what the director sends is applied to calls, steps and the interpreter."""

import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from paramserver.config import Config, Role
from paramserver.distributed import rpc_calls
from paramserver.tools.chaos.faults import FAULT_ADDRESS, Fault, FaultDirector, FaultReceiver, receive_faults

TRAINER_1 = Role(2, "trainer", trainer_index=1)
PATIENCE_S = 20.0


class Task:
    """The part of a task that is slowed down."""

    def training_step(self, model, batch, batch_idx):
        return torch.zeros(())


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.005)


@pytest.fixture
def injected(monkeypatch):
    """A function that injects faults into this process, as trainer 1, and returns director and receiver."""
    monkeypatch.setattr(rpc_calls, "_interceptor", None)
    directors, receivers = [], []

    def inject(*faults, role=TRAINER_1, task=None):
        director = FaultDirector(faults, Config())
        directors.append(director)
        monkeypatch.setenv(FAULT_ADDRESS, director.address)
        on_task = receive_faults(role.global_rank)
        on_task(role, task or Task())
        receiver = rpc_calls._interceptor
        receivers.append(receiver)
        director.write({"kind": "train", "step": 1, "time": 0.0})
        wait_until(lambda: all(shot.fired_at is not None for shot in director.shots))
        return director, receiver

    yield inject
    for director in directors:
        director.close()
    for receiver in receivers:
        receiver._socket.close()


def call(receiver, handler="push", to="server0", sent=None):
    """A call that would be answered with 1; the result or the error."""

    def make():
        if sent is not None:
            sent.append(handler)
        return rpc_calls.completed_future(1)

    future = receiver.intercept(to, handler, make)
    try:
        return future.value()
    except RuntimeError as error:
        return str(error)


def outcomes(receiver, number, **named):
    return [call(receiver, **named) for _ in range(number)]


def test_requests_and_replies_are_lost_at_their_rates_and_counted(injected):
    director, receiver = injected(Fault("lose", "", "requests", amount=20.0), Fault("lose", "", "replies", amount=40.0))
    wait_until(lambda: min(receiver._lost_percent.values()) > 0)
    sent = []
    found = outcomes(receiver, 2000, sent=sent)
    assert 300 < 2000 - len(sent) < 500, "of requests"
    assert 500 < sum("the reply was lost" in str(one) for one in found) < 800
    assert found.count(1) == len(sent) - sum("the reply was lost" in str(one) for one in found)
    wait_until(lambda: len(director.lost) == 2000 - found.count(1))
    assert set(director.lost) == {"request of push", "reply of push"}
    rpc_calls.note_repeated("push")
    wait_until(lambda: director.repeated == ["push"])


def test_nothing_is_lost_before_the_first_push(injected):
    _, receiver = injected(Fault("lose", "", "requests", amount=50.0))
    wait_until(lambda: receiver._lost_percent["requests"] > 0)
    assert set(outcomes(receiver, 50, handler="join")) == {1}
    outcomes(receiver, 1)
    assert len(set(outcomes(receiver, 50, handler="join"))) == 2
    assert len(set(outcomes(receiver, 50, to="server1"))) == 2


def test_a_partition_fails_all_calls_until_it_ends(injected):
    _, receiver = injected(Fault("partition", "trainer:1", for_s=0.3))
    wait_until(lambda: call(receiver) != 1)
    assert "the request was lost" in call(receiver, to="server1")
    wait_until(lambda: call(receiver) == 1)


def test_a_partition_of_a_server_fails_the_calls_to_it(injected):
    _, receiver = injected(Fault("partition", "server:0", for_s=60.0))
    wait_until(lambda: call(receiver) != 1)
    assert call(receiver, to="server1") == 1


def test_a_partition_of_another_trainer_changes_nothing_here(injected):
    _, receiver = injected(Fault("partition", "trainer:0", for_s=60.0))
    wait_until(lambda: receiver._cut_off)
    assert set(outcomes(receiver, 20)) == {1}


def test_a_reply_that_arrives_during_a_partition_is_lost(injected):
    _, receiver = injected()
    call(receiver)
    reply = torch.futures.Future()
    future = receiver.intercept("server0", "push", lambda: reply)
    receiver._partition("trainer:1", 60.0)
    reply.set_result(1)
    with pytest.raises(RuntimeError, match="the reply was lost"):
        future.value()


def test_an_error_of_a_call_is_passed_on(injected):
    _, receiver = injected()
    reply = torch.futures.Future()
    future = receiver.intercept("server0", "push", lambda: reply)
    reply.set_exception(RuntimeError("the connection is closed"))
    with pytest.raises(RuntimeError, match="the connection is closed"):
        future.value()


@pytest.mark.parametrize("loss", [torch.zeros(()), None])
def test_a_slow_trainer_takes_longer_for_its_steps(injected, loss):
    """Those of several optimizers return no loss."""

    class Computes(Task):
        def training_step(self, model, batch, batch_idx):
            threading.Event().wait(0.01)
            return loss

    task = Computes()
    _, receiver = injected(Fault("slow", "trainer:1", amount=10.0), task=task)
    wait_until(lambda: receiver._slowdown is not None)
    began = time.monotonic()
    task.training_step(None, None, 0)
    assert time.monotonic() - began >= 0.09


def test_the_interpreter_is_held(injected):
    """No other thread of this process runs meanwhile."""
    longest, last, ended = 0.0, time.monotonic(), threading.Event()

    def watch():
        nonlocal longest, last
        while not ended.wait(0.002):
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=watch, name="watch")
    thread.start()
    try:
        injected(Fault("hold_gil", "trainer:1", for_s=0.5))
        wait_until(lambda: longest >= 0.45)
    finally:
        ended.set()
        thread.join()


def test_signals_reach_the_process_that_connected():
    """A child that registers is frozen, continued and killed; this process is not."""
    program = (
        "import sys; from paramserver.tools.chaos.faults import FaultReceiver;"
        "receiver = FaultReceiver(sys.argv[1], 1); sys.stdin.read()"
    )
    faults = [Fault("freeze", "trainer:0", at_step=1, for_s=0.3), Fault("kill", "trainer:0", at_step=2)]
    with FaultDirector(faults, Config()) as director:
        command = [sys.executable, "-c", program, director.address]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            wait_until(lambda: 1 in director._ranks)
            director.write({"kind": "train", "step": 1, "time": 0.0})
            found = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            assert found.si_status == signal.SIGSTOP
            os.waitid(os.P_PID, child.pid, os.WCONTINUED)
            director.write({"kind": "train", "step": 2, "time": 0.0})
            assert child.wait(PATIENCE_S) == -signal.SIGKILL
        wait_until(lambda: 1 not in director._ranks)
        assert [shot.step for shot in director.shots] == [1, 2]


def test_a_replacement_gets_the_faults_that_last(injected):
    director, first = injected(Fault("slow", "trainer:1", amount=3.0))
    wait_until(lambda: first._slowdown is not None)
    second = FaultReceiver(director.address, TRAINER_1.global_rank)
    try:
        wait_until(lambda: second._slowdown is not None)
    finally:
        second._socket.close()
