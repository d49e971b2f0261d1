"""The ledger: no push is applied twice, skipped, or taken from a process that was replaced."""

import itertools

import pytest
import torch

from paramserver.consistency import Ledger, PushId, PushState
from paramserver.consistency.ledger import LedgerRow


def push(sequence=1, incarnation=1, generation=1, trainer=0):
    return PushId(trainer, generation, incarnation, sequence)


def ledger_after(decided=0, pending=False, incarnation=1, **about):
    """A ledger in which trainer 0 has had that many pushes decided, and perhaps has one more that is pending."""
    ledger = Ledger(**about)
    for _ in range(incarnation):
        ledger.admit(0)
    for sequence in range(1, decided + 1 + pending):
        one = push(sequence, incarnation, ledger.generation)
        ledger.accept(one, sequence - 1, 2, [2 * sequence - 2, 2 * sequence - 1])
        if sequence <= decided:
            ledger.decide(one)
    return ledger


# What is known about a push.


@pytest.mark.parametrize("decided", [0, 1, 5])
def test_only_the_next_push_is_new(decided):
    ledger = ledger_after(decided)
    states = {sequence: ledger.state_of(push(sequence)) for sequence in range(decided + 4)}
    assert states.pop(decided + 1) is PushState.NEW
    assert states.pop(decided) is PushState.DECIDED
    assert set(states.values()) == {PushState.GAP}


@pytest.mark.parametrize("decided", [0, 1, 5])
def test_a_push_that_is_accepted_is_pending_until_it_is_decided(decided):
    ledger = ledger_after(decided, pending=True)
    assert ledger.state_of(push(decided + 1)) is PushState.PENDING
    assert ledger.state_of(push(decided)) is PushState.DECIDED
    assert ledger.state_of(push(decided + 2)) is PushState.GAP
    ledger.decide(push(decided + 1))
    assert ledger.state_of(push(decided + 1)) is PushState.DECIDED
    assert ledger.state_of(push(decided + 2)) is PushState.NEW


@pytest.mark.parametrize(("decided", "pending"), [*itertools.product([0, 1, 5], [False, True])])
def test_no_push_of_an_earlier_process_is_taken_whatever_its_number(decided, pending):
    ledger = ledger_after(decided, pending)
    assert ledger.admit(0) == 2
    assert {ledger.state_of(push(sequence, incarnation=1)) for sequence in range(9)} == {PushState.EVICTED}
    assert ledger.state_of(push(1, incarnation=2)) is PushState.NEW  # the pushes of each process count from 1
    assert ledger.state_of(push(1, incarnation=3)) is PushState.EVICTED


def test_no_push_of_another_view_is_taken():
    ledger = ledger_after(decided=2, generation=3)
    assert ledger.state_of(push(3, generation=3)) is PushState.NEW
    assert {ledger.state_of(push(3, generation=number)) for number in (1, 2, 4)} == {PushState.EVICTED}


def test_no_push_is_taken_of_a_trainer_that_has_not_joined():
    assert ledger_after().state_of(push(trainer=1)) is PushState.EVICTED


def test_what_is_known_does_not_change_by_asking():
    ledger = ledger_after(decided=3, pending=True)
    before = repr(ledger.state_dict())
    for sequence, incarnation, generation, trainer in itertools.product(range(6), (1, 2), (1, 2), (0, 1)):
        ledger.state_of(push(sequence, incarnation, generation, trainer))
    assert repr(ledger.state_dict()) == before


# What is recorded.


@pytest.mark.parametrize("refused", [push(2), push(4), push(5), push(4, 2), push(4, 1, 2), push(1, trainer=1)])
def test_only_a_new_push_can_be_accepted(refused):
    ledger = ledger_after(decided=2, pending=True)
    before = repr(ledger.state_dict())
    with pytest.raises(AssertionError):
        ledger.accept(refused, 2, 2, [4, 5])
    assert repr(ledger.state_dict()) == before


def test_samples_count_from_acceptance_on_also_after_the_process_was_replaced():
    """An accepted push is applied or dropped although its trainer has died, so its samples must not be served again."""
    ledger = ledger_after(decided=1, pending=True)
    ledger.admit(0)
    row = ledger[0]
    assert (row.pushes, row.samples, row.version) == (2, 4, 1)
    assert (row.positions.low, row.positions.above) == (4, {})


