"""A rank ends with the supervisor that started it."""

import ctypes
import os
import signal

from paramserver.errors import TrainingError

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to send SIGTERM when the parent dies, so that this rank writes a checkpoint and leaves (prctl(2))."""
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise TrainingError(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent or parent == 1:
        raise TrainingError("the supervisor died before this rank began")
