"""Rows that ranks exchange in shared memory, and the agreement on them."""

import threading
import time

import pytest
import torch

from paramserver.consistency import Announcement, Readiness, Stop
from paramserver.errors import PeerLost
from paramserver.metrics.records import MEASURED, StepTotals, combine
from paramserver.trainers.ddp_control import _ROW, SharedRows, StepAgreement

READY = Announcement(Readiness.READY, 2)


def pair(check=lambda: None, timeout_s=20.0):
    memory = torch.zeros(2, 2, 1 + _ROW, dtype=torch.float64)
    return [SharedRows(memory, rank, check, timeout_s) for rank in (0, 1)]


def test_rows_are_read_in_the_order_of_ranks_turn_by_turn():
    ranks = pair()
    for turn in range(1, 6):
        for rank, rows in enumerate(ranks):
            rows.write([10.0 * turn + rank] * _ROW)
        for rows in ranks:
            assert [row[0] for row in rows.read()] == [10.0 * turn, 10.0 * turn + 1]


def test_a_row_of_an_earlier_turn_is_not_taken_for_a_new_one():
    first, second = pair(timeout_s=0.0)
    first.write([1.0] * _ROW)
    with pytest.raises(PeerLost, match=r"within 0 s \(cluster.timeout_s\)"):
        first.read()
    second.write([2.0] * _ROW)
    assert first.read()[1][0] == 2.0
    for _ in range(2):
        first.write([3.0] * _ROW)  # the place of the first turn again
    with pytest.raises(PeerLost):
        first.read()


def test_a_read_waits_for_a_rank_that_is_late():
    first, second = pair()
    first.write([1.0] * _ROW)
    writer = threading.Timer(0.05, second.write, ([2.0] * _ROW,))
    writer.start()
    assert first.read()[1] == [2.0] * _ROW
    writer.join()


def test_a_read_ends_when_a_rank_is_lost():
    def check():
        raise PeerLost("rank 1 is lost")

    first, _ = pair(check)
    first.write([1.0] * _ROW)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        first.read()
    assert time.monotonic() - began < 10.0


def test_all_ranks_agree_on_the_same_announcements_and_totals():
    agreements = [StepAgreement(None, 2, rank, rows) for rank, rows in enumerate(pair())]
    stop = Announcement(Readiness.WAITING, 0, Stop.SIGNAL, "SIGTERM")
    agreements[0].start(READY, StepTotals(1.0, 32), collect_records=True, before_collective=True)
    agreements[1].start(stop, StepTotals(3.0, 8), before_collective=True)
    assert all(agreement.started for agreement in agreements)
    agreed = [agreement.wait() for agreement in agreements]
    assert not any(agreement.started for agreement in agreements)
    for one in agreed:
        assert (one.announcements[0].readiness, one.announcements[0].batches) == (Readiness.READY, 2)
        assert (one.announcements[1].readiness, one.announcements[1].stop) == (Readiness.WAITING, Stop.SIGNAL)
        assert one.totals == StepTotals(2.0, 40)
        assert one.collect_records
    assert agreed[0].announcements[1].reason == "a signal to trainer 1"
    assert agreed[1].announcements[1].reason == "SIGTERM"


def test_every_quantity_of_a_step_is_combined_over_the_ranks():
    agreements = [StepAgreement(None, 2, rank, rows) for rank, rows in enumerate(pair())]
    own = [StepTotals(0.5, 8, **{one.name: 4.0 * rank + i for i, one in enumerate(MEASURED)}) for rank in (1, 2)]
    for agreement, totals in zip(agreements, own, strict=True):
        agreement.start(READY, totals, before_collective=True)
    expected = StepTotals(samples=16, **combine(own))
    assert [agreement.wait().totals for agreement in agreements] == [expected, expected]
    assert expected.drift == 6.0 + [one.name for one in MEASURED].index("drift")


def test_all_ranks_learn_whose_full_buffers_block_simulations():
    agreements = [StepAgreement(None, 2, rank, rows) for rank, rows in enumerate(pair())]
    agreements[0].start(Announcement(Readiness.WAITING), collect_records=True, before_collective=True)
    agreements[1].start(READY, before_collective=True, blocks=True)
    assert [agreement.wait().blocking for agreement in agreements] == [{1}, {1}]


def test_all_ranks_learn_how_many_samples_all_of_them_have_received():
    agreements = [StepAgreement(None, 2, rank, rows) for rank, rows in enumerate(pair())]
    for agreement, received in zip(agreements, (3, 40), strict=True):
        agreement.start(READY, before_collective=True, received=received)
    assert [agreement.wait().received for agreement in agreements] == [43, 43]


@pytest.mark.parametrize("kinds", [(7, 7), (7, 8), (0, 2**32 - 1)])
def test_all_ranks_learn_whether_their_module_buffers_differ(kinds):
    agreements = [StepAgreement(None, 2, rank, rows) for rank, rows in enumerate(pair())]
    for agreement, own in zip(agreements, kinds, strict=True):
        agreement.start(READY, before_collective=True, buffer_kinds=own)
    assert [agreement.wait().buffers_differ for agreement in agreements] == [kinds[0] != kinds[1]] * 2


def test_a_rank_without_data_has_no_share_in_the_totals():
    agreements = [StepAgreement(None, 2, rank, rows) for rank, rows in enumerate(pair())]
    agreements[0].start(READY, StepTotals(1.5, 32), before_collective=True)
    agreements[1].start(Announcement(Readiness.DRAINED), before_collective=True)
    assert [agreement.wait().totals for agreement in agreements] == [StepTotals(1.5, 32)] * 2
