"""Output and exit of the commands, processes that end with their parent, and the stacks of those that hang or crash."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from paramserver.errors import StorageError, TrainingError
from paramserver.platform import signal_at_end_of_parent

LOADER_NAME = "paramserver-loader"
"""The name of the process that reads a trainer's data set, as ``multiprocessing.current_process().name`` has it."""

_THREADS_S = 5.0
_HANDLERS_S = 5.0
# Once the children are killed for which exit handlers waited.
_UNBLOCKED_S = 1.0

# Options of ``subprocess.Popen`` for a process that leads a group of its own, so that all that it starts can be ended
# with it. Not a session: the kernel schedules sessions as units (sched(7), autogroup), and processes that wait for each
# other in every step were 9 % slower in sessions of their own (MLP of 1.9 million parameters, two cores).
OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}


def kill_group(leader: int) -> None:
    """Kill a child that was started with ``OWN_GROUP``, and all that it started, except what left its process group.

    Call it before the child is reaped: its number may be another process's afterwards.
    """
    with suppress(ProcessLookupError):  # a signal ended the child before it led a group
        os.killpg(leader, signal.SIGKILL)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL; ``signal 40`` for one without a name, such as a real-time one."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def describe_exit(exit_code: int) -> str:
    """Return how a process ended, from its exit code; negative: the signal that ended it."""
    return f"killed by {signal_name(-exit_code)}" if exit_code < 0 else f"ended with exit code {exit_code}"


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that request a stop. The kernel and the shell may each send SIGHUP when a terminal closes."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals that this process takes for a request to stop.

    SIGHUP is one only where it has its default: ``nohup`` ignores it, and a program may have a handler of its own.
    """
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is signal.SIG_DFL]


def discard_output_without_terminal() -> None:
    """Discard what this process prints if its terminal was closed, where a ``print`` of the task would fail.

    Also if it prints to a process that has ended, as ``tee`` does when the terminal is closed.
    """
    streams = select.poll()
    for descriptor in (1, 2):
        streams.register(descriptor, 0)
    for descriptor, events in streams.poll(0):
        if not events & (select.POLLHUP | select.POLLERR):
            continue
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), descriptor)


recorded_signals: list[int] = []
"""Those that arrived in ``recording_signals``, for the ``StopRequest`` that follows."""


@contextmanager
def recording_signals() -> Iterator[None]:
    """Record signals that request a stop and would end this process, while torch is imported: that takes seconds."""
    defaults: list[int] = []
    if threading.current_thread() is threading.main_thread():
        defaults = [n for n in STOP_SIGNALS if n != signal.SIGINT and signal.getsignal(n) is signal.SIG_DFL]
    for number in defaults:
        signal.signal(number, lambda arrived, frame: recorded_signals.append(arrived))
    try:
        yield
    finally:
        for number in defaults:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def collecting_signals(numbers: Iterable[int], on_first: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Return a context that collects these signals to this process; a second one raises KeyboardInterrupt.

    Call it in the main thread. ``on_first`` is called at the first one. SIGHUP is never a second one.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            discard_output_without_terminal()
            if received:
                return
        received.append(number)
        if len(received) > 1:  # the main thread may be blocked where it does not look at the first one
            raise KeyboardInterrupt
        on_first()

    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_output(text: str) -> None:
    """Print the result of a command. A reader that has closed its end, such as ``head``, is no error.

    Raises:
        StorageError: it cannot be written, such as to a file on a disk that is full.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        # Python flushes the rest of the buffer at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise StorageError(
                f"standard output must be writable ({error.strerror}); free space, or write to another file"
            ) from error


