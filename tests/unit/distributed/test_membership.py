"""The table of members and the heartbeat, without processes: the clock is set by hand."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from paramserver.distributed import membership
from paramserver.distributed.membership import Heartbeat, HeartbeatReport, Member, Members
from paramserver.errors import Evicted, PeerLost

LONG_S = 60.0


@pytest.fixture
def clock():
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    return Clock()


def member(index=0, worker_id=1):
    return Member(index, f"trainer{index}_{worker_id}", worker_id, f"node7, process {worker_id}")


def names(members):
    return [one.name for one in members]


# Joining.


def test_an_index_that_is_present_is_refused_with_the_name_of_its_holder():
    members = Members()
    members.join(member())
    with pytest.raises(PeerLost, match=r"^trainer 0 joined already: trainer 0 \(node7, process 1\); give each process"):
        members.join(member(worker_id=2))
    assert names(members.present()) == ["trainer0_1"]


@pytest.mark.parametrize("how", ["lost", "left"])
def test_another_process_joins_in_the_place_of_one_that_is_gone(how, clock):
    members = Members(clock)
    first, second = member(), member(worker_id=2)
    members.join(first)
    if how == "lost":
        assert members.lose(first)
    else:
        members.leave(0)
    assert members.present() == []
    clock.now += 1000.0
    members.join(second)
    assert members.present() == [second]
    assert members.get(0) is second
    assert members.missing(1) == []
    assert members.overdue(5.0) == []  # its time counts from its own start


def test_one_that_is_lost_is_missing_and_one_that_left_is_not():
    members = Members()
    for index in range(3):
        members.join(member(index, index + 1))
    members.lose(members.get(0))
    members.leave(1)
    assert members.missing(4) == [0, 3]
    assert names(members.present()) == ["trainer2_3"]


# Heartbeats.


def test_a_heartbeat_counts_for_the_process_that_sent_it(clock):
    members = Members(clock)
    first, second = member(), member(worker_id=5)
    members.join(first)
    members.lose(first)
    members.join(second)
    clock.now += 10.0
    assert not members.record_heartbeat(0, 1, HeartbeatReport())  # the process that was replaced: it is informed
    assert names(members.overdue(5.0)) == ["trainer0_5"]
    assert members.record_heartbeat(0, 5, HeartbeatReport())
    assert members.overdue(5.0) == []


def test_a_heartbeat_before_the_join_is_no_error(clock):
    members = Members(clock)
    assert members.record_heartbeat(0, 1, HeartbeatReport())
    members.join(member())
    clock.now += 10.0
    assert members.record_heartbeat(0, 2, HeartbeatReport())  # of a replacement that has not joined yet
    assert names(members.overdue(5.0)) == ["trainer0_1"]


def test_a_heartbeat_of_a_process_that_is_lost_informs_it():
    members = Members()
    one = member()
    members.join(one)
    members.lose(one)
    assert not members.record_heartbeat(0, 1, HeartbeatReport())


@pytest.mark.parametrize("how", ["lose", "leave"])
def test_who_takes_no_part_is_not_overdue(how, clock):
    members = Members(clock)
    one = member()
    members.join(one)
    clock.now += 10.0
    assert members.overdue(10.0) == []
    assert members.overdue(9.0) == [one]
    members.lose(one) if how == "lose" else members.leave(0)
    assert members.overdue(9.0) == []


# Losses.


def test_a_member_is_lost_only_once():
    members = Members()
    one = member()
    members.join(one)
    assert members.lose(one)
    assert not members.lose(one)


def test_one_that_left_is_not_lost():
    members = Members()
    one = member()
    members.join(one)
    members.leave(0)
    assert not members.lose(one)


def test_a_late_loss_of_a_process_that_was_replaced_does_not_concern_its_replacement():
    """Its liveness call ends when its frozen process is killed, which may be after the replacement has joined."""
    members = Members()
    first, second = member(), member(worker_id=2)
    members.join(first)
    members.leave(0)
    members.join(second)
    assert not members.lose(first)
    assert members.present() == [second]


def test_of_several_threads_that_notice_a_loss_one_acts_on_it():
    members = Members()
    one = member()
    members.join(one)
    start = threading.Barrier(8)

    def notice(_):
        start.wait(LONG_S)
        return members.lose(one)

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(notice, range(8))) == [False] * 7 + [True]


def test_the_end_waits_for_those_that_left_and_not_for_those_that_are_lost():
    members = Members()
    lost, left = member(), member(1, 2)
    members.join(lost)
    members.join(left)
    members.lose(lost)
    members.leave(1)
    assert not members.wait_for_disconnects(0.0)
    waiting = threading.Thread(target=lambda: members.mark_disconnected(left))
    waiting.start()
    assert members.wait_for_disconnects(LONG_S)
    waiting.join(LONG_S)


# The thread that sends heartbeats.


class Beats:
    """Counts heartbeats; raises ``error`` from beat ``good`` on."""

    def __init__(self, good, error=None):
        self.good, self.error = good, error
        self.sent = 0
        self.enough, self.lost = threading.Event(), threading.Event()
        self.reasons = []

    def send(self):
        self.sent += 1
        if self.sent >= self.good:
            self.enough.set()
            if self.error is not None:
                raise self.error

    def on_lost(self, error):
        self.reasons.append(error)
        self.lost.set()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("RPC ran for more than 5 s\nat tensorpipe"), "it did not answer (RPC ran for more than 5 s)"),
        (Evicted("trainer 0 takes no part any more"), "trainer 0 takes no part any more"),
    ],
)
def test_the_first_heartbeat_that_fails_is_the_last_and_its_reason_is_reported_once(error, reason):
    beats = Beats(3, error)
    heartbeat = Heartbeat(beats.send, 0.001, beats.on_lost)
    assert beats.lost.wait(LONG_S)
    heartbeat._thread.join(LONG_S)
    heartbeat.close()
    assert beats.sent == 3
    assert [str(one) for one in beats.reasons] == [reason]
    assert isinstance(beats.reasons[0], type(error) if isinstance(error, PeerLost) else PeerLost)


def test_a_heartbeat_that_fails_after_the_end_is_no_loss():
    beats, closing = Beats(1), threading.Event()

    def send():
        beats.enough.set()
        assert closing.wait(LONG_S)
        raise RuntimeError("the agent was shut down")

    heartbeat = Heartbeat(send, 0.001, beats.on_lost)
    assert beats.enough.wait(LONG_S)
    heartbeat._closed.set()  # as close() does first, while a heartbeat is under way
    closing.set()
    heartbeat.close()
    assert not heartbeat._thread.is_alive()
    assert beats.reasons == []


def test_closing_ends_a_heartbeat_that_waits_for_its_next_turn():
    beats = Beats(1)
    heartbeat = Heartbeat(beats.send, LONG_S, beats.on_lost)
    heartbeat.close()
    assert not heartbeat._thread.is_alive()
    assert beats.sent == 0


@pytest.mark.claim("memory-of-deaths")
def test_nothing_is_kept_of_processes_that_died(monkeypatch):
    """The calls by which they watched this process."""
    watches, gone, kept = {}, [], weakref.WeakSet()

    def call(name, handler, args, timeout):
        assert (handler, args, timeout) == (membership.liveness_call, ("server",), 0)
        watches[name] = torch.futures.Future()
        return watches[name]

    monkeypatch.setattr(membership, "_liveness_calls", {})
    monkeypatch.setattr(membership.rpc, "rpc_async", call)
    monkeypatch.setattr(membership.rpc, "get_worker_info", lambda: SimpleNamespace(name="server"))
    for number in range(301):
        name = f"trainer0_{number}"
        kept.add(membership.liveness_call(name))
        membership.watch_peer(name, gone.append)
        if number < 300:
            watches.pop(name).set_exception(RuntimeError("eof"))
    gc.collect()
    assert len(gone) == 300
    assert list(membership._liveness_calls) == ["trainer0_300"]
    assert len(kept) == 1
    (answered,) = membership._liveness_calls["trainer0_300"]
    membership.release_liveness_calls()
    assert answered.done()
    assert membership._liveness_calls == {}
