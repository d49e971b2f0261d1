"""Handwritten digits as a Lightning script: a module, its data, and ``fit``."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class LitDigits(pl.LightningModule):
    def __init__(self, width: int = 64, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))
        self.log("accuracy", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class DigitsData(pl.LightningDataModule):
    def setup(self, stage):
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32) / 16
        data = TensorDataset(images, torch.tensor(digits.target))
        self.train, self.valid = random_split(data, [1500, 297], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.valid, batch_size=256)


if __name__ == "__main__":
    pl.seed_everything(0)
    trainer = pl.Trainer(max_epochs=5, accelerator="cpu", devices=2, strategy="ddp", gradient_clip_val=1.0)
    trainer.fit(LitDigits(width=64), DigitsData())
