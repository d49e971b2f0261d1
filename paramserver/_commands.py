"""The commands, each with its program. Every one runs as ``paramserver X`` and as ``python -m paramserver.X``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import argparse


class Command(NamedTuple):
    """A command: its module has the functions ``<prefix>main`` and ``make_<prefix>parser``."""

    module: str
    help: str
    prefix: str = ""

    def main(self, argv: Sequence[str]) -> int:
        """Run the command with these arguments; return its exit code."""
        code: int = getattr(import_module(self.module), f"{self.prefix}main")(argv)
        return code

    def make_parser(self) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = getattr(import_module(self.module), f"make_{self.prefix}parser")()
        return parser


COMMANDS = {
    "init": Command("paramserver.tools.init", "write a task, a config and a test to start from"),
    "launch": Command("paramserver.launch", "train a task"),
    "runs": Command("paramserver.tools.report.command", "list runs: how each ended, its validation and speed", "runs_"),
    "evaluate": Command("paramserver.evaluate", "validate the model of a checkpoint"),
    "predict": Command("paramserver.predict", "write the outputs of the model of a checkpoint"),
    "export": Command("paramserver.tools.export", "write the model of a checkpoint for other programs"),
    "report": Command("paramserver.tools.report.command", "compare existing runs, as a page with plots"),
    "benchmark": Command(
        "paramserver.tools.bench.command",
        "measure and compare ways to train a task; benchmark compare: two benchmarks; benchmark predict: simulate "
        "other numbers of trainers and servers",
    ),
    "ray": Command("paramserver.ray_actors", "train a task on the hosts of a Ray cluster"),
    "join": Command("paramserver.elastic", "be one more trainer of a running job", "join_"),
    "leave": Command("paramserver.elastic", "let a trainer leave a running job", "leave_"),
    "doctor": Command("paramserver.tools.doctor.command", "check this machine, and the links between hosts"),
    "chaos": Command("paramserver.tools.chaos.command", "inject faults into a run and check it"),
    "keys": Command("paramserver.cli", "make keys for the clients of an online run", "keys_"),
    "ping": Command("paramserver.cli", "ask whether an online run is alive", "ping_"),
    "completion": Command("paramserver.cli", "print a script with which a shell completes commands", "completion_"),
}

# What other programs call them, or this one once did.
_OTHER_WORDS = {
    "init": ("new", "create"),
    "launch": ("train", "fit", "run", "start", "resume"),
    "runs": ("list", "ls", "ps", "status"),
    "evaluate": ("eval", "validate", "test"),
    "predict": ("infer", "inference"),
    "report": ("compare", "reporting", "plot"),
    "benchmark": ("bench", "sweep", "tune"),
    "doctor": ("check", "env", "info"),
}
MEANT = {word: command for command, words in _OTHER_WORDS.items() for word in words}
"""The command that is probably meant by a word that is none."""

_FORMER_MODULES = {"reporting": "report"}
_SOURCE = """\
import sys
from paramserver._commands import COMMANDS
from paramserver.process_utils import exit_process

def main(argv=None):
    return COMMANDS[{command!r}].main(sys.argv[1:] if argv is None else argv)

if __name__ == "__main__":
    exit_process(main())
"""


class CommandModules(InspectLoader):
    """Finds ``paramserver.X`` for a command X whose program is in no module of this name, so that ``-m`` runs it."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the module of a command; see ``importlib.abc.MetaPathFinder``."""
        return None if cls.get_source(name) is None else spec_from_loader(name, cls())

    @staticmethod
    def get_source(fullname: str) -> str | None:
        """Return the source of the module; None if no command has it. A package has it as ``__main__``."""
        package, _, command = fullname.removesuffix(".__main__").partition(".")
        command = _FORMER_MODULES.get(command, command)
        if fullname == "paramserver.__main__":
            return "from paramserver.cli import main\n\nmain()\n"
        return _SOURCE.format(command=command) if package == "paramserver" and command in COMMANDS else None

    def is_package(self, fullname: str) -> bool:
        """Return False: see ``importlib.abc.InspectLoader``."""
        return False


def install_command_modules() -> None:
    """Add the finder to ``sys.meta_path``, last: a module that exists has precedence."""
    sys.meta_path.append(CommandModules)
