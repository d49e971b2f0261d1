"""Tasks with several optimizers."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paramserver import Task
from paramserver.optim import RowWiseAdagrad


class Networks(nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3))
        self.judge = nn.Sequential(nn.Linear(3, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1))
        self.weight = nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(2)) if unused else None


class Adversarial(Task):
    """Two or three updates in a batch; the samples that ``make`` gives are used in the losses of both networks."""

    def __init__(self, samples=96, unused=False, schedule=True, most_calls=3, freezes=False):
        self.samples, self.unused, self.schedule, self.most_calls = samples, unused, schedule, most_calls
        self.freezes = freezes

    def build_model(self):
        return Networks(self.unused)

    def build_optimizer(self, model):
        extra = [model.unused] if self.unused else []
        return {
            "judge": torch.optim.AdamW([*model.judge.parameters(), *extra], 0.01, weight_decay=0.1),
            "make": torch.optim.Adam(model.make.parameters(), 0.01),
            "weight": torch.optim.SGD([model.weight], 0.1, momentum=0.9),
        }

    def build_scheduler(self, optimizers):
        if not self.schedule:
            return None
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers["weight"], factor=0.5, patience=0)
        return {
            "judge": torch.optim.lr_scheduler.StepLR(optimizers["judge"], 3, 0.9),
            "make": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizers["make"], 1, 0.5), "every": "epoch"},
            "weight": {"scheduler": plateau, "every": "validation", "metric": "loss"},
        }

    def train_source(self, partition):
        return TensorDataset(torch.randn(self.samples, 3, generator=torch.Generator().manual_seed(5)) + 1)

    def validation_source(self, partition):
        return TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(6)))

    def training_step(self, model, batch, batch_idx):
        (real,) = batch
        third = self.most_calls > 2 and self.trainer.step % 5 == 0
        model.judge.requires_grad_()
        made = model.make(torch.randn(len(real), 4)) * model.weight
        scores = model.judge(torch.cat([real, made.detach()]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        self.optimize("judge", F.binary_cross_entropy_with_logits(scores, truth))
        if self.most_calls > 1:
            model.judge.requires_grad_(not self.freezes)
            scores = model.judge(made)
            loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
            self.optimize("make", loss, retain_graph=third)
        if third:
            self.optimize("weight", (model.make(real.new_ones(2, 4)).detach() * model.weight).square().mean())

    def optimize(self, name, loss, **options):
        self.log(f"loss_{name}", loss)
        self.trainer.optimize(name, loss, **options)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        return {"loss": model.judge(model.make(batch[0]) * model.weight).square().mean()}


class Gathers(Adversarial):
    """Gathers at the beginning and end of batches; the last one of a pass is one trainer's alone."""

    def gather(self):
        steps = self.trainer.all_gather(self.trainer.step)
        assert len(set(steps)) == 1
        self.log("gathered", float(len(steps)))

    def on_batch_start(self, batch_idx):
        self.gather()

    def on_batch_end(self, batch_idx):
        self.gather()


class Slow(Adversarial):
    """Trainer 1 takes ``slow_s`` for batch 2."""

    def __init__(self, slow_s, **options):
        super().__init__(schedule=False, **options)
        self.slow_s = slow_s

    def training_step(self, model, batch, batch_idx):
        if self.trainer.trainer_index == 1 and batch_idx == 2:
            time.sleep(self.slow_s)
        super().training_step(model, batch, batch_idx)


class DiesBeforePush(Adversarial):
    """Trainer 0 dies once in its seventh batch, when its first call was compared and is not pushed.

    Args:
        mark: a file that it writes before.
    """

    def __init__(self, mark, **options):
        super().__init__(most_calls=2, schedule=False, **options)
        self.mark = Path(mark)

    def training_step(self, model, batch, batch_idx):
        if self.trainer.trainer_index == 0 and batch_idx == 6 and not self.mark.exists():
            self.mark.touch()
            self.trainer.step_optimizer = lambda report: os.kill(os.getpid(), signal.SIGKILL)
        super().training_step(model, batch, batch_idx)


class DiesValidating(Adversarial):
    """Dies once, in the validation of the version ``step``, and writes the file ``mark`` before."""

    def __init__(self, mark, step, **options):
        super().__init__(**options)
        self.mark, self.step = Path(mark), step

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        if self.trainer.step == self.step and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().validation_step(model, batch, valid_batch_idx, batch_idx)


class Differs(Adversarial):
    """Trainer 1 makes a call less, or another one, in batch 2."""

    def __init__(self, how="less", **options):
        super().__init__(schedule=False, **options)
        self.how = how

    def training_step(self, model, batch, batch_idx):
        odd = self.trainer.trainer_index == 1 and batch_idx == 2
        self.most_calls = 1 if odd and self.how == "less" else 2
        self.swapped = odd and self.how == "other"
        super().training_step(model, batch, batch_idx)

    def optimize(self, name, loss, **options):
        super().optimize("judge" if self.swapped else name, loss, **options)


