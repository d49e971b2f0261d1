"""A process ends with the one that started it."""

import ctypes
import os
import signal

from paramserver.errors import TrainingError

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
