"""What the measuring scripts compute from measurements; no test depends on a speed."""

import os
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the scripts are modules of the checkout, which is not always importable

from tests.measure import (  # noqa: E402
    convergence,
    foreign,
    memory,
    rounds,
    stragglers,
    tree,
    tutorial,
    versus_ddp,
    walk,
)
from tests.measure.overhead import Timing  # noqa: E402

SCRIPT = """\
import os
from torchvision import datasets, transforms


def use(loader):
    return loader


if __name__ == "__main__":
    if os.sep:
        train_loader = use(
            [
                "train_loader = 1",
            ])
        test_loader = use([])
"""


# Scripts of others.


def test_only_the_data_of_a_script_is_replaced(tmp_path):
    replaced = tutorial.replaced(SCRIPT, tmp_path, 7, quiet=False)
    kept = [line for line in SCRIPT.splitlines() if line in replaced.splitlines()]
    assert kept == SCRIPT.splitlines()[:1] + SCRIPT.splitlines()[2:10]
    assert (
        replaced.splitlines()[-2]
        == f"        train_loader = tutorial.TimedBatches({str(tmp_path)!r}, args.rank - 1, 7)"
    )
    assert "torchvision" not in replaced
    assert "quiet" not in replaced
    assert "tutorial.use_quiet_transports()" in tutorial.replaced(SCRIPT, tmp_path, 7, quiet=True)
    compile(replaced, "replaced", "exec")


