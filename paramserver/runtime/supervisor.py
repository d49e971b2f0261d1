"""Starts all ranks of a run on this machine, watches them, and tells what became of them.

How a rank tells its supervisor what happens: one JSON line per event through a pipe.
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

# Beyond the time in which ranks notice a lost peer by themselves.
_GRACE_S = 5.0
# Ends of which a process itself can say nothing.
_SUDDEN = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass
class _Rank:
    """A child and what it told."""

    index: int
    title: str
    process: subprocess.Popen[bytes]
    reader: threading.Thread | None = None
    failure: dict[str, Any] | None = None
    exit_code: int | None = None
    sent: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Event:
    rank: _Rank
    kind: str
    body: Any


@dataclass
class Supervisor:
    """One run with all of its ranks on this machine.

    Args:
        config: effective; stored in the run's folder, from which the ranks read it.
        run: the folder.
        folders: where the task is looked for, the config's folder among them.
        shown: receives the records that rank 0 passes on.
        resume: the ranks go on from the newest checkpoint.
        began: ``time.time()`` of the command.
        command: for environment.json.
    """

    config: Config
    run: RunDir
    folders: Sequence[Path]
    shown: Sink
    resume: bool = False
    began: float = field(default_factory=time.time)
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        # Rank 0 stores the config in the run when it has accepted it; until then a resumed run keeps its own.
        self._config_file = self.run.path / f".launch-{os.getpid()}.yaml"
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._ranks: list[_Rank] = []
        self._summary: dict[str, Any] | None = None
        self._signal: int | None = None
        self._twice = False
        self._forwarded = False
        self._kill_at: float | None = None
        self._failed: list[_Rank] = []

    def supervise(self) -> dict[str, Any]:
        """Run to the end.

        Returns:
            The summary.

        Raises:
            ParamserverError: the first error of the run, with its rank; Interrupted after a signal.
        """
        previous = self._install_handlers()
        try:
            self._start_all()
            while any(rank.exit_code is None for rank in self._ranks):
                self._take_events(0.1)
                self._forward_signal()
                self._end_stragglers()
            self._take_events(0.0)
        finally:
            self._reap()
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.shown.close()
        return self._outcome()

    # Starting.

    def _start_all(self) -> None:
        self.run.logs_dir.mkdir(parents=True, exist_ok=True)
        write_text(self._config_file, dump_yaml(self.config))
        world_size = world_size_of(self.config)
        environ = child_environment(
            process_environ(),
            sharers=num_trainers_of(self.config),
            config_folder=self.folders[-1] if self.folders else None,
        )
        mark_supervised(environ)
        host = self.config.cluster.master_addr
        with bind_listener(host, self.config.cluster.master_port) as listener:
            port = listener.getsockname()[1]
            for role in roles(self.config, world_size):
                inherited = listener.fileno() if role.global_rank == 0 else None
                title = f"rank {role.global_rank} ({role})"
                self._ranks.append(self._start(role.global_rank, title, world_size, port, inherited, environ))

    def _start(
        self, index: int, title: str, world_size: int, port: int, listener: int | None, environ: dict[str, str]
    ) -> _Rank:
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "paramserver.launch", "--config", str(self._config_file)]
        command += ["--rank", str(index), "--world_size", str(world_size)]
        command += ["--master_addr", self.config.cluster.master_addr, "--master_port", str(port)]
        command += ["--supervised", str(writing), "--run_folder", str(self.run.path), "--began", repr(self.began)]
        command += [part for folder in self.folders for part in ("--folder", str(folder))]
        command += ["--resume"] if self.resume else []
        command += ["--listener", str(listener)] if listener is not None else []
        command += ["--shown_command", json.dumps(list(self.command))]
        passed = (writing,) if listener is None else (writing, listener)
        with self.run.log_file(index).open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=passed, env=environ
            )
        os.close(writing)
        rank = _Rank(index, title, process)
        rank.reader = threading.Thread(target=self._read, args=(rank, reading), name=f"watch-{index}", daemon=True)
        rank.reader.start()
        return rank

    def _read(self, rank: _Rank, reading: int) -> None:
        """A thread per rank: its events, then its exit."""
        with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # cut short by the death that the exit code tells
                self._events.put(_Event(rank, event["event"], event["body"]))
        self._events.put(_Event(rank, "exit", rank.process.wait()))

    # Watching.

    def _take_events(self, timeout_s: float) -> None:
        handlers: dict[str, Callable[[_Rank, Any], None]] = {
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

    def _on_record(self, rank: _Rank, record: dict[str, Any]) -> None:
        if record["kind"] == "end":
            self._summary = record["summary"]
        self.shown.write(record)

    def _on_error(self, rank: _Rank, failure: dict[str, Any]) -> None:
        rank.failure = failure
        self._failed.append(rank)

    def _on_exit(self, rank: _Rank, exit_code: int) -> None:
        rank.exit_code = exit_code
        if rank.failure is None and exit_code not in (0, Interrupted.exit_code):
            self._on_error(rank, self._last_words(rank, exit_code))
        if rank.failure is not None and exit_code != Interrupted.exit_code and self._kill_at is None:
            # The others notice by themselves, and leave with their own words; this is for those who cannot.
            self._kill_at = time.monotonic() + self.config.server.lost_after_s + _GRACE_S
            self._send_all(signal.SIGTERM)

    def _last_words(self, rank: _Rank, exit_code: int) -> dict[str, Any]:
        """What is said of a rank that said nothing itself."""
        log = self.run.log_file(rank.index)
        kind, how = "TrainingError", f"ended with exit code {exit_code}"
        if exit_code < 0:
            how = f"killed by {signal.Signals(-exit_code).name}"
        if -exit_code in rank.sent:
            # Ended from here, because another rank had failed or a signal came: no cause, but a consequence.
            kind, how = "PeerLost", f"did not react and was ended by {signal.Signals(-exit_code).name}"
        words = "" if -exit_code in _SUDDEN else _end_of(log)
        message = f"{how}; its last words are in {log}{words}"
        return {"kind": kind, "message": message, "exit_code": 1, "traceback": "", "signal": -exit_code}

    def _end_stragglers(self) -> None:
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._send_all(signal.SIGKILL)

    def _send_all(self, number: int) -> None:
        for rank in self._ranks:
            if rank.exit_code is None and rank.process.poll() is None:
                rank.sent.add(number)
                rank.process.send_signal(number)

    def _forward_signal(self) -> None:
        if self._signal is not None and not self._forwarded:
            self._forwarded = True
            self._send_all(signal.SIGTERM)

    def _install_handlers(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal is not None:
            self._twice = True
            self._send_all(signal.SIGKILL)
        self._signal = self._signal or number

    def _reap(self) -> None:
        """No rank outlives its supervisor."""
        self._send_all(signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
            if rank.reader is not None:
                rank.reader.join()
        self._config_file.unlink(missing_ok=True)

    # The end.

    def _outcome(self) -> dict[str, Any]:
        first = self._first_failure()
        if first is not None and first.failure is not None:
            self._write_missing_summary(f"{first.title}: {first.failure['message']}")
            raise _error_of(first)
        if self._signal is not None and self._summary is None:
            raise self._cut_short()
        if self._summary is None:
            raise TrainingError(f"all ranks ended well, but rank 0 told no summary; see {self.run.log_file(0)}")
        return self._summary

    def _first_failure(self) -> _Rank | None:
        """The failure that the others follow from: in the order in which they came, causes before consequences."""
        if self._twice:
            return None
        found: dict[str, list[_Rank]] = {"cause": [], "PeerLost": [], "told": [], "Interrupted": []}
        for rank in self._failed:
            found[self._kind_of(rank)].append(rank)
        found["Interrupted"].sort(key=lambda rank: rank.index)  # rank 0 says what was saved, and how to go on
        if self._signal is not None:
            found["PeerLost"].clear()
            found["told"].clear()
        return next((rank for ranks in found.values() for rank in ranks), None)

    def _kind_of(self, rank: _Rank) -> str:
        """``PeerLost`` for a consequence, ``told`` for one at second hand, ``Interrupted``, or ``cause``."""
        failure = rank.failure or {}
        if failure["kind"] in ("PeerFailed", "PeerRefused"):
            return "told"
        if failure["kind"] == "PeerLost":
            return "PeerLost"
        if failure["kind"] == "Interrupted":
            return "Interrupted"
        # A signal to the whole group also reaches ranks that cannot handle it yet: Python then ends with the signal, or
        # with 1 where it is still about to start.
        by_signal = failure["kind"] == "KeyboardInterrupt" or failure.get("signal") in (*_SIGNALS, -1)
        return "PeerLost" if by_signal and self._signal is not None else "cause"

    def _cut_short(self) -> ParamserverError:
        """A signal ended the run before rank 0 could say so."""
        assert self._signal is not None
        name = signal.Signals(self._signal).name
        latest = self.run.checkpoints_dir / "latest"
        saved = "nothing was saved yet"
        if latest.is_file():
            saved = f"the last checkpoint is {latest.read_text().strip()}; resume with: {self.run.resume_command}"
        how = f"interrupted twice ({name}) and ended at once" if self._twice else f"interrupted ({name})"
        self._write_missing_summary(f"{how}; {saved}", status="interrupted")
        error = TrainingError(f"{how}; {saved}") if self._twice else Interrupted(f"{how}; {saved}")
        error.relayed = True
        return error

    def _write_missing_summary(self, error: str, status: str = "failed") -> None:
        """Where rank 0 died before it could write one."""
        if self._summary is None and not self.run.summary_file.exists():
            latest = self.run.checkpoints_dir / "latest"
            checkpoint = latest.read_text().strip() if latest.is_file() else None
            summary = {"status": status, "mode": self.config.mode, "checkpoint": checkpoint, "error": error}
            write_json(self.run.summary_file, summary)


def _end_of(log: Path, lines: int = 5, most_bytes: int = 4096) -> str:
    """The last lines of a log, indented, each after a line break."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - most_bytes, 0))
        words = file.read().decode(errors="replace").splitlines()[-lines:]
    return "".join(f"\n    {line}" for line in words)


