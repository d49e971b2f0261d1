"""Random augmentation with dropout: equal in every mode, for every number of workers, and after a resume."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import (
    assert_equal_runs,
    differing_tensors,
    environment,
    fork_server,
    launch,
    resume,
    train,
    write_config,
)
from process_states import is_alive, wait_until_ended

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked_loaders")]

TASKS = Path(__file__).parents[1] / "helpers" / "loader_tasks.py"
CONFIG = {
    "task": f"{TASKS}:Augmented",
    "task_args": {"samples": 90, "dropout": 0.3, "validation": 0},
    "training": {"max_epochs": 2, "max_steps": None, "batch_size": 8, "validate_every": 0},
}


def trained(folder, mode, trainers, workers, **training):
    config = {**CONFIG, "training": {**CONFIG["training"], "loader_workers": workers, **training}}
    return train(folder / str(workers), mode, trainers, **config)


def test_one_trainer_is_the_same_in_every_mode_with_any_number_of_workers(tmp_path):
    first, *others = [
        trained(tmp_path, mode, 1, workers) for mode, workers in [("local", 0), ("local", 4), ("ddp", 1), ("rpc", 0)]
    ]
    assert first.summary["samples"] == 180
    for other in others:
        assert differing_tensors(first.load("model"), other.load("model")) == []


def test_two_trainers_are_the_same_in_ddp_and_rpc_with_any_number_of_workers(tmp_path):
    ddp = trained(tmp_path, "ddp", 2, 0)
    for workers in (0, 1):
        assert differing_tensors(ddp.load("model"), trained(tmp_path, "rpc", 2, workers).load("model")) == []


@pytest.mark.parametrize(("mode", "workers", "later"), [("local", 0, 2), ("rpc", 2, 0)])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path, mode, workers, later):
    whole = trained(tmp_path / "whole", mode, 1, 0)
    begun = trained(tmp_path / "begun", mode, 1, workers, max_steps=7)
    limits = [f"training.{key}" for key in ("max_steps=null", f"loader_workers={later}")]
    ended = resume(begun, *[flag for limit in limits for flag in ("--set", limit)])
    assert ended.code == 0, ended.output
    assert_equal_runs(whole, ended)


def test_a_rank_that_is_killed_leaves_no_worker_and_its_replacement_has_its_own(tmp_path):
    pids, mark, shared_memory = tmp_path / "pids", tmp_path / "mark", set(Path("/dev/shm").iterdir())
    pids.mkdir()
    finished = launch(
        tmp_path,
        mode="rpc",
        task=f"{TASKS}:DiesWhileWorkersRead",
        task_args={"folder": str(pids), "mark": str(mark), "samples": 160},
        training={"loader_workers": 2, "max_epochs": 1, "max_steps": None, "uneven_inputs": "join"},
        cluster={"num_trainers": 2, "timeout_s": 30},
    )
    assert finished.code == 0, finished.output
    assert mark.exists()
    assert finished.summary["restarts"] == 1
    assert finished.summary["samples"] == 160
    processes = [int(file.name) for file in pids.iterdir()]
    assert len(processes) == 3 * 3, "two workers and their loader: of two trainers and a replacement"
    assert not [pid for pid in processes if is_alive(pid)]
    left = set(Path("/dev/shm").iterdir()) - shared_memory
    assert not [file for file in left if file.name.startswith(("torch_", "sem.mp"))]


def test_ctrl_c_reaches_the_workers_too_and_the_run_is_saved(tmp_path):
    """A terminal sends it to every process of the group."""
    training = {**CONFIG["training"], "loader_workers": 2, "max_epochs": None, "max_steps": 1_000_000}
    file = write_config(tmp_path, **{**CONFIG, "training": training})
    arguments = ["--config", file, "--set", "logging.name=run"]
    with fork_server().start(arguments, tmp_path, environment()) as run:
        metrics, deadline = tmp_path / "runs" / "run" / "metrics.jsonl", time.monotonic() + 60
        while not (metrics.exists() and '"train"' in metrics.read_text()):
            assert time.monotonic() < deadline, run.output.read_text()
            select.select([], [], [], 0.05)
        workers = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(90) == 3, run.output.read_text()
    assert "Traceback" not in run.output.read_text()
    assert json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())["status"] == "interrupted"
    assert len(workers) >= 3
    wait_until_ended(workers)


UNGUARDED = """
from loader_tasks import Noisy
from tasks import ReferenceTask
import paramserver

class Own(ReferenceTask):
    def train_source(self, partition):
        return Images(super().train_source(partition))

class Images(list):
    pass

paramserver.run(Own, {{"mode": "local", "training": {{"max_steps": 2, "loader_workers": 1}},
    "logging": {{"run_dir": {folder!r}, "tensorboard": False, "progress": "off"}}}})
"""


def test_a_script_that_starts_a_run_when_it_is_imported_is_an_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.format(folder=str(tmp_path)))
    done = subprocess.run(
        [sys.executable, script], env=environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode != 0
    assert 'put the call under if __name__ == "__main__":' in done.stderr
    assert "the process that reads its data set" in done.stderr
