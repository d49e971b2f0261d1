"""Trainers that join a running job, and leave it: ``paramserver join`` and ``paramserver leave``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from paramserver.cluster import ProcessIdentity, RankFlags, host_and_port, process_environ, quiet_torch_log
from paramserver.cluster.base import DEFAULT_JOB
from paramserver.cluster.network import JobToken, check_master_addr, hide_token, read_token
from paramserver.cluster.resolve import FlagEnvironment
from paramserver.config import Config, load_config, mode_of, num_servers_of, with_world_size
from paramserver.errors import DeadlineExceeded, Interrupted, PeerLost, RunEnded, UnsupportedConfiguration
from paramserver.importing import code_folders, torch_import_without_gc
from paramserver.launch import CommandParser, report_error, run_command
from paramserver.runs.resume import find_config_file, open_run
from paramserver.runs.rundir import RunDir, read_mapping

# A run that takes place answers at once.
_ANSWER_S = 5.0


def make_join_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver join",
        description="Be one more trainer of a running job (mode rpc, cluster.elastic: true). The others save a "
        "checkpoint and continue from it together with this process, each with its share of the data that is left. "
        "Ctrl-C or SIGTERM lets this trainer leave again.",
        epilog="Exit codes: 0 the run is over or this trainer has left, 1 it failed, 2 the input is wrong, 3 it was "
        "interrupted before it took part, or the run was.",
    )
    _add_run(parser)
    return parser


def make_leave_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver leave",
        description="Let one trainer of a running job leave it (mode rpc, cluster.elastic: true). The others save a "
        "checkpoint and continue from it, also with what is left of its data. SIGTERM to the trainer does the same.",
        epilog="Exit codes: 0 it leaves, 1 the run does not answer or is over, 2 the input is wrong.",
    )
    _add_run(parser)
    parser.add_argument("--rank", type=int, required=True, metavar="N", help="of the trainer, as its log is named")
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the folder of the run")
    parser.add_argument("--config", type=Path, metavar="FILE", help="of the run, where RUN_DIR cannot be read")
    parser.add_argument("--master_addr", metavar="HOST", help="host of rank 0 (default: as RUN_DIR states)")
    parser.add_argument("--master_port", type=int, metavar="PORT", help="port of rank 0 (default: as RUN_DIR states)")


def join_main(argv: Sequence[str]) -> int:
    return _main(make_join_parser(), argv, _join)


def leave_main(argv: Sequence[str]) -> int:
    return _main(make_leave_parser(), argv, _leave)


def _main(parser: argparse.ArgumentParser, argv: Sequence[str], command: Any) -> int:
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    quiet_torch_log(process_environ())
    return run_command(lambda: command(arguments, *_find_run(arguments)))


def _find_run(arguments: argparse.Namespace) -> tuple[Config, ProcessIdentity, list[Path]]:
    """Return the config of a running job, an identity with the address of its rank 0, and the folders of its task."""
    stored, recorded = {}, []
    if arguments.config is None:
        run: RunDir = open_run(arguments.run)
        config = load_config(find_config_file(run))
        # The log of this rank belongs to the run, wherever this command is given.
        logging_config = dataclasses.replace(config.logging, run_dir=str(run.path.resolve().parent))
        config = dataclasses.replace(config, logging=logging_config)
        stored = read_mapping(run.environment_file, json.loads).get("store", {})
        recorded = run.task_folders()
    else:
        config = load_config(arguments.config)
    if not mode_of(config).has_servers:
        raise UnsupportedConfiguration(f"mode ({config.mode}) must be rpc for trainers to join or leave a running job")
    if not config.cluster.elastic:
        raise UnsupportedConfiguration(
            "cluster.elastic (False) must be true for trainers to join or leave a running job; set it at the start"
        )
    RankFlags(master_addr=arguments.master_addr, master_port=arguments.master_port).check()
    address = arguments.master_addr or stored.get("master_addr")
    port = arguments.master_port or stored.get("master_port")
    if not address or not port:
        raise UnsupportedConfiguration(
            f"the address of rank 0 is missing in {arguments.run}; give --master_addr and --master_port"
        )
    check_master_addr(address)
    token = read_token(config.cluster.token_file, process_environ())
    hide_token(process_environ())
    # Its rank is not used: a trainer that joins draws one.
    identity = _identity(config, RankFlags(1, 2, address.strip("[]"), port), stored.get("job", DEFAULT_JOB), token)
    return config, identity, code_folders(arguments.config, recorded=recorded)


def _identity(config: Config, flags: RankFlags, job: str, token: JobToken | None) -> ProcessIdentity:
    return dataclasses.replace(FlagEnvironment({}, config, flags).identity(), job=job, source="join", token=token)


def _join(arguments: argparse.Namespace, config: Config, identity: ProcessIdentity, folders: list[Path]) -> None:
    with torch_import_without_gc():
        from paramserver.distributed.resize import draw_rank
        from paramserver.distributed.timeouts import poll_until
        from paramserver.runtime.rank import RankPlan, run_rank

    with _connect(identity) as (store, trainer_ranks):
        rank = draw_rank(store, [num_servers_of(config) - 1, *trainer_ranks])
    flags = RankFlags(rank, rank + 1, identity.master_addr, identity.master_port)
    identity = _identity(config, flags, identity.job, identity.token)
    config = with_world_size(config, rank + 1)
    print(f"rank {rank} asks to join {arguments.run}", file=sys.stderr, flush=True)
    try:
        run_rank(RankPlan(config, identity, folders, ends_process=True, joins=True, report=report_error))
    except PeerLost as loss:
        # With rank 0, whose run may have ended in good order. Its summary is written a moment after that, or, if rank 0
        # has answered that the run ends, after its last validation.
        limit_s = config.cluster.timeout_s if isinstance(loss, RunEnded) else _ANSWER_S
        status = poll_until(time.monotonic() + limit_s, lambda: _status(arguments.run), threading.Event())
        if status == "interrupted":
            raise Interrupted(f"the run in {arguments.run} was interrupted") from loss
        if status != "completed":
            raise
        print(f"the run in {arguments.run} is over", file=sys.stderr, flush=True)


def _status(run: Path) -> str | None:
    """Return the status in the summary of a run; None before there is one."""
    return read_mapping(RunDir(run).summary_file, json.loads).get("status")


def _leave(arguments: argparse.Namespace, config: Config, identity: ProcessIdentity, folders: list[Path]) -> None:
    from paramserver.distributed.resize import OVER, ResizeRequest, refusal, send_request
    from paramserver.distributed.timeouts import poll_until

    rank, limit_s = arguments.rank, config.cluster.timeout_s
    with _connect(identity) as (store, trainer_ranks):
        if rank not in trainer_ranks:
            raise UnsupportedConfiguration(
                f"--rank ({rank}) must be that of a trainer of the run: {', '.join(map(str, trainer_ranks))}"
            )
        try:
            key = send_request(store, ResizeRequest("leave", rank))
            answer = poll_until(time.monotonic() + limit_s, lambda: refusal(store, key), threading.Event())
            if answer == OVER:
                raise RunEnded(OVER)
        except PeerLost as error:  # with rank 0
            raise PeerLost(f"the run in {arguments.run} ended before rank {rank} left it") from error
    if answer is None:
        raise DeadlineExceeded(f"the run did not answer within cluster.timeout_s ({limit_s:g} s)")
    if answer:
        raise UnsupportedConfiguration(answer)
    print(f"rank {rank} has left {arguments.run}", file=sys.stderr, flush=True)


@contextmanager
def _connect(identity: ProcessIdentity) -> Iterator[tuple[Any, list[int]]]:
    """Yield the store of a running job, and the ranks of its trainers."""
    from paramserver.distributed.rendezvous import connect_to_job

    with ExitStack() as stack:
        try:
            job = stack.enter_context(connect_to_job(identity, _ANSWER_S))
        except DeadlineExceeded as error:
            raise PeerLost(
                f"no run answers at {host_and_port(identity.master_addr, identity.master_port)}; only a running job "
                "can be joined or left"
            ) from error
        yield job
