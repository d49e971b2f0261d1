"""Runs with a torch that has no RPC: those without servers are the same, and those with servers are refused."""

import subprocess
from pathlib import Path

import pytest
from launching import FinishedRun, assert_equal_runs, command, environment, launch, train, write_config

pytestmark = pytest.mark.processes

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
CONFIG = {"checkpoint": {"every": 4}, "logging": {"name": "run"}}


def run_without_rpc(folder, *arguments):
    environ = environment()
    environ["PYTHONPATH"] = f"{HELPERS / 'without_rpc'}:{environ['PYTHONPATH']}"
    options = {"capture_output": True, "text": True, "timeout": 240, "check": False}
    done = subprocess.run(command(*arguments), env=environ, cwd=folder, **options)
    return FinishedRun(done.returncode, done.stdout + done.stderr, folder / "runs" / "run")


@pytest.mark.parametrize(("mode", "trainers"), [("ddp", 2), ("local", 1)])
def test_a_run_without_servers_trains_and_is_resumed(tmp_path, mode, trainers):
    config = {**CONFIG, "mode": mode, "cluster": {"num_trainers": trainers}}
    file = write_config(tmp_path / "without", **config)
    first = run_without_rpc(file.parent, "--config", file, "--set", "training.max_steps=7")
    assert first.code == 0, first.output
    assert "torch itself" not in first.output, "ranks are forked from a process that has imported what they need"
    resumed = run_without_rpc(file.parent, "--resume", first.run_dir, "--set", "training.max_steps=12")
    assert resumed.code == 0, resumed.output
    whole = train(tmp_path, mode, trainers, **CONFIG)
    assert_equal_runs(whole, resumed, trainers)


@pytest.mark.parametrize("flags", [("--dry_run",), ()], ids=["dry_run", "run"])
def test_servers_are_refused_in_one_sentence(tmp_path, flags):
    refused = run_without_rpc(tmp_path, "--config", write_config(tmp_path, mode="rpc", **CONFIG), *flags)
    assert refused.code == 2
    line = refused.output.splitlines()[-1]
    assert "mode (rpc) needs torch.distributed.rpc, which torch" in line
    assert line.endswith("use mode ddp or local, or install a build of torch for Linux from pytorch.org")
    assert "Traceback" not in refused.output


def test_it_is_the_missing_rpc_that_is_refused(tmp_path):
    assert launch(tmp_path, "--dry_run", mode="rpc").code == 0
