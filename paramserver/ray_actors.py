"""A run on the hosts of a Ray cluster, with one actor for each rank: ``paramserver ray`` (extra ``ray``).

The process of a rank is a child of its actor, ``python -m paramserver.ray_actors PID``, and dies with it.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paramserver import launch
from paramserver.cluster import process_environ
from paramserver.cluster.resolve import JOB_VARIABLE
from paramserver.config import (
    Config,
    check_servers,
    is_colocated,
    load_config,
    mode_of,
    num_servers_of,
    roles,
    world_size_of,
)
from paramserver.config.deadlines import Deadlines
from paramserver.errors import Interrupted, TrainingError, UnsupportedConfiguration
from paramserver.importing import current_folder
from paramserver.process_utils import STOP_SIGNALS, collecting_signals, die_with_parent, exit_process, stop_signals

log = logging.getLogger("paramserver")

# Of output that is not read, how much a rank keeps.
_MOST_LINES = 10_000
_READ_S = 1.0
_CONNECT_S = 10.0


def make_parser() -> argparse.ArgumentParser:
    parser = launch.CommandParser(
        prog="paramserver ray",
        description="Train a task on the hosts of a Ray cluster, with one actor for each rank, which Ray starts again "
        "if it is lost (cluster.max_restarts). Each host needs the folder in which this command is given, or the Ray "
        "job a working_dir.",
        epilog="Further flags are those of paramserver launch, such as --set. Exit codes: those of paramserver launch.",
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="the YAML file that describes the run"
    )
    parser.add_argument("--servers", type=int, metavar="S", help="parameter servers (default: cluster.num_servers)")
    parser.add_argument("--trainers", type=int, metavar="T", help="trainers (default: cluster.num_trainers)")
    parser.add_argument(
        "--address", metavar="ADDRESS", help="of the cluster (default: as ray.init, else a new one here)"
    )
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="of rank 0 (default: a free one)")
    parser.add_argument("--cpu", type=float, default=1, metavar="N", help="CPUs of each rank (default: 1)")
    parser.add_argument("--gpu", type=float, default=0, metavar="N", help="GPUs of each trainer (default: 0)")
    return parser


def main(argv: Sequence[str]) -> int:
    given, further = make_parser().parse_known_args(argv)
    flags = ["--config", str(given.config), *further]
    flags += ["--num_servers", str(given.servers)] if given.servers else []
    flags += [] if given.trainers is None else ["--num_trainers", str(given.trainers)]
    parsed = launch.parse(flags)
    return launch.run_command(lambda: run_on_ray(given, flags, parsed))


class RankActor:
    """The actor of one rank. Ray calls ``run`` in one thread, and the other methods in others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)  # not read yet
        self._last: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._is_stopping = False

    def find_address(self, port: int) -> tuple[str, int]:
        """Return the address of this host, and the port, or a free one in the place of 0."""
        import ray

        with socket.socket() as probe:
            if not port:
                probe.bind(("", 0))
            return ray.util.get_node_ip_address(), port or probe.getsockname()[1]

    def run(self, arguments: Sequence[str], variables: Mapping[str, str], folder: str) -> tuple[int, list[str]]:
        """Run the rank to its end; return its exit code and the last line of its output."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paramserver.ray_actors", str(os.getpid()), *arguments],
            env={**process_environ(), **variables},
            cwd=folder if Path(folder).is_dir() else None,  # else in the working_dir of the Ray job
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        with self._changed:
            self._changed.notify_all()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._lines.append(line)
                self._last = [line]
                self._changed.notify_all()
        code = self._process.wait()
        if code < 0 and not self._is_stopping:
            os._exit(1)  # killed: Ray starts this actor again, and with it the rank
        return code if code >= 0 else 128 - code, self._last

    def read(self) -> str:
        """Return the output since the last call; wait for some for a short time."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._lines), _READ_S)
            text = "".join(self._lines)
            self._lines.clear()
        return text

    def stop(self, number: int) -> None:
        """Send a signal to the rank, which has started or is about to."""
        with self._changed:
            self._is_stopping = True
            self._changed.wait_for(lambda: self._process is not None, _READ_S)
        if self._process is not None:
            self._process.send_signal(number)


