"""A hook that never returns does not keep a run from ending after a signal; nothing that is applied is lost."""

import os
import re
import select
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from launching import (
    SIGNAL_TASKS,
    FinishedRun,
    command,
    environment,
    ranks_without_supervisor,
    resume,
    write_config,
)

from paramserver.config.deadlines import GRACE_S, SAME_SIGNAL_S
from paramserver.distributed.timeouts import poll_until

pytestmark = pytest.mark.processes

# A limit that is short and that no healthy step of a busy machine needs.
LIMIT_S = 3.0


def written(path):
    assert poll_until(time.monotonic() + 60, lambda: path.exists() or None, threading.Event()), f"no {path}"
    return path


def config_of(folder, mode, trainers=(0,), every=0, **task_args):
    return {
        "mode": mode,
        "task": f"{SIGNAL_TASKS}:NeverReturns",
        "task_args": {"marks": str(folder), "trainers": list(trainers), "dropout": 0.0, **task_args},
        "cluster": {"num_trainers": 2, "timeout_s": 60, "stop_within_s": LIMIT_S},
        "training": {
            "max_steps": None,
            "max_epochs": 1,
            "batch_size": 8,
            "validate_every": every,
            "uneven_inputs": "join",
        },
        "checkpoint": {"every": every},
    }


@contextmanager
def started(fork_server, folder, **config):
    """In local the process ends in a way that the fork server does not know, so it is a process of its own."""
    arguments = ["--config", write_config(folder, **config), "--set", "logging.name=run"]
    if config["mode"] != "local":
        with fork_server.start(arguments, folder) as run:
            yield run
        return
    with (folder / "output").open("wb") as output:
        run = subprocess.Popen(command(*arguments), stdout=output, stderr=output, env=environment(), cwd=folder)
    run.output = folder / "output"
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def interrupted(fork_server, folder, mode, number=signal.SIGTERM, trainers=(0,), **task_args):
    """A run whose trainers block in a hook, and which gets a signal then."""
    with started(fork_server, folder, **config_of(folder, mode, trainers, **task_args)) as run:
        for trainer in trainers:
            written(folder / f"blocks-{trainer}")
        os.kill(run.pid, number)
        code = run.wait(60)
    finished = FinishedRun(code, run.output.read_text(), folder / "runs" / "run")
    assert code == 3, finished.output
    assert finished.summary["status"] == "interrupted"
    return finished


def assert_names(finished, rank, hook, log=None):
    last = finished.output.rstrip().splitlines()[-1]
    assert re.search(rf"rank {rank}\b.* did not return from {hook} \(\S+signal_tasks.py, line \d+\)", last), last
    assert f"cluster.stop_within_s ({LIMIT_S:g} s)" in last
    stacks = finished.log(rank).partition("most recent call first")[2]
    assert f"in {hook}" in stacks


def resumed(finished, folder):
    (folder / "returns").touch()
    done = resume(finished)
    assert done.code == 0, done.output
    return done


@pytest.mark.claim("stuck-hook")
@pytest.mark.parametrize(("trainers", "how"), [((1,), "lock"), ((0, 1), "lock"), ((0,), "call")])
def test_server_0_saves_what_is_applied(tmp_path, fork_server, trainers, how):
    finished = interrupted(fork_server, tmp_path, "rpc", trainers=trainers, how=how)
    for trainer in trainers:
        assert_names(finished, 1 + trainer, "training_step")
    # Without the one that blocks, the others make the step that they were in.
    steps = 4 if len(trainers) == 2 else 5
    assert finished.checkpoints == [f"step-{steps:08d}"]
    assert resumed(finished, tmp_path).summary["samples"] == 256


@pytest.mark.claim("stuck-hook")
@pytest.mark.parametrize("on_loss", ["rollback", "fail"])
def test_no_update_is_made_again_whatever_follows_a_loss(tmp_path, fork_server, on_loss):
    config = config_of(tmp_path, "rpc") | {"server": {"on_loss": on_loss}}
    with started(fork_server, tmp_path, **config) as run:
        written(tmp_path / "blocks-0")
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(60) == 3, run.output.read_text()
    finished = FinishedRun(3, run.output.read_text(), tmp_path / "runs" / "run")
    assert finished.checkpoints == ["step-00000005"]
    assert resumed(finished, tmp_path).summary["samples"] == 256


