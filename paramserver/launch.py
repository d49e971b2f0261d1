"""The command ``python -m paramserver.launch``.

Without a rank it starts every rank on this machine under a supervisor. With one (by flag, torchrun or environment
variables) this process is that rank.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.cluster import (
    RANK_PLUGIN,
    RankFlags,
    process_environ,
    quiet_torch_log,
    resolve_identity,
    unused_tasks,
    write_error_file,
)
from paramserver.cluster.base import ProcessIdentity
from paramserver.cluster.network import hide_token
from paramserver.config import (
    MODES,
    Config,
    Role,
    is_colocated,
    load_config,
    mode_of,
    num_ranks_started,
    num_servers_of,
    read_dumped,
    with_world_size,
    world_size_of,
)
from paramserver.config.layers import Settings, apply_flags, apply_overrides
from paramserver.config.schema import closest_match
from paramserver.errors import CheckpointError, Interrupted, ParamserverError, PeerLost, UnsupportedConfiguration
from paramserver.importing import PICKLED_TASK, check_torch_version, code_folders, load_object, torch_import_without_gc
from paramserver.metrics import FanOut, Sink
from paramserver.process_utils import (
    die_with_parent,
    exit_process,
    flush_output,
    print_output,
    recording_signals,
    write_stacks_on_signal,
)
from paramserver.runs.attempt import continue_attempt, recover, reserve_run, resume_transaction
from paramserver.runs.resume import describe_resume, earlier_attempt, find_config_file, lost_processes, open_run
from paramserver.runs.rundir import RunDir, newest_run, write_bytes
from paramserver.runtime.restarts import ColocatedTrainer
from paramserver.runtime.supervisor import EventPipe, describe_error, first_error

if TYPE_CHECKING:
    from paramserver.task import Task


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m paramserver.launch",
        description="Train a task through a parameter server (mode rpc), all-reduce (ddp) or alone (local).",
        epilog="Precedence: flag, --set, environment, config file, default. Exit codes: 0 done, 1 the run failed, "
        "2 the input is wrong, 3 interrupted after a checkpoint was written.",
    )
    add_run_flags(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN_DIR",
        help="continue from a run's newest checkpoint, or from the one given (RUN_DIR/checkpoints/step-<N>); "
        "without RUN_DIR the newest run of this name or task",
    )
    parser.add_argument("--dry_run", action="store_true", help="show what would be done, start nothing")
    # Set by a supervisor for its ranks.
    for name in ("supervised", "listener", "spare", "fork_server", "parent"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    for name, kind in (("began", float), ("run_folder", Path), ("shown_command", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    # Set by the server of a host for the trainer that it starts there.
    parser.add_argument("--colocated", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, action="append", default=[], help=argparse.SUPPRESS)
    return parser


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what runs, and where: those of every command that is started like a run."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="the YAML file that describes the run")
    parser.add_argument("--mode", choices=list(MODES), help="in place of the config's mode")
    parser.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="be this rank only (with cluster.colocate: the ranks of host N); launch without it starts all ranks here",
    )
    parser.add_argument(
        "--world_size",
        type=int,
        metavar="W",
        help="how many ranks the run has, servers included; with cluster.colocate, how many hosts",
    )
    parser.add_argument(
        "--role",
        choices=("server", "trainer"),
        help="in place of --rank, where servers and trainers are started as separate groups",
    )
    parser.add_argument("--index", type=int, metavar="I", help="number of this process in its --role, from 0")
    parser.add_argument("--num_servers", type=int, metavar="S", help="in place of the config's cluster.num_servers")
    parser.add_argument("--num_trainers", type=int, metavar="T", help="in place of the config's cluster.num_trainers")
    parser.add_argument("--master_addr", metavar="HOST", help="the host of rank 0 (default: cluster.master_addr)")
    parser.add_argument(
        "--master_port", type=int, metavar="PORT", help="the port of rank 0 (default: a free one, or 29500 with --rank)"
    )
    parser.add_argument("--num_gpus", type=int, metavar="G", help="GPUs that one process may spread its model over")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="any key of the config; may be repeated",
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    return make_parser().parse_args(argv)


class CommandParser(argparse.ArgumentParser):
    """The parser of every command: a name of a flag may have ``-`` in place of each ``_``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See ``argparse.ArgumentParser.parse_known_args``, through which all others go."""
        return super().parse_known_args(normalize_flags(sys.argv[1:] if args is None else args), namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See ``argparse.ArgumentParser.parse_args``. What follows ``--set KEY=VALUE`` is no second key of it."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            settings = " ".join(f"--set {word}" for word in unknown if "=" in word and not word.startswith("-"))
            flag = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
            near = closest_match(flag, list(self._option_string_actions)) if flag else None
            cure = f"; did you mean {near}?" if near else ""
            if settings and not near and hasattr(parsed, "overrides"):
                cure = f"; --set takes one key, write {settings}" if parsed.overrides else f"; write {settings}"
            file = next((word for word in unknown if word.endswith((".yaml", ".yml"))), None)
            if file is not None and not near and getattr(parsed, "config", file) is None:
                cure = f"; did you mean --config {file}?"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{cure}")
        return parsed


def normalize_flags(argv: Sequence[str]) -> list[str]:
    """Return the arguments of a command line with ``_`` in the names of all flags.

    Example::

        >>> normalize_flags(["--dry-run", "--master-addr=node-1", "file-1"])
        ['--dry_run', '--master_addr=node-1', 'file-1']
    """
    normalized = []
    for argument in argv:
        flag, equals, value = argument.partition("=")
        is_flag = flag.startswith("--")
        normalized.append("--" + flag[2:].replace("-", "_") + equals + value if is_flag else argument)
    return normalized


def main(argv: Sequence[str] | None = None) -> int:
    began = time.time()
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parse(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    # Before the first import of torch, which reads the variable once.
    quiet_torch_log(process_environ())
    if arguments.spare is not None or arguments.fork_server is not None:
        from paramserver.runtime.preloaded import serve_forks, wait_for_role

        mode = MODES[arguments.mode]
        if arguments.spare is None:
            role = serve_forks(arguments.fork_server, mode, arguments.parent)
        else:
            role = wait_for_role(arguments.spare, mode, arguments.parent)
        if role is None:
            return 0
        sys.argv[1:] = role
        arguments = parse(role)
    if arguments.supervised is not None:
        return _run_supervised_rank(arguments)

    def launch() -> None:
        try:
            _launch(arguments, began, words)
        except KeyboardInterrupt as interrupt:  # before the run handles signals, or after it
            raise Interrupted("interrupted (signal SIGINT) while nothing was trained; nothing was saved") from interrupt

    return run_command(launch)


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command; return its exit code: what it returns, 0 for None, or that of its error, which is printed."""
    try:
        return command() or 0
    except KeyboardInterrupt:
        return 1
    except Exception as error:  # noqa: BLE001 - the last thing printed; with its traceback, unless the input is wrong
        return report_error(error)


