"""Tasks whose data comes from a DataLoader, or in the order of a sampler."""

import numpy as np
import torch
from tasks import ReferenceTask
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    default_collate,
)


class Noisy(Dataset):
    """Adds noise to each image, drawn from torch's default generator."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        return image + 0.1 * torch.randn_like(image), label


class Streamed(IterableDataset):
    """Every ``count``-th sample from ``index`` on."""

    def __init__(self, data, index, count):
        self.data, self.index, self.count = data, index, count

    def __iter__(self):
        return (self.data[i] for i in range(self.index, len(self.data), self.count))


class Keeps(Sampler):
    """Its own numpy generator continues from pass to pass."""

    def __init__(self, length, seed=5):
        self.length, self.random = length, np.random.default_rng(seed)

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.random.permutation(self.length))


class Curriculum(RandomSampler):
    """Its own generator continues from pass to pass, and ``set_epoch`` notes the pass."""

    def set_epoch(self, epoch):
        self.epoch = epoch


class Buckets(Sampler):
    """Batches of neighbours, of two sizes, in an order that ``set_epoch`` decides."""

    def __init__(self, length, size=8):
        self.length, self.size, self.epoch = length, size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        half = self.length // 2
        batches = [list(range(i, min(i + self.size, half))) for i in range(0, half, self.size)]
        batches += [list(range(i, min(i + 4, self.length))) for i in range(half, self.length, 4)]
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return (batches[i] for i in order)


def brighter(samples):
    images, labels = default_collate(samples)
    return 1.5 * images, labels


class Loaded(ReferenceTask):
    """``kind`` is the DataLoader, ``as_method`` gives the sampler by ``Task.sampler`` instead."""

    def __init__(self, kind, workers=0, as_method=False, **options):
        super().__init__(**{"validation": 0, **options})
        self.kind, self.workers, self.as_method = kind, workers, as_method

    def order(self, partition):
        n = self.samples
        return {
            "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, n + 1), n),
            "generator": lambda: WeightedRandomSampler(torch.ones(n), n, generator=torch.Generator().manual_seed(7)),
            "keeps": lambda: Keeps(n),
            "distributed": lambda: DistributedSampler(range(n), partition.count, partition.index, seed=3),
            "buckets": lambda: Buckets(n),
            "batches": lambda: BatchSampler(RandomSampler(range(n)), 8, drop_last=False),
            "unequal": lambda: list(range(partition.index, n)) + list(range(partition.index)),
        }[self.kind]()

    def train_source(self, partition):
        data = Noisy(self._data(self.samples, 1))
        common = {"num_workers": self.workers, "collate_fn": brighter}
        if self.kind == "iterable":
            return DataLoader(Streamed(self._data(self.samples, 1), partition.index, partition.count), 8, **common)
        if self.kind in ("shuffled", "plain"):
            return DataLoader(data, 8, shuffle=self.kind == "shuffled", drop_last=True, **common)
        if self.as_method:
            return data
        name = "batch_sampler" if self.kind in ("buckets", "batches") else "sampler"
        size = {} if name == "batch_sampler" else {"batch_size": 8}
        return DataLoader(data, **{name: self.order(partition)}, **size, **common)

    def sampler(self, partition):
        return self.order(partition) if self.as_method else None

    def process_sample(self, sample):
        return (1.5 * sample[0], sample[1]) if self.as_method else sample

    def validation_source(self, partition):
        data = self._data(self.validation, 2) if self.validation else None
        return data and DataLoader(data, 5, shuffle=True, collate_fn=brighter)
