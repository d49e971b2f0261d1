"""The loop of the aggregator: what is added while it runs is processed before it returns."""

import pytest
import torch

from paramserver.consistency import Announcement, Ledger, Readiness, Sync
from paramserver.consistency.base import RunTerms
from paramserver.context import StopRequest
from paramserver.distributed.rpc_calls import RemoteError
from paramserver.errors import RunEnded
from paramserver.limits import Limits
from paramserver.server.aggregator import Aggregator

READY = Announcement(Readiness.DRAINED)
WAITING = Announcement(Readiness.WAITING)


class Monitor:
    """The part of ``RunMonitor`` that the loop calls."""

    epoch = 0
    seconds = 0.0

    def stop_reason(self):
        return None


def make_aggregator():
    errors = []
    rules = Sync(RunTerms(1, Limits()))
    return Aggregator(rules, Ledger(), None, Monitor(), StopRequest(), errors.append), errors


def test_an_announcement_made_while_grants_are_handed_out_is_processed():
    aggregator, errors = make_aggregator()
    nested = []
    future = torch.futures.Future()
    future.add_done_callback(lambda _: nested.append(aggregator.announce(0, WAITING)))
    aggregator._enqueue(0, WAITING, future)
    aggregator._process()
    assert future.done()
    assert [one.done() for one in nested] == [True]
    assert errors == []


def test_tasks_run_one_after_the_other_and_nothing_else_meanwhile():
    aggregator, errors = make_aggregator()
    order, releases = [], []
    aggregator.run_exclusively(lambda release: (order.append("first"), releases.append(release)))
    aggregator.run_exclusively(lambda release: (order.append("second"), release()))
    waiting = aggregator.announce(0, READY)
    assert order == ["first"]
    assert not waiting.done()
    releases.pop()()
    assert order == ["first", "second"]
    assert waiting.done()
    assert errors == []


def test_a_task_that_fails_ends_the_run_and_leaves_the_loop_usable():
    aggregator, errors = make_aggregator()

    def fail(release):
        raise ValueError("no")

    aggregator.run_exclusively(fail)
    assert [str(error) for error in errors] == ["no"]
    aggregator._release()
    assert aggregator.announce(0, READY).done()


def test_an_announcement_that_is_sent_again_gets_the_same_grant_also_after_the_end():
    """Its reply was lost: the second message neither counts as another announcement nor finds that the run is over."""
    aggregator, errors = make_aggregator()
    first = aggregator.announce(0, READY, 1)
    assert first.done()
    assert aggregator.ended
    assert aggregator.announce(0, READY, 1) is first
    with pytest.raises(RunEnded):
        aggregator.announce(0, READY, 2)
    assert errors == []


def test_an_announcement_of_a_process_that_was_lost_is_not_the_reply_to_its_replacement():
    aggregator, _ = make_aggregator()
    held = []
    aggregator.run_exclusively(held.append)
    first = aggregator.announce(0, READY, 1)
    assert aggregator.announce(0, READY, 1) is first
    aggregator.remove(0)
    assert isinstance(first.value(), RemoteError)
    assert aggregator.announce(0, READY, 1) is not first
