"""What an optimizer's step changes on the server in addition to its parameters: no trainer would see it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from servers import NoNetwork, SumOfOutputs, no_checkpoints, send_gradients
from torch import nn

from paramserver.buffers.positions import AppliedPositions
from paramserver.config import ClusterConfig, Config, ServerConfig, TrainingConfig
from paramserver.consistency import Announcement, PushId, Readiness, TrainerId
from paramserver.context import StopRequest
from paramserver.distributed.membership import Member
from paramserver.errors import TaskError
from paramserver.metrics.records import StepReport
from paramserver.parameters.model_tree import ModelTree
from paramserver.runs.monitor import RunMonitor
from paramserver.server.build import build_server
from paramserver.transport.messages import DataPosition, Push

SENDER = TrainerId(0, 1, 1)


class Changing(SumOfOutputs):
    """The model has a frozen layer and a buffer; ``change`` is called with it after each step of the optimizer."""

    def __init__(self, change):
        super().__init__(2, 1)
        self.change = change

    def build_model(self):
        model = super().build_model()
        model.register_buffer("scale", torch.ones(2))
        model.teacher = nn.Linear(2, 1).requires_grad_(False)
        return model

    def build_optimizer(self, model):
        sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
        if self.change is not None:
            sgd.register_step_post_hook(lambda *_: self.change(model))
        return sgd


def take_steps(change, steps=2, between=lambda server: None):
    """Make updates of one trainer, each with its module buffers, and return the error that ended the run, or None."""
    config = Config(
        mode="rpc",
        cluster=ClusterConfig(num_trainers=1),
        server=ServerConfig(transport="rpc"),
        training=TrainingConfig(max_steps=100),
    )
    task, monitor = Changing(change), RunMonitor(config, SimpleNamespace(write=lambda record: None), Path())
    server = build_server(task, config, 1, no_checkpoints(monitor), StopRequest(), network=NoNetwork())
    buffers = ModelTree(task.build_model())
    server.join(Member(0, "trainer0", 1, "here"), 8)
    server.report_source(SENDER, DataPosition({}, AppliedPositions().state_dict()))
    for version in range(steps):
        server.announce(SENDER, Announcement(Readiness.READY)).value()
        report = StepReport(0, version, 1, 0.5, 0.0, None, [version])
        server.push(Push(PushId(0, 1, 1, version + 1), report, buffers.pack_buffers()))
        send_gradients(server, server.shard.leaves, SENDER, version)
        if server.run.error is not None:
            return server.run.error
        between(server)
    assert server.aggregator.rules.step == steps
    return None


def scaled_unseen(model):
    model.teacher.weight.data.mul_(0.5)


def assigned(model):
    model.teacher.weight.data = model.teacher.weight.data * 0.5


@torch.no_grad()
def averaged(model):
    model.teacher.weight.lerp_(model[0].weight, 0.5)


def counted(model):
    model.scale.add_(0.1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (scaled_unseen, "parameter teacher.weight, which is frozen,"),
        (assigned, "parameter teacher.weight, which is frozen,"),
        (averaged, "parameter teacher.weight, which is frozen,"),
        (counted, "module buffer scale"),
    ],
)
def test_a_change_is_refused_by_name(change, named):
    error = take_steps(change)
    assert isinstance(error, TaskError)
    assert f"{named} must not be changed by the step of the optimizer in mode rpc" in str(error)


def test_a_step_that_changes_its_own_parameters_only_is_none():
    assert take_steps(None, steps=3) is None
    assert take_steps(lambda model: model[0].weight.data.clamp_(-1, 1), steps=70) is None


def test_what_trainers_send_between_two_steps_is_none():
    def save(server):
        model = server.aggregator.store.model
        with torch.no_grad():
            model.teacher.weight.mul_(0.5)  # as with a checkpoint, for which the first trainer sends its own
        changed = ModelTree(model)
        model.scale.mul_(0.5)
        server.aggregator.store.merge_buffers(changed.pack_buffers())

    assert take_steps(lambda model: None, steps=3, between=save) is None


def test_module_buffers_that_arrive_during_a_step_are_none():
    def send(model):
        stores[0].merge_buffers(packed[0])

    stores, packed = [], []

    def prepare(server):
        stores.append(server.aggregator.store)
        packed.append(ModelTree(stores[0].model).pack_buffers())

    assert take_steps(lambda model: stores and send(model), steps=3, between=prepare) is None