def test_the_decision_about_a_push_of_an_earlier_process_does_not_decide_one_of_its_replacement():
    ledger = ledger_after(pending=True)
    ledger.admit(0)
    ledger.accept(push(1, incarnation=2), 0, 1, [2])
    ledger.decide(push(1, incarnation=1))
    assert ledger.state_of(push(1, incarnation=2)) is PushState.PENDING
    ledger.decide(push(1, incarnation=2))
    assert ledger.state_of(push(1, incarnation=2)) is PushState.DECIDED


def test_a_sample_that_is_applied_more_often_than_is_due_is_an_error():
    ledger = ledger_after(decided=1)
    with pytest.raises(ValueError, match=r"position \(1\) must be applied at most 1 times"):
        ledger.accept(push(2), 1, 1, [1])
    repeating = ledger_after(decided=1, times_due=None)
    repeating.accept(push(2), 1, 1, [1])
    assert repeating[0].positions.count == 3


def test_trainers_do_not_affect_each_other():
    ledger = ledger_after(decided=3, pending=True)
    assert ledger.admit(1) == 1
    ledger.accept(push(1, trainer=1), 3, 1, [0])
    ledger.decide(push(1, trainer=1))
    assert ledger.state_of(push(2, trainer=1)) is PushState.NEW
    assert ledger.state_of(push(4)) is PushState.PENDING


# In a checkpoint.


@pytest.mark.parametrize(("decided", "incarnation"), [*itertools.product([0, 4], [1, 3])])
def test_a_state_that_is_restored_continues_except_for_what_trainers_report(decided, incarnation):
    ledger = ledger_after(decided, incarnation=incarnation)
    state = ledger.state_dict()
    restored = Ledger(generation=2)
    restored.load_state_dict(state)
    assert restored[0] == LedgerRow(incarnation, pushes=decided, samples=2 * decided)
    assert restored.state_of(push(decided + 1, incarnation)) is PushState.EVICTED  # sent to the server before
    assert restored.admit(0) == incarnation + 1
    assert restored.state_of(push(1, incarnation + 1, generation=2)) is PushState.NEW


def test_what_trainers_that_no_longer_exist_pushed_is_counted_once():
    ledger = Ledger()
    for index in range(5):
        accepted = PushId(index, 1, ledger.admit(index), 1)
        ledger.accept(accepted, version=0, samples=10**index, positions=[0], inner_steps=10**index)
    for num_trainers, samples in ((2, [10101, 1010]), (5, [1, 10, 100, 1000, 10000]), (7, [1, 10, 100, 1000, 10000])):
        fewer = Ledger(generation=2)
        fewer.load_state_dict(ledger.state_dict(), num_trainers)
        rows = [row for _, row in sorted(fewer.rows.items())]
        assert [row.samples for row in rows] == samples
        assert sum(row.pushes for row in rows) == 5
        assert [row.inner_steps for row in rows] == samples
        last = Ledger(generation=3)
        last.load_state_dict(fewer.state_dict(), 1)
        assert (last[0].pushes, last[0].samples, last[0].inner_steps) == (5, 11111, 11111)


def test_what_an_earlier_version_stored_apart_counts():
    row = {"incarnation": 2, "pushes": 4, "further_pushes": 1, "moved_pushes": 2, "samples": 12}
    ledger = Ledger(generation=2)
    ledger.load_state_dict({"rows": {"0": {**row, "inner_steps": 8, "moved_inner_steps": 4}}})
    assert ledger[0] == LedgerRow(2, pushes=6, samples=12, inner_steps=12)


def test_a_state_is_numbers_tensors_and_dictionaries_with_text_as_keys():
    def check(value):
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
        assert isinstance(value, (dict, torch.Tensor, int))
        for part in value.values() if isinstance(value, dict) else ():
            check(part)

    ledger = ledger_after(decided=3)
    ledger.accept(push(4), 3, 2, [9, 7], [(3, 1)])
    check(ledger.state_dict())


def test_a_state_does_not_change_with_the_ledger():
    ledger = ledger_after(decided=1)
    state = ledger.state_dict()
    before = repr(state)
    ledger.accept(push(2), 1, 1, [5], [(0, 0)])
    ledger.admit(0)
    assert repr(state) == before
