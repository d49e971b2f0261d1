"""The console script ``paramserver``, which runs all commands; ``keys``, ``ping`` and ``completion`` are here."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from paramserver import __version__
from paramserver._commands import COMMANDS, MEANT
from paramserver.config.schema import closest_match
from paramserver.errors import ClientError, StorageError, UnsupportedConfiguration
from paramserver.launch import CommandParser, report_error, run_command
from paramserver.process_utils import exit_process, print_output


def make_keys_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver keys",
        description="Make the keys by which an online run and its clients authenticate each other (simulations.keys). "
        "A client needs server.key and its own file, <NAME>.key_secret.",
        epilog="Exit codes: 0 done, 2 the input is wrong. Existing keys are never overwritten.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where they are written")
    parser.add_argument("--client", metavar="NAME", help="make the keys of one more client of this name")
    return parser


def make_ping_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver ping",
        description="Ask an online run whether it is alive and print its state as one JSON object. The run also "
        "answers during validation and checkpoints.",
        epilog="Exit codes: 0 it is alive, 1 it is not, or the address is none, 2 the flags or the keys are wrong.",
    )
    parser.add_argument("address", metavar="ADDRESS", help="of the run, for clients: tcp://HOST:PORT")
    parser.add_argument("--keys", type=Path, metavar="FOLDER", help="keys of a client; needed beyond this machine")
    parser.add_argument("--timeout_s", type=float, default=5.0, metavar="S", help="how long to wait (default: 5)")
    return parser


def keys_main(argv: Sequence[str]) -> int:
    return _run(make_keys_parser(), argv, _keys)


def ping_main(argv: Sequence[str]) -> int:
    return _run(make_ping_parser(), argv, _ping)


def _run(parser: argparse.ArgumentParser, argv: Sequence[str], command: Callable[[argparse.Namespace], str]) -> int:
    """Print what a command returns; return the exit code."""
    arguments = parser.parse_args(argv)
    try:
        print_output(command(arguments))
    except ClientError as error:  # the expected answer of a run that is not alive: no traceback
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except (StorageError, UnsupportedConfiguration) as error:
        return report_error(error)
    return 0


# The imports are deferred because pyzmq is an optional dependency.


def _keys(arguments: argparse.Namespace) -> str:
    from paramserver.online.security import make_keys

    return "\n".join(str(file) for file in make_keys(arguments.folder, arguments.client))


def _ping(arguments: argparse.Namespace) -> str:
    from paramserver.client import ping

    return json.dumps(ping(arguments.address, arguments.keys, arguments.timeout_s))


def make_completion_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver completion",
        description="Print a script with which a shell completes commands, flags and paths (extra completion). For "
        "bash: paramserver completion bash > ~/.local/share/bash-completion/completions/paramserver",
        epilog="Exit codes: 0 done, 2 the input is wrong.",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell that is to read it")
    return parser


def completion_main(argv: Sequence[str]) -> int:
    return _run(make_completion_parser(), argv, _completion)


def _completion(arguments: argparse.Namespace) -> str:
    try:
        import shtab
    except ImportError as error:
        raise UnsupportedConfiguration(
            "paramserver completion needs shtab; install the extra completion, or shtab"
        ) from error
    parser = argparse.ArgumentParser(prog="paramserver")
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        own = command.make_parser()
        for action in own._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        commands.add_parser(name, parents=[own], add_help=False, help=command.help)
    script: str = shtab.complete(parser, arguments.shell)
    return script


def _usage() -> str:
    lines = [
        "usage: paramserver COMMAND [arguments]",
        "",
        "Train a PyTorch model through a parameter server, by all-reduce or in one process. COMMAND --help describes a",
        "command, --version prints the version. python -m paramserver.COMMAND is the same as paramserver COMMAND.",
        "",
        "commands:",
    ]
    for name, command in COMMANDS.items():
        lines += textwrap.wrap(f"{name:<12}{command.help}", 116, initial_indent="  ", subsequent_indent=" " * 14)
    return "\n".join(lines)


def main() -> None:
    """Run the command that the first argument names and exit with its code."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        code = run_command(lambda: print_output(_usage()))
        sys.exit(code if words else 2)
    if words[0] == "--version":
        sys.exit(run_command(lambda: print_output(f"paramserver {__version__}")))
    command = COMMANDS.get(words[0])
    if command is None:
        near = closest_match(words[0], [*COMMANDS, *MEANT])
        near = MEANT.get(near, near) if near else None
        cure = f"did you mean paramserver {near}?" if near else "see paramserver --help"
        print(f"error: paramserver {words[0]}: there is no such command; {cure}", file=sys.stderr)
        sys.exit(2)
    exit_process(command.main(words[1:]))


if __name__ == "__main__":
    main()
