"""What is done with checkpoints in threads while training continues: writing them, and sending parts to rank 0."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paramserver.checkpoint.format import read_manifest, step_name
from paramserver.checkpoint.save import apply_retention, mark_best, write_checkpoint
from paramserver.errors import DeadlineExceeded, ParamserverError, PeerLost, StorageError

_log = logging.getLogger(__name__)
_WAKE_S = 5.0


@dataclass(frozen=True)
class WrittenCheckpoint:
    """What one write produced, for its record."""

    step: int
    path: Path
    size_bytes: int
    seconds: float


@dataclass(frozen=True, eq=False)
class _WriteJob:
    step: int
    objects: Mapping[str, Any]
    metadata: Mapping[str, Any]
    is_best: bool
    future: Future[WrittenCheckpoint] = field(default_factory=Future)


class CheckpointWriter:
    """Writes checkpoints into one folder, marks the best and keeps the newest. Close it.

    With ``background`` it owns the thread ``checkpoint-writer``. One write is in progress and one waits. A newer
    submission replaces the waiting one, whose future is then cancelled; a best checkpoint is replaced by a newer best
    one only. So ``submit`` never blocks, and a slow disk costs checkpoints, not memory. The writer holds at most three
    copies of the state: the one being written, the newest and the best that wait. A fourth exists while a new one is
    staged. Writing copies nothing. Without ``background``, ``submit`` writes before it returns. With ``optional`` a
    file system that refuses a checkpoint fails its future only, and the next one is written.
    """

    def __init__(self, folder: Path, keep: int, background: bool, optional: bool = False) -> None:
        self.folder = folder
        self.keep = keep
        self.optional = optional
        self.written: list[WrittenCheckpoint] = []  # without those that were removed since
        # What ended the last write, if a server was lost whose rows it read; the checkpoint before it is the newest.
        self.lost: PeerLost | None = None
        self._changed = threading.Condition()
        # ``_changed`` guards ``_waiting``, ``_current`` and ``_closed``. At most one best and one other job wait.
        self._waiting: list[_WriteJob] = []
        self._current: _WriteJob | None = None
        self._closed = False
        # Written by the thread that writes, and read without the lock: it is set once, and a late reader raises at its
        # next call.
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if background:
            # A daemon: a disk that does not answer must not keep the process from ending; ``close`` reports it.
            self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
            self._thread.start()

    def submit(
        self, step: int, objects: Mapping[str, Any], metadata: Mapping[str, Any], is_best: bool = False
    ) -> Future[WrittenCheckpoint]:
        """Write a checkpoint of ``step``; see ``write_checkpoint`` for ``objects`` and ``metadata``.

        In the background ``objects`` must be private copies: see ``stage_copy``.

        Raises:
            ParamserverError: closed already.
            Exception: the failure of an earlier write (without ``background``: of this one).
        """
        job = _WriteJob(step, objects, metadata, is_best)
        with self._changed:
            # In one block with the enqueueing: the thread ends only when it finds nothing waiting, so what is enqueued
            # is written.
            if self._closed:
                raise ParamserverError(
                    f"checkpoint writer ({self.folder}) must be open to take step {step}; it is closed"
                )
            self.raise_error()
            displaced = self._enqueue(job) if self._thread is not None else []
        for old in displaced:  # without the lock: ``cancel`` runs the callbacks of the future
            old.future.cancel()
        if self._thread is None:
            # Also without the lock: it writes to the disk and then runs the callbacks of the future.
            self._run(job)
            self.raise_error()
        return job.future

    def _enqueue(self, job: _WriteJob) -> list[_WriteJob]:
        # The running job is not in ``_waiting``, so what is displaced was never started and its future can be
        # cancelled.
        displaced = [old for old in self._waiting if job.is_best or not old.is_best]
        self._waiting = [old for old in self._waiting if old not in displaced] + [job]
        for old in displaced:
            _log.warning(
                "checkpoint of step %d is replaced by step %d: writing is slower than saving", old.step, job.step
            )
        self._changed.notify_all()
        return displaced

    def pending(self) -> list[Mapping[str, Any]]:
        """Return the objects of the checkpoints that are not written yet, the newest first."""
        # Callbacks of the future, which run in the writing thread, do not count.
        jobs = [job for job in self._jobs() if not job.future.done()]
        return [job.objects for job in sorted(jobs, key=lambda job: job.step, reverse=True)]

    def pending_names(self) -> list[str]:
        """Return the names of the checkpoints that are not written yet."""
        return [step_name(job.step) for job in self._jobs()]

    def wait(self, timeout_s: float) -> None:
        """Wait until what was submitted is written, replaced, or has failed; ``timeout_s`` seconds at most."""
        wait([job.future for job in self._jobs()], timeout_s)

    def _jobs(self) -> list[_WriteJob]:
        """Return those that wait, and the one in progress."""
        with self._changed:
            return [*self._waiting, *([] if self._current is None else [self._current])]

    def close(self, timeout_s: float) -> None:
        """Write what waits, then end the thread. Closing again only raises the failure again.

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
                    "check that disk, or use a faster one"
                )
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the failure of an earlier write, if there is one."""
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._run(job)
            with self._changed:
                self._current = None
            del job  # and the copy that it holds, which would otherwise live until the next job

    def _next(self) -> _WriteJob | None:
        with self._changed:
            while not self._waiting:
                # Looked at only when nothing waits: ``close`` writes what was submitted before it.
                if self._closed:
                    return None
                self._changed.wait(_WAKE_S)
            # Both under one lock: ``pending`` must not find the job in neither place.
            self._current = self._waiting.pop(0)
            return self._current

    def _run(self, job: _WriteJob) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            written = self._write(job)
        except PeerLost as lost:
            # Not an error of the writer: the run returns to the checkpoint before.
            _log.warning("checkpoint of step %d is not written: %s", job.step, lost)
            self.lost = lost
            job.future.set_exception(lost)
        except BaseException as error:  # noqa: BLE001 - kept: the next submit and close raise it
            # Before the future: a caller that waits for it and then submits must get this error. Same below.
            if not (self.optional and isinstance(error, StorageError)):
                self._error = self._error or error
            job.future.set_exception(error)
        else:
            self.lost = None
            self.written.append(written)
            job.future.set_result(written)

    def _write(self, job: _WriteJob) -> WrittenCheckpoint:
        started = time.perf_counter()
        # Retention comes last: it keeps what ``latest`` and ``best`` name, and both name this checkpoint by then.
        path = write_checkpoint(self.folder, job.step, job.objects, job.metadata)
        if job.is_best:
            mark_best(self.folder, job.step)
        removed = apply_retention(self.folder, self.keep)
        self.written = [one for one in self.written if one.path not in removed]
        size_bytes = read_manifest(path).total_bytes
        return WrittenCheckpoint(job.step, path, size_bytes, time.perf_counter() - started)


# Parts of trainers.


_ABORT_S = 3.0
_PART = "a part of a checkpoint"

SEND_TIMEOUT_S = 600.0
"""How long a part of a checkpoint may take from its trainer to the writer's queue on rank 0."""


