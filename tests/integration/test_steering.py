"""Simulations that are drawn by the loss of the samples before, in each mode, stopped, and killed."""

import json
import os
import signal
import time
from functools import partial
from threading import Event

import pytest
from launching import TASKS, FinishedRun, write_config
from online_runs import ALL, COUNT, STEPS, online_config
from steered_tasks import drawn
from stream_tasks import served

from paramserver.config import load_config
from paramserver.distributed.timeouts import poll_until
from paramserver.online.sampler import make_sampler, replay

pytestmark = pytest.mark.processes

STEERED = TASKS.with_name("steered_tasks.py")
RANGES = (("a", 0.0, 1.0), ("b", 2.0, 3.0))


def config(folder, task_args=None, simulations=None, **sections):
    learns = {"at_once": 1, "window": 2, "sampler": "importance", "sampler_args": {"share": 0.25}}
    return online_config(
        folder,
        f"{STEERED}:Steered",
        {"pace_s": [0.05], **(task_args or {})},
        {**learns, **(simulations or {})},
        **{"buffer": {"capacity": 8}, **sections},
    )


@pytest.fixture
def steered(fork_server):
    def start(folder, mode, **options):
        file = write_config(folder, mode=mode, **config(folder, **options))
        code, output = fork_server.run(["--config", file, "--set", "logging.name=run"], folder, timeout_s=90)
        return FinishedRun(code, output, folder / "runs" / "run")

    return start


def record(run_dir):
    return [json.loads(line) for line in (run_dir / "sampler.jsonl").read_text().splitlines()]


def assert_replayed(run_dir):
    """The record of the run gives its draws again; returns {simulation: (parameters, ratio)} of the last ones."""
    seed = load_config(run_dir / "config.yaml").seed
    make = partial(make_sampler, "importance", RANGES, seed, COUNT, options={"share": 0.25})
    draws = replay((run_dir / "sampler.jsonl").read_text().splitlines(), make)
    assert len(draws) >= COUNT
    assert all(recorded == repeated for recorded, repeated in draws)
    assert any("observe" in entry for entry in record(run_dir))
    return {
        entry["draw"]: (entry["parameters"], entry["density_ratio"]) for entry in record(run_dir) if "draw" in entry
    }