def run_on_ray(given: argparse.Namespace, flags: Sequence[str], parsed: argparse.Namespace) -> int:
    """Run all ranks on the cluster with ``flags``, as ``parsed``, and return the exit code of rank 0.

    Raises:
        TrainingError: rank 0 is lost, and was started again as often as allowed.
        UnsupportedConfiguration: Ray is missing, its cluster is not reached or too small, or the input is wrong.
    """
    try:
        import ray
    except ImportError as error:
        raise UnsupportedConfiguration("paramserver ray needs ray; install ray, or the extra ray") from error
    config = load_config(given.config, overrides=parsed.overrides, flags=launch.config_flags(parsed))
    check_servers(mode_of(config), num_servers_of(config) if given.servers is None else given.servers)
    if is_colocated(config):
        raise UnsupportedConfiguration(
            "cluster.colocate (True) must be false on Ray, where each rank has an actor of its own; set it to false"
        )
    if given.cpu <= 0 or given.gpu < 0:
        raise UnsupportedConfiguration(
            f"--cpu ({given.cpu:g}) must be positive, and --gpu ({given.gpu:g}) 0 or positive; correct them"
        )
    _check_address(given.address)
    try:
        ray.init(address=given.address, log_to_driver=False, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _not_reached(given.address, error) from error
    try:
        with collecting_signals(stop_signals()) as signals:
            return _Run(config, flags, given, signals).follow()
    except ray.exceptions.RayError as error:
        raise TrainingError(f"Ray cannot run all ranks ({type(error).__name__}: {error}); see ray logs") from error
    finally:
        ray.shutdown()  # with all actors, and with them the ranks


def _check_address(address: str | None) -> None:
    """Refuse an address that nothing listens on; Ray would end this process, after minutes."""
    host, _, port = (address or "").rpartition(":")
    if "/" in host or not (host and port.isdigit()):
        return  # such as auto, or ray://HOST:PORT
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise _not_reached(address, error) from error


def _not_reached(address: str | None, error: Exception) -> UnsupportedConfiguration:
    return UnsupportedConfiguration(
        f"--address ({address}) must be that of a Ray cluster, and none is reached ({error}); correct it"
    )


class _Run:
    """A run on a cluster: a placement group with room for each rank, and the actors in it."""

    def __init__(self, config: Config, flags: Sequence[str], given: argparse.Namespace, signals: list[int]) -> None:
        import ray

        self._ray, self._config, self._flags, self._signals = ray, config, flags, signals
        self._port, self._limit_s = given.port, config.cluster.timeout_s
        # By its name a rank 0 that starts again finds the run that it began.
        self._job = process_environ().get(JOB_VARIABLE) or f"ray/{uuid.uuid4().hex}"
        gpus = [given.gpu if role.kind == "trainer" else 0 for role in roles(config, world_size_of(config))]
        self._resources = [{"num_cpus": given.cpu, "num_gpus": gpu} for gpu in gpus]
        self._group = ray.util.placement_group([{"CPU": given.cpu} | ({"GPU": gpu} if gpu else {}) for gpu in gpus])
        if not self._group.wait(self._limit_s):
            held = ray.cluster_resources()
            raise UnsupportedConfiguration(
                f"the Ray cluster must have room for {len(gpus)} ranks with --cpu ({given.cpu:g}) and --gpu "
                f"({given.gpu:g}) within cluster.timeout_s ({self._limit_s:g} s), and has "
                f"{held.get('CPU', 0):g} CPUs and {held.get('GPU', 0):g} GPUs in all; lower these, or add hosts"
            )

    def follow(self) -> int:
        """Run to the end. Where no server keeps the run, a loss ends all ranks, which then start again together."""
        restarts = self._config.cluster.max_restarts
        of_each, of_all = (restarts, 0) if mode_of(self._config).has_servers else (0, restarts)
        for left in reversed(range(of_all + 1)):
            codes = self._run_ranks(of_each)
            if len(codes) == len(self._resources) or codes.get(0) == 0 or self._signals or not left:
                break
            _show("a rank is lost; all ranks start again, from the last checkpoint\n")
        if 0 not in codes:
            raise TrainingError(
                f"rank 0 is lost, and started again cluster.max_restarts ({restarts}) times; see ray logs"
            )
        return codes[0]

    def _run_ranks(self, restarts: int) -> dict[int, int]:
        """Run all ranks; return the exit codes of those that have one, by rank."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        options = {"max_concurrency": 3, "max_restarts": restarts, "max_task_retries": restarts}
        actors = [
            self._ray.remote(RankActor)
            .options(**options, **resources, scheduling_strategy=strategy(self._group, rank))
            .remote()
            for rank, resources in enumerate(self._resources)
        ]
        try:
            host, port = self._ray.get(actors[0].find_address.remote(self._port), timeout=self._limit_s)
            if self._signals:
                raise Interrupted("interrupted by a signal while nothing was trained; nothing was saved")
            of_all = {"WORLD_SIZE": str(len(actors)), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
            # Ray shows an actor its own GPUs only, as if it were alone on its host.
            of_all |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", JOB_VARIABLE: self._job}
            running = {}
            for rank, actor in enumerate(actors):
                variables = {**of_all, "RANK": str(rank), "GROUP_RANK": str(rank)}
                running[actor.run.remote(self._flags, variables, str(current_folder()))] = rank
            return self._wait(actors, running)
        finally:
            for actor in actors:
                self._ray.kill(actor)

    def _wait(self, actors: Sequence[Any], running: dict[Any, int]) -> dict[int, int]:
        """Print the output of rank 0 until all ranks have ended, or do not in time after rank 0."""
        codes: dict[int, int] = {}
        give_up_at, is_stopping, reading = math.inf, False, actors[0].read.remote()
        while running and time.monotonic() < give_up_at:
            if self._signals and not is_stopping:
                is_stopping = True
                # A rank ignores SIGHUP where Ray was started by nohup.
                number = signal.SIGTERM if self._signals[0] == signal.SIGHUP else self._signals[0]
                for actor in actors:
                    actor.stop.remote(number)
            for future in self._ray.wait([*running, reading], timeout=_READ_S)[0]:
                try:
                    found = self._ray.get(future)
                except self._ray.exceptions.RayError as error:
                    found = None
                    log.info("%s", error)
                if future is reading:
                    _show(found or "")
                    reading = actors[0].read.remote()
                    continue
                rank = running.pop(future)
                codes |= {} if found is None else {rank: found[0]}
                if rank == 0:
                    give_up_at = time.monotonic() + Deadlines.of(self._config).ended_s
                elif found is None or found[0]:
                    _show(f"rank {rank}: {''.join(found[1]).strip() if found else 'lost'}\n")
        if 0 in codes:
            for rest in (reading, actors[0].read.remote()):
                _show(self._ray.get(rest, timeout=self._limit_s))
        return codes


def _show(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # Ray starts its processes with SIGINT blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    actor, *words = sys.argv[1:]
    die_with_parent(int(actor), signal.SIGKILL)
    exit_process(launch.main(words))