class Unsteady(Adversarial):
    """At ``places``, of trainer, batch and optimizer, the loss is NaN, or with ``factor`` its gradient overflows."""

    def __init__(self, places, factor=float("nan"), **options):
        super().__init__(**options)
        self.places, self.factor = [tuple(place) for place in places], factor

    def training_step(self, model, batch, batch_idx):
        self.batch_idx = batch_idx
        super().training_step(model, batch, batch_idx)

    def optimize(self, name, loss, **options):
        is_bad = (self.trainer.trainer_index, self.batch_idx, name) in self.places
        self.trainer.optimize(name, loss * self.factor if is_bad else loss, **options)


class Stale(Adversarial):
    """The second loss is computed before the update of parameters that its gradient depends on."""

    def training_step(self, model, batch, batch_idx):
        scores = model.judge(model.make(torch.randn(len(batch[0]), 4)))
        self.trainer.optimize("judge", scores.square().mean(), retain_graph=True)
        self.trainer.optimize("make", scores.mean())


class Misused(Adversarial):
    """Calls ``optimize`` as ``how`` says."""

    def __init__(self, how="returns"):
        super().__init__(schedule=False)
        self.how = how

    def build_optimizer(self, model):
        several = super().build_optimizer(model)
        if self.how == "shared":
            return {**several, "again": torch.optim.SGD([model.weight], 0.1)}
        if self.how == "keys":
            return {0: several["judge"], "make": several["make"]}
        return several["judge"] if self.how == "one" else several

    def build_scheduler(self, optimizers):
        return {"other": None} if self.how == "schedule" else None

    def training_step(self, model, batch, batch_idx):
        loss = model.judge(batch[0]).mean()
        if self.how == "returns":
            return loss
        if self.how == "backward":
            loss.backward()
            self.trainer.optimize("judge", model.judge(batch[0]).mean())
        if self.how in ("name", "one"):
            self.trainer.optimize("jugde", loss)
        if self.how == "part":
            self.trainer.optimize("make", loss)
        return None

    def on_batch_start(self, batch_idx):
        if self.how == "hook":
            self.trainer.optimize("judge", torch.zeros(()))


class Tables(nn.Module):
    """An embedding table with a bias for each row of it, and dense layers, of which several servers may split one."""

    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Embedding(300, 8, sparse=sparse)
        self.bias = nn.Embedding(300, 1, sparse=sparse)
        self.hidden = nn.Linear(16, 200)
        self.norm = nn.BatchNorm1d(200)
        self.last = nn.Linear(200, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, pairs):
        hidden = self.norm(self.hidden(self.table(pairs).flatten(1))).relu()
        return (self.last(hidden) + self.bias(pairs).sum(dim=1)).squeeze(1) * self.scale


class Joint(Task):
    """A list of three optimizers: one for the dense layers, one for the tables, one for the scale.

    Args:
        tables: the optimizer of the tables.
        schedule: whether two of the three have schedulers.
        how: what ``build_optimizer`` returns instead, to be refused.
    """

    def __init__(self, tables="rows", schedule=True, sparse=False, samples=96, how=None):
        self.tables, self.schedule, self.sparse, self.samples, self.how = tables, schedule, sparse, samples, how

    def build_model(self):
        return Tables(self.sparse)

    def build_optimizer(self, model):
        dense = [p for part in (model.hidden, model.norm, model.last) for p in part.parameters()]
        kind = RowWiseAdagrad if self.tables == "rows" else torch.optim.Adagrad
        optimizers = [
            torch.optim.Adam([{"params": dense[:2], "lr": 0.002}, {"params": dense[2:]}], lr=0.01),
            kind([model.table.weight, model.bias.weight], lr=0.05),
            torch.optim.SGD([model.scale], lr=0.01, momentum=0.9),
        ]
        if self.how == "bias":
            optimizers[1] = RowWiseAdagrad([model.table.weight, model.last.bias])
        if self.how == "shared":
            optimizers[2].add_param_group({"params": [model.last.bias]})
        return {
            "empty": [],
            "element": [*optimizers, model],
            "dict": [optimizers[0], {"tables": optimizers[1]}],
            "one": optimizers[0],
        }.get(self.how, optimizers)

    def build_scheduler(self, optimizers):
        if not self.schedule:
            return None
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[1], factor=0.5, patience=0)
        by_validation = {"scheduler": plateau, "every": "validation", "metric": "loss"}
        return [torch.optim.lr_scheduler.StepLR(optimizers[0], 3, 0.9), by_validation, None]

    def train_source(self, partition):
        return self.pairs(self.samples, 5)

    def validation_source(self, partition):
        return self.pairs(20, 6)

    def pairs(self, count, seed):
        pairs = torch.randint(300, (count, 2), generator=torch.Generator().manual_seed(seed))
        return TensorDataset(pairs, (pairs.sum(dim=1) % 7).float())

    def training_step(self, model, batch, batch_idx):
        pairs, targets = batch
        return F.mse_loss(model(pairs), targets)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        return {"loss": F.mse_loss(model(batch[0]), batch[1])}
