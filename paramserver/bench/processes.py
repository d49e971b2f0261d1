"""Fresh processes side by side, with all that they start: run to their end, or ended."""

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

_LOOK_EVERY_S = 0.1
_ERROR = "error: "


class ProcessGroup:
    """Starts all of them at once; a context manager, at the end of which none is alive, nor what it started.

    Each leads a session of its own, so that a Ctrl-C reaches whoever started them, and not them. What they say is in
    ``output-<i>.txt``.

    Args:
        commands: words of each.
        environ: theirs.
        folder: for the outputs.
        stop: set by somebody who wants no more of it; ends a wait.
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
        """Kill those that are alive, with their children."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait(self, timeout_s: float, look: Callable[[], None]) -> None:
        """Return when all have ended well.

        Args:
            timeout_s: for all of them.
            look: called several times a second while they run.

        Raises:
            TrainingError: one failed, in its own words; or they took too long.
            Interrupted: somebody asked to stop.
        """
        deadline = time.monotonic() + timeout_s
        while running := [process for process in self._processes if process.poll() is None]:
            self._check()
            if self._stop is not None and self._stop.is_set():
                raise Interrupted("interrupted by a signal")
            if time.monotonic() > deadline:
                raise TrainingError(f"it did not end within {timeout_s:.0f} s and was killed{self._last_line()}")
            look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(_LOOK_EVERY_S)
        self._check()

    def _check(self) -> None:
        for process, output in zip(self._processes, self._outputs, strict=True):
            if process.returncode not in (None, 0):
                raise TrainingError(last_error(output) or f"it ended with exit code {process.returncode}")

    def _last_line(self) -> str:
        said = [line for output in self._outputs for line in _lines(output)]
        return f"; its last line: {said[-1]}" if said else ""


def last_error(output: Path) -> str | None:
    """The error that a command named before it ended: the first line of it."""
    errors = [line.partition(_ERROR)[2] for line in _lines(output) if line.startswith(_ERROR)]
    return errors[-1].strip() if errors else None


def _lines(output: Path) -> list[str]:
    return [line for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
