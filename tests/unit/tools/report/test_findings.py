"""Findings follow the numbers: if the numbers are swapped, so are the names in the sentence."""

import dataclasses

import pytest
from fake_results import ENVIRONMENT, failed, repeats, result, stale

from paramserver.tools.report.cases import by_best, cases_of, communication_limit, local_baseline, scaling_families
from paramserver.tools.report.findings import findings
from paramserver.tools.report.formatting import first_line, format_number, join_names, plural, scenario_text
from paramserver.tools.report.tables import (
    comparability_warnings,
    conditions_text,
    learning_table,
    predictions_table,
    scaling_table,
    staleness_table,
)

NEAR, FAST, SLOW = [990.0, 1010.0, 1000.0], [1290.0, 1310.0, 1300.0], [790.0, 810.0, 800.0]
CONFUSED = [700.0, 1400.0, 1000.0]
LATE = {"slow": {"trainer": 1, "factor": 5.0, "probability": 1.0}}
DDP = {"mode": "ddp", "servers": 0}
ALONE = {"mode": "local", "servers": 0}


def text_of(*records):
    """The findings as one text."""
    return "\n".join(findings(cases_of(one for part in records for one in part)))


def rpc(speeds, **fields):
    return repeats("rpc", speeds, **fields)


def ddp(speeds, **fields):
    return repeats("ddp", speeds, **DDP, **fields)


def with_target(records, seconds):
    target = {"accuracy": 0.95}
    return [
        dataclasses.replace(
            one, target=target, time_to_target_s=s, samples_to_target=None if s is None else s * one.samples_per_second
        )
        for one, s in zip(records, seconds, strict=True)
    ]


# The fastest.


def test_the_fastest_is_named_with_its_lead_and_turns_with_the_numbers():
    first, other = text_of(rpc(FAST), ddp(NEAR)), text_of(rpc(NEAR), ddp(FAST))
    assert first.startswith("`rpc` was the fastest: 1300 (1275 to 1325) samples/s, 1.30 (")
    assert "times `ddp`." in first.split("\n")[0]
    assert other.startswith("`ddp` was the fastest")
    assert "not significant" not in first + other


def test_an_interval_that_holds_1_is_no_victory():
    text = text_of(rpc(CONFUSED), ddp(NEAR))
    assert "the difference is not significant" in text
    assert "fastest" not in text
    assert "includes 1" in text


def test_a_small_lead_that_every_repeat_shows_is_one():
    """The machine drifts by half, which the repeats of both cases share."""
    drift = [1000.0, 1500.0, 700.0]
    assert text_of(rpc([1.03 * s + i for i, s in enumerate(drift)]), ddp(drift)).startswith("`rpc` was the fastest")
    assert "the difference is not significant" in text_of(rpc([1.03 * s for s in drift[::-1]]), ddp(drift))


@pytest.mark.parametrize(("count", "words"), [(1, "one repeat is"), (2, "two repeats are")])
def test_fewer_than_three_repeats_prove_nothing(count, words):
    text = text_of(rpc(FAST[:count]), ddp(NEAR[:count]))
    assert f"but {words} too few to show whether that is chance" in text
    assert f"{words.capitalize()} too few for an interval: use at least 3" in text
    assert "fastest" not in text
    assert "too few" not in text_of(rpc(FAST), ddp(NEAR))


def test_ties_among_many_are_reported_with_who_is_behind():
    text = text_of(rpc(FAST), repeats("a", [1289.0, 1311.0, 1302.0]), repeats("b", [1280.0, 1320.0, 1290.0]), ddp(SLOW))
    line = text.split("\n")[0]
    assert "is not significant either" in line
    assert "times `ddp`" in line
    names = {name for name in ("`rpc`", "`a`", "`b`", "`ddp`") if name in line}
    assert len(names) == 4


def test_the_best_of_every_mode_is_reported_once():
    text = text_of(rpc(FAST), repeats("rpc, async", [1200.0, 1210.0, 1190.0]), ddp(SLOW))
    assert "`rpc` was the fastest" in text
    assert "`ddp`, the best of ddp" in text
    assert "the best of" not in text_of(rpc(FAST), ddp(SLOW))


def searched(lr, accuracy, speed, **fields):
    best = {"name": "accuracy", "value": accuracy, "samples": 640.0, "less_is_better": False}
    environment = {**ENVIRONMENT, "folder": f"runs/lr-{lr}"}
    fields = {"best": best, "overrides": {"task_args.lr": lr}, "environment": environment, **fields}
    return result(f"rpc, task_args.lr={lr}", speed=speed, **fields)