class BackgroundSender:
    """Runs each job in a thread of its own, one at a time and in order. A context manager.

    One job is in progress and none waits: ``submit`` waits for the end of the last one. So at most one copy of what is
    sent exists, and the senders of processes that submit the same jobs stay in step. Owns the thread
    ``checkpoint-sender``. Without ``background`` each job runs in the caller's thread, before ``submit`` returns.
    ``last_progress`` is ``time.monotonic()`` of the last sign of progress; each one extends the deadline of a wait. For
    the training thread.
    """

    def __init__(self, background: bool, last_progress: Callable[[], float]) -> None:
        self.background = background
        self._last_progress = last_progress
        self._closed = False
        self._thread: threading.Thread | None = None
        # A thread whose ``join`` a signal handler interrupts with an error counts as ended before Python 3.13, so the
        # end of a job has an event.
        self._ended = threading.Event()
        self._ended.set()
        # Written by the thread of a job, and read once that has ended.
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None], timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Start ``job`` once the last one has ended.

        Raises:
            Exception: the last job's failure, or this one's without ``background``.
            DeadlineExceeded: the last one did not end, or make progress, within ``timeout_s`` seconds.
        """
        if not self.background:
            job()
            return
        self.wait(timeout_s)
        if self._closed:
            raise ParamserverError(f"the sender of {_PART} must be open to take a job; it is closed")
        # A daemon: the job may be inside a call to a dead rank 0, which nothing interrupts.
        thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-sender", daemon=True)
        self._ended.clear()
        try:
            thread.start()
        except RuntimeError:  # the system allows no further thread, so no job is in progress
            self._ended.set()
            raise
        self._thread = thread

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - kept: the next call raises it to the owner
            self._error = error
        finally:
            self._ended.set()

    def wait(self, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Wait until no job is in progress.

        Raises:
            Exception: a job's failure.
            DeadlineExceeded: it did not end, or make progress, within ``timeout_s`` seconds.
        """
        began = time.monotonic()
        while not self._ended.is_set():
            # Again after each wait, as progress may have moved the deadline meanwhile.
            remaining_s = max(began, self._last_progress()) + timeout_s - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceeded(
                    f"{_PART} must be with rank 0 within {timeout_s:g} s, and is not; look at the network and "
                    "at rank 0's disk, or save less often"
                )
            self._ended.wait(remaining_s)
        if self._thread is not None:
            self._thread.join(timeout_s)  # it refers to the job until it has ended
        if self._error is not None:
            raise self._error

    def close(self, timeout_s: float) -> None:
        """Wait for the job in progress, and accept no other. Progress does not extend this wait.

        Raises:
            Exception: a job's failure.
            DeadlineExceeded: it did not end within ``timeout_s`` seconds; its thread is abandoned.
        """
        self._closed, self._last_progress = True, lambda: 0.0
        self.wait(timeout_s)

    def abort(self) -> None:
        """Close on the failing path (an owner that ends well has called ``wait``), with a short deadline.

        Raises nothing: a failure here is logged, as the owner already has the error that ends it.
        """
        try:
            self.close(_ABORT_S)
        except Exception as failure:  # noqa: BLE001 - logged
            _log.warning("%s did not arrive: %s", _PART, failure)

    def __enter__(self) -> BackgroundSender:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()
