"""Starts simulations as processes of this machine, or steps of its SLURM allocation, and sees to it that they end."""

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
from paramserver.cluster.simulation import SimulationEnvironment, in_slurm_allocation
from paramserver.errors import UnsupportedConfiguration
from paramserver.importing import load_object
from paramserver.online.process_guard import GRACE_S
from paramserver.online.spec import IngestSpec
from paramserver.online.tracker import StartProcess, log_file

_OWN = ("simulation", "attempt")
# {{name}} stands for {name}; braces around anything else are left as they are.
_PLACEHOLDER = re.compile(r"\{\{([\w.-]+)\}\}|\{([\w.-]+)\}")


class LaunchCommand:
    """What starts the processes of a simulation, checked before any is started.

    ``simulations.command`` is split as a shell splits it, then {simulation}, {attempt} and names of parameters are
    filled in, numbers with all of their digits; no shell runs it.

    Args:
        plan: with a command or function.
        folders: where the function's module is looked for.
        environ: of this process.

    Attributes:
        by_srun: whether one srun starts all processes of a simulation.

    Raises:
        UnsupportedConfiguration: there is no such function; or the command cannot be split, has an unknown placeholder,
            or begins with no program.
    """

    def __init__(self, plan: IngestSpec, folders: Sequence[Path], environ: Mapping[str, str]) -> None:
        self._names = tuple(name for name, _, _ in plan.parameters)
        launcher = plan.config.launcher
        self.by_srun = launcher == "srun" or (launcher == "auto" and in_slurm_allocation(environ))
        search = environ.get("PATH")
        if plan.config.function is not None:
            load_object(plan.config.function, "simulations.function", folders)  # refused here and not by each process
            passed = [word for folder in folders for word in ("--folder", str(folder))]
            self._words = [sys.executable, "-m", "paramserver.run_simulation", plan.config.function, *passed]
            self._filled = False
        else:
            self._words = self._read(str(plan.config.command), search)
            self._filled = True
        if self.by_srun:
            self._srun = _srun(plan.config.group_size, launcher, search)

    def _read(self, command: str, search: str | None) -> list[str]:
        key = "simulations.command"
        for name in self._names:
            if name in _OWN:
                raise UnsupportedConfiguration(f"simulations.parameters.{name} must have another name than {{{name}}}")
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise UnsupportedConfiguration(f"{key} ({command}) cannot be split ({error}); close its quotes") from error
        if not words:
            raise UnsupportedConfiguration(f"{key} ({command}) must name a program")
        known = (*_OWN, *self._names)
        unknown = [
            found[2] for word in words for found in _PLACEHOLDER.finditer(word) if found[2] not in (None, *known)
        ]
        if unknown:
            raise UnsupportedConfiguration(
                f"{key} has {{{unknown[0]}}}, but only {', '.join(f'{{{name}}}' for name in known)} are filled in; "
                f"write {{{{{unknown[0]}}}}} for braces of your own"
            )
        if not _PLACEHOLDER.search(words[0]) and shutil.which(words[0], path=search) is None:
            raise UnsupportedConfiguration(
                f"{key} begins with {words[0]}, which is no program on the PATH or in the current folder; correct it"
            )
        return words

    def words(self, start: StartProcess) -> list[str]:
        """Of this attempt of a simulation."""
        values = dict(zip(self._names, map(repr, start.parameters), strict=True))
        values.update(simulation=str(start.simulation), attempt=str(start.attempt))
        words = [_filled(word, values) for word in self._words] if self._filled else self._words
        return [*self._srun, *words] if self.by_srun else words


def _filled(word: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: f"{{{found[1]}}}" if found[1] else values[found[2]], word)


def _srun(tasks: int, launcher: str, search: str | None) -> list[str]:
    """A step of its own share of the allocation, all of which ends when one of its processes fails."""
    if shutil.which("srun", path=search) is None:
        raise UnsupportedConfiguration(
            f"simulations.launcher ({launcher}) needs srun, which is not on the PATH; choose local"
        )
    return ["srun", f"--ntasks={tasks}", "--exact", "--kill-on-bad-exit=1", "--input=none"]


# The leash ends its group by itself; this is for one that cannot.
_LEASH_GRACE_S = GRACE_S + 1.0


@dataclass
class _Guard:
    """A process that holds a program. ``pipe`` can be read, and is at its end, when the process is gone."""

    process: subprocess.Popen[bytes]
    pipe: int
    code: int | None = None

    def look(self) -> None:
        """Learn whether it ended; then nothing of its group may be left."""
        if self.code is None and os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            # While nobody has waited for it, its number is its own.
            self.signal(signal.SIGKILL)
            self.code = self.process.wait()
            os.close(self.pipe)

    def signal(self, number: signal.Signals) -> None:
        """To the leash, which passes SIGTERM on; SIGKILL to all of its group."""
        if self.code is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(self.process.pid, number)
        else:
            os.kill(self.process.pid, number)


