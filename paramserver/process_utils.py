"""How a process of the command line ends.

A process ends with the one that started it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from typing import NoReturn

from paramserver.errors import TrainingError

_THREADS_S = 5.0


def print_output(text: str) -> None:
    """Print what a command was asked for; a reader that has closed its end wants no more of it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left in the buffer goes nowhere when Python flushes it at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_process(exit_code: int) -> NoReturn:
    """End this process with ``exit_code``; where torch is loaded, without taking the interpreter apart.

    A thread of torch's, such as a worker of gloo that lets go of its last tensor, asks for the interpreter; where that
    is being finalized the answer is SIGABRT, after the work was done well. So what an exit owes is done first (threads
    of the task, exit handlers, output), and then the process ends at once, as the children of multiprocessing do.
    """
    # While it finalizes, Python puts handlers of its own back to the default; a late signal would change the exit code.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if "torch" not in sys.modules:
        sys.exit(exit_code)
    _join_threads(time.monotonic() + _THREADS_S)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _join_threads(deadline: float) -> None:
    """Threads that are no daemons may finish, as at the end of any program, but not for ever."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.0))


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel for a SIGTERM when the parent dies (prctl(2)); this process then saves and leaves.

    To the kernel the parent is the thread that started this process.

    Args:
        parent: its process id, where it told; None = whoever is the parent now, if that is not the first process.
    """
    expected = os.getppid() if parent is None else parent
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise TrainingError(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != expected or (parent is None and expected == 1):
        raise TrainingError("the parent died before this process began")
