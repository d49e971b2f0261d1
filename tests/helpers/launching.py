"""Start runs, and read what they leave: ``launch``, ``resume``, ``run_in_process``, ``FinishedRun``."""

import contextlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from forkserver import shared_server
from record_tables import check_records

from paramserver.buffers.sample_tree import unpack_keys
from paramserver.launch import main as launch_main

TASKS = Path(__file__).with_name("tasks.py")
WITNESS_TRAINERS = Path(__file__).with_name("witness_trainers.py")
SIGNAL_TASKS = Path(__file__).with_name("signal_tasks.py")


@dataclass(frozen=True)
class FinishedRun:
    """A run that ended: its exit code, its output and its folder."""

    code: int
    output: str
    run_dir: Path

    @property
    def summary(self):
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def records(self):
        check_records(self.records_as_they_are)
        return self.records_as_they_are

    @property
    def records_as_they_are(self):
        """Also those that an earlier version stored, which may lack fields."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def of_kind(self, kind):
        return [record for record in self.records if record["kind"] == kind]

    @property
    def checkpoints(self):
        return sorted(path.name for path in (self.run_dir / "checkpoints").glob("step-*"))

    @property
    def best(self):
        """The name of the best checkpoint; None where there is none."""
        file = self.run_dir / "checkpoints" / "best"
        return file.read_text().strip() if file.exists() else None

    def load(self, name, step=None):
        folder = self.run_dir / "checkpoints"
        folder /= (folder / "latest").read_text().strip() if step is None else f"step-{step:08d}"
        return torch.load(folder / f"{name}.pt", weights_only=True)

    def log(self, rank):
        return (self.run_dir / "logs" / f"rank-{rank}.log").read_text()


def environment(**extra):
    """The environment of a run. One thread per process: another number of threads rounds differently."""
    path = os.pathsep.join(filter(None, (str(TASKS.parent), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **extra}


NOT_GIVEN = object()
"""In place of a value of ``write_config``: the key is left out."""


def write_config(folder, *, task="ReferenceTask", mode="local", task_args=None, **sections):
    """A config file in ``folder`` for a task of tests/helpers/tasks.py; sections are merged over quick defaults."""
    config = {
        "task": f"{TASKS}:{task}" if task and ":" not in task else task,
        "task_args": task_args or {},
        "mode": mode,
        "training": {"max_steps": 12, "batch_size": 8, "validate_every": 0},
        "checkpoint": {"every": 0},
        "logging": {"run_dir": str(folder / "runs"), "tensorboard": False, "log_every": 1},
        "cluster": {"timeout_s": 30},
    }
    for section, values in sections.items():
        if isinstance(values, dict):
            merged = {**config.get(section, {}), **values}
            config[section] = {key: value for key, value in merged.items() if value is not NOT_GIVEN}
        else:
            config[section] = values
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def command(*arguments):
    return [sys.executable, "-m", "paramserver.launch", *map(str, arguments)]


def launch(folder, *flags, timeout_s=90, env=None, fresh=False, **config):
    """Run to the end with all ranks on this machine, forked from a process that has imported torch.

    Args:
        folder: for the config, the output and the run.
        flags: of ``python -m paramserver.launch``, after those that name the config and the run.
        timeout_s: the run must end within this time.
        env: added to the environment.
        fresh: start new interpreters, whose output goes into a pipe instead of a file.
        config: as for ``write_config``; ``name`` is the run's.
    """
    name = config.pop("name", "run")
    file = write_config(folder, **config)
    arguments = ["--config", file, "--set", f"logging.name={name}", *flags]
    run_dir, environ = folder / "runs" / name, environment(**(env or {}))
    if not fresh:
        return _run_forked(arguments, folder, timeout_s, run_dir, environ)
    options = {"capture_output": True, "text": True, "timeout": timeout_s, "check": False}
    done = subprocess.run(command(*arguments), env=environ, cwd=folder, **options)
    return FinishedRun(done.returncode, done.stdout + done.stderr, run_dir)


@contextlib.contextmanager
def ranks_without_supervisor(folder, world_size, **config):
    """Start each rank by itself, as on several machines; yield them in the order of their ranks."""
    file = write_config(folder, **config)
    about = ["--set", "logging.name=run", "--world_size", world_size, "--master_port", free_port(), "--config", file]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(fork_server().start(["--rank", rank, *about], folder, environment()))
            for rank in range(world_size)
        ]


def free_port():
    """A port that was free a moment ago, from a range from which the kernel assigns none."""
    for port in random.SystemRandom().sample(range(20000, 30000), 50):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no free port among 50")


def resume(finished, *flags, timeout_s=90):
    """Resume a run from its newest checkpoint and wait for its end."""
    folder = finished.run_dir.parent
    return _run_forked(["--resume", finished.run_dir, *flags], folder, timeout_s, finished.run_dir, environment())


def _run_forked(arguments, folder, timeout_s, run_dir, environ):
    code, output = fork_server().run(arguments, folder, timeout_s, environ)
    return FinishedRun(-signal.SIGKILL if code is None else code, output, run_dir)


def fork_server():
    """The fork server of this process; torch is imported with the log level that a supervisor sets for its ranks."""
    return shared_server(environment(TORCH_CPP_LOG_LEVEL="ERROR"))


def run_in_process(folder, *flags, name="run", **config):
    """Run in mode local inside this process, which starts no interpreter."""
    file = write_config(folder, **config)
    code, output = main_in_process("--config", file, "--set", f"logging.name={name}", *flags)
    return FinishedRun(code, output, folder / "runs" / name)


def resume_in_process(finished, *flags):
    """Resume a run in mode local inside this process."""
    code, output = main_in_process("--resume", finished.run_dir, *flags)
    return FinishedRun(code, output, finished.run_dir)


def main_in_process(*arguments):
    """The command line inside this process: its exit code and its output. It leaves the process unchanged."""
    output, threads, environ, path = io.StringIO(), torch.get_num_threads(), dict(os.environ), list(sys.path)
    torch.set_num_threads(1)  # as in a process of its own: see environment()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            code = launch_main([str(argument) for argument in arguments])
    finally:
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environ)
        sys.path[:] = path
    return code, output.getvalue()


def train(folder, mode, trainers, **config):
    """A run that must complete; in mode local it runs inside this process."""
    cluster = {"num_trainers": trainers, "timeout_s": 30, **config.pop("cluster", {})}
    start = run_in_process if mode == "local" else launch
    finished = start(folder / f"{mode}-{trainers}", mode=mode, cluster=cluster, **config)
    assert finished.code == 0, finished.output
    return finished


def run_concurrently(*calls):
    """Make these calls in one thread each, for runs that mostly wait; return their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def flatten_tensors(state, prefix=""):
    """All tensors of a nested state, by path."""
    if isinstance(state, torch.Tensor):
        return {prefix: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    return {name: tensor for key, value in items for name, tensor in flatten_tensors(value, f"{prefix}/{key}").items()}


def relative_difference(one, other):
    """Relative L2 norm of the difference of all floating-point tensors; infinite where they do not match."""
    a, b = flatten_tensors(one), flatten_tensors(other)
    if a.keys() != b.keys():
        return float("inf")
    names = [n for n in a if a[n].is_floating_point()]
    total = sum((a[n].double() - b[n].double()).pow(2).sum() for n in names)
    norm = sum(a[n].double().pow(2).sum() for n in names)
    return float((total / norm).sqrt())


def differing_tensors(one, other):
    """Names of tensors that differ in any bit."""
    a, b = flatten_tensors(one), flatten_tensors(other)
    return sorted(a.keys() ^ b.keys()) + [n for n in a if n in b and not torch.equal(a[n], b[n])]


def buffer_records(finished):
    """Step and trainer of every buffer record, sorted, with repetitions."""
    return sorted((r["step"], r["trainer"]) for r in finished.of_kind("buffer"))


def assert_equal_runs(whole, other, trainers=1, buffers=False):
    """Assert that two runs ended equal: parameters, optimizer, random states, counters, records, best checkpoint.

    Args:
        trainers: how many parts the checkpoints have.
        buffers: compare the contents of the buffers too. They depend on how far ahead the feeder is, unless every
            sample has arrived.
    """
    assert whole.summary["steps"] == other.summary["steps"]
    assert whole.summary["samples"] == other.summary["samples"]
    assert whole.summary["reason"] == other.summary["reason"]
    assert differing_tensors(whole.load("model"), other.load("model")) == []
    assert differing_tensors(whole.load("optimizer"), other.load("optimizer")) == []
    for trainer in range(trainers):
        one, two = (run.load(f"trainer-{trainer}") for run in (whole, other))
        if buffers:
            assert differing_tensors(one["buffer"], two["buffer"]) == []
            assert unpack_keys(one["buffer"]["keys"]) == unpack_keys(two["buffer"]["keys"])
        assert one["buffer"]["counters"]["gets"] == two["buffer"]["counters"]["gets"]
        assert differing_tensors(one["random"], two["random"]) == []
        assert one["counters"] | {"seconds": 0} == two["counters"] | {"seconds": 0}
    for kind, fields in (("train", ("step", "loss", "lr", "epoch")), ("validation", ("step", "values", "best"))):
        assert [[r[f] for f in fields] for r in whole.of_kind(kind)] == [
            [r[f] for f in fields] for r in other.of_kind(kind)
        ]
    assert buffer_records(whole) == buffer_records(other)
    assert whole.best == other.best
