"""Samples that know the version of their weights: none is served that is too old, and each is accounted for."""

import json
from functools import partial

import pytest
from launching import FinishedRun, differing_tensors, launch, resume, run_concurrently, run_in_process
from online_runs import ALL, SIMULATIONS, STEPS, STREAMS, ages, online_config, streams
from simulations import MAX_STALENESS
from stream_tasks import served

from paramserver.metrics.tensorboard import scalars
from paramserver.trainers import data

pytestmark = pytest.mark.processes

LIMIT = MAX_STALENESS


def settings(folder, mode="local", function="act", simulations=None, buffer=None, **sections):
    simulations = {"function": f"{SIMULATIONS}:{function}", "window": 2, **(simulations or {})}
    buffer = {"capacity": 12, "max_staleness": LIMIT, **(buffer or {})}
    made = {"task": f"{STREAMS}:FedWithVersions", "publish": {"every": 1}, "logging": {"log_every": 1}, **sections}
    return online_config(folder, mode=mode, simulations=simulations, buffer=buffer, **made)


def assert_accounts_agree(finished, repeats=False):
    """received = applied + stale, as nothing is held at the end, and received + lost = sent."""
    lost = finished.summary["simulations"]["lost"]
    assert streams(finished, "received") + lost == len(ALL)
    if not repeats:
        assert finished.summary["samples"] + streams(finished, "stale") == streams(finished, "received")


MODES = {
    "local": {},
    "ddp": {"mode": "ddp"},
    "rpc": {"mode": "rpc"},
    "rpc in messages": {"mode": "rpc", "server": {"transport": "rpc"}},
    "rounds": {"mode": "rpc", "training": {"local_steps": 2}},
    "steps may be skipped, ddp": {"mode": "ddp", "training": {"nonfinite": "skip"}},
    "steps may be skipped, rpc": {"mode": "rpc", "training": {"nonfinite": "skip"}},
    "async": {"mode": "rpc", "server": {"consistency": "async"}},
    "bounded": {"mode": "rpc", "server": {"consistency": "bounded", "staleness_bound": 1}},
}


@pytest.mark.parametrize("kind", ["fifo", "firo", "reservoir"])
@pytest.mark.parametrize("case", MODES)
@pytest.mark.sampled(13)
def test_no_sample_is_served_that_is_too_old(tmp_path, case, kind):
    """A simulation is killed in its middle and starts again: what it sends twice is received once."""
    finished = launch(tmp_path, **settings(tmp_path, buffer={"kind": kind}, **MODES[case]))
    assert finished.code == 0, finished.output
    assert finished.summary["simulations"]["restarted"] == 1
    assert_accounts_agree(finished, repeats=kind == "reservoir")
    assert streams(finished, "refused") == 0
    keys = served(tmp_path / "ledger")
    found = ages(tmp_path)
    assert len(found) == len(keys) == finished.summary["samples"]
    if kind != "reservoir":
        assert len(set(keys)) == len(keys)
    assert len(set(keys)) + streams(finished, "stale") == len(ALL)
    assert streams(finished, "stale") > 0
    assert f"{streams(finished, 'stale')} stale" in finished.output
    # Between the announcement of a step and its grant other trainers make updates, if they run freely.
    loose = 2 if case in ("async", "bounded") else 0
    assert max(step - version for *_, (_, version), step in found) <= LIMIT + loose
    histograms = [record["stream"]["staleness"] for record in finished.of_kind("buffer")]
    total = sum(count for histogram in histograms for count in histogram.values())
    assert total == len(found)
    last = finished.of_kind("buffer")[-1]
    assert dict(scalars(last))[f"stream/trainer-{last['trainer']}/stale"] == last["stream"]["stale"]


def test_modes_serve_the_same_where_the_order_is_fixed(tmp_path):
    def run(mode):
        simulations = {"at_once": 1, "count": 4}
        return launch(tmp_path / mode, **settings(tmp_path / mode, mode, "act_as_planned", simulations))

    for mode in ("rpc", "ddp"):
        (tmp_path / mode).mkdir()
    rpc, ddp = run_concurrently(*(partial(run, mode) for mode in ("rpc", "ddp")))
    assert rpc.code == ddp.code == 0, rpc.output + ddp.output
    assert sorted(ages(tmp_path / "rpc")) == sorted(ages(tmp_path / "ddp"))
    assert streams(rpc, "stale") == streams(ddp, "stale") > 0
    assert max(step for *_, step in ages(tmp_path / "rpc")) == LIMIT + 1
    assert differing_tensors(rpc.load("model"), ddp.load("model")) == []


