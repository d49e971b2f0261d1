"""Lightning modules that the tests train, here and with Lightning's own Trainer."""

import os
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, DemoModel
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, R2Score

from paramserver.integrations.lightning import LightningTask

SAMPLES, BATCH, EPOCHS, STEPS = 64, 8, 3, 8

# What configure_optimizers returns, by name: optimizer -> any of the forms that Lightning accepts.
lr_scheduler = torch.optim.lr_scheduler
FORMS = {
    "optimizer": lambda o: o,
    "list": lambda o: [o],
    "two lists": lambda o: ([o], [lr_scheduler.StepLR(o, 1, 0.5)]),
    "dict": lambda o: {"optimizer": o, "lr_scheduler": lr_scheduler.ExponentialLR(o, 0.7)},
    "dicts": lambda o: [{"optimizer": o, "lr_scheduler": {"scheduler": lr_scheduler.StepLR(o, 2)}}],
    "step": lambda o: {
        "optimizer": o,
        "lr_scheduler": {"scheduler": lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)), "interval": "step"},
    },
    "plateau": lambda o: {
        "optimizer": o,
        "lr_scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
        "monitor": "val_loss",
    },
    "several": lambda o: ([o], [lr_scheduler.StepLR(o, 1, 0.5), lr_scheduler.ExponentialLR(o, 0.9)]),
    "every second": lambda o: {
        "optimizer": o,
        "lr_scheduler": {"scheduler": lr_scheduler.ExponentialLR(o, 0.5), "interval": "epoch", "frequency": 2},
    },
}


class Regression(LightningModule):
    """A small network with a BatchNorm, that logs in every way."""

    def __init__(self, form="two lists", optimizer="SGD", width=8, dropout=0.0):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"first": x[0, 0], "batch_idx": float(batch_idx)})
        return {"loss": loss, "x": x}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))

    def configure_optimizers(self):
        options = {"lr": 0.1, "momentum": 0.9} if self.hparams.optimizer == "SGD" else {"lr": 0.01}
        return FORMS[self.hparams.form](getattr(torch.optim, self.hparams.optimizer)(self.parameters(), **options))


class Points(LightningDataModule):
    """Points of a function with noise, the same in every process."""

    def setup(self, stage):
        draw = torch.Generator().manual_seed(3)
        x = torch.randn(SAMPLES + 21, 4, generator=draw)
        y = x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(len(x), 1, generator=draw)
        self.train, self.valid = TensorDataset(x[:SAMPLES], y[:SAMPLES]), TensorDataset(x[SAMPLES:], y[SAMPLES:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=BATCH)

    def val_dataloader(self):
        return DataLoader(self.valid, batch_size=BATCH)


class Manual(LightningModule):
    """Two optimizers in turns, by one of the ways in which modules write it: ``way``."""

    def __init__(self, way="toggled", schedule=False):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.encoder(x))

    def loss(self, batch, detached=False):
        x, y = batch
        hidden = self.encoder(x)
        return F.mse_loss(self.head(hidden.detach() if detached else hidden), y)

    def step(self, optimizer, batch, detached=False):
        if self.hparams.way == "closure":

            def closure():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch, detached))

            optimizer.step(closure)
        elif self.hparams.way == "zero after":
            self.manual_backward(self.loss(batch, detached))
            optimizer.step()
            optimizer.zero_grad()
        else:
            optimizer.zero_grad()
            loss = self.loss(batch, detached)
            if self.hparams.way == "read":
                own = list((self.head if detached else self.encoder).parameters())
                assert max(float(g.abs().max()) for g in torch.autograd.grad(loss, own, retain_graph=True)) > 0
            self.manual_backward(loss)
            if self.hparams.way == "clipped":
                nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            optimizer.step()
            if self.hparams.way == "read after":
                self.head.weight.grad.norm()
            self.log("loss", loss)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        if self.hparams.way == "toggled":
            self.toggle_optimizer(first)
            self.step(first, batch)
            self.untoggle_optimizer(first)
            with second.toggle_model():
                self.step(second, batch)
        else:
            self.step(first, batch)
            first.zero_grad()
            second.zero_grad()  # which the first loss has given gradients
            self.step(second, batch, detached=True)
        if self.hparams.schedule:
            self.lr_schedulers().step()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        first = torch.optim.Adam(self.encoder.parameters(), 0.01)
        second = torch.optim.SGD(self.head.parameters(), 0.1, momentum=0.9)
        if not self.hparams.schedule:
            return first, second
        schedule = {"scheduler": lr_scheduler.ExponentialLR(second, 0.8), "interval": "step"}
        return [first, second], [schedule]


