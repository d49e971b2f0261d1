"""examples/recommender: embedding tables, in its smallest form."""

import importlib.util
import math
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


def write_ratings(file, users=60, films=40, each=12):
    """Users choose films of their own half, and often the first ones of it."""
    generator = torch.Generator().manual_seed(0)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for user in range(users):
        weights = torch.arange(films // 2, 0, -1).float() ** 2
        own = torch.multinomial(weights, each, generator=generator) + (user % 2) * films // 2
        lines += [f"u{user}\tf{film}\t4\t{1000 * n + user}" for n, film in enumerate(own.tolist())]
    file.write_text("\n".join(lines) + "\n")


def test_films_are_ranked_better_than_by_popularity(tmp_path):
    write_ratings(tmp_path / "ratings.inter")
    task = f"{EXAMPLE / 'movielens.py'}:MovieLens"
    training = {"max_steps": None, "max_epochs": 30, "batch_size": 64, "validate_every": 200}
    args = {"ratings": str(tmp_path / "ratings.inter")}
    run = run_in_process(tmp_path, task=task, task_args=args, training=training)
    assert run.code == 0, run.output
    values = run.of_kind("validation")[-1]["values"]
    # There are 20 films of the own half, of which 11 were rated before and are left out.
    assert values["recall_10"] > 0.9 > values["recall_10_by_popularity"] + 0.1
    assert values["ndcg_10"] > values["ndcg_10_by_popularity"] > 0.05


def test_recall_and_ndcg_are_those_of_a_sorted_list():
    module = load_example("recommender", "Clicks").movielens
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(200, 30, generator=generator)
    wanted = torch.randint(0, 30, (200,), generator=generator)
    ranks = [own.argsort(descending=True).tolist().index(int(want)) for own, want in zip(scores, wanted, strict=True)]
    recall, ndcg = module.recall_and_ndcg(scores, wanted)
    assert float(recall) == pytest.approx(sum(rank < 10 for rank in ranks) / 200)
    assert float(ndcg) == pytest.approx(sum(1 / math.log2(rank + 2) for rank in ranks if rank < 10) / 200)


def test_without_the_ratings_the_package_that_has_them_is_named(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "recbole" else found(name))
    run = run_in_process(tmp_path, task=f"{EXAMPLE / 'movielens.py'}:MovieLens")
    assert run.code != 0
    assert "python -m pip install --no-deps recbole==1.2.1" in run.output