@pytest.mark.parametrize(("mode", "trainers"), [("local", 1), ("ddp", 2), ("rpc", 2), ("rpc", 3)])
@pytest.mark.sampled(2)
def test_a_run_that_is_resumed_has_counted_each_sample_once(tmp_path, mode, trainers):
    """Versions that were taken back count from the checkpoint, of the second generation."""
    made = settings(tmp_path, mode, task_args={"stop": 3})
    first = launch(tmp_path, **made)
    assert first.code == 3, first.output
    sets = {"task_args.stop": "null", "cluster.num_trainers": trainers, "buffer.capacity": 64}
    second = resume(first, *(word for key, value in sets.items() for word in ("--set", f"{key}={value}")))
    assert second.code == 0, second.output
    assert_accounts_agree(second)
    keys = served(tmp_path / "ledger")
    assert len(set(keys)) == len(keys) == second.summary["samples"]
    assert {version[0] for *_, version, _ in ages(tmp_path)} == {1, 2}
    starts = dict(json.loads((second.run_dir / "publisher.json").read_text())["starts"])
    for *_, (generation, version), step in ages(tmp_path):
        known = min(version, starts[2]) if generation == 1 and step >= starts[2] else version
        assert step - known <= LIMIT


def test_a_run_that_begins_to_publish_when_it_is_resumed_has_samples_without_a_version(tmp_path):
    made = settings(tmp_path, task_args={"stop": 3}, function="simulate")
    made["task"], made["buffer"], made["publish"] = f"{STREAMS}:Fed", {"capacity": 12}, None
    first = launch(tmp_path, **made)
    assert first.code == 3, first.output
    second = resume(first, "--set", "task_args.stop=null", "--set", "publish.every=1")
    assert second.code == 0, second.output
    assert sorted(served(tmp_path / "ledger")) == ALL


def test_a_version_of_the_future_is_refused_at_once_where_no_other_trainer_makes_updates(tmp_path):
    """Also while the trainer waits for data; the simulation starts again, and sends the sample with another one."""
    options = {"buffer": {"max_staleness": 1000}, "simulations": {"count": 3, "at_once": 1}}
    finished = run_in_process(tmp_path, **settings(tmp_path, function="act_of_the_future", **options))
    assert finished.code == 0, finished.output
    assert (streams(finished, "refused"), finished.summary["simulations"]["restarted"]) == (3, 3)
    assert (streams(finished), streams(finished, "stale"), finished.summary["samples"]) == (3 * STEPS, 0, 3 * STEPS)
    assert "must not be newer than the model (1, " in finished.output


def test_starvation_is_reported_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "STARVATION_S", 0.0)
    monkeypatch.setattr(data, "_ANNOUNCE_AFTER_S", 0.05)
    finished = run_in_process(tmp_path, **settings(tmp_path, function="act_too_late"))
    assert finished.code == 0, finished.output
    [note] = [record["text"] for record in finished.of_kind("note") if "max_staleness" in record["text"]]
    assert note.startswith("trainer 0 waits for data: ")
    assert "older than buffer.max_staleness (2 updates); the newest version that was received is (1, 0)" in note
    assert f"the model has step {finished.summary['steps']}" in note
    assert note in finished.output
    assert finished.summary["steps"] == LIMIT + 1
    assert_accounts_agree(finished)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"publish": None}, "buffer.max_staleness (2) must be null without the section publish"),
        ({"buffer": {"max_staleness": -1}}, "buffer.max_staleness (-1)"),
        ({"buffer": {"max_staleness": 1.5}}, "buffer.max_staleness (1.5)"),
    ],
)
def test_a_limit_that_cannot_hold_is_refused(tmp_path, section, text):
    finished = run_in_process(tmp_path, **settings(tmp_path, **section))
    assert isinstance(finished, FinishedRun)
    assert finished.code == 2
    assert text in finished.output
