"""Runs that publish: every version that a subscriber receives is whole and newer, also while processes die."""

import json
import threading
import time
from contextlib import suppress

import pytest
from follower import following, versions
from launching import TASKS, assert_equal_runs, environment, fork_server, free_port, launch, resume, write_config

from paramserver.errors import RunOver
from paramserver.subscriber import Subscriber

pytestmark = pytest.mark.processes

HELPERS = TASKS.parent
PUBLISHED = HELPERS / "published_tasks.py"
LIMIT_S = 90
MORE_THAN_THERE_ARE = 10_000  # steps


def run(folder, mode, port, trainers=2, steps=40, fault=None, **sections):
    (folder / "marks").mkdir(parents=True)
    cluster = {"num_trainers": 1 if mode == "local" else trainers, "timeout_s": 60} | sections.pop("cluster", {})
    finished = launch(
        folder,
        task=f"{PUBLISHED}:CountedWithFault",
        task_args={"folder": str(folder / "marks"), **(fault or {})},
        mode=mode,
        training={"max_steps": steps},
        cluster=cluster,
        **({} if port is None else {"publish": {"port": port}}),
        **sections,
    )
    assert finished.code == 0, finished.output
    return finished


CASES = {
    "local": {"mode": "local"},
    "ddp": {"mode": "ddp"},
    "ddp over gloo": {"mode": "ddp", "ddp": {"shared_memory": "off"}},
    "rpc in shared memory": {"mode": "rpc"},
    "rpc in messages": {"mode": "rpc", "server": {"transport": "rpc"}},
    "several servers": {"mode": "rpc", "server": {"transport": "rpc"}, "cluster": {"num_servers": 3}},
    "several servers in shared memory": {"mode": "rpc", "cluster": {"num_servers": 2}},
    "async": {"mode": "rpc", "server": {"consistency": "async"}},
    "bounded": {"mode": "rpc", "server": {"consistency": "bounded", "staleness_bound": 2, "transport": "rpc"}},
}


