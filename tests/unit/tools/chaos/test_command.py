"""What a run with faults must satisfy: each check fails for the records, files or figures that violate it."""

import json

import pytest
import torch

from paramserver.checkpoint.save import write_checkpoint
from paramserver.config import Config, config_from_mapping
from paramserver.errors import TrainingError
from paramserver.tools.chaos.command import ChaosRun, check_run, main
from paramserver.tools.chaos.faults import Fault, FaultDirector, Shot

JOIN = config_from_mapping({"task": "task.py:Task", "training": {"max_epochs": 2, "uneven_inputs": "join"}})
KILL = Fault("kill", "trainer:1", at_step=2)
WEIGHTS = {"weight": torch.ones(3)}


def make_run(
    folder,
    *,
    steps=4,
    samples=64,
    pushes=(4, 4),
    weights=WEIGHTS,
    recorded=None,
    status="completed",
    further=(),
    fields=(),
):
    """The folder of a run of two trainers with 8 samples each per step."""
    rows = {
        str(i): {"pushes": n, "samples": samples // 2, "incarnation": 1, "decided": n, "accepted": n}
        for i, n in enumerate(pushes)
    }
    (folder / "checkpoints").mkdir(parents=True)
    write_checkpoint(
        folder / "checkpoints", steps, {"model": weights, "run": {"ledger": {"rows": rows}}}, {"trainers": 2}
    )
    (folder / "checkpoints" / "latest").write_text(f"step-{steps:08d}\n")
    summary = {
        "status": status,
        "reason": "all data was served",
        "steps": steps,
        "samples": samples,
        "staleness": {"histogram": {"0": 2 * steps}, "dropped": 0},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [*({"kind": "train", "step": step, **dict(fields)} for step in recorded or range(1, steps + 1)), *further]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def records(*, noticed_s=0.1, updated_s=0.3, trains_s=4.0):
    return [
        {"kind": "start", "step": 0, "time": 0.0, "run_dir": "run"},
        {"kind": "expected", "step": 0, "time": 0.1, "total_samples": 64},
        {"kind": "phase", "step": 1, "time": 9.0, "rank": 2},
        {"kind": "train", "step": 1, "time": 9.0},
        {"kind": "train", "step": 2, "time": 9.9},
        {"kind": "lost", "step": 2, "time": 10 + noticed_s, "trainer": 1},
        {"kind": "note", "step": None, "time": 10 + noticed_s + 0.1, "lost_rank": 2},
        {"kind": "train", "step": 3, "time": 10 + updated_s},
        {"kind": "joined", "step": 3, "time": 10 + trains_s - 1, "trainer": 1},
        {"kind": "phase", "step": 4, "time": 10 + trains_s, "rank": 2},
        {"kind": "train", "step": 4, "time": 10 + trains_s},
    ]


def make_outcome(folder, **changes):
    named = {
        "config": JOIN,
        "shots": [Shot(KILL, fired_at=10.0, step=2)],
        "records": records(),
        "run_dir": folder,
        "error": None,
        "lost": [],
        "repeated": [],
        "left": [],
    }
    return ChaosRun(**{**named, **changes})


def failed(outcome, optional=(), reference=None):
    return [check.name for check in check_run(outcome, set(optional), reference) if not check.ok]


def test_a_run_that_recovered_passes_with_its_figures(tmp_path):
    outcome = make_outcome(make_run(tmp_path / "run"))
    assert failed(outcome, reference=make_run(tmp_path / "reference")) == []
    assert outcome.figures(outcome.shots[0]) == pytest.approx(
        {"noticed": 0.1, "next update": 0.3, "the rank trains again": 4.0}
    )
    assert outcome.line(outcome.shots[0]) == (
        "  kill trainer:1 @step 2: fired after step 2; noticed after 0.10 s, next update after 0.30 s, the rank trains "
        "again after 4.00 s"
    )


def test_a_step_that_is_skipped_counts_unless_it_is_a_local_one_of_a_round(tmp_path):
    skipped = {"kind": "skipped", "step": 3, "trainers": [1]}
    run = make_run(tmp_path / "step", pushes=(4, 5), further=[skipped])
    assert failed(make_outcome(run)) == []
    run = make_run(tmp_path / "round", further=[{**skipped, "trainer": 1}])
    assert failed(make_outcome(run)) == []


def test_only_several_optimizers_may_exceed_the_last_step(tmp_path):
    """The other calls of the last batch do."""
    config = config_from_mapping({**JOIN.given_mapping(), "training": {"max_steps": 3}})
    several = make_run(tmp_path / "several", fields={"losses": {"a": 1.0, "b": 1.0}})
    assert failed(make_outcome(several, config=config)) == []
    assert failed(make_outcome(make_run(tmp_path / "one"), config=config)) == ["each step is recorded once"]


@pytest.mark.parametrize(
    ("run", "check"),
    [
        ({"status": "failed"}, "the run is completed"),
        ({"samples": 48}, "each sample is applied as often as due"),
        ({"pushes": (5, 4)}, "each push is applied once"),
        ({"pushes": (4, 3)}, "each push is applied once"),
        ({"recorded": [1, 2, 3, 3, 4]}, "each step is recorded once"),
        ({"recorded": [1, 2, 4]}, "each step is recorded once"),
    ],
)
def test_each_violation_in_the_run_folder_fails_its_check(tmp_path, run, check):
    assert failed(make_outcome(make_run(tmp_path / "run", **run))) == [check]


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"error": TrainingError("rank 1: no")}, "the run is completed"),
        ({"left": ["process 42 (python)"]}, "nothing is left behind"),
        ({"shots": [Shot(KILL)]}, "every fault fired"),
        ({"records": records(noticed_s=11.0, updated_s=12.0, trains_s=13.0)}, "no wait exceeds its limit"),
        ({"records": records(updated_s=80.0, trains_s=80.0)}, "no wait exceeds its limit"),
        ({"records": [*records()[:5], {"kind": "train", "step": 3, "time": 30.0}]}, "no wait exceeds its limit"),
        ({"shots": [Shot(Fault("lose", "", "replies", amount=2.0), fired_at=10.0)]}, "messages were lost"),
    ],
)
def test_each_violation_in_the_outcome_fails_its_check(tmp_path, changes, check):
    assert failed(make_outcome(make_run(tmp_path / "run"), **changes)) == [check]


