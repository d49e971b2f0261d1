"""The supervisor: starts all ranks of a run on this machine, watches them, and reports the error that ended the run.

A rank reports through a pipe, one JSON line per event (:class:`EventPipe`): records for the display, and its error.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from paramserver import errors
from paramserver.cluster import bind_listener, child_environment, mark_supervised, process_environ
from paramserver.config import Config, dump_yaml, num_trainers_of, roles, world_size_of
from paramserver.errors import Interrupted, ParamserverError, TrainingError
from paramserver.metrics import Record, Sink
from paramserver.runs.rundir import RunDir, write_json, write_text

# In addition to the time in which ranks detect a lost peer themselves.
_GRACE_S = 5.0
# Signals that end a process before it can report anything.
_SUDDEN = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass
class _RankProcess:
    """A rank that this process started.

    Attributes:
        failure: as ``describe_error`` returns it; None if there is none.
        sent: signals that the supervisor sent to it.
    """

    global_rank: int
    title: str
    process: subprocess.Popen[bytes]
    reader: threading.Thread | None = None
    failure: dict[str, Any] | None = None
    exit_code: int | None = None
    sent: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Event:
    rank: _RankProcess
    kind: str
    body: Any


@dataclass
class Supervisor:
    """Runs all ranks of one run on this machine.

    Threads: one per rank, ``rank-events-<N>``, reads its pipe and puts events into a queue. Everything else happens in
    the thread that calls :meth:`supervise`.

    Args:
        config: effective; ranks read it from a file in the run folder.
        run: the run folder.
        folders: where the task is searched, the config's folder among them.
        sink: receives the records of rank 0; closed at the end.
        resume: continue from the newest checkpoint.
        began: ``time.time()`` of the command.
        command: for environment.json.
    """

    config: Config
    run: RunDir
    folders: Sequence[Path]
    sink: Sink
    resume: bool = False
    began: float = field(default_factory=time.time)
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        # Rank 0 stores the config in the run once it has accepted it; until then a resumed run keeps its earlier one.
        self._config_file = self.run.path / f".launch-{os.getpid()}.yaml"
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._ranks: list[_RankProcess] = []
        self._summary: dict[str, Any] | None = None
        self._signal: int | None = None
        self._interrupted_twice = False
        self._signal_forwarded = False
        self._kill_at: float | None = None
        self._failed: list[_RankProcess] = []

    def supervise(self) -> dict[str, Any]:
        """Start all ranks, and wait for the end of the run.

        Returns:
            The summary.

        Raises:
            ParamserverError: the first error of the run, with its rank; Interrupted after a signal.
        """
        previous = self._install_handlers()
        try:
            self._start_ranks()
            while any(rank.exit_code is None for rank in self._ranks):
                self._handle_events(0.1)
                # Here and not in the signal's handler, so that ranks that start after the signal receive it too.
                if self._signal is not None and not self._signal_forwarded:
                    self._signal_forwarded = True
                    self._signal_ranks(signal.SIGTERM)
                if self._kill_at is not None and time.monotonic() > self._kill_at:
                    self._signal_ranks(signal.SIGKILL)
            self._handle_events(0.0)
        finally:
            self._kill_remaining()
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.sink.close()
        return self._outcome()

    # Starting.

    def _start_ranks(self) -> None:
        self.run.logs_dir.mkdir(parents=True, exist_ok=True)
        write_text(self._config_file, dump_yaml(self.config))
        world_size = world_size_of(self.config)
        environ = child_environment(
            process_environ(),
            num_trainers=num_trainers_of(self.config),
            config_folder=self.folders[-1] if self.folders else None,
        )
        mark_supervised(environ)
        host = self.config.cluster.master_addr
        # Rank 0 inherits the listener of its store, so no other process can take the port meanwhile.
        with bind_listener(host, self.config.cluster.master_port) as listener:
            port = listener.getsockname()[1]
            for role in roles(self.config, world_size):
                inherited = listener.fileno() if role.global_rank == 0 else None
                title = f"rank {role.global_rank} ({role})"
                self._ranks.append(self._start_rank(role.global_rank, title, world_size, port, inherited, environ))

    def _start_rank(
        self, global_rank: int, title: str, world_size: int, port: int, listener: int | None, environ: dict[str, str]
    ) -> _RankProcess:
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "paramserver.launch", "--config", str(self._config_file)]
        command += ["--rank", str(global_rank), "--world_size", str(world_size)]
        command += ["--master_addr", self.config.cluster.master_addr, "--master_port", str(port)]
        command += ["--supervised", str(writing), "--run_folder", str(self.run.path), "--began", repr(self.began)]
        command += [part for folder in self.folders for part in ("--folder", str(folder))]
        command += ["--resume"] if self.resume else []
        command += ["--listener", str(listener)] if listener is not None else []
        command += ["--shown_command", json.dumps(list(self.command))]
        passed = (writing,) if listener is None else (writing, listener)
        with self.run.log_file(global_rank).open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=passed, env=environ
            )
        os.close(writing)  # the rank holds the only writing end: the pipe ends with the process
        rank = _RankProcess(global_rank, title, process)
        # Takes no lock; puts events into the queue. Ends with the process.
        rank.reader = threading.Thread(
            target=self._read_events, args=(rank, reading), name=f"rank-events-{global_rank}", daemon=True
        )
        rank.reader.start()
        return rank

    def _read_events(self, rank: _RankProcess, reading: int) -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # incomplete, because the process died; the exit code shows that
                self._events.put(_Event(rank, event["event"], event["body"]))
        self._events.put(_Event(rank, "exit", rank.process.wait()))

    # Watching.

    def _handle_events(self, timeout_s: float) -> None:
        """Wait for an event, at most ``timeout_s``, and handle all that have arrived."""
        handlers: dict[str, Callable[[_RankProcess, Any], None]] = {
            "record": self._on_record,
            "error": self._on_error,
            "exit": self._on_exit,
        }
        while True:
            try:
                event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
            except queue.Empty:
                return
            handlers[event.kind](event.rank, event.body)
            timeout_s = 0.0

    def _on_record(self, rank: _RankProcess, record: dict[str, Any]) -> None:
        if record["kind"] == "end":
            self._summary = record["summary"]
        self.sink.write(record)

    def _on_error(self, rank: _RankProcess, failure: dict[str, Any]) -> None:
        rank.failure = failure
        self._failed.append(rank)

    def _on_exit(self, rank: _RankProcess, exit_code: int) -> None:
        rank.exit_code = exit_code
        if rank.failure is None and exit_code not in (0, Interrupted.exit_code):
            self._on_error(rank, self._failure_from_exit(rank, exit_code))
        if rank.failure is not None and exit_code != Interrupted.exit_code and self._kill_at is None:
            # The other ranks detect the loss, and end with their own errors. This ends the ones that cannot.
            self._kill_at = time.monotonic() + self.config.server.lost_after_s + _GRACE_S
            self._signal_ranks(signal.SIGTERM)

    def _failure_from_exit(self, rank: _RankProcess, exit_code: int) -> dict[str, Any]:
        """Describe the failure of a rank that reported none."""
        log = self.run.log_file(rank.global_rank)
        kind, how = "TrainingError", f"ended with exit code {exit_code}"
        if exit_code < 0:
            how = f"killed by {signal.Signals(-exit_code).name}"
        if -exit_code in rank.sent:
            # The supervisor ended it because another rank had failed or a signal came: a consequence, not the cause.
            kind, how = "PeerLost", f"did not react and was ended by {signal.Signals(-exit_code).name}"
        last_lines = "" if -exit_code in _SUDDEN else _end_of(log)
        message = f"{how}; see the end of its log, {log}{last_lines}"
        return {"kind": kind, "message": message, "exit_code": 1, "traceback": "", "signal": -exit_code}

    def _signal_ranks(self, number: int) -> None:
        for rank in self._ranks:
            if rank.exit_code is None and rank.process.poll() is None:
                rank.sent.add(number)
                rank.process.send_signal(number)

    def _install_handlers(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal is not None:
            self._interrupted_twice = True
            self._signal_ranks(signal.SIGKILL)
        self._signal = self._signal or number

    def _kill_remaining(self) -> None:
        """End all ranks, also after an error here: no rank outlives its supervisor."""
        self._signal_ranks(signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
            if rank.reader is not None:
                rank.reader.join()
        self._config_file.unlink(missing_ok=True)

    # The outcome.

    def _outcome(self) -> dict[str, Any]:
        first = self._first_failure()
        if first is not None and first.failure is not None:
            self._write_missing_summary(f"{first.title}: {first.failure['message']}")
            raise _to_error(first)
        if self._signal is not None and self._summary is None:
            raise self._interruption()
        if self._summary is None:
            raise TrainingError(f"all ranks ended well, but rank 0 sent no summary; see {self.run.log_file(0)}")
        return self._summary

    def _first_failure(self) -> _RankProcess | None:
        """Return the failure that the others follow from: causes before consequences, each in order of arrival."""
        if self._interrupted_twice:
            return None
        found: dict[str, list[_RankProcess]] = {"cause": [], "PeerLost": [], "reported": [], "Interrupted": []}
        for rank in self._failed:
            found[self._classify(rank)].append(rank)
        found["Interrupted"].sort(key=lambda rank: rank.global_rank)  # rank 0 reports what was saved, and how to resume
        if self._signal is not None:
            found["PeerLost"].clear()
            found["reported"].clear()
        return next((rank for ranks in found.values() for rank in ranks), None)

    def _classify(self, rank: _RankProcess) -> str:
        """Return ``cause``, ``PeerLost`` (a consequence), ``reported`` (by another rank) or ``Interrupted``."""
        failure = rank.failure or {}
        if failure["kind"] in ("PeerFailed", "PeerRefused"):
            return "reported"
        if failure["kind"] == "PeerLost":
            return "PeerLost"
        if failure["kind"] == "Interrupted":
            return "Interrupted"
        # A signal to the whole group also reaches ranks that have no handler yet. Python ends with the signal then, or
        # with 1 while it starts.
        by_signal = failure["kind"] == "KeyboardInterrupt" or failure.get("signal") in (*_SIGNALS, -1)
        return "PeerLost" if by_signal and self._signal is not None else "cause"

    def _interruption(self) -> ParamserverError:
        """Return the error of a run that a signal ended before rank 0 could report it."""
        assert self._signal is not None
        name = signal.Signals(self._signal).name
        latest = self._latest_checkpoint()
        saved = "nothing was saved yet"
        if latest is not None:
            saved = f"the last checkpoint is {latest}; resume with: {self.run.resume_command}"
        how = f"interrupted twice ({name}) and ended at once" if self._interrupted_twice else f"interrupted ({name})"
        self._write_missing_summary(f"{how}; {saved}", status="interrupted")
        error = TrainingError(f"{how}; {saved}") if self._interrupted_twice else Interrupted(f"{how}; {saved}")
        error.relayed = True
        return error

    def _write_missing_summary(self, error: str, status: str = "failed") -> None:
        """Write the summary if rank 0 died before it could."""
        if self._summary is None and not self.run.summary_file.exists():
            summary = {
                "status": status,
                "mode": self.config.mode,
                "checkpoint": self._latest_checkpoint(),
                "error": error,
            }
            write_json(self.run.summary_file, summary)

    def _latest_checkpoint(self) -> str | None:
        latest = self.run.checkpoints_dir / "latest"
        return latest.read_text().strip() if latest.is_file() else None


def _end_of(log: Path, lines: int = 5, most_bytes: int = 4096) -> str:
    """Return the last lines of a log, indented, each after a line break."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - most_bytes, 0))
        last_lines = file.read().decode(errors="replace").splitlines()[-lines:]
    return "".join(f"\n    {line}" for line in last_lines)


