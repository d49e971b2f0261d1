"""The supervisor: starts all ranks of a run on this machine, watches them, and reports the error that ended the run.

A rank reports through a pipe, one JSON line per event (:class:`EventPipe`): records for the display, and its error.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from paramserver import errors
from paramserver.cluster import SUPERVISED, bind_listener, child_environment, process_environ
from paramserver.config import Config, Deadlines, Role, dump_yaml, mode_of, num_trainers_of, roles, world_size_of
from paramserver.config.deadlines import GRACE_S, SAME_SIGNAL_S
from paramserver.errors import Interrupted, ParamserverError, StorageError, TrainingError, message_of, text_of
from paramserver.fileio import DISK_CURES
from paramserver.metrics import Record, Sink
from paramserver.metrics.records import make_record
from paramserver.platform import cpu_ticks, has_ended, is_stopped, memory_file, oom_kills, open_process, signal_process
from paramserver.process_utils import (
    OWN_GROUP,
    STACKS_SIGNAL,
    STOP_SIGNALS,
    describe_exit,
    kill_group,
    signal_name,
    stop_signals,
)
from paramserver.runs.rundir import RunDir, read_mapping, write_json
from paramserver.runtime.preloaded import ForkedProcess, ForkServer, Spares, role_arguments
from paramserver.runtime.rank_guard import RankGuard
from paramserver.runtime.restarts import RestartPolicy

# Signals that end a process before it can report anything.
_SUDDEN = (signal.SIGKILL, *STOP_SIGNALS)
_POLL_S = 0.1
# A process of many GiB takes seconds to end after the kernel has counted it as killed.
_OOM_END_S = 10.0


class _RankProcess:
    """One process of a rank, which leads a process group of its own.

    Its end is that of the process, by a descriptor of it: a fork of the rank may hold the pipe open for longer.
    """

    def __init__(self, role: Role, process: subprocess.Popen[bytes] | ForkedProcess, pipe: int) -> None:
        self.role = role
        self.global_rank = role.global_rank
        self.title = f"rank {role.global_rank} ({role})"
        self.process = process
        self.pipe = pipe  # the reading end of its event pipe; owned from here on
        self.ends = open_process(process.pid)  # readable once the process has ended
        self.failure: dict[str, Any] = {}  # what it reported, or else how it ended; empty without a failure
        self.exit_code: int | None = None
        self.sent: set[int] = set()
        self.started_at = time.monotonic()
        self.alive_at = self.started_at  # ``time.monotonic()`` of its last sign of life
        self.reports = False  # it reports signs of life; until then the CPU time that it takes is one
        self._ticks = 0
        self.done = False  # its part of the run is complete
        self.generation = 0  # of the servers, in which it takes part or, as rank 0, begins to
        self.trains = False  # it takes part in steps
        self.left = False  # the run continues without it, at its own request
        self._unread = b""
        os.set_blocking(pipe, False)

    def read_events(self) -> Iterator[tuple[str, Any]]:
        """Yield kind and body of the events that have arrived, without waiting."""
        with suppress(BlockingIOError):
            while chunk := os.read(self.pipe, 1 << 16):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # incomplete, because the process died; the exit code shows that
            yield event["event"], event["body"]

    def note_cpu_time(self) -> None:
        """Record a sign of life if the process has taken CPU time since the last call. Not after ``reap``."""
        before, self._ticks = self._ticks, cpu_ticks(self.process.pid)
        if self._ticks != before:
            self.alive_at = time.monotonic()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended. Signal handlers may call this."""
        with suppress(ProcessLookupError, ChildProcessError):  # it was reaped just now
            # Not ``Popen.poll``, which would reap it.
            if self.exit_code is None and not has_ended(self.ends):
                self.sent.add(number)
                signal_process(self.ends, self.process.pid, number)

    def reap(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        self.exit_code = self.process.wait()
        os.close(self.ends)
        os.close(self.pipe)
        return self.exit_code


@dataclass
class Supervisor:
    """Runs all ranks of one run on this machine.

    Everything happens in the thread that calls :meth:`supervise`, which must live as long as the ranks.
    """

    config: Config  # effective; ranks read it from a file in memory
    run: RunDir
    folders: Sequence[Path]
    sink: Sink  # receives the records of rank 0; closed at the end
    resume: bool = False
    began: float = field(default_factory=time.time)
    command: Sequence[str] = ()
    # An earlier attempt of the command lost its processes; without ``resume``, from the beginning.
    restarted: bool = False

    def __post_init__(self) -> None:
        self._ranks: list[_RankProcess] = []
        self._summary: dict[str, Any] | None = None
        self._has_started = False
        self._signal: int | None = None
        self._interrupted_twice = False
        self._signalled_at = 0.0
        self._acknowledged = False
        self._ended_at: float | None = None
        self._unforwarded: int | None = None
        self._is_failing = False
        self._kill_at: float | None = None
        # The kernel's kills for lack of memory that end no rank from now on, and all at ``_oom_counted_at``.
        self._oom_kills = self._oom_counted = oom_kills()
        self._oom_counted_at = time.monotonic()
        self._failed: list[_RankProcess] = []
        self._restarts = RestartPolicy(self.config.cluster.max_restarts)
        self._starts_due: list[tuple[float, Role]] = []
        self._restarting_all = False
        self._failed_end: dict[str, Any] | None = None
        self._looked_at = time.monotonic()
        self._deadlines = Deadlines.of(self.config)

    def supervise(self) -> dict[str, Any]:
        """Start all ranks, and wait for the end of the run.

        A rank that is lost once the summary states ``completed`` does not change that: a note names it.

        Raises:
            ParamserverError: the first error of the run, with its rank; Interrupted after a signal.
        """
        with ExitStack() as stack:
            stack.callback(self.sink.close)
            for number in stop_signals() if threading.current_thread() is threading.main_thread() else ():
                stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._guard = stack.enter_context(closing(RankGuard(self._deadlines.failed_s)))
            stack.callback(self._kill_remaining)
            self._start_ranks(stack)
            while self._starts_due or any(rank.exit_code is None for rank in self._ranks):
                self._handle_events(_POLL_S)
                self._kill_silent()
                self._count_oom_kills()
                self._start_due()
                self._keep_spares()
                # Here and not in the signal's handler, so that ranks that start after the signal receive it too.
                if (received := self._unforwarded) is not None:
                    self._unforwarded = None
                    self._note(self._acknowledgement(received))
                    self._signal_ranks(received)
                self._limit_end()
                if self._kill_at is not None and time.monotonic() > self._kill_at:
                    self._signal_ranks(signal.SIGKILL)
            self._read_summary()
            if self._failed_end is not None:
                self.sink.write(self._failed_end)
            if self._summary is not None and self._summary["status"] == "completed":
                self._note_late_losses()
                return self._summary
        return self._raise_outcome()

    # Starting.

    def _start_ranks(self, stack: ExitStack) -> None:
        self.run.logs_dir.mkdir(parents=True, exist_ok=True)
        # In memory: rank 0 stores the config in the run once it has accepted it; until then a resumed run keeps its
        # earlier one, and whatever ends this process leaves no file behind.
        config_file = stack.enter_context(os.fdopen(memory_file("config.yaml"), "w", encoding="utf-8"))
        config_file.write(dump_yaml(self.config))
        config_file.flush()
        environ = child_environment(
            process_environ(), num_trainers=num_trainers_of(self.config), folders=self.folders or None
        )
        environ[SUPERVISED] = "1"
        # Rank 0 inherits the listener of its store, so no other process can take the port meanwhile; nor when it starts
        # again.
        listener = stack.enter_context(bind_listener(self.config.cluster.master_addr, self.config.cluster.master_port))
        cluster, log_file = self.config.cluster, self.run.logs_dir / "spares.log"
        mode = mode_of(self.config)
        spares = Spares(cluster.spares, cluster.max_restarts, mode, environ, log_file, self._guard, self._note)
        self._spares = stack.enter_context(closing(spares))
        self._start_rank = partial(self._start_process, config_file.fileno(), listener, environ)
        start_log = self.run.logs_dir / "start.log"
        with closing(ForkServer(mode, environ, start_log, self._guard, cluster.timeout_s)) as fork_server:
            for role in roles(self.config, world_size_of(self.config)):
                self._start_rank(role, fork_server)
            if fork_server.failed and self._signal is None:
                self._note(f"each rank imports torch itself, which takes longer: {fork_server.failed}")

    def _start_process(
        self,
        config_file: int,
        listener: socket.socket,
        environ: dict[str, str],
        role: Role,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Start a rank, for the first time by the fork server."""
        again = fork_server is None
        began = time.time() if again else self.began
        command = ["--rank", str(role.global_rank), "--world_size", str(world_size_of(self.config))]
        port = listener.getsockname()[1]
        command += ["--master_addr", self.config.cluster.master_addr, "--master_port", str(port)]
        command += ["--run_folder", str(self.run.path), "--began", repr(began), "--parent", str(os.getpid())]
        command += [part for folder in self.folders for part in ("--folder", str(folder))]
        command += ["--resume"] if (self.run.has_checkpoint() if again else self.resume) else []
        command += ["--again"] if again or self.restarted else []
        command += ["--shown_command", json.dumps(list(self.command))]
        reading, writing = os.pipe()
        descriptors = [config_file, writing] + ([listener.fileno()] if role.global_rank == 0 else [])
        try:
            with self.run.log_file(role.global_rank).open("ab") as log:
                given = [log.fileno(), *descriptors]
                process: subprocess.Popen[bytes] | ForkedProcess | None
                if fork_server is None:
                    process = self._spares.take(command, given)
                elif process := fork_server.fork(command, given, lambda: self._signal is not None):
                    self._guard.add(process.pid)
                if process is None:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "paramserver.launch", *command, *role_arguments(*descriptors)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        pass_fds=descriptors,
                        env=environ,
                        **OWN_GROUP,
                    )
                    self._guard.add(process.pid)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        rank = _RankProcess(role, process, reading)
        self._ranks = sorted(
            [*(r for r in self._ranks if r.global_rank != rank.global_rank), rank], key=lambda r: r.global_rank
        )
        self._selector.register(rank.ends, selectors.EVENT_READ, rank)
        self._selector.register(rank.pipe, selectors.EVENT_READ, rank)

    # Watching.

    def _handle_events(self, timeout_s: float) -> None:
        """Wait for events and ends of ranks, at most ``timeout_s``, and handle all that have arrived."""
        for key, _ in self._selector.select(timeout_s):
            rank = key.data
            if rank.exit_code is not None:
                continue  # its end was handled just now, and all that was in its pipe
            if has_ended(rank.ends):
                # First the group, so that nothing writes into the pipe any more.
                kill_group(rank.process.pid)
                self._guard.remove(rank.process.pid)
                self._read_events(rank)
                self._selector.unregister(rank.ends)
                self._selector.unregister(rank.pipe)
                self._on_exit(rank, rank.reap())
            else:
                self._read_events(rank)

    def _read_events(self, rank: _RankProcess) -> None:
        for kind, body in rank.read_events():
            if kind == "record":
                self._on_record(rank, body)
            elif kind == "error":
                self._on_error(rank, body)
            elif kind == "alive":
                rank.alive_at, rank.reports = time.monotonic(), True
            elif kind == "done":
                rank.done = True

    def _on_record(self, rank: _RankProcess, record: dict[str, Any]) -> None:
        if record["kind"] == "view":
            rank.generation = record["view"]
            self._start_finished_again()
            return
        if record["kind"] == "left":
            rank.left = True
            self._note(f"{rank.title} has left the run, which continues without it")
            return
        if record["kind"] == "lost" and rank.global_rank != 0 and not rank.trains:
            rank.generation = 0  # it waits for rank 0 to return, which it does not once the run is completed
        if record["kind"] == "start":
            self._has_started = True
        if record["kind"] == "end":
            self._summary = record["summary"]
            if self._summary["status"] == "interrupted":
                self._interrupt()
            if self._summary["status"] == "failed" and not mode_of(self.config).has_servers:
                self._failed_end = record  # not the end of the run if all ranks start again
                return
        for rank in self._ranks:
            # A trainer reports the phases of its start after its first step. Server 0 sends all records.
            is_server = rank.role.kind == "server"
            if record["kind"] == "phase" and (is_server or rank.global_rank == record["rank"]):
                rank.trains = True
            if record["kind"] == "train" and is_server:
                rank.trains = True
        self.sink.write(record)

    def _on_error(self, rank: _RankProcess, failure: dict[str, Any]) -> None:
        rank.failure = failure
        self._failed.append(rank)
        # With cluster.elastic a signal asks a trainer to leave a run that trains, which continues with the others.
        leaves = self.config.cluster.elastic and rank.role.kind == "trainer" and self._ranks[0].trains
        if _was_interrupted(rank) and (not leaves or self._trainers_were_interrupted):
            self._interrupt()

    def _interrupt(self) -> None:
        """End the run for a signal that a single rank has received, as for one to this process."""
        # Once a rank has failed, this process signals the others: what they report then is a consequence.
        if self._signal is not None or self._is_failing:
            return
        self._signal, self._signalled_at = signal.SIGTERM, time.monotonic()
        # Ranks that make steps agree to end, and a second signal would hurry them. Others would wait for this one.
        if self._starts_due or not all(rank.trains for rank in self._ranks):
            self._signal_ranks(self._signal)

    def _on_exit(self, rank: _RankProcess, exit_code: int) -> None:
        """Conclude what follows from the end of a rank."""
        # All ranks end, to start again from the last checkpoint: how each one ends does not matter.
        if self._restarting_all:
            self._restart_all()
            return

        # What follows from its end for the run.
        if rank.global_rank == 0:
            self._read_summary()
        if rank.role.kind == "trainer" and rank.failure.get("kind") == "RunEnded":
            self._failed.remove(rank)  # the others completed the run before it took part
            rank.failure, rank.done = {}, True
        self._start_finished_again()
        if self._is_late(rank):
            return

        # A rank that is lost: another process takes its place, or the others continue without it.
        if self._is_lost(rank) and self._follow_loss(rank, exit_code):
            return

        if rank.global_rank == 0 and _was_interrupted(rank) and self._summary is None:
            self._limit(GRACE_S)  # between two generations

        # A failure ends the run. The other ranks detect it, and end with their own errors; this ends those that cannot.
        if rank.failure and not _was_interrupted(rank) and not self._is_failing:
            self._is_failing = True
            self._limit(self._deadlines.failed_s)
            self._signal_ranks(signal.SIGTERM)

    def _is_lost(self, rank: _RankProcess) -> bool:
        """Return whether a rank that has ended was to continue, and reported no error of its own."""
        if not rank.failure:
            return not rank.done
        # In ddp the report of a loss may arrive before the end of the lost rank.
        return rank.failure["kind"] in ("Evicted", *(() if mode_of(self.config).has_servers else ("PeerLost",)))

    def _follow_loss(self, rank: _RankProcess, exit_code: int) -> bool:
        """Start a lost rank again, or let the others continue without it; False where its loss ends the run."""
        if self._may_restart(rank):
            if rank in self._failed:
                self._failed.remove(rank)
            self._restart(rank, exit_code)
            return True
        if not rank.failure:
            self._on_error(rank, self._failure_from_exit(rank, exit_code))
        if not self._continues_without(rank):
            return False
        self._failed.remove(rank)
        self._note(f"{rank.title} is lost and not started again: {rank.failure['message']}")
        return True

    # Starting ranks again.

    def _may_restart(self, rank: _RankProcess) -> bool:
        """Return whether the run continues with another process of a rank that died without reporting an error.

        An error that it reported would come again.
        """
        # The run ends: by a signal, a failure or its own conclusion.
        if self._signal is not None or self._is_failing or self._has_concluded:
            return False
        is_trainer, rpc = rank.role.kind == "trainer", mode_of(self.config).has_servers
        if rpc and is_trainer and self.config.server.on_loss == "fail":
            return False
        # The run continues without it: another process would be evicted too.
        if rank.failure.get("kind") == "Evicted" and not rank.generation:
            return False
        return self._restarts.allows(rank.global_rank)

    def _is_late(self, rank: _RankProcess) -> bool:
        """Whether the run was completed before a rank took part that started in the place of a lost one."""
        return self._summary is not None and self._summary["status"] == "completed" and not rank.generation

    @property
    def _is_ending(self) -> bool:
        """Whether the run ends: by a signal, a failure or its own summary."""
        return self._signal is not None or self._is_failing or self._summary is not None

    @property
    def _has_concluded(self) -> bool:
        """Whether rank 0 ended the run. In ddp it also writes a summary when another rank is lost."""
        if self._summary is None or mode_of(self.config).has_servers:
            return self._summary is not None
        return not (self._summary["error"] or "").startswith("PeerLost: ")

    @property
    def _trainers_were_interrupted(self) -> bool:
        """Whether a signal has ended all trainers, so that none waits for a server."""
        trainers = [rank for rank in self._ranks if rank.role.kind == "trainer"]
        return bool(trainers) and all(map(_was_interrupted, trainers))

    def _continues_without(self, rank: _RankProcess) -> bool:
        """Return whether trainers may remain that continue without a lost one, which is not started again."""
        # Servers cannot be done without, nor a rank of a process group.
        if not mode_of(self.config).has_servers or rank.role.kind != "trainer" or self.config.server.on_loss == "fail":
            return False
        # After a signal rank 0 ends the run without it, and saves what is applied.
        if _was_killed(rank):
            return True
        # The run ends anyway.
        if self._is_ending:
            return False
        # With cluster.elastic others may have joined, which are not ranks of this process; rank 0 knows.
        elastic = self.config.cluster.elastic
        return any(
            r.exit_code is None and (r.role.kind == "trainer" or (elastic and not r.global_rank)) for r in self._ranks
        )

    def _restart(self, rank: _RankProcess, exit_code: int) -> None:
        lived_s = time.monotonic() - rank.started_at
        delay_s, number = self._restarts.next_delay(rank.global_rank, lived_s)
        has_servers = mode_of(self.config).has_servers
        delay = f" in {delay_s:g} s" if delay_s else ""
        what = f"all ranks start again{delay}, from the last checkpoint if there is one"
        what = f"it starts again{delay}" if has_servers else what
        self._note(
            f"{rank.title} is lost ({self._how_ended(rank, exit_code)}); {what} "
            f"({number} of {self._restarts.max_restarts})",
            lost_rank=rank.global_rank,
        )
        self._kill_at = None  # else a limit that has ended this process ends the next one too
        if has_servers:
            self._starts_due.append((time.monotonic() + delay_s, rank.role))
            return
        # The others end, as their collectives cannot be completed; then all start again from the last checkpoint.
        self._restarting_all = True
        self._starts_due = [(time.monotonic() + delay_s, r.role) for r in self._ranks]
        self._limit(self._deadlines.failed_s)
        self._restart_all()

    def _start_finished_again(self) -> None:
        """Start the ranks again that had finished before the servers returned to a checkpoint, in a new generation."""
        if not mode_of(self.config).has_servers or self._is_ending:
            return
        generation, due = self._ranks[0].generation, {role.global_rank for _, role in self._starts_due}
        for rank in self._ranks:
            finished = rank.done and rank.exit_code is not None and not rank.left
            if finished and rank.generation < generation and rank.global_rank not in due:
                self._note(f"{rank.title} had finished, and takes part again in what is made again")
                self._starts_due.append((time.monotonic(), rank.role))
                self._kill_at = None  # of ranks that outlive the trainers

    def _restart_all(self) -> None:
        if any(r.exit_code is None for r in self._ranks):
            return
        # The end that these ranks came to is not that of the run, also if a signal comes before they start again.
        self._restarting_all, self._kill_at, self._ended_at = False, None, None
        if self._signal is None or not self._has_concluded:  # else rank 0 has ended the run, as the signal asked
            self.run.summary_file.unlink(missing_ok=True)
        self._summary = self._failed_end = None
        self._failed.clear()

    def _start_due(self) -> None:
        """Start the ranks again whose time has come, unless the run ends meanwhile."""
        if self._restarting_all:
            return
        if self._is_ending:
            self._starts_due.clear()
        now = time.monotonic()
        due = [role for at, role in self._starts_due if at <= now]
        self._starts_due = [(at, role) for at, role in self._starts_due if at > now]
        for role in due:
            self._start_rank(role)

    def _keep_spares(self) -> None:
        """Keep the spares complete while all ranks train, and end them with the run."""
        if self._signal is not None or self._is_failing or self._has_concluded:
            self._spares.close()
            return
        self._spares.remove_dead()
        long_ago = time.monotonic() - self.config.cluster.timeout_s
        starting = [r for r in self._ranks if r.exit_code is None and not r.trains and r.started_at > long_ago]
        if not (starting or self._starts_due or self._restarting_all):
            self._spares.fill()

    def _kill_silent(self) -> None:
        """Kill each rank that has given no sign of life for ``server.lost_after_s``, or longer at its start."""
        now, deadlines = time.monotonic(), self._deadlines
        # This process may have been stopped itself, perhaps together with all ranks.
        paused_s, self._looked_at = now - self._looked_at - _POLL_S, now
        for rank in self._ranks:
            if rank.exit_code is not None or rank.done:
                continue
            rank.alive_at += max(paused_s, 0.0) if paused_s > 1.0 else 0.0
            if not rank.reports:
                rank.note_cpu_time()
            silent_s = now - rank.alive_at

            # First it writes its stacks to its log, once for each silence.
            if silent_s < deadlines.stacks_s:
                rank.sent.discard(STACKS_SIGNAL)
            # Before it reports signs of life the signal would kill it.
            elif rank.reports and STACKS_SIGNAL not in rank.sent and not is_stopped(rank.process.pid):
                rank.send_signal(STACKS_SIGNAL)

            # Then it is ended, once.
            if signal.SIGKILL in rank.sent:
                continue
            if rank.reports and silent_s > deadlines.silent_s:
                silence = f"gave no sign of life for server.lost_after_s ({deadlines.silent_s:g} s)"
            elif not rank.reports and silent_s > deadlines.starting_s:
                silence = f"did nothing for {deadlines.starting_s:g} s while it started"
            else:
                continue
            self._note(f"{rank.title} {silence}; it is ended", lost_rank=rank.global_rank)
            rank.send_signal(signal.SIGKILL)

    def _note(self, text: str, **fields: Any) -> None:
        self.sink.write(make_record("note", None, text=text, **fields))

    def _limit_end(self) -> None:
        """Limit the time of ranks that remain when the run has ended. Until then the ranks watch each other."""
        if self._summary is not None or (self._has_started and self.run.summary_file.exists()):
            self._limit(self._deadlines.ended_s)
            self._ended_at = self._ended_at or time.monotonic()
            interrupted = self._summary is not None and self._summary["status"] == "interrupted"
            overdue = [rank for rank in self._ranks if self._is_late(rank)]
            if self._signal is not None and interrupted and time.monotonic() - self._ended_at > GRACE_S:
                overdue = self._ranks[1:]  # they do not react; a scheduler would soon kill all
            for rank in overdue:
                if signal.SIGKILL not in rank.sent:
                    rank.send_signal(signal.SIGKILL)
            return
        trainers = [r for r in self._ranks[1:] if r.role.kind == "trainer" and not r.left]
        if trainers and all(r.exit_code is not None and not r.failure and r.done for r in trainers):
            # No trainer remains that could notice the loss of rank 0, which may still write the last checkpoint.
            self._limit(self._deadlines.last_write_s)

    def _limit(self, limit_s: float) -> None:
        """Kill the ranks that have not ended after ``limit_s``, unless an earlier limit applies."""
        kill_at = time.monotonic() + limit_s
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _count_oom_kills(self) -> None:
        """Count again from time to time: what was killed earlier was another process, such as one of another user."""
        if (now := time.monotonic()) - self._oom_counted_at > _OOM_END_S:
            self._oom_kills = max(self._oom_kills, self._oom_counted)
            self._oom_counted, self._oom_counted_at = oom_kills(), now

    def _how_ended(self, rank: _RankProcess, exit_code: int) -> str:
        """Return how a rank ended; the log of one that was killed for lack of memory has nothing of it."""
        how = describe_exit(exit_code)
        if exit_code != -signal.SIGKILL or signal.SIGKILL in rank.sent or oom_kills() <= self._oom_kills:
            return how
        self._oom_kills += 1  # each is the end of one process
        # The kernel does not state which one.
        return f"{how}, probably for lack of memory: the kernel has just killed a process of this machine or job for it"

    def _failure_from_exit(self, rank: _RankProcess, exit_code: int) -> dict[str, Any]:
        """Describe the failure of a rank that reported none."""
        log = self.run.log_file(rank.global_rank)
        ends_by_signal = self._signal is not None and not self._is_failing and self.config.server.on_loss != "fail"
        kind, how = "TrainingError", self._how_ended(rank, exit_code)
        if -exit_code in rank.sent:
            # The supervisor ended it because another rank had failed or a signal came: a consequence, not the cause.
            kind, how = "PeerLost", f"did not react and was ended by {signal_name(-exit_code)}"
        elif ends_by_signal and exit_code < 0 and -exit_code not in STOP_SIGNALS:
            kind = "PeerLost"  # the run ends for the signal, as it would without this loss
        last_lines = "" if -exit_code in _SUDDEN else _end_of(log)
        message = f"{how}; see the end of its log, {log}{last_lines}"
        return {"kind": kind, "message": message, "exit_code": 1, "traceback": "", "signal": -exit_code}

    def _signal_ranks(self, number: int) -> None:
        for rank in self._ranks:
            rank.send_signal(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal is not None:
            self._interrupted_twice = True
            self._signal_ranks(signal.SIGKILL)
        again = number != signal.SIGHUP and time.monotonic() - self._signalled_at > SAME_SIGNAL_S
        if self._signal is None or again:
            self._unforwarded = number
        if self._signal is None:
            self._signal, self._signalled_at = number, time.monotonic()

    def _acknowledgement(self, number: int) -> str:
        name = f"signal {signal.Signals(number).name}"
        if number != self._signal or self._acknowledged:
            return f"{name}: the run ends now, with what is applied"
        self._acknowledged = True
        return (
            f"{name}: the run ends once the present step or hook returns, or without it after "
            f"cluster.stop_within_s ({self.config.cluster.stop_within_s:g} s); a second Ctrl-C ends it at once"
        )

    def _kill_remaining(self) -> None:
        """End all ranks, also after an error here: no rank outlives its supervisor."""
        for rank in self._ranks:
            if rank.exit_code is None:
                kill_group(rank.process.pid)
                self._guard.remove(rank.process.pid)
                rank.reap()

    # The outcome.

    def _read_summary(self) -> None:
        """Read the summary that rank 0 stored before it died, if it did not send it."""
        if self._summary is None and self._has_started and self.run.summary_file.exists():
            # Of this start: rank 0 removes an earlier one before its record "start".
            summary = read_mapping(self.run.summary_file, json.loads)
            if "status" in summary:  # else it was damaged meanwhile, and counts as none
                self._on_record(self._ranks[0], make_record("end", summary.get("steps"), summary=summary))

    def _note_late_losses(self) -> None:
        for rank in self._failed:
            self._note(
                f"warning: the run is completed, but {rank.title} failed after its end: {rank.failure['message']}"
            )

    def _raise_outcome(self) -> NoReturn:
        failure = self._ranks[0].failure
        by_signal = self._signal is not None and self._trainers_were_interrupted
        if by_signal and (not failure or "signal" in failure):
            if failure:
                self._note(f"warning: {self._ranks[0].title} failed when the run was interrupted: {failure['message']}")
            by = self._ranks[-1].failure.get("message", "a signal")
            raise self._interruption(f"interrupted ({by})")
        first = self._first_failure()
        if first is not None:
            if first.failure["kind"] == "Interrupted" and self._summary is None:
                raise self._interruption(first.failure["message"])
            self._write_missing_summary(f"{first.title}: {first.failure['message']}")
            raise _to_error(first)
        if self._signal is not None and self._summary is None:
            name = signal.Signals(self._signal).name
            twice = self._interrupted_twice
            for rank in filter(_was_killed, self._failed):
                self._note(f"warning: {rank.title} failed when the run was interrupted: {rank.failure['message']}")
            raise self._interruption(
                f"interrupted twice ({name}) and ended at once" if twice else f"interrupted ({name})"
            )
        raise TrainingError(f"all ranks ended well, but rank 0 sent no summary; see {self.run.log_file(0)}")

    def _first_failure(self) -> _RankProcess | None:
        """Return the failure that the others follow from: causes before consequences, each in order of arrival."""
        if self._interrupted_twice:
            return None
        found: dict[str, list[_RankProcess]] = {"cause": [], "PeerLost": [], "reported": [], "Interrupted": []}
        for rank in self._failed:
            found[self._classify(rank)].append(rank)
        found["Interrupted"].sort(key=lambda rank: rank.global_rank)  # rank 0 reports what was saved, and how to resume
        if self._signal is not None and (self._summary is None or self._summary["status"] != "failed"):
            found["PeerLost"].clear()
            found["reported"].clear()
        return next((rank for ranks in found.values() for rank in ranks), None)

    def _classify(self, rank: _RankProcess) -> str:
        """Return ``cause``, ``PeerLost`` (a consequence), ``reported`` (by another rank) or ``Interrupted``."""
        kind = rank.failure["kind"]
        if kind in ("PeerFailed", "PeerRefused"):
            return "reported"
        if kind in ("PeerLost", "RunEnded", "GenerationChanged"):
            return "PeerLost"
        if kind == "Interrupted":
            return "Interrupted"
        # A signal to the whole group also reaches ranks that have no handler yet. Python ends with the signal then, or
        # with 1 while it starts.
        by_signal = kind == "KeyboardInterrupt" or rank.failure.get("signal") in (*STOP_SIGNALS, -1)
        return "PeerLost" if by_signal and self._signal is not None else "cause"

    def _interruption(self, how: str) -> ParamserverError:
        """Write the summary of a run that a signal ended before rank 0 could report it, and return the error."""
        latest = self._latest_checkpoint()
        saved = "nothing was saved yet"
        if latest is not None:
            saved = f"the last checkpoint is {latest}; resume with: {self.run.resume_command}"
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
            try:
                write_json(self.run.summary_file, summary)
            except StorageError as refusal:
                self._note(f"warning: {refusal}")  # what ended the run is raised, and printed last

    def _latest_checkpoint(self) -> str | None:
        latest = self.run.checkpoints_dir / "latest"
        return latest.read_text().strip() if latest.is_file() else None


def _was_interrupted(rank: _RankProcess) -> bool:
    """Return whether a rank reported that a signal ended it; the task may end its process with any exit code."""
    return rank.failure.get("kind") == Interrupted.__name__


def _was_killed(rank: _RankProcess) -> bool:
    """Return whether a rank was lost without a report while the run ended for a signal, and not by this process."""
    failure = rank.failure
    return failure.get("kind") == "PeerLost" and failure.get("signal", 0) > 0 and failure["signal"] not in rank.sent


def _end_of(log: Path) -> str:
    """Return the last 5 lines of a log, indented, each after a line break."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 4096, 0))
        last_lines = file.read().decode(errors="replace").splitlines()[-5:]
    return "".join(f"\n    {line}" for line in last_lines)


def _to_error(rank: _RankProcess) -> ParamserverError:
    kind = getattr(errors, rank.failure["kind"], TrainingError)
    if kind is Interrupted:
        return Interrupted(rank.failure["message"])
    traceback = f"\n{rank.failure['traceback']}" if rank.failure["traceback"] else ""
    error = kind(f"{rank.title}: {rank.failure['message']}{traceback}")
    assert isinstance(error, ParamserverError)
    error.relayed = True
    return error


# What the supervisor's display and the summary need; all other records stay in the run folder.
_SENT_KINDS = frozenset(
    {"view", "left", "start", "note", "expected", "train", "validation", "phase", "lost", "joined", "end"}
)


# Only for the display; left out while the supervisor does not read, as signs of life are.
_DISPLAYED = frozenset({"train", "validation"})
# Half of what a pipe holds: the rest is for events that must arrive, such as the last ones of a rank.
_MAX_UNREAD_BYTES = 1 << 15
# A rank that ends waits this long for the supervisor to read its last event.
_LAST_EVENT_S = 10.0


class EventPipe(Sink):
    """The writing end of a rank's pipe. A supervisor that does not read, because it is stopped, does not stop the rank.

    The descriptor is owned until the process ends.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # for programs that the task starts
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._unsent = bytearray()
        self._stopped = threading.Event()  # never set: the heartbeat ends with the process
        self._lock = threading.Lock()  # one line at a time: records come from several threads

    def write(self, record: Record) -> None:
        kind = record["kind"]
        if kind in _SENT_KINDS and not (kind in _DISPLAYED and self._is_unread()):
            self._send("record", dict(record), _LAST_EVENT_S if kind == "end" else 0.0)

    def start_heartbeat(self, interval_s: float) -> None:
        """Report from now on, in a thread, that this process runs."""
        # Takes ``_lock`` for each event. Ends with the process.
        threading.Thread(target=self._beat, args=(interval_s,), name="alive", daemon=True).start()

    def _beat(self, interval_s: float) -> None:
        while True:
            if not self._is_unread():
                self._send("alive", None, 0.0)
            self._stopped.wait(interval_s)

    def send_done(self) -> None:
        self._send("done", None, _LAST_EVENT_S)

    def send_error(self, error: BaseException) -> None:
        self._send("error", describe_error(error), _LAST_EVENT_S)

    def _is_unread(self) -> bool:
        """Return whether the supervisor does not read, or not as fast as this process writes."""
        unread = fcntl.ioctl(self._descriptor, termios.FIONREAD, struct.pack("i", 0))
        return bool(self._unsent) or struct.unpack("i", unread)[0] > _MAX_UNREAD_BYTES

    def _send(self, event: str, body: dict[str, Any] | None, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        with self._lock:
            self._unsent += json.dumps({"event": event, "body": body}, default=str).encode() + b"\n"
            while self._unsent:
                try:
                    del self._unsent[: os.write(self._descriptor, self._unsent)]
                except BlockingIOError:
                    if (left_s := deadline - time.monotonic()) <= 0:
                        return  # sent with the next event
                    select.select([], [self._descriptor], [], left_s)
                except BrokenPipeError:
                    # The supervisor is gone; the signal that its death sends ends this rank in good order.
                    self._unsent.clear()

    def close(self) -> None:
        """Do nothing: the pipe stays open for an error until the process ends."""


def first_error(error: BaseException) -> BaseException:
    """Return what ended the run: a disk that also refuses the last files, while an error is handled, is not that."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        refusal = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(refusal, OSError) or refusal.errno not in DISK_CURES or refusal.__context__ is None:
            return error
        before = refusal.__context__
        if isinstance(before, FileNotFoundError) and _is_in(before.filename, refusal.filename):
            return error  # one refusal: ``Path.mkdir`` makes parents while it handles the error of the folder
        error = before
    return error


def _is_in(path: object, folder: object) -> bool:
    return isinstance(path, str) and isinstance(folder, str) and Path(path).is_relative_to(folder)


# Where subprocess starts a process, and multiprocessing, as for the workers of a DataLoader.
_FORKS = (("subprocess.py", "_execute_child"), ("popen_fork.py", "_launch"), ("util.py", "spawnv_passfds"))


def _shortage(error: BaseException) -> str | None:
    """Return what to do if a process has no descriptor or thread left, which shows in many kinds of errors.

    None if it has.
    """
    found: BaseException | None = error
    seen: set[int] = set()  # one error that several threads raise may be among its own causes
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        number = found.errno if isinstance(found, OSError) else None
        if number in (errno.EMFILE, errno.ENFILE) or "too many open files" in message_of(found).lower():
            limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
            enough = min(max(4096, 4 * limit), highest) if highest > limit else 4096
            return (
                f"this process may have {limit} files and sockets open, and needs more ({message_of(found)}); raise "
                f"the limit, for example ulimit -n {enough}, and start again"
            )
        refused_thread = isinstance(found, RuntimeError) and "can't start new thread" in message_of(found)
        if refused_thread or _is_refused_fork(found):
            what = message_of(found).rstrip().rpartition("\n")[2]  # after the traceback of a worker of a DataLoader
            return (
                f"no more threads or processes can be started here ({what}); raise the limit of this user (ulimit -u, "
                "or -v of their memory) or of the container or job (pids.max, docker run --pids-limit), and start again"
            )
        found = found.__cause__ or found.__context__
    return None


def _is_refused_fork(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, BlockingIOError) else ()
    return any((Path(frame.filename).name, frame.name) in _FORKS for frame in frames)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values: kind, message, exit code, and a traceback unless the message is sufficient."""
    error = first_error(error)
    exit_code = error.exit_code if isinstance(error, ParamserverError) else 1
    if (shortage := _shortage(error)) is not None:
        return {"kind": "TrainingError", "message": shortage, "exit_code": 1, "traceback": ""}
    self_explanatory = exit_code != 1 or (isinstance(error, ParamserverError) and error.self_explanatory)
    lines = [] if self_explanatory else traceback.format_exception(error)
    return {
        "kind": type(error).__name__,
        "message": text_of(error),
        "exit_code": exit_code,
        "traceback": "".join(lines),
    }
