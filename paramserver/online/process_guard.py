"""Guards one program of the run, so that neither it nor its children outlive the run.

``python -m paramserver.online.process_guard PARENT PIPE program argument...`` runs in a separate session, starts the
program and waits for it. On SIGTERM, or when the thread that started the guard ends, it sends SIGTERM to all processes
of the program, and SIGKILL after ``GRACE_S``; what the program leaves behind at its end is killed too. These are those
of its process group and, on Linux, those that have left it. Its exit code is that of the program; 128 + n if signal n
killed the program, as in a shell; 127 if the program does not exist.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from paramserver.platform import adopt_orphans, descendants
from paramserver.process_utils import die_with_parent

GRACE_S = 2.0

_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
# An interpreter ignores these, and what is executed would inherit that.
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)


def main(arguments: Sequence[str] | None = None) -> int:
    parent, pipe, *command = sys.argv[1:] if arguments is None else arguments
    # The pipe closes when this process ends, and wakes the coordinator. A child that inherits it would keep it open.
    os.set_inheritable(int(pipe), False)
    assert os.getpgrp() == os.getpid(), "it ends its whole group"
    # Blocked before the fork and before die_with_parent: a signal between two calls of sigwait() stays pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    die_with_parent(int(parent))
    with adopt_orphans():
        program = _start(command)
        while signal.sigwait(_SIGNALS) == signal.SIGCHLD:
            if (code := _reap(program)) is not None:
                _kill_outside()
                return code
        return _end_all(program)


def _start(command: list[str]) -> int:
    program = os.fork()
    if program == 0:
        # The program inherits the signal mask and must not start with SIGTERM blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        finally:
            os._exit(127)
    return program


def _reap(program: int) -> int | None:
    """Reap the children that have ended, of which some are adopted; the program's exit code as in a shell, or None."""
    found = None
    with suppress(ChildProcessError):  # none is left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
                found = 128 - code if code < 0 else code
    return found


def _end_all(program: int) -> int:
    """End all processes, including this one. Those that ignore SIGTERM are killed, once the program has ended."""
    os.killpg(0, signal.SIGTERM)  # SIGTERM is blocked here, so this process stays
    _signal_outside(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while _reap(program) is None and (left_s := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, left_s)
    _kill_outside()
    os.killpg(0, signal.SIGKILL)
    return 1  # not reached


def _kill_outside() -> None:
    deadline = time.monotonic() + GRACE_S
    while _signal_outside(signal.SIGKILL) and time.monotonic() < deadline:
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)  # they may have started others meanwhile


def _signal_outside(number: signal.Signals) -> bool:
    """Send a signal to the processes below this one that have left its group; return whether there are some."""
    found = False
    for pid in descendants():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            if os.getpgid(pid) != os.getpgrp():
                os.kill(pid, number)
                found = True
    return found


if __name__ == "__main__":
    sys.exit(main())
