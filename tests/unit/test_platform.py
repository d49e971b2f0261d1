"""What only Linux has, and the other way for each, which a variable or a monkeypatch forces here."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from paramserver import platform
from paramserver.platform import WakeupFd, has_ended, memory_file, open_process, signal_process

LIMIT_S = 30.0
WAITS = [sys.executable, "-c", "input()"]


@pytest.fixture(params=[False, True], ids=["linux", "portable"])
def portable(request, monkeypatch):
    monkeypatch.setattr(platform, "PORTABLE", request.param)
    return request.param


def is_readable(descriptor):
    return bool(select.select([descriptor], [], [], LIMIT_S)[0])


def join_threads():
    for thread in threading.enumerate():
        if thread.name == "process-end":
            thread.join(LIMIT_S)


def test_the_end_of_a_child_is_seen_and_leaves_it_to_be_reaped(portable):
    child = subprocess.Popen(WAITS, stdin=subprocess.PIPE)
    ends = open_process(child.pid)
    try:
        assert not has_ended(ends)
        signal_process(ends, child.pid, signal.SIGKILL)
        assert is_readable(ends)
        assert has_ended(ends)
    finally:
        assert child.wait(LIMIT_S) == -signal.SIGKILL
        child.stdin.close()
        os.close(ends)
        join_threads()


def test_the_end_of_another_process_is_seen(portable):
    """It is the child of a shell, which reaps it."""
    command = ["bash", "-c", "sleep 60 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shell:
        other = int(shell.stdout.readline())
        ends = open_process(other)
        assert not has_ended(ends)
        signal_process(ends, other, signal.SIGKILL)
        assert is_readable(ends)
        os.close(ends)
        join_threads()


def test_a_process_that_is_gone_cannot_be_opened(portable):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(LIMIT_S)
    with pytest.raises(ProcessLookupError):
        open_process(child.pid)


def test_a_memory_file_has_no_name_and_can_be_opened_by_another_process(portable, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with os.fdopen(memory_file("words"), "w") as file:
        file.write("words\n")
        file.flush()
        assert list(tmp_path.iterdir()) == []
        command = ["cat", f"/dev/fd/{file.fileno()}"]
        assert subprocess.run(command, pass_fds=[file.fileno()], capture_output=True, check=True).stdout == b"words\n"


def test_a_wakeup_is_readable_until_it_is_cleared(portable):
    with closing(WakeupFd()) as wakeup:
        assert not select.select([wakeup], [], [], 0)[0]
        for _ in range(3):
            wakeup.set()
        assert is_readable(wakeup)
        wakeup.clear()
        assert not select.select([wakeup], [], [], 0)[0]
    wakeup.set()


@pytest.mark.parametrize("forced", ["", "1"])
def test_a_process_receives_a_signal_at_the_end_of_its_parent(tmp_path, forced):
    program = """
import os, signal, subprocess, sys
from paramserver.process_utils import die_with_parent
if len(sys.argv) == 2:
    command = [sys.executable, "-c", open(sys.argv[1]).read(), "", str(os.getpid())]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
else:
    die_with_parent(int(sys.argv[2]))
    print("ready", flush=True)
    signal.pause()
"""
    (tmp_path / "program.py").write_text(program)
    environ = {**os.environ, "PARAMSERVER_PORTABLE": forced}
    command = [sys.executable, "-c", program, str(tmp_path / "program.py")]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as parent:
        ends = os.pidfd_open(int(parent.stdout.readline()))
    assert is_readable(ends)
    os.close(ends)


def test_what_is_not_known_elsewhere_has_a_value_that_stops_nothing(monkeypatch):
    monkeypatch.setattr(platform, "PORTABLE", True)
    assert not platform.is_stopped(os.getpid())
    assert platform.start_ticks(os.getpid()) == 0
    assert platform.core_wait_ns() is None
    assert platform.num_usable_cores() >= 1
    assert platform.host_number() == platform.host_number()
    platform.show_arguments(["--rank", "0"])


def test_the_peer_of_a_socket_is_this_user():
    one, other = socket.socketpair()
    with one, other:
        assert platform.peer_uid(one) == os.geteuid()
