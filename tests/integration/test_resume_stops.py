"""A run that signals stop at arbitrary steps, and that is resumed each time, is the run that never stopped."""

import re
import shlex

import pytest
from launching import (
    SIGNAL_TASKS,
    FinishedRun,
    assert_equal_runs,
    fork_server,
    launch,
    resume,
    resume_in_process,
    run_in_process,
    write_config,
)

TASK = f"{SIGNAL_TASKS}:StopsBySignal"


def config_of(kind, source, samples=80):
    """Batches of four, two to a step, with dropout, a schedule, groups and clipping.

    One without a reservoir ends by patience, at step 9, one with it by its data, at step 10. The random buffers hold a
    trainer's whole pass before the first get, and know that it is whole: an iterable, which does not know how long it
    is, has ended only where the watermark lies above its length.
    """
    watermark = 0 if kind == "fifo" else samples + (source == "iterable")
    return {
        "task": TASK,
        "task_args": {
            **{"source": source, "accumulate": 2, "optimizer": "adam", "groups": True},
            **{"schedule": "step", "validation": 11, "scores": [0, 0, 3, 0, 0, 2, 0, 0, 1]},
        },
        "training": {
            **{"batch_size": 4, "accumulate_batches": 2, "clip_grad_norm": 1.0, "validate_every": 3, "max_steps": None},
            "max_epochs": 1 if source == "map" else None,
            "patience": None if kind == "reservoir" else 2,
        },
        "buffer": {
            **{"kind": kind, "capacity": samples + 1, "watermark": watermark},
            "pseudo_epochs": 2 if kind == "firo" else 1,
        },
        "checkpoint": {"every": 4, "keep": 10, "best": {"metric": "score"}},
    }


def resume_command(finished):
    """The command at the end of an interrupted run's output, for a shell."""
    assert finished.code == 3, finished.output
    last = finished.output.rstrip().splitlines()[-1]
    words = r"interrupted \(.+\) after step (\d+); its checkpoint is written. Resume with: (.+)"
    found = re.fullmatch(words, last)
    assert found, last
    summary = finished.summary
    assert (summary["status"], summary["steps"]) == ("interrupted", int(found[1]))
    assert summary["checkpoint"] == finished.checkpoints[-1] == f"step-{summary['steps']:08d}"
    return found[2]


@pytest.mark.parametrize(
    ("kind", "source", "signals"),
    [
        ("fifo", "map", ("SIGTERM", "SIGTERM")),
        ("fifo", "iterable", ("SIGUSR1", "SIGINT")),
        ("firo", "map", ("SIGINT", "SIGTERM")),
        ("firo", "iterable", ("SIGTERM", "SIGUSR1")),
        ("reservoir", "map", ("SIGHUP", "SIGTERM")),
        ("reservoir", "iterable", ("SIGTERM", "SIGINT")),
    ],
)
@pytest.mark.usefixtures("terminal_closes")
def test_alone(tmp_path, kind, source, signals):
    """Stopped twice. That nothing survives in the process rather than in the checkpoint is for the tests below."""
    stops = [[batch, 0, name, "self"] for batch, name in zip((5, 13), signals, strict=True)]
    config = config_of(kind, source)
    config["task_args"]["samples"] = 80
    whole = run_in_process(tmp_path, name="whole", **config)
    assert whole.code == 0, whole.output
    config["task_args"]["stops"] = stops
    run = run_in_process(tmp_path, **config)
    steps = []
    for name in signals:
        resume_command(run)
        assert f"interrupted (signal {name})" in run.output
        steps.append(run.summary["steps"])
        run = resume_in_process(run)
    assert run.code == 0, run.output
    assert 0 < steps[0] < steps[1] < run.summary["steps"] == (10 if kind == "reservoir" else 9)
    assert ("training.patience (2)" in run.summary["reason"]) == (kind != "reservoir")
    assert_equal_runs(whole, run, buffers=kind != "fifo")


def with_limit(steps, **stops):
    """Of a run that has a validation, and a step of its schedule, after each third step."""
    return {
        "task": f"{SIGNAL_TASKS}:CountsHooks",
        "task_args": {"schedule": "validation", "validation": 11, **stops},
        "training": {"batch_size": 4, "validate_every": 3, "max_steps": steps},
    }


