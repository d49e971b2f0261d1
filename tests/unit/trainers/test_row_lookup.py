"""Rows are looked up once in a step, and in one call to each server where their ids are in the batch."""

import pytest
import torch
from torch import nn

from paramserver.metrics.records import PhaseClock
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.sharding import plan_shards
from paramserver.parameters.tables import table_ranges
from paramserver.trainers.row_lookup import RowLookup

ROWS = {"users": 300, "films": 70, "words": 1000}


class Reply:
    def __init__(self, value):
        self.value = value

    def wait(self):
        return self.value


class Servers:
    """Have the values of all tables; the rows of each call are kept."""

    def __init__(self, shards, layout, values):
        self.ranges = {(own.server_index, own.flat_index): own for own in table_ranges(layout, shards)}
        self.values, self.calls = values, []

    def look_up(self, version, rows):
        self.calls.append((version, sorted(rows)))
        replies = {}
        for server_index, of_server in rows.items():
            found = {}
            for flat_index, own in of_server.items():
                place = self.ranges[server_index, flat_index]
                assert len(own)
                assert 0 <= int(own.min()) <= int(own.max()) < len(place.rows)
                found[flat_index] = self.values[place.slot][own + place.rows.start]
            replies[server_index] = Reply(found)
        return replies


class Trainer:
    def __init__(self, servers=2, lockstep=True):
        self.model = nn.ModuleDict({name: nn.Embedding(rows, 4, sparse=True) for name, rows in ROWS.items()})
        tables = dict(self.model.named_parameters())
        layout = FlatLayout.of(tables.items(), tables=tables)
        self.values = [parameter.detach().clone() for parameter in tables.values()]
        shards = plan_shards(layout, servers, True)
        self.servers = Servers(shards, layout, self.values)
        self.lookup = RowLookup(self.servers, layout, shards, list(tables.values()), lockstep, PhaseClock())

    def step(self, version, batch, use):
        """The calls of a step: when it begins, and in all."""
        self.servers.calls = []
        self.lookup.prefetch(version, [batch])
        self.lookup.wait()
        begun = list(self.servers.calls)
        for name, ids in use(batch):
            assert torch.equal(self.model[name](ids), self.values[list(ROWS).index(name)][ids])
        return begun, self.servers.calls


def batch_of(seed, size=8):
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.stack([torch.randint(0, rows, (size,), generator=generator) for rows in ROWS.values()], 1),
        "words": [torch.randint(0, ROWS["words"], (size, 3), generator=generator, dtype=torch.int32)],
        "target": torch.zeros(size),
    }


FORMS = {
    "columns": lambda b: [("users", b["ids"][:, 0]), ("films", b["ids"][:, 1]), ("words", b["words"][0])],
    "slices": lambda b: [
        ("users", b["ids"][:, 0:1]),
        ("films", b["ids"].select(1, 1)),
        ("words", b["words"][0][:, 1:]),
    ],
    "flat": lambda b: [("words", b["ids"].flatten()), ("words", b["words"][0].t())],
    "unbound": lambda b: list(zip(ROWS, b["ids"].unbind(1), strict=True)),
}


@pytest.mark.claim("tables")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("servers", [1, 2])
def test_rows_of_all_tables_are_requested_when_a_step_begins(servers, form):
    trainer = Trainer(servers)
    begun, calls = trainer.step(3, batch_of(0), FORMS[form])
    assert begun == []
    assert len(calls) > 1
    for version, size in ((4, 8), (5, 5)):  # the last batch of an epoch is smaller
        begun, calls = trainer.step(version, batch_of(version, size), FORMS[form])
        assert calls == begun
        assert [call[0] for call in calls] == [version]


def test_ids_that_are_computed_are_looked_up_when_they_are_used():
    trainer = Trainer()
    use = lambda b: [("users", b["ids"][:, 0]), ("words", (b["ids"][:, 1] * 7 + 1) % ROWS["words"])]  # noqa: E731
    trainer.step(0, batch_of(0), use)
    begun, calls = trainer.step(1, batch_of(1), use)
    assert len(begun) == 1
    assert len(calls) == 2
    # Each row once in a step: what is known is not requested again.
    batch = batch_of(2)
    _, calls = trainer.step(2, batch, lambda b: [("words", b["words"][0] + 0)] * 2 + [("words", b["words"][0][:2] + 0)])
    assert len(calls) - 1 == 1


def test_a_batch_of_another_form_and_an_id_without_a_row_are_no_error_before_they_are_used():
    trainer = Trainer()
    trainer.step(0, batch_of(0), FORMS["columns"])
    other = {"ids": torch.zeros(3, dtype=torch.int64), "words": [torch.tensor([[-1, 5000, 3]])]}
    begun, calls = trainer.step(1, other, lambda b: [("users", b["ids"])])
    assert begun == []
    assert len(calls) == 1
    assert trainer.step(2, {"none": None}, lambda b: []) == ([], [])


def test_a_use_without_ids_comes_before_others():
    trainer = Trainer()
    empty = torch.zeros(0, dtype=torch.int64)
    use = lambda b: [("users", empty), ("users", b["ids"][:, 0]), ("users", empty)]  # noqa: E731
    for version in range(2):
        trainer.step(version, batch_of(version), use)


def test_between_steps_the_newest_rows_are_looked_up():
    trainer = Trainer()
    trainer.step(4, batch_of(0), FORMS["columns"])
    trainer.lookup.prefetch(None)
    trainer.model["users"](torch.tensor([3]))
    assert trainer.servers.calls[-1][0] is None


def test_a_validation_keeps_what_was_learned_and_its_rows_are_those_of_its_version():
    trainer = Trainer()
    trainer.step(0, batch_of(0), FORMS["columns"])
    trainer.lookup.prefetch(1)
    trainer.lookup.wait()
    with torch.no_grad():
        trainer.model["users"](torch.tensor([3]))
    assert trainer.servers.calls[-1][0] == 1
    begun, calls = trainer.step(1, batch_of(1), FORMS["columns"])
    assert begun == calls
    assert len(calls) == 1


def test_without_lockstep_the_newest_rows_are_looked_up():
    trainer = Trainer(lockstep=False)
    _, calls = trainer.step(7, batch_of(0), FORMS["columns"])
    assert {version for version, _ in calls} == {None}