def test_the_difference_names_every_line_that_changed():
    lines = foreign.difference("a\nb\nc\n", "a\nx\nc\n").splitlines()
    assert [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")] == ["-b", "+x"]


@pytest.mark.parametrize("source", ["", "data = 1\ndata = 2\n"])
def test_a_script_without_what_is_replaced_is_refused(source):
    with pytest.raises(ValueError, match="must import or set data once"):
        foreign.with_other_data(source, {"data": ["data = 3"]})


def test_a_traceback_ends_all_processes_and_is_the_error():
    forever = ["-c", "import threading; threading.Event().wait()"]
    began = time.monotonic()
    error = foreign.run_until_error([["-c", "raise ValueError('first')"], forever], os.environ, 60)
    assert error == "ValueError: first"
    assert time.monotonic() - began < 30
    assert not [child for child in psutil.Process().children() if "Event" in " ".join(child.cmdline())]


@pytest.mark.parametrize(("code", "expected"), [("print('fine')", None), ("raise SystemExit(3)", "exit codes [3]")])
def test_how_processes_end_is_reported(code, expected):
    assert foreign.run_until_error([["-c", code]], os.environ, 60) == expected


def test_processes_that_do_not_end_are_ended_in_time():
    forever = ["-c", "import threading; threading.Event().wait()"]
    assert foreign.run_until_error([forever], os.environ, 0.5) == "no end within 0.5 s"


# Stragglers.


def train_records(samples, times):
    return [{"samples": count, "time": moment} for count, moment in zip(samples, times, strict=True)]


def test_a_rate_leaves_the_warm_up_out():
    records = train_records([32, 64, 96, 1096], [10.0, 11.0, 12.0, 14.0])
    assert stragglers.rate(records, 2.0) == 500
    with pytest.raises(RuntimeError, match=r"1 of 4 records .* raise --seconds"):
        stragglers.rate(records, 2.5)


def delays(trainers, batches):
    draws = [[stragglers.is_slow(0, t, b) for b in range(batches)] for t in range(trainers)]
    return np.where(draws, float(stragglers.SLOWNESS), 1.0)


def test_chance_slows_one_batch_in_five_of_each_trainer_by_itself():
    slow = delays(2, 4000) > 1
    assert abs(slow.mean(axis=1) - stragglers.PROBABILITY).max() < 0.02
    assert abs((slow[0] & slow[1]).mean() - stragglers.PROBABILITY**2) < 0.01


def bounded_batches_per_second(durations, bound):
    """Stale-synchronous: a trainer begins clock c when the slowest has finished c - bound."""
    count = durations.shape[1]
    finished = np.zeros((2, count + 1))
    for clock in range(count):
        gate = finished[:, max(clock - bound, 0)].max()
        finished[:, clock + 1] = np.maximum(finished[:, clock], gate) + durations[:, clock]
    return 2 * count / finished[:, -1].max()


def test_the_ideals_are_those_of_the_delays():
    durations = delays(2, 4000)
    of_ddp = 2 * durations.shape[1] / durations.max(axis=0).sum()
    aims = stragglers.SCENARIOS["random"].aims
    assert (1 / durations.mean(axis=1)).sum() / of_ddp == pytest.approx(aims["async"].ideal, rel=0.03)
    assert bounded_batches_per_second(durations, 4) / of_ddp == pytest.approx(aims["bounded"].ideal, rel=0.03)
    slow, aims = stragglers.SLOWNESS, stragglers.SCENARIOS["permanent"].aims
    assert aims["async"].ideal == pytest.approx((1 + 1 / slow) / (2 / slow))
    assert stragglers.SCENARIOS["backup"].aims["backup"].ideal == pytest.approx(2 / (3 / slow))


def test_a_median_below_what_is_asked_is_missed():
    aim = stragglers.Aim(3.0, 2.5)
    assert stragglers.against_ddp(aim, [24.0, 26.0, 27.0], [10.0] * 3).endswith("at least 2.50: met")
    assert stragglers.against_ddp(aim, [24.0, 24.9, 27.0], [10.0] * 3).endswith("at least 2.50: MISSED")
    assert stragglers.against_ddp(stragglers.Aim(1.0, None), [10.0], [10.0]).endswith("ideal 1.00")


# Rounds.


def test_a_validation_has_the_seconds_of_the_update_that_it_validates():
    trained = [{"step": step, "samples": 10 * step, "seconds": float(step)} for step in (1, 2, 3)]
    validated = [{"step": 2, "seconds": 2.9, "values": {"loss": 0.5}}]
    assert rounds.curve_of(trained, validated) == [(20, 2.0, 0.5)]


def test_times_and_losses_between_two_validations_are_interpolated():
    curve = [rounds.Point(10, 1.0, 4.0), rounds.Point(20, 2.0, 2.0), rounds.Point(30, 4.0, 1.0)]
    assert [rounds.seconds_until(curve, loss) for loss in (5.0, 3.0, 2.0, 1.5)] == [1.0, 1.5, 2.0, 3.0]
    with pytest.raises(RuntimeError, match="the least was 1; raise --target"):
        rounds.seconds_until(curve, 0.9)
    assert [rounds.loss_at(curve, seconds) for seconds in (1.5, 2.0, 3.0, 9.0)] == [3.0, 2.0, 1.5, 1.0]
    assert np.isnan(rounds.loss_at(curve, 0.5))


def test_pushes_are_what_remains_without_the_pulled_parameters(tmp_path):
    """6 rounds of two trainers, each of which pulls 1,000 bytes, or half of it, and pushes 250."""
    for dtype, total in ((None, 6 * 2 * 1250), ("bfloat16", 6 * 2 * 750)):
        config = rounds.write_config(rounds.characters(600, 100, {}, {"wire_dtype": dtype}), tmp_path)
        one = rounds.Run({"steps": 6, "samples": 100, "wire_bytes_per_sample": total / 100}, [], config)
        assert rounds.pushed_per_sample(one, 1000) == pytest.approx(6 * 2 * 250 / 100)


def test_changes_of_the_command_line_are_those_of_runs_with_rounds(tmp_path):
    change = ["training.outer.lr=0.3"]
    with_rounds = rounds.write_config(rounds.characters(600, 100, {}, {}), tmp_path, change)
    assert with_rounds.training.outer.lr == 0.3
    assert rounds.write_config(rounds.characters(600, 1, {}, {}), tmp_path, change).training.outer is None


def test_a_share_of_the_speed_has_an_aim_for_most_local_steps_only():
    cases = rounds.link_cases([128, 8])
    assert cases["H=128"].verdict([0.8, 0.91, 0.95]) == ", at least 0.9: met"
    assert cases["H=8"].verdict([0.1]) == ""
    assert cases["sync"].verdict([0.1]) == ", below 0.1: MISSED"
    assert rounds.link_cases([32])["H=32"].at_least is None


# Speeds, memory, convergence.


def test_a_speed_is_above_one_where_a_step_is_shorter():
    timings = {case: [Timing(ms, ms, ms)] for case, ms in (("memory", 20.0), ("ddp", 22.0), ("limit", 18.0))}
    setting = versus_ddp.SETTINGS["cnn"]
    assert "1.100 (1.100 to 1.100) of ddp, at least 1: met" in versus_ddp.compare(setting, timings, "memory", "ddp")
    timings["limit"] = [Timing(16.0, 16.0, 16.0)]
    assert "at least 0.85: MISSED" in versus_ddp.compare(setting, timings, "memory", "limit")


@pytest.mark.parametrize(("consistency", "times"), [("sync", 6), ("async", 8)])
def test_what_a_server_and_its_trainers_may_take(consistency, times):
    assert memory.server_times(consistency, trainers=2) == times
    assert memory.needed_bytes(400, consistency, trainers=2) == (times + 7) * 400 + 3 * memory.ALLOWANCE_BYTES


def test_a_model_that_the_machine_cannot_hold_is_refused(capsys):
    parser = memory.make_parser()
    arguments = parser.parse_args(["--parameters", str(10**12)])
    with pytest.raises(SystemExit) as refused:
        memory.check(parser, arguments, 4 * 10**12)
    assert refused.value.code == 2
    assert "--parameters (1000000000000) with 2 trainers must have 60000.9 GB of memory" in capsys.readouterr().err


def validation(step, accuracy):
    return {"step": step, "seconds": step / 10, "values": {"accuracy": accuracy}}


def test_convergence_is_where_the_accuracy_first_is_high_enough():
    trained = [{"step": step, "samples": 64 * step} for step in (10, 20, 30, 40)]
    curve = [validation(10, 0.5), validation(20, 0.94), validation(30, 0.95), validation(40, 0.99)]
    reached = convergence.outcome_of(curve, trained, {"staleness": {"mean": 1.5, "max": 4}})
    assert (reached.step, reached.samples, reached.seconds, reached.best) == (30, 1920, 3.0, 0.99)
    assert "1.5 / - / 4" in convergence.row("case", [reached])
    never = convergence.outcome_of(curve[:2], trained, {"staleness": None})
    assert (never.step, never.best) == (None, 0.94)
    text = convergence.row("case", [reached, never, reached])
    assert "never" in text
    assert text.endswith("MISSED")


# The tree, and the calls of a step.


def test_the_tree_is_counted_without_an_import(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "top.py").write_text(
        '"""A module.\n\n>>> 1\n"""\n\n# why\nraise SystemExit  # noqa\n\n\n'
        'def _once():\n    """Doc."""\n    return 1\n\n\ndef public():\n    return _once()\n'
    )
    (tmp_path / "inner" / "__init__.py").write_text("class A: ...\n")
    (tmp_path / "inner" / "other.py").write_text("class A: ...\n")
    found = tree.measures(tree.read_sources(tmp_path))
    assert found["modules at the top level"] == "1"
    assert (found["files"], found["lines"], found["code lines"]) == ("3", "18", "7")
    assert found["private helpers of up to 8 lines, one caller"] == "1 of 2"
    assert found["lines of examples in docstrings"] == "1"
    assert found["class names used twice"] == "1 A"


def test_a_walk_is_the_step_with_the_median_number_of_calls():
    def call(moment, process, file):
        return walk.Event(moment, process, "1", "call", file, "f", "1")

    events = []
    for step in range(walk.WARM_STEPS + 4):
        events += [walk.Event(100 * step, "t", "1", "step"), call(100 * step + 1, "t", "a.py")]
        events += [call(100 * step + 2 + i, "t", "b.py") for i in range(step - walk.WARM_STEPS + 1)]
        events.append(call(100 * step + 50, "s", "a.py"))
    found = walk.steady_step(events)
    assert found.row(["trainer"]) == (3, 2, 2, 1)
    assert found.row(["trainer", "server"]) == (4, 2, 2, 1)
