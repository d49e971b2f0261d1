"""The context of a process: requests to stop, start-up times, identity."""

import _thread
import errno
import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from paramserver import context
from paramserver.cluster import ProcessIdentity
from paramserver.config import Config, Role
from paramserver.consistency import Stop
from paramserver.context import (
    ProcessContext,
    StartupTimer,
    StopLimit,
    StopRequest,
    place_of_user_code,
    process_start_time,
)
from paramserver.devices import CPU
from paramserver.distributed.timeouts import call_with_timeout, poll_until
from paramserver.process_utils import STOP_SIGNALS, recorded_signals, recording_signals


def test_no_request_is_no_stop():
    assert StopRequest().state() == (Stop.NO, "")


def test_the_first_reason_is_kept():
    stop = StopRequest()
    stop.request("signal SIGTERM")
    stop.request("signal SIGUSR1")
    assert stop.state() == (Stop.SIGNAL, "signal SIGTERM")
    assert stop.event.is_set()


@pytest.mark.usefixtures("terminal_closes")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_requests_a_stop(number):
    with StopRequest() as stop:
        signal.raise_signal(number)
        assert stop.state() == (Stop.SIGNAL, f"signal {number.name}")


@pytest.mark.usefixtures("terminal_closes")
@pytest.mark.parametrize("handler", [signal.SIG_IGN, print])
def test_a_terminal_that_closes_is_left_to_nohup_and_to_the_program(handler):
    signal.signal(signal.SIGHUP, handler)
    with StopRequest():
        assert signal.getsignal(signal.SIGHUP) is handler


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
    monkeypatch.setattr(context, "_ends", threading.Lock())  # it is not released, as the process ends
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
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


