"""Snapshots of tables that are read while updates change rows."""

import random
import threading

import pytest
import torch

from paramserver.optim.row_steps import RowSnapshot


def change(tensors, rows):
    for tensor in tensors.values():
        tensor[rows] += 1 + torch.rand(())


@pytest.mark.parametrize("seed", range(30))
def test_every_order_of_updates_and_reads_gives_the_rows_as_they_were(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    count = rng.choice([1, 7, 500])
    tensors = {"weight": torch.randn(count, 3), "sum": torch.randn(count, 3), "version": torch.zeros(count)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    snapshot = RowSnapshot(tensors)
    read = {name: [] for name in tensors}
    names = list(tensors)
    rng.shuffle(names)
    while names:
        if rng.random() < 0.7:
            rows = torch.tensor(sorted(rng.sample(range(count), rng.randint(0, min(count, 40)))), dtype=torch.int64)
            snapshot.copy_before_update(rows)
            change(tensors, rows)
            continue
        # One tensor after the other mostly, as files are written, and sometimes in turns.
        name = names[0] if rng.random() < 0.8 else rng.choice(names)
        first = sum(map(len, read[name]))
        end = min(first + rng.randint(1, count), count)
        read[name].append(snapshot.read(name, first, end))
        if end == count:
            names.remove(name)
    for name, parts in read.items():
        assert torch.equal(torch.cat(parts), before[name]), name


def test_a_row_is_copied_once_and_not_after_it_was_read():
    table = torch.zeros(1000, 4)
    snapshot = RowSnapshot({"weight": table})

    def num_copied():
        return sum(len(rows) for rows, _ in snapshot._copies)

    snapshot.copy_before_update(torch.arange(0, 100))
    snapshot.copy_before_update(torch.arange(50, 150))
    assert num_copied() == 150
    snapshot.read("weight", 0, 500)
    snapshot.copy_before_update(torch.arange(400, 600))
    assert num_copied() == 100  # of the others, everything that was copied has been read
    snapshot.read("weight", 500, 1000)
    assert num_copied() == 0
    snapshot.copy_before_update(torch.arange(1000))
    assert num_copied() == 0


def test_copies_are_merged_and_those_of_rows_that_were_read_are_released():
    table = torch.zeros(1000, 4)
    snapshot = RowSnapshot({"weight": table, "sum": table.clone()})
    for first in range(0, 150):
        snapshot.copy_before_update(torch.tensor([first, 200 + first]))
    assert len(snapshot._copies) <= 8
    for name in ("weight", "sum"):
        snapshot.read(name, 0, 200)
        assert snapshot._copies
    for name in ("weight", "sum"):
        snapshot.read(name, 200, 400)
    assert not snapshot._copies


def test_rows_are_read_in_order():
    snapshot = RowSnapshot({"weight": torch.zeros(10, 1)})
    snapshot.read("weight", 0, 4)
    with pytest.raises(ValueError, match="from 4 must be read next, not from 0"):
        snapshot.read("weight", 0, 4)
    with pytest.raises(ValueError, match="from 4 must be read next, not from 8"):
        snapshot.read("weight", 8, 10)


def test_an_update_in_another_thread():
    """Each update adds 1 to some rows of both tensors; what is read is that of the start."""
    table, total = torch.zeros(200_000, 4), torch.zeros(200_000)
    snapshot = RowSnapshot({"weight": table, "sum": total})
    started, ended, updates = threading.Event(), threading.Event(), 0

    def update():
        nonlocal updates
        generator = torch.Generator().manual_seed(1)
        while not ended.is_set():
            rows = torch.unique(torch.randint(200_000, (1000,), generator=generator))
            snapshot.copy_before_update(rows)
            table[rows] += 1
            total[rows] += 1
            updates += 1
            started.set()

    thread = threading.Thread(target=update)
    thread.start()
    try:
        assert started.wait(30)
        sums = [
            float(snapshot.read(n, i, i + 500).abs().sum()) for n in ("weight", "sum") for i in range(0, 200_000, 500)
        ]
    finally:
        ended.set()
        thread.join(30)
    assert updates > 1
    assert sums == [0.0] * 800
    assert float(table.sum()) > 0