@pytest.mark.claim("stuck-hook")
def test_a_rank_that_holds_the_interpreter_is_named(tmp_path, fork_server):
    finished = interrupted(fork_server, tmp_path, "rpc", how="interpreter")
    assert finished.checkpoints == ["step-00000005"]
    assert "in training_step" in finished.log(1)


@pytest.mark.nightly
@pytest.mark.claim("stuck-hook")
@pytest.mark.parametrize("hook", ["validation_step", "on_checkpoint"])
def test_other_hooks(tmp_path, fork_server, hook):
    finished = interrupted(fork_server, tmp_path, "rpc", hook=hook, count=1, every=4)
    assert_names(finished, 1, hook)
    assert finished.checkpoints


@pytest.mark.claim("stuck-hook")
@pytest.mark.parametrize(("mode", "trainers", "count"), [("local", (0,), 6), ("rpc", (0, 1), 4)])
def test_a_step_is_not_saved_without_its_validation(tmp_path, fork_server, mode, trainers, count):
    """A resumed run would not make it: it makes the steps again, and validates."""
    finished = interrupted(fork_server, tmp_path, mode, trainers=trainers, hook="validation_step", count=count, every=4)
    assert finished.checkpoints == ["step-00000004"]
    assert "after step 8; the last checkpoint is step-00000004" in finished.output.splitlines()[-1]
    validations = resumed(finished, tmp_path).of_kind("validation")
    assert [record["step"] for record in validations] == list(range(4, 33 if mode == "local" else 17, 4))


