"""Trainers that run freely, as real processes: every gradient is exact, nothing is lost, and each word is kept."""

import pytest
from nest import Nest
from replay import Ledger, Paced, Replay
from runs import TASKS, Finished, environment, same_bits, write_config

from paramserver.evaluate import evaluate_run

pytestmark = pytest.mark.processes

REPLAY = TASKS.with_name("replay.py")


@pytest.fixture(scope="module")
def nest():
    with Nest(environment()) as nest:
        yield nest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("free")


@pytest.fixture(scope="module")
def started(nest, folder):
    """Starts a run of ``Paced`` under trainers that write ledgers, and waits for its end."""

    def start(name, trainers, *flags, code=0, **config):
        config = {"task": f"{REPLAY}:Paced", "trainer": f"{REPLAY}:LedgerTrainer", "mode": "rpc", **config}
        file = write_config(folder / name, cluster={"num_trainers": trainers}, **config)
        said, output = nest.run(["--config", file, "--set", f"logging.name={name}", *flags], folder / name)
        assert said == code, output
        return Finished(said, output, folder / name / "runs" / name)

    return start


@pytest.fixture(scope="module")
def resumed(nest):
    """Goes on with a run."""

    def resume(finished, *flags, code=0):
        said, output = nest.run(["--resume", finished.run_dir, *flags], finished.run_dir.parent)
        assert said == code, output
        return Finished(said, output, finished.run_dir)

    return resume


# Every gradient of eight trainers.

ASYNC = {
    "shared_memory": {
        "task_args": {"pace_ms": 4.0, "samples": 400},
        "server": {"consistency": "async", "transport": "shared_memory", "stale_scaling": "inverse"},
        "training": {"max_steps": 120, "batch_size": 8, "validate_every": 15},
        "checkpoint": {"every": 30, "keep": 10},
    },
    "rpc": {
        "task_args": {
            **{"pace_ms": 4.0, "samples": 400, "optimizer": "adamw", "groups": True, "schedule": "step"},
            **{"unused": True, "alternate": True},
        },
        "server": {"consistency": "async", "transport": "rpc"},
        "training": {
            **{"max_steps": 90, "batch_size": 4, "accumulate_batches": 2, "clip_grad_norm": 0.5, "validate_every": 0}
        },
    },
}


@pytest.fixture(scope="module", params=ASYNC)
def eight(request, started):
    return started(f"eight-{request.param}", 8, **ASYNC[request.param]), ASYNC[request.param]


def replayed(finished, config, ledger):
    """The replay of a run, which must have computed what the run did, and ended at the same bits."""
    task = Paced(**{**config["task_args"], "pace_ms": 0, "slow": None, "stops": ()})
    clip, scaling = config["training"].get("clip_grad_norm"), config["server"].get("stale_scaling", "none")
    replay = Replay(task, clip_grad_norm=clip, stale_scaling=scaling).run(ledger)
    assert replay.wrong == []
    assert same_bits(replay.model.state_dict(), finished.load("model")) == []
    assert same_bits(replay.optimizer.state_dict(), finished.load("optimizer")) == []
    return replay


def test_eight_trainers_push_what_one_process_computes_bit_for_bit(eight):
    """At the version that each names, which is stale for half of them, while several are inside backward."""
    finished, config = eight
    ledger = Ledger.of(finished)
    assert ledger.ways == {config["server"]["transport"]}
    assert len(ledger.applied) == config["training"]["max_steps"]
    replayed(finished, config, ledger)
    stale = [e.staleness for e in ledger.applied]
    print(f"stale {sum(s > 0 for s in stale)} of {len(stale)}, most {max(stale)}, inside {ledger.most_inside()}")
    assert sum(s > 0 for s in stale) >= len(stale) / 2
    assert ledger.most_inside() >= 2


# Validations of a version while others go on.


def test_a_validation_is_of_the_version_that_it_names(eight):
    """Where a checkpoint of the same step exists, it gives the same values; the versions between are replayed."""
    finished, config = eight
    every = config["training"]["validate_every"]
    records = finished.of_kind("validation")
    assert [r["step"] for r in records] == (list(range(every, 121, every)) if every else [90])
    checkpoints = [int(name.removeprefix("step-")) for name in finished.checkpoints]
    assert checkpoints == ([30, 60, 90, 120] if every else [90])
    for record in records:
        if record["step"] in checkpoints:
            assert evaluate_run(finished.run_dir, str(record["step"])).values == pytest.approx(record["values"], rel=1e-6)
    assert len({r["values"]["loss"] for r in records}) == len(records)


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
        "server": {"consistency": "sync", "backup_trainers": 1, "transport": "rpc", "stale_scaling": "none"},
        "training": ONE_PASS,
    },
    "async": {
        "task_args": {**SLOWEST, "stops": [[1, 7]], "schedule": "step"},
        "server": {"consistency": "async", "transport": "shared_memory"},
        "training": {**ONE_PASS, "accumulate_batches": 2, "clip_grad_norm": 0.5},
        "checkpoint": {"every": 5, "keep": 100},
    },
}


@pytest.fixture(scope="module", params=STOPPED)
def stopped(request, started, resumed):
    """Interrupted by SIGTERM to one trainer, then gone on with to the end of one pass: both ends, and the config."""
    config = STOPPED[request.param]
    first = started(f"stopped-{request.param}", 4, code=3, **config)
    before = first.summary
    return before, resumed(first), config


def test_nothing_is_lost_where_a_run_is_stopped(stopped):
    """Every sample of the pass is served once, before the stop or after it, and applied unless it was dropped."""
    before, finished, config = stopped
    ledger, after = Ledger.of(finished), finished.summary
    assert before["status"] == "interrupted"
    assert 0 < before["steps"] < after["steps"] == len(ledger.updates())
    assert sorted(n for e in ledger.entries for n in e.samples) == list(range(320))
    dropped = sum(len(e.samples) for e in ledger.dropped)
    assert (after["samples"], after["samples_served"], after["samples_left"]) == (320 - dropped, 320, 0)
    assert finished.checkpoints[-1] == f"step-{after['steps']:08d}"
    early = sum(len(e.samples) for e in ledger.applied if e.step <= before["steps"])
    assert before["samples"] == early
    assert (dropped > 0) == ("backup_trainers" in config["server"])


def test_a_run_that_was_stopped_is_replayed_to_its_end(stopped):
    _, finished, config = stopped
    ledger = Ledger.of(finished)
    replayed(finished, config, ledger)
    pushes = {len(entries) for _, entries in ledger.updates()}
    assert max(pushes) == (3 if "backup_trainers" in config["server"] else 1)
