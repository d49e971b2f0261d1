"""``paramserver ray`` on a real Ray cluster of two nodes: each rank is a child of an actor."""

import json
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import FinishedRun, differing_tensors, environment, launch, write_config

from paramserver import ray_actors

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray (extra ray) is not installed"),
]

HELPERS = Path(__file__).parents[1] / "helpers"
# A rank kills its actor, and dies with it, once.
TASK = """
import os
import signal
import time
from pathlib import Path
from tasks import ReferenceTask

class Killed(ReferenceTask):
    def __init__(self, killed=-1, raises=-1, waits=False):
        super().__init__()
        self.killed, self.raises, self.waits = killed, raises, waits

    def on_batch_start(self, batch_idx):
        index, once = self.trainer.trainer_index, Path("killed")
        if batch_idx == 6 and index == self.killed and not once.exists():
            once.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        if batch_idx == 6 and index == self.raises:
            raise LookupError("no such image")
        if batch_idx == 6 and self.waits and index == 0:
            Path("waits").touch()
            while not Path("go").exists():
                time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a cluster with room for two ranks on each of its two nodes."""
    log = (tmp_path_factory.mktemp("ray") / "log").open("w")
    cluster = subprocess.Popen(
        [sys.executable, str(HELPERS / "ray_cluster.py")],
        env=environment(RAY_ENABLE_UV_RUN_RUNTIME_ENV="0"),
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True},
    )
    try:
        lines = (line.split() for line in cluster.stdout)
        yield next(words[1] for words in lines if words[:1] == ["address"])
    finally:
        cluster.communicate("", timeout=60)
        log.close()


def begin(folder, address, *flags, **config):
    (folder / "killed.py").write_text(TASK)
    write_config(folder, **{"mode": "rpc", "logging": {"name": "run"}, **config})
    words = ["--config", "config.yaml", "--address", address, *flags]
    return subprocess.Popen(
        [sys.executable, "-m", "paramserver.cli", "ray", *words],
        cwd=folder,
        env=environment(),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},
    )


def run_on_ray(folder, address, *flags, **config):
    process = begin(folder, address, *flags, **config)
    output = process.communicate(timeout=150)[0]
    return FinishedRun(process.returncode, output, folder / "runs" / "run")


def assert_nothing_is_left(folder):
    import psutil

    ours = [p for p in psutil.process_iter(["cmdline", "cwd"]) if "paramserver.ray_actors" in (p.info["cmdline"] or [])]
    assert [p for p in ours if p.info["cwd"] == str(folder)] == []


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "servers"), [("rpc", 2), ("ddp", 0)])
def test_a_run_equals_that_of_the_plain_launch(tmp_path, address, mode, servers):
    config = {"mode": mode, "cluster": {"num_trainers": 2, "num_servers": servers or None}}
    plain = launch(tmp_path / "plain", **config)
    config["cluster"] = {"num_trainers": 1}
    run = run_on_ray(tmp_path, address, "--servers", str(servers), "--trainers", "2", **config)
    assert run.code == 0, run.output
    assert differing_tensors(run.load("model"), plain.load("model")) == []
    assert differing_tensors(run.load("optimizer"), plain.load("optimizer")) == []
    # The output of rank 0 comes back, with the summary at its end.
    assert "status       completed" in run.output
    assert f"{servers} servers, 2 trainers" in run.output or not servers
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("mode", "killed"),
    [("rpc", 1), ("ddp", 1), ("ddp", 0)],
)
def test_an_actor_that_is_killed_starts_again_and_the_run_ends_as_it_must(tmp_path, address, mode, killed):
    config = {"mode": mode, "task": "killed.py:Killed", "task_args": {"killed": killed}}
    config |= {"checkpoint": {"every": 2}, "cluster": {"num_trainers": 2}}
    run = run_on_ray(tmp_path, address, **config)
    assert run.code == 0, run.output
    assert (tmp_path / "killed").exists()
    assert run.summary["status"] == "completed"
    assert run.summary["steps"] == 12
    assert ("all ranks start again, from the last checkpoint" in run.output) is (mode == "ddp")
    if mode == "ddp":
        plain = launch(tmp_path / "plain", mode=mode, cluster={"num_trainers": 2})
        assert differing_tensors(run.load("model"), plain.load("model")) == []
    else:
        assert "trainer 1" in json.loads((run.run_dir / "losses.json").read_text())["faults"][0]["text"]
    assert_nothing_is_left(tmp_path)