def test_a_random_fault_need_not_fire(tmp_path):
    outcome = make_outcome(make_run(tmp_path / "run"), shots=[Shot(KILL)])
    assert failed(outcome, optional=[id(KILL)]) == []
    check = check_run(outcome, {id(KILL)}, None)[0]
    assert check.detail == "0 of 1 fired; before 1 at random instants the run ended, as it may"
    assert outcome.line(outcome.shots[0]) == "  kill trainer:1 @step 2: did not fire, the run ended before"


def test_parameters_that_differ_in_one_bit_fail(tmp_path):
    other = {"weight": torch.tensor([1.0, 1.0, 1.0 + 2**-23])}
    outcome = make_outcome(make_run(tmp_path / "run", weights=other))
    assert failed(outcome, reference=make_run(tmp_path / "reference")) == ["parameters are those without faults"]


def test_a_damaged_checkpoint_fails(tmp_path):
    folder = make_run(tmp_path / "run")
    file = folder / "checkpoints" / "step-00000004" / "model.pt"
    file.write_bytes(file.read_bytes()[:-1])
    assert failed(make_outcome(folder)) == ["the checkpoint loads"]


def test_a_run_without_a_summary_fails_without_an_error(tmp_path):
    assert "the run is completed" in failed(make_outcome(tmp_path))
    (tmp_path / "summary.json").write_text('{"status": "failed"}')  # of the supervisor, as rank 0 died
    assert "the run is completed" in failed(make_outcome(tmp_path))


def test_updates_that_were_made_again_are_counted():
    steps = [("start", 0), ("train", 1), ("train", 2), ("train", 3), ("start", 1), ("train", 2), ("train", 3)]
    made = [{"kind": kind, "step": step, "time": 0.0} for kind, step in steps]
    assert make_outcome(None, records=made).redone() == 2


def test_a_server_trains_again_with_the_first_update_of_its_next_process():
    times = [("lost", 10.1), ("note", 10.2), ("start", 14.0), ("train", 15.0)]
    made = [{"kind": kind, "step": 1, "time": at} for kind, at in times]
    made[1]["lost_rank"] = 0
    outcome = make_outcome(None, records=made)
    figures = outcome.figures(Shot(Fault("kill", "server:0"), fired_at=10.0))
    assert figures == pytest.approx({"noticed": 0.1, "next update": 5.0, "the rank trains again": 5.0})


def test_faults_wait_for_their_step_or_time():
    faults = [Fault("lose", "", "replies", amount=1.0, at_step=3), Fault("lose", "", "requests", amount=1.0, at_s=1e6)]
    with FaultDirector(faults, Config()) as director:
        step, late = director.shots
        now = 100.0
        assert not director._is_due(step.fault, now)
        director._first_update, director.step = 90.0, 2
        assert not director._is_due(step.fault, now)
        director.step = 3
        assert director._is_due(step.fault, now)
        assert not director._is_due(late.fault, now)
        assert director._is_due(late.fault, 90.0 + 1e6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--faults", "kill trainer:1", "--set", "mode=local"], "mode (local) must be rpc or ddp"),
        (["--random", "-1"], "--random (-1) must be at least 0"),
        ([], "must name a fault"),
        (["--faults", "kill trainer:7"], "trainer:7 must be a rank of this run"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(tmp_path, capsys, arguments, message):
    file = tmp_path / "config.yaml"
    file.write_text("task: task.py:Task\n")
    assert main(["--config", str(file), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
