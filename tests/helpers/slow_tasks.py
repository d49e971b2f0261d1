"""Tasks whose updates take long."""

import time

import torch
from tasks import ReferenceTask


class SlowSGD(torch.optim.SGD):
    """Each step takes ``seconds`` more, as that of a large model does."""

    updates_each = "element"
    seconds = 0.0

    def step(self, closure=None):
        time.sleep(self.seconds)
        return super().step(closure)


class SlowUpdates(ReferenceTask):
    """The reference task, with an update of ``update_s`` seconds, during which other trainers send their gradients.

    Each trainer takes another time for a step.
    """

    def __init__(self, update_s=2.0, **options):
        super().__init__(**options)
        self.update_s = update_s

    def training_step(self, model, batch, batch_idx):
        time.sleep(0.3 * (1 + self.trainer.trainer_index))
        return super().training_step(model, batch, batch_idx)

    def build_optimizer(self, model):
        optimizer = SlowSGD(model.parameters(), lr=0.1)
        optimizer.seconds = self.update_s
        return optimizer
