"""Data sets of tensors are read as rows, with the samples that they give one by one."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from paramserver.buffers import Fifo
from paramserver.sources import DatasetSource, Feeder, Partition
from paramserver.sources.reader import SampleReader, TensorRows

DATA = TensorDataset(torch.randn(6, 2, 3), torch.arange(6, dtype=torch.int16))
OTHER = TensorDataset(torch.randn(4, 2, 3), torch.arange(10, 14, dtype=torch.int16))


class Counting(TensorDataset):
    """Has code of its own in a read."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


class CountingSubset(Subset):
    def __getitems__(self, indices):
        return [(index,) for index in indices]


@pytest.mark.parametrize(
    "data",
    [
        DATA,
        Subset(DATA, [3, 0, -1, 3]),
        Subset(DATA, range(1, 6, 2)),
        Subset(Subset(DATA, torch.tensor([5, 4, 2, 0])), [2, 1]),
        ConcatDataset([DATA, Subset(DATA, [1]), DATA]),
        ConcatDataset([DATA, Subset(OTHER, [2, 0]), DATA]),
        Subset(ConcatDataset([OTHER, ConcatDataset([DATA, OTHER])]), [11, 3, 0, 9, 4]),
        TensorDataset(torch.randn(4, 6, dtype=torch.bfloat16).T, torch.ones(1, 3).expand(6, 3)),
        TensorDataset(torch.empty(5, 0), torch.ones(5, dtype=torch.bool)),
    ],
)
def test_rows_are_the_samples_of_the_data_set(data):
    rows = TensorRows.of(data)
    indices = [*range(len(data)), *reversed(range(len(data))), 0]
    taken = list(rows.take(indices))
    assert len(taken) == len(indices)
    for sample, index in zip(taken, indices, strict=True):
        assert type(sample) is tuple
        for one, other in zip(sample, data[index], strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "data",
    [
        Counting(torch.ones(3)),
        Subset(Counting(torch.ones(3)), [0]),
        CountingSubset(DATA, [0, 1]),
        ConcatDataset([DATA, Counting(torch.ones(3))]),
        ConcatDataset([DATA, TensorDataset(torch.ones(3, 2))]),
        Subset(DATA, [0, 6]),
        Subset(DATA, [True, False]),
        TensorDataset(torch.ones(3, requires_grad=True)),
        TensorDataset(torch.ones(3).to_sparse()),
        TensorDataset(torch.complex(torch.ones(3), torch.ones(3)).conj()),
        [1.0, 2.0],
    ],
)
def test_other_data_sets_are_read_by_their_own_methods(data):
    assert TensorRows.of(data) is None


def values_of(reader, epoch):
    samples, error = reader.read(epoch, [2, 1])
    assert error is None
    return [value.item() for (value,) in samples]


@pytest.mark.parametrize("of", [list, torch.tensor, np.array])
def test_tensors_and_indices_that_a_program_replaces_are_read(of):
    data = TensorDataset(torch.zeros(9))
    part = Subset(data, of([0, 1, 2]))
    reader = SampleReader(ConcatDataset([part]), seed=0)
    assert values_of(reader, 0) == [0.0, 0.0]
    data.tensors = (torch.arange(9.0),)
    assert values_of(reader, 0) == [2.0, 1.0]
    part.indices = of([3, 4, 5])
    assert values_of(reader, 0) == [5.0, 4.0]
    part.indices[1] = 6  # in place: from the next pass on
    assert values_of(reader, 1) == [5.0, 6.0]
    part.dataset = TensorDataset(-torch.arange(9.0))
    assert values_of(reader, 1) == [-5.0, -6.0]
    part.dataset = [(torch.tensor(7.0),)] * 9
    assert values_of(reader, 1) == [7.0, 7.0]


def test_a_sample_is_a_copy():
    data = TensorDataset(torch.zeros(3, 2))
    samples = list(TensorRows.of(data).take([1]))
    data.tensors[0].fill_(7.0)
    assert samples[0][0].tolist() == [0.0, 0.0]


class Plain(Dataset):
    """The same samples, without tensors to gather from."""

    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        return DATA[index]


@pytest.mark.parametrize("groups_ahead", [1, 3])
@pytest.mark.parametrize("position", [0, 5])
def test_a_buffer_is_filled_as_from_any_other_data_set(position, groups_ahead):
    """Also where several groups are read at once, and the buffer has no room for all of them."""
    batches = []
    for data in (DATA, Plain()):
        buffer = Fifo(8)
        if position:
            buffer.skip(position)
        source = DatasetSource(data, Partition(0, 1), seed=4, passes=3, group=4, groups_ahead=groups_ahead)
        assert source.group == (4 * groups_ahead if data is DATA else 4)
        feeder = Feeder(source, buffer, trainer_index=0)
        taken = []
        while not buffer.exhausted:
            assert feeder.read(3, timeout_s=20.0)
            taken.append(buffer.get_batch(3, timeout=0))
        batches.append([(batch.keys, batch.positions.tolist(), repr(batch.stacked)) for batch in taken])
        feeder.close()
    assert batches[0] == batches[1]
    assert sum(len(keys) for keys, _, _ in batches[0]) == 18 - position


def test_large_rows_are_not_read_ahead():
    data = TensorDataset(torch.empty(4, 1 << 18), torch.arange(4))
    assert DatasetSource(data, Partition(0, 1), seed=0, group=2, groups_ahead=8).group == 2


def test_an_index_outside_of_the_data_is_an_error_of_the_data_set():
    source = DatasetSource(Subset(DATA, [0, 6]), Partition(0, 1), seed=0, passes=1)
    with pytest.raises(IndexError, match=r"index 6 is out of bounds"):
        next(source.samples(0))