@dataclass
class _Running:
    """One attempt of a simulation."""

    start: StartProcess
    leashes: list[_Guard]
    kill_at: float | None = None
    failed: int = 0

    def end(self, now: float) -> None:
        if self.kill_at is None:
            self.kill_at = now + _LEASH_GRACE_S
            for leash in self.leashes:
                leash.signal(signal.SIGTERM)

    def look(self, now: float) -> int | None:
        """The exit code when all have ended; a group ends with its first failure."""
        for leash in self.leashes:
            leash.look()
            self.failed = self.failed or leash.code or 0
        if all(leash.code is not None for leash in self.leashes):
            return self.failed
        if self.failed:
            self.end(now)
        if self.kill_at is not None and now > self.kill_at:
            for leash in self.leashes:
                leash.signal(signal.SIGKILL)
        return None


class ProcessRunner:
    """Owns the processes of all simulations, until ``close``. For one thread: they end when that thread does.

    Each runs in a process group of its own, with its output in ``simulation-<id>.log``, and knows the run by the
    variables of ``SimulationEnvironment``; by srun the member is its SLURM_PROCID.

    Args:
        plan: with a command or function.
        logs: folder of their output.
        folders: where the function's module is looked for.
        environ: of this process; None = its own.

    Raises:
        UnsupportedConfiguration: see ``LaunchCommand``.
    """

    def __init__(
        self, plan: IngestSpec, logs: Path, folders: Sequence[Path] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        self._environ = process_environ() if environ is None else environ
        self._command = LaunchCommand(plan, folders, self._environ)
        self._config = plan.config
        self._logs = logs
        self._running: dict[int, _Running] = {}

    def start(self, start: StartProcess, address: str) -> None:
        """Start all processes of a simulation, which find the desk at ``address``."""
        words = self._command.words(start)
        told = self._producer(start, address)
        self._logs.mkdir(parents=True, exist_ok=True)
        self._running[start.simulation] = running = _Running(start, [])
        with log_file(self._logs, start.simulation).open("ab", buffering=0) as log:
            log.write(_headline(start, words))
            if self._command.by_srun:
                running.leashes.append(self._hold(words, told, log.fileno()))
                return
            for member in range(self._config.group_size):
                running.leashes.append(self._hold(words, replace(told, member=member), log.fileno()))

    def _producer(self, start: StartProcess, address: str) -> SimulationEnvironment:
        keys = self._config.keys
        return SimulationEnvironment(
            address=address,
            simulation=start.simulation,
            parameters=start.parameters,
            attempt=start.attempt,
            members=self._config.group_size,
            keys=None if keys is None else str(Path(keys).absolute()),
        )

    def _hold(self, words: Sequence[str], told: SimulationEnvironment, log: int) -> _Guard:
        reading, writing = os.pipe()
        holder = [sys.executable, "-m", "paramserver.online.process_guard", str(os.getpid()), str(writing)]
        try:
            process = subprocess.Popen(
                [*holder, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=producer_environment(self._environ, told.variables()),
                pass_fds=(writing,),
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return _Guard(process, reading)

    def kill(self, simulation: int) -> None:
        """Ask it to end, and end it where it does not; ``ended`` tells when it has."""
        if simulation in self._running:
            self._running[simulation].end(time.monotonic())

    def ended(self) -> list[tuple[int, int, int]]:
        """(simulation, attempt, exit code) of those that ended since the last call."""
        now = time.monotonic()
        found = []
        for simulation, running in list(self._running.items()):
            if (code := running.look(now)) is not None:
                del self._running[simulation]
                found.append((simulation, running.start.attempt, code))
        return found

    @property
    def pipes(self) -> list[int]:
        """File descriptors, one of which is ready whenever a process has ended."""
        return [leash.pipe for running in self._running.values() for leash in running.leashes if leash.code is None]

    def kill_all(self) -> None:
        for simulation in self._running:
            self.kill(simulation)

    @property
    def numbers(self) -> list[int]:
        """Simulations of which some process is there."""
        return list(self._running)

    @property
    def any_left(self) -> bool:
        return bool(self._running)


def _headline(start: StartProcess, words: Sequence[str]) -> bytes:
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"--- simulation {start.simulation}, attempt {start.attempt}, {when}: {shlex.join(words)}\n".encode()
