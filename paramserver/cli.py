"""For those who stand outside a run: ``paramserver keys`` makes keys for its clients, ``paramserver ping`` asks it.

The console script ``paramserver``: one command for each program.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paramserver import benchmark, evaluate, launch, reporting
from paramserver.errors import ClientError, UnsupportedConfiguration
from paramserver.launch import normalize_flags, report_error
from paramserver.process_utils import exit_process, print_output
from paramserver.version import __version__


def make_keys_parser() -> argparse.ArgumentParser:
    """The arguments of ``paramserver keys``."""
    parser = argparse.ArgumentParser(
        prog="paramserver keys",
        description="Make the keys with which clients of an online run prove who they are, and the run itself "
        "(simulations.keys). A client takes server.key and its own file, <NAME>.key_secret, along.",
        epilog="Exit codes: 0 done, 2 the input is wrong. Keys that are there are never overwritten.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where they are written")
    parser.add_argument("--client", metavar="NAME", help="make the keys of one more client of this name")
    return parser


def keys_main(argv: Sequence[str]) -> int:
    """The command line of ``paramserver keys``; returns the exit code."""
    arguments = make_keys_parser().parse_args(normalize_flags(argv))
    try:
        from paramserver.online.security import make_keys

        print_output("\n".join(str(file) for file in make_keys(arguments.folder, arguments.client)))
    except UnsupportedConfiguration as error:
        return report_error(error)
    return 0


def make_ping_parser() -> argparse.ArgumentParser:
    """The arguments of ``paramserver ping``."""
    parser = argparse.ArgumentParser(
        prog="paramserver ping",
        description="Ask an online run whether it is alive and print its state as one JSON object; it answers in a "
        "validation and a checkpoint too.",
        epilog="Exit codes: 0 it is alive, 1 it is not, 2 the input is wrong.",
    )
    parser.add_argument("address", metavar="ADDRESS", help="of the run, for clients: tcp://HOST:PORT")
    parser.add_argument("--keys", type=Path, metavar="FOLDER", help="a client's keys; needed beyond this machine")
    parser.add_argument("--timeout_s", type=float, default=5.0, metavar="S", help="how long to wait (default: 5)")
    return parser


def ping_main(argv: Sequence[str]) -> int:
    """The command line of ``paramserver ping``; returns the exit code."""
    arguments = make_ping_parser().parse_args(normalize_flags(argv))
    try:
        from paramserver.client import ping

        print_output(json.dumps(ping(arguments.address, arguments.keys, arguments.timeout_s)))
    except ClientError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except UnsupportedConfiguration as error:
        return report_error(error)
    return 0


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "benchmark": benchmark.main,
    "evaluate": evaluate.main,
    "keys": keys_main,
    "launch": launch.main,
    "ping": ping_main,
    "report": reporting.main,
}
# Named in docs/interface.md, built later; a wrong word is told apart from one that is too early.
_LATER = ("chaos", "doctor")

_USAGE = f"""usage: paramserver COMMAND [arguments]

commands:
  launch     train a task (paramserver launch --help)
  evaluate   validate the model of a checkpoint (paramserver evaluate --help)
  benchmark  measure ways to train a task beside each other (paramserver benchmark --help)
  report     compare runs that exist, as a page with plots (paramserver report --help)
  keys       make keys for the clients of an online run (paramserver keys --help)
  ping       ask whether an online run is alive (paramserver ping --help)

not in this version: {", ".join(_LATER)}"""


def main() -> None:
    """Run the command that the first word names; exits with its code."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print_output(_USAGE)
        sys.exit(0 if words else 2)
    if words[0] == "--version":
        print_output(f"paramserver {__version__}")
        sys.exit(0)
    command = _COMMANDS.get(words[0])
    if command is None:
        early = "not in this version" if words[0] in _LATER else "there is no such command"
        print(f"error: paramserver {words[0]}: {early}; see paramserver --help", file=sys.stderr)
        sys.exit(2)
    exit_process(command(words[1:]))


if __name__ == "__main__":
    main()
