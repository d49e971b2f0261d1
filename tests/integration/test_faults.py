"""Injected faults: which process reports what, how soon, and what is kept. Each fault writes a mark when it fires."""

import json
import os
import re
import signal
import subprocess
import time
from functools import partial

import psutil
import pytest
from launching import (
    SIGNAL_TASKS,
    FinishedRun,
    command,
    environment,
    fork_server,
    launch,
    ranks_without_supervisor,
    run_concurrently,
    run_in_process,
    write_config,
)

from paramserver.errors import PeerLost
from paramserver.trainers.ddp_control import translate_peer_loss

pytestmark = pytest.mark.processes

# A lost process ends the run.
QUICK = {
    "server": {"lost_after_s": 2.0, "on_loss": "fail"},
    "checkpoint": {"every": 3, "background": False},
}
CLUSTER = {"num_trainers": 2, "timeout_s": 30, "max_restarts": 0}


def faulty(tmp_path, mode, what, trainer=1, **config):
    """The run, and the seconds from its fault to its end."""
    mark = tmp_path / "mark"
    start = run_in_process if mode == "local" else launch
    finished = start(
        tmp_path,
        mode=mode,
        task="FaultyTask",
        task_args={"what": what, "mark": str(mark), "trainer": trainer},
        cluster={**CLUSTER, "timeout_s": 6} if mode == "ddp" else CLUSTER,
        training={"max_steps": 2000},
        **QUICK,
        **config,
    )
    fired = json.loads(mark.read_text())
    assert fired["what"] == what
    assert mode == "local" or not psutil.pid_exists(fired["pid"])
    return finished, time.time() - mark.stat().st_mtime


def last_error(finished):
    """The error that is printed last; the indented end of a dead rank's log may follow it."""
    _, error, text = finished.output.rpartition("error: ")
    assert error
    first, *lines = text.rstrip().splitlines()
    assert all(line.startswith("    ") for line in lines)
    return first


def frozen(folder, task, **task_args):
    """A run in which one process is stopped; the others detect that, and the supervisor ends it."""
    mark = folder / "mark"
    finished = launch(
        folder,
        mode="rpc",
        task=task,
        task_args={"mark": str(mark), **task_args},
        cluster=CLUSTER,
        training={"max_steps": 2000},
        **QUICK,  # without background: a server that is stopped writes nothing more
    )
    assert mark.exists()
    assert finished.code == 1, finished.output
    return finished


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_a_trainer_that_is_killed_ends_the_run_within_seconds(tmp_path, mode):
    finished, elapsed_s = faulty(tmp_path, mode, "kill")
    rank = 2 if mode == "rpc" else 1
    assert finished.code == 1
    assert f"rank {rank} (trainer 1): killed by SIGKILL" in last_error(finished)
    assert finished.summary["status"] == "failed"
    assert finished.checkpoints == ["step-00000003"]
    assert elapsed_s < 25


def one_by_one(folder, task, **task_args):
    """The server and two trainers, each started by itself."""
    return ranks_without_supervisor(
        folder,
        3,
        mode="rpc",
        task=task,
        task_args={"mark": str(folder / "mark"), **task_args},
        cluster=CLUSTER,
        training={"max_steps": 2000},
        **QUICK,
    )


def test_a_frozen_trainer_is_detected_by_its_heartbeats(tmp_path):
    with one_by_one(tmp_path, "FaultyTask", what="freeze", trainer=1) as (server, survivor, _):
        await_file(tmp_path / "mark")
        assert [one.wait(60) for one in (server, survivor)] == [1, 1]
        for output in (server.output.read_text(), survivor.output.read_text()):
            assert "trainer 1" in output
            assert "is lost: no heartbeat for server.lost_after_s (2 s)" in output
    assert FinishedRun(1, "", tmp_path / "runs" / "run").summary["status"] == "failed"


def test_a_frozen_server_is_detected_by_the_trainers(tmp_path):
    """It is stopped in its schedule, which runs in the process of the optimizer."""
    with one_by_one(tmp_path, "KillsItsServer", number=int(signal.SIGSTOP)) as (_, *trainers):
        await_file(tmp_path / "mark")
        assert [trainer.wait(60) for trainer in trainers] == [1, 1]
        for trainer in trainers:
            assert "the server is lost: it did not answer" in trainer.output.read_text()