@pytest.mark.parametrize(("mode", "gives"), [("local", "logged"), ("ddp", "returned"), ("rpc", "logged")])
def test_each_sample_has_the_parameters_and_the_ratio_of_its_draw(tmp_path, steered, mode, gives):
    finished = steered(tmp_path, mode, task_args={"gives": gives})
    assert finished.code == 0, finished.output
    draws = assert_replayed(finished.run_dir)
    found = drawn(tmp_path / "ledger")
    assert len(found) == COUNT * STEPS
    assert all(draws[simulation] == (parameters, ratio) for simulation, parameters, ratio in found)
    assert max(ratio for _, _, ratio in found) <= 4.0
    assert any(ratio != 1.0 for _, _, ratio in found), "no draw came after an observation"


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_a_stopped_run_continues_with_what_it_has_learned(tmp_path, fork_server, steered, mode):
    """Each simulation has one vector of parameters and one ratio, those of the record, which can be replayed."""
    stopped = steered(tmp_path, mode, task_args={"stop": 8 if mode == "local" else 4})
    run_dir = stopped.run_dir
    assert 0 < len(served(tmp_path / "ledger")) < COUNT * STEPS, stopped.output
    code, output = fork_server.run(["--resume", run_dir, "--set", "task_args.stop=null"], tmp_path, timeout_s=90)
    assert code == 0, output
    draws = assert_replayed(run_dir)
    (first, state) = [entry["state"] for entry in record(run_dir) if "state" in entry]
    assert first is None
    assert state["state"]["points"]
    found = drawn(tmp_path / "ledger")
    assert len(found) == COUNT * STEPS
    # A simulation that had begun before the stop keeps its parameters and its ratio, also in samples that waited.
    for simulation in range(COUNT):
        assert len({json.dumps(rest) for number, *rest in found if number == simulation}) == 1
    assert all(draws[simulation] == (parameters, ratio) for simulation, parameters, ratio in found)


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_rank_0_is_killed_and_the_samplers_state_is_that_of_the_checkpoint(tmp_path, fork_server, mode):
    options = {"checkpoint": {"every": 3}, "server": {"lost_after_s": 3.0}}
    if mode == "ddp":  # trainer 0 is in rank 0
        options["task_args"] = {"kill": [0, 7]}
    file = write_config(tmp_path, mode=mode, **config(tmp_path, **options))
    run_dir = tmp_path / "runs" / "run"
    with fork_server.start(["--config", file, "--set", "logging.name=run"], tmp_path) as run:
        if mode == "rpc":
            latest = run_dir / "checkpoints" / "latest"
            assert poll_until(time.monotonic() + 60, lambda: latest.exists() or None, Event()), "no checkpoint came"
            os.kill(json.loads((run_dir / ".lock.json").read_text())["pid"], signal.SIGKILL)
        code = run.wait(120)
        output = run.output.read_text()
    assert code == 0, output
    states = [entry["state"] for entry in record(run_dir) if "state" in entry]
    assert len(states) == 2, "it was not killed"
    assert states[0] is None
    assert states[1] is not None, "it began anew"
    assert_replayed(run_dir)
    assert set(served(tmp_path / "ledger")) == set(ALL)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"task_args": {"gives": "shape"}}, "must get a tensor of shape (4,), one loss for each sample of the batch"),
        ({"task_args": {"gives": "nan"}}, "the losses of batch 0 must be finite"),
        ({"task_args": {"gives": "outside"}}, "must be called in training_step"),
        ({"task_args": {"gives": "nothing"}}, "training_step must give the loss of each sample"),
        (
            {"task_args": {"gives": "negative"}},
            "must be at least 0, as simulations.sampler (importance) draws in proportion to it",
        ),
        (
            {
                "task_args": {"gives": "nothing"},
                "simulations": {"sampler": f"{STEERED}:Steers", "sampler_args": {}},
            },
            "training_step must give the loss of each sample",
        ),
        ({"simulations": {"parameters": {}}}, "simulations.sampler (importance) must have parameters to draw"),
        ({"simulations": {"sampler": f"{STEERED}:Steers", "sampler_args": {"fails": 2}}}, "Steers).observe("),
        (
            {"simulations": {"function": None}, "task_args": {"outside": True}},
            "simulations.sampler (importance) must not learn from losses where simulations come from outside",
        ),
    ],
)
def test_what_cannot_be_learned_from_is_refused_by_name(tmp_path, steered, options, sentence):
    finished = steered(tmp_path, "local", **options)
    assert finished.code != 0
    assert sentence in finished.output


@pytest.mark.parametrize(
    ("simulations", "task_args", "sentence"),
    [
        ({"parameters": {}}, {}, "must have parameters to draw"),
        ({"function": None}, {"outside": True}, "where simulations come from outside"),
        ({"function": None, "parameters": {}}, {"outside": True}, "where simulations come from outside"),
    ],
)
def test_a_dry_run_refuses_what_cannot_be_learned_from(tmp_path, fork_server, simulations, task_args, sentence):
    file = write_config(tmp_path, mode="local", **config(tmp_path, task_args=task_args, simulations=simulations))
    code, output = fork_server.run(["--config", file, "--dry-run"], tmp_path, timeout_s=60)
    assert code == 2
    assert "simulations.sampler (importance) must" in output
    assert sentence in output


def test_a_checkpoint_of_uniform_draws_is_not_continued_with_a_sampler_that_learns(tmp_path, fork_server, steered):
    stopped = steered(tmp_path, "local", task_args={"stop": 8}, simulations={"sampler": "uniform", "sampler_args": {}})
    assert not (stopped.run_dir / "sampler.jsonl").exists()
    changes = ["--set", "task_args.stop=null", "--set", "simulations.sampler=importance"]
    code, output = fork_server.run(["--resume", stopped.run_dir, *changes], tmp_path, timeout_s=60)
    assert code == 2, output
    assert "simulations.sampler (importance) learns, and that of the checkpoint (uniform)" in output
    assert not (stopped.run_dir / "sampler.jsonl").exists()
