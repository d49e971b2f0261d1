"""Faults that the supervisor alone must notice, and faults of the supervisor. Each task writes a mark when it fires."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from launching import FinishedRun, launch, run_concurrently, write_config
from process_states import is_alive
from supervised_tasks import ranks_of

from paramserver.config.deadlines import START_GRACE_S

pytestmark = pytest.mark.processes

HELPERS = Path(__file__).parents[1] / "helpers"
TASKS = HELPERS / "supervised_tasks.py"
LOST_AFTER_S = 1.0
SERVER = {"lost_after_s": LOST_AFTER_S}
LAST_RANK_ENDS_S = LOST_AFTER_S + 10.0  # limit of the supervisor for ranks that remain after the summary


def supervised(folder, task, servers=1, max_restarts=0, **task_args):
    """A run of a few steps in which a fault fires, and whose ranks do not start again unless told."""
    mark = folder / "mark"
    finished = launch(
        folder,
        mode="rpc",
        task=f"{TASKS}:{task}",
        task_args={"mark": str(mark), **task_args},
        cluster={"num_trainers": 2, "num_servers": servers, "timeout_s": 30, "max_restarts": max_restarts},
        server={**SERVER, "on_loss": "fail"},
        training={"max_steps": 20},
        timeout_s=150,
    )
    assert mark.exists(), finished.output
    return finished


def last_error(finished):
    return finished.output.rpartition("error: ")[2].splitlines()[0]


def assert_completed_with_warning(finished, rank, how):
    """Exit code and summary agree, and the last line names the rank that was lost after the end."""
    assert finished.code == 0, finished.output
    assert finished.summary["status"] == "completed"
    warnings = [line for line in finished.output.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1, finished.output
    assert f"the run is completed, but {rank} failed after its end: {how}" in warnings[0]
    assert "Traceback" not in finished.output
    assert finished.output.count("completed") >= 2, "the closing summary was printed too"


def test_rank_0_that_is_lost_once_the_summary_is_stored_leaves_a_completed_run(tmp_path):
    """Stopped: the supervisor waited for ever. Killed: the exit code was 1 beside status completed."""
    stopped, killed, killed_later = run_concurrently(
        lambda: supervised(tmp_path / "stopped", "SignalsRank0", when="before_record", number=int(signal.SIGSTOP)),
        lambda: supervised(tmp_path / "killed", "SignalsRank0", when="before_record", number=int(signal.SIGKILL)),
        lambda: supervised(tmp_path / "later", "SignalsRank0", when="after_record", number=int(signal.SIGKILL)),
    )
    assert_completed_with_warning(stopped, "rank 0 (server 0)", "did not react and was ended by SIGKILL")
    assert_completed_with_warning(killed, "rank 0 (server 0)", "killed by SIGKILL")
    assert_completed_with_warning(killed_later, "rank 0 (server 0)", "killed by SIGKILL")


def test_rank_0_that_stops_after_the_trainers_have_ended_fails_the_run(tmp_path):
    finished = supervised(tmp_path, "SignalsRank0", when="before_summary", number=int(signal.SIGSTOP))
    assert finished.code == 1, finished.output
    assert "rank 0 (server 0): did not react and was ended by SIGKILL" in last_error(finished)
    assert finished.summary["status"] == "failed"


def test_rank_0_that_dies_at_the_end_of_an_interrupted_run_leaves_what_it_stored(tmp_path):
    """It was started again, and waited for the trainers until its deadline."""

    def interrupted(when):
        task_args = {"when": when, "number": int(signal.SIGSEGV), "interrupted_at": 5}
        return supervised(tmp_path / when, "SignalsRank0", max_restarts=3, **task_args)

    moments = ("before_summary", "before_record", "after_record")
    for finished in run_concurrently(*(partial(interrupted, when) for when in moments)):
        assert finished.code == 3, finished.output
        assert finished.summary["status"] == "interrupted"
        if (latest := finished.run_dir / "checkpoints" / "latest").exists():
            saved = f"the last checkpoint is {latest.read_text().strip()}; resume with: "
        else:
            assert not finished.summary.get("steps"), "its summary was stored, and so was its checkpoint"
            saved = "nothing was saved yet"
        assert saved in finished.output.splitlines()[-1]
        assert "rank 0 (server 0)" in finished.output
        assert "killed by SIGSEGV" in finished.output
        log = finished.run_dir / "logs" / "rank-0.log"
        assert "Fatal Python error: Segmentation fault" in log.read_text()


def test_a_shard_server_that_stops_at_the_end_of_the_training_does_not_hold_the_run(tmp_path):
    finished = supervised(tmp_path, "StopsShardServer", servers=2)
    assert_completed_with_warning(finished, "rank 1 (server 1)", "did not react and was ended by SIGKILL")


def test_a_forked_child_neither_hides_the_death_of_its_rank_nor_outlives_it(tmp_path):
    began = time.monotonic()
    finished = supervised(tmp_path, "ForksAndDies")
    assert time.monotonic() - began < 25
    fired = json.loads((tmp_path / "mark").read_text())
    assert finished.code == 1
    assert "rank 2 (trainer 1): killed by SIGKILL" in last_error(finished)
    assert not psutil.pid_exists(fired["rank"])
    assert not is_alive(fired["child"])


# The supervisor itself.


def started(fork_server, folder, task, **config):
    file = write_config(
        folder,
        mode="rpc",
        task=f"{TASKS}:{task}" if task != "ReferenceTask" else task,
        cluster={"num_trainers": 2, "timeout_s": 60},
        server=SERVER,
        **config,
    )
    run = fork_server.start(["--config", file, "--set", "logging.name=run"], folder)
    return run, FinishedRun(0, "", folder / "runs" / "run")


def wait_until(condition, what, timeout_s=150):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} in {timeout_s} s"
        select.select([], [], [], 0.05)


@pytest.mark.parametrize("holds_interpreter", [False, True])
def test_ranks_end_after_the_death_of_their_supervisor_whatever_they_do(tmp_path, fork_server, holds_interpreter):
    """Also while one blocks in a hook, where SIGTERM ends nothing."""
    hooks = ["on_train_start", "on_batch_start", "on_validation_start", "on_checkpoint", "on_train_end"]
    with ExitStack() as stack:
        ends, folders = [], []
        for hook in hooks[3:] if holds_interpreter else hooks:
            folder = tmp_path / hook
            mark = folder / "mark"
            args = {"hook": hook, "mark": str(mark), "holds_interpreter": holds_interpreter}
            config = {"training": {"max_steps": 6, "validate_every": 3}, "checkpoint": {"every": 4}, "task_args": args}
            run, finished = started(fork_server, folder, "Blocks", **config)
            stack.enter_context(run)
            wait_until(mark.exists, f"nothing blocks in {hook}")
            processes = psutil.Process(run.pid).children(recursive=True)
            assert {0, 1} <= ranks_of(run.pid).keys()  # trainer 1 may have ended
            for process in processes:
                with suppress(ProcessLookupError):
                    ends.append(os.pidfd_open(process.pid))
                    stack.callback(os.close, ends[-1])
            os.kill(run.pid, signal.SIGKILL)
            folders.append(finished.run_dir)
        deadline = time.monotonic() + LAST_RANK_ENDS_S
        for end in ends:
            assert select.select([end], [], [], max(deadline - time.monotonic(), 0))[0], "a process is left"
        for folder in folders:
            assert not [path.name for path in folder.iterdir() if "launch" in path.name]


def test_a_supervisor_that_is_stopped_for_a_while_changes_nothing(tmp_path, fork_server):
    config = {"training": {"max_steps": None, "max_seconds": 3 * LOST_AFTER_S + 2}}
    run, finished = started(fork_server, tmp_path, "ReferenceTask", **config)
    with run:
        wait_until(lambda: "'train'" in str([r["kind"] for r in records(finished)]), "no step was made")
        os.kill(run.pid, signal.SIGSTOP)
        before = len(records(finished))
        select.select([], [], [], 3 * LOST_AFTER_S)  # as long as it is stopped
        during = len(records(finished))
        os.kill(run.pid, signal.SIGCONT)
        assert run.wait(60) == 0, run.output.read_text()
    assert during > before + 20, "the run went on"
    assert finished.summary["status"] == "completed"
    assert "warning" not in run.output.read_text()


def records(finished):
    file = finished.run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_a_rank_that_freezes_while_its_process_starts_is_ended_and_started_again(tmp_path):
    file = write_config(
        tmp_path,
        mode="rpc",
        task=f"{TASKS}:ReferenceTask",
        cluster={"num_trainers": 2, "timeout_s": 60},
        server=SERVER,
        training={"max_steps": 20},
    )
    command = [sys.executable, "-m", "paramserver.launch", "--config", str(file), "--set", "logging.name=run"]
    output, frozen = tmp_path / "output", tmp_path / "frozen"
    folders = f"{HELPERS / 'freezes_at_start'}:{os.environ.get('PYTHONPATH', '')}"
    environ = {**os.environ, "PYTHONPATH": folders, "FROZEN": str(frozen)}
    with output.open("wb") as log, subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env=environ) as run:
        try:
            wait_until(lambda: 1 in ranks_of(run.pid), "rank 1 was not started")
            # Its replacement is a new interpreter, not a fork of one that has imported torch.
            ranks_of(run.pid)[1].kill()
            wait_until(frozen.exists, "the replacement did not stop")
            frozen_at = time.monotonic()
            wait_until(lambda: "it is ended" in output.read_text(), "the frozen rank was not ended")
            assert time.monotonic() - frozen_at < LOST_AFTER_S + START_GRACE_S + 3.0
            assert run.wait(60) == 0, output.read_text()
        finally:
            run.kill()
    assert "rank 1 (trainer 0) did nothing for 6 s while it started; it is ended" in output.read_text()
    assert "rank 1 (trainer 0) is lost (killed by SIGKILL); it starts again in 1 s (2 of 3)" in output.read_text()
