"""Ranks of ddp that die, freeze or hold the interpreter's lock: who is named, how soon, and how a run goes on.

Most ranks here have no supervisor, so what they notice they notice themselves.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from launching import (
    TASKS,
    FinishedRun,
    assert_equal_runs,
    environment,
    fork_server,
    free_port,
    launch,
    write_config,
)

from paramserver.trainers.ddp_control import UNWIND_S

pytestmark = pytest.mark.processes

FAULTS = TASKS.with_name("ddp_fault_tasks.py")
LOST_AFTER_S = 1.5
# In addition to the limits themselves: for starting the end of a process on a busy machine.
MARGIN_S = 2.0
# None: the process was ended by another thread than the one that reports its exit code to the test.
ENDED = (1, None)
SILENT = f"it gave no sign of life for server.lost_after_s ({LOST_AFTER_S:g} s)"


@contextmanager
def ranks(folder, trainers, task="MarksItsStart", **task_args):
    """The ranks of a ddp run in one process each, without a supervisor."""
    file = write_config(
        folder,
        mode="ddp",
        task=f"{FAULTS}:{task}",
        task_args=task_args or {"folder": str(folder)},
        cluster={"num_trainers": trainers, "timeout_s": 60},
        server={"lost_after_s": LOST_AFTER_S},
        training={"max_steps": 1_000_000, "validate_every": 5},
        checkpoint={"every": 3},
    )
    port = free_port()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                fork_server().start(
                    [
                        *("--config", file, "--set", "logging.name=run", "--rank", rank),
                        *("--world_size", trainers, "--master_port", port),
                    ],
                    folder,
                    environment(),
                )
            )
            for rank in range(trainers)
        ]


def await_file(path, timeout_s=40.0):
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} is missing after {timeout_s} s"
        time.sleep(0.01)


def last_line(run):
    return run.output.read_text().rstrip().splitlines()[-1]


def check_survivors(started, victim, within_s, why):
    """Each of them ends within that time, with code 1 and one sentence that names the victim."""
    began = time.monotonic()
    for rank, run in enumerate(started):
        if rank != victim:
            assert run.wait(60) in ENDED
            assert time.monotonic() - began < within_s, (rank, run.output.read_text()[-2000:])
            assert last_line(run).startswith(f"error: rank {victim} is lost: {why}"), last_line(run)


def fault_at_a_random_instant(folder, seed, trainers, number):
    """Send a signal to a random rank at a random instant: while it joins, trains, validates or saves."""
    draw = random.Random(seed)
    victim, delay_s = draw.randrange(trainers), draw.uniform(0.0, 2.0)
    with ranks(folder, trainers) as started:
        for rank in range(trainers):
            await_file(folder / f"ready-{rank}")
        time.sleep(delay_s)  # the instant; not a wait for something
        os.kill(started[victim].pid, number)
        if number == signal.SIGKILL:
            check_survivors(started, victim, UNWIND_S + MARGIN_S, "its connection was closed")
            return
        check_survivors(started, victim, LOST_AFTER_S + UNWIND_S + MARGIN_S, SILENT)
        os.kill(started[victim].pid, signal.SIGCONT)
        assert started[victim].wait(UNWIND_S + MARGIN_S) in ENDED
        ended = f"error: the other ranks ended the run without this one, rank {victim}: "
        assert last_line(started[victim]).startswith(ended), started[victim].output.read_text()[-2000:]
        assert "Traceback" not in last_line(started[victim])


@pytest.mark.parametrize(("seed", "trainers"), [(1, 3), (2, 2), (3, 3), (4, 2), (5, 3)])
def test_a_rank_that_freezes_at_any_instant_is_named_by_all_others_and_finds_out(tmp_path, seed, trainers):
    fault_at_a_random_instant(tmp_path, seed, trainers, signal.SIGSTOP)


@pytest.mark.parametrize(("seed", "trainers"), [(6, 3), (7, 3), (8, 2)])
def test_a_rank_that_is_killed_at_any_instant_is_named_by_all_others_at_once(tmp_path, seed, trainers):
    fault_at_a_random_instant(tmp_path, seed, trainers, signal.SIGKILL)


@pytest.mark.nightly  # it is as silent as one that freezes, and test_watchdog.py has one in ddp
def test_a_rank_that_holds_the_interpreter_is_named_and_finds_out(tmp_path):
    mark = tmp_path / "mark"
    with ranks(tmp_path, 3, "FaultAtBatch", mark=str(mark), fault="hold_interpreter") as started:
        await_file(mark)
        check_survivors(started, 1, LOST_AFTER_S + MARGIN_S, SILENT)
        assert started[1].wait(30) in ENDED
        assert last_line(started[1]).startswith("error: the other ranks ended the run without this one, rank 1: ")


def test_a_rank_that_computes_for_long_ends_soon_after_a_loss(tmp_path):
    finished = launch(
        tmp_path,
        mode="ddp",
        task=f"{FAULTS}:ComputesForLong",
        task_args={"folder": str(tmp_path)},
        cluster={"num_trainers": 2, "max_restarts": 0},
        server={"lost_after_s": 30.0},  # the supervisor ends what is left after so long
    )
    ended_s = time.time() - (tmp_path / "killed").stat().st_mtime
    assert ended_s < UNWIND_S + MARGIN_S
    assert finished.code == 1
    assert "error: rank 1 (trainer 1): killed by SIGKILL" in finished.output
    assert "the main thread of this process waits or computes" in finished.log(0)
    assert "PeerLost: rank 1 is lost: its connection was closed" in finished.log(0)
    assert finished.summary["status"] == "failed"
    assert finished.summary["error"].startswith("PeerLost: rank 1 is lost: ")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_supervisor_starts_all_ranks_again(tmp_path, number):
    whole = launch(tmp_path / "whole", task="ReferenceTask", **settings("ddp", "run"))
    folder = tmp_path / "faulty"
    options = settings("ddp", "run")
    options["server"] = {"lost_after_s": LOST_AFTER_S}
    fault = {"mark": str(folder / "mark"), "fault": signal.Signals(number).name.lower(), "batch": 17}
    finished = launch(folder, task=f"{FAULTS}:FaultAtBatch", task_args=fault, **options)
    assert (folder / "mark").exists()
    assert finished.code == 0, finished.output
    assert [record["step"] for record in everything(finished.run_dir, "start")] == [0, 14]
    assert "all ranks start again, from the last checkpoint if there is one (1 of 3)" in finished.output
    assert re.findall(r"^status +(\w+)", finished.output, re.MULTILINE) == ["completed"]
    assert_equal_runs(whole, finished, trainers=2)


def torchrun(folder, name, mode, mark, batch, *flags):
    """A run of two trainers under torchrun, with a server in rpc, in which trainer 1 is killed once."""
    config = write_config(
        folder,
        task=f"{FAULTS}:FaultAtBatch",
        task_args={"mark": str(mark), "fault": "sigkill", "batch": batch},
        **settings(mode, name),
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "2"),
            *("--nproc-per-node", "2" if mode == "ddp" else "3"),
            *("-m", "paramserver.launch", "--config", str(config), *flags),
        ],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=folder,
        timeout=150,
        check=False,
    )
    return FinishedRun(done.returncode, done.stdout + done.stderr, folder / "runs" / name)


def settings(mode, name):
    return {
        "mode": mode,
        "cluster": {"num_trainers": 2, "timeout_s": 30},
        # Ranks that are killed are noticed at once; on a busy machine others may be silent for some seconds.
        "server": {"on_loss": "fail", "lost_after_s": 30} if mode == "rpc" else {"lost_after_s": 30},
        "training": {"max_steps": 30, "validate_every": 10},
        "checkpoint": {"every": 7, "background": False},
        "logging": {"name": name},
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mode", "batch", "begins_at"), [("rpc", 17, 14), ("ddp", 17, 14), ("ddp", 3, 0)])
def test_torchrun_restarts_the_ranks_and_they_continue_the_run(tmp_path, mode, batch, begins_at):
    """From the last checkpoint; from its beginning where there is none yet. It ends as if nothing had happened."""
    whole = launch(tmp_path / "whole", task="ReferenceTask", **settings(mode, "run"))
    assert whole.code == 0, whole.output
    finished = torchrun(tmp_path, "run", mode, tmp_path / "mark", batch)
    assert (tmp_path / "mark").exists()
    assert finished.code == 0, finished.output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]
    starts = [(record["step"], record["resumed"]) for record in everything(finished.run_dir, "start")]
    assert starts == [(0, False), (begins_at, begins_at > 0)], finished.output
    assert_equal_runs(whole, finished, trainers=2)


@pytest.mark.nightly
def test_torchrun_that_resumes_a_checkpoint_continues_from_the_newest_after_a_loss(tmp_path):
    mark = tmp_path / "mark"
    mark.touch()  # no fault yet
    first = torchrun(tmp_path, "run", "rpc", mark, 24, "--set", "training.max_steps=14")
    assert first.code == 0, first.output
    mark.unlink()
    chosen = first.run_dir / "checkpoints" / "step-00000007"
    flags = ("--resume", str(chosen), "--set", "training.max_steps=30")
    finished = torchrun(tmp_path, "run", "rpc", mark, 24, *flags)
    assert mark.exists()
    assert finished.code == 0, finished.output
    starts = [(record["step"], record["resumed"]) for record in everything(finished.run_dir, "start")]
    assert starts == [(0, False), (7, True), (21, True)], finished.output
    assert finished.summary["updates_redone"] == 3


def everything(run_dir, kind):
    """Records of this kind, those that another attempt superseded first."""
    files = [run_dir / "metrics.superseded.jsonl", run_dir / "metrics.jsonl"]
    lines = [line for file in files if file.exists() for line in Path(file).read_text().splitlines()]
    return sorted((r for r in map(json.loads, lines) if r["kind"] == kind), key=lambda record: record["time"])
