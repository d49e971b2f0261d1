"""The context of a process: requests to stop, start-up times, identity."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from paramserver import context
from paramserver.cluster import ProcessIdentity
from paramserver.config import Config, Role
from paramserver.consistency import Stop
from paramserver.context import (
    ProcessContext,
    StartupTimer,
    StopRequest,
    process_start_time,
)
from paramserver.devices import CPU


def test_no_request_is_no_stop():
    assert StopRequest().state() == (Stop.NO, "")


def test_the_first_reason_is_kept():
    stop = StopRequest()
    stop.request("signal SIGTERM")
    stop.request("signal SIGUSR1")
    assert stop.state() == (Stop.SIGNAL, "signal SIGTERM")
    assert stop.event.is_set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_requests_a_stop(number):
    with StopRequest() as stop:
        signal.raise_signal(number)
        assert stop.state() == (Stop.SIGNAL, f"signal {number.name}")


def test_the_previous_handlers_are_restored():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(ZeroDivisionError), StopRequest():
            1 / 0  # noqa: B018
        signal.raise_signal(signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("signals", "exits"),
    [
        ([signal.SIGINT, signal.SIGINT], [1]),
        ([signal.SIGTERM, signal.SIGINT], [1]),
        ([signal.SIGINT, signal.SIGTERM], []),
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1], []),
    ],
)
def test_a_second_interrupt_exits_at_once(monkeypatch, signals, exits):
    codes = []
    monkeypatch.setattr(context.os, "_exit", codes.append)
    with StopRequest():
        for number in signals:
            signal.raise_signal(number)
    assert codes == exits


def test_a_signal_that_interrupts_a_wait_for_it_does_not_deadlock():
    """The handler runs in the thread that it interrupts, which may hold the lock of a ``threading.Event``."""
    code = """
import signal
from paramserver.context import StopRequest
with StopRequest() as stop:
    with stop.event._cond:  # as inside of ``wait`` and ``set``
        signal.raise_signal(signal.SIGTERM)
    assert stop.event.wait(0.0)
    print(stop.state())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert "signal SIGTERM" in done.stdout, done.stderr


def test_a_wait_for_a_request_ends_with_it_or_with_its_limit():
    stop = StopRequest()
    assert not stop.event.wait(0.01)
    timer = threading.Timer(0.1, stop.request, ("the owner",))
    timer.start()
    assert stop.event.wait(20)
    timer.join()


def test_a_run_in_another_thread_installs_no_signal_handlers():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run() -> None:
        with StopRequest() as stop:
            seen.append(signal.getsignal(signal.SIGTERM))
            stop.request("the owner")
            seen.append(stop.state())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert seen == [before, (Stop.SIGNAL, "the owner")]


# Start-up times.


def test_the_kernel_reports_when_this_process_started():
    started = process_start_time()
    assert started < time.time()
    assert started > os.stat("/proc/1").st_mtime - 86_400 * 3650  # noqa: PTH116 - a sane date, whatever the clock
    assert abs(process_start_time() - started) < 0.5


def test_the_phases_of_a_start_sum_to_its_length(monkeypatch):
    clock = StartupTimer(began=100.0)
    for phase, now in (("imports", 102.5), ("rendezvous", 103.0), ("imports", 104.0)):
        monkeypatch.setattr(context.time, "time", lambda now=now: now)
        clock.mark(phase)
    assert clock.phases == {"imports": 3.5, "rendezvous": 0.5}


def test_a_clock_that_was_set_back_gives_no_negative_time(monkeypatch):
    clock = StartupTimer(began=100.0)
    monkeypatch.setattr(context.time, "time", lambda: 90.0)
    clock.mark("imports")
    monkeypatch.setattr(context.time, "time", lambda: 91.0)
    clock.mark("rendezvous")
    assert clock.phases == {"imports": 0.0, "rendezvous": 1.0}


def test_without_a_command_a_start_begins_with_the_process():
    clock = StartupTimer()
    clock.mark("all")
    assert 0 < clock.phases["all"] <= time.time() - process_start_time() + 1.0


def test_a_process_of_a_trainer_has_its_index_and_a_server_none():
    identity = ProcessIdentity(2, 3, 2, 3, 0, "127.0.0.1", 1, False, "job", "flags")
    made = ProcessContext(Config(), identity, Role(2, "trainer", trainer_index=1), 2, CPU)
    assert made.trainer_index == 1
    assert made.stop.state() == (Stop.NO, "")
    with pytest.raises(AssertionError):
        _ = ProcessContext(Config(), identity, Role(0, "server", server_index=0), 2, CPU).trainer_index
