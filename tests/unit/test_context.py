"""What a process knows of itself: its random numbers, its start, and who asked it to stop."""

import io
import itertools
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch

from paramserver import context
from paramserver.cluster import ProcessIdentity
from paramserver.config import Config, Role
from paramserver.consistency import Stop
from paramserver.context import (
    ProcessContext,
    StartupTimer,
    StopRequest,
    process_started,
    random_states,
    restore_random_states,
    seed_all,
)
from paramserver.devices import CPU


@pytest.fixture(autouse=True)
def own_random_numbers():
    states = random_states()
    yield
    restore_random_states(states)


def drawn() -> tuple:
    """From every generator, an odd number of normal deviates each, so that a cached one is part of the state."""
    return (
        torch.randn(3).tolist(),
        np.random.standard_normal(3).tolist(),
        random.gauss(0, 1),
        [random.random() for _ in range(3)],
    )


def test_the_same_seed_gives_the_same_numbers():
    seed_all(5, 2)
    first = drawn()
    seed_all(5, 2)
    assert drawn() == first


def test_nearby_seeds_have_nothing_in_common():
    seen = []
    for seeds in itertools.product(range(6), range(6)):
        seed_all(*seeds)
        seen.append((torch.rand(1).item(), np.random.random_sample(), random.random()))
    for column in zip(*seen, strict=True):
        assert len(set(column)) == 36
    firsts = [s[0] for s in seen]
    assert abs(np.corrcoef(firsts[:-1], firsts[1:])[0, 1]) < 0.5


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_any_seed_of_the_config_is_taken(seed):
    seed_all(seed)
    seed_all(seed, 1, 0)
    assert 0 <= torch.initial_seed() < 2**63


@pytest.mark.parametrize("stored", [False, True])
def test_the_states_go_on_where_they_were(stored):
    seed_all(7)
    drawn()
    states = random_states()
    expected = [drawn(), drawn()]
    if stored:  # as in a checkpoint
        file = io.BytesIO()
        torch.save(states, file)
        file.seek(0)
        states = torch.load(file, weights_only=True)
    seed_all(8)
    restore_random_states(states)
    assert [drawn(), drawn()] == expected


def test_a_cached_deviate_is_part_of_the_state():
    seed_all(3)
    np.random.standard_normal()
    random.gauss(0, 1)
    states = random_states()
    expected = np.random.standard_normal(), random.gauss(0, 1)
    np.random.seed(1)
    random.seed(1)
    restore_random_states(states)
    assert (np.random.standard_normal(), random.gauss(0, 1)) == expected


# Stopping.


def test_nobody_asked():
    assert StopRequest().state() == (Stop.NO, "")


def test_the_first_reason_stands():
    stop = StopRequest()
    stop.request("signal SIGTERM")
    stop.request("signal SIGUSR1")
    assert stop.state() == (Stop.SIGNAL, "signal SIGTERM")
    assert stop.event.is_set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_asks_to_stop(number):
    with StopRequest() as stop:
        signal.raise_signal(number)
        assert stop.state() == (Stop.SIGNAL, f"signal {number.name}")


def test_the_handlers_before_come_back():
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
def test_a_second_interrupt_leaves_at_once(monkeypatch, signals, exits):
    codes = []
    monkeypatch.setattr(context.os, "_exit", codes.append)
    with StopRequest():
        for number in signals:
            signal.raise_signal(number)
    assert codes == exits


def test_a_run_inside_a_thread_leaves_signals_alone():
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


# The start.


def test_the_kernel_knows_when_this_process_began():
    started = process_started()
    assert started < time.time()
    assert started > os.stat("/proc/1").st_mtime - 86_400 * 3650  # noqa: PTH116 - a sane date, whatever the clock
    assert abs(process_started() - started) < 0.5


def test_the_phases_of_a_start_sum_to_its_length(monkeypatch):
    clock = StartupTimer(began=100.0)
    for phase, now in (("imports", 102.5), ("meeting", 103.0), ("imports", 104.0)):
        monkeypatch.setattr(context.time, "time", lambda now=now: now)
        clock.mark(phase)
    assert clock.phases == {"imports": 3.5, "meeting": 0.5}


def test_a_clock_that_was_set_back_gives_no_negative_time(monkeypatch):
    clock = StartupTimer(began=100.0)
    monkeypatch.setattr(context.time, "time", lambda: 90.0)
    clock.mark("imports")
    monkeypatch.setattr(context.time, "time", lambda: 91.0)
    clock.mark("meeting")
    assert clock.phases == {"imports": 0.0, "meeting": 1.0}


def test_without_a_command_a_start_begins_with_the_process():
    clock = StartupTimer()
    clock.mark("all")
    assert 0 < clock.phases["all"] <= time.time() - process_started() + 1.0


def test_a_process_of_a_trainer_has_its_index_and_a_server_none():
    identity = ProcessIdentity(2, 3, 2, 3, 0, "127.0.0.1", 1, False, "job", "flags")
    made = ProcessContext(Config(), identity, Role(2, "trainer", trainer_index=1), 2, CPU)
    assert made.trainer_index == 1
    assert made.stop.state() == (Stop.NO, "")
    with pytest.raises(AssertionError):
        _ = ProcessContext(Config(), identity, Role(0, "server", server_index=0), 2, CPU).trainer_index
