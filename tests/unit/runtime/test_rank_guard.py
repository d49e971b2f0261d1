"""The process that ends ranks whose supervisor died: here a supervisor that starts children and is killed."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import pytest

from paramserver.runtime import rank_guard

LIMIT_S = 2.0


@pytest.fixture
def dead_supervisor():
    """Start children from a process that is then killed; return their pidfds."""
    ends, pids = [], []

    def started(*programs):
        code = f"""
import os, subprocess, sys, time
from paramserver.runtime.rank_guard import RankGuard
guard = RankGuard({LIMIT_S})
for program in sys.argv[1:]:
    rank = subprocess.Popen(["sh", "-c", program], start_new_session=True, stdout=subprocess.PIPE, text=True)
    guard.add(rank.pid)
    print(rank.pid, rank.stdout.readline().strip() or rank.pid)
print("started", flush=True)
time.sleep(1000)
"""
        with subprocess.Popen([sys.executable, "-c", code, *programs], stdout=subprocess.PIPE, text=True) as supervisor:
            for line in supervisor.stdout:
                if line.strip() == "started":
                    break
                for pid in {int(word) for word in line.split()}:
                    pids.append(pid)
                    ends.append(os.pidfd_open(pid))
            supervisor.kill()
        return ends

    yield started
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for end in ends:
        os.close(end)


def seconds_until_gone(ends):
    began = time.monotonic()
    for end in ends:
        assert select.select([end], [], [], max(began + LIMIT_S + 10 - time.monotonic(), 0))[0], "a process is left"
    return time.monotonic() - began


def test_a_rank_that_does_not_end_is_killed_after_the_limit(dead_supervisor):
    ends = dead_supervisor("trap '' TERM HUP; echo; sleep 1000", "echo; kill -STOP $$")
    assert len(ends) == 2
    assert seconds_until_gone(ends) > LIMIT_S - 1


def test_what_a_rank_leaves_in_its_group_ends_with_it(dead_supervisor):
    ends = dead_supervisor("sleep 1000 & echo $!; exec >&-; exit 0")
    assert len(ends) == 2, "the rank and its child"
    assert seconds_until_gone(ends) < LIMIT_S


def test_a_guard_that_is_stopped_does_not_keep_its_supervisor_from_ending(monkeypatch):
    monkeypatch.setattr(rank_guard, "_END_S", 0.1)
    guard = rank_guard.RankGuard(LIMIT_S)
    guard._process.send_signal(signal.SIGSTOP)
    guard.close()
    assert guard._process.returncode == -signal.SIGKILL
