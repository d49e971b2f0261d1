"""Online training as a whole: simulations, trainers and rank 0 as real processes, every sample accounted for."""

import json
import os
import shutil
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import numpy as np
import psutil
import pytest
from launching import FinishedRun, differing_tensors, main_in_process, run_concurrently, run_in_process, write_config
from online_runs import ALL, COUNT, SIMULATIONS, STEPS, online_config, streams, wait_for
from process_states import is_alive
from simulations import SHAPE, field
from stream_tasks import served

from paramserver.client import Client, RunOver, finish, ping

pytestmark = pytest.mark.processes


@pytest.fixture
def online(fork_server):
    """Starts a run in this mode and waits for its end."""

    def start(folder, mode, **options):
        if mode == "local":
            return run_in_process(folder, mode=mode, **online_config(folder, **options))
        file = write_config(folder, mode=mode, **online_config(folder, **options))
        code, output = fork_server.run(["--config", file, "--set", "logging.name=run"], folder, timeout_s=90)
        return FinishedRun(code, output, folder / "runs" / "run")

    return start


@pytest.mark.parametrize(
    ("mode", "kind", "function"),
    [("local", "firo", "simulate"), ("ddp", "firo", "simulate_killed_once"), ("rpc", "fifo", "simulate_killed_once")],
)
def test_every_sample_is_served_exactly_once(tmp_path, online, mode, kind, function):
    """Also of a simulation that is killed in its middle and starts again."""
    settings = {"function": f"{SIMULATIONS}:{function}", "window": 1}  # what was sent before the last was acknowledged
    finished = online(tmp_path, mode, simulations=settings, buffer={"kind": kind, "watermark": 6, "capacity": 12})
    assert finished.code == 0, finished.output
    assert sorted(served(tmp_path / "ledger")) == ALL
    assert finished.summary["samples"] == len(ALL)
    assert streams(finished) == streams(finished, "expected") == len(ALL)
    assert streams(finished, "expected_batches") == len(ALL) / 4
    assert f"{len(ALL)} received of {len(ALL)} expected" in finished.output
    assert len(list((finished.run_dir / "logs").glob("simulation-*.log"))) == COUNT
    simulations = finished.summary["simulations"]
    assert simulations["complete"] == COUNT
    if function == "simulate":
        assert (simulations["restarted"], streams(finished, "duplicated")) == (0, 0)
    else:
        assert simulations["restarted"] == 1
        assert streams(finished, "duplicated") > 0
        assert "SIGKILL" in json.dumps(finished.of_kind("simulation"))


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("rpc", {"deal": "round_robin"}),
        ("ddp", {"deal": "simulation"}),
        ("local", {"steps": None}),
        ("rpc", {"steps": None}),
    ],
)
def test_a_simulation_that_starts_again_may_continue_where_the_run_lacks_a_step(
    tmp_path, monkeypatch, online, mode, options
):
    monkeypatch.chdir(tmp_path)
    settings = {"function": f"{SIMULATIONS}:simulate_continued", "window": 1, **options}
    buffer = {"kind": "fifo", "watermark": 1, "capacity": 64}
    finished = online(tmp_path, mode, simulations=settings, buffer=buffer)
    assert finished.code == 0, finished.output
    steps = options.get("steps", STEPS) or 8
    assert sorted(served(tmp_path / "ledger")) == list(product(range(COUNT), range(steps)))
    simulations = finished.summary["simulations"]
    assert (simulations["complete"], simulations["restarted"], simulations["lost"]) == (COUNT, 1, 0)
    first, again = (int(next(tmp_path.rglob(f"first-step-{attempt}")).read_text()) for attempt in (0, 1))
    assert (first, again) == (0, steps // 2)
    assert streams(finished, "duplicated") == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_what_the_buffer_holds_of_a_group_that_waits_for_room_counts_as_received(tmp_path, online, mode):
    """Received = served + held: more samples than there is room for arrive at once, and the run ends meanwhile."""
    settings, buffer = {"deal": "round_robin"}, {"kind": "fifo", "watermark": 4, "capacity": 8}
    finished = online(tmp_path, mode, simulations=settings, buffer=buffer, training={"max_steps": 1})
    assert finished.code == 0, finished.output
    last = {record["trainer"]: record for record in finished.of_kind("buffer")}
    held = [record["gets"] + record["population"] for record in last.values()]
    assert [record["stream"]["received"] for record in last.values()] == held


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_a_reservoir_serves_every_sample_at_least_once(tmp_path, online, mode):
    paced = {"kind": "reservoir", "watermark": 6, "capacity": 12, "min_new_per_batch": 2}
    finished = online(tmp_path, mode, buffer=paced)
    assert finished.code == 0, finished.output
    assert set(served(tmp_path / "ledger")) == set(ALL)
    assert finished.summary["samples"] > streams(finished) == len(ALL)


def test_passes_over_each_sample_and_a_limit_of_bytes_hold_for_streams(tmp_path, online):
    one = 4 * SHAPE[0] * SHAPE[1]
    limits = {"kind": "fifo", "capacity": 64, "pseudo_epochs": 2, "max_bytes": 8 * one}
    finished = online(tmp_path, "local", buffer=limits, simulations={"window": 2}, task_args={"pace_s": [0.02]})
    assert finished.code == 0, finished.output
    assert Counter(served(tmp_path / "ledger")) == dict.fromkeys(ALL, 2)
    assert max(record["population"] for record in finished.of_kind("buffer")) <= 8
    assert finished.summary["buffer"]["put_wait_s"] > 0


@pytest.mark.parametrize(("mode", "consistency"), [("ddp", "sync"), ("rpc", "bounded"), ("rpc", "async")])
def test_a_slow_trainer_loses_nothing(tmp_path, online, mode, consistency):
    pace = {"task_args": {"pace_s": [0.0, 0.3]}, "server": {"consistency": consistency}}
    finished = online(tmp_path, mode, buffer={"capacity": 8}, simulations={"window": 2}, **pace)
    assert finished.code == 0, finished.output
    assert sorted(served(tmp_path / "ledger")) == ALL
    assert finished.summary["buffer"]["put_wait_s"] > 0, "no trainer was held up by the slow one"


def test_parts_of_a_group_are_put_together(tmp_path, online):
    group = {"function": f"{SIMULATIONS}:simulate_group", "group_size": 2, "count": 3}
    finished = online(tmp_path, "rpc", simulations=group)
    assert finished.code == 0, finished.output
    assert sorted(served(tmp_path / "ledger")) == sorted(product(range(3), range(STEPS)))


def test_rpc_and_ddp_learn_the_same_from_the_same_stream(tmp_path, online):
    """In a fixed order: one producer after the other, first in first out."""
    rpc, ddp = run_concurrently(
        *(partial(online, tmp_path / mode, mode, simulations={"at_once": 1, "count": 4}) for mode in ("rpc", "ddp"))
    )
    assert rpc.code == ddp.code == 0, rpc.output + ddp.output
    assert differing_tensors(rpc.load("model"), ddp.load("model")) == []


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, fork_server):
    """A copy of a run in this mode that a signal ended in its middle, what it served, and its folder."""
    made = {}

    def copied(folder, mode):
        if mode not in made:
            made[mode] = tmp_path_factory.mktemp(mode)
            file = write_config(
                made[mode], mode=mode, **online_config(made[mode], task_args={"stop": 3}, buffer={"capacity": 8})
            )
            code, output = fork_server.run(["--config", file, "--set", "logging.name=run"], made[mode], timeout_s=90)
            assert code == 3, output
        shutil.copytree(made[mode], folder, dirs_exist_ok=True)
        return folder / "runs" / "run"

    return copied


