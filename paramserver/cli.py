"""The console script ``paramserver``, which runs the program of each command; here also ``keys`` and ``ping``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paramserver import elastic, evaluate, launch, predict
from paramserver.config.schema import closest_match
from paramserver.errors import ClientError, UnsupportedConfiguration
from paramserver.launch import normalize_flags, report_error
from paramserver.process_utils import exit_process, print_output
from paramserver.tools import export
from paramserver.tools.bench import command as benchmark
from paramserver.tools.chaos import command as chaos
from paramserver.tools.doctor import command as doctor
from paramserver.tools.report import command as report
from paramserver.version import __version__


def make_keys_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paramserver keys",
        description="Make the keys by which an online run and its clients authenticate each other (simulations.keys). "
        "A client needs server.key and its own file, <NAME>.key_secret.",
        epilog="Exit codes: 0 done, 2 the input is wrong. Existing keys are never overwritten.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where they are written")
    parser.add_argument("--client", metavar="NAME", help="make the keys of one more client of this name")
    return parser


def make_ping_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paramserver ping",
        description="Ask an online run whether it is alive and print its state as one JSON object. The run also "
        "answers during validation and checkpoints.",
        epilog="Exit codes: 0 it is alive, 1 it is not, 2 the input is wrong.",
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
    arguments = parser.parse_args(normalize_flags(argv))
    try:
        print_output(command(arguments))
    except ClientError as error:  # the expected answer of a run that is not alive: no traceback
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except UnsupportedConfiguration as error:
        return report_error(error)
    return 0


# The imports are deferred because pyzmq is an optional dependency.


def _keys(arguments: argparse.Namespace) -> str:
    from paramserver.online.security import make_keys

    return "\n".join(str(file) for file in make_keys(arguments.folder, arguments.client))


def _ping(arguments: argparse.Namespace) -> str:
    from paramserver.client import ping

    return json.dumps(ping(arguments.address, arguments.keys, arguments.timeout_s))


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "benchmark": benchmark.main,
    "chaos": chaos.main,
    "doctor": doctor.main,
    "evaluate": evaluate.main,
    "export": export.main,
    "join": elastic.join_main,
    "keys": keys_main,
    "launch": launch.main,
    "leave": elastic.leave_main,
    "ping": ping_main,
    "predict": predict.main,
    "report": report.main,
}

_USAGE = """usage: paramserver COMMAND [arguments]

Train a PyTorch model through a parameter server, by all-reduce or in one process. --version prints the version.

commands:
  launch     train a task; the same as python -m paramserver.launch (paramserver launch --help)
  evaluate   validate the model of a checkpoint (paramserver evaluate --help)
  predict    write the outputs of the model of a checkpoint (paramserver predict --help)
  export     write the rows of embedding tables that have changed since a step (paramserver export --help)
  benchmark  measure and compare ways to train a task (paramserver benchmark --help); with compare, two benchmarks;
             with predict, simulate other numbers of trainers and servers (paramserver benchmark predict --help)
  join       be one more trainer of a running job (paramserver join --help)
  leave      let a trainer leave a running job (paramserver leave --help)
  doctor     check this machine, and the links between hosts (paramserver doctor --help)
  chaos      inject faults into a run and check it (paramserver chaos --help)
  report     compare existing runs, as a page with plots (paramserver report --help)
  keys       make keys for the clients of an online run (paramserver keys --help)
  ping       ask whether an online run is alive (paramserver ping --help)"""


def main() -> None:
    """Run the command that the first argument names and exit with its code."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print_output(_USAGE)
        sys.exit(0 if words else 2)
    if words[0] == "--version":
        print_output(f"paramserver {__version__}")
        sys.exit(0)
    command = _COMMANDS.get(words[0])
    if command is None:
        near = closest_match(words[0], list(_COMMANDS))
        cure = f"did you mean {near}?" if near else "see paramserver --help"
        print(f"error: paramserver {words[0]}: there is no such command; {cure}", file=sys.stderr)
        sys.exit(2)
    exit_process(command(words[1:]))


if __name__ == "__main__":
    main()
