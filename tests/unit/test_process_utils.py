"""The exit of a process: threads, handlers and output complete, and no native thread turns success into SIGABRT."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.process_utils import collecting_signals, stop_signals


def ended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("torch", ["", "import torch"])
def test_the_exit_code_threads_handlers_and_output(torch):
    done = ended(
        f"""
import atexit, sys, threading, time
from pathlib import Path
{torch}
from paramserver.process_utils import exit_process
atexit.register(lambda: print("handler"))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("work", end="\\n")
exit_process(3)
"""
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.split() == ["work", "thread", "handler"]


def test_operators_of_torch_stay_and_no_times_of_its_compiler_are_formatted():
    """Both take longer than all else at the end of a rank; what a task finalizes at exit is finalized."""
    done = ended(
        """
import atexit, sys
atexit.register(lambda: print(bool(torch.library._impls), "tabulate" in sys.modules, Path(folder.name).exists()))
import tempfile
from pathlib import Path
import torch._dynamo
from paramserver.process_utils import exit_process
folder = tempfile.TemporaryDirectory()
print(bool(torch.library._impls), "tabulate" in sys.modules, Path(folder.name).exists())
exit_process(0)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["True False True", "True False False"]


def test_output_that_cannot_be_written_does_not_change_the_exit_code():
    program = """
import sys
from paramserver.process_utils import exit_process
sys.modules["torch"] = sys  # as if it were loaded
print("left in the buffer", file=sys.stdout or sys.stderr, end="")
exit_process(3)
"""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reading, unread = os.pipe()
    os.close(reading)
    with os.fdopen(unread, "w") as output:
        for redirection in (">&-", ">/dev/full", "", "2>&-"):
            words = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", program]
            done = subprocess.run(
                words, stdout=output, stderr=subprocess.PIPE, env=environ, text=True, timeout=60, check=False
            )
            assert done.returncode == 3, (redirection, done.stderr)
            assert "Traceback" not in done.stderr


def test_output_of_a_command_that_cannot_be_written_is_an_error_of_one_sentence():
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "paramserver", "--version"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "error: standard output must be writable (No space left on device); free space, or write to another file\n"
    )


def test_a_daemon_thread_that_waits_for_a_store_does_not_abort_the_exit():
    """With a finalized interpreter, the thread of an abandoned wait ends the process with SIGABRT."""
    done = ended(
        """
import socket, threading, time
from datetime import timedelta
from torch.distributed import TCPStore
from paramserver.process_utils import exit_process
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
waiting = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
threading.Thread(target=lambda: waiting.get("never"), daemon=True).start()
time.sleep(0.2)  # it is inside the wait by now, or never ends there
del store
exit_process(0)
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled(2)
@pytest.mark.claim("forked-workers")
@pytest.mark.parametrize(
    "left_open",
    [
        "context.Process(target=signal.pause).start()",
        "workers = context.Pool(1); workers.apply_async(signal.pause)",
        "workers = ProcessPoolExecutor(1, context); workers.submit(signal.pause)",
        "threading.Thread(target=stays.wait).start()",
        "atexit.register(stays.wait)",
        "atexit.register(stays.wait); sys.stderr.close()",
    ],
    ids=["process", "pool", "executor", "thread", "handler", "closed-console"],
)
def test_what_a_task_leaves_open_does_not_keep_the_process(left_open):
    done = ended(
        f"""
import atexit, multiprocessing, signal, sys, threading
from concurrent.futures import ProcessPoolExecutor
import torch
from paramserver import process_utils
from paramserver.context import StopRequest
process_utils._THREADS_S = process_utils._HANDLERS_S = process_utils._UNBLOCKED_S = 0.3
context, stays = multiprocessing.get_context("fork"), threading.Event()
with StopRequest(restore=False):
    {left_open}
    process_utils.exit_process(3)
"""
    )
    assert done.returncode == 3, done.stderr


@pytest.mark.claim("second-signal")
@pytest.mark.parametrize("signals", ["SIGTERM SIGTERM", "SIGUSR1 SIGTERM", "SIGINT"])
def test_a_signal_ends_exit_handlers(signals):
    """The first SIGTERM may be that of a run which has ended just now."""
    done = ended(
        f"""
import atexit, signal, sys
from paramserver.process_utils import exit_process
sys.modules["torch"] = sys  # as if it were loaded
def receive():
    for name in "{signals}".split():
        print(name, flush=True)
        signal.raise_signal(getattr(signal, name))
    print("goes on", flush=True)
atexit.register(receive)
exit_process(3)
"""
    )
    assert (done.returncode, done.stdout.strip().split()) == (3, signals.split()), done.stderr


@pytest.mark.usefixtures("terminal_closes")
def test_a_terminal_that_closes_is_no_second_signal():
    """The kernel and the shell may each send one."""
    with collecting_signals(stop_signals()) as received:
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
        assert received == [signal.SIGHUP]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_task_may_print_after_its_terminal_was_closed():
    code = """
import signal
from paramserver.context import StopRequest
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with StopRequest() as stop:
    print("begins", flush=True)
    assert stop.event.wait(20)
    print("ends", flush=True)
raise SystemExit(3)
"""
    terminal, its_end = os.openpty()
    run = subprocess.Popen([sys.executable, "-c", code], stdout=its_end, stderr=its_end)
    os.close(its_end)
    assert os.read(terminal, 100).split() == [b"begins"]
    os.close(terminal)
    run.send_signal(signal.SIGHUP)
    assert run.wait(60) == 3