@pytest.mark.parametrize("encoding", ["exact", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(7)
def test_versions_are_whole_in_every_mode(tmp_path, case, encoding):
    port, options = free_port(), CASES[case]
    counts = options.get("server", {}).get("consistency") is None  # otherwise buffers are those of one trainer
    with following(f"tcp://127.0.0.1:{port}", encoding=encoding, counts=counts) as follower:
        finished = run(tmp_path, port=port, **options)
    assert len(follower.steps) > 2  # a subscriber on a busy machine receives few of them
    assert follower.received[-1].run_name == "run"
    assert f"subscribers reach this run at tcp://127.0.0.1:{port}" in finished.output


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_training_is_the_same_with_subscribers(tmp_path, mode):
    port = free_port()
    alone = run(tmp_path / "alone", mode, port=None)
    with following(f"tcp://127.0.0.1:{port}"):
        published = run(tmp_path / "published", mode, port=port)
    assert_equal_runs(alone, published, trainers=2)


@pytest.mark.parametrize(("mode", "target"), [("rpc", 0), ("ddp", 0), ("rpc", 1), ("rpc", 2)])
@pytest.mark.sampled(2)
def test_after_a_death_no_version_is_older_than_the_one_before(tmp_path, mode, target):
    """After that of rank 0 a new generation begins at the checkpoint, and its versions are newer than all before."""
    port = free_port()
    fault = {"fault": "kill", "target": target, "compute_s": 0.05}
    # The buffers of a version are those of one trainer, and as before where its push is lost.
    with following(f"tcp://127.0.0.1:{port}", counts=target == 0) as follower:
        finished = run(tmp_path, mode, port, steps=20, fault=fault, checkpoint={"every": 4})
    assert (tmp_path / "marks" / "mark").exists()
    generations = sorted({weights.version.generation for weights in follower.received})
    if target == 0:
        assert generations[0] == 1 < generations[-1]
        last = follower.received[-1]
        starts = json.loads((finished.run_dir / "publisher.json").read_text())["starts"]
        assert [tuple(start) for start in starts] == list(last.starts)
        taken_back = [w for w in follower.received if not last.is_current(w.version)]
        assert all(w.version.generation == 1 and w.step > starts[-1][1] for w in taken_back)
    assert follower.received[-1].step >= 18


def test_a_run_that_fails_does_not_say_that_it_has_ended(tmp_path):
    """A launcher may start it again, at the same address."""
    port, ends = free_port(), []

    def follow():
        with Subscriber(f"tcp://127.0.0.1:{port}") as model:
            weights = model.latest(LIMIT_S)
            while (newer := model.newer_than(weights.version, timeout_s=2)) is not None:
                weights = newer
            ends.append(weights.version)

    thread = threading.Thread(target=follow)
    thread.start()
    (tmp_path / "marks").mkdir()
    finished = launch(
        tmp_path,
        task=f"{PUBLISHED}:CountedWithFault",
        task_args={"folder": str(tmp_path / "marks"), "fault": "raise", "target": None, "compute_s": 0.3},
        mode="local",
        training={"max_steps": 30},
        publish={"port": port},
    )
    thread.join()
    assert finished.code == 1
    assert ends


def test_with_join_no_version_is_of_a_rank_that_has_no_data(tmp_path):
    """Rank 0 of ddp has none long before the other, and makes no updates since."""
    port = free_port()
    with following(f"tcp://127.0.0.1:{port}", counts=False) as follower:
        finished = launch(
            tmp_path,
            task=f"{PUBLISHED}:CountedUnevenly",
            mode="ddp",
            cluster={"num_trainers": 2},
            training={"max_steps": 1000, "uneven_inputs": "join", "batch_size": 8},
            publish={"port": port},
        )
    assert finished.code == 0, finished.output
    assert finished.summary["steps"] == 40
    assert [step for step in follower.steps if 0 < step <= 10]
    assert not [step for step in follower.steps if 10 < step < 40]


def test_of_pushes_that_are_held_a_version_has_no_buffers(tmp_path):
    """With several arrivals an update waits for the next pushes, whose buffers are here before it is made."""
    port = free_port()
    server = {"consistency": "async", "arrivals": 4, "transport": "rpc"}
    with following(f"tcp://127.0.0.1:{port}", counts=False) as follower:
        run(tmp_path, "rpc", port, trainers=1, steps=25, server=server)
    assert len(follower.steps) > 2  # the last one only if it waits for that
    assert all(int(weights["steps"]) == 4 * weights.step for weights in follower.received)


def test_a_run_that_is_resumed_by_hand_continues_at_the_same_address(tmp_path):
    port = free_port()
    with following(f"tcp://127.0.0.1:{port}") as follower:
        finished = run(tmp_path, "local", port, steps=10, fault={"compute_s": 0.1})
    assert {weights.version.generation for weights in follower.received} == {1}
    with following(f"tcp://127.0.0.1:{port}") as follower:
        assert resume(finished, "--set", "training.max_steps=30").code == 0
    assert {weights.version.generation for weights in follower.received} == {2}
    assert follower.steps[0] >= 10


def test_averages_are_published_instead(tmp_path):
    port, received = free_port(), []
    file = write_config(
        tmp_path,
        task=f"{PUBLISHED}:CountedWithFault",
        task_args={"folder": str(tmp_path), "compute_s": 0.05},  # longer than a subscriber needs to connect
        mode="rpc",
        cluster={"num_trainers": 2},
        training={"max_steps": 30, "ema_decay": 0.5},
        publish={"port": port, "averages": True},
    )
    arguments = ["--config", file, "--set", "logging.name=run"]
    with (
        fork_server().start(arguments, tmp_path, environment()) as process,
        Subscriber(f"tcp://127.0.0.1:{port}") as model,
    ):
        version = model.latest(LIMIT_S).version
        with suppress(RunOver):
            while True:
                weights = model.newer_than(version, LIMIT_S)
                version = weights.version
                received.append((weights.step, float(weights["weights.0"].max())))
        assert process.wait(LIMIT_S) == 0
    # The first average is 1, and each is the mean of the one before and n.
    assert received
    assert all(value == pytest.approx(step - 1 + 0.5 ** (step - 1), abs=1e-4) for step, value in received if step)


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_frozen_parameters_that_a_task_changes_are_those_of_the_last_checkpoint_in_rpc(tmp_path, mode):
    """Each trainer has its own; those of rank 0 are published where it is a trainer."""
    port, every, received = free_port(), 10, []
    thread = threading.Thread(target=lambda: received.extend(versions(f"tcp://127.0.0.1:{port}")))
    thread.start()
    finished = launch(
        tmp_path,
        task=f"{PUBLISHED}:CountedWithTarget",
        mode=mode,
        cluster={"num_trainers": 1 if mode == "local" else 2},
        training={"max_steps": 45},
        checkpoint={"every": every},
        publish={"port": port},
    )
    thread.join(LIMIT_S)
    assert finished.code == 0, finished.output
    assert len(received) > every
    for weights in received:
        assert set(weights["weights.0"].ravel().tolist()) == {weights.step}
        (target,) = set(weights["target"].tolist())
        if mode != "rpc":
            assert target == weights.step
        elif weights.step < 45:  # at the end there is a checkpoint too
            assert target == weights.step // every * every or (
                weights.step % every == 0 and target == weights.step - every
            )


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_simulations_read_the_model_before_they_send_the_first_sample(tmp_path, mode):
    """Training waits for samples then, and the samples for a version; both begin, and the steps grow."""
    finished = launch(
        tmp_path,
        task=f"{PUBLISHED}:Simulated",
        mode=mode,
        cluster={"num_trainers": 1 if mode == "local" else 2},
        training={"max_steps": MORE_THAN_THERE_ARE, "batch_size": 4},
        simulations={"function": f"{PUBLISHED}:act", "count": 2, "at_once": 2, "steps": 32, "fields": {"u": [3]}},
        buffer={"kind": "fifo", "capacity": 4},
        publish={"every": 1},
    )
    assert finished.code == 0, finished.output
    simulations = finished.summary["simulations"]
    assert (simulations["complete"], simulations["restarted"]) == (2, 0)
    assert finished.summary["samples"] == 64


def test_nobody_waits_longer_because_of_a_subscriber_that_is_frozen(tmp_path):
    """It holds one version, and training continues."""
    port, began = free_port(), time.monotonic()
    with Subscriber(f"tcp://127.0.0.1:{port}") as frozen, following(f"tcp://127.0.0.1:{port}") as follower:
        thread = threading.Thread(target=lambda: frozen.newer_than((0, 0), LIMIT_S))
        thread.start()
        run(tmp_path, "rpc", port)
        thread.join()
    assert len(follower.steps) > 2  # a subscriber on a busy machine receives few of them
    assert time.monotonic() - began < LIMIT_S