HOOKS = [
    "on_fit_start",
    "on_fit_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "prepare_data",
    "setup",
    "teardown",
    "configure_optimizers",
    "training_step",
    "validation_step",
    "train_dataloader",
    "val_dataloader",
]
CALLS = []


def recorded(hook):
    def call(self, *args, **kwargs):
        numbers = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, (int, str))]
        CALLS.append((hook, *numbers, self.training, torch.is_grad_enabled()))
        return getattr(super(Recorded, self), hook)(*args, **kwargs)

    return call


class WithData(Regression):
    """The module has its data itself."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.points = Points()
        self.points.setup("fit")

    def train_dataloader(self):
        return self.points.train_dataloader()

    def val_dataloader(self):
        return self.points.val_dataloader()


class Recorded(WithData):
    """Records each call of a hook in ``CALLS``."""


for _hook in HOOKS:
    setattr(Recorded, _hook, recorded(_hook))


class Everything(Regression):
    """Uses what a module may use of its trainer, and writes what it finds into its checkpoint."""

    def setup(self, stage):
        self.extra = nn.Linear(1, 1)
        self.seen = {"setup": (stage, self.trainer.world_size, self.trainer.max_epochs)}

    def configure_optimizers(self):
        steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.Adam(self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps),
                "interval": "step",
            },
        }

    def on_before_optimizer_step(self, optimizer):
        self.gradient = sum(p.grad.abs().sum() for group in optimizer.param_groups for p in group["params"])
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.clamp_(-0.05, 0.05)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"] + self.extra(batch[0][:1, :1]).sum() ** 2
        assert self.trainer.training
        assert not self.trainer.validating
        self.seen["step"] = (self.global_step, self.current_epoch, self.trainer.callback_metrics["train_loss"].item())
        self.print("only the first trainer prints")
        return loss

    def on_after_backward(self):
        self.net[0].weight.grad.mul_(0.5)

    def on_validation_epoch_end(self):
        self.seen["valid"] = (self.trainer.validating, self.training, self.trainer.callback_metrics["val_loss"].item())

    def on_save_checkpoint(self, checkpoint):
        trainer = self.trainer
        checkpoint["seen"] = {**self.seen, "ranks": (trainer.global_rank, trainer.local_rank, trainer.is_global_zero)}


class LogsGradients(Regression):
    def on_before_optimizer_step(self, optimizer):
        self.log("norm", self.net[0].weight.grad.norm())


class Scored(Regression):
    """Validates by a metric that is no mean over samples."""

    def __init__(self, **options):
        super().__init__(**options)
        self.score, self.kept, self.seen = R2Score(), R2Score(), CatMetric()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        for score in (self.score, self.kept):
            score.update(self(x), y)
        self.seen.update(x[:, 0])
        self.log("r2", self.score)

    def on_validation_epoch_end(self):
        """As in torchmetrics' own documentation; a state of each kind, and of other lengths on each trainer."""
        computed = {"r2_of_all": self.score.compute(), "kept_r2": self.kept.compute()}
        self.log_dict({**computed, "seen": float(len(self.seen.compute()))})
        self.kept.reset()
        self.seen.reset()


class PreparedPoints(Points):
    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def prepare_data(self):
        began = time.monotonic()
        time.sleep(0.1)  # the time of a download, in which no other process may begin one
        (self.folder / f"prepared-{os.getpid()}").write_text(f"{began} {time.monotonic()}")


class Prepared(LightningTask):
    def __init__(self, folder):
        super().__init__(Regression(), PreparedPoints(folder))


class RegressionTask(LightningTask):
    def __init__(self, kind="Regression", datamodule=True, **options):
        super().__init__(globals()[kind](**options), Points() if datamodule else None)


class Boring(LightningTask):
    def __init__(self, datamodule=False):
        super().__init__(BoringModel(), BoringDataModule() if datamodule else None)


class Demo(LightningTask):
    def __init__(self):
        super().__init__(DemoModel(), BoringDataModule())