@pytest.mark.claim("stuck-hook")
@pytest.mark.parametrize(("rank", "servers"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("how", ["lock", "call"])
def test_a_step_of_the_optimizer_ends_at_the_limit_and_names_its_server(tmp_path, fork_server, rank, servers, how):
    config = config_of(tmp_path, "rpc", (-1,), every=2, hook="step", count=4, owns=-rank, how=how)
    config["cluster"] |= {"num_servers": servers}
    with started(fork_server, tmp_path, **config) as run:
        written(tmp_path / "blocks--1")
        signalled_at = time.monotonic()
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(60) == 3, run.output.read_text()
        took_s = time.monotonic() - signalled_at
    finished = FinishedRun(3, run.output.read_text(), tmp_path / "runs" / "run")
    assert_names(finished, rank, "step")
    assert "the last checkpoint is step-00000002" in finished.output.splitlines()[-1]
    assert finished.summary["status"] == "interrupted"
    assert took_s < LIMIT_S + GRACE_S
    assert resumed(finished, tmp_path).summary["samples"] == 256


@pytest.mark.sampled(2)
@pytest.mark.claim("stuck-hook")
@pytest.mark.parametrize("how", ["lock", "call"])
def test_local_saves_in_another_thread(tmp_path, fork_server, how):
    finished = interrupted(fork_server, tmp_path / "stuck", "local", number=signal.SIGUSR1, how=how)
    assert_names(finished, 0, "training_step")
    assert finished.checkpoints == ["step-00000004"]
    done = resumed(finished, tmp_path / "stuck")
    assert done.summary["samples"] == 256


@pytest.mark.sampled(3)
@pytest.mark.claim("stuck-hook")
@pytest.mark.parametrize(("hook", "count"), [("state_dict", 3), ("get_extra_state", 3), ("write", 4)])
def test_local_ends_where_what_it_would_save_waits_for_the_hook(tmp_path, fork_server, hook, count):
    """In the state of an optimizer or of a module, and in a sink, the hook of the user has locks of the run."""
    config = config_of(tmp_path, "local", hook=hook, count=count, every=2)
    config["logging"] = {"sinks": [f"{SIGNAL_TASKS}:Records"]}
    with started(fork_server, tmp_path, **config) as run:
        written(tmp_path / "blocks-0")
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(60) == 3, run.output.read_text()
    finished = FinishedRun(3, run.output.read_text(), tmp_path / "runs" / "run")
    assert_names(finished, 0, hook)
    assert "the last checkpoint is step-0000000" in finished.output.splitlines()[-1]
    assert resumed(finished, tmp_path).summary["samples"] == 256


@pytest.mark.claim("stuck-hook")
@pytest.mark.parametrize(("rank", "how"), [(0, "lock"), (1, "lock"), (1, "call")])
def test_ddp_names_the_rank(tmp_path, fork_server, rank, how):
    finished = interrupted(fork_server, tmp_path, "ddp", trainers=(rank,), how=how)
    assert_names(finished, rank, "training_step")
    assert "nothing was saved yet" in finished.output.splitlines()[-1]


@pytest.mark.claim("stuck-hook")
@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_a_signal_to_one_of_the_ranks_by_hand(tmp_path, mode):
    """Rank 0 alone gets it; the rank that blocks ends too, and names itself."""
    world, blocks = (3, 1) if mode == "rpc" else (2, 1)
    config = config_of(tmp_path, mode, (0 if mode == "rpc" else 1,))
    with ranks_without_supervisor(tmp_path, world, **config) as ranks:
        written(tmp_path / ("blocks-0" if mode == "rpc" else "blocks-1"))
        os.kill(ranks[0].pid, signal.SIGTERM)
        codes = [rank.wait(60) for rank in ranks]
    outputs = [rank.output.read_text() for rank in ranks]
    # The rank that blocks ends in another thread, so the process that forked it does not know its code.
    assert (codes[0], codes[blocks]) == (3, None), outputs
    for output in (outputs[0], outputs[blocks]):
        assert re.search(rf"rank {blocks}\b.* did not return from training_step", output.splitlines()[-1]), output


@pytest.mark.claim("second-signal")
@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_a_second_signal_ends_at_once_what_does_not_react(tmp_path, fork_server, mode):
    config = config_of(tmp_path, mode)
    config["cluster"] |= {"stop_within_s": 1000.0}
    with started(fork_server, tmp_path, **config) as run:
        written(tmp_path / "blocks-0")
        os.kill(run.pid, signal.SIGTERM)
        select.select([], [], [], SAME_SIGNAL_S + 0.5)  # one that comes sooner is taken for the same one
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(60) == 3, run.output.read_text()
    output = run.output.read_text()
    if mode != "ddp":
        assert "its checkpoint is written" in output
    assert "did not return from training_step" in output.splitlines()[-1]
    assert "before a second signal" in output.splitlines()[-1]
    assert f"signal SIGTERM{' again: this process' if mode == 'local' else ': the run'} ends now" in output
    last_lines = [line for line in output.splitlines() if "interrupted" in line]
    assert not any("within cluster.stop_within_s" in line for line in last_lines), output


@pytest.mark.claim("early-interrupt", "interrupt-line")
@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_an_interrupt_before_training_is_acknowledged_at_once(tmp_path, fork_server, mode):
    config = config_of(tmp_path, mode, (-1, 0), hook="build_model", count=1)
    config["cluster"] |= {"stop_within_s": 1000.0}
    with started(fork_server, tmp_path, **config) as run:
        marks = [tmp_path / "blocks-0", tmp_path / "blocks--1"]
        assert poll_until(time.monotonic() + 60, lambda: any(map(Path.exists, marks)) or None, threading.Event())
        os.kill(run.pid, signal.SIGINT)
        line = "signal SIGINT: this process ends once" if mode == "local" else "signal SIGINT: the run ends once"
        told = lambda: line in run.output.read_text() or None  # noqa: E731
        assert poll_until(time.monotonic() + 30, told, threading.Event()), run.output.read_text()
        os.kill(run.pid, signal.SIGINT)
        assert run.wait(60) == 1
    if mode == "local":
        assert run.output.read_text().count("signal SIGINT again: this process ends at once") == 1
    assert "error:\n" not in run.output.read_text()