def _to_error(rank: _RankProcess) -> ParamserverError:
    assert rank.failure is not None
    kind = getattr(errors, rank.failure["kind"], TrainingError)
    if kind is Interrupted:
        return Interrupted(rank.failure["message"])
    traceback = f"\n{rank.failure['traceback']}" if rank.failure["traceback"] else ""
    error = kind(f"{rank.title}: {rank.failure['message']}{traceback}")
    assert isinstance(error, ParamserverError)
    error.relayed = True
    return error


# What the supervisor's display and the summary need; all other records stay in the run folder.
_SENT_KINDS = frozenset({"start", "note", "expected", "train", "validation", "phase", "end"})


class EventPipe(Sink):
    """The writing end of a rank's pipe. It closes with the process, so the supervisor always notices the end."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # a child of the task would keep the pipe open
        self._file = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()  # one line at a time: records come from several threads

    def write(self, record: Record) -> None:
        if record["kind"] in _SENT_KINDS:
            self._send("record", dict(record))

    def send_error(self, error: BaseException) -> None:
        """Report the error that ends this rank."""
        self._send("error", describe_error(error))

    def _send(self, event: str, body: dict[str, Any]) -> None:
        with self._lock:
            try:
                self._file.write(json.dumps({"event": event, "body": body}, default=str) + "\n")
            except (BrokenPipeError, ValueError):
                return  # the supervisor is gone; the signal that its death sends ends this rank in good order

    def close(self) -> None:
        """Do nothing: the pipe stays open for an error until the process ends."""


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES)


def first_error(error: BaseException) -> BaseException:
    """Return what ended the run: a disk that also refuses the last files, while an error is handled, is not that."""
    while True:
        refusal = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(refusal, OSError) or refusal.errno not in _DISK_ERRORS or refusal.__context__ is None:
            return error
        error = refusal.__context__


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values: kind, message, exit code, and a traceback unless the message is sufficient.

    Example::

        >>> describe_error(errors.UnsupportedConfiguration("--rank (-1) must be at least 0"))["exit_code"]
        2
    """
    error = first_error(error)
    exit_code = error.exit_code if isinstance(error, ParamserverError) else 1
    text = str(error) if isinstance(error, ParamserverError) else f"{type(error).__name__}: {error}"
    self_explanatory = exit_code != 1 or (isinstance(error, ParamserverError) and error.self_explanatory)
    lines = [] if self_explanatory else traceback.format_exception(error)
    return {"kind": type(error).__name__, "message": text, "exit_code": exit_code, "traceback": "".join(lines)}