@pytest.mark.parametrize(("mode", "trainers"), [("ddp", 1), ("ddp", 2), ("rpc", 2), ("rpc", 3)])
def test_a_stopped_run_resumes_with_what_is_not_complete(tmp_path, fork_server, stopped, mode, trainers):
    run_dir, ledger = stopped(tmp_path, mode), tmp_path / "ledger"
    before = served(ledger)
    assert 0 < len(before) < len(ALL)
    settings = {"task_args.stop": "null", "task_args.ledger": ledger, "logging.run_dir": run_dir.parent}
    settings |= {"cluster.num_trainers": trainers, "buffer.capacity": 64}
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    code, output = fork_server.run(["--resume", run_dir, *flags], tmp_path, timeout_s=90)
    assert code == 0, output
    second = FinishedRun(code, output, run_dir)
    assert sorted(served(ledger)) == ALL
    assert second.summary["samples"] == len(ALL)
    assert streams(second) == streams(second, "expected") == len(ALL)
    if trainers == 2:
        assert streams(second, "inherited") == 0
    else:
        assert len(before) <= streams(second, "inherited") < len(ALL)


def test_samples_from_outside(tmp_path, fork_server):
    """Simulations from outside, whose user declares the last one; the run answers pings meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    outside = {"function": None, "count": None, "port": port}
    file = write_config(
        tmp_path, mode="rpc", **online_config(tmp_path, simulations=outside, task_args={"outside": True})
    )
    address = f"tcp://127.0.0.1:{port}"
    with fork_server.start(["--config", file, "--set", "logging.name=run"], tmp_path) as run:
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda number: produce(address, number), (3, 11, 40))) == [STEPS] * 3
        state = ping(address)
        assert state["alive"] is True
        assert [trainer["index"] for trainer in state["trainers"]] == [0, 1]
        finish(address)
        assert run.wait() == 0, run.output.read_text()
        assert f"clients reach this run at {address}\n" in run.output.read_text()
    assert sorted(served(tmp_path / "ledger")) == sorted(product((3, 11, 40), range(STEPS)))


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_what_was_acknowledged_before_simulations_failed_is_there_after_a_resume(tmp_path, fork_server, mode):
    """Before the first step, and where a resumed run has made none: the clients do not send it again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    outside = {"function": None, "count": 3, "port": port, "timeout_s": 1.5}
    buffer = {"kind": "firo", "watermark": 50 if mode == "local" else 25, "capacity": 100}
    options = {"simulations": outside, "buffer": buffer, "task_args": {"outside": True}}
    file = write_config(tmp_path, **online_config(tmp_path, mode=mode, **options))
    run_dir = tmp_path / "runs" / "run"
    for number in range(3):
        start = ["--resume", run_dir] if number else ["--config", file, "--set", "logging.name=run"]
        with fork_server.start(start, tmp_path) as run:
            assert produce(f"tcp://127.0.0.1:{port}", number) == STEPS
            finished = FinishedRun(run.wait(), run.output.read_text(), run_dir)
        if number < 2:
            last = finished.output.rpartition("error: ")[2]
            assert finished.code == 1
            assert f"no simulation came for 1.5 s after {number + 1} of 3 were complete" in last
            assert "Resume with: " in last
            assert served(tmp_path / "ledger") == []
    assert finished.code == 0, finished.output
    assert sorted(served(tmp_path / "ledger")) == sorted(product(range(3), range(STEPS)))


