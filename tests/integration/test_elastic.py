"""Runs with ``cluster.elastic``: trainers join and leave, and each sample is applied exactly once in each pass."""

import argparse
import contextlib
import json
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from elastic_tasks import SAMPLES
from follower import following
from launching import FinishedRun, environment, fork_server, free_port, resume, write_config

from paramserver import elastic, errors
from paramserver.cluster import ProcessIdentity
from paramserver.config import ClusterConfig, Config
from paramserver.distributed import resize
from paramserver.errors import PeerLost
from paramserver.launch import run_command
from paramserver.runtime import rank

pytestmark = pytest.mark.processes

EPOCHS = 3
LIMIT_S = 150


class Job:
    """A running job of two trainers, and the commands that concern it."""

    def __init__(self, folder, stack, task="CountsSamples", **config):
        self.folder, self.stack = folder, stack
        self.run_dir = folder / "runs" / "run"
        passes = {"max_steps": None, "max_epochs": EPOCHS}
        training = {**config.pop("training", passes), "batch_size": 4, "uneven_inputs": "join"}
        cluster = {"num_trainers": 2, "elastic": True, "timeout_s": 20, **config.pop("cluster", {})}
        server = {"lost_after_s": 5.0, **config.pop("server", {})}
        self.file = write_config(
            folder,
            task=f"elastic_tasks:{task}",
            task_args={"folder": str(folder), "step_s": 0.1},
            mode=config.pop("mode", "rpc"),
            training=training,
            cluster=cluster,
            server=server,
            checkpoint={"every": 50},
            logging={"name": "run"},
            **config,
        )
        self.run = self._start(["--config", self.file])

    def _start(self, arguments, environ=None, **program):
        started = fork_server().start(arguments, self.folder, environment(**(environ or {})), **program)
        return self.stack.enter_context(started)

    def join(self, *arguments, **environ):
        return self._start([self.run_dir, *arguments], environ, program="elastic", function="join_main")

    def leave(self, rank):
        run = self._start([self.run_dir, "--rank", rank], program="elastic", function="leave_main")
        return run.wait(LIMIT_S), run.output.read_text()

    def wait_for(self, what, condition, limit_s=LIMIT_S):
        deadline = time.monotonic() + limit_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"no {what}: {self.run.output.read_text()}"
            time.sleep(0.05)
        return found

    def records(self, kind):
        file = self.run_dir / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in records if record["kind"] == kind]

    def wait_for_steps(self, more=5):
        before = len(self.records("train"))
        self.wait_for("step", lambda: len(self.records("train")) >= before + more)

    def trainers(self):
        return json.loads((self.run_dir / "losses.json").read_text())["trainer_ranks"]

    def wait_for_trainers(self, ranks):
        """Wait until a generation with these trainers has made steps."""
        self.wait_for(f"view of {ranks}", lambda: sorted(self.trainers()) == ranks)
        started = len(self.records("start"))
        self.wait_for("start", lambda: len(self.records("start")) >= started)
        self.wait_for_steps()

    def finish(self, code=0):
        (self.folder / "fast").touch()
        assert self.run.wait(LIMIT_S) == code, self.run.output.read_text()
        return FinishedRun(code, self.run.output.read_text(), self.run_dir)

    def rank(self, global_rank):
        """The process of a rank of the supervisor."""
        for child in psutil.Process(self.run.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if Path(f"/proc/{child.pid}/fd/1").readlink().name == f"rank-{global_rank}.log":
                    return child
        raise AssertionError(f"no rank {global_rank}")

    def indices(self):
        return Counter(int(line) for file in self.folder.glob("indices-*") for line in file.read_text().split())


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda **config: Job(tmp_path, stack, **config)


def assert_applied_once(finished):
    """Each sample was applied once in each pass, in runs in which each push is an update."""
    assert torch.equal(finished.load("model")["weights"], torch.full((SAMPLES,), float(EPOCHS)))
    assert finished.summary["samples"] == EPOCHS * SAMPLES


@pytest.mark.parametrize(
    ("consistency", "servers", "transport"),
    [("sync", 1, "auto"), ("bounded", 1, "rpc"), ("async", 2, "auto")],
)
def test_trainers_join_and_leave(start, consistency, servers, transport):
    config = {"consistency": consistency, "transport": transport}
    job = start(cluster={"num_servers": servers}, server=config)
    first = servers  # rank of trainer 0
    job.wait_for("run", lambda: job.records("train"))
    joined = [job.join(), job.join()]
    ranks = [first, first + 1, first + 2, first + 3]
    job.wait_for_trainers(ranks)
    assert job.leave(first)[0] == 0
    job.wait_for_trainers(ranks[1:])
    os.kill(joined[0].pid, signal.SIGTERM)
    assert joined[0].wait(LIMIT_S) == 0, joined[0].output.read_text()
    job.wait_for("two trainers", lambda: len(job.trainers()) == 2)
    job.wait_for_steps()
    finished = job.finish()
    assert joined[1].wait(LIMIT_S) == 0, joined[1].output.read_text()
    assert set(job.indices().values()) == {EPOCHS}
    assert len(job.indices()) == SAMPLES
    assert f"rank {first} (trainer 0) has left the run" in finished.output
    assert finished.summary["faults"] == []
    assert finished.summary["num_trainers"] == 2
    if consistency != "sync":
        assert_applied_once(finished)


def test_a_subscriber_follows_a_run_whose_trainers_join_and_leave(start):
    """Each version is whole, and newer than the one before; no update is taken back, though generations begin."""
    port = free_port()
    with following(f"tcp://127.0.0.1:{port}", counts=False) as follower:
        job = start(task="CountsUpdates", publish={"port": port})
        job.wait_for("run", lambda: job.records("train"))
        joined = job.join()
        job.wait_for_trainers([1, 2, 3])
        assert job.leave(1)[0] == 0
        job.wait_for_trainers([2, 3])
        assert job.leave(3)[0] == 0
        assert joined.wait(LIMIT_S) == 0, joined.output.read_text()
        job.wait_for_trainers([2])
        finished = job.finish()
    last = follower.received[-1]
    starts = json.loads((job.run_dir / "publisher.json").read_text())["starts"]
    assert [tuple(start) for start in starts] == list(last.starts)
    assert {weights.version.generation for weights in follower.received} == {start[0] for start in starts}
    assert len(starts) == 4, "each join and each leave begins one"
    assert follower.steps == sorted(follower.steps)
    assert len({weights.run for weights in follower.received}) == 1
    assert finished.summary["steps"] >= last.step > starts[-1][1]


def test_a_trainer_joins_a_run_whose_model_is_on_the_server(start):
    job = start(server={"compute": "server", "consistency": "async"})
    job.wait_for("run", lambda: job.records("train"))
    joined = job.join()
    job.wait_for_trainers([1, 2, 3])
    finished = job.finish()
    assert joined.wait(LIMIT_S) == 0, joined.output.read_text()
    assert_applied_once(finished)


def test_a_run_that_a_trainer_joined_equals_one_that_was_resumed_with_it(start, tmp_path):
    job = start()
    job.wait_for("run", lambda: job.records("train"))
    joined = job.join()
    job.wait_for("trainer", lambda: len(job.trainers()) == 3)
    copy = tmp_path / "copy" / "run"
    shutil.copytree(job.run_dir, copy, ignore=shutil.ignore_patterns(".*.tmp"))  # files that are being replaced
    finished = job.finish()
    assert joined.wait(LIMIT_S) == 0
    resumed = resume(
        FinishedRun(0, "", copy), "--set", "cluster.num_trainers=3", "--set", "cluster.elastic=false", timeout_s=LIMIT_S
    )
    assert resumed.code == 0, resumed.output
    assert resumed.summary["steps"] == finished.summary["steps"]
    assert torch.equal(resumed.load("model")["weights"], finished.load("model")["weights"])


def test_the_server_comes_back_to_trainers_that_have_joined(start):
    job = start(server={"consistency": "async"})
    job.wait_for("run", lambda: job.records("train"))
    joined = job.join()
    job.wait_for_trainers([1, 2, 3])
    job.rank(0).kill()
    job.wait_for("return", lambda: "all processes return" in (job.run_dir / "losses.json").read_text())
    job.wait_for_steps()
    finished = job.finish()
    assert joined.wait(LIMIT_S) == 0, joined.output.read_text()
    assert finished.summary["num_trainers"] == 3
    (fault,) = finished.summary["faults"]
    assert fault["text"].startswith("server 0 started again; all processes return to step ")
    assert_applied_once(finished)


@pytest.mark.nightly
def test_a_trainer_that_dies_between_two_generations_is_a_loss(start):
    """No server notices it: the trainer has left the first one, and takes no part in the second one yet."""
    job = start(task="DiesBetweenGenerations", server={"consistency": "async"})
    job.wait_for("run", lambda: job.records("train"))
    joined = job.join()
    job.wait_for_trainers([1, 2, 3])
    finished = job.finish()
    assert joined.wait(LIMIT_S) == 0, joined.output.read_text()
    (fault,) = finished.summary["faults"]
    assert fault["text"].startswith("trainer 1 is lost between two generations of the run")
    assert (finished.summary["restarts"], finished.summary["updates_redone"]) == (1, 0)
    assert_applied_once(finished)


def test_the_others_serve_the_data_of_a_trainer_that_nobody_replaces(start):
    job = start(
        cluster={"elastic": False, "num_trainers": 3, "max_restarts": 1, "timeout_s": 4},
        server={"consistency": "async"},
    )
    job.wait_for("run", lambda: job.records("train"))
    job.wait_for_steps()
    job.rank(3).kill()
    job.wait_for("replacement", lambda: job.records("joined"))
    job.wait_for_steps()
    job.rank(3).kill()
    job.wait_for("two trainers", lambda: job.trainers() == [1, 2])
    finished = job.finish()
    assert "no process took the place of rank 3" in finished.output
    assert finished.summary["samples_left"] == 0
    assert_applied_once(finished)


def test_a_trainer_that_joined_and_died_is_given_up(start):
    job = start(cluster={"timeout_s": 4}, server={"consistency": "async"})
    job.wait_for("run", lambda: job.records("train"))
    joined = job.join()
    job.wait_for_trainers([1, 2, 3])
    os.kill(joined.pid, signal.SIGKILL)
    job.wait_for("loss", lambda: job.records("lost"))
    job.wait_for_trainers([1, 2])
    assert_applied_once(job.finish())


@pytest.mark.parametrize("failure", ["raise", "die"])
def test_a_trainer_that_fails_before_it_takes_part_does_not_end_the_run(start, failure):
    job = start(cluster={"timeout_s": 3}, server={"consistency": "async", "lost_after_s": 2.0})
    job.wait_for("run", lambda: job.records("train"))
    joined = job.join(FAILURE=failure)
    assert joined.wait(LIMIT_S) == (1 if failure == "raise" else None)
    if failure == "raise":
        assert "the model cannot be built" in joined.output.read_text()
    job.wait_for("view without it", lambda: len(job.records("start")) == 3)
    job.wait_for_trainers([1, 2])
    finished = job.finish()
    assert_applied_once(finished)
    # It was no process of the run: nothing was lost, and no other generation waited for it.
    losses = {name: finished.summary[name] for name in ("faults", "restarts", "updates_redone")}
    assert losses == {"faults": [], "restarts": 0, "updates_redone": 0}
    assert json.loads((job.run_dir / "losses.json").read_text())["view"] == 3
    assert "rank 3 did not join; the run continues without" in [note["text"] for note in job.records("note")]


def test_the_last_trainer_that_leaves_interrupts_the_run(start):
    job = start(cluster={"num_trainers": 1})
    job.wait_for("run", lambda: job.records("train"))
    job.rank(1).terminate()
    assert job.run.wait(LIMIT_S) == 3, job.run.output.read_text()
    finished = FinishedRun(3, job.run.output.read_text(), job.run_dir)
    assert finished.summary["status"] == "interrupted"
    (job.folder / "fast").touch()
    resumed = resume(finished, timeout_s=LIMIT_S)
    assert resumed.code == 0, resumed.output
    assert set(job.indices().values()) == {EPOCHS}


def test_a_signal_to_an_elastic_run_interrupts_it(start):
    job = start()
    job.wait_for("run", lambda: job.records("train"))
    os.kill(job.run.pid, signal.SIGTERM)
    assert job.run.wait(LIMIT_S) == 3, job.run.output.read_text()


def test_what_cannot_join_or_leave_is_refused(start, tmp_path):
    job = start()
    job.wait_for("run", lambda: job.records("train"))
    assert job.leave(7) == (2, "error: --rank (7) must be that of a trainer of the run: 1, 2\n")
    other = tmp_path / "other.yaml"
    other.write_text(job.file.read_text() + "seed: 5\n")
    port = json.loads((job.run_dir / "environment.json").read_text())["store"]["master_port"]
    joined = job.join("--config", other, "--master_addr", "127.0.0.1", "--master_port", port)
    assert joined.wait(LIMIT_S) == 2
    assert "rank 3 has another configuration than rank 0 (seed: 0 -> 5)" in joined.output.read_text()
    job.finish()
    late = job.join()
    assert late.wait(LIMIT_S) == 1
    assert "only a running job can be joined or left" in late.output.read_text()


@pytest.mark.parametrize("lost_at", ["send_request", "refusal"])
def test_a_trainer_that_is_to_leave_as_the_run_ends_has_no_error_of_rank_0(monkeypatch, lost_at):
    def lose(*_):
        raise PeerLost("rank 0 is gone, and its store with it (Connection reset by peer); look for its own error")

    monkeypatch.setattr(resize, "send_request", lambda *_: "key")
    monkeypatch.setattr(resize, lost_at, lose)
    monkeypatch.setattr(elastic, "_connect", lambda *_: contextlib.nullcontext((None, [1, 2])))
    arguments = argparse.Namespace(run="runs/a", rank=2)
    with pytest.raises(PeerLost, match=r"^the run in runs/a ended before rank 2 left it$"):
        elastic._leave(arguments, Config(), None, [])


@pytest.mark.parametrize("ended", ["PeerLost", "RunEnded"])
@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("interrupted", 3), ("failed", 1), (None, 1)])
def test_a_trainer_that_asks_to_join_as_the_run_ends_ends_as_the_run_did(monkeypatch, tmp_path, ended, status, code):
    def lose(*_):
        if status is not None:
            (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
        raise getattr(errors, ended)("rank 0 is gone, and its store with it (Connection reset by peer)")

    monkeypatch.setattr(rank, "run_rank", lose)
    monkeypatch.setattr(resize, "draw_rank", lambda *_: 3)
    monkeypatch.setattr(elastic, "_ANSWER_S", 0.01)
    monkeypatch.setattr(elastic, "_connect", lambda *_: contextlib.nullcontext((None, [1, 2])))
    identity = ProcessIdentity(1, 2, 1, 2, 0, "127.0.0.1", 29500, False, "job", "join")
    arguments = argparse.Namespace(run=tmp_path)
    config = Config(mode="rpc", cluster=ClusterConfig(elastic=True, timeout_s=0.5))
    assert run_command(lambda: elastic._join(arguments, config, identity, [])) == code


@pytest.mark.parametrize(
    ("config", "code", "message"),
    [
        ({"task": "Opaque", "training": {"max_steps": 100}}, 2, "the data of this run cannot be divided among"),
        ({"cluster": {"elastic": False}}, 2, "cluster.elastic (False) must be true"),
        ({"mode": "ddp"}, 2, "mode (ddp) must be rpc"),
    ],
)
def test_runs_that_no_trainer_can_join(start, config, code, message):
    job = start(**config)
    job.wait_for("run", lambda: job.records("train"))
    joined = job.join()
    assert joined.wait(LIMIT_S) == code, joined.output.read_text()
    assert message in joined.output.read_text()
    job.finish()