def test_a_search_for_settings_begins_with_the_best_and_not_with_the_fastest():
    cases = cases_of([searched(0.1, 0.9, 3000.0), searched(0.2, 0.95, 1000.0), searched(0.3, 0.8, 2000.0)])
    assert [case.first.overrides["task_args.lr"] for case in by_best(cases)] == [0.2, 0.1, 0.3]
    best, fastest, *_ = findings(cases)
    assert best.startswith(
        "`rpc, task_args.lr=0.2` (`lr-0.2`) validated best: accuracy 0.950 after 640 samples; next is "
        "`rpc, task_args.lr=0.1` (`lr-0.1`) with 0.900"
    )
    assert fastest.startswith("`rpc, task_args.lr=0.1` applied 3000 samples/s")
    table = learning_table(cases)
    assert (table.titles[1], table.titles[-1]) == ("best accuracy", "folder")
    assert [(row[1], row[-1]) for row in table.rows] == [
        ("0.950", "`lr-0.2`"),
        ("0.900", "`lr-0.1`"),
        ("0.800", "`lr-0.3`"),
    ]


@pytest.mark.parametrize(
    ("worse", "end"),
    [
        ([-70.0, -71.5, -72.0], ")."),
        ([-49.9, -54.0, -52.0], "), and the difference is not significant."),
        ([-70.0], ", but one repeat is too few to show whether that is chance."),
    ],
)
def test_the_best_of_a_search_may_be_below_0(worse, end):
    both = ((0.1, [-50.0, -51.5, -52.5][: len(worse)]), (0.2, worse))
    runs = [searched(lr, elbo, 1.0, repeat=n) for lr, elbos in both for n, elbo in enumerate(elbos)]
    best, *_ = findings(cases_of(runs))
    assert best.startswith("`rpc, task_args.lr=0.1` ")
    assert best.endswith(end)


def test_a_lower_loss_is_better_and_other_metrics_are_not_ranked_with_it():
    loss = {"name": "loss", "value": 0.5, "samples": 640.0, "less_is_better": True}
    results = [searched(0.1, 0, 1.0, best=loss), searched(0.2, 0, 1.0, best={**loss, "value": 0.4})]
    cases = cases_of([*results, searched(0.3, 0.9, 1.0), searched(0.4, 0, 1.0, best=None)])
    assert [case.first.overrides["task_args.lr"] for case in by_best(cases)] == [0.2, 0.1]
    assert learning_table(cases).titles[1] == "best"


def test_runs_that_do_not_differ_in_task_args_are_compared_by_speed_first():
    same = cases_of([searched(0.1, 0.9, 3000.0, overrides={"training.batch_size": 8})])
    assert by_best(same) == []
    assert "applied" in findings(same)[0]


def test_conditions_are_kept_apart():
    text = text_of(
        repeats("rpc 1", NEAR, trainers=1), repeats("ddp 1", SLOW, trainers=1, **DDP),
        repeats("rpc 4", SLOW, trainers=4), repeats("ddp 4", FAST, trainers=4, **DDP),
    )  # fmt: skip
    lines = text.split("\n")
    assert lines[0].startswith("With 1 trainer: `rpc 1` was the fastest")
    assert lines[1].startswith("With 4 trainers: `ddp 4` was the fastest")


def test_baselines_are_not_compared_unless_there_is_nothing_else():
    local = repeats("local", [9000.0, 9010.0, 9020.0], trainers=1, baseline="local", **ALONE)
    assert text_of(local, rpc(NEAR)).startswith("`rpc` applied")
    assert text_of(local).startswith("`local` applied 9010")


# Failures.


def test_failures_are_reported_with_their_reason():
    text = text_of(rpc(NEAR), [failed("ddp", i, "PeerLost: rank 1 is gone\nTraceback", **DDP) for i in range(3)])
    assert "Of 2 cases, 1 failed. `ddp` in 3 of 3 repeats: PeerLost: rank 1 is gone." in text
    assert "Traceback" not in text
    assert "failed" not in text_of(rpc(NEAR), ddp(NEAR))


def test_a_case_that_fails_now_and_then_still_has_figures():
    text = text_of([*rpc(FAST), failed("rpc", 3)], ddp(SLOW))
    assert "`rpc` in 1 of 4 repeats" in text
    assert text.startswith("`rpc` was the fastest")


