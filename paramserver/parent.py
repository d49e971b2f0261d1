"""A rank ends with the supervisor that started it."""

import ctypes
import os
import signal

from paramserver.errors import TrainingError

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the parent dies (prctl(2)); this rank then saves and leaves."""
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise TrainingError(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent or parent == 1:
        raise TrainingError("the supervisor died before this rank began")
