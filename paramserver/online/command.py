"""The words of a command that starts a simulation."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paramserver.cluster.slurm import in_allocation
from paramserver.errors import UnsupportedConfiguration
from paramserver.loading import load_object
from paramserver.online.plan import Plan
from paramserver.online.simulation import Start

_OWN = ("simulation", "attempt")
# {{name}} stands for {name}; braces around anything else are left as they are.
_PLACEHOLDER = re.compile(r"\{\{([\w.-]+)\}\}|\{([\w.-]+)\}")


class Command:
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

    def __init__(self, plan: Plan, folders: Sequence[Path], environ: Mapping[str, str]) -> None:
        self._names = tuple(name for name, _, _ in plan.parameters)
        launcher = plan.config.launcher
        self.by_srun = launcher == "srun" or (launcher == "auto" and in_allocation(environ))
        search = environ.get("PATH")
        if plan.config.function is not None:
            load_object(plan.config.function, "simulations.function", folders)  # refused here and not by each process
            passed = [word for folder in folders for word in ("--folder", str(folder))]
            self._words = [sys.executable, "-m", "paramserver.worker", plan.config.function, *passed]
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

    def words(self, start: Start) -> list[str]:
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
