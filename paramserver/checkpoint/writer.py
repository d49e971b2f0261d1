"""Writing checkpoints while training goes on."""

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from paramserver.checkpoint.format import read_manifest
from paramserver.checkpoint.save import mark_best, apply_retention, write_checkpoint
from paramserver.errors import DeadlineExceeded, ParamserverError, UnsupportedConfiguration

_log = logging.getLogger(__name__)
_WAKE_S = 5.0
_EXIT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class WrittenCheckpoint:
    """What one write came to, for the record of it."""

    step: int
    path: Path
    size_bytes: int
    seconds: float
    is_best: bool


@dataclass(frozen=True, eq=False)
class _Job:
    step: int
    objects: Mapping[str, Any]
    about: Mapping[str, Any]
    is_best: bool
    future: "Future[WrittenCheckpoint]" = field(default_factory=Future)


class CheckpointWriter:
    """Writes checkpoints into one folder, marks the best and keeps the newest; with ``background`` in a thread.

    One write is in progress and one waits. A newer submission takes the place of the waiting one, whose future is then
    cancelled, except that a best one gives way to a newer best only. So ``submit`` never blocks, and a slow disk costs
    checkpoints, not memory; wait for ``idle`` where each must be written. At most three copies of the state are held
    here: one that is written, the newest and the best that wait. A fourth exists while a new one is made. Writing
    copies nothing.

    Args:
        folder: the run's ``checkpoints`` folder.
        keep: how many of the newest checkpoints stay, at least 1.
        background: write in a thread of its own; otherwise ``submit`` writes and its future is done.
    """

    def __init__(self, folder: Path, keep: int, background: bool) -> None:
        if keep < 1:
            raise UnsupportedConfiguration(f"checkpoint.keep ({keep}) must be at least 1; resuming needs one")
        self.folder = folder
        self.keep = keep
        self.written: list[WrittenCheckpoint] = []
        self.superseded = 0
        self._changed = threading.Condition()
        self._waiting: list[_Job] = []
        self._current: _Job | None = None
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
            self._thread.start()

    @property
    def size_bytes(self) -> int:
        """Bytes of all writes so far."""
        return sum(one.size_bytes for one in self.written)

    @property
    def seconds(self) -> float:
        """Seconds of all writes so far."""
        return sum(one.seconds for one in self.written)

    def submit(
        self, step: int, objects: Mapping[str, Any], about: Mapping[str, Any], is_best: bool = False
    ) -> "Future[WrittenCheckpoint]":
        """Write a checkpoint of ``step``; see ``write_checkpoint`` for ``objects`` and ``about``.

        In the background ``objects`` must be private: see ``private_copy``.

        Returns:
            A future of what was written.

        Raises:
            ParamserverError: closed already.
            Exception: the failure of an earlier write (without ``background``: of this one).
        """
        job = _Job(step, objects, about, is_best)
        with self._changed:
            if self._closed:
                raise ParamserverError(
                    f"checkpoint writer ({self.folder}) must be open to take step {step}; it is closed"
                )
            self._raise_kept()
            displaced = self._enqueue(job) if self._thread is not None else []
        for old in displaced:  # not under the lock: this calls back whoever waits for the future
            old.future.cancel()
        if self._thread is None:
            self._run(job)
            self._raise_kept()
        return job.future

    def _enqueue(self, job: _Job) -> list[_Job]:
        displaced = [old for old in self._waiting if job.is_best or not old.is_best]
        self._waiting = [old for old in self._waiting if old not in displaced] + [job]
        self.superseded += len(displaced)
        for old in displaced:
            _log.warning(
                "checkpoint of step %d gives way to step %d: writing is slower than saving", old.step, job.step
            )
        self._changed.notify_all()
        return displaced

    def wait_idle(self, timeout_s: float = 0.0) -> bool:
        """Wait until nothing is being written and nothing waits; False if that took longer than ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._current is None, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what waits, then stop. Closing again does nothing more than to tell the failure again.

        Raises:
            DeadlineExceeded: the writing did not end within ``timeout_s`` seconds.
            Exception: the first failure of a write.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise DeadlineExceeded(
                    f"checkpoint in {self.folder} must be written within {timeout_s:g} s of the end, and is not; "
                    "check that disk, or raise cluster.timeout_s"
                )
        self._raise_kept()

    def raise_error(self) -> None:
        """Raise the failure of an earlier write."""
        with self._changed:
            self._raise_kept()

    def _raise_kept(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._run(job)
            with self._changed:
                self._current = None
                self._changed.notify_all()
            del job  # and the copy that it holds

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait(_WAKE_S)
            self._current = self._waiting.pop(0)
            return self._current

    def _run(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            written = self._write(job)
        except BaseException as error:  # noqa: BLE001 - kept: the next submit and close raise it
            self._error = self._error or error
            job.future.set_exception(error)
        else:
            self.written.append(written)
            job.future.set_result(written)

    def _write(self, job: _Job) -> WrittenCheckpoint:
        started = time.perf_counter()
        path = write_checkpoint(self.folder, job.step, job.objects, job.about)
        if job.is_best:
            mark_best(self.folder, job.step)
        apply_retention(self.folder, self.keep)
        size_bytes = read_manifest(path).total_bytes
        return WrittenCheckpoint(job.step, path, size_bytes, time.perf_counter() - started, job.is_best)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close(_EXIT_TIMEOUT_S)
            return
        try:
            self.close(_EXIT_TIMEOUT_S)
        except Exception as failure:  # noqa: BLE001 - the error on its way out is the first one; this one is recorded
            if failure is not error:
                _log.error("checkpoint writer failed too: %s", failure)
