"""``paramserver predict`` writes what the model of a checkpoint returns; ``evaluate --set`` uses other data."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from launching import environment, train
from tasks import ReferenceTask

from paramserver import evaluate, predict as predict_command

CONFIG = {
    "training": {"max_steps": 6, "batch_size": 8, "validate_every": 2, "validation_batch_size": 7},
    "checkpoint": {"every": 2, "keep": 5, "background": False, "best": {"metric": "loss", "mode": "max"}},
}
SOURCES = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from tasks import ReferenceTask

images = ReferenceTask()._data(37, 2).tensors[0]

def data_set():
    return TensorDataset(images)

def iterable():
    return (image for image in images)

def loader():
    return DataLoader(TensorDataset(images), batch_size=5)

def pairs():
    return ReferenceTask()._data(37, 2)

class Broken:
    def __len__(self):
        return 37

    def __getitem__(self, index):
        if index == 17:
            raise OSError("the image is damaged")
        return images[index]

def dictionaries():
    return [{"image": image} for image in images]

def fails():
    raise LookupError("no images")

def broken():
    return Broken()

def nothing():
    return []

def number():
    return 3

constant = 3


def needs(folder):
    return []
"""
TASK = """
import torch
from tasks import ReferenceTask

class Named(ReferenceTask):
    def __init__(self, what="named", **options):
        super().__init__(**options)
        self.what = what

    def predict_step(self, model, batch, batch_idx):
        assert not model.training and not torch.is_grad_enabled()
        output = model(batch[0])
        return {
            "named": {"file": output, "label": (output.argmax(1), None), "half": output.bfloat16()},
            "scalar": output.sum(),
            "text": {"x": "y"},
            "uneven": output[:, : 1 + batch_idx],
            "other": {str(batch_idx): output},
            "twice": {"a.b": output, "a": {"b": 2 * output}},
            "number": {1: output, "1": output},
            "unnamed": {"": output, "z": output},
            "sparse": {"x": output.to_sparse()},
            "none": {"x": None, "y": []},
        }[self.what]

class Narrow(ReferenceTask):
    def predict_step(self, model, batch, batch_idx):
        return {"output": model(batch[0]).to(torch.float8_e5m2)}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("predict"), "local", 1, **CONFIG)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_sources.py").write_text(SOURCES)
    (tmp_path / "own_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def predict(run, *flags, source="own_sources.py:data_set", out="out.pt"):
    return predict_command.main([str(run.run_dir), "--source", source, "--out", out, *flags])


def expected(run, step=None):
    """The outputs of plain PyTorch for the same samples."""
    task = ReferenceTask()
    model = task.build_model()
    model.load_state_dict(run.load("model", step))
    with torch.no_grad():
        return model.eval()(task._data(37, 2).tensors[0])


@pytest.mark.processes
@pytest.mark.parametrize("source", ["data_set", "iterable", "loader"])
def test_the_outputs_are_those_of_the_model(run, folder, capsys, source):
    assert predict(run, source=f"own_sources.py:{source}") == 0
    assert capsys.readouterr().out == "out.pt: output (37x5, float32), by step-00000006\n"
    torch.testing.assert_close(torch.load("out.pt", weights_only=True), expected(run))
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [
        "out.pt",
        "own_sources.py",
        "own_task.py",
    ]


@pytest.mark.processes
def test_best_a_step_and_numpy(run, folder):
    assert predict(run, "--checkpoint", "best", out="out.npz") == 0
    best = int(run.best.removeprefix("step-"))
    np.testing.assert_allclose(np.load("out.npz")["output"], expected(run, best).numpy(), rtol=1e-5, atol=1e-6)
    assert predict(run, "--checkpoint", "2", out="out.npz") == 0
    np.testing.assert_allclose(np.load("out.npz")["output"], expected(run, 2).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.processes
def test_several_outputs_of_predict_step_have_their_names(run, folder):
    flags = ["--set", f"task={folder}/own_task.py:Named"]
    assert predict(run, *flags, out="out.npz") == 0
    arrays, output = np.load("out.npz"), expected(run)
    assert sorted(arrays) == ["file", "half", "label.0"]
    np.testing.assert_array_equal(arrays["label.0"], output.argmax(1).numpy())
    assert arrays["half"].dtype == np.float32
    assert predict(run, *flags) == 0
    stored = torch.load("out.pt", weights_only=True)
    assert stored["half"].dtype is torch.bfloat16
    torch.testing.assert_close(stored["file"], output)


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(torch, "float8_e5m2"), reason="torch has no float8")
def test_one_output_with_a_name_keeps_it_and_numpy_has_what_float8_holds(run, folder):
    flags = ["--set", f"task={folder}/own_task.py:Narrow"]
    assert predict(run, *flags) == 0
    narrow = torch.load("out.pt", weights_only=True)["output"]
    assert narrow.dtype is torch.float8_e5m2
    assert predict(run, *flags, out="out.npz") == 0
    np.testing.assert_array_equal(np.load("out.npz")["output"], narrow.float().numpy())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"out": "out.csv"}, "--out (out.csv) must end in .npz or .pt"),
        ({"out": "none/out.pt"}, "must be a file in a folder that exists"),
        ({"source": "own_sources.py:nothing"}, "--source gave no samples"),
        ({"source": "own_sources.py:number"}, "--source returned int; it must return a data set or an iterable"),
        ({"source": "own_sources.py:pairs"}, "has 2 columns, of which the model takes an unknown one"),
        ({"source": "own_sources.py:constant"}, "--source (own_sources.py:constant) is 3; it must be a function"),
        ({"source": "own_sources.py:needs"}, "it must be a function without arguments"),
        ({"source": "own_sources.py:missing"}, "has no missing"),
        ({"source": "missing.py:data_set"}, "--source: there is no file missing.py"),
        ({"what": "scalar"}, "predict_step: the output must have a first dimension"),
        ({"what": "text"}, "predict_step: x is str; return tensors"),
        ({"what": "uneven"}, "must have the same shape but for the first dimension"),
        ({"what": "twice"}, "outputs must have names that differ and are not empty, not 'a.b', 'a.b'; rename"),
        ({"what": "number"}, "outputs must have names that differ and are not empty, not '1', '1'; rename"),
        ({"what": "unnamed"}, "outputs must have names that differ and are not empty, not ''; rename"),
        ({"what": "sparse"}, "predict_step: x is a sparse tensor; return output.to_dense()"),
        ({"what": "none"}, "predict_step returned no tensor for batch 0; return at least one"),
        ({"what": "other"}, "the same outputs for every batch: 0 for the first, and 1 for batch 1"),
    ],
)
def test_what_cannot_be_written_is_reported_in_one_sentence(run, folder, capsys, arguments, expected):
    (folder / "out.pt").write_text("as before")
    what = arguments.pop("what", None)
    flags = [] if what is None else ["--set", f"task={folder}/own_task.py:Named", "--set", f"task_args.what={what}"]
    assert predict(run, *flags, **arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert expected in error
    assert (folder / "out.pt").read_text() == "as before"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("dictionaries", "predict_step, batch 0 of --source, raised TypeError: "),
        ("fails", "--source (own_sources.py:fails) raised LookupError: no images ("),
    ],
)
def test_an_error_of_the_task_or_the_source_names_the_call(run, folder, capsys, source, expected):
    code = predict(run, source=f"own_sources.py:{source}")
    assert (code, expected in capsys.readouterr().err.splitlines()[0]) == (1, True)


@pytest.mark.processes
@pytest.mark.claim("failing-item")
def test_an_error_of_the_source_names_its_index(run, folder, capsys):
    code = predict(run, source="own_sources.py:broken")
    expected = "error: --source, index 17 of the data set, raised OSError: the image is damaged ("
    assert (code, expected in capsys.readouterr().err) == (1, True)
    assert not (folder / "out.pt").exists()


def test_the_command_needs_no_config_and_no_folder_of_the_run(run, folder):
    command = [sys.executable, "-m", "paramserver.cli", "predict", str(run.run_dir), "--source", "own_sources:data_set"]
    done = subprocess.run(
        [*command, "--out", "out.npz"], env=environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert np.load("out.npz")["output"].shape == (37, 5)


@pytest.mark.processes
def test_another_split_is_evaluated(run, capsys):
    """The number of validation samples stands for the split here: both are arguments of the task."""
    assert evaluate.main([str(run.run_dir), "--set", "task_args.validation=11", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 11
