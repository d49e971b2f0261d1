"""Trainers that run freely, as real processes: every gradient is exact, nothing is lost, and each word is kept."""

import math
import os
import re
import select
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import psutil
import pytest
from launching import (
    TASKS,
    FinishedRun,
    assert_equal_runs,
    differing_tensors,
    resume_in_process,
    run_concurrently,
    run_in_process,
    write_config,
)
from memory_maps import shared_maps
from step_oracle import Ledger, PacedTask, Replay

from paramserver.checkpoint import read_checkpoint
from paramserver.evaluate import evaluate_run

pytestmark = pytest.mark.processes

REPLAY = TASKS.with_name("step_oracle.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("free")


@pytest.fixture(scope="module")
def started(fork_server, folder):
    """Starts a run of ``Paced`` under trainers that write ledgers, and waits for its end."""

    def start(name, trainers, *flags, code=0, servers=1, **config):
        config = {"task": f"{REPLAY}:PacedTask", "trainer": f"{REPLAY}:LedgerTrainer", "mode": "rpc", **config}
        file = write_config(folder / name, cluster={"num_trainers": trainers, "num_servers": servers}, **config)
        said, output = fork_server.run(["--config", file, "--set", f"logging.name={name}", *flags], folder / name)
        assert said == code, output
        return FinishedRun(said, output, folder / name / "runs" / name)

    return start


@pytest.fixture(scope="module")
def resumed(fork_server):
    """Goes on with a run."""

    def resume(finished, *flags, code=0):
        said, output = fork_server.run(["--resume", finished.run_dir, *flags], finished.run_dir.parent)
        assert said == code, output
        return FinishedRun(said, output, finished.run_dir)

    return resume


# Every gradient of eight trainers.

SMALL_MB = 0.0005  # most parameters travel in a message of their own, while backward goes on

ASYNC = {
    "shared_memory": {
        "task_args": {"pace_ms": 4.0, "slow": 3, "slow_ms": 200.0, "samples": 400},
        "server": {"consistency": "async", "transport": "shared_memory", "stale_scaling": "inverse"},
        "training": {"max_steps": 120, "batch_size": 8, "validate_every": 15},
        "checkpoint": {"every": 60, "keep": 10},
    },
    "rpc": {
        "task_args": {
            **{"pace_ms": 4.0, "samples": 400, "optimizer": "adamw", "groups": True, "schedule": "step"},
            **{"unused": True, "alternate": True},
        },
        "server": {"consistency": "async", "transport": "rpc", "bucket_mb": SMALL_MB},
        "training": {"max_steps": 90, "batch_size": 4, "accumulate_batches": 2, "clip_grad_norm": 0.5},
    },
}


@dataclass(frozen=True)
class Replayed:
    """A run, what its trainers wrote, and the same again."""

    finished: FinishedRun
    config: dict
    ledger: Ledger
    replay: Replay

    @classmethod
    def of(cls, finished, config):
        training, server = config["training"], config["server"]
        task = PacedTask(**{**config["task_args"], "pace_ms": 0, "slow": None, "stops": ()})
        ledger = Ledger.of(finished)
        replay = Replay(
            task,
            clip_grad_norm=training.get("clip_grad_norm"),
            stale_scaling=server.get("stale_scaling", "none"),
        )
        return cls(finished, config, ledger, replay.run(ledger))

    def check(self):
        """The trainers pushed what one process computes; model and optimizer ended at the same bits."""
        assert self.replay.wrong == []
        assert differing_tensors(self.replay.model.state_dict(), self.finished.load("model")) == []
        mine, theirs = self.replay.optimizer.state_dict(), self.finished.load("optimizer")
        assert differing_tensors(mine, theirs) == []
        assert mine["param_groups"] == theirs["param_groups"]


@pytest.fixture(scope="module", params=ASYNC)
def eight(request, started):
    config = ASYNC[request.param]
    return Replayed.of(started(f"eight-{request.param}", 8, **config), config)


@pytest.mark.sampled(2)
def test_eight_trainers_push_what_one_process_computes_bit_for_bit(eight):
    """At the version that each names, which is stale for half of them, while several are inside backward."""
    ledger = eight.ledger
    assert ledger.ways == {eight.config["server"]["transport"]}
    assert len(ledger.applied) == eight.config["training"]["max_steps"]
    eight.check()
    stale = [e.staleness for e in ledger.applied]
    print(f"stale {sum(s > 0 for s in stale)} of {len(stale)}, most {max(stale)}, inside {ledger.most_inside()}")
    assert sum(s > 0 for s in stale) >= len(stale) / 2
    assert ledger.most_inside() >= 2


@pytest.mark.sampled(2)
def test_a_checkpoint_is_a_cut(eight):
    """The model is of that version, and each trainer's part counts the pushes that made it, and no other."""
    finished = eight.finished
    for name in finished.checkpoints:
        step = read_checkpoint(finished.run_dir / "checkpoints" / name).step
        assert differing_tensors(eight.replay.versions[step], finished.load("model", step)) == []
        for trainer in range(8):
            pushed = [e for e in eight.ledger.entries if e.trainer == trainer and e.step <= step]
            served = sum(len(e.samples) for e in pushed)
            part = finished.load(f"trainer-{trainer}", step)
            assert part["counters"]["samples_served"] == part["buffer"]["counters"]["gets"] == served


@pytest.mark.sampled(2)
def test_a_validation_is_of_the_version_that_it_names(eight):
    """One of every multiple of validate_every, also where no checkpoint keeps that version."""
    every = eight.config["training"].get("validate_every")
    records = eight.finished.of_kind("validation")
    assert [r["step"] for r in records] == (list(range(every, 121, every)) if every else [90])
    checkpoints = [int(name.removeprefix("step-")) for name in eight.finished.checkpoints]
    assert checkpoints == ([60, 120] if every else [90])
    for record in records:
        assert eight.replay.validated(record["step"]) == pytest.approx(record["values"], rel=1e-6)
        if record["step"] in checkpoints:
            found = evaluate_run(eight.finished.run_dir, str(record["step"]))
            assert found.values == pytest.approx(record["values"], rel=1e-6)
            assert found.samples == record["samples"] == 37
    assert len({round(r["values"]["loss"], 5) for r in records}) == len(records)


# Stopped, and gone on with.

SLOWEST = {"pace_ms": 3.0, "slow": 2, "slow_ms": 25.0, "samples": 320}
ONE_PASS = {"max_steps": None, "max_epochs": 1, "batch_size": 4, "validate_every": 0, "uneven_inputs": "join"}
STOPPED = {
    "bounded": {
        "task_args": {**SLOWEST, "stops": [[1, 7]]},
        "server": {"consistency": "bounded", "staleness_bound": 2, "transport": "shared_memory"},
        "training": ONE_PASS,
    },
    "backup": {
        "task_args": {**SLOWEST, "stops": [[1, 7]], "optimizer": "adam"},
        "server": {"consistency": "sync", "backup_trainers": 1, "transport": "rpc", "bucket_mb": SMALL_MB},
        "training": ONE_PASS,
    },
    "async": {
        # Others are three steps ahead before the first one of the slow trainer, whatever the machine does.
        "task_args": {**SLOWEST, "stops": [[1, 7, "parent"]], "schedule": "step", "gate": "gate"},
        "server": {"consistency": "async", "transport": "shared_memory"},
        "training": {**ONE_PASS, "accumulate_batches": 2, "clip_grad_norm": 0.5},
        "checkpoint": {"every": 20, "keep": 10},
    },
}


@pytest.fixture(scope="module")
def stopped(started, resumed):
    """Runs that SIGTERM to one trainer interrupts and that go on to the end of a pass: the first summary, and all."""

    @cache
    def stop(kind):
        first = started(f"stopped-{kind}", 4, code=3, logging={"log_every": 3}, **STOPPED[kind])
        before = first.summary
        return before, Replayed.of(resumed(first), STOPPED[kind])

    return stop


@pytest.mark.sampled(1)  # other tests need each of these runs
@pytest.mark.parametrize("kind", STOPPED)
def test_nothing_is_lost_where_a_run_is_stopped(stopped, kind):
    """Every sample of the pass is served once, before the stop or after it, and applied unless it was dropped."""
    before, run = stopped(kind)
    ledger, after = run.ledger, run.finished.summary
    assert before["status"] == "interrupted"
    assert 0 < before["steps"] < after["steps"] == len(ledger.updates())
    assert sorted(n for e in ledger.entries for n in e.samples) == list(range(320))
    dropped = sum(len(e.samples) for e in ledger.dropped)
    assert (after["samples"], after["samples_served"], after["samples_left"]) == (320 - dropped, 320, 0)
    assert before["samples"] == sum(len(e.samples) for e in ledger.applied if e.step <= before["steps"])
    for name in run.finished.checkpoints:
        step = read_checkpoint(run.finished.run_dir / "checkpoints" / name).step
        assert differing_tensors(run.replay.versions[step], run.finished.load("model", step)) == []
    assert {before["checkpoint"], after["checkpoint"]} <= set(run.finished.checkpoints)


@pytest.mark.sampled(1)  # other tests need each of these runs
@pytest.mark.parametrize("kind", STOPPED)
def test_a_run_that_was_stopped_is_replayed_to_its_end(stopped, kind):
    _, run = stopped(kind)
    run.check()
    pushes = [len(entries) for _, entries in run.ledger.updates()]
    if kind == "backup":
        assert max(pushes) == 3
        assert run.ledger.dropped
        assert all(e.staleness == 0 for e in run.ledger.applied)
    else:
        assert set(pushes) == {1}
        assert not run.ledger.dropped


@pytest.mark.sampled(1)  # other tests need each of these runs
@pytest.mark.parametrize("kind", STOPPED)
def test_a_run_that_was_stopped_has_the_records_of_each_step_once(stopped, kind):
    """log_every is 3: of each window of updates, and of each trainer's own steps, and one more where it ended."""
    _, run = stopped(kind)
    last, of_kind = run.finished.summary["steps"], run.finished.of_kind
    windows = [*range(3, last, 3), last]
    assert [r["step"] for r in of_kind("train")] == [r["step"] for r in of_kind("staleness")] == windows
    gradients = [sum(r["histogram"].values()) for r in of_kind("staleness")]
    assert sum(gradients) == len(run.ledger.applied)
    for trainer in range(4):
        steps = sum(e.trainer == trainer for e in run.ledger.entries)
        own = [r for r in of_kind("buffer") if r["trainer"] == trainer]
        assert len(own) == len({r["step"] for r in own}) == math.ceil(steps / 3)
        assert own[-1]["gets"] == sum(len(e.samples) for e in run.ledger.entries if e.trainer == trainer)


def test_no_trainer_starts_further_ahead_than_the_bound(stopped):
    """Its clock, counted in the version that it starts with; a gradient is at most (T - 1)(2 s + 1) versions old."""
    _, run = stopped("bounded")
    bound = run.config["server"]["staleness_bound"]
    distances = []
    for entry in run.ledger.applied:
        clocks = run.ledger.clocks(entry.version, 4)
        distances.append(clocks[entry.trainer] - min(clocks))
    assert max(distances) == bound
    assert 0 < max(e.staleness for e in run.ledger.applied) <= 3 * (2 * bound + 1)


def test_without_the_bound_trainers_part_further(stopped):
    """The same pace without a bound: so it was the bound that held them."""
    _, run = stopped("async")
    clocks = [run.ledger.clocks(e.version, 4) for e in run.ledger.applied]
    assert max(max(c) - min(c) for c in clocks) > STOPPED["bounded"]["server"]["staleness_bound"]


def test_a_run_goes_on_under_another_consistency(started, resumed):
    config = {
        "task_args": {"pace_ms": 3.0, "samples": 96, "stops": [[0, 5], [1, 12]], "schedule": "epoch"},
        "server": {"consistency": "sync"},
        "training": {"max_steps": 40, "batch_size": 4, "accumulate_batches": 2, "validate_every": 0},
    }
    run = started("mixed", 3, code=3, **config)
    first = run.summary["steps"]
    # With a bound, so that the trainer that stops gets its turn whatever the machine does.
    run = resumed(run, "--set", "server.consistency=bounded", "--set", "server.staleness_bound=2", code=3)
    second = run.summary["steps"]
    run = resumed(run, "--set", "server.consistency=sync")
    mixed = Replayed.of(run, config)
    mixed.check()
    pushes = [len(entries) for _, entries in mixed.ledger.updates()]
    assert 0 < first < second < 40 == len(pushes)
    assert set(pushes[:first]) == set(pushes[second:]) == {3}
    assert set(pushes[first:second]) == {1}


# One trainer.

ALONE = {
    "task_args": {"groups": True, "optimizer": "adam", "schedule": "validation", "samples": 80, "validation": 11},
    "training": {
        "max_steps": 24,
        "batch_size": 4,
        "accumulate_batches": 2,
        "clip_grad_norm": 0.5,
        "validate_every": 5,
    },
    "checkpoint": {"every": 7, "keep": 10},
}
KINDS = {
    "sync": {"consistency": "sync", "backup_trainers": 0},
    "bounded": {"consistency": "bounded"},
    "async": {"consistency": "async"},
}


@pytest.fixture(scope="module")
def alone(folder):
    return run_in_process(folder / "alone", task=f"{REPLAY}:PacedTask", **ALONE)


@pytest.mark.parametrize("kind", KINDS)
def test_one_trainer_is_the_same_under_every_consistency_bit_for_bit(started, alone, kind):
    def ended(transport):
        server = {**KINDS[kind], "transport": transport}
        return started(f"{kind}-{transport}", 1, server=server, **ALONE)

    for run in run_concurrently(*(partial(ended, transport) for transport in ("rpc", "shared_memory"))):
        assert_equal_runs(alone, run)
        assert Ledger.of(run).ways == {run.run_dir.name.removeprefix(f"{kind}-")}


@pytest.mark.parametrize("kind", KINDS)
def test_one_trainer_that_is_stopped_is_the_same_bit_for_bit(started, resumed, alone, kind):
    """At a step that is to be validated, which the schedule follows: the signal comes in its second batch."""
    config = {**ALONE, "task_args": {**ALONE["task_args"], "stops": [[0, 19]]}}
    run = started(f"{kind}-stopped", 1, server=KINDS[kind], code=3, **config)
    assert run.summary["steps"] == 10
    assert_equal_runs(alone, resumed(run))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_ended_with_an_epoch_goes_on_in_another_mode(folder, started, resumed, kind):
    """The schedule of epochs takes each step once, on whichever side of the end that is."""
    config = {
        "task_args": {"schedule": "epoch", "samples": 32, "validation": 0},
        "training": {"max_steps": None, "max_epochs": 3, "batch_size": 8, "validate_every": 0},
    }
    whole = run_in_process(folder / f"epochs-{kind}", task=f"{REPLAY}:PacedTask", **config)
    run = started(f"epochs-{kind}", 1, "--set", "training.max_epochs=1", server=KINDS[kind], **config)
    run = resume_in_process(run, "--mode", "local", "--set", "trainer=null", "--set", "training.max_epochs=2")
    run = resumed(run, "--mode", "rpc", "--set", "training.max_epochs=3")
    assert [r["lr"] for r in run.of_kind("train")] == [[rate] for rate in (0.05, 0.025, 0.0125) for _ in range(4)]
    assert_equal_runs(whole, run)
    assert whole.load("optimizer")["param_groups"] == run.load("optimizer")["param_groups"]


# The best version, and the two transports.


def test_the_best_checkpoint_is_the_version_that_was_validated(started, resumed):
    config = {
        "task_args": {"pace_ms": 2.0, "samples": 96, "stops": [[2, 9]]},
        "server": {"consistency": "async"},
        "training": {"max_steps": 60, "batch_size": 4, "validate_every": 6},
        "checkpoint": {"every": 0, "keep": 1, "best": {"metric": "loss", "mode": "max"}},
    }
    run = resumed(started("best", 3, code=3, **config))
    Replayed.of(run, config).check()
    records = run.of_kind("validation")
    assert [r["step"] for r in records] == list(range(6, 61, 6))
    best = max(records, key=lambda r: r["values"]["loss"])
    assert run.best == f"step-{best['step']:08d}"
    assert evaluate_run(run.run_dir, "best").values == pytest.approx(best["values"], rel=1e-6)


def test_both_transports_are_the_same_in_sync_bit_for_bit(started):
    def ended(transport):
        return started(f"two-{transport}", 2, server={"transport": transport}, **ALONE)

    rpc, memory = run_concurrently(partial(ended, "rpc"), partial(ended, "shared_memory"))
    assert (Ledger.of(rpc).ways, Ledger.of(memory).ways) == ({"rpc"}, {"shared_memory"})
    assert_equal_runs(rpc, memory, trainers=2)


def test_a_parameter_that_is_changed_in_place_on_a_trainer_is_refused_by_name(started):
    server = {"consistency": "async", "transport": "shared_memory"}
    training = {"max_steps": 20000}  # so that trainer 1 comes to its fourth batch, however fast the other one is
    run = started("changed", 2, code=2, server=server, task_args={"changes": 1}, training=training)
    # Trainer 0 notices it first if it computes at the same version, in the memory that trainer 1 changes.
    refused = r"\(trainer [01]\): parameter gate was changed by the task, and belongs to the servers"
    lines = [line for line in run.output.splitlines() if re.search(refused, line)]
    assert lines, run.output
    for line in lines:
        assert ("(trainer 0)" in line) == ("another one may have changed it" in line)
    assert run.summary["status"] == "failed"


@pytest.mark.parametrize("transport", ["shared_memory", "rpc", "tcp"])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_trainer_that_is_late_begins_at_what_is_current(started, folder, transport, servers):
    fifo = folder / f"late-{transport}-{servers}"
    os.mkfifo(fifo)
    os.mkfifo(fifo.with_suffix(".applied"))
    finished = started(
        fifo.name + "-run",
        2,
        trainer=f"{REPLAY}:DelayedPull",
        task_args={"fifo": str(fifo)},
        servers=servers,
        server={"consistency": "async", "transport": transport},
        training={"max_steps": 40},
    )
    versions = [entry.version for entry in Ledger.of(finished).entries if entry.trainer == 1]
    assert versions
    assert versions[0] >= 9


def test_nothing_is_left_of_a_run_that_is_killed(fork_server, folder):
    """All of its processes at once, with kill -9, while they share memory."""
    fifo = folder / "killed.fifo"
    os.mkfifo(fifo)
    os.mkfifo(fifo.with_suffix(".applied"))  # trainer 0 waits there, and the run goes on until it is killed
    file = write_config(
        folder / "killed",
        task=f"{REPLAY}:PacedTask",
        task_args={"pace_ms": 2.0, "fifo": str(fifo)},
        mode="rpc",
        server={"consistency": "async", "transport": "shared_memory"},
        cluster={"num_trainers": 2},
        training={"max_steps": None, "max_seconds": 100},
    )
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with fork_server.start(["--config", file], folder / "killed") as run, ExitStack() as stack:
        stack.callback(os.close, reading)
        assert select.select([reading], [], [], 60)[0], "no trainer is at its tenth batch"
        processes = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        assert len(processes) == 5  # the supervisor, three ranks, and the process that guards them
        names = {name for p in processes for name in abstract_names(p.pid)}
        shared = [line for p in processes for line in shared_maps(p.pid)]
        ends = [os.pidfd_open(p.pid) for p in processes]
        for end in ends:
            stack.callback(os.close, end)
        run.kill()
        assert run.wait() is None
        for end in ends:
            assert select.select([end], [], [], 10)[0], "a process outlived kill -9"
    assert any(name.startswith("@paramserver-") for name in names)
    assert not names & {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    assert shared
    assert not [line for line in shared if "memfd:paramserver-segment" not in line]


def abstract_names(pid):
    """Of the sockets that a process holds."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the process runs, and has closed it since it was listed
            links.append(str(link.readlink()))
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if row[6] in inodes and len(row) > 7 and row[7].startswith("@")}
