"""A group of fresh processes that is waited for or killed with all its children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paramserver.errors import Interrupted, TrainingError

_POLL_INTERVAL_S = 0.1
_ERROR = "error: "


class ProcessGroup:
    """A context manager that starts processes, and kills them and their children at its end.

    Each process leads its own session, so that a Ctrl-C reaches the benchmark only. The output of process ``i`` is
    written to ``output-<i>.txt``. The event ``stop`` interrupts ``wait``.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environ: Mapping[str, str],
        folder: Path,
        stop: threading.Event | None = None,
    ) -> None:
        self._commands, self._environ, self._stop = commands, dict(environ), stop
        self._outputs = [folder / f"output-{i}.txt" for i in range(len(commands))]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ProcessGroup:
        try:
            for command, output in zip(self._commands, self._outputs, strict=True):
                with output.open("wb") as file:
                    self._processes.append(
                        subprocess.Popen(
                            list(command),
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=subprocess.STDOUT,
                            env=self._environ,
                            start_new_session=True,
                        )
                    )
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the processes that are alive, and their children."""
        for process in self._processes:
            if process.poll() is None:
                # The process leads its session and group, so that this reaches its children too.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()  # also reaps one that has ended

    def wait(self, timeout_s: float, sample: Callable[[], None]) -> None:
        """Block until all processes have ended without an error.

        ``sample`` is called several times a second meanwhile. ``timeout_s`` is for all of them together.

        Raises:
            TrainingError: a process failed, with its own error message, or the time is over.
            Interrupted: ``stop`` was set.
        """
        deadline = time.monotonic() + timeout_s
        while running := [process for process in self._processes if process.poll() is None]:
            # The first failure ends the wait: the other processes may wait for the one that failed.
            self._check()
            if self._stop is not None and self._stop.is_set():
                raise Interrupted("interrupted by a signal")
            if time.monotonic() > deadline:
                raise TrainingError(f"it did not end within {timeout_s:.0f} s and was killed{self._last_line()}")
            sample()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(_POLL_INTERVAL_S)
        self._check()

    def _check(self) -> None:
        for process, output in zip(self._processes, self._outputs, strict=True):
            if process.returncode not in (None, 0):
                raise TrainingError(last_error(output) or f"it ended with exit code {process.returncode}")

    def _last_line(self) -> str:
        lines = [line for output in self._outputs for line in _lines(output)]
        return f"; its last line: {lines[-1]}" if lines else ""


def last_error(output: Path) -> str | None:
    """The first line of the error that a process printed before it ended; None without one."""
    errors = [line.partition(_ERROR)[2] for line in _lines(output) if line.startswith(_ERROR)]
    return errors[-1].strip() if errors else None


def _lines(output: Path) -> list[str]:
    return [line for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