def report_error(error: BaseException) -> int:
    """Print what ended the run; return its exit code."""
    error = first_error(error)
    description = describe_error(error)
    relayed = isinstance(error, ParamserverError) and error.relayed
    if description["traceback"] and not relayed and "Traceback (most recent call last)" not in description["message"]:
        lines = "".join(traceback.format_exception(error.__cause__ or error))
        if isinstance(error, PeerLost):  # the last line names the lost rank; how a collective noticed matters less
            _print_error(lines)
        else:
            description["message"] += f"\n{lines}"
    # A signal is no error.
    prefix = "" if isinstance(error, Interrupted) else "error: "
    message = f"{prefix}{description['message']}".rstrip()
    _print_error(message)
    try:
        write_error_file(process_environ(), message)
    except OSError as refusal:
        _print_error(f"warning: torchrun's agent was not informed ({refusal})")
    return int(description["exit_code"])


def _print_error(text: str) -> None:
    """Print to standard error, unless that is closed or full: the exit code is the same."""
    # Standard output first: where both streams go to one place, the error is the last thing printed.
    flush_output()
    with suppress(AttributeError, OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _launch(arguments: argparse.Namespace, began: float, words: Sequence[str]) -> None:
    if arguments.colocated:
        die_with_parent(arguments.parent, signal.SIGKILL)
    environ = dict(process_environ())  # with the job token
    config, run, folders = resolve_run(arguments)
    config, identity = resolve_world(arguments, config)
    command = [sys.executable, "-m", "paramserver.launch", *words]
    # Rank 0 alone owns the folder: it finds, locks, changes and rolls it back.
    owns_folder = identity is None or identity.global_rank == 0
    earlier = earlier_attempt(config, run, identity) if owns_folder else None
    continues = earlier is not None
    run = earlier or run
    if arguments.dry_run:
        # Before any folder is made or reserved.
        from paramserver.runtime.dry_run import plan_text

        for line in _lines_of_start(config, run, continues):
            print(line, file=sys.stderr)
        print_output(plan_text(config, folders, None if identity is None else identity.source))
    elif identity is None:
        if warning := unused_tasks(process_environ()):
            print(warning, file=sys.stderr)
        launch_local(config, run, folders, began=began, command=command, continues=continues, report=report_error)
    else:
        with ExitStack() as stack:
            if is_colocated(config) and identity.global_rank < num_servers_of(config):
                stack.enter_context(ColocatedTrainer(command, environ, config))
            _run_rank_here(config, identity, run, folders, command, arguments.again, continues)


def _lines_of_start(config: Config, run: RunDir | None, continues: bool) -> list[str]:
    """Return lines for the user: which run is resumed, and why."""
    if run is None:
        return []
    if not continues:
        return describe_resume(run, config)
    again = f"this command was started again by its job or launcher, and continues its run {run.path}"
    if run.has_checkpoint():
        return [again, *describe_resume(run, config)]
    return [f"{again} from the beginning, as it has no checkpoint yet"]


def resolve_run(arguments: argparse.Namespace) -> tuple[Config, RunDir | None, list[Path]]:
    """Return the effective config, the run to resume, and the folders where the task is searched.

    If an earlier start ended before it made a step, its changes to the run to resume are rolled back first.
    """
    flags = config_flags(arguments)
    folders = arguments.folder or code_folders(arguments.config, arguments.overrides)
    if arguments.resume is None or arguments.supervised is not None:
        if arguments.config is None:
            raise UnsupportedConfiguration("--config FILE is missing; see --help, or examples/digits/config.yaml")
        run = None if arguments.run_folder is None else RunDir(arguments.run_folder)
        if arguments.supervised is not None:  # the supervisor has written it
            stored = read_dumped(arguments.config.read_text(encoding="utf-8"))
            return load_config(None, base=stored, overrides=arguments.overrides, flags=flags), run, folders
        return load_config(arguments.config, overrides=arguments.overrides, flags=flags), run, folders
    try:
        opened = open_run(_run_to_resume(arguments))
    except CheckpointError as missing:
        return _config_of_rank_zero(arguments, flags, missing), None, folders
    # Before the config is read: rolling back restores config.yaml too.
    recover(opened)
    file = find_config_file(opened, arguments.config)
    config = load_config(file, overrides=arguments.overrides, flags=flags, stored=file == opened.config_file)
    return config, opened, code_folders(arguments.config, arguments.overrides, opened.task_folders())


def config_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of the config that have flags of their own, with the values of the command line."""
    return {
        "mode": arguments.mode,
        "device.num_gpus": arguments.num_gpus,
        "cluster.master_addr": arguments.master_addr,
        "cluster.num_servers": arguments.num_servers,
        "cluster.num_trainers": arguments.num_trainers,
        # The supervisor passes its ranks a port that was free at the start; the stored config keeps the user's.
        "cluster.master_port": arguments.master_port if arguments.supervised is None else None,
    }


def _config_of_rank_zero(arguments: argparse.Namespace, flags: Mapping[str, Any], missing: CheckpointError) -> Config:
    """Return the effective config of a run that is resumed and whose folder only rank 0's host has.

    Raises:
        CheckpointError: ``missing``, if this process is rank 0 or starts all ranks.
    """
    own = None
    if arguments.config is not None:
        own = load_config(arguments.config, overrides=arguments.overrides, flags=flags)
    identity = resolve_identity(rank_flags(arguments), process_environ(), own or Config())
    if identity is None or identity.global_rank == 0 or arguments.dry_run:
        raise missing
    if own is None:
        raise CheckpointError(f"{missing}; where only the host of rank 0 has it, give --config FILE in addition")
    logging.getLogger("paramserver").info("the folder of the run is not here; this rank takes the config from rank 0")
    with torch_import_without_gc():
        from paramserver.distributed.rendezvous import fetch_config

    stored = read_dumped(fetch_config(identity, own.cluster.timeout_s))
    return load_config(None, base=stored, overrides=arguments.overrides, flags=flags)


def _run_to_resume(arguments: argparse.Namespace) -> Path:
    if arguments.resume:
        return Path(arguments.resume)
    if arguments.config is None:
        raise UnsupportedConfiguration(
            "--resume needs a RUN_DIR, or --config FILE to find the newest run of its name or task"
        )
    config = load_config(arguments.config, overrides=arguments.overrides)
    return newest_run(
        Path(config.logging.run_dir), name=config.logging.name, task=None if config.logging.name else config.task
    )


def resolve_world(arguments: argparse.Namespace, config: Config) -> tuple[Config, ProcessIdentity | None]:
    """Return the config for the world that the command line or the environment gives, and the identity of this process.

    The identity is None if this process starts all ranks on this machine.
    """
    identity = _identity(arguments, config)
    if identity is not None:
        world_size = identity.world_size
    elif arguments.world_size is not None:
        world_size = num_ranks_started(config, arguments.world_size)
    else:
        world_size = world_size_of(config)
    return with_world_size(config, world_size), identity


def rank_flags(arguments: argparse.Namespace) -> RankFlags:
    """Return the flags that concern the ranks. One that is not given has the value of its key in ``--set``."""
    names = "master_addr", "master_port", "num_trainers"
    apply_overrides(keys := Settings(), arguments.overrides)
    apply_flags(keys, {f"cluster.{name}": getattr(arguments, name) for name in names})
    return RankFlags(
        arguments.rank,
        arguments.world_size,
        supervised=arguments.supervised is not None,
        is_colocated_trainer=arguments.colocated,
        role=arguments.role,
        index=arguments.index,
        **{name: keys.values.get(f"cluster.{name}") for name in names},
    )


def _identity(arguments: argparse.Namespace, config: Config) -> ProcessIdentity | None:
    identity = resolve_identity(rank_flags(arguments), process_environ(), config)
    if identity is not None:
        hide_token(process_environ())
    return identity


def launch_local(
    config: Config,
    run: RunDir | None,
    folders: Sequence[Path],
    *,
    began: float | None = None,
    command: Sequence[str] = (),
    create_task: Callable[..., Task] | None = None,
    sink: Sink | None = None,
    continues: bool = False,
    report: Callable[[BaseException], int] | None = None,
    pickled_task: bytes | None = None,
) -> tuple[RunDir, dict[str, Any]]:
    """Start every rank on this machine, wait for the end of the run, and return it with its summary.

    Args:
        run: to resume; None = a new one.
        create_task: creates the task of a run of one process; None = its class is loaded by ``config.task``.
        sink: receives the records that the console receives; closed at the end.
        continues: an earlier attempt of this command began ``run``.
        report: see ``RankPlan``; None if this process outlives the run.
        pickled_task: the content of ``PICKLED_TASK`` in the folder of the run, which ``config.task`` then names.

    Raises:
        ParamserverError: what ended the run.
    """
    from paramserver.metrics.console import Console

    check_torch_version()
    began = time.time() if began is None else began
    resume = run is not None and (run.has_checkpoint() or not continues)
    restarted = run is not None and continues and lost_processes(run)
    console: Sink = Console(config, sys.stderr, _lines_of_start(config, run, continues))
    if sink is not None:
        console = FanOut([console, sink])
    with ExitStack() as stack:
        if run is None:
            run = stack.enter_context(reserve_run(config))
        else:
            stack.enter_context(continue_attempt(run) if continues else resume_transaction(run))
        if pickled_task is not None:
            write_bytes(run.path / PICKLED_TASK, pickled_task)
            folders = [run.path, *folders]
        if mode_of(config).single_process:
            with recording_signals(), torch_import_without_gc():
                from paramserver.runtime.rank import RankPlan, run_rank

            identity = ProcessIdentity(0, 1, 0, 1, 0, config.cluster.master_addr, 0, False, "local", "supervisor")
            plan = RankPlan(
                config,
                identity,
                folders,
                (console,),
                run,
                resume,
                create_task=create_task,
                began=began,
                command=command,
                restarted=restarted,
                report=report,
            )
            finished = run_rank(plan)
            assert finished is not None
            summary = finished
        else:
            from paramserver.runtime.supervisor import Supervisor

            supervisor = Supervisor(config, run, folders, console, resume, began, command, restarted)
            summary = supervisor.supervise()
    return run, summary


def _run_rank_here(
    config: Config,
    identity: ProcessIdentity,
    run: RunDir | None,
    folders: Sequence[Path],
    command: Sequence[str],
    replaces: bool,
    continues: bool,
) -> None:
    """Run one rank in this process; the others are started elsewhere."""
    from paramserver.metrics.console import Console

    with recording_signals(), torch_import_without_gc():
        from paramserver.runtime.rank import RankPlan, run_rank

    sinks: tuple[Sink, ...] = ()
    if identity.global_rank == 0:
        sinks = (Console(config, sys.stderr, _lines_of_start(config, run, continues)),)
    resume = run is not None and (run.has_checkpoint() or not continues)
    plan = RankPlan(
        config,
        identity,
        folders,
        sinks,
        run,
        resume,
        ends_process=True,
        command=command,
        restarted=run is not None and continues and lost_processes(run),
        replaces=replaces,
        report=report_error,
    )
    opened: AbstractContextManager[None] = nullcontext()
    if run is not None and identity.global_rank == 0:
        opened = continue_attempt(run) if continues else resume_transaction(run)
    with opened:
        run_rank(plan)


def _run_supervised_rank(arguments: argparse.Namespace) -> int:
    """Run one rank in this process, under a supervisor on this machine."""
    # Until the run handles it, as SIGTERM does: a KeyboardInterrupt would be an error of this rank.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Before everything that can fail, so that the supervisor receives each error, also one of an import.
    pipe = EventPipe(arguments.supervised)

    def report(error: BaseException) -> int:
        pipe.send_error(error)
        with suppress(OSError):  # a full disk also refuses the log
            traceback.print_exception(error)
        return int(describe_error(error)["exit_code"])

    try:
        # Before the seconds of importing torch: a supervisor that dies meanwhile must not leave this rank behind.
        die_with_parent(arguments.parent)
        on_task = _call_plugin(arguments.rank)
        with torch_import_without_gc():
            from paramserver.runtime.rank import RankPlan, run_rank

        config, run, folders = resolve_run(arguments)
        os.close(int(arguments.config.name))  # the supervisor's file in memory, /dev/fd/N
        identity = _identity(arguments, config)
        assert identity is not None
        config = with_world_size(config, identity.world_size)
        listener = None if arguments.listener is None else socket.socket(fileno=arguments.listener)
        command = json.loads(arguments.shown_command or "[]")
        resume = arguments.resume is not None
        plan = RankPlan(
            config,
            identity,
            folders,
            (pipe,),
            run,
            resume,
            listener,
            writes_log=False,
            ends_process=True,
            began=arguments.began,
            command=command,
            restarted=arguments.again,
            replaces=arguments.again,
            report=report,
            on_task=on_task,
        )
        write_stacks_on_signal()
        pipe.start_heartbeat(config.server.heartbeat_s)
        run_rank(plan)
        pipe.send_done()
    except BaseException as error:  # noqa: BLE001 - the supervisor reports it
        return report(error)
    return 0


def _call_plugin(global_rank: int) -> Callable[[Role, Task], None]:
    """Call the function of ``RANK_PLUGIN``, if there is one; return what to call with the role and the task."""
    reference = process_environ().get(RANK_PLUGIN)
    if reference is None:
        return lambda role, task: None
    on_task: Callable[[Role, Task], None] = load_object(reference, RANK_PLUGIN)(global_rank)
    return on_task


if __name__ == "__main__":
    exit_process(main())
