"""Spare processes, here with nothing to import: who gets a role, what it receives, and what is left behind."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing

import psutil
import pytest

from paramserver.config.modes import MODES
from paramserver.runtime import preloaded
from paramserver.runtime.preloaded import Spares, role_arguments
from paramserver.runtime.rank_guard import RankGuard

LIMIT_S = 30.0

# Instead of being a rank: reports through the pipe of its role.
SPARE = """
import logging, os, sys
from paramserver.config.modes import Mode
from paramserver.runtime import preloaded
logging.basicConfig(level=logging.INFO)
preloaded.MODULES, preloaded.find_spec = (), lambda name: None
role = preloaded.wait_for_role(int(sys.argv[6]), Mode('none', '', ''), int(sys.argv[4]))
if role is not None:
    config = open(role[role.index("--config") + 1]).read()
    words = [os.getpid(), role[0], config, os.environ["MARK"], "torch" in sys.modules, os.getpgrp() == os.getpid()]
    os.write(int(role[role.index("--supervised") + 1]), " ".join(map(str, words)).encode())
    print("to the log")
"""


@pytest.fixture
def notes():
    return []


@pytest.fixture
def make(tmp_path, monkeypatch, notes):
    """Spares whose processes import nothing."""
    monkeypatch.setattr(preloaded, "_COMMAND", (sys.executable, "-c", SPARE))
    opened = []
    with closing(RankGuard(5.0)) as guard:

        def made(count, max_restarts=3):
            environ = {**os.environ, "MARK": "marked"}
            spares = Spares(count, max_restarts, MODES["rpc"], environ, tmp_path / "spares.log", guard, notes.append)
            opened.append(spares)
            spares.fill()
            return spares

        yield made
        for spares in opened:
            spares.close()


def children():
    own = psutil.Process().children()
    return {child.pid for child in own if "preloaded.wait_for_role" in " ".join(command_of(child))}


def command_of(child):
    # A process that has just begun to execute its program has no command line yet; a zombie never has one.
    wait_until(lambda: child.cmdline() or child.status() == psutil.STATUS_ZOMBIE, "a child has no command line")
    return child.cmdline()


def wait_until(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        select.select([], [], [], 0.02)


def ended(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def give_role(spares, tmp_path):
    """Let a spare take a role; return its process id and what it reported."""
    config = os.memfd_create("config.yaml")
    os.write(config, b"config")
    reading, writing = os.pipe()
    with (tmp_path / "rank-1.log").open("ab") as log:
        process = spares.take(["--rank"], [log.fileno(), config, writing])
    os.close(config)
    os.close(writing)
    if process is None:
        os.close(reading)
        return None, ""
    assert select.select([reading], [], [], LIMIT_S)[0]
    report = os.read(reading, 1000).decode()
    os.close(reading)
    assert process.wait(LIMIT_S) == 0
    return process.pid, report


def test_a_spare_takes_the_role_with_its_descriptors_and_environment(make, tmp_path):
    spares = make(1)
    (waiting,) = children()
    pid, report = give_role(spares, tmp_path)
    assert pid == waiting
    assert report == f"{pid} --rank config marked False True"
    assert (tmp_path / "rank-1.log").read_text() == "to the log\n"
    assert f"process {pid} waits for a role" in (tmp_path / "spares.log").read_text()
    assert give_role(spares, tmp_path) == (None, "")


def test_spares_are_filled_up_to_their_number_and_end_with_close(make, tmp_path):
    spares = make(2)
    first = children()
    assert len(first) == 2
    spares.fill()
    assert children() == first
    taken, _ = give_role(spares, tmp_path)
    assert len(children()) == 1
    spares.fill()
    assert len(children()) == 2
    assert taken not in children()
    spares.close()
    assert not children()
    spares.fill()
    assert not children()


def test_the_one_that_has_waited_longest_is_taken_first(make, tmp_path):
    spares = make(1)
    (first,) = children()
    spares._count = 2
    spares.fill()
    assert give_role(spares, tmp_path)[0] == first


def test_a_dead_spare_gets_no_role_and_is_replaced_a_limited_number_of_times(make, tmp_path, notes):
    spares = make(1, max_restarts=1)
    for _ in range(2):
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: ended(pid), "the spare was not killed")
        spares.remove_dead()
        spares.fill()
    assert not children()
    assert len(notes) == 2
    assert notes[0] == "a spare process is lost (killed by SIGKILL); another one starts (1 of 1)"
    assert notes[1].startswith("a spare process is lost (killed by SIGKILL); it is not replaced. See ")
    assert give_role(spares, tmp_path) == (None, "")


def test_spares_that_die_early_again_and_again_start_with_a_delay(make):
    spares = make(1)
    for expected in (1, 0):
        for pid in children():
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: ended(pid), "the spare was not killed")
        spares.remove_dead()
        spares.fill()
        assert len(children()) == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_next_spare_takes_the_role_of_one_that_is_dead_or_stopped(make, tmp_path, notes, number):
    spares = make(1)
    (first,) = children()
    spares._count = 2
    spares.fill()
    os.kill(first, number)
    wait_until(lambda: ended(first) or psutil.Process(first).status() == psutil.STATUS_STOPPED, "no signal came")
    pid, report = give_role(spares, tmp_path)
    assert pid != first
    assert report
    assert not psutil.pid_exists(first)
    assert len(notes) == 1


def test_a_spare_whose_supervisor_is_gone_ends(tmp_path):
    link, child_link = socket.socketpair()
    command = [sys.executable, "-c", SPARE, "--mode", "rpc", "--parent", str(os.getpid())]
    command += ["--spare", str(child_link.fileno())]
    with child_link, link:
        process = subprocess.Popen(command, pass_fds=[child_link.fileno()], start_new_session=True)
    assert process.wait(LIMIT_S) == 0


def test_rank_0_receives_its_listener():
    assert role_arguments(3, 4, 5)[-2:] == ["--listener", "5"]
