"""What unit tests of servers share: a task of linear layers without data, checkpoints, connections, gradients."""

from types import SimpleNamespace

import torch
from torch import nn

from paramserver import Task
from paramserver.consistency import PushId
from paramserver.server.server_run import Network
from paramserver.transport.autograd import push_root


class SumOfOutputs(Task):
    """The loss is the sum of what linear layers of these sizes, without biases, make of a batch."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def build_model(self):
        pairs = zip(self.sizes, self.sizes[1:], strict=False)
        return nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in pairs))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_source(self, partition):
        return None

    def training_step(self, model, batch, batch_idx):
        return model(batch).sum()


def no_checkpoints(monitor):
    """The CheckpointManager of a run that starts, as far as a ParameterServer asks it."""
    return SimpleNamespace(
        monitor=monitor,
        generation=1,
        resumes=False,
        consistency_state={},
        ledger_state={"rows": {}},
        restore_model=lambda model: None,
        restore_optimizer=lambda updater: None,
        trainer_part=lambda index, newest: None,
        simulations=None,
        publisher=None,
        is_wanted=lambda step: False,
    )


class NoNetwork(Network):
    """The connections of a server whose trainers are in this process, in one context of distributed autograd."""

    def __init__(self):
        self.released = []

    def watch(self, name, on_gone):
        pass

    def context_id(self):
        return 7

    def release_context(self, context_id):
        self.released.append(("server 0", context_id))


def send_gradients(server, leaves, sender, version, value=1.0):
    """Send the gradients of a push to a server over RPC: what is pulled has the edge over which the first returns.

    It is the push of a trainer for ``version``, of those that are numbered by the versions from 1 on.
    """
    push = PushId(sender.trainer_index, sender.generation, sender.incarnation, version + 1)
    pulled = server.pull(push, version)
    for number, leaf in enumerate(leaves[1:], 1):
        server.receive_bucket(push, version, number, torch.full_like(leaf, value))
    push_root([torch.full_like(leaves[0], value)], pulled[:1]).backward()
