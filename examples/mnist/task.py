"""MNIST, with the network and the optimizer of PyTorch's tutorial on a parameter server by RPC.

https://docs.pytorch.org/tutorials/intermediate/rpc_param_server_tutorial.html
"""

from pathlib import Path

import torch
from download import MIRRORS, provide
from idx import read_idx
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from paramserver import Task
from paramserver.errors import TaskError

MEAN, STD = 0.1307, 0.3081  # of the training images, as fractions of white

# Fraction of cluster.timeout_s that a download may take: the other ranks wait that long for this rank.
DOWNLOAD_SHARE = 0.75


class Net(nn.Module):
    """The network of the tutorial; its second half is on the last of ``devices``."""

    def __init__(self, devices):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1).to(devices[0])
        self.conv2 = nn.Conv2d(32, 64, 3, 1).to(devices[0])
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)  # equal to the tutorial's Dropout2d on rows of numbers, which warns
        self.fc1 = nn.Linear(9216, 128).to(devices[-1])
        self.fc2 = nn.Linear(128, 10).to(devices[-1])

    def forward(self, x):
        x = F.relu(self.conv1(x.to(self.conv1.weight.device)))
        x = F.max_pool2d(self.conv2(x), 2)
        x = torch.flatten(self.dropout1(x), 1).to(self.fc1.weight.device)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class Digits(Dataset):
    """Pairs of a normalised float32 image of shape (1, 28, 28) and a label."""

    def __init__(self, images_file: Path, labels_file: Path) -> None:
        self.images = read_idx(images_file, 3)
        self.labels = read_idx(labels_file, 1)
        count, *size = self.images.shape
        if size != [28, 28]:
            raise TaskError(f"{images_file} must hold images of 28 x 28, not {size[0]} x {size[1]}; copy it again")
        if count != len(self.labels):
            raise TaskError(
                f"{images_file} ({count} images) must hold as many as {labels_file} ({len(self.labels)} "
                "labels); copy both from one place"
            )
        if self.labels.max(initial=0) > 9:
            raise TaskError(f"{labels_file} must hold labels from 0 to 9, and holds {self.labels.max()}; copy it again")

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        """Return several samples, which is much faster than one at a time. DataLoader uses the same method."""
        images = torch.from_numpy(self.images[indices]).unsqueeze(1).to(torch.float32)
        images.div_(255).sub_(MEAN).div_(STD)
        return list(zip(images, self.labels[indices].tolist(), strict=True))


class Mnist(Task):
    """Recognises digits.

    Args:
        folder: folder of the four files; ``~`` is the home folder.
        download: download missing files into it.
        mirrors: URLs of folders to download from, tried in this order.
        lr: learning rate.
    """

    def __init__(self, folder="data/mnist", download=True, mirrors=MIRRORS, lr=0.03):
        self.folder = Path(folder).expanduser()
        self.download = download
        self.mirrors = mirrors
        self.lr = lr

    def build_model(self):
        return Net(self.devices)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def train_source(self, partition):
        return self._digits("train")

    def validation_source(self, partition):
        return self._digits("t10k")

    def _digits(self, part):
        timeout_s = DOWNLOAD_SHARE * self.config.cluster.timeout_s
        files = provide(self.folder, download=self.download, mirrors=self.mirrors, timeout_s=timeout_s)
        return Digits(files[f"{part}-images-idx3-ubyte"], files[f"{part}-labels-idx1-ubyte"])

    def training_step(self, model, batch, batch_idx):
        images, labels = batch
        output = model(images)
        return F.nll_loss(output, labels.to(output.device))

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        images, labels = batch
        output = model(images)
        labels = labels.to(output.device)
        return {"loss": F.nll_loss(output, labels), "accuracy": (output.argmax(1) == labels).float().mean()}