def test_a_supervisor_ends_a_run_with_a_frozen_process(tmp_path):
    """The supervisor and the other ranks notice it at about the same time; the first of them names it."""
    trainer, server = run_concurrently(
        lambda: frozen(tmp_path / "trainer", "FaultyTask", what="freeze", trainer=1),
        lambda: frozen(tmp_path / "server", "KillsItsServer", number=int(signal.SIGSTOP)),
    )
    fired = json.loads((tmp_path / "trainer" / "mark").read_text())
    assert not psutil.pid_exists(fired["pid"])
    for rank, output in (("rank 2 (trainer 1)", trainer.output), ("rank 0 (server 0)", server.output)):
        silent = f"{rank} gave no sign of life for server.lost_after_s (2 s); it is ended"
        assert any(text in output for text in (silent, "no heartbeat for server.lost_after_s", "it did not answer"))
    assert trainer.summary["status"] == "failed"
    for output in (trainer.output, server.output):
        assert "Traceback" not in output
        assert last_error(FinishedRun(1, output, tmp_path)).startswith("rank ")
    assert server.summary["checkpoint"] == "step-00000003"


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("[/a/gloo/tcp/buffer.cc:78] Timed out waiting 6000ms for recv\nmore", "Timed out waiting 6000ms for recv"),
        ("Application timeout caused pair closure", "Application timeout caused pair closure"),
    ],
)
def test_an_error_of_gloo_about_a_lost_peer_becomes_one_sentence(message, sentence):
    match = f"^another rank of the process group is lost: {sentence}$"
    with pytest.raises(PeerLost, match=match), translate_peer_loss():
        raise RuntimeError(message)


@pytest.mark.parametrize(("mode", "trainer"), [("rpc", 1), ("ddp", 0), ("local", 0)])
def test_an_error_in_the_task_is_the_last_thing_printed(tmp_path, mode, trainer):
    finished, _ = faulty(tmp_path, mode, "error", trainer=trainer)
    assert finished.code == 1
    assert "Traceback (most recent call last)" in finished.output
    assert finished.output.rstrip().splitlines()[-1] == "RuntimeError: the task raised on purpose"
    if mode != "local":
        rank = trainer + (mode == "rpc")
        assert f"error: rank {rank} (trainer {trainer}): RuntimeError: the task raised on purpose" in finished.output
    assert "the task raised on purpose" in finished.summary["error"] or mode == "ddp"


@pytest.mark.parametrize(("mode", "trainer"), [("rpc", 1), ("ddp", 1), ("local", 0)])
def test_a_loss_that_is_nan_stops_before_it_is_applied(tmp_path, mode, trainer):
    finished, _ = faulty(tmp_path, mode, "nan", trainer=trainer)
    assert finished.code == 1
    assert f"training_step, trainer {trainer}, batch 5: the loss is nan" in finished.output
    assert finished.checkpoints == ["step-00000003"]
    assert all(tensor.isfinite().all() for tensor in finished.load("model").values())


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_a_source_that_raises_is_named_with_its_sample(tmp_path, mode):
    finished = launch(
        tmp_path,
        mode=mode,
        task="BadSource",
        cluster={"num_trainers": 2, "timeout_s": 8},
        training={"max_steps": None},
        **QUICK,
    )
    assert finished.code == 1
    assert "the source raised at sample 50: OSError: the disk is gone" in finished.output
    assert "Traceback" in finished.output


def test_a_server_that_is_killed_ends_its_trainers(tmp_path):
    """The task's build_optimizer runs on the server: its scheduler kills it after five steps."""
    finished = launch(
        tmp_path,
        mode="rpc",
        task="KillsItsServer",
        task_args={"mark": str(tmp_path / "mark")},
        cluster=CLUSTER,
        training={"max_steps": 2000},
        **QUICK,
    )
    assert (tmp_path / "mark").exists()
    assert finished.code == 1
    assert "rank 0 (server 0): killed by SIGKILL" in last_error(finished)
    assert finished.summary["status"] == "failed"
    assert "the server is lost" in finished.log(1)


def started(folder, **config):
    """A run in its own process group, as a shell starts it."""
    file = write_config(folder, mode="rpc", logging={"name": "run"}, training={"max_steps": 100000}, **config)
    run = subprocess.Popen(
        command("--config", file), stderr=subprocess.PIPE, text=True, env=environment(), cwd=folder, process_group=0
    )
    return run, FinishedRun(0, "", folder / "runs" / "run")


def await_file(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.05)


@pytest.mark.parametrize("later_s", [0.0, 1.0])
def test_an_interrupt_while_ranks_start_is_an_interruption(tmp_path, later_s):
    run, finished = started(tmp_path)
    await_file(finished.run_dir / "logs" / "rank-2.log")
    time.sleep(later_s)  # when the signal comes is what is tested
    os.killpg(run.pid, signal.SIGINT)
    _, output = run.communicate(timeout=150)
    assert run.returncode == 3, output
    assert "interrupted" in output.splitlines()[-1]
    assert finished.summary["status"] == "interrupted"


def test_a_signal_to_one_rank_that_starts_ends_the_run(tmp_path):
    """The others waited for it until ``cluster.timeout_s``, or were killed and started again."""

    def signalled(mode, rank):
        folder = tmp_path / f"{mode}-{rank}"
        return launch(
            folder,
            mode=mode,
            task=f"{SIGNAL_TASKS}:SignalledAtItsStart",
            task_args={"rank": rank, "mark": str(folder / "mark")},
            cluster={"num_trainers": 2, "timeout_s": 30},
            training={"max_steps": 20},
        )

    for finished in run_concurrently(*(partial(signalled, mode, rank) for mode in ("rpc", "ddp") for rank in (0, 1))):
        assert finished.code == 3, finished.output
        assert finished.summary["status"] == "interrupted"
        assert "starts again" not in finished.output