STOPPED = with_limit(9, stops=[[5, 0, "SIGTERM", "self"]])
TO_ITS_END = "--set", "training.max_steps=6"


def check_equal_hooks(whole, run, trainers=1):
    """The last validation was made before the stop: it is not made again, and steps no schedule again."""
    assert run.code == 0, run.output
    assert_equal_runs(whole, run, trainers)
    assert whole.load("run")["scheduler"] == run.load("run")["scheduler"]
    for index in range(trainers):
        assert whole.load(f"trainer-{index}")["task"] == run.load(f"trainer-{index}")["task"]


@pytest.mark.parametrize("name", ["CountsHooks", "WithoutValidationData"])
def test_nothing_is_left(tmp_path, name):
    task = {"task": f"{SIGNAL_TASKS}:{name}"}
    whole = run_in_process(tmp_path, name="whole", **{**with_limit(6), **task})
    run = run_in_process(tmp_path, **{**STOPPED, **task})
    assert (run.code, run.summary["steps"]) == (3, 6), run.output
    check_equal_hooks(whole, resume_in_process(run, *TO_ITS_END))


# With several processes, as a shell sees them.


def shell(folder, line):
    """Run a command line of a POSIX shell in ``folder``, where a run's path is a relative one with a space."""
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "paramserver.launch"]
    code, output = fork_server().run(words[3:], folder, timeout_s=90)
    return FinishedRun(code, output, folder / "my runs" / "run")


def begun(folder, mode, config, stops=()):
    folder = folder / f"{mode}-{len(stops)}"
    config = {**config, "task_args": {**config["task_args"], "stops": stops}}
    write_config(
        folder,
        mode=mode,
        cluster={"num_trainers": 2},
        logging={"run_dir": "my runs", "name": "run"},
        **config,
    )
    return folder, shell(folder, "python -m paramserver.launch --config config.yaml")


SUPERVISOR, TRAINER = [[13, 1, "SIGTERM", "parent"]], [[5, 0, "SIGTERM", "self"], [13, 1, "SIGTERM", "self"]]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "source", "stopped"),
    [
        ("fifo", "map", {"ddp": SUPERVISOR, "rpc": TRAINER}),
        ("firo", "iterable", {"rpc": [[13, 1, "SIGHUP", "parent"]]}),
        ("reservoir", "map", {"ddp": TRAINER}),
    ],
)
def test_several_trainers(tmp_path, kind, source, stopped):
    """The run that never stops is one of ddp, which equals that of rpc with two trainers."""
    config = config_of(kind, source)
    config["task_args"]["samples"] = 160
    folder, whole = begun(tmp_path, "ddp", config)
    assert whole.code == 0, whole.output
    for mode, stops in stopped.items():
        folder, run = begun(tmp_path, mode, config, stops)
        for _ in stops:
            run = shell(folder, resume_command(run))
        assert run.code == 0, run.output
        assert_equal_runs(whole, run, trainers=2, buffers=kind != "fifo")


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_nothing_is_left_for_several_trainers(tmp_path, mode):
    config = {"mode": mode, "cluster": {"num_trainers": 2}}
    whole = launch(tmp_path, name="whole", **config, **with_limit(6))
    run = launch(tmp_path, **config, **STOPPED)
    assert (run.code, run.summary["steps"]) == (3, 6), run.output
    check_equal_hooks(whole, resume(run, *TO_ITS_END), trainers=2)


@pytest.mark.processes
def test_a_trainer_is_replaced_where_nothing_is_left(tmp_path):
    """It makes no validation that the others, which have the checkpoint, leave out: it would wait for their shares."""
    config = {"mode": "rpc", "cluster": {"num_trainers": 2}, **STOPPED, "task": f"{SIGNAL_TASKS}:IsReplaced"}
    run = launch(tmp_path, **config)
    assert (run.code, run.summary["steps"]) == (3, 6), run.output
    scheduler, task = run.load("run")["scheduler"], run.load("trainer-0")["task"]
    run = resume(run, *TO_ITS_END, "--set", f"task_args.marks={tmp_path}", timeout_s=60)
    assert (run.code, run.summary["restarts"]) == (0, 1), run.output
    assert run.load("run")["scheduler"] == scheduler
    assert run.load("trainer-0")["task"] == {**task, "epochs": 1}
