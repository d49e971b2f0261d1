"""Tasks and trainers for runs that compute the model on the server."""

import copy
import time
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
from tasks import ReferenceTask
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F

from paramserver.trainers.server_forward import ServedTrainer


class Branching(nn.Module):
    """Returns a dictionary with more than any loss uses; what only ``second`` leads to never has a gradient."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(36, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.main = nn.Linear(16, 5)
        self.first = nn.Linear(16, 2)
        self.second = nn.Linear(16, 2)

    def forward(self, x, scale=1.0):
        x = self.drop(self.norm(self.trunk(x.flatten(1)))) * scale
        return {"logits": self.main(x), "aux": (self.first(x), [self.second(x)]), "samples": len(x)}


class Branches(ReferenceTask):
    """Calls the model four times in a step: two are in the loss, one is in none, one is a teacher in ``eval()``."""

    def build_model(self):
        return Branching()

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def training_step(self, model, batch, batch_idx):
        images, labels = batch
        output, _unused = model(images, scale=2.0), model(-images)
        again = model(images + 0.1)
        model.eval()
        assert not model.training
        with torch.no_grad():
            teacher = model(images)["logits"]
        model.train()
        assert output["samples"] == len(images)
        loss = F.cross_entropy(output["logits"], labels) + again["aux"][0].mean()
        return loss + 0.1 * (again["logits"] - teacher).pow(2).mean()

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        images, labels = batch
        assert not model.training
        return {"loss": F.cross_entropy(model(images)["logits"], labels)}


class Sidelong(ReferenceTask):
    """Its model reaches a layer through a function, which keeps to the layer it was made with."""

    def build_model(self):
        model = super().build_model()
        layer = model.last
        model.last = nn.Identity()
        model.behind = layer
        model.register_forward_hook(lambda module, inputs, output: layer(output))
        return model


class Nosy(ReferenceTask):
    """Wants a parameter of its model in a step."""

    def training_step(self, model, batch, batch_idx):
        assert not hasattr(model, "module")
        return super().training_step(model, batch, batch_idx) + model.conv.weight.pow(2).sum()


class Witness(ServedTrainer):
    """Sees that each step is one context, one backward of the task's loss, and a step of a DistributedOptimizer."""

    def on_after_setup_optimizers(self):
        assert isinstance(self.optimizer, DistributedOptimizer)
        self.seen = []
        step, backward = self.optimizer.step, dist_autograd.backward

        def stepped(context_id, push):
            self.seen.append(("step", context_id, push.report.loss))
            return step(context_id, push)

        def went_back(context_id, roots, **options):
            assert context_id == dist_autograd._current_context()._context_id()
            self.seen.append(("backward", context_id, float(roots[0])))
            return backward(context_id, roots, **options)

        self.optimizer.step = stepped
        dist_autograd.backward = went_back

    def leave(self, totals, decision):
        for back, step in zip(self.seen[::2], self.seen[1::2], strict=True):
            assert (back[0], step[0]) == ("backward", "step")
            assert back[1] == step[1]
            assert abs(back[2] - step[2]) < 1e-5
        assert len({context for _, context, _ in self.seen}) == self.step
        assert list(self.model._parameters) == []
        self.log("witnessed", self.step)
        super().leave(totals, decision)


class Recording(ServedTrainer):
    """Writes down what each push was made of: version, batch, random state, loss, and the version that it made.

    And when it was computed, by a clock that all processes of a host share. A resumed run appends.
    """

    def init_connection(self):
        super().init_connection()
        self.file = Path(self.config.logging.run_dir) / f"pushes-{self.trainer_index}.pt"
        self.pushes = torch.load(self.file, weights_only=True) if self.file.exists() else []

    def load_version(self):
        super().load_version()
        self.began = time.monotonic()
        self.random_state = torch.get_rng_state()

    def on_before_forward(self, batch):
        self.batch = batch
        return batch

    def step_optimizer(self, report):
        during = self.began, time.monotonic()
        result = super().step_optimizer(report)
        self.pushes.append((result.step, report.version, self.batch, self.random_state, report.loss, during))
        return result

    def leave(self, totals, decision):
        torch.save(self.pushes, self.file)
        super().leave(totals, decision)


def replay(task, seed, pushes):
    """Compute the versions of a run again in one process from what its trainers recorded.

    Args:
        task: as in the run.
        seed: of the run.
        pushes: of each trainer, as ``Recording`` stores them.

    Returns:
        The model and optimizer state after the last version, and the staleness of every push.
    """
    from paramserver.devices import CPU
    from paramserver.parameters.model import build_model

    model = build_model(task, seed, CPU)
    optimizer = task.build_optimizer(model)
    past, staleness = [copy.deepcopy(model.state_dict())], []
    made = sorted({push[0] for trainer in pushes for push in trainer})
    for step in made:
        mine = [push for trainer in pushes for push in trainer if push[0] == step]
        gradients, buffers = zip(*(_gradients(model, task, past[push[1]], push) for push in mine), strict=True)
        model.load_state_dict(past[-1])
        for place, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parts = [own[place] for own in gradients if own[place] is not None]
            parameter.grad = sum(parts[1:], parts[0]) / len(gradients) if parts else None
        optimizer.step()
        with torch.no_grad():
            for own, value in zip(model.buffers(), buffers[0], strict=True):
                own.copy_(value)
        past.append(copy.deepcopy(model.state_dict()))
        staleness += [step - 1 - push[1] for push in mine]
    return past[-1], optimizer.state_dict(), staleness


def _gradients(model, task, version, push):
    """Gradients of one push at the version that it names, and the module buffers afterwards."""
    _, _, batch, random_state, expected_loss, _ = push
    model.load_state_dict(version)
    model.zero_grad()
    torch.set_rng_state(random_state)
    loss = task.training_step(model, batch, 0)
    assert float(loss.detach()) == expected_loss, (
        f"the loss of a push is not that of the version that it names: step {push[0]}, version {push[1]}, "
        f"{expected_loss!r} in the run, {float(loss.detach())!r} here"
    )
    loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters() if p.requires_grad]
    return gradients, [buffer.clone() for buffer in model.buffers()]
