"""The figures of embedding tables in summary.json, from what the trainers counted."""

from itertools import pairwise

import numpy as np
import pytest

from paramserver.metrics.records import TABLE_RANGES, DurationHistogram, TableUse, TrainerTotals
from paramserver.metrics.summary import totals_of


def total(uses, steps=10):
    counted = DurationHistogram()
    for _ in range(steps):
        counted.add(0.001)
    return totals_of([TrainerTotals(i, steps=counted, tables={"users": use}) for i, use in enumerate(uses)])["tables"]


@pytest.mark.parametrize("rows", [1, 5, 64, 1000, 12_345])
@pytest.mark.parametrize("servers", [1, 3])
def test_each_row_is_counted_in_one_range_and_for_one_server(rows, servers):
    ends = [rows * (n + 1) // servers for n in range(servers)]
    generator = np.random.default_rng(rows)
    use, counts = TableUse(rows, 8, ends), np.zeros(rows, int)
    for _ in range(20):
        used = np.unique(generator.integers(0, rows, 40))
        counts[used] += 1
        use.add(40, used)
    assert (use.ids, use.used_rows) == (800, counts.sum())
    edges = [rows * n // TABLE_RANGES for n in range(TABLE_RANGES + 1)]
    assert use.by_range == [counts[a:b].sum() for a, b in pairwise(edges)]
    assert use.by_server == [counts[a:b].sum() for a, b in pairwise([0, *ends])]


def test_the_busiest_rows_of_all_trainers():
    uses = [TableUse(6400, 16, [3200, 6400]) for _ in range(2)]
    uses[0].add(3, np.array([0, 250, 260]))
    uses[1].add(6, np.array([201, 299, 6399]))
    figures = total(uses)["users"]
    assert figures["busiest_rows"] == [200, 300]
    assert figures["busiest_share"] == pytest.approx(4 / 6, abs=1e-4)
    assert figures["server_shares"] == [pytest.approx(5 / 6, abs=1e-4), pytest.approx(1 / 6, abs=1e-4)]
    assert figures["bytes_of_all_rows"] == 102_400


def test_a_table_that_was_never_used_has_no_busiest_rows():
    assert "busiest_rows" not in total([TableUse(10, 8, [10])])["users"]
