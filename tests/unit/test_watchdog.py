"""The stacks of a process that makes no progress are written once each time, and those of one that crashes."""

import signal
import subprocess
import sys
import threading

from paramserver.process_utils import Watchdog


class Progress:
    """Returns ``step``; waits for calls of the watchdog."""

    def __init__(self):
        self.step = self._calls = 0
        self._called = threading.Condition()

    def __call__(self):
        with self._called:
            self._calls += 1
            self._called.notify_all()
            return self.step

    def wait_for_calls(self, number):
        with self._called:
            until = self._calls + number
            assert self._called.wait_for(lambda: self._calls >= until, 20.0)


def test_a_wait_of_any_length_writes_the_stacks_once(tmp_path):
    log, progress = tmp_path / "rank-1.log", Progress()
    with Watchdog(log, progress, stalled_after_s=0.05) as watchdog:
        for stalls in (1, 2):
            assert watchdog.written.wait(20.0)
            progress.wait_for_calls(50)  # five times as long as it took
            assert log.read_text().count("no step for 0.05 s; the stacks of all threads:") == stalls
            progress.step += 1
            progress.wait_for_calls(2)


CRASH = """
import ctypes
from paramserver.process_utils import write_stacks_on_signal
write_stacks_on_signal()
def read_nowhere():
    ctypes.string_at(0)
read_nowhere()
"""


def test_a_crash_leaves_the_stacks_and_the_signal():
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr
    assert "in read_nowhere" in done.stderr
