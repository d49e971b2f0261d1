"""examples/graph: node embeddings, in its smallest form."""

from pathlib import Path

import pytest
import torch
from example_modules import load_example
from launching import run_in_process

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "graph"


def test_the_embeddings_approach_the_best_possible_auc(tmp_path):
    training = {"max_steps": None, "max_epochs": 4, "batch_size": 128, "validate_every": 600}
    arguments = {"nodes": 300, "communities": 5, "edges": 20_000, "width": 8}
    run = run_in_process(tmp_path, task=f"{EXAMPLE / 'task.py'}:Communities", task_args=arguments, training=training)
    assert run.code == 0, run.output
    values = run.of_kind("validation")[-1]["values"]
    assert 0.8 < values["best_possible_auc"] < 0.95
    assert values["auc"] > 0.95 * values["best_possible_auc"]
    assert any(len(state["sum"]) == 300 for state in run.load("optimizer")["state"].values())


def test_the_auc_is_the_share_of_ordered_pairs():
    module = load_example("graph", "Communities").task
    generator = torch.Generator().manual_seed(0)
    scores, are_edges = torch.randint(0, 9, (80,), generator=generator), torch.randint(0, 2, (80,), generator=generator)
    metric = module.Auc()
    metric.update(scores[:50], are_edges[:50])
    metric.update(scores[50:], are_edges[50:])
    pairs = scores[are_edges == 1][:, None] - scores[are_edges == 0]
    assert metric.compute() == pytest.approx(float(((pairs > 0) + 0.5 * (pairs == 0)).double().mean()))