def _error_of(rank: _Rank) -> ParamserverError:
    assert rank.failure is not None
    kind = getattr(errors, rank.failure["kind"], TrainingError)
    if kind is Interrupted:
        return Interrupted(rank.failure["message"])
    traceback = f"\n{rank.failure['traceback']}" if rank.failure["traceback"] else ""
    error = kind(f"{rank.title}: {rank.failure['message']}{traceback}")
    assert isinstance(error, ParamserverError)
    error.relayed = True
    return error


# What the supervisor's display and its summary need; the rest stays in the run's folder.
_SHOWN = frozenset({"start", "note", "expected", "train", "validation", "phase", "end"})


class Channel(Sink):
    """The writing end of a rank's pipe. Closing the process closes it, so the supervisor always learns of the end."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._file = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def write(self, record: Record) -> None:
        if record["kind"] in _SHOWN:
            self._send("record", dict(record))

    def failed(self, error: BaseException) -> None:
        """Report what ends this rank."""
        self._send("error", describe(error))

    def _send(self, event: str, body: dict[str, Any]) -> None:
        with self._lock:
            try:
                self._file.write(json.dumps({"event": event, "body": body}, default=str) + "\n")
            except (BrokenPipeError, ValueError):
                return  # the supervisor is gone; the signal that its death sends ends this rank in good order

    def close(self) -> None:
        """Nothing: the pipe stays open for an error until the process ends."""


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES)


def first_error(error: BaseException) -> BaseException:
    """What ended the run. A disk that refuses its last files too is met on the way out, and is not the first error."""
    while True:
        refusal = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(refusal, OSError) or refusal.errno not in _DISK or refusal.__context__ is None:
            return error
        error = refusal.__context__


def describe(error: BaseException) -> dict[str, Any]:
    """An error as plain values: kind, message, exit code, and the traceback where that says more than the message."""
    error = first_error(error)
    exit_code = error.exit_code if isinstance(error, ParamserverError) else 1
    text = str(error) if isinstance(error, ParamserverError) else f"{type(error).__name__}: {error}"
    says_all = exit_code != 1 or (isinstance(error, ParamserverError) and error.says_all)
    lines = [] if says_all else traceback.format_exception(error)
    return {"kind": type(error).__name__, "message": text, "exit_code": exit_code, "traceback": "".join(lines)}