@pytest.mark.claim("forked-workers")
def test_a_forked_child_has_the_handlers_from_before_the_run():
    def own(number, frame):
        pass

    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, own) for number in numbers}
    try:
        with StopRequest(), StopRequest():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of the task
            child = os.fork()
            if child == 0:
                handlers = [signal.getsignal(number) for number in numbers]
                os._exit(0 if handlers == [own, own, signal.SIG_IGN] else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert signal.getsignal(signal.SIGTERM) is not own
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The limit of a stop.


class Ends:
    """A limit whose end is recorded, and which passes as soon as the test says."""

    def __init__(self, limit_s=0.05, grace_s=0.05):
        self.stop, self.ended, self.places = StopRequest(), threading.Event(), []
        self.lines = []
        self.limit = StopLimit(self.stop, limit_s, self.lines.append)
        self.limit.grace_s, self.limit.end = grace_s, lambda place: (self.places.append(place), self.ended.set())


def task_hook(event):
    assert event.wait(20)


@pytest.mark.claim("stuck-hook")
def test_a_hook_that_does_not_return_in_time_is_named():
    ends, at_limit = Ends(), []
    ends.limit.at_limit = at_limit.append
    # The main thread is in this file, which this package did not call.
    with ends.stop, ends.limit:
        ends.stop.request("signal SIGTERM")
        assert ends.ended.wait(20)
    assert ends.limit.is_over
    assert at_limit == ends.places == [""]
    assert len(ends.lines) == 1
    assert ends.lines[0].startswith("signal SIGTERM: this process ends once the present step or hook returns")


@pytest.mark.claim("stuck-hook")
def test_what_fails_at_the_limit_does_not_keep_the_process(caplog):
    """A line to a console that is closed, stacks for a log on a full disk, a checkpoint of a state that is refused."""

    def fail(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    ends = Ends()
    ends.limit._acknowledge = ends.limit.at_limit = fail
    with ends.stop, ends.limit:
        ends.stop.request("signal SIGTERM")
        assert ends.ended.wait(20)
    assert caplog.text.count("No space left on device") >= 2


@pytest.mark.claim("stuck-hook")
def test_what_returns_in_time_is_not_ended():
    ends = Ends(limit_s=1000.0)
    with ends.stop, ends.limit:
        ends.stop.request("the owner")
    assert not ends.places
    assert not ends.limit.is_over


def test_a_signal_that_asks_a_trainer_to_leave_sets_no_limit():
    ends = Ends(limit_s=math.inf)
    with ends.stop, ends.limit:
        ends.stop.request("signal SIGTERM")
        assert not ends.ended.wait(0.5)
    assert ends.lines == [
        "signal SIGTERM: this process ends once the present step or hook returns; a second Ctrl-C ends it at once"
    ]


@pytest.mark.claim("stuck-hook")
def test_a_checkpoint_that_is_written_is_not_limited():
    ends = Ends()
    with ends.stop, ends.limit:
        with ends.limit.paused():
            ends.stop.request("the owner")
            assert not ends.ended.wait(1.0)
        assert ends.ended.wait(20)


@pytest.mark.claim("stuck-hook")
def test_a_hook_in_which_a_checkpoint_waits_is_limited(monkeypatch):
    """The state of an optimizer of the user, for example."""
    ends = Ends()
    monkeypatch.setattr(context, "GRACE_S", 0.5)
    monkeypatch.setattr(StopLimit, "place", lambda limit: "state_dict (task.py, line 1)")
    with ends.stop, ends.limit, ends.limit.paused():
        ends.stop.request("the owner")
        assert not ends.ended.wait(0.3)
        assert ends.ended.wait(20)
    assert ends.places == ["state_dict (task.py, line 1)"]


@pytest.mark.claim("second-signal")
@pytest.mark.usefixtures("terminal_closes")
def test_a_second_signal_ends_the_time_and_the_same_one_that_comes_twice_does_not(monkeypatch):
    ends, over = Ends(limit_s=1000.0), threading.Event()
    ends.limit.at_limit = lambda place: over.set()
    with ends.stop, ends.limit:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert not over.wait(0.3)
        monkeypatch.setattr(context, "SAME_SIGNAL_S", 0.0)
        signal.raise_signal(signal.SIGHUP)
        assert not over.wait(0.3)
        signal.raise_signal(signal.SIGTERM)
        assert over.wait(20)


@pytest.mark.claim("second-signal")
def test_the_limit_of_another_process_that_has_passed_is_the_one_that_is_named():
    """Of two ranks of ddp, the other one may get the second signal sooner."""
    ends, over = Ends(limit_s=1000.0), threading.Event()
    ends.limit.at_limit = lambda place: over.set()
    with ends.stop, ends.limit:
        signal.raise_signal(signal.SIGTERM)
        ends.limit.end_now("signal SIGTERM", "before a second signal")
        assert over.wait(20)
    assert ends.limit.limit_text == "before a second signal"


def test_a_signal_that_the_task_handles_is_no_request():
    ends, seen = Ends(), []
    with ends.stop, ends.limit:
        signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
        signal.raise_signal(signal.SIGUSR1)
        assert not ends.stop.event.wait(0.3)
        signal.signal(signal.SIGUSR1, ends.stop._handle)
    assert seen == [signal.SIGUSR1]


@pytest.mark.claim("early-interrupt")
def test_a_signal_is_acknowledged_while_the_main_thread_computes_in_c():
    code = """
import ctypes, os, signal, threading
from paramserver.context import StopLimit, StopRequest
def acknowledge(line):
    print(line, flush=True)
    os._exit(3)
with StopRequest() as stop, StopLimit(stop, 1000.0, acknowledge):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("signal SIGINT: ")


def test_an_error_is_raised_in_a_hook_of_a_process_that_must_go_on():
    held = threading.Lock()
    with StopRequest() as stop, held:
        timer = threading.Timer(0.1, stop.raise_in_main_thread, (ZeroDivisionError(),))
        timer.start()
        with pytest.raises(ZeroDivisionError):
            held.acquire(timeout=20)
    timer.join()


def test_the_place_in_the_code_of_the_user_is_named():
    event, places = threading.Event(), []

    def called_by_this_package():
        task_hook(event)

    thread = threading.Thread(
        target=call_with_timeout, args=(20.0, "a hook", called_by_this_package), name="outer", daemon=True
    )
    thread.start()
    deadline = time.monotonic() + 20
    while not places and time.monotonic() < deadline:
        inner = [t for t in threading.enumerate() if t.name == "within-a hook"]
        places = [place for place in [place_of_user_code(inner)] if "task_hook" in place or "called_by" in place]
    event.set()
    thread.join(20)
    assert places[0].startswith(f"called_by_this_package ({__file__}, line "), places


@pytest.mark.claim("stuck-hook")
def test_the_place_is_named_in_a_thread_that_is_not_one_of_pythons():
    """Such as those of torch's RPC agent, in which the metric of a task is computed."""
    held, entered, returned = threading.Lock(), threading.Event(), threading.Event()

    def compute():
        entered.set()
        held.acquire()
        return True

    def run():
        poll_until(math.inf, compute, threading.Event())
        returned.set()

    with held:
        _thread.start_new_thread(run, ())
        assert entered.wait(20)
        assert place_of_user_code().startswith(f"compute ({__file__}, line ")
    assert returned.wait(20)


def test_nothing_that_a_thread_had_in_variables_is_kept_after_its_place_was_named():
    class Gradient:
        pass

    entered, looked, found = threading.Event(), threading.Event(), []

    def step():
        gradient = Gradient()
        found.append(weakref.ref(gradient))
        entered.set()
        looked.wait(20)

    thread = threading.Thread(target=step, daemon=True)
    gc.disable()  # a garbage collection may come much later
    try:
        thread.start()
        assert entered.wait(20)
        place_of_user_code([thread])
        looked.set()
        thread.join(20)
        assert found[0]() is None
    finally:
        gc.enable()


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


@pytest.mark.usefixtures("own_environ")
def test_a_signal_while_torch_is_imported_requests_a_stop_afterwards():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        with recording_signals():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        with StopRequest() as stop:
            assert stop.state() == (Stop.SIGNAL, "signal SIGUSR1")
        with StopRequest() as stop:
            assert stop.state() == (Stop.NO, "")
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        with recording_signals():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert recorded_signals == []
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
