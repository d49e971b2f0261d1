"""examples/recommender: embedding tables, in its smallest form."""

from pathlib import Path

import pytest
import torch
from example_modules import load_example
from launching import run_in_process

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "recommender"


def test_the_model_approaches_the_best_possible_auc(tmp_path):
    training = {"max_steps": None, "max_epochs": 4, "batch_size": 128, "validate_every": 1000}
    task = {"task": f"{EXAMPLE / 'task.py'}:Clicks", "task_args": {"users": 300, "items": 60, "samples": 40_000}}
    run = run_in_process(tmp_path, **task, training=training)
    assert run.code == 0, run.output
    values = run.of_kind("validation")[-1]["values"]
    assert 0.8 < values["best_possible_auc"] < 0.95
    assert values["auc"] > 0.9 * values["best_possible_auc"]
    assert any(state["sum"].shape == (300, 9) for state in run.load("optimizer")["state"].values())


def test_the_auc_is_the_share_of_ordered_pairs():
    module = load_example("recommender", "Clicks").task
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 9, (80,), generator=generator).double()
    clicks = torch.randint(0, 2, (80,), generator=generator)
    pairs = scores[clicks == 1][:, None] - scores[clicks == 0]
    assert module.auc(scores, clicks) == pytest.approx(float(((pairs > 0) + 0.5 * (pairs == 0)).mean()))