def test_a_second_interrupt_ends_the_run_at_once(tmp_path):
    steps = {"training": {"max_steps": 100000}, "checkpoint": {"every": 1}}
    file = write_config(tmp_path, mode="rpc", task="Slow", logging={"name": "run"}, **steps)
    with fork_server().start(["--config", file], tmp_path, environment()) as run:
        await_file(tmp_path / "runs" / "run" / "checkpoints" / "latest")
        for _ in range(2):
            os.killpg(run.pid, signal.SIGINT)
            time.sleep(0.3)
        code, output = run.wait(90), run.output.read_text()
    assert code == 1, output
    assert "interrupted twice (SIGINT)" in output.splitlines()[-1]
    assert "resume with: python -m paramserver.launch --resume" in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("mode", "task", "task_args", "message"),
    [
        ("rpc", "UnfreezesLayer", {}, "parameter frozen.weight was frozen when the run began"),
        ("ddp", "UnfreezesLayer", {}, "parameter frozen.weight was frozen when the run began"),
        ("ddp", "FreezesLayer", {}, "parameter first.weight was frozen after the start of the run, and gradients"),
        ("ddp", "BypassesWrapper", {"how": "unwrapped"}, "training_step did not call the model that it was given"),
        ("ddp", "BypassesWrapper", {"how": "no_grad"}, "training_step did not call the model that it was given"),
        ("ddp", "UsesPartsOfModel", {"how": "attribute"}, "training_step may only call the model"),
        ("ddp", "UsesPartsOfModel", {"how": "index"}, "training_step may only call the model"),
        ("ddp", "ReferenceTask", {"unused": True}, "set ddp.extra: {find_unused_parameters: true}, or use all"),
        ("rpc", "KeepsOptimizer", {}, "KeepsOptimizer has no attribute 'opt' in this process: in mode rpc build_opt"),
        ("ddp", "ChangesParameters", {}, "parameter last.bias of rank 1 differs from that of rank 0 after step 4;"),
    ],
)
def test_what_would_let_the_models_of_trainers_differ_is_refused(tmp_path, mode, task, task_args, message):
    cluster = {"num_trainers": 2, "timeout_s": 30}
    finished = launch(tmp_path, mode=mode, task=task, task_args=task_args, cluster=cluster, checkpoint={"every": 4})
    assert finished.code == (1 if task == "KeepsOptimizer" else 2)
    assert message in finished.output
    assert task == "KeepsOptimizer" or "Traceback" not in finished.output


@pytest.mark.sampled(2)
@pytest.mark.parametrize("section", [{"checkpoint": {"every": 1}}, {"training": {"validate_every": 1}}], ids=str)
def test_a_parameter_without_a_gradient_is_named_also_before_the_second_step(tmp_path, section):
    """The reduction that is not complete shows in the parameters first, which are compared after each step here."""
    cluster = {"num_trainers": 2, "timeout_s": 30}
    task = {"task": "ReferenceTask", "task_args": {"unused": True}}
    finished = launch(tmp_path, mode="ddp", cluster=cluster, **task, **section)
    assert finished.code == 2, finished.output
    assert "set ddp.extra: {find_unused_parameters: true}, or use all" in finished.output


@pytest.mark.parametrize(
    ("where", "message"),
    [("forward", "Cannot access storage of SparseTensorImpl"), ("backward", "`find_unused_parameters=False`")],
)
def test_an_error_of_the_task_is_not_explained_by_another_cause(tmp_path, where, message):
    cluster = {"num_trainers": 2, "timeout_s": 30}
    finished = launch(tmp_path, mode="ddp", task="RaisesErrorOfTorch", task_args={"where": where}, cluster=cluster)
    assert message in finished.output
    assert "a gradient is sparse" not in finished.output
    assert "set ddp.extra" not in finished.output


def test_parameters_are_compared_also_without_checkpoints(tmp_path):
    finished = launch(
        tmp_path,
        mode="ddp",
        task="ChangesParameters",
        task_args={"pace_s": 0.005, "collect_every_s": 0.1},
        training={"max_steps": None, "max_seconds": 60},
        cluster={"num_trainers": 2, "timeout_s": 30},
    )
    assert finished.code == 2
    assert re.search(r"parameter last.bias of rank 1 differs from that of rank 0 after step \d+;", finished.output)


def test_state_that_cannot_be_loaded_is_refused_when_it_is_saved(tmp_path):
    finished = run_in_process(tmp_path, mode="local", task="StoresTooMuch", checkpoint={"every": 3})
    assert finished.code == 2
    assert "StoresTooMuch.on_checkpoint stored what cannot be loaded again" in finished.output
