"""A rank's event pipe: a supervisor that does not read stops nothing, and receives what matters."""

import contextlib
import json
import os
import threading

import pytest

from paramserver.errors import TrainingError
from paramserver.metrics.records import make_record
from paramserver.runtime.supervisor import EventPipe


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    yield EventPipe(writing), reading
    os.close(reading)
    os.close(writing)


def received(reading):
    """The bodies of the events in the pipe; of one without a body its kind."""
    content = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(reading, 1 << 16):
            content += chunk
    events = [json.loads(line) for line in content.splitlines()]
    return [event["body"] or event["event"] for event in events]


def write_for_display(events, count=2000):
    """More for the display than a pipe holds; in a thread, because a rank that is held here would never come back."""

    def write():
        for step in range(count):
            events.write(make_record("train", step, loss=0.5))
        events.write(make_record("note", count, text="kept"))

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def write_backlog(events):
    """More events of those that must arrive than a pipe holds."""
    while not events._unsent:
        events.write(make_record("note", 0, text="kept"))


def test_a_supervisor_that_does_not_read_does_not_hold_the_rank(pipe):
    events, reading = pipe
    assert write_for_display(events), "the rank waits for its supervisor"
    *train, note = received(reading)
    assert note["text"] == "kept"
    steps = [record["step"] for record in train]
    assert steps == list(range(len(steps)))
    assert 100 < len(steps) < 2000, "the rest was left out"


def test_after_a_backlog_nothing_but_the_display_is_missing(pipe):
    events, reading = pipe
    write_backlog(events)
    received(reading)
    events.send_error(TrainingError("the cause"))
    *_, note, error = received(reading)
    assert (note["kind"], note["text"]) == ("note", "kept")
    assert error["message"] == "the cause"


def test_the_last_events_find_room_however_long_the_supervisor_does_not_read(pipe):
    events, reading = pipe
    assert write_for_display(events)
    events.write(make_record("end", 2000, summary={"status": "completed"}))
    events.send_done()
    *_, end, done = received(reading)
    assert (end["kind"], done) == ("end", "done")


def test_the_last_event_waits_until_the_supervisor_reads(pipe):
    events, reading = pipe
    write_backlog(events)
    sending = threading.Thread(target=events.send_error, args=(TrainingError("the cause"),), daemon=True)
    sending.start()
    sending.join(0.2)
    assert sending.is_alive(), "the pipe was not full"
    found = received(reading)
    sending.join(10)
    assert not sending.is_alive()
    assert (found + received(reading))[-1]["message"] == "the cause"


def test_a_supervisor_that_is_gone_is_no_error(pipe):
    events, reading = pipe
    spare, other = os.pipe()
    os.close(other)
    os.dup2(spare, reading)  # the last reading end of the pipe closes
    os.close(spare)
    events.write(make_record("train", 1))
    events.send_error(TrainingError("the cause"))
