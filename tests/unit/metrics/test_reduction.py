"""Values that several trainers log, combined over them."""

import math
import random

import pytest

from paramserver.config import ClusterConfig, Config
from paramserver.metrics import FanOut, Sink
from paramserver.metrics.records import LogReducer, make_record
from paramserver.runs.monitor import RunMonitor


def log(step, trainer, value, reduce="mean", weight=1, name="gap"):
    return make_record("log", step, trainer=trainer, name=name, value=value, reduce=reduce, weight=weight)


def progress(step, trainer):
    return make_record("buffer", step, trainer=trainer)


def values(records):
    return [(record["step"], record["name"], record["value"], record["trainers"]) for record in records]


@pytest.mark.parametrize(("reduce", "value"), [("mean", (1 * 8 + 2 * 8 + 6 * 4) / 20), ("sum", 9.0), ("max", 6.0)])
def test_the_values_of_a_step_become_one_once_all_have_passed_it(reduce, value):
    """A trainer that accumulates batches logs several times in a step."""
    reducer = LogReducer([0, 1])
    for record in (log(3, 0, 1.0, reduce, 8), log(3, 0, 2.0, reduce, 8), log(3, 1, 6.0, reduce, 4), progress(4, 0)):
        assert reducer.add(record) == []
    assert values(reducer.add(progress(4, 1))) == [(3, "gap", value, 2)]
    assert reducer.flush() == []


@pytest.mark.parametrize(
    ("pair", "reduce", "value"),
    [
        ((math.inf, -math.inf), "mean", math.nan),
        ((math.inf, -math.inf), "sum", math.nan),
        ((math.inf, 1.0), "mean", math.inf),
        ((1e308, 1e308), "sum", math.inf),
        ((math.nan, 1.0), "max", math.nan),
        ((1.0, math.nan), "max", math.nan),
    ],
)
def test_values_that_are_not_finite_are_combined_as_in_torch(pair, reduce, value):
    reducer = LogReducer([0, 1])
    for trainer, logged in enumerate(pair):
        reducer.add(log(3, trainer, logged, reduce))
    assert values(reducer.flush()) == [(3, "gap", pytest.approx(value, nan_ok=True), 2)]


def test_the_order_of_arrival_changes_nothing():
    records = {t: [log(s, t, 0.1 * (s + t), weight=3 + t) for s in range(1, 9)] + [progress(9, t)] for t in range(4)}
    found = set()
    for seed in range(20):
        rng, reducer, queues, done = (
            random.Random(seed),
            LogReducer(range(4)),
            {t: list(r) for t, r in records.items()},
            [],
        )
        while any(queues.values()):
            done += reducer.add(queues[rng.choice([t for t, q in queues.items() if q])].pop(0))
        assert [record["step"] for record in done] == list(range(1, 9))
        found.add(str(values(done)))
    assert len(found) == 1


def test_a_trainer_that_logs_nothing_has_no_part_and_one_that_is_lost_is_not_waited_for():
    reducer = LogReducer([0, 1, 2])
    assert reducer.add(log(1, 0, 2.0)) == []
    assert reducer.add(progress(2, 0)) == reducer.add(progress(2, 1)) == []
    reducer.remove(2)
    assert values(reducer.add(progress(3, 1))) == [(1, "gap", 2.0, 1)]
    reducer.restore(2)
    reducer.add(log(4, 0, 1.0))
    assert reducer.add(progress(5, 0)) == reducer.add(progress(5, 1)) == []
    assert values(reducer.add(progress(5, 2))) == [(4, "gap", 1.0, 1)]


def test_what_is_incomplete_is_returned_at_the_end_and_what_is_not_reduced_never():
    reducer = LogReducer([0, 1])
    for record in (log(1, 0, 3.0), log(1, 0, 9.0, "none"), log(2, 0, 5.0, name="b"), log(2, 0, 4.0, name="a")):
        assert reducer.add(record) == []
    assert values(reducer.flush()) == [(1, "gap", 3.0, 1), (2, "a", 4.0, 1), (2, "b", 5.0, 1)]
    assert reducer.flush() == []


def test_what_is_pending_is_looked_at_only_when_a_step_is_complete(monkeypatch):
    reducer, flushed = LogReducer([0, 1]), []
    flush = reducer.flush
    monkeypatch.setattr(reducer, "flush", lambda before: flushed.append(before) or flush(before))
    for record in [progress(1, 1), *(log(step, 0, 1.0, name=name) for step in range(1, 9) for name in "abc")]:
        reducer.add(record)
    assert flushed == [1]
    assert len(reducer.add(progress(9, 1))) == 7 * 3
    assert len(reducer.add(progress(9, 0))) == 3


def test_the_last_trainer_is_not_removed_and_other_records_are_ignored():
    reducer = LogReducer([0])
    reducer.remove(0)
    assert reducer.add(make_record("validation", 3, values={})) == []
    assert reducer.add(log(1, 5, 1.0)) == []
    reducer.add(log(1, 0, 1.0))
    assert values(reducer.add(progress(2, 0))) == [(1, "gap", 1.0, 1)]


def test_what_is_logged_at_the_end_waits_for_all_trainers():
    """The checkpoint of the last step may be written when the records of one trainer only are here."""

    def log(trainer, value, step=10, **fields):
        return make_record("log", step, trainer=trainer, name="final", value=value, reduce="sum", **fields)

    reducer = LogReducer([0, 1])
    assert reducer.add(log(0, 3.0)) == []
    assert reducer.add(log(0, 1.0, at_end=True)) == []
    assert [record["value"] for record in reducer.flush(11)] == [3.0]
    assert reducer.add(log(1, 2.0, at_end=True)) == []
    assert [(record["step"], record["value"], record["trainers"]) for record in reducer.flush()] == [(10, 3.0, 2)]
    assert reducer.flush() == []


@pytest.mark.parametrize("at_end", [True, False])
def test_what_is_logged_in_the_last_step_of_a_session_is_written_before_another_one_follows(tmp_path, at_end):
    """Such as in ``on_checkpoint`` of the checkpoint from which other trainers continue."""

    class Kept(Sink):
        def write(self, record):
            written.append(record)

        def close(self):
            written.append({"kind": "closed"})

    written = []
    config = Config(mode="rpc", cluster=ClusterConfig(num_trainers=2))
    monitor = RunMonitor(config, FanOut([Kept()]), tmp_path / "summary.json")
    monitor.write_logged(10)  # the checkpoint is committed
    for trainer in (0, 1):
        monitor.record({**log(10, trainer, 2.0 * trainer), **({"at_end": True} if at_end else {})})
    monitor.suspend()
    assert [record["kind"] for record in written] == ["log", "log", "reduced", "closed"]
    assert values(written[2:3]) == [(10, "gap", 1.0, 2)]
