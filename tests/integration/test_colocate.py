"""Servers on the hosts of the trainers (``cluster.colocate``): one command per host, as for all-reduce."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import psutil
import pytest
from forkserver import FORKED_TRAINER
from launching import (
    FinishedRun,
    assert_equal_runs,
    differing_tensors,
    environment,
    fork_server,
    free_port,
    launch,
    resume,
    train,
    write_config,
)

pytestmark = pytest.mark.processes

COLOCATED = {"colocate": True, "num_trainers": 2, "timeout_s": 60}
STEPS = {"max_steps": 150, "validate_every": 50}
DATA = {"samples": 128}


class Hosts:
    """A command for each host, on this machine. A context manager, which kills what is left.

    Args:
        folder: of the run.
        count: of hosts.
        config: as for ``write_config``.
    """

    def __init__(self, folder, count=2, **config):
        self.folder, self.count = folder, count
        file = write_config(folder, mode="rpc", **{"cluster": COLOCATED, **config})
        self.words = ["--world_size", count, "--master_port", free_port(), "--config", file]
        self.words += ["--set", "logging.name=run"]
        self.run = FinishedRun(0, "", folder / "runs" / "run")
        self._stack = ExitStack()

    def __enter__(self):
        self.commands = [self.start(host) for host in range(self.count)]
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def start(self, host, *flags):
        words = ["--rank", host, *self.words, *flags]
        environ = environment(**{FORKED_TRAINER: "1"})
        return self._stack.enter_context(fork_server().start(words, self.folder, environ))

    def trainer_of(self, host):
        """The process of the trainer that the command of a host started: its first child (see ``TrainerToBe``)."""
        return min(psutil.Process(self.commands[host].pid).children(), key=psutil.Process.create_time)

    def wait_for_checkpoint(self):
        deadline = time.monotonic() + 60
        while not (self.run.run_dir / "checkpoints" / "latest").exists():
            assert time.monotonic() < deadline, [one.output.read_text() for one in self.commands]
            time.sleep(0.05)

    def wait(self):
        codes = [one.wait(90) for one in self.commands]
        assert codes == [0] * self.count, [one.output.read_text() for one in self.commands]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """The run of ``ddp`` whose result the others have."""
    return train(tmp_path_factory.mktemp("straight"), "ddp", 2, task_args=DATA, training=STEPS)


@pytest.mark.parametrize("transport", ["auto", "rpc"])
def test_the_supervisor_starts_a_server_for_each_trainer_and_the_result_is_that_of_ddp(tmp_path, ddp, transport):
    half = {"max_steps": 75, "validate_every": 25}
    config = {"cluster": COLOCATED, "server": {"transport": transport}, "task_args": DATA}
    run = train(tmp_path, "rpc", 2, training=half, **config)
    assert (run.summary["num_servers"], run.summary["num_trainers"]) == (2, 2)
    again = resume(run, "--set", "training.max_steps=150", "--set", "training.validate_every=50")
    assert again.code == 0, again.output
    assert differing_tensors(ddp.load("model"), again.load("model")) == []
    assert differing_tensors(ddp.load("optimizer"), again.load("optimizer")) == []


@pytest.mark.nightly
def test_one_command_per_host_is_the_run_of_the_supervisor(tmp_path):
    config = {"task_args": DATA, "training": STEPS, "server": {"transport": "rpc"}}
    whole = train(tmp_path, "rpc", 2, cluster=COLOCATED, **config)
    with Hosts(tmp_path / "hosts", **config) as hosts:
        hosts.wait()
        assert_equal_runs(whole, hosts.run, trainers=2)
        assert sorted(log.name for log in hosts.run.run_dir.glob("logs/*.log")) == [f"rank-{n}.log" for n in range(4)]
        assert "server 1 on cpu" in hosts.commands[1].output.read_text()


def test_fewer_servers_than_hosts(tmp_path):
    config = {"task_args": DATA, "training": {**STEPS, "max_steps": 20}, "cluster": {**COLOCATED, "num_servers": 1}}
    with Hosts(tmp_path, count=3, **config) as hosts:
        hosts.wait()
        assert (hosts.run.summary["num_servers"], hosts.run.summary["num_trainers"]) == (1, 3)


def test_a_host_whose_server_is_killed_continues_with_its_command_started_again(tmp_path, ddp):
    config = {"task_args": DATA, "training": STEPS, "checkpoint": {"every": 10}, "server": {"transport": "rpc"}}
    with Hosts(tmp_path / "hosts", **config) as hosts:
        hosts.wait_for_checkpoint()
        trainer = hosts.trainer_of(1)
        os.kill(hosts.commands[1].pid, signal.SIGKILL)
        psutil.wait_procs([trainer], timeout=10)
        assert not trainer.is_running()  # it does not outlive the server of its host
        hosts.commands[1] = hosts.start(1)
        hosts.wait()
        assert hosts.run.summary["restarts"] >= 1
        assert sorted(log.name for log in hosts.run.run_dir.glob("logs/*.log")) == [f"rank-{n}.log" for n in range(4)]
        assert "server 1 on cpu" in hosts.commands[1].output.read_text()
        assert differing_tensors(ddp.load("model"), hosts.run.load("model")) == []
        assert differing_tensors(ddp.load("optimizer"), hosts.run.load("optimizer")) == []


@pytest.mark.nightly
def test_a_trainer_that_is_killed_is_started_again_by_the_server_of_its_host(tmp_path, ddp):
    config = {"task_args": DATA, "training": STEPS, "checkpoint": {"every": 10}, "server": {"on_loss": "rollback"}}
    with Hosts(tmp_path / "hosts", **config) as hosts:
        hosts.wait_for_checkpoint()
        hosts.trainer_of(1).kill()
        hosts.wait()
        assert "killed by SIGKILL; it starts again (1 of 3)" in hosts.commands[1].output.read_text()
        assert differing_tensors(ddp.load("model"), hosts.run.load("model")) == []


@pytest.mark.parametrize("host", [0, 1])
def test_a_signal_to_the_command_of_a_host_ends_the_run_with_a_checkpoint(tmp_path, host):
    with Hosts(tmp_path, training={"max_steps": 100_000}, checkpoint={"every": 20}) as hosts:
        hosts.wait_for_checkpoint()
        trainers = [hosts.trainer_of(number) for number in (0, 1)]
        os.kill(hosts.commands[host].pid, signal.SIGTERM)
        assert [one.wait(60) for one in hosts.commands] == [3, 3]
        assert not any(trainer.is_running() for trainer in trainers)
        assert hosts.run.summary["status"] == "interrupted"


def test_a_host_that_waits_for_another_ends_its_trainer_too(tmp_path):
    with Hosts(tmp_path, cluster={**COLOCATED, "timeout_s": 4}) as hosts:
        hosts.commands[1].kill()
        trainer = hosts.trainer_of(0)
        assert hosts.commands[0].wait(60) == 1
        assert not trainer.is_running()


@pytest.mark.nightly
def test_torchrun_starts_a_server_with_each_trainer(tmp_path):
    file = write_config(tmp_path, mode="rpc", cluster=COLOCATED, logging={"name": "run"})
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    done = subprocess.run(
        [sys.executable, *words, "-m", "paramserver.launch", "--config", str(file)],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = FinishedRun(0, "", tmp_path / "runs" / "run").summary
    assert (summary["num_servers"], summary["num_trainers"]) == (2, 2)


def test_more_servers_than_trainers_are_refused(tmp_path):
    run = launch(tmp_path, mode="rpc", cluster={**COLOCATED, "num_servers": 3})
    assert run.code == 2
    assert "cluster.num_servers (3) must be at most the number of trainers (2) with cluster.colocate" in run.output
    assert "Traceback" not in run.output
