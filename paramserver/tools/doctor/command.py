"""The command ``paramserver doctor``."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence

from paramserver.cluster import process_environ, quiet_torch_log
from paramserver.config import load_config, mode_of
from paramserver.errors import DeadlineExceeded, PeerLost, UnsupportedConfiguration
from paramserver.launch import CommandParser, add_run_flags, config_flags, resolve_run, resolve_world, run_command
from paramserver.process_utils import print_output
from paramserver.tools.doctor.diagnosis import Diagnosis


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver doctor",
        description="Check this machine for a run: what it offers, what would be chosen for a config and why, and how "
        "long each wait is. Problems come first, each with its cure. Started on every host as the run would be (with "
        "--rank and --world_size, srun or torchrun), it also checks the links between the hosts; rank 0 prints the "
        "result. Nothing of the task is loaded: paramserver launch --dry_run does that.",
        epilog="Exit codes: 0 no problem, 1 there are problems, 2 the input is wrong. It is the same for all ranks.",
    )
    add_run_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    # What resolve_run and resolve_world read in addition.
    parser.set_defaults(resume=None, supervised=None, colocated=False, folder=[], run_folder=None)
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    quiet_torch_log(process_environ())
    return run_command(lambda: _diagnose(arguments))


def _diagnose(arguments: argparse.Namespace) -> int:
    if arguments.config is None:
        # The task is the only key without a default, and nothing here needs it.
        overrides = ["task=module:Task", *arguments.overrides]
        config = load_config(None, overrides=overrides, flags=config_flags(arguments))
    else:
        config, _, _ = resolve_run(arguments)
    config, identity = resolve_world(arguments, config)
    # Imports torch, of any release.
    from paramserver.tools.doctor.hosts import check_hosts
    from paramserver.tools.doctor.machine import check_rpc_agent, describe_choices, describe_deadlines, describe_machine

    environ = dict(process_environ())
    found = Diagnosis()
    describe_machine(found, config, environ)
    address = describe_choices(found, config, identity, environ)
    describe_deadlines(found, config)
    if address:
        check_rpc_agent(found, config)
    prints = True
    if identity is not None and address and not mode_of(config).single_process:
        try:
            prints = check_hosts(found, config, identity)
        except UnsupportedConfiguration as error:
            found.refusal(error)
        except (DeadlineExceeded, PeerLost) as error:
            text, _, cure = str(error).partition("; ")
            here = "start this command on every host, as the run, rank 0 first or within its wait"
            found.problem(text, f"{cure}; {here}" if cure else here)
    if prints:
        print_output(json.dumps(found.to_json(), indent=2) if arguments.json else found.to_text())
    return found.exit_code
