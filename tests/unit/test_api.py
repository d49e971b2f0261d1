"""``paramserver.run`` with an instance of a task."""

import time

import pytest
import torch
from launching import differing_tensors

import paramserver
from paramserver.errors import TaskError, UnsupportedConfiguration


class Given(paramserver.Task):
    def __init__(self, data, lr=0.1):
        self.data, self.lr = data, lr

    def build_model(self):
        return torch.nn.Linear(1, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def train_source(self, partition):
        return self.data

    def training_step(self, model, batch, batch_idx):
        time.sleep(0.02)  # stands for the work of a batch
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


X = torch.linspace(-1, 1, 32).unsqueeze(1)
DATA = torch.utils.data.TensorDataset(X, 2 * X)


def config(folder, name, mode="local", steps=4):
    logging = {"run_dir": str(folder), "name": name, "progress": "off", "tensorboard": False}
    return {"mode": mode, "training": {"max_steps": steps, "batch_size": 8}, "logging": logging}


def test_in_local_an_argument_may_be_any_object_and_a_resume_needs_it_again(tmp_path):
    straight = paramserver.run(Given(DATA, lr=0.2), config(tmp_path, "straight", steps=8))
    first = paramserver.run(Given(DATA, lr=0.2), config(tmp_path, "parts"))
    with pytest.raises(TaskError, match=r"takes other arguments.*data"):
        paramserver.run(resume=first.run_dir, overrides=["training.max_steps=8"])
    second = paramserver.run(Given(DATA, lr=0.2), resume=first.run_dir, overrides=["training.max_steps=8"])
    assert second.summary["trainers"][0]["samples"] == 64
    assert second.summary["trainers"][0]["samples_per_second"] < 8 / 0.02, "of what was served since the resume"
    last = ["checkpoints", "step-00000008", "model.pt"]
    one, other = (torch.load(run.run_dir.joinpath(*last)) for run in (straight, first))
    assert differing_tensors(one, other) == []
    stored = (first.run_dir / "config.yaml").read_text()
    assert "lr: 0.2" in stored
    assert "data:" not in stored


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_other_modes_refuse_what_other_processes_cannot_create(tmp_path, mode):
    with pytest.raises(UnsupportedConfiguration, match=r"data \(TensorDataset\) of Given must be a plain value"):
        paramserver.run(Given(DATA), config(tmp_path, "run", mode=mode))
    assert list(tmp_path.iterdir()) == []