def test_nothing_completed():
    assert text_of([failed("rpc"), failed("ddp")]).startswith("No case was completed")


# Stragglers, targets.


def test_what_a_slow_trainer_costs():
    late = [repeats("rpc late", [800.0, 790.0, 810.0], scenario=LATE)]
    late += [repeats("ddp late", [200.0, 210.0, 190.0], scenario=LATE, **DDP)]
    text = text_of(rpc(NEAR), ddp(NEAR), *late)
    assert "With 2 trainers, trainer 1 slowed 5 times: `rpc late` was the fastest" in text
    assert "of its speed otherwise, `rpc late` keeps 80 %" in text
    assert text.index("`rpc late` keeps") < text.index("`ddp late` keeps 20 %")
    assert "keeps" not in text_of(rpc(NEAR), ddp(NEAR))
    turned = text_of(rpc(NEAR), ddp(NEAR), repeats("rpc late", [100.0, 101.0, 99.0], scenario=LATE), late[1])
    assert turned.index("`ddp late` keeps") < turned.index("`rpc late` keeps 10 %")


def of_rounds(name, speeds, steps, compression, wire_bytes, **fields):
    overrides = {"training.local_steps": steps, "server.compression": compression, **fields.pop("overrides", {})}
    given = {"transports": {"0": "rpc", "1": "rpc"}, "overrides": overrides, "wire_bytes_per_sample": wire_bytes}
    curve = tuple((float(s), s / 100, float(steps)) for s in range(100, 600, 100))
    return repeats(name, speeds, **given, quantities={"local_steps": curve if steps > 1 else ()}, **fields)


def test_what_rounds_and_compression_save():
    plain, compressed = of_rounds("H1", NEAR, 1, "none", 7268.0), of_rounds("H1 int8", SLOW, 1, "int8", 4557.0)
    loss = {"loss": ((100.0, 1.0, 3.0), (300.0, 3.0, 1.25)), "validation": ()}
    plain = [dataclasses.replace(one, **loss) for one in plain]
    fields = {"loss": ((200.0, 1.0, 2.5), (400.0, 2.0, 0.5)), "validation": ()}
    both, rounds = of_rounds("H32 int8", FAST, 32, "int8", 142.0, **fields), of_rounds("H32", FAST, 32, "none", 227.0)
    text = text_of(plain, compressed, rounds, both)
    assert "`H32 int8` exchanged 1/51 of the bytes per sample of `H1`, and applied 1.30 (1.2" in text
    assert "times as many samples/s. After 300 samples its train loss was 1.50, and that of the other 1.25." in text
    assert text.count("exchanged") == 1
    assert "A round of 32 local steps of `H32" in text
    assert "`H1 int8` exchanged 63 % of the bytes" in text_of(plain, compressed)


def test_a_validation_loss_is_compared_rather_than_that_of_local_models():
    validation = {"validation": ((100.0, 1.0, {"loss": 0.5}), (200.0, 2.0, {"loss": 0.25}))}
    text = text_of(of_rounds("H1", NEAR, 1, "none", 7000.0), of_rounds("H4", NEAR, 4, "none", 1750.0, **validation))
    assert "After 4950 samples its train loss" in text
    both = [of_rounds(f"H{h}", NEAR, h, "none", 7000.0 / h, **validation) for h in (1, 4)]
    assert "After 200 samples its validation loss was 0.250, and that of the other 0.250." in text_of(*both)


def test_savings_are_of_cases_that_are_alike_and_use_a_network():
    local = {"transports": {"0": "shared_memory"}}
    plain, rounds = of_rounds("H1", NEAR, 1, "none", 48.0), of_rounds("H32", FAST, 32, "none", 1.5)
    shared = [dataclasses.replace(one, **local) for one in plain]
    other = of_rounds("H32", FAST, 32, "none", 1.5, overrides={"server.consistency": "async"})
    runs = of_rounds("H32", FAST, 32, "none", 1.5, overrides={"training.max_steps": 3})
    assert "exchanged" in text_of(plain, rounds)
    assert "exchanged" in text_of(plain, runs)
    for text in (text_of(shared, rounds), text_of(plain, other), text_of(plain), text_of(rounds)):
        assert "exchanged" not in text


