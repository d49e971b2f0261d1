"""When a trainer loads the version of a step."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paramserver.consistency import Decision, Verdict
from paramserver.parameters.flat import FlatTensors, trainable_parameters
from paramserver.trainers.model_copy import ModelCopy
from paramserver.trainers.pull import VersionPull
from paramserver.transport.messages import StepGrant
from paramserver.transport.segments import SegmentHost
from paramserver.transport.shared_memory import SharedMemoryTrainerTransport, gradients_key, parameters_key

TIMEOUT_S = 10.0


def test_a_graph_that_hooks_make_between_two_steps_is_of_the_version_of_the_next_one():
    """The version is loaded before them, and once: autograd counts each load as a change."""
    model = nn.Linear(2, 2)
    with SegmentHost("test", TIMEOUT_S) as host:
        flat = FlatTensors(trainable_parameters(nn.Linear(2, 2)), lambda own: host.allocate(parameters_key(0), own))
        host.allocate(gradients_key(0), flat.layout)
        parameters = trainable_parameters(model)
        transport = SharedMemoryTrainerTransport(
            flat.layout, [parameters[slot.name] for slot in flat.layout.slots], host.address, 1, 0, TIMEOUT_S
        )
        control = SimpleNamespace(server=None, config=SimpleNamespace(cluster=SimpleNamespace(timeout_s=TIMEOUT_S)))
        pull = VersionPull(control, transport, ModelCopy(model, parameters, shares_memory=True), None, None, {})

        def start(version):
            pull.start(StepGrant(Decision(Verdict.GO, (0,), version, 0), 0))

        start(0)
        pull.load_values()
        loss = model.weight.square().sum()
        pull.load()
        loss.backward(retain_graph=True)
        assert torch.equal(model.weight.grad, 2 * flat.tensors["weight"])
        start(1)
        pull.load()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
