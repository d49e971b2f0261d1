"""``paramserver export``: the model of a checkpoint, and the rows of tables that have changed since a step."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import resume, train
from tasks import ReferenceTask

from paramserver.tools import export
from paramserver.tools.export import FORMATS, export_rows

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


@pytest.mark.processes
@pytest.mark.sampled(3)
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
    for flags in (("--source", "a.py:b"), ("--set", "seed=1")):
        assert "--source and --set must be left out with --rows_since" in refused(5, out, *flags)
    assert not out.exists()


def test_a_run_without_tables_is_refused(tmp_path, capsys):
    run = train(tmp_path, "local", 1, training={"max_steps": 3}, checkpoint={"every": 3})
    assert export.main([str(run.run_dir), "--rows_since", "0", "--out", str(tmp_path / "new.pt")]) == 2
    assert "has no versions of rows; train embedding tables" in capsys.readouterr().err


SOURCE = """
import torch
from torch.utils.data import TensorDataset
from tasks import ReferenceTask

def images():
    return TensorDataset(torch.ones(3, 1, 6, 6))

def nothing():
    return []

class NoValidation(ReferenceTask):
    def validation_source(self, partition):
        return None

class NotCalled(ReferenceTask):
    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        return {"loss": 1.0}

class Counts(ReferenceTask):
    def on_validation_start(self, batch_idx):
        self.seen = 0

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        self.seen += len(batch)
        return super().validation_step(model, batch, valid_batch_idx, batch_idx)

class Branches(ReferenceTask):
    def build_model(self):
        model = super().build_model()
        model.drop.forward = lambda x: x if x.sum() > 0 else -x
        return model
"""


@pytest.fixture(scope="module")
def model_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    config = {"checkpoint": {"every": 3, "keep": 5}, "training": {"max_steps": 6, "ema_decay": 0.5}}
    return train(folder, "local", 1, **config)


def export_model(run, format, out, *flags):
    for package in FORMATS[format].packages:
        pytest.importorskip(package)
    return export.main([str(run.run_dir), "--format", format, "--out", str(out), *flags])


def onnx_outputs(file, images):
    session = pytest.importorskip("onnxruntime").InferenceSession(str(file))
    (name,) = [one.name for one in session.get_inputs()]
    return torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def safetensors_outputs(file, images):
    model = ReferenceTask().build_model()
    model.load_state_dict(pytest.importorskip("safetensors.torch").load_file(file))
    return model.eval()(images)


LOADED = {
    "safetensors": safetensors_outputs,
    "onnx": onnx_outputs,
    "torch_export": lambda file, images: torch.export.load(file).module()(images),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the exporter to ONNX
@pytest.mark.parametrize("step", [None, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_an_export_that_is_loaded_again_equals_the_model(model_run, tmp_path, capsys, format, step):
    out = tmp_path / f"model{FORMATS[format].ending}"
    flags = () if step is None else ("--checkpoint", str(step))
    assert export_model(model_run, format, out, *flags) == 0
    text = capsys.readouterr().out.splitlines()[-1]
    assert text == f"{out}: {format}, 3014 parameters, by step-{step or 6:08d}"
    model = ReferenceTask().build_model()
    model.load_state_dict(model_run.load("ema", step))
    images = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        torch.testing.assert_close(LOADED[format](out, images), model.eval()(images), rtol=0, atol=1e-6)
    assert list(tmp_path.iterdir()) == [out]


def test_the_input_is_that_of_a_source_where_it_is_given(model_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "export_sources.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    without = ("--set", "task=export_sources.py:NoValidation")
    assert export_model(model_run, "torch_export", "a.pt2", *without) == 2
    assert "NoValidation has no validation_source" in capsys.readouterr().err
    assert export_model(model_run, "torch_export", "a.pt2", *without, "--source", "export_sources.py:images") == 0
    assert torch.export.load("a.pt2").module()(torch.ones(11, 1, 6, 6)).shape == (11, 5)


def test_a_validation_begins_before_its_step_is_traced(model_run, tmp_path, monkeypatch):
    (tmp_path / "export_sources.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    assert export_model(model_run, "torch_export", "a.pt2", "--set", "task=export_sources.py:Counts") == 0


@pytest.mark.parametrize(
    ("format", "out", "flags", "expected"),
    [
        ("torch_export", "a.pt", (), "--out (a.pt) must end in .pt2; rename it"),
        ("safetensors", "a.safetensors", ("--source", "export_sources.py:images"), "--source is for onnx and torch_"),
        ("torch_export", "a.pt2", ("--source", "export_sources.py:nothing"), "--source gave no samples"),
        ("torch_export", "a.pt2", ("--set", "task=export_sources.py:NotCalled"), "validation_step must call the model"),
        (
            "torch_export",
            "a.pt2",
            ("--set", "task=export_sources.py:Branches"),
            "forward cannot be traced by",
        ),
        ("torch_export", "a.pt2", ("--checkpoint", "4"), "there are latest and the steps"),
    ],
)
def test_what_cannot_be_exported_is_refused(model_run, tmp_path, monkeypatch, capsys, format, out, flags, expected):
    (tmp_path / "export_sources.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    assert export_model(model_run, format, out, *flags) == 2
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]  # torch adds its own log
    assert expected in line
    assert not (tmp_path / out).exists()


def test_a_package_that_is_missing_is_named_with_its_extra(model_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setitem(sys.modules, "onnx", types.ModuleType("onnx"))
    out = tmp_path / "a.onnx"
    assert export.main([str(model_run.run_dir), "--format", "onnx", "--out", str(out)]) == 2
    assert (
        capsys.readouterr().err == "error: --format (onnx) needs onnxscript; install the extra export, or onnxscript\n"
    )
