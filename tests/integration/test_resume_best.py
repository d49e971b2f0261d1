"""The best checkpoint and training.patience over stops; test_resume_stops.py covers them in every mode."""

import pytest
from launching import SIGNAL_TASKS, assert_equal_runs, differing_tensors, resume_in_process, run_in_process

from paramserver.checkpoint import BestMetric

# By step: the best at 4; 6, 8 and 10 are no better, nor are 12 and 14. Step 7 is not scheduled.
SCORES = [0, 1, 0, 3, 0, 2, 2.5, 2, 0, 1, 0, 2, 0, 2]


def config_of(stops=(), scores=SCORES, every=2, patience=3, **training):
    training = {**training, "patience": patience}
    return {
        "task": f"{SIGNAL_TASKS}:StopsBySignal",
        "task_args": {"stops": stops, "scores": scores, "samples": 32, "validation": 5},
        "training": {"batch_size": 4, "validate_every": every, "max_steps": 50, **training},
        "checkpoint": {"every": 4, "keep": 1, "background": False, "best": {"metric": "score", "mode": "max"}},
    }


def validations(run):
    return [(record["step"], record["best"]) for record in run.of_kind("validation")]


ENDED = [(2, True), (4, True), (6, False), (8, False), (10, False)]


@pytest.mark.parametrize("batch", [2, 5, 6, 8])
def test_patience_counts_on_over_a_stop(tmp_path, batch):
    """Before the best was there, right after a validation, between two of them, and before the last."""
    whole = run_in_process(tmp_path, name="whole", **config_of())
    run = run_in_process(tmp_path, **config_of(stops=[[batch, 0, "SIGTERM", "self"]]))
    assert run.code == 3
    run = resume_in_process(run)
    assert run.code == 0, run.output
    assert_equal_runs(whole, run)
    assert validations(run) == ENDED
    assert run.checkpoints == whole.checkpoints == ["step-00000004", "step-00000010"]
    assert run.of_kind("note") == []


def test_a_run_that_patience_ended_is_over_until_patience_is_raised(tmp_path):
    run = run_in_process(tmp_path, **config_of(every=2))
    before = run.summary, run.load("model"), run.checkpoints
    for _ in range(2):
        run = resume_in_process(run)
        assert run.code == 0, run.output
        assert [run.summary[key] for key in ("steps", "reason", "validation", "checkpoint")] == [
            before[0][key] for key in ("steps", "reason", "validation", "checkpoint")
        ]
        assert "training.patience (3)" in run.summary["reason"]
        assert differing_tensors(run.load("model"), before[1]) == []
        assert (validations(run), run.checkpoints, run.best) == (ENDED, before[2], "step-00000004")
    run = resume_in_process(run, "--set", "training.patience=5")
    assert "training.patience (5)" in run.summary["reason"]
    assert validations(run) == [*ENDED, (12, False), (14, False)]
    assert (run.checkpoints, run.best) == (["step-00000004", "step-00000014"], "step-00000004")


@pytest.mark.parametrize(("last", "best"), [(2.5, 4), (3.5, 7)])
def test_a_validation_that_comes_only_because_a_run_ends_is_not_counted_by_patience(tmp_path, last, best):
    """It may be the best, and stays it; but the resumed run ends where it would have ended anyway."""
    scores = [*SCORES[:6], last, *SCORES[7:]]
    whole = run_in_process(tmp_path, name="whole", **config_of(scores=scores))
    run = run_in_process(tmp_path, **config_of(scores=scores, max_steps=7))
    assert run.summary["validation"]["score"] == last
    run = resume_in_process(run, "--set", "training.max_steps=50")
    assert run.summary["steps"] == whole.summary["steps"] == 10
    assert run.summary["reason"] == whole.summary["reason"]
    assert differing_tensors(run.load("model"), whole.load("model")) == []
    assert validations(run) == ENDED
    assert run.best == f"step-{best:08d}"
    assert run.best in run.checkpoints


def test_an_interrupted_run_that_has_reached_its_end_is_validated_once(tmp_path):
    """As the run that was not interrupted there would have been; the checkpoint that is there becomes the best."""
    stops = [[6, 0, "SIGTERM", "self"]]
    run = run_in_process(tmp_path, **config_of(stops, scores=[0, 1, 0, 3, 0, 2, 5]))
    assert run.code == 3
    for _ in range(2):
        run = resume_in_process(run, "--set", "training.max_steps=7")
        assert run.code == 0, run.output
        assert validations(run) == [*ENDED[:3], (7, True)]
        assert (run.best, run.checkpoints) == ("step-00000007", ["step-00000007"])


def test_another_metric_starts_anew_with_a_note(tmp_path):
    run = run_in_process(tmp_path, **config_of(stops=[[8, 0, "SIGTERM", "self"]]))
    assert run.code == 3
    flags = ("--set", "checkpoint.best.metric=loss", "--set", "checkpoint.best.mode=min")
    run = resume_in_process(run, *flags, "--set", "training.max_steps=13")
    assert run.code == 0, run.output
    words = "checkpoint.best was score (max) and is loss (min): the best value and training.patience count anew"
    assert words in run.output
    assert words in run.of_kind("note")[0]["text"]
    assert (10, True) in validations(run)  # the third of patience, where the count had continued
    losses = {r["step"]: r["values"]["loss"] for r in run.of_kind("validation") if r["step"] >= 10}
    assert run.best == f"step-{min(losses, key=losses.get):08d}"


@pytest.mark.parametrize("every", [0, 3])
def test_the_last_checkpoint_becomes_the_best_though_it_was_saved_before_its_validation(tmp_path, every):
    run = run_in_process(tmp_path, **config_of(every=every, patience=None, max_steps=8, scores=[1] * 7 + [9]))
    assert run.best == run.summary["checkpoint"] == "step-00000008"
    assert run.load("run")["best"]["step"] == 8
    run = resume_in_process(run, "--set", "training.max_steps=10")
    assert (run.best, run.checkpoints) == ("step-00000008", ["step-00000008", "step-00000010"])


def test_an_unscheduled_validation_may_be_the_best_but_is_not_counted():
    best = BestMetric("score", "max")
    results = [best.update(value, step, step % 2 == 0) for step, value in ((2, 1.0), (3, 5.0), (4, 0.5), (6, 2.0))]
    assert results == [True, True, False, False]
    assert (best.value, best.step, best.without_improvement) == (5.0, 3, 0)  # 2.0 is the best of those that count
    again = BestMetric("score", "max")
    assert again.load_state_dict(best.state_dict()) is None
    assert again.state_dict() == best.state_dict()
    assert "was score (max) and is score (min)" in str(BestMetric("score", "min").load_state_dict(best.state_dict()))