def test_a_server_that_is_killed_continues_from_the_last_checkpoint(tmp_path, address):
    import psutil

    config = {"task": "killed.py:Killed", "task_args": {"waits": True}, "checkpoint": {"every": 2}}
    process = begin(tmp_path, address, cluster={"num_trainers": 2}, **config)
    wait_for(tmp_path / "waits", process)
    (server,) = [
        p
        for p in psutil.process_iter(["cmdline", "cwd"])
        if "paramserver.ray_actors" in (p.info["cmdline"] or [])
        and p.info["cwd"] == str(tmp_path)
        and p.environ()["RANK"] == "0"
    ]
    server.kill()
    (tmp_path / "go").touch()
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 0, output
    run = FinishedRun(0, output, tmp_path / "runs" / "run")
    plain = launch(tmp_path / "plain", mode="rpc", cluster={"num_trainers": 2})
    assert differing_tensors(run.load("model"), plain.load("model")) == []
    assert json.loads((run.run_dir / "losses.json").read_text())["restarts"] == 1
    # The output of rank 0 comes back, with the summary at its end.
    assert "status       completed" in run.output
    assert_nothing_is_left(tmp_path)


def wait_for(path, process):
    deadline = threading.Event()
    for _ in range(1200):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()[0]
        deadline.wait(0.1)
    process.kill()
    raise AssertionError(process.communicate()[0])


@pytest.mark.nightly
def test_the_exit_code_is_that_of_the_run(tmp_path, address):
    config = {"task": "killed.py:Killed", "task_args": {"raises": 1}, "cluster": {"num_trainers": 2}}
    run = run_on_ray(tmp_path, address, **config)
    assert run.code == 1, run.output
    assert "LookupError: no such image" in run.output
    assert run.summary["status"] == "failed"
    assert_nothing_is_left(tmp_path)


def test_a_signal_ends_the_run_after_a_checkpoint(tmp_path, address):
    config = {"task": "killed.py:Killed", "task_args": {"waits": True}, "cluster": {"num_trainers": 2}}
    process = begin(tmp_path, address, **config)
    wait_for(tmp_path / "waits", process)
    process.send_signal(signal.SIGINT)
    wait_for_stop = FinishedRun(0, "", tmp_path / "runs" / "run")
    for _ in range(100):
        if "signal SIGINT" in "".join(file.read_text() for file in (wait_for_stop.run_dir / "logs").glob("*.log")):
            break
        threading.Event().wait(0.1)
    (tmp_path / "go").touch()
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 3, output
    assert "interrupted (signal SIGINT)" in output
    assert wait_for_stop.summary["status"] == "interrupted"
    assert wait_for_stop.checkpoints
    assert_nothing_is_left(tmp_path)


def test_a_cluster_that_is_too_small_is_refused(tmp_path, address):
    run = run_on_ray(tmp_path, address, "--trainers", "9", cluster={"timeout_s": 2})
    assert run.code == 2, run.output
    assert "error: the Ray cluster must have room for 10 ranks with --cpu (1) and --gpu (0) within" in run.output


@pytest.mark.parametrize(
    ("flags", "config", "message"),
    [
        (("--servers", "0"), {"mode": "rpc"}, "--servers (0) must be at least 1 in mode rpc; correct it"),
        (("--servers", "1"), {"mode": "ddp"}, "--servers (1) must be 0 in mode ddp; correct it"),
        (("--trainers", "0"), {"mode": "rpc"}, "--num_trainers: cluster.num_trainers (0) must be at least 1"),
        ((), {"mode": "rpc", "cluster": {"colocate": True}}, "cluster.colocate (True) must be false on Ray"),
        (("--address", "127.0.0.1:1"), {"mode": "rpc"}, "--address (127.0.0.1:1) must be that of a Ray cluster"),
        (("--cpu", "0"), {"mode": "rpc"}, "--cpu (0) must be positive, and --gpu (0) 0 or positive; correct them"),
        (("--batch_size", "3"), {"mode": "rpc"}, "unrecognized arguments: --batch_size 3"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(tmp_path, capsys, monkeypatch, flags, config, message):
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # which importing ray sets
    file = write_config(tmp_path, **config)
    try:
        code = ray_actors.main(["--config", str(file), *flags])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_ray_that_is_missing_is_named_with_its_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert ray_actors.main(["--config", str(write_config(tmp_path))]) == 2
    assert capsys.readouterr().err == "error: paramserver ray needs ray; install ray, or the extra ray\n"
