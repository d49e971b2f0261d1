"""The fork server, here with nothing to import: whose child a rank is, what it receives, and its failures."""

import ctypes
import os
import re
import select
import signal
import sys
import time
from contextlib import closing

import psutil
import pytest

from paramserver.config.modes import MODES
from paramserver.runtime import preloaded
from paramserver.runtime.preloaded import ForkServer
from paramserver.runtime.rank_guard import RankGuard

LIMIT_S = 30.0

# Instead of being a rank: reports through the pipe of its role, and ends with a code of its own.
SERVER = """
import os, sys, threading
from paramserver.config.modes import Mode
from paramserver.runtime import preloaded
preloaded.MODULES, preloaded.find_spec = (), lambda name: None
if os.environ["MARK"] == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if os.environ["MARK"] == "raises":
    raise ValueError("no module today")
if os.environ["MARK"] == "numpy":
    os.environ.update(OMP_NUM_THREADS="2", OPENBLAS_NUM_THREADS="2")
    import numpy
role = preloaded.serve_forks(int(sys.argv[6]), Mode('none', '', ''), int(sys.argv[4]))
if role is not None:
    config = open(role[role.index("--config") + 1]).read()
    opened = sorted(int(name) for name in os.listdir("/proc/self/fd"))[3:-1]
    shown = open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")[-2:]
    words = [os.getpid(), os.getppid(), *shown, config, os.environ["MARK"], os.getpgrp() == os.getpid(), len(opened)]
    os.write(int(role[role.index("--supervised") + 1]), " ".join(map(str, words)).encode())
    print("to the log", flush=True)
    os._exit(int(role[1]))
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(preloaded, "_COMMAND", (sys.executable, "-c", SERVER))
    opened = []
    with closing(RankGuard(5.0)) as guard:

        def made(mark="marked", timeout_s=LIMIT_S):
            opened.append(
                ForkServer(MODES["rpc"], {**os.environ, "MARK": mark}, tmp_path / "start.log", guard, timeout_s)
            )
            return opened[-1]

        yield made
        for server in opened:
            server.close()


def fork(server, tmp_path, rank=1, is_stopping=lambda: False, closes=False):
    """Let the server fork a rank; return its process and what it reported."""
    config = os.memfd_create("config.yaml")
    os.write(config, b"config")
    reading, writing = os.pipe()
    try:
        with (tmp_path / f"rank-{rank}.log").open("ab") as log:
            process = server.fork(["--rank", str(rank)], [log.fileno(), config, writing], is_stopping)
        if closes:
            server.close()
        os.close(writing)
        if process is None:
            return None, ""
        assert select.select([reading], [], [], LIMIT_S)[0]
        return process, os.read(reading, 1000).decode()
    finally:
        os.close(config)
        os.close(reading)


def test_a_rank_is_a_child_of_the_supervisor_with_its_descriptors_and_environment(make, tmp_path):
    server = make()
    for rank in (1, 2):
        process, report = fork(server, tmp_path, rank)
        # Two descriptors: the config and the pipe.
        assert report == f"{process.pid} {os.getpid()} --rank {rank} config marked True 2"
        assert process.wait() == rank
        assert (tmp_path / f"rank-{rank}.log").read_text() == "to the log\n"
        assert not psutil.pid_exists(process.pid)


def test_forks_outlive_the_server_which_leaves_nothing(make, tmp_path):
    server = make()
    process, report = fork(server, tmp_path, closes=True)
    server.close()
    assert report
    assert process.wait() == 1
    assert "serve_forks" not in str([child.cmdline() for child in psutil.Process().children()])
    assert fork(server, tmp_path) == (None, "")


def test_this_process_adopts_no_orphans_afterwards(make, tmp_path):
    process, _ = fork(make(), tmp_path)
    process.wait()
    adopts = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(37, ctypes.byref(adopts)) == 0  # PR_GET_CHILD_SUBREAPER
    assert adopts.value == 0


@pytest.mark.claim("empty-start-log")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_a_server_that_answers_there_is_no_fork(make, tmp_path, number):
    server = make(timeout_s=0.5)
    os.kill(server._process.pid, number)
    assert fork(server, tmp_path) == (None, "")
    assert server._process.returncode == -signal.SIGKILL
    assert re.match(
        r"the process to fork them from (did not answer within 0\.5 s|ended without a message \(.*: .+\))$",
        server.failed,
    )


@pytest.mark.claim("empty-start-log")
def test_a_server_with_threads_does_not_fork_and_names_them(make, tmp_path):
    server = make(mark="threads")
    assert fork(server, tmp_path) == (None, "")
    assert re.match(r"the process to fork them from has other threads \(.+\), which a fork would lose$", server.failed)
    assert (tmp_path / "start.log").read_text().strip() == server.failed


@pytest.mark.claim("empty-start-log")
def test_a_server_that_fails_is_reported_with_its_error(make, tmp_path):
    (tmp_path / "start.log").write_text("of an earlier attempt\n")
    server = make(mark="raises")
    assert fork(server, tmp_path) == (None, "")
    assert server.failed == "ValueError: no module today"


@pytest.mark.claim("empty-start-log")
def test_threads_of_a_numerical_library_are_no_obstacle(make, tmp_path):
    """OpenBLAS starts them when numpy is imported, with more than one core per rank, and ends them at a fork."""
    process, report = fork(make(mark="numpy"), tmp_path)
    assert report
    assert process.wait() == 1


def test_a_wait_for_the_server_ends_when_the_run_is_interrupted(make, tmp_path):
    server = make()
    os.kill(server._process.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert fork(server, tmp_path, is_stopping=lambda: True) == (None, "")
    assert time.monotonic() - began < LIMIT_S / 2
