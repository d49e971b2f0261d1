"""Guards one program of the run, so that neither it nor its children outlive the run.

``python -m paramserver.online.process_guard PARENT PIPE program argument...`` runs in a separate session, starts the
program and waits for it. On SIGTERM, or when the thread that started the guard ends, it sends SIGTERM to its whole
process group, and SIGKILL after ``GRACE_S``. Its exit code is that of the program; 128 + n if signal n killed the
program, as in a shell; 127 if the program does not exist.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from paramserver.process_utils import die_with_parent

GRACE_S = 2.0

_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def main(arguments: Sequence[str] | None = None) -> int:
    parent, pipe, *command = sys.argv[1:] if arguments is None else arguments
    # The pipe closes when this process ends, and wakes the coordinator. A child that inherits it would keep it open.
    os.set_inheritable(int(pipe), False)
    assert os.getpgrp() == os.getpid(), "it ends its whole group"
    # Blocked before the fork and before die_with_parent: a signal between two calls of sigwait() stays pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    die_with_parent(int(parent))
    program = _start(command)
    while signal.sigwait(_SIGNALS) == signal.SIGCHLD:
        if (code := _exit_code(program)) is not None:
            return code
    return _end_group(program)


def _start(command: list[str]) -> int:
    program = os.fork()
    if program == 0:
        # The program inherits the signal mask and must not start with SIGTERM blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        finally:
            os._exit(127)
    return program


def _exit_code(program: int) -> int | None:
    """The program's exit code as in a shell; None = it runs."""
    pid, status = os.waitpid(program, os.WNOHANG)
    if pid == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _end_group(program: int) -> int:
    """End the process group, including this process. Grandchildren that ignore SIGTERM are killed, not waited for."""
    os.killpg(0, signal.SIGTERM)  # SIGTERM is blocked here, so this process stays
    deadline = time.monotonic() + GRACE_S
    while _exit_code(program) is None and (left_s := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, left_s)
    os.killpg(0, signal.SIGKILL)
    return 1  # not reached


if __name__ == "__main__":
    sys.exit(main())
