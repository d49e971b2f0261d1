"""What a trainer validates: a version that the server retained, with its own module buffers."""

from pathlib import Path
from types import SimpleNamespace

import torch
from servers import NoNetwork, SumOfOutputs, no_checkpoints, send_gradients

from paramserver.buffers.positions import AppliedPositions
from paramserver.config import CheckpointConfig, ClusterConfig, Config, ServerConfig, TrainingConfig
from paramserver.consistency import Announcement, PushId, Readiness, TrainerId, Verdict
from paramserver.context import StopRequest
from paramserver.distributed.membership import Member
from paramserver.metrics.records import StepReport, WeightedSums
from paramserver.parameters.model_tree import ModelTree
from paramserver.runs.monitor import RunMonitor
from paramserver.server.build import build_server
from paramserver.transport.messages import DataPosition, Push

READY = Announcement(Readiness.READY)


class Counting(SumOfOutputs):
    def build_model(self):
        model = super().build_model()
        model.register_buffer("count", torch.zeros(()))
        return model


class Run:
    """A server whose updates have two pushes, and two trainers, which change the buffer of their copy."""

    def __init__(self):
        config = Config(
            mode="rpc",
            cluster=ClusterConfig(num_trainers=2),
            server=ServerConfig(consistency="async", arrivals=2, transport="rpc"),
            training=TrainingConfig(max_steps=10, validate_every=2),
            checkpoint=CheckpointConfig(every=0),
        )
        task, monitor = Counting(2, 1), RunMonitor(config, SimpleNamespace(write=lambda record: None), Path())
        checkpoints = no_checkpoints(monitor)
        self.server = build_server(task, config, 2, checkpoints, StopRequest(), network=NoNetwork())
        self.model = task.build_model()
        for index in (0, 1):
            self.server.join(Member(index, f"trainer{index}", index + 1, "here"), 8)
            self.server.report_source(self.id(index), DataPosition({}, AppliedPositions().state_dict()))

    def id(self, index):
        return TrainerId(index, 1, 1)

    def announce(self, index):
        return self.server.announce(self.id(index), READY)

    def push(self, index, version, count):
        self.model.count.fill_(count)
        report = StepReport(index, version, 1, 0.5, 0.0, None, [version])
        reply = self.server.push(Push(PushId(index, 1, 1, version + 1), report, ModelTree(self.model).pack_buffers()))
        send_gradients(self.server, self.server.shard.leaves, self.id(index), version)
        return reply.value().result.step

    def count_of(self, index, version):
        return float(self.server.view_version(self.id(index), version).buffers.values()["count"])


def test_a_retained_version_has_its_module_buffers_while_pushes_are_held_for_the_next_one():
    run = Run()
    for version in (0, 1):
        granted = [run.announce(index) for index in (0, 1)]
        assert [grant.value().decision.verdict for grant in granted] == [Verdict.GO, Verdict.GO]
        assert [run.push(index, version, count=1 + index) for index in (0, 1)] == [version, version + 1]
    assert run.announce(0).value().decision.verdict is Verdict.VALIDATE
    assert run.count_of(0, 2) == 2
    run.server.report_validation_share(run.id(0), 2, 0, WeightedSums({"loss": 1.0}, {"loss": 1}, 1))
    assert run.announce(0).value().decision.verdict is Verdict.GO
    assert run.push(0, 2, count=7) == 2
    assert run.announce(1).value().decision.verdict is Verdict.VALIDATE
    assert run.count_of(1, 2) == 2
    assert run.count_of(1, None) == 7