def test_the_first_at_the_target_need_not_be_the_fastest():
    text = text_of(with_target(rpc(FAST), [4.0, 4.1, 3.9]), with_target(ddp(NEAR), [3.0, 3.1, 2.9]))
    assert "The target accuracy 0.95 was reached first by `ddp`, after 3.00 (" in text
    other = text_of(with_target(rpc(FAST), [3.0, 3.1, 2.9]), with_target(ddp(NEAR), [4.0, 4.1, 3.9]))
    assert "reached first by `rpc`" in other
    assert "target" not in text_of(rpc(FAST), ddp(NEAR))


def test_a_target_that_is_reached_now_and_then_or_never():
    lucky = with_target(rpc(FAST), [1.0, None, None])
    text = text_of(lucky, with_target(ddp(NEAR), [3.0, 3.1, 2.9]))
    assert "reached first by `ddp`" in text  # which always does
    assert "`rpc` (in 1 of 3 repeats)" in text
    assert "It was not reached by `rpc`." in text_of(
        with_target(rpc(FAST), [None] * 3), with_target(ddp(NEAR), [3.0] * 3)
    )
    assert "No case reached the target accuracy 0.95" in text_of(with_target(rpc(FAST), [None] * 3))


# Where the time goes.


def test_the_share_of_the_speed_without_communication():
    limit = repeats("alone", FAST, baseline="no communication", **ALONE)
    text = text_of(limit, rpc(NEAR), ddp(SLOW))
    assert "`rpc` reached 77 %" in text
    assert "`ddp` reached 62 %" in text
    assert "without communication" not in text_of(rpc(NEAR), ddp(SLOW))


def test_a_case_is_measured_against_the_baseline_of_its_own_conditions():
    def alone(name, **fields):
        return repeats(name, FAST, baseline="no communication", **ALONE, **fields)

    sweep = {"training.batch_size": 64}
    records = [*alone("a"), *alone("b", overrides=sweep), *alone("c", trainers=4), *alone("d", scenario=LATE)]
    records += repeats("local", NEAR, trainers=1, baseline="local", **ALONE)
    cases = cases_of(records)

    def limit(**fields):
        found = communication_limit(cases_of(rpc(NEAR, **fields))[0], cases)
        return found.name if found else None

    assert limit() == "a"
    assert limit(overrides={**sweep, "server.consistency": "async"}) == "b"
    assert limit(overrides={"training.batch_size": 32}) == "a"
    assert limit(trainers=4) == "c"
    assert limit(scenario=LATE) == "d"
    assert limit(trainers=3) is None
    assert limit(trainers=1) == "local"
    assert local_baseline(cases_of(rpc(NEAR, scenario=LATE))[0], cases).name == "local"


def test_a_step_is_described_by_its_largest_phases():
    text = text_of(rpc(NEAR, phases_ms={"data": 1.0, "forward": 30.0, "backward": 60.0, "push": 9.0, "hidden": 500.0}))
    assert "60 % backward, 30 % forward and 9 % push" in text
    assert "hidden" not in text
    assert "80 % wait and 20 % forward" in text_of(rpc(NEAR, phases_ms={"wait": 8.0, "forward": 2.0}))


def test_growth_with_the_trainers():
    def grown(*speeds):
        of = zip((1, 2, 4), speeds, strict=True)
        return [repeats(f"rpc {t} trainers", [s, s * 1.01, s * 1.02], trainers=t) for t, s in of]

    def rows(*parts):
        return [row[1:2] + row[3:] for row in scaling_table(cases_of(one for part in parts for one in part)).rows]

    assert rows(*grown(1000.0, 1900.0, 3600.0)) == [
        ("1", "1", "-"),
        ("2", "1.90 (1.90 to 1.90)", "95 % (95 to 95)"),
        ("4", "3.60 (3.60 to 3.60)", "90 % (90 to 90)"),
    ]
    assert rows(*grown(1000.0, 900.0, 480.0))[2] == ("4", "0.480 (0.480 to 0.480)", "12 % (12 to 12)")
    assert rows(rpc(NEAR)) == []


def test_families_differ_in_their_trainers_alone():
    records = [one for t in (4, 1) for one in repeats(f"rpc {t} trainers, async", NEAR, trainers=t)]
    records += repeats("rpc 2 trainers, sync", NEAR, overrides={"server.consistency": "sync"})
    found = scaling_families(cases_of(records))
    assert {name: [case.trainers for case in members] for name, members in found.items()} == {
        "rpc, async": [1, 4],
        "rpc, sync": [2],
    }


