"""The loop of the aggregator: what is added while it runs is processed before it returns."""

import torch

from paramserver.consistency import Announcement, Readiness, Sync
from paramserver.consistency.base import RunTerms
from paramserver.context import StopRequest
from paramserver.limits import Limits
from paramserver.server.aggregator import Aggregator

READY = Announcement(Readiness.DRAINED)


class Monitor:
    """The part of ``RunMonitor`` that the loop calls."""

    epoch = 0
    seconds = 0.0

    def stop_reason(self):
        return None


def make_aggregator():
    errors = []
    rules = Sync(RunTerms(1, Limits()))
    return Aggregator(rules, None, Monitor(), StopRequest(), errors.append), errors


def test_an_announcement_made_while_grants_are_handed_out_is_processed():
    aggregator, errors = make_aggregator()
    nested = []
    future = torch.futures.Future()
    future.add_done_callback(lambda _: nested.append(aggregator.announce(0, READY)))
    aggregator._enqueue(0, READY, future)
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
