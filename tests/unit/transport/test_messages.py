"""The table of replies that a server owes."""

import time

import pytest
import torch

from paramserver.transport.messages import PendingReplies, merge_used


def test_parts_and_futures_are_kept_by_trainer():
    replies = PendingReplies()
    before = time.perf_counter()
    futures = {i: replies.add(i, f"part {i}") for i in (2, 0, 1)}
    after = time.perf_counter()
    parts, held, arrived = replies.pop_all()
    assert parts == {2: "part 2", 0: "part 0", 1: "part 1"}
    assert held == futures
    assert before <= arrived[2] <= arrived[0] <= arrived[1] <= after
    assert not any(future.done() for future in futures.values())


def test_popped_parts_do_not_change_when_others_are_added():
    replies = PendingReplies()
    replies.add(0, "first")
    parts, held, arrived = replies.pop_all()
    assert (replies.parts, replies.futures, replies.arrival_s) == ({}, {}, {})
    replies.add(0, "second")
    assert parts == {0: "first"}
    assert len(held) == len(arrived) == 1
    assert replies.pop_all()[0] == {0: "second"}


def test_an_empty_table_gives_nothing():
    assert PendingReplies().pop_all() == ({}, {}, {})


def test_each_future_gets_its_own_reply():
    replies = PendingReplies()
    futures = [replies.add(i, None) for i in range(3)]
    _, held, _ = replies.pop_all()
    for index, future in held.items():
        future.set_result(index * 10)
    assert torch.futures.wait_all(futures) == [0, 10, 20]


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ([None, None], None),
        ([(True, False), None], None),  # one trainer used them all
        ([(True, False, False), (False, False, True)], (True, False, True)),
        ([(False, False)], (False, False)),
        ([(), ()], ()),
    ],
)
def test_a_parameter_is_used_where_any_trainer_used_it(masks, expected):
    assert merge_used(masks) == expected
    assert merge_used(list(reversed(masks))) == expected


def test_masks_of_different_models_are_an_error():
    with pytest.raises(ValueError, match="argument"):
        merge_used([(True,), (True, False)])
