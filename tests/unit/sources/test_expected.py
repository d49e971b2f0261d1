"""The number of steps of a schedule, before the run."""

import pytest
import torch
from torch.utils.data import DataLoader

from paramserver import Task
from paramserver.config import config_from_mapping
from paramserver.errors import SourceError


class Numbers(Task):
    def __init__(self, data):
        self.data = data
        self.calls = 0

    def train_source(self, partition):
        self.calls += 1
        torch.rand(1)
        return self.data(partition) if callable(self.data) else self.data


def task_with(data, mode="rpc", trainers=2, **sections):
    task = Numbers(data)
    cluster = {} if mode == "local" else {"cluster": {"num_trainers": trainers}}
    sections["training"] = {"batch_size": 4, **sections.get("training", {})}
    task.config = config_from_mapping({"task": "t.py:T", "mode": mode, **cluster, **sections})
    return task


JOIN = {"uneven_inputs": "join"}
ASYNC, BACKUP = {"server": {"consistency": "async"}}, {"server": {"backup_trainers": 1}}


@pytest.mark.parametrize(
    ("expected", "mode", "training", "sections"),
    [
        # 45 samples in two epochs: 90 of one trainer; 46 and 44 of two.
        (23, "local", {"max_epochs": 2}, {}),
        (11, "ddp", {"max_epochs": 2}, {}),
        (11, "rpc", {"max_epochs": 2}, {}),
        (12, "rpc", {"max_epochs": 2, **JOIN}, {}),
        (23, "rpc", {"max_epochs": 2, **JOIN}, ASYNC),
        (12, "rpc", {"max_epochs": 2, **JOIN}, {"server": {"consistency": "async", "arrivals": 2}}),
        (23, "rpc", {"max_epochs": 2, **JOIN}, BACKUP),
        (4, "rpc", {"max_epochs": 2, "accumulate_batches": 3, **JOIN}, {}),
        (7, "rpc", {"max_epochs": 2, "max_steps": 7}, {}),
        (11, "rpc", {"max_epochs": 2, "max_steps": 70}, {}),
        (5, "ddp", {"max_samples": 33}, {}),
        (9, "rpc", {"max_samples": 33}, ASYNC),
        (21, "rpc", {"max_steps": 7, "local_steps": 3}, {}),
        (11, "rpc", {"max_epochs": 2, "local_steps": 3}, {}),
        (11, "rpc", {"max_steps": 7, "local_steps": 3}, ASYNC),  # of each of two trainers
        (None, "rpc", {"max_seconds": 7}, {}),
        (7, "rpc", {"max_seconds": 7, "max_steps": 7}, {}),
        (None, "local", {"max_epochs": 2}, {"buffer": {"kind": "reservoir", "capacity": 8}}),
    ],
)
def test_it_is_the_number_of_updates_or_local_steps(expected, mode, training, sections):
    assert task_with(range(45), mode, training=training, **sections).total_steps == expected


def test_a_data_loader_is_read_as_in_the_run():
    assert task_with(lambda _: DataLoader(range(40), batch_size=4), training={"max_epochs": 1}).total_steps == 5


@pytest.mark.parametrize("limit", [None, 9])
def test_an_iterable_has_no_length(limit):
    assert task_with(lambda _: iter(range(40)), training={"max_steps": limit}).total_steps == limit


def test_simulations_have_the_length_that_is_planned():
    from paramserver.sources import Simulations

    simulations = {"function": "f.py:f", "count": 4, "steps": 10, "fields": {"a": {"shape": [1]}}}
    simulations |= {"parameters": {"t": [0, 1]}}
    assert task_with(lambda _: Simulations(), simulations=simulations).total_steps == 5


def test_the_data_is_read_once_and_leaves_no_trace_in_random_numbers():
    task = task_with(range(40), training={"max_epochs": 1})
    states = torch.get_rng_state()
    assert [task.total_steps, task.total_steps, task.calls] == [5, 5, 1]
    assert torch.equal(states, torch.get_rng_state())
    task.config = task_with(range(40), training={"max_epochs": 3}).config
    assert task.total_steps == 15


def test_an_error_of_the_data_is_named():
    def broken(partition):
        raise AttributeError("no such column")

    with pytest.raises(SourceError, match=r"total_steps: train_source, or what it returned, .*no such column"):
        _ = task_with(broken, training={"max_epochs": 1}).total_steps
