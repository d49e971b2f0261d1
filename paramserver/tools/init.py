"""Writes a task, a config and a test to start from: ``paramserver init NAME``."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from paramserver.errors import UnsupportedConfiguration
from paramserver.launch import CommandParser, run_command
from paramserver.process_utils import print_output

_TASK = '''\
"""A task to start from: replace model, optimizer, data and loss by your own."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paramserver import Task


def samples(count, seed):
    x = 6 * torch.rand(count, 1, generator=torch.Generator().manual_seed(seed)) - 3
    return TensorDataset(x, torch.sin(2 * x))


class CLASS(Task):
    def __init__(self, width=64, lr=0.01):  # values of task_args in the config
        self.width, self.lr = width, lr

    def build_model(self):
        return nn.Sequential(nn.Linear(1, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def build_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=self.lr)

    def train_source(self, partition):
        return samples(1024, seed=0)  # all of them: they are partitioned over the trainers

    def training_step(self, model, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    def validation_source(self, partition):
        return samples(256, seed=1)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        x, y = batch
        return {"loss": nn.functional.mse_loss(model(x), y)}
'''
_CONFIG = """\
task: task.py:CLASS
task_args: {width: 64, lr: 0.01}
mode: rpc  # or ddp, local

cluster:
  num_trainers: 2

training:
  max_epochs: 30
  batch_size: 32  # of each trainer
  validate_every: 50  # steps

checkpoint:
  best: {metric: loss, mode: min}
"""
_TEST = '''\
"""Run it with: python -m pytest"""

from pathlib import Path

import paramserver
import torch
from task import CLASS

CONFIG = Path(__file__).with_name("config.yaml")


def test_it_learns(tmp_path):
    result = paramserver.run(CLASS, CONFIG, mode="local", logging={"run_dir": str(tmp_path), "tensorboard": False})
    assert result.status == "completed"
    assert result.validation["loss"] < 0.1  # the variance of a sine is 0.5
    assert result.model()(torch.zeros(5, 1)).shape == (5, 1)
'''


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver init",
        description="Write a task, its config and a test into a new folder: a program that trains, to be changed.",
        epilog="Exit codes: 0 done, 2 the input is wrong.",
    )
    parser.add_argument("name", type=Path, metavar="NAME", help="of the folder; its last part names the class too")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    return run_command(lambda: print_output(_write(arguments.name)))


def _write(folder: Path) -> str:
    words = re.split(r"[-_ .]+", folder.name)
    class_name = "".join(word[:1].upper() + word[1:] for word in words)
    if not class_name.isidentifier() or keyword.iskeyword(class_name):
        raise UnsupportedConfiguration(f"NAME ({folder}) must end with a letter and letters or digits, such as my_task")
    if re.search(rf"\b{class_name}\b", _TASK + _TEST):  # such as Path
        class_name += "Task"
    try:
        folder.mkdir(parents=True)
        for name, text in (("task.py", _TASK), ("config.yaml", _CONFIG), ("test_task.py", _TEST)):
            (folder / name).write_text(text.replace("CLASS", class_name))
    except FileExistsError as error:
        raise UnsupportedConfiguration(f"NAME ({folder}) must not exist; choose another name") from error
    except OSError as error:
        raise UnsupportedConfiguration(f"NAME ({folder}) cannot be written ({error.strerror or error})") from error
    quoted = shlex.quote(str(folder))
    return "\n".join(
        [
            f"written: {folder}/task.py, config.yaml, test_task.py",
            f"train:   paramserver launch --config {quoted}/config.yaml; with all-reduce add --mode ddp",
            "compare: paramserver report RUN RUN, with the folders of two runs, which paramserver runs lists",
            f"test:    python -m pip install pytest, then python -m pytest {quoted}",
        ]
    )
