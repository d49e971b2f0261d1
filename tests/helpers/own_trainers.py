"""Trainers that override every member that docs/own-trainers.md names, and log what they saw."""

from collections import Counter
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paramserver.consistency import Stop
from paramserver.trainers import DdpTrainer, LocalTrainer, RpcTrainer, ServedTrainer


class Counts:
    """Counts the calls of each member, and logs the counts and what can be read at the end."""

    def __init__(self, *arguments):
        self.calls = Counter()
        super().__init__(*arguments)

    def leave(self, totals, decision):
        state = self.optimizer_state()
        self.calls["steps"] = totals.steps.count
        self.calls["state_is_standard"] = set(state) == {"state", "param_groups"}
        self.calls["unwrapped_is_the_model"] = type(self.unwrapped_model).__name__ == "ReferenceModel"
        group = self.data_parallel_group
        self.calls["group_is_the_world"] = group is not None and group is dist.group.WORLD
        for name, count in self.calls.items():
            self.log(name, count, reduce="none")
        super().leave(totals, decision)


def counted(name):
    """A method that counts its call under its name, then does what the trainer of the mode does."""

    def method(self, *arguments):
        self.calls[name] += 1
        return getattr(super(Counts, self), name)(*arguments)

    return method


METHODS = ["init_connection", "on_after_setup_optimizers", "data_available", "on_before_forward"]
METHODS += ["on_before_backward", "on_after_backward", "block_backward_sync"]
for _name in METHODS:
    setattr(Counts, _name, counted(_name))


class OwnDdp(Counts, DdpTrainer):
    def configure_ddp(self, model, device_ids):
        self.calls["configure_ddp"] += 1
        wrapped = super().configure_ddp(model, device_ids)
        assert isinstance(wrapped, DistributedDataParallel)
        self.calls["broadcast_buffers"] = wrapped.broadcast_buffers
        self.calls["no_device_ids"] = device_ids is None
        return wrapped

    @property
    def is_single_process_per_device(self):
        self.calls["is_single_process_per_device"] += 1
        return super().is_single_process_per_device


class OwnRpc(Counts, RpcTrainer):
    pass


class AveragesItself(nn.Module):
    """Averages gradients in its backward, in place of DistributedDataParallel."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        for parameter in inner.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self.mean)

    def mean(self, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()

    def forward(self, *arguments):
        return self.inner(*arguments)


class Passes(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *arguments):
        return self.inner(*arguments)


class WrapsInstead(DdpTrainer):
    def configure_ddp(self, model, device_ids):
        return AveragesItself(model)


class WrapsInside(DdpTrainer):
    def configure_ddp(self, model, device_ids):
        return super().configure_ddp(Passes(model), device_ids)


class Stops:
    """Requests the end of the run, once, where a validation follows."""

    has_asked = False

    def data_available(self):
        announcement = super().data_available()
        if self.step < 5 or self.has_asked:
            return announcement
        self.has_asked = True
        return replace(announcement, stop=Stop.LIMIT, reason="it is enough")


class StopsDdp(Stops, DdpTrainer):
    pass


class StopsRpc(Stops, RpcTrainer):
    pass


class PaddedDdp(DdpTrainer):
    @property
    def sampler_kwargs(self):
        return {"pad": True, "shuffle": False}


class StoresMore:
    """Stores a number of its own in each part of a checkpoint, and logs the one that it got back."""

    restored = 0

    def state_dict(self):
        return {**super().state_dict(), "own": 7 + self.trainer_index}

    def load_state_dict(self, part):
        self.restored = part["own"]
        super().load_state_dict(part)

    def leave(self, totals, decision):
        self.log("restored", self.restored, reduce="none")
        super().leave(totals, decision)


class StoresMoreLocal(StoresMore, LocalTrainer):
    pass


class StoresMoreDdp(StoresMore, DdpTrainer):
    pass


class StoresMoreRpc(StoresMore, RpcTrainer):
    pass


class Wrapped:
    """An optimizer in another one, whose steps it counts."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0

    def step(self, *arguments):
        self.count += 1
        return self.optimizer.step(*arguments)

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


class WrapsOptimizer:
    """Replaces the optimizer once it exists, and logs the steps of the one that it put there."""

    def on_after_setup_optimizers(self):
        self.optimizer = Wrapped(self.optimizer)

    def leave(self, totals, decision):
        self.log("stepped", self.optimizer.count, reduce="none")
        super().leave(totals, decision)


class WrapsRpc(WrapsOptimizer, RpcTrainer):
    pass


class WrapsServed(WrapsOptimizer, ServedTrainer):
    pass
