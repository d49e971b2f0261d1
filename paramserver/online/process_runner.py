"""Runs simulations as processes of this machine, or as steps of its SLURM allocation, and ends them with the run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paramserver.cluster import process_environ
from paramserver.cluster.network import producer_environment
from paramserver.cluster.simulation import SimulationEnvironment
from paramserver.cluster.slurm import step_command
from paramserver.errors import TrainingError, UnsupportedConfiguration
from paramserver.fileio import explain_disk_errors
from paramserver.importing import load_object
from paramserver.online.process_guard import GRACE_S
from paramserver.online.spec import IngestSpec
from paramserver.online.tracker import StartProcess, log_file

# The guard kills its group itself; the runner kills a guard that does not.
_GUARD_GRACE_S = GRACE_S + 1.0
# Of the output of a simulation, for messages.
_LAST_BYTES, _MAX_CHARACTERS = 4096, 400


class ProcessRunner:
    """Owns the processes of all simulations. For one thread: the processes end when that thread ends.

    Each process runs under a guard in a separate session, writes its output to ``simulation-<id>.log``, and finds the
    run by the variables of ``SimulationEnvironment``. With srun its member is SLURM_PROCID. The function's module and
    the files of the command are searched in ``folders``.

    Raises:
        UnsupportedConfiguration: see ``LaunchCommand``.
    """

    def __init__(
        self,
        spec: IngestSpec,
        logs: Path,
        folders: Sequence[Path] = (),
        environ: Mapping[str, str] | None = None,
        publisher: str | None = None,
    ) -> None:
        self._environ = process_environ() if environ is None else environ
        self._publisher = publisher
        # A run whose simulations come from outside starts none.
        self._command = LaunchCommand(spec, folders, self._environ) if spec.is_managed else None
        self._config = spec.config
        self._logs = logs
        self._running: dict[int, _Running] = {}

    def start(self, start: StartProcess, address: str, secret: str) -> None:
        """Start all processes of a simulation, which open it with ``secret`` at the coordinator at ``address``.

        Raises:
            StorageError: its log cannot be written.
            TrainingError: the system starts no process.
        """
        assert self._command is not None
        arguments = self._command.arguments(start)
        keys = self._config.keys
        environment = SimulationEnvironment(
            address=address,
            simulation=start.simulation,
            parameters=start.parameters,
            attempt=start.attempt,
            members=self._config.group_size,
            keys=None if keys is None else str(Path(keys).absolute()),
            secret=secret,
            publisher=self._publisher,
        )
        file = log_file(self._logs, start.simulation)
        with explain_disk_errors(file, "log"):
            self._logs.mkdir(parents=True, exist_ok=True)
            log = file.open("ab", buffering=0)
        with log:
            title = f"{_title(start.simulation)} {start.attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
            with explain_disk_errors(file, "log"):
                log.write(f"{title}: {shlex.join(arguments)}\n".encode())
            # Registered before the first process starts: if a later one fails to start, kill_all() finds the others.
            self._running[start.simulation] = running = _Running(start, [])
            environments = [environment]
            if not self._command.starts_all:
                environments = [replace(environment, member=member) for member in range(self._config.group_size)]
            try:
                for one in environments:
                    running.guards.append(self._spawn(arguments, one, log.fileno()))
            except OSError as error:
                raise TrainingError(
                    f"simulation {start.simulation} cannot be started ({error}); correct that on the host of rank 0, "
                    "then --resume"
                ) from error

    def _spawn(self, arguments: Sequence[str], environment: SimulationEnvironment, log: int) -> _Guard:
        reading, writing = os.pipe()
        guard = [sys.executable, "-m", "paramserver.online.process_guard", str(os.getpid()), str(writing)]
        try:
            process = subprocess.Popen(
                [*guard, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=producer_environment(self._environ, environment.to_environ()),
                pass_fds=(writing,),
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            # Only the guard may hold the writing end, or the reading end would not become readable when it ends.
            os.close(writing)
        return _Guard(process, reading)

    def kill(self, simulation: int) -> None:
        """Begin to end the processes of a simulation; ``poll_exited`` reports when they have ended."""
        if simulation in self._running:
            self._running[simulation].terminate(time.monotonic())

    def poll_exited(self) -> list[tuple[int, int, int]]:
        """(simulation, attempt, exit code) of the simulations whose processes have all ended since the last call."""
        now = time.monotonic()
        found = []
        for simulation, running in list(self._running.items()):
            if (code := running.poll(now)) is not None:
                del self._running[simulation]
                found.append((simulation, running.start.attempt, code))
        return found

    def last_line(self, simulation: int) -> str:
        """The last line that the present attempt of a simulation wrote; empty if it wrote none."""
        try:
            with log_file(self._logs, simulation).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return ""  # the user has removed it
        line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if _title(simulation) in line:  # perhaps after what an earlier attempt wrote, whose last line had no end
            return ""
        return "".join(one if one.isprintable() else " " for one in line[:_MAX_CHARACTERS])

    @property
    def exit_pipes(self) -> list[int]:
        """File descriptors, one of which becomes readable whenever a process ends."""
        return [guard.pipe for running in self._running.values() for guard in running.guards if guard.code is None]

    def kill_all(self) -> None:
        for simulation in self._running:
            self.kill(simulation)

    @property
    def running(self) -> list[int]:
        """Simulations of which at least one process has not ended."""
        return list(self._running)


def _title(simulation: int) -> str:
    """How the first line of each attempt in the log begins."""
    return f"--- simulation {simulation}, attempt"


@dataclass
class _Running:
    """The processes of one attempt of a simulation."""

    start: StartProcess
    guards: list[_Guard]
    kill_at: float | None = None
    exit_code: int = 0

    def terminate(self, now: float) -> None:
        if self.kill_at is None:
            self.kill_at = now + _GUARD_GRACE_S
            for guard in self.guards:
                guard.send_signal(signal.SIGTERM)

    def poll(self, now: float) -> int | None:
        """The exit code once all processes have ended. A group ends with its first failure, whose code is returned."""
        for guard in self.guards:
            guard.poll()
            self.exit_code = self.exit_code or guard.code or 0
        if all(guard.code is not None for guard in self.guards):
            return self.exit_code
        if self.exit_code:
            self.terminate(now)
        if self.kill_at is not None and now > self.kill_at:
            for guard in self.guards:
                guard.send_signal(signal.SIGKILL)
        return None


@dataclass
class _Guard:
    """A guard process (process_guard.py). ``pipe`` becomes readable, at its end, when the process ends."""

    process: subprocess.Popen[bytes]
    pipe: int
    code: int | None = None

    def poll(self) -> None:
        """Set ``code`` if the process has ended, and kill what is left of its group."""
        # WNOWAIT leaves the process a zombie: until it is reaped its pid, which is also that of the group, cannot be
        # reused, so the signal reaches no other group.
        if self.code is None and os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.send_signal(signal.SIGKILL)
            self.code = self.process.wait()
            os.close(self.pipe)

    def send_signal(self, number: signal.Signals) -> None:
        """SIGTERM goes to the guard, which passes it on; SIGKILL goes to its whole group."""
        if self.code is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(self.process.pid, number)
        else:
            os.kill(self.process.pid, number)


_RUN_PLACEHOLDERS = ("simulation", "attempt")
# {{name}} stands for {name}; braces around anything else are left as they are.
_NAME = r"[\w.-]+"
_PLACEHOLDER = re.compile(rf"\{{\{{({_NAME})\}}\}}|\{{({_NAME})\}}")


class LaunchCommand:
    """The command that starts the processes of a simulation, checked before any is started.

    ``simulations.command`` is split as by a shell. Then {simulation}, {attempt} and the names of parameters are filled
    in, numbers with all of their digits. No shell runs it. The path of a file, which the program has if it contains a
    slash and an argument also if it contains a dot, is relative to the first of ``folders`` that has this file.
    ``starts_all`` is whether it starts all processes of a simulation at once.

    Raises:
        UnsupportedConfiguration: the function does not exist; or the command cannot be split, has an unknown
            placeholder, or begins with no program.
    """

    def __init__(self, spec: IngestSpec, folders: Sequence[Path], environ: Mapping[str, str]) -> None:
        self._names = tuple(name for name, _, _ in spec.parameters)
        self._folders = tuple(folders)
        search = environ.get("PATH")
        if spec.config.function is not None:
            place, _, name = spec.config.function.rpartition(":")
            if place == "__main__":  # in the process of a simulation that is another program
                raise UnsupportedConfiguration(
                    f"simulations.function ({spec.config.function}) must name a module or a file that each process can "
                    f"import; write path/to/file.py:{name}"
                )
            load_object(spec.config.function, "simulations.function", folders)  # fails here, not in each process
            passed = [word for folder in folders for word in ("--folder", str(folder))]
            self._words = [sys.executable, "-m", "paramserver.run_simulation", spec.config.function, *passed]
            self._has_placeholders = False
        else:
            self._words = self._parse(str(spec.config.command), search)
            self._has_placeholders = True
        self._step = step_command(spec.config.launcher, environ, spec.config.group_size)
        self.starts_all = bool(self._step)

    def _parse(self, command: str, search: str | None) -> list[str]:
        key = "simulations.command"
        for name in self._names:
            if name in _RUN_PLACEHOLDERS:
                raise UnsupportedConfiguration(f"simulations.parameters.{name} must have another name than {{{name}}}")
            if not re.fullmatch(_NAME, name):
                raise UnsupportedConfiguration(
                    f"simulations.parameters ({name!r}) must have letters, digits, _, . and - only, as {key} is given "
                    "{name}; rename it"
                )
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise UnsupportedConfiguration(f"{key} ({command}) cannot be split ({error}); close its quotes") from error
        if not words:
            raise UnsupportedConfiguration(f"{key} ({command}) must name a program")
        known = (*_RUN_PLACEHOLDERS, *self._names)
        unknown = [
            found[2] for word in words for found in _PLACEHOLDER.finditer(word) if found[2] not in (None, *known)
        ]
        if unknown:
            raise UnsupportedConfiguration(
                f"{key} has {{{unknown[0]}}}, but only {', '.join(f'{{{name}}}' for name in known)} are filled in; "
                f"write {{{{{unknown[0]}}}}} for literal braces"
            )
        if not _PLACEHOLDER.search(words[0]) and shutil.which(self._find_files(words)[0], path=search) is None:
            raise UnsupportedConfiguration(
                f"{key} begins with {words[0]}, which is no program on the PATH, in the config's folder or in the "
                "current folder; correct it"
            )
        return words

    def _find_files(self, words: Sequence[str]) -> list[str]:
        """The words, with absolute paths in place of those that are relative to a folder."""
        # A program without a slash is one of the PATH, and an argument without a slash or a dot is seldom a file.
        return [self._find_file(word, "/." if i else "/") for i, word in enumerate(words)]

    def _find_file(self, word: str, marks: str) -> str:
        if not any(mark in word for mark in marks):
            return word
        # Path.is_file would raise for a word that is too long for a path. An absolute one stays what it is.
        candidates = ((folder / word).absolute() for folder in self._folders)
        return next((str(path) for path in candidates if os.path.isfile(path)), word)  # noqa: PTH113

    def arguments(self, start: StartProcess) -> list[str]:
        """The program and its arguments for one attempt of a simulation."""
        values = dict(zip(self._names, map(repr, start.parameters), strict=True))
        values.update(simulation=str(start.simulation), attempt=str(start.attempt))
        words = self._words
        if self._has_placeholders:
            words = self._find_files([_fill_in(word, values) for word in words])
        return [*self._step, *words]


def _fill_in(word: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: f"{{{found[1]}}}" if found[1] else values[found[2]], word)
