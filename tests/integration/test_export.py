"""``paramserver export``: the rows of tables that have changed since a step."""

from pathlib import Path

import numpy as np
import pytest
import torch
from launching import resume, train

from paramserver.tools import export
from paramserver.tools.export import export_rows

TASKS = Path(__file__).parents[1] / "helpers" / "table_tasks.py"


def trained(tmp_path, mode, trainers, kind="Adagrad", **config):
    return train(
        tmp_path,
        mode,
        trainers,
        task=f"{TASKS}:Tables",
        task_args={"kind": kind, "rare": False},
        training={"max_steps": 20, "batch_size": 2, "validate_every": 0, "clip_grad_norm": 0.5},
        checkpoint={"every": 5, "keep": 9, "background": False},
        **config,
    )


def apply(weights, new):
    """What a process that serves the model does."""
    tables = {name.removesuffix(".rows") for name in new if name.endswith(".rows")}
    for name in tables:
        weights[name][new[f"{name}.rows"]] = new[f"{name}.values"]
    return weights | {name: value for name, value in new.items() if name in weights and name not in tables}


@pytest.mark.parametrize(
    ("mode", "trainers", "kind", "config"),
    [
        ("rpc", 2, "Adagrad", {"cluster": {"num_servers": 2}, "server": {"transport": "rpc"}}),
        ("rpc", 2, "SparseAdam", {"server": {"consistency": "async"}}),
        ("ddp", 2, "RowWiseAdagrad", {}),
        ("local", 1, "SGD", {}),
    ],
)
def test_an_earlier_model_with_the_exported_rows_is_the_later_one(tmp_path, mode, trainers, kind, config):
    run = trained(tmp_path, mode, trainers, kind, **config)
    for since in (0, 5, 15, 20):
        out = tmp_path / "new.pt"
        text = export_rows(run.run_dir, since, out)
        new, before, after = torch.load(out, weights_only=True), run.load("model", max(since, 5)), run.load("model", 20)
        assert int(new["step"]) == 20
        assert text.startswith(f"{out}: step 20; users.weight {len(new['users.weight.rows'])} of 60 rows")
        for name, value in apply(before, new).items() if since else ():
            if name != "tied.weight":  # the same table as weighted.weight
                assert torch.equal(value, after[name]), name
        is_changed = (run.load("model", max(since, 5))["users.weight"] != after["users.weight"]).any(1)
        assert set(is_changed.nonzero()[:, 0].tolist()) <= set(new["users.weight.rows"].tolist())
    assert len(new["users.weight.rows"]) == 0


def test_the_versions_are_those_of_a_local_run_also_after_a_resume(tmp_path):
    one = trained(tmp_path / "one", "local", 1)
    whole = trained(tmp_path / "two", "rpc", 1, cluster={"num_servers": 2})
    again = resume(whole, "--set", "training.max_steps=40", "--set", "mode=local")
    assert again.code == 0, again.output
    longer = resume(one, "--set", "training.max_steps=40")
    assert longer.code == 0, longer.output
    files = []
    for run in (whole, one):
        files.append(tmp_path / f"{len(files)}.npz")
        export_rows(run.run_dir, 15, files[-1])
    own, other = (np.load(file) for file in files)
    assert sorted(own) == sorted(other)
    # With several servers the norm of the gradients is rounded in another way.
    assert all(np.allclose(own[name], other[name], rtol=1e-12, atol=0) for name in own)
    assert 0 < len(own["users.weight.rows"]) < 60


def test_bad_input_is_refused_in_one_sentence(tmp_path, capsys):
    run, out = trained(tmp_path, "local", 1), tmp_path / "new.npz"
    assert export.main([str(run.run_dir), "--rows_since", "20", "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: step 20; users.weight 0 of 60 rows")
    out.unlink()

    def refused(since, file=out, *further):
        assert export.main([str(run.run_dir), f"--rows_since={since}", "--out", str(file), *further]) == 2
        return capsys.readouterr().err.removeprefix("error: ")

    assert refused(21).startswith("--rows_since (21) must be from 0 to 20, the step of")
    assert "must be from 0 to 20" in refused(-1)
    assert "must end in .npz or .pt" in refused(5, tmp_path / "new.txt")
    assert "there are latest and the steps" in refused(5, out, "--checkpoint", "7")
    assert not out.exists()


def test_a_run_without_tables_is_refused(tmp_path, capsys):
    run = train(tmp_path, "local", 1, training={"max_steps": 3}, checkpoint={"every": 3})
    assert export.main([str(run.run_dir), "--rows_since", "0", "--out", str(tmp_path / "new.pt")]) == 2
    assert "has no versions of rows; train embedding tables" in capsys.readouterr().err
