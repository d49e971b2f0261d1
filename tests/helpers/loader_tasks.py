"""Data sets and tasks for worker processes, at the top of a module: workers import them."""

import os
import random
import signal
import stat
import threading
import time
from pathlib import Path

import numpy as np
import torch
from tasks import ReferenceTask
from torch.utils.data import Dataset, get_worker_info


class Noisy(Dataset):
    """Sample i: i, and a number of each default generator; an odd count of normal deviates leaves one cached."""

    def __init__(self, length=24):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        deviates = np.random.standard_normal(3)
        return {"index": index, "torch": torch.randn(3), "numpy": deviates, "random": random.gauss(0, 1)}


class NoisyGroups(Noisy):
    """Draws for a whole group at once: a sample's numbers depend on those before it."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class LateNoise(Noisy):
    """Draws for one index only."""

    def __getitem__(self, index):
        return super().__getitem__(index) if index == 17 else {"index": index}


class Fails(Dataset):
    """Raises at one index."""

    def __init__(self, bad, error=ValueError):
        self.bad, self.error = bad, error

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == self.bad:
            raise self.error(f"sample file {index} is damaged")
        return index


class Kills(Dataset):
    """Sends SIGKILL to its worker, or to the process that owns the workers, at one index."""

    def __init__(self, whom, at=10):
        self.whom, self.at = whom, at

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == self.at:
            os.kill(os.getpid() if self.whom == "worker" else os.getppid(), signal.SIGKILL)
        return index


class Sleeps(Dataset):
    """Takes ``seconds`` per sample; each worker writes its process id to a file of ``folder`` first."""

    def __init__(self, folder, seconds):
        self.folder, self.seconds = Path(folder), seconds

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        for pid in (os.getpid(), os.getppid()):
            (self.folder / str(pid)).touch()
        time.sleep(self.seconds)
        return index


class Unpicklable(Dataset):
    """Holds a function that pickle cannot find."""

    def __init__(self):
        self.transform = lambda sample: sample

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.transform(index)


class UnpicklableSamples(Fails):
    """Its samples cannot be sent."""

    def __getitem__(self, index):
        return threading.Lock()


class Descriptors(Dataset):
    """What the descriptors of the process that reads are: (device, inode) of sockets, pipes and files."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        found = []
        for descriptor in range(256):
            try:
                about = os.fstat(descriptor)
            except OSError:
                continue
            if not stat.S_ISCHR(about.st_mode):
                found.append((about.st_dev, about.st_ino))
        return repr(found)


class ReportsWorker(Dataset):
    """What ``get_worker_info`` shows, and what ``set_mark`` has set."""

    mark = None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        info = get_worker_info()
        return (info.id, info.num_workers, info.dataset is self, self.mark, torch.get_num_threads())


def set_mark(worker_id):
    get_worker_info().dataset.mark = worker_id + 100


def raise_in_worker(worker_id):
    raise LookupError(f"no file for worker {worker_id}")


class ReadingThread(Dataset):
    """Records which threads read it."""

    def __init__(self):
        self.threads = set()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.threads.add(threading.current_thread().name)
        return float(index)


class NoisyImages(Dataset):
    """Images with noise, as random augmentation makes it."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, label = self.images[index]
        return image + torch.randn(image.shape) + np.random.standard_normal() + random.gauss(0, 1), label


class Augmented(ReferenceTask):
    """Random augmentation in the data set and dropout in the model."""

    def train_source(self, partition):
        return NoisyImages(super().train_source(partition))


class DiesWhileWorkersRead(ReferenceTask):
    """The rank of the second trainer kills itself with SIGKILL at its third batch, once.

    Args:
        folder: each process that reads writes its process id and those above it there.
        mark: a file that is written just before.
    """

    def __init__(self, folder, mark, **options):
        super().__init__(**options)
        self.folder, self.mark = folder, Path(mark)

    def train_source(self, partition):
        return WritesPid(super().train_source(partition), self.folder)

    def on_batch_start(self, batch_idx):
        if batch_idx == 2 and self.trainer.trainer_index == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class WritesPid(Dataset):
    def __init__(self, images, folder):
        self.images, self.folder = images, Path(folder)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        for process in (os.getpid(), os.getppid()):
            (self.folder / str(process)).touch()
        return self.images[index]