def test_staleness_of_the_cases_that_count_it():
    records = [*rpc(NEAR, staleness=stale({0: 10, 3: 10}, {6: 20})), *repeats("ddp", SLOW, **DDP)]
    (row,) = staleness_table(cases_of(records)).rows
    assert row == ["`rpc`", "3.75", "6", "6", "120", "1.50 / 6"]


def test_the_model_and_the_measurement():
    predicted = {"communication_ms": 4.0, "break_even_servers": 2}
    limit = repeats("alone", [1600.0] * 3, baseline="no communication", **ALONE)

    def row(*parts):
        table = predictions_table(cases_of(one for part in parts for one in part))
        return {title: cell for row in table.rows for title, cell in zip(table.titles, row, strict=True)}

    found = row(limit, rpc([1000.0] * 3, predicted=predicted))
    assert (found["case"], found["predicted (ms a step)"], found["servers to break even"]) == ("`rpc`", "4", "2")
    assert float(found["measured (ms a step)"]) > 20
    turned = row(limit, rpc([2000.0] * 3, predicted=predicted))
    assert float(turned["measured (ms a step)"]) < 0
    assert row(limit, rpc([1000.0] * 3)) == {}


# Doubts.


def test_a_wide_interval_is_reported():
    assert "wider than 15 % of the mean" in text_of(rpc(CONFUSED))
    assert "wider" not in text_of(rpc(NEAR))


def test_processes_that_share_cores_are_reported():
    environment = {**result().environment, "cores": 2}
    text = text_of(rpc(NEAR, environment=environment))
    assert "Up to 3 trainers and servers shared 2 cores" in text
    assert "shared" not in text_of(rpc(NEAR))


def test_results_of_different_machines_are_doubted():
    other = {**result().environment, "host": "blue", "commit": "fff"}
    cases = cases_of([*rpc(NEAR), *ddp(NEAR, environment=other)])
    text = " ".join(comparability_warnings(cases))
    assert "different machines (green with 8 cores and blue with 8 cores)" in text
    assert "different commits" in text
    assert "torch" not in text
    assert comparability_warnings(cases_of(rpc(NEAR))) == []


def test_conditions_in_one_sentence():
    text = conditions_text(cases_of([*rpc(NEAR), *ddp(NEAR[:2])]))
    assert text.startswith("2 cases, 2 to 3 repeats of 5 s each, on green with 8 cores, with torch 2.13.0.")
    bare = conditions_text(cases_of([failed("a", environment={})]))
    assert bare.startswith("1 case, no completed repeat each, on an unknown machine.")


def test_odd_records_break_no_sentence():
    zero = result("zero", 0, 0.0)
    bare = [dataclasses.replace(zero, step_ms={}, step_bins={}, phases_ms={}, environment={}, per_trainer=())]
    nothing = [dataclasses.replace(one, case="unknown", samples_per_second=None) for one in bare]
    assert "`rpc`" in text_of(bare, rpc(NEAR), nothing)
    assert text_of(nothing).startswith("No case was completed")


# Words.


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234.5, "1234"),
        (12.345, "12.3"),
        (0.00123, "0.00123"),
        (3.0, "3"),
        (-2.5, "-2.50"),
        (99.96, "100.0"),
        (1e15, "1.00e+15"),
        (None, "-"),
        (float("nan"), "-"),
    ],
)
def test_numbers(value, text):
    assert format_number(value) == text


def test_lists_and_plurals():
    assert [join_names([]), join_names(["a"]), join_names(["a", "b"]), join_names(["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]
    assert join_names(list("abcdefgh"), 3) == "a, b and 6 more"
    assert [plural(1, "case"), plural(0, "case")] == ["1 case", "0 cases"]
    assert first_line("a\nb") == "a"
    assert first_line(None) == ""
    assert len(first_line("x" * 1000)) == 300


def test_scenarios_in_words():
    assert scenario_text({}) == ""
    assert scenario_text(LATE) == "trainer 1 slowed 5 times"
    half = {"slow": {"trainer": 0, "factor": 2.5, "probability": 0.1}}
    assert scenario_text(half) == "trainer 0 slowed 2.50 times with probability 0.1"
    assert scenario_text({"bandwidth": {"mbit_s": 100}}) == "bandwidth mbit_s 100"
    assert scenario_text({"slow": "odd"}) == "slow odd"
