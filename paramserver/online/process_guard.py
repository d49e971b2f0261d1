"""Holds one program of the run, so that neither it nor its children outlive the run.

``python -m paramserver.online.process_guard PARENT PIPE program argument...`` starts the program and waits for it, in a
process group of its own. When it is asked to end (SIGTERM), or when the thread that started it dies, it asks the whole
group, and after ``GRACE_S`` ends what is left of it. Its exit code is the program's; 128 + n where a signal n killed
that, as with shells; 127 where there is no such program.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from paramserver.process_utils import die_with_parent

GRACE_S = 2.0

_WAITED_FOR = {signal.SIGTERM, signal.SIGCHLD}


def main(arguments: Sequence[str] | None = None) -> int:
    parent, pipe, *command = sys.argv[1:] if arguments is None else arguments
    # Whoever holds the other end of the pipe learns of this process's end, and not of its children's.
    os.set_inheritable(int(pipe), False)
    assert os.getpgrp() == os.getpid(), "it ends its whole group"
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    die_with_parent(int(parent))
    program = _start(command)
    while signal.sigwait(_WAITED_FOR) == signal.SIGCHLD:
        if (code := _exit_code(program)) is not None:
            return code
    return _end(program)


def _start(command: list[str]) -> int:
    program = os.fork()
    if program == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        finally:
            os._exit(127)
    return program


def _exit_code(program: int) -> int | None:
    """As a shell tells it; None while the program runs."""
    pid, status = os.waitpid(program, os.WNOHANG)
    if pid == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _end(program: int) -> int:
    """End the group, this process included; what its own children leave behind is not waited for."""
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while _exit_code(program) is None and (left_s := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, left_s)
    os.killpg(0, signal.SIGKILL)
    return 1  # not reached


if __name__ == "__main__":
    sys.exit(main())
