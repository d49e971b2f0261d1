"""Models built where no rows of their tables are owned: little memory, and everything else as elsewhere."""

from pathlib import Path

import pytest
import torch
from torch import nn

from paramserver.parameters import remote_tables
from paramserver.parameters.remote_tables import adagrad_without_memory, tables_without_memory
from paramserver.parameters.tables import LARGE_BYTES

ROWS = LARGE_BYTES // 4 // 7 + 1


def build(kind=nn.Embedding):
    """A model whose other layers depend on how many random numbers its tables take."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(3, 3), "table": kind(ROWS, 7, sparse=True, padding_idx=2)})
    nn.init.trunc_normal_(model["table"].weight, std=0.1)
    model["table"].weight.data.mul_(0.5)
    with torch.no_grad():
        model["table"].weight[3].zero_()
    model["second"] = nn.Linear(3, 3)
    return model


def bytes_of_tables():
    """Memory of this process that tables without memory take."""
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags")
    lines = [line for mapping in mappings if "memfd:table" in mapping for line in mapping.splitlines()]
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_large_table_takes_no_memory_and_the_same_random_numbers(kind):
    expected, drawn = build(kind), torch.get_rng_state()
    with tables_without_memory() as allocate_untrained:
        model = build(kind)
        allocate_untrained(model)
    assert 0 < bytes_of_tables() < LARGE_BYTES / 6
    assert torch.equal(torch.get_rng_state(), drawn)
    table = model["table"]
    assert (table.weight.shape, table.sparse, table.padding_idx) == ((ROWS, 7), True, 2)
    assert table.weight.requires_grad
    for name in ("first", "second"):
        assert torch.equal(model[name].weight, expected[name].weight)
    del model, table
    assert bytes_of_tables() == 0
    assert nn.Embedding(3, 2, sparse=True).weight.shape == (3, 2)


def test_a_frozen_table_and_what_is_no_large_table_have_memory_of_their_own():
    with tables_without_memory() as allocate_untrained:
        given = torch.zeros(ROWS, 7)
        layers = {
            "frozen": nn.Embedding(ROWS, 7, sparse=True).requires_grad_(False),
            "dense": nn.Embedding(ROWS, 7),
            "given": nn.Embedding.from_pretrained(given, sparse=True),
            "small": nn.Embedding(10, 7, sparse=True),
        }
        model = nn.ModuleDict(layers)
        allocate_untrained(model)
    for name, module in layers.items():
        with torch.no_grad():
            module.weight[0], module.weight[-1] = 1.0, 2.0
        assert module.weight[0].tolist() == [1.0] * 7, name
        assert int((module.weight == 1.0).sum()) == 7, name
    assert bytes_of_tables() == 0


class DerivedAdagrad(torch.optim.Adagrad):
    """It may keep its state where the checkpoint is loaded into it."""


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, DerivedAdagrad])
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_only_the_state_of_adagrad_itself_takes_no_memory_and_has_its_value_in_each_row(kind, value):
    large, small = nn.Parameter(torch.zeros(ROWS, 7)), nn.Parameter(torch.zeros(10, 7))
    with adagrad_without_memory([large, small]):
        optimizer = kind([large, small], initial_accumulator_value=value)
    own = optimizer.state[large]["sum"]
    assert torch.equal(own, torch.full((ROWS, 7), value))
    own[0] = 3.0  # in other rows too, where it takes no memory
    assert bool((own[1:] == 3.0).any()) == (kind is torch.optim.Adagrad)
    assert torch.equal(optimizer.state[small]["sum"], torch.full((10, 7), value))
    assert torch.equal(torch.optim.Adagrad([large]).state[large]["sum"], torch.zeros(ROWS, 7))


def test_where_memory_cannot_be_repeated_the_state_takes_its_own(monkeypatch):
    monkeypatch.setattr(remote_tables, "_CAN_REPEAT", False)
    table = nn.Parameter(torch.zeros(ROWS, 7))
    with adagrad_without_memory([table]):
        own = torch.optim.Adagrad([table]).state[table]["sum"]
    own[0] = 3.0
    assert float(own.sum()) == 21.0
