"""The console script ``paramserver``: one command for each program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from paramserver import benchmark, evaluate, launch, outside, reporting
from paramserver.leaving import leave, put_out
from paramserver.version import __version__

_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "benchmark": benchmark.main,
    "evaluate": evaluate.main,
    "keys": outside.keys_main,
    "launch": launch.main,
    "ping": outside.ping_main,
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
        put_out(_USAGE)
        sys.exit(0 if words else 2)
    if words[0] == "--version":
        put_out(f"paramserver {__version__}")
        sys.exit(0)
    command = _COMMANDS.get(words[0])
    if command is None:
        early = "not in this version" if words[0] in _LATER else "there is no such command"
        print(f"error: paramserver {words[0]}: {early}; see paramserver --help", file=sys.stderr)
        sys.exit(2)
    leave(command(words[1:]))


if __name__ == "__main__":
    main()
