"""A task without a file: of a notebook's cell, and of a program that is read from standard input."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from launching import differing_tensors, environment, fork_server, launch

import paramserver

pytestmark = pytest.mark.processes

TASK = """
import torch
from torch import nn
import paramserver

WIDTH = 4

class Sine(paramserver.Task):
    def build_model(self):
        return nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def build_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def train_source(self, partition):
        x = torch.linspace(-3, 3, 64).unsqueeze(1)
        return torch.utils.data.TensorDataset(x, torch.sin(2 * x))

    def training_step(self, model, batch, batch_idx):
        return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
RUN = """
result = paramserver.run(
    Sine, mode={mode!r}, training={{"max_steps": 4, "batch_size": 8}},
    logging={{"run_dir": {folder!r}, "name": {name!r}, "tensorboard": False}},
)
print("steps", result.summary["steps"], *(p.numel() for p in result.model().parameters()))
"""


def weights(folder, name):
    return torch.load(folder / name / "checkpoints" / "step-00000004" / "model.pt")


def python(words, program, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        input=program,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_a_program_from_standard_input_runs_with_several_processes_and_resumes(tmp_path, mode):
    """Bit for bit as the same class in a file; the run has its task, so any command finds it later."""
    (tmp_path / "elsewhere").mkdir()
    out = python(["-"], TASK + RUN.format(mode=mode, folder=str(tmp_path), name="typed"), tmp_path)
    assert out == "steps 4 4 4 4 1\n"
    (tmp_path / "task.py").write_text(TASK)
    training = {"max_steps": 4, "batch_size": 8}
    file = launch(tmp_path, task=f"{tmp_path}/task.py:Sine", mode=mode, training=training)
    assert file.code == 0, file.output
    assert differing_tensors(weights(tmp_path, "typed"), file.load("model")) == []
    resume = ["--resume", "../typed", "--set", "training.max_steps=6"]
    code, output = fork_server().run(resume, tmp_path / "elsewhere", 90, environment())
    assert code == 0, output
    assert (tmp_path / "typed" / "checkpoints" / "step-00000006").is_dir()


def test_a_cell_of_a_notebook_runs_with_several_processes_and_shows_a_bar(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient
    cells = [TASK, RUN.format(mode="rpc", folder=str(tmp_path / "runs"), name="cell")]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    handler = signal.getsignal(signal.SIGINT)
    try:
        client(book, timeout=150, resources={"metadata": {"path": str(tmp_path)}}).execute()
    finally:
        signal.signal(signal.SIGINT, handler)  # the client's event loop leaves the default one
    outputs = book.cells[1].outputs
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert printed == "steps 4 4 4 4 1\n"
    bars = [output.data["text/plain"] for output in outputs if output.output_type == "display_data"]
    assert any("step" in bar for bar in bars), outputs
    errors = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert "training.max_steps (4) reached" in errors
    assert "samples/s, " not in errors, "no plain lines beside the bar"
    assert len(paramserver.run.__doc__) > 0