def produce(address, simulation):
    """All samples of one simulation; how many were sent."""
    parameters = [float(simulation), 1.0]
    with Client(address, timeout_s=30).open(simulation, parameters) as client:
        for step in range(STEPS):
            client.send(step, {"u": field(simulation, step, np.array(parameters))})
        return client.sent


def test_a_wrong_sample_is_refused_counted_and_reported(tmp_path, online):
    """With a NaN where finite numbers are asked the simulation never becomes complete: it is given up in the end."""
    wrong = {"function": f"{SIMULATIONS}:simulate_wrong", "count": 1, "max_restarts": 0}
    finished = online(tmp_path, "ddp", simulations=wrong)
    assert finished.code == 0, finished.output
    assert sorted(served(tmp_path / "ledger")) == sorted(
        [(0, step) for step in range(STEPS) if step != 2] + [(1, step) for step in range(STEPS)]
    )
    assert streams(finished, "refused") >= 1
    logs = "".join(file.read_text() for file in (finished.run_dir / "logs").glob("rank-*.log"))
    assert "u" in logs
    assert "finite" in logs
    assert finished.summary["simulations"]["given_up"] == 1


# A program that says why it failed needs time to start before it does.
@pytest.mark.parametrize(
    ("mode", "function", "timeout_s", "text"),
    [("rpc", "simulate_hopeless", 60.0, "exit code 1"), ("ddp", "simulate_silent", 1.0, "silent")],
)
def test_simulations_that_all_fail_end_the_run_with_one_message(tmp_path, online, mode, function, timeout_s, text):
    settings = {"function": f"{SIMULATIONS}:{function}", "max_restarts": 0, "timeout_s": timeout_s}
    finished = online(tmp_path, mode, simulations=settings)
    assert finished.code == 1, finished.output
    last = finished.output.rpartition("error: ")[2]
    assert text in last
    assert "logs/simulation-" in last
    assert last.count("\n") == 1, "more than one sentence"
    assert finished.summary["status"] == "failed"


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_a_run_that_has_enough_sends_over_before_its_last_validation(tmp_path, fork_server, mode):
    """Its simulations end, late clients get OVER, and it answers pings, all while it validates."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    settings = {"function": f"{SIMULATIONS}:simulate_watched", "count": 1000, "at_once": 8, "port": port}
    task = {"task_args": {"held": str(tmp_path)}, "training": {"max_steps": 1}}
    file = write_config(tmp_path, mode=mode, **online_config(tmp_path, simulations=settings, **task))
    address = f"tcp://127.0.0.1:{port}"
    with fork_server.start(["--config", file, "--set", "logging.name=run"], tmp_path) as run:
        wait_for(lambda: (tmp_path / "validating").exists())
        wait_for(lambda: not any(map(is_there, tmp_path.glob("pid-*"))))
        assert ping(address)["alive"] is True
        with pytest.raises(RunOver):
            Client(address, timeout_s=20).open(2000)
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.output.read_text()
    summary = FinishedRun(0, "", tmp_path / "runs" / "run").summary
    assert (summary["steps"], summary["simulations"]["restarted"]) == (1, 0)
    assert len(list(tmp_path.glob("pid-*"))) == 8


@pytest.mark.parametrize("mode", ["local", "ddp"])
def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path, fork_server, mode):
    settings = {"function": f"{SIMULATIONS}:simulate_watched", "count": 1000, "at_once": 3}
    file = write_config(tmp_path, mode=mode, **online_config(tmp_path, simulations=settings))
    with fork_server.start(["--config", file], tmp_path) as run:
        wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 3)
        processes = psutil.Process(run.pid).children(recursive=True)
        assert len(processes) >= 3 * 2 + (2 if mode == "ddp" else 0), "each simulation has one that holds it"
        os.kill(run.pid, signal.SIGKILL)
        wait_for(lambda: not any(is_alive(process.pid) for process in processes))


def is_there(file):
    """Whether the process that left this file lives."""
    return is_alive(int(file.name.removeprefix("pid-")))


def dry_run(folder, **options):
    (folder / "config.yaml").write_text(json.dumps({"mode": "rpc", **online_config(folder, **options)}))
    return main_in_process("--config", folder / "config.yaml", "--dry_run")


def test_dry_run_prints_what_is_expected(tmp_path):
    code, output = dry_run(tmp_path, buffer={"watermark": 7})
    assert code == 0
    assert output.count(f"{len(ALL) // 2} samples, {len(ALL) // 8} batches of 4, the first from 7 samples on\n") == 2
    text = "whose samples take up to 1 MiB in front of the buffer of each trainer"
    assert f"simulations: {COUNT}, 3 at a time, {text}\n" in output


@pytest.mark.parametrize(
    ("section", "options", "text"),
    [
        ("buffer", {"watermark": 41}, "buffer.watermark (41) must be at most the 40 samples that trainer 0 of 2"),
        ("simulations", {"sampler": "bogus"}, "simulations.sampler (bogus)"),
        ("simulations", {"function": f"{SIMULATIONS}:nothing"}, "simulations.function"),
        ("training", {"loader_workers": 2}, "training.loader_workers (2) must be 0, as train_source gives no"),
        ("simulations", {"function": None, "command": "/no/such/solver {a}"}, "begins with /no/such/solver"),
    ],
)
def test_dry_run_refuses_what_a_run_would_refuse(tmp_path, section, options, text):
    code, output = dry_run(tmp_path, **{section: options})
    assert code == 2
    assert text in output


def test_dry_run_refuses_a_validation_source_that_a_run_would_refuse(tmp_path):
    (tmp_path / "validated.py").write_text(
        "from paramserver.sources import Stream\nfrom stream_tasks import Fed\n"
        "class Validated(Fed):\n    def validation_source(self, partition):\n        return Stream()\n"
    )
    code, output = dry_run(tmp_path, task="validated.py:Validated")
    assert code == 2
    assert "validation_source returned Stream; it must return" in output


def test_a_watermark_that_the_simulations_never_reach_is_refused(tmp_path, online):
    finished = online(tmp_path, "local", buffer={"watermark": 100, "capacity": 200})
    assert finished.code == 2
    assert "buffer.watermark (100) must be at most the 80 samples" in finished.output
