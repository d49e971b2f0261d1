"""The exit of a process: threads, handlers and output complete, and no native thread turns success into SIGABRT."""

import subprocess
import sys

import pytest


def ended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("torch", ["", "import torch"])
def test_the_exit_code_threads_handlers_and_output(torch):
    done = ended(
        f"""
import atexit, sys, threading, time
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