def flush_output() -> None:
    """Write what standard output and error have buffered, unless they are closed, full or no longer read.

    Call it before ``os._exit``: the exit code is that of the work, and does not depend on who reads the output.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def exit_process(exit_code: int) -> NoReturn:
    """End this process with ``exit_code``; if torch is loaded, without finalizing the interpreter.

    A native thread of torch, such as a worker of gloo that releases its last tensor, takes the interpreter's lock.
    While the interpreter is being finalized, that ends the process with SIGABRT after all work is done. So this
    function joins threads, runs exit handlers and flushes output itself, and then ends the process at once, as the
    children of multiprocessing do. Threads and handlers have a limit each; SIGINT, or a second signal, ends them at
    once.
    """
    # Python restores the default handlers while it finalizes; a late signal would then change the exit code.
    if "torch" not in sys.modules:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        sys.exit(exit_code)
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        # The first one may be that of a run that has just ended; another one means that the rest takes too long.
        if received or number == signal.SIGINT:
            os._exit(exit_code)
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Those that are no daemons, as at the end of any program.
    deadline = time.monotonic() + _THREADS_S
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.0))
    done = threading.Event()
    # Takes no lock of this package. Ends with the process.
    threading.Thread(target=_limit_handlers, args=(exit_code, done), name="exit-limit", daemon=True).start()
    _skip_handlers_of_torch()
    atexit._run_exitfuncs()
    done.set()
    flush_output()
    os._exit(exit_code)


def _skip_handlers_of_torch() -> None:
    """Leave out 50 ms of exit handlers of torch that release memory, or log what is not shown."""
    # It imports a library that formats the table.
    log_compile_times = getattr(sys.modules.get("torch._dynamo.utils"), "dump_compile_times", None)
    if log_compile_times is not None and not logging.getLogger("torch._dynamo.utils").isEnabledFor(logging.INFO):
        atexit.unregister(log_compile_times)
    # Each deregisters the operators of a library.
    for finalizer in list(vars(weakref.finalize)["_registry"]):
        called = finalizer.peek()
        if called is not None and getattr(called[1], "__module__", None) == "torch.library":
            finalizer.atexit = False


def _limit_handlers(exit_code: int, done: threading.Event) -> None:
    """End this process if its exit handlers take too long, such as that of multiprocessing, which joins children."""
    if done.wait(_HANDLERS_S):
        return
    try:
        children = multiprocessing.active_children()
        for child in children:
            child.kill()
        names = f"; it killed {', '.join(child.name for child in children)}" if children else ""
        print(
            f"warning: exit handlers of the task took longer than {_HANDLERS_S:g} s, so the process ends without "
            f"them{names}",
            file=sys.stderr,
            flush=True,
        )
    finally:  # also where standard error is closed
        # With its children gone the handler may return, and those after it too.
        if not done.wait(_UNBLOCKED_S):
            os._exit(exit_code)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Let this process receive a signal when the parent dies; at SIGTERM a rank saves and ends.

    The kernel's parent is the thread that started this process, so that thread must live as long as its process.
    ``parent`` is the process id that the parent has passed to this process. ``os.getppid()`` alone does not tell a dead
    parent from one that lives: 1 is the process that adopts orphans, and in a container the command itself.

    Raises:
        TrainingError: the parent is dead already.
    """
    try:
        signal_at_end_of_parent(number)
    except OSError as error:
        raise TrainingError(f"prctl failed: {error.strerror}") from error
    # It may have died before the call above; then no signal comes.
    if os.getppid() != parent:
        raise TrainingError("the parent died before this process began")


# Stacks.


STACKS_SIGNAL = signal.SIGUSR2
"""Makes a supervised rank write the stacks of its threads."""

_POLLS = 10


def write_stacks_on_signal() -> None:
    """Write the stacks of all threads to standard error at each ``STACKS_SIGNAL``, also while a thread holds the lock.

    They are written at the signal of a crash too, such as SIGSEGV, of which the process dies.

    Call it in the main thread, before other threads start: the signal is handled in the thread ``stacks``, so that it
    does not interrupt a system call of another one. For the life of the process.
    """
    # Written in C, in the thread that the kernel chooses: one that holds the interpreter's lock changes no stack.
    faulthandler.enable(file=sys.stderr, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])

    def receive() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACKS_SIGNAL])
        threading.Event().wait()

    # Takes no lock. Ends with the process.
    threading.Thread(target=receive, name="stacks", daemon=True).start()


class Watchdog:
    """Writes the stacks of a process that makes no progress, once each time.

    ``progress`` returns a value that changes with the work of this process.
    """

    def __init__(self, log: Path, progress: Callable[[], object], stalled_after_s: float) -> None:
        self._log = log
        self._progress = progress
        self._stalled_after_s = stalled_after_s
        self.written = threading.Event()
        self._closed = threading.Event()
        # Takes no lock. Ends with ``__exit__``.
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        last, since = self._progress(), time.monotonic()
        while not self._closed.wait(self._stalled_after_s / _POLLS):
            current, now = self._progress(), time.monotonic()
            if current != last:
                last, since = current, now
                self.written.clear()
            elif now - since > self._stalled_after_s and not self.written.is_set():
                with self._log.open("a") as file:
                    print(f"no step for {self._stalled_after_s:g} s; the stacks of all threads:", file=file, flush=True)
                    faulthandler.dump_traceback(file, all_threads=True)
                self.written.set()
