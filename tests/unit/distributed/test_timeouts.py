"""Bounded waits."""

import threading
import time

import pytest

from paramserver.distributed.timeouts import call_with_timeout, poll_until
from paramserver.errors import DeadlineExceeded, Interrupted

LONG_S = 60.0


def now(later_s: float = 0.0) -> float:
    return time.monotonic() + later_s


def test_a_call_returns_its_result():
    assert call_with_timeout(LONG_S, "the sum", lambda: 1 + 1) == 2
    assert call_with_timeout(LONG_S, "nothing", lambda: None) is None


def test_a_call_runs_in_a_named_daemon_thread():
    thread = call_with_timeout(LONG_S, "the store", threading.current_thread)
    assert (thread.name, thread.daemon) == ("within-the store", True)


@pytest.mark.parametrize("error", [RuntimeError("inside"), SystemExit(3), DeadlineExceeded("an inner one")])
def test_an_exception_of_the_call_is_raised(error):
    def function():
        raise error

    with pytest.raises(type(error)) as caught:
        call_with_timeout(LONG_S, "it", function)
    assert caught.value is error
    assert "function" in [entry.name for entry in caught.traceback]


def test_a_call_that_does_not_return_is_abandoned():
    release, ended = threading.Event(), threading.Event()

    def function():
        release.wait(LONG_S)
        ended.set()

    started = now()
    with pytest.raises(DeadlineExceeded, match=r"^the end of the world did not finish within 0\.05 s$"):
        call_with_timeout(0.05, "the end of the world", function)
    assert 0.05 <= now() - started < LONG_S / 2
    assert not ended.is_set()
    release.set()
    assert ended.wait(LONG_S)


def test_a_poll_returns_the_first_answer():
    answers = iter([None, None, 0, 1])
    assert poll_until(now(LONG_S), lambda: next(answers), threading.Event(), every_s=0.0) == 0
    assert next(answers) == 1


def test_a_poll_checks_once_even_after_its_deadline():
    assert poll_until(now(-1), lambda: "there", threading.Event()) == "there"


def test_a_poll_ends_at_its_deadline():
    calls = []
    started = now()
    assert poll_until(now(0.1), lambda: calls.append(now()), threading.Event(), every_s=0.01) is None
    assert 0.1 <= now() - started < LONG_S / 2
    assert 2 <= len(calls) <= 12


def test_a_poll_ends_when_it_is_interrupted():
    interrupted = threading.Event()
    calls = []

    def ready():
        calls.append(1)
        if len(calls) == 3:
            interrupted.set()

    started = now()
    assert poll_until(now(LONG_S), ready, interrupted, every_s=0.01) is None
    assert len(calls) == 3
    assert now() - started < LONG_S / 2


def test_a_call_that_is_interrupted_is_abandoned():
    release, interrupted = threading.Event(), threading.Event()
    threading.Timer(0.2, interrupted.set).start()
    try:
        with pytest.raises(Interrupted, match="interrupted while waiting for the store"):
            call_with_timeout(60.0, "the store", release.wait, interrupted)
    finally:
        release.set()
