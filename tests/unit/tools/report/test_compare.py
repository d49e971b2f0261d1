"""Two sets of results: what changed, what may be chance, and what fails in CI."""

import pytest
from fake_results import failed, repeats, result, stale

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.report.cases import SPEED
from paramserver.tools.report.findings import compare
from paramserver.tools.report.results import Results

NEAR = [990.0, 1010.0, 1000.0]
CONFUSED = [600.0, 1400.0, 1000.0]


def scaled(speeds, factor):
    return [speed * factor for speed in speeds]


def compared(before, after):
    return compare(Results("a.jsonl", tuple(before)), Results("b.jsonl", tuple(after)))


def change(comparison, figure, case="rpc"):
    return next(one for one in comparison.changes[case] if one.figure.name == figure)


@pytest.mark.parametrize(
    ("factor", "speed", "step"),
    [(1.2, "better", "worse"), (0.8, "worse", "better"), (1.0, "no difference shown", "no")],
)
def test_better_and_worse_turn_with_the_numbers(factor, speed, step):
    slow = {"step_ms": {"mean": 10.0 * factor, "p50": 9.0}}
    found = compared(
        repeats("rpc", NEAR, step_ms={"mean": 10.0, "p50": 9.0}), repeats("rpc", scaled(NEAR, factor), **slow)
    )
    assert change(found, "throughput").verdict == speed
    assert change(found, "throughput").ratio.value == pytest.approx(factor)
    assert change(found, "step mean").verdict.startswith(step)
    assert change(found, "step p50").verdict == "no difference shown"


@pytest.mark.parametrize(("speeds", "words"), [([500.0], "one repeat is"), ([500.0, 510.0], "two repeats are")])
def test_what_fewer_than_three_repeats_show_may_be_chance(speeds, words):
    found = compared(repeats("rpc", NEAR), repeats("rpc", speeds))
    assert change(found, "throughput").verdict == "too few repeats"
    assert f"({words} too few for an interval: it may be chance)" in found.regressions(0.95)[0]


def test_the_sets_are_independent_samples():
    """They were not measured in turns: what both have in common by chance is no pair."""
    drift = [1000.0, 3000.0, 500.0]
    found = compared(repeats("rpc", drift), repeats("rpc", scaled(drift, 0.9)))
    assert change(found, "throughput").verdict == "no difference shown"


def test_every_figure_that_both_know_is_compared():
    found = compared(repeats("rpc", NEAR, staleness=stale({1: 5})), repeats("rpc", NEAR, staleness=stale({0: 5})))
    names = [one.figure.name for one in found.changes["rpc"]]
    assert names[0] == "throughput"
    expected = {
        "throughput per process",
        "step p99",
        "phase push",
        "on the wire per step",
        "staleness mean",
        "train loss",
    }
    assert expected <= set(names)
    assert "time to the target" not in names
    assert change(found, "staleness mean").ratio is None
    assert change(found, "staleness mean").verdict == ""
    assert (
        change(compared(repeats("rpc", NEAR), repeats("rpc", NEAR)), "on the wire per step").verdict
        == "no difference shown"
    )


@pytest.mark.parametrize(("factor", "limit", "fails"), [(0.9, 0.95, True), (0.97, 0.95, False), (1.1, 1.2, True)])
def test_below_the_limit(factor, limit, fails):
    found = compared(repeats("rpc", NEAR), repeats("rpc", scaled(NEAR, factor)))
    assert bool(found.regressions(limit)) == fails
    for sentence in found.regressions(limit):
        assert sentence.startswith("rpc: throughput is ")
        assert f"below {limit:g}" in sentence
        assert "more repeats" not in sentence


def test_a_spread_that_reaches_the_limit_is_reported():
    sentences = compared(repeats("rpc", NEAR), repeats("rpc", scaled(CONFUSED, 0.9))).regressions(0.95)
    assert "its interval reaches" in sentences[0]


def test_a_case_that_broke_or_went_away_does_not_pass():
    before = [*repeats("rpc", NEAR), *repeats("ddp", NEAR), *repeats("gone", NEAR), failed("never")]
    after = [*repeats("rpc", NEAR), failed("ddp", error="PeerLost: rank 1\nmore"), *repeats("new", NEAR)]
    found = compared(before, after)
    assert list(found.changes) == ["rpc"]
    assert found.broken == {"ddp": "B has no figures of it: PeerLost: rank 1", "gone": "B has no such case"}
    assert len(found.regressions(0.5)) == 2
    assert "Only B has new." in found.notes
    assert "A has no figures of never." in found.notes


def test_nothing_in_common_is_refused():
    with pytest.raises(UnsupportedConfiguration, match="must have a case in common; A has rpc, B has ddp"):
        compared(repeats("rpc", NEAR), repeats("ddp", NEAR))


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(UnsupportedConfiguration, match="--fail_below"):
        compared(repeats("rpc", NEAR), repeats("rpc", NEAR)).regressions(limit)


def test_other_machines_are_reported():
    other = {**result().environment, "host": "blue"}
    found = compared(repeats("rpc", NEAR), repeats("rpc", NEAR, environment=other))
    assert any("A ran on green with 8 cores, B on blue with 8 cores" in note for note in found.notes)
    assert compared(repeats("rpc", NEAR), repeats("rpc", NEAR)).notes == ()


def test_the_text_is_a_table_for_each_case_with_the_spread():
    before = Results("a", tuple(repeats("rpc", NEAR) + repeats("ddp", NEAR)), ("A note.",))
    after = Results("b", (*repeats("rpc", scaled(NEAR, 0.8)), failed("ddp")))
    text = compare(before, after).text()
    lines = text.split("\n")
    assert lines[0] == "rpc"
    assert lines[1].split() == ["figure", "A", "B", "B", "/", "A", "95", "%"]
    row = next(line for line in lines if "throughput (samples/s)" in line)
    assert row.split()[2:5] == ["1000", "800", "0.800"]
    assert " to " in row
    assert row.endswith("worse")
    assert "ddp: B has no figures of it: TaskError: no data" in lines
    assert lines[-1] == "A note."
    assert not any(line != line.rstrip() for line in lines)


def test_the_throughput_is_what_the_limit_is_about():
    """Steps that take longer do not fail a set whose throughput is the same."""
    found = compared(repeats("rpc", NEAR, step_ms={"mean": 1.0}), repeats("rpc", NEAR, step_ms={"mean": 9.0}))
    assert change(found, "step mean").verdict == "worse"
    assert found.regressions(0.95) == []
    assert SPEED.better == 1
