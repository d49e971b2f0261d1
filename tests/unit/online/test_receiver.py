"""The receiver of a trainer, with real sockets: what it accepts, replies and counts, and how it ends."""

import logging
import shutil
import threading
import time
from contextlib import ExitStack, suppress

import numpy as np
import pytest
import zmq
from online_fixtures import (
    PATIENCE_S,
    SHAPE,
    TOKEN,
    FakeCoordinator,
    field,
    ingest_spec,
    open_message,
    receiver_spec,
    sample_message,
    senders,
)

from paramserver.distributed.timeouts import poll_until
from paramserver.errors import SourceError, UnsupportedConfiguration
from paramserver.online.protocol import Header, MessageKind, TrainerJoined
from paramserver.online.received_log import ReceivedLog
from paramserver.online.receiver import GROUP, FieldStatistics, RunningMoments, SampleReceiver
from paramserver.online.security import ServerSecurity, make_keys, secure_client_socket
from paramserver.online.spec import ReceiverSpec


class RunningReceiver:
    """A receiver that runs, and its coordinator, for ``with``."""

    def __init__(self, coordinator=None, received_log=None, **keys):
        self.coordinator = coordinator or FakeCoordinator()
        self.received_log = received_log or ReceivedLog()
        self.keys = keys

    def __enter__(self):
        self.coordinator.__enter__()
        self.receiver = SampleReceiver(receiver_spec(self.coordinator, **self.keys), self.received_log)
        self.receiver.start()
        return self

    def __exit__(self, *exception):
        try:
            self.receiver.close()
        finally:
            self.coordinator.__exit__()

    def take(self, count):
        """As many, whatever the groups."""
        taken = []
        while len(taken) < count:
            group = self.receiver.get(PATIENCE_S)
            assert group, f"{len(taken)} of {count} samples came"
            taken += group
        return taken

    def put(self, count):
        """Take as many, as if the buffer had got them."""
        taken = self.take(count)
        self.receiver.mark_stored(len(taken))
        return [one.key for one in taken]


@pytest.fixture
def clients():
    with senders() as new:
        yield new


def test_samples_arrive_and_are_acknowledged_when_they_are_stored(clients):
    with RunningReceiver() as running:
        sender = clients(running.coordinator.trainer()).open(2)
        for step in range(5):
            sender.sample(2, step)
        taken = running.take(5)
        assert [one.key for one in taken] == [(2, step) for step in range(5)]
        assert all(np.array_equal(one.sample["u"], field(*one.key)) for one in taken)
        # Nothing was taken yet: a sign of life is answered, and gives no room.
        sender.heartbeat(2).receive()
        assert sender.received == [(MessageKind.ACK, "")]
        assert sender.acked == 0
        running.receiver.mark_stored(3)
        sender.receive_acks(3)
        running.receiver.mark_stored(2)
        sender.receive_acks(5)
        assert running.receiver.counters()["received"] == 5
        assert running.receiver.counters()["bytes"] == 5 * 4 * SHAPE[0] * SHAPE[1]


def test_reports_hold_what_has_changed(clients):
    before = ReceivedLog()
    before.reshard([{"inherited": [], "log": [[7, 0], [7, 1]]}], [2], [(7, 1)], [(7, 1)])
    before.extend([(8, 0)])
    with RunningReceiver(received_log=before, index=1, trainers=3, timeout_s=0.4) as running:
        coordinator = running.coordinator
        sender = clients(coordinator.trainer(1)).open(2).sample(2, 0).sample(2, 1)
        assert coordinator.tokens == [TOKEN]
        assert (coordinator.joined[1].received, coordinator.joined[1].inherited) == ({7: 1, 8: 1}, {7: 1})
        sender.sample(7, 0)
        coordinator.wait(
            lambda: coordinator.reports and coordinator.reports[-1].pending == (2,)
        )  # for room; of 7 nothing is new
        running.put(2)
        coordinator.wait(lambda: coordinator.counts.get((1, 2)) == 2 and (2, 0) in coordinator.active)
        assert coordinator.reports[-1].counters["received"] == 4
        many = len(coordinator.reports)
        coordinator.wait(lambda: len(coordinator.reports) > many + 3)  # without being asked
        assert (coordinator.reports[-1].received, coordinator.reports[-1].pending) == (
            {},
            (),
        )  # what has not changed is left out
        coordinator.active.clear()
        sender.heartbeat(2)
        coordinator.wait(lambda: (2, 0) in coordinator.active)


def test_what_completes_a_simulation_is_reported_at_once(clients, monkeypatch):
    """Also while other simulations run: the coordinator need not wait for the next report."""
    monkeypatch.setattr("paramserver.online.receiver._REPORT_INTERVAL_S", 1000.0)
    with RunningReceiver(steps=6, trainers=2, timeout_s=10_000.0) as running:
        coordinator = running.coordinator
        coordinator.wait(lambda: len(coordinator.reports) == 1)
        sender = clients(coordinator.trainer()).open(0)
        for step in (0, 2, 4):
            sender.sample(0, step)
        sender.open(2).sample(2, 0).sample(2, 2)
        running.take(5)
        running.receiver.mark_stored(2)
        sender.receive_acks(2)
        assert len(coordinator.reports) == 1
        running.receiver.mark_stored(1)
        coordinator.wait(lambda: coordinator.counts.get((0, 0)) == 3)
        # And what is the last for now.
        running.receiver.mark_stored(2)
        coordinator.wait(lambda: coordinator.counts.get((0, 2)) == 2)


def test_the_end_is_reported_at_once(monkeypatch):
    monkeypatch.setattr("paramserver.online.receiver._REPORT_INTERVAL_S", 1000.0)
    with RunningReceiver(timeout_s=10_000.0) as running:
        running.coordinator.wait(lambda: len(running.coordinator.reports) == 1)
        running.coordinator.finish()
        assert running.receiver.get(PATIENCE_S) is None
        running.coordinator.wait(lambda: len(running.coordinator.reports) == 2)


def test_duplicates_are_dropped_and_counted(clients):
    with RunningReceiver() as running:
        first = clients(running.coordinator.trainer()).open(0)
        for step in range(4):
            first.sample(0, step)
        running.put(4)
        first.receive_acks(4)
        # The simulation is started again, and sends everything again, and more.
        again = clients(running.coordinator.trainer()).open(0, attempt=1)
        for step in range(6):
            again.sample(0, step, attempt=1)
        assert running.put(2) == [(0, 4), (0, 5)]
        again.receive_acks(6)
        assert running.receiver.counters()["duplicated"] == 4
        assert running.receiver.get(0.05) == []


def test_samples_in_the_queue_are_duplicates_already(clients):
    with RunningReceiver() as running:
        sender = clients(running.coordinator.trainer()).open(0).sample(0, 0).sample(0, 0)
        sender.receive_acks(1)
        assert len(running.take(1)) == 1
        assert running.receiver.counters()["duplicated"] == 1


def test_groups_are_limited():
    with senders() as clients, RunningReceiver(window=1000) as running:
        sender = clients(running.coordinator.trainer()).open()
        for step in range(3 * GROUP):
            sender.sample(0, step)
        sender.sample(0, 0).receive_acks(1)  # all before it have come
        groups = [running.receiver.get(PATIENCE_S) for _ in range(3)]
        assert [len(group) for group in groups] == [GROUP] * 3
        assert running.receiver.get(0.0) == []


def test_more_than_the_window_is_refused(clients):
    with RunningReceiver(window=2) as running:
        sender = clients(running.coordinator.trainer()).open()
        for step in range(3):
            sender.sample(0, step)
        assert sender.receive()[0] is MessageKind.REFUSED
        sender.receive_acks(1)
        running.put(2)
        sender.receive_acks(3).sample(0, 2)
        assert running.put(1) == [(0, 2)]
        assert running.receiver.counters()["refusals"] == {"window": 1}


def test_refusals_are_answered_counted_and_logged_once_per_kind_and_source(clients, caplog):
    with RunningReceiver(steps=5) as running:
        one, other = (clients(running.coordinator.trainer()) for _ in range(2))
        one.open(0)
        other.open(1)
        with caplog.at_level(logging.WARNING, "paramserver"):
            for _ in range(3):
                one.sample(0, 9).send([sample_message(0, 0)[0], b"{}", b""]).send([b"noise"])
            other.sample(1, 9)
            one.receive_until(lambda: one.acked == 6)
            one.receive_until(lambda: sum(kind is MessageKind.REFUSED for kind, _ in one.received) == 9)
            other.receive_acks(1)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 4
    assert sum("step (9) must be below simulations.steps (5)" in text for text in messages) == 2
    assert sum("trainer 0 refused a message of simulation 0 (attempt 0): " in text for text in messages) == 2
    assert sum("a client on 127.0.0.1: " in text for text in messages) == 1
    assert running.receiver.counters()["refusals"] == {"step": 4, "malformed": 6}
    assert running.receiver.counters()["refused"] == 10
    assert one.acked == 6


@pytest.mark.claim("wrong-shape")
def test_the_first_refusal_of_each_kind_is_reported_to_rank_0(clients):
    with RunningReceiver() as running:
        one = clients(running.coordinator.trainer()).open()
        for step, shape in enumerate([(4, 2), (3,), (4, 3)]):
            one.sample(0, step, {"u": field(0, step, shape)})
        running.coordinator.wait(lambda: any(report.first_refusals for report in running.coordinator.reports))
        first = "trainer 0 refused a message of simulation 0 (attempt 0): u ([4, 2]) must have the shape [4, 3]"
        assert running.coordinator.reports[-1].first_refusals == {"shape": first}


def test_parts_wait_for_each_other(clients):
    with RunningReceiver(group_size=2) as running:
        members = [clients(running.coordinator.trainer()).open(0, member=i, members=2) for i in range(2)]
        for step in range(3):
            members[0].sample(0, step, {"u": field(0, step)[:1]}, member=0, members=2)
        members[0].heartbeat(member=0, members=2).receive()
        assert (members[0].acked, running.receiver.counters()["partial"]) == (0, 3)
        members[1].sample(0, 1, {"u": field(0, 1)[1:]}, member=1, members=2)
        assert running.put(1) == [(0, 1)]
        for member in members:
            member.receive_acks(1)
        assert running.receiver.counters()["partial"] == 2


def test_each_member_of_a_group_counts_the_samples_that_are_refused(clients):
    """Whichever part arrives last: the coordinator learns from BYE how many samples are complete."""
    with RunningReceiver(group_size=2) as running:
        members = [clients(running.coordinator.trainer()).open(0, member=i, members=2) for i in range(2)]
        for step, last in ((0, 0), (1, 1)):
            for member, rows in ((1 - last, 2), (last, 3)):
                members[member].sample(0, step, {"u": field(0, step, (rows, 3))}, member=member, members=2)
                members[member].heartbeat(member=member, members=2).receive()
        for member in members:
            member.receive_until(lambda: member.acked == 2)  # noqa: B023
            assert sum(kind is MessageKind.REFUSED for kind, _ in member.received) == 2
        assert running.receiver.counters()["refusals"] == {"shape": 2}


def test_a_client_that_reconnects_with_its_routing_id_continues(clients):
    with RunningReceiver() as running:
        first = clients(running.coordinator.trainer(), b"solver 4").open(0).sample(0, 0)
        running.put(1)
        first.receive_acks(1)
        second = clients(running.coordinator.trainer(), b"solver 4").sample(0, 1)
        running.put(1)
        second.receive_acks(2)


def test_an_absurd_frame_costs_its_client_the_connection_and_no_memory(clients):
    with RunningReceiver() as running:
        bad, good = (clients(running.coordinator.trainer()).open(i) for i in range(2))
        bad.heartbeat(0).receive()
        bad.send([Header(MessageKind.SAMPLE).pack(), b"[]", bytes(2**22)])
        for _ in range(100):
            bad.heartbeat(0)  # those before it has connected anew may be lost
            if bad.socket.poll(200):
                break
        assert bad.receive() == (MessageKind.REFUSED, "simulation 0 (attempt 0, member 0) must be opened first")
        assert set(running.receiver.counters()["refusals"]) == {"unopened"}
        good.sample(1, 0)
        assert running.put(1) == [(1, 0)]


def test_a_message_of_too_many_parts_is_not_kept_and_costs_its_client_the_connection(clients):
    with RunningReceiver() as running:
        bad, good = (clients(running.coordinator.trainer()).open(i) for i in range(2))
        bad.heartbeat(0).receive()
        lost = bad.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            bad.send([*sample_message(0, 0), *(100_000 * [b""])])
            assert lost.poll(1000 * PATIENCE_S), "it is still connected"
        finally:
            bad.socket.disable_monitor()
            lost.close()
        good.sample(1, 0)
        assert running.put(1) == [(1, 0)]
        assert running.receiver.counters()["refusals"] == {"malformed": 1}


def test_samples_of_an_older_attempt_are_not_acknowledged_to_the_newer(clients):
    """One client that opens again under its name begins to count anew."""
    with RunningReceiver() as running:
        sender = clients(running.coordinator.trainer()).open(0).sample(0, 0).sample(0, 1)
        running.take(2)
        sender.open(0, attempt=1).sample(0, 2, attempt=1)
        running.take(1)
        running.receiver.mark_stored(2)
        sender.heartbeat(0, attempt=1).receive()
        assert sender.received == [(MessageKind.ACK, "")]
        assert sender.acked == 0
        running.receiver.mark_stored(1)
        sender.receive_acks(1)
        assert len(sender.received) == 2


# The end.


def test_after_drain_get_returns_what_waits_and_then_none(clients):
    with RunningReceiver() as running:
        sender = clients(running.coordinator.trainer()).open()
        for step in range(3):
            sender.sample(0, step)
        taken = running.take(3)
        running.coordinator.finish()
        assert running.receiver.get(0.1) == []  # the buffer has not got them yet
        running.receiver.mark_stored(3)
        assert running.receiver.get(PATIENCE_S) is None
        assert len(taken) == 3
        sender.receive_acks(3)
        # A heartbeat, and a client that comes late, are answered with OVER.
        sender.heartbeat().receive_until(lambda: sender.received[-1][0] is MessageKind.OVER)
        late = clients(running.coordinator.trainer()).open(5)
        assert late.receive() == (MessageKind.OVER, "the run wants no more samples")
        assert running.receiver.counters()["received"] == 3


def test_stopping_wakes_get_and_sends_over_to_all_clients(clients):
    with RunningReceiver() as running:
        sender = clients(running.coordinator.trainer()).open().sample(0, 0)
        running.put(1)
        sender.receive_acks(1)
        found = []
        thread = threading.Thread(target=lambda: found.append(running.receiver.get(None)))
        thread.start()
        running.receiver.stop()
        thread.join(PATIENCE_S)
        assert found == [None]
        assert sender.receive() == (MessageKind.OVER, "the run wants no more samples")
        running.coordinator.wait(lambda: running.coordinator.left == {0})
        running.receiver.close()
        running.receiver.close()  # again: nothing


def test_clients_get_no_over_where_another_process_may_continue(clients):
    with RunningReceiver() as running:
        sender = clients(running.coordinator.trainer()).open().sample(0, 0)
        running.put(1)
        sender.receive_acks(1)
        running.receiver.close()
        assert not sender.socket.poll(300)
        assert running.coordinator.left == set()


@pytest.mark.claim("send-deadlines")
def test_no_send_waits():
    with FakeCoordinator() as coordinator:
        receiver = SampleReceiver(receiver_spec(coordinator), ReceivedLog())
        with receiver._open_sockets():  # in this thread
            assert (receiver._clients._router.sndtimeo, receiver._coordinator.sndtimeo) == (0, 0)
        receiver.close()


def test_it_can_be_closed_before_it_began():
    with FakeCoordinator() as coordinator:
        receiver = SampleReceiver(receiver_spec(coordinator), ReceivedLog())
        receiver.close()
        assert receiver.get(0.0) is None


@pytest.mark.parametrize(
    "coordinator", [FakeCoordinator(answers=False), FakeCoordinator(refuses="the token must be this run's")]
)
def test_a_coordinator_that_is_silent_or_refuses_ends_it(coordinator):
    with RunningReceiver(coordinator, timeout_s=0.4) as running:
        text = (
            "must be this run's"
            if coordinator.refuses
            else r"received nothing from the coordinator at .* for 0.4 s; rank 0 is gone"
        )
        with pytest.raises(SourceError, match=f"trainer 0 .*{text}"):
            running.receiver.get(PATIENCE_S)
        with pytest.raises(SourceError):
            running.receiver.get(PATIENCE_S)


def test_a_coordinator_that_falls_silent_ends_it_while_samples_flow(clients):
    coordinator = FakeCoordinator()
    with RunningReceiver(coordinator, timeout_s=0.4) as running:
        sender = clients(coordinator.trainer()).open()
        coordinator.wait(lambda: coordinator.reports)
        coordinator.answers = False

        def flow():
            for step in range(10_000):
                sender.sample(0, step)
                running.put(1)

        with pytest.raises(SourceError, match="rank 0 is gone"):
            flow()


def test_after_the_end_the_coordinator_may_be_gone():
    coordinator = FakeCoordinator()
    with RunningReceiver(coordinator, timeout_s=0.2) as running:
        coordinator.trainer()
        coordinator.answers = False
        coordinator.finish()
        assert running.receiver.get(PATIENCE_S) is None
        many = len(coordinator.reports)
        coordinator.wait(lambda: len(coordinator.reports) > many + 8)
        assert running.receiver.get(PATIENCE_S) is None


def test_an_address_of_another_machine_is_refused():
    with FakeCoordinator() as coordinator:
        receiver = SampleReceiver(
            ReceiverSpec(coordinator.address, TOKEN, ingest_spec(), 0, 1, host="203.0.113.7"), ReceivedLog()
        )
        receiver.start()
        with pytest.raises(UnsupportedConfiguration, match=r"trainer 0 cannot listen on 203\.0\.113\.7"):
            receiver.get(PATIENCE_S)
        receiver.close()


def test_other_threads_may_read_counters_while_samples_arrive(clients):
    """Figures, statistics and states are taken while everything is in motion."""
    with RunningReceiver(window=64) as running:
        address, stop = running.coordinator.trainer(), threading.Event()

        def send(simulation, sender):
            sender.open(simulation)
            for step in range(300):
                sender.sample(simulation, step)
                sender.receive_until(lambda step=step: step - sender.acked < 60)
            sender.receive_acks(300)

        def look():
            while not stop.is_set():
                figures = running.receiver.counters()
                assert 0 <= figures["received"] <= 1200
                running.receiver.field_statistics.read_and_reset()

        threads = [threading.Thread(target=send, args=(i, clients(address))) for i in range(4)]
        threads.append(threading.Thread(target=look))
        for thread in threads:
            thread.start()
        keys = []
        while len(keys) < 1200:
            keys += running.put(1)
        for thread in threads[:4]:
            thread.join(PATIENCE_S)
        stop.set()
        threads[4].join(PATIENCE_S)
        assert sorted(keys) == [(i, step) for i in range(4) for step in range(300)]
        for i in range(4):
            assert [step for simulation, step in keys if simulation == i] == list(range(300))


def test_a_client_that_sends_before_open_is_refused(clients):
    with RunningReceiver() as running:
        sender = clients(running.coordinator.trainer()).sample(3, 0)
        assert sender.receive() == (
            MessageKind.REFUSED,
            "simulation 3 (attempt 0, member 0) must be opened first",
        )
        sender.receive_acks(1)
        sender.send(open_message(3)).sample(3, 0)
        assert running.put(1) == [(3, 0)]


# Statistics.


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "?"])
def test_moments_are_those_of_all_numbers_together(seed, dtype):
    rng = np.random.default_rng(seed)
    arrays = [(1000 + 5 * rng.standard_normal(rng.integers(0, 50))).astype(dtype) for _ in range(20)]
    moments, all_numbers = RunningMoments(), np.concatenate(arrays).astype("f8")
    for array in arrays:
        moments.add(array)
    assert moments.count == len(all_numbers)
    assert moments.mean == pytest.approx(all_numbers.mean(), rel=1e-12)
    assert moments.deviation == pytest.approx(all_numbers.std(), rel=1e-9, abs=1e-12)


def test_what_is_not_finite_is_counted_and_left_out():
    moments = RunningMoments()
    moments.add(np.array([1.0, np.nan, 3.0, np.inf, -np.inf]))
    moments.add(np.array([np.nan, np.nan]))
    assert moments.as_dict() == {"mean": 2.0, "deviation": 1.0, "count": 2, "not_finite": 5}


def test_one_sample_in_seven_is_measured_between_two_reads():
    fields = FieldStatistics(["u"])
    for value in range(15):
        fields.add([{"u": np.full(2, value)}])
    assert fields.read_and_reset() == {"u": {"mean": 7.0, "deviation": np.std([0, 7, 14]), "count": 6, "not_finite": 0}}
    assert fields.read_and_reset() == {"u": {"mean": 0.0, "deviation": 0.0, "count": 0, "not_finite": 0}}
    fields.add([{"u": np.full(2, 3.0)}])
    assert fields.read_and_reset()["u"]["mean"] == 3.0


def test_of_samples_that_arrive_together_one_is_measured():
    fields = FieldStatistics(["u"])
    samples = [{"u": np.full(1, value)} for value in range(40)]
    for first, last in ((0, 1), (1, 4), (4, 7), (7, 9), (9, 40)):  # 0; too few since; too few; 8; 39
        fields.add(samples[first:last])
    assert fields.read_and_reset()["u"]["mean"] == np.mean([0, 8, 39])
    assert fields.read_and_reset()["u"]["count"] == 0


def test_fields_of_what_arrives_are_measured(clients):
    with RunningReceiver() as running:
        clients(running.coordinator.trainer()).open(4).sample(4, 2)
        running.put(1)
        assert running.receiver.field_statistics.read_and_reset()["u"] == {
            "mean": 4002.0,
            "deviation": 0.0,
            "count": 12,
            "not_finite": 0,
        }


def test_only_clients_with_a_key_are_received(tmp_path):
    own, others = tmp_path / "keys", tmp_path / "others"
    make_keys(own)
    make_keys(others)
    with ExitStack() as stack:
        context, elsewhere = (stack.enter_context(zmq.Context()) for _ in range(2))
        security = stack.enter_context(ServerSecurity(context, own))
        coordinator = stack.enter_context(context.socket(zmq.ROUTER))
        security.protect(coordinator)
        port = coordinator.bind_to_random_port("tcp://127.0.0.1")
        receiver = SampleReceiver(
            ReceiverSpec(f"tcp://127.0.0.1:{port}", TOKEN, ingest_spec(keys=str(own)), 0, 1), ReceivedLog()
        )
        stack.callback(receiver.close)
        receiver.start()
        assert coordinator.poll(1000 * PATIENCE_S)  # the trainer has the run's own keys
        address = TrainerJoined.unpack(coordinator.recv_multipart()[3]).address
        known, unknown, plain = (stack.enter_context(elsewhere.socket(zmq.DEALER)) for _ in range(3))
        secure_client_socket(known, own)
        secure_client_socket(unknown, others)
        for simulation, one in ((2, unknown), (1, plain), (0, known)):
            one.linger = one.sndtimeo = 0
            one.connect(address)
            with suppress(zmq.Again):  # the connection of a refused client may have ended already
                one.send_multipart(open_message(simulation))
                one.send_multipart(sample_message(simulation, 0))
        assert [one.key for one in receiver.get(PATIENCE_S)] == [(0, 0)]
        assert receiver.get(0.3) == []
        assert receiver.counters()["refused"] == 0


@pytest.fixture
def keys(tmp_path):
    """Folders of keys: those of the run, of another run, and of a trainer that knows the run but not conversely."""
    folders = {name: tmp_path / name for name in ("run", "other", "unknown")}
    for folder in folders.values():
        make_keys(folder)
    shutil.copy(folders["run"] / "server.key", folders["unknown"])
    return {**{name: str(folder) for name, folder in folders.items()}, "none": None}


@pytest.fixture
def guarded(keys):
    """The address of a coordinator that answers nothing, and only lets in those with keys of the run."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        security = stack.enter_context(ServerSecurity(context, keys["run"]))
        router = stack.enter_context(context.socket(zmq.ROUTER))
        router.linger = 0
        security.protect(router)
        yield f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"


@pytest.mark.claim("refused-key")
@pytest.mark.parametrize("name", ["unknown", "other", "none"])
def test_a_trainer_whose_keys_are_refused_ends_within_the_timeout(guarded, keys, name):
    spec = ReceiverSpec(guarded, TOKEN, ingest_spec(keys=keys[name]), 0, 1, timeout_s=1.0)
    receiver = SampleReceiver(spec, ReceivedLog())
    receiver.start()
    try:
        with pytest.raises(SourceError, match=r"simulations\.keys|of this host|rank 0 is gone"):
            receiver.get(PATIENCE_S)
    finally:
        receiver.close()


@pytest.mark.claim("refused-key", "send-deadlines")
@pytest.mark.parametrize("name", ["unknown", "none"])
def test_a_trainer_whose_connection_is_refused_before_it_joins_does_not_block(guarded, keys, name, monkeypatch):
    """Without keys ZeroMQ may see the end of a connection before its reason, and then connects again and again."""
    join, outcomes = SampleReceiver._join, []

    def join_refused(receiver):
        def refused():
            return not receiver._coordinator.poll(0, zmq.POLLOUT) or None

        patience_s = 4.0 if name == "none" else PATIENCE_S
        outcomes.append(poll_until(time.monotonic() + patience_s, refused, threading.Event()))
        join(receiver)

    monkeypatch.setattr(SampleReceiver, "_join", join_refused)
    spec = ReceiverSpec(guarded, TOKEN, ingest_spec(keys=keys[name]), 0, 1, timeout_s=1.0)
    receiver = SampleReceiver(spec, ReceivedLog())
    receiver.start()
    try:
        with pytest.raises(SourceError) as caught:
            receiver.get(PATIENCE_S)
    finally:
        receiver.close()
    if name == "none" and not outcomes[0]:
        assert "simulations.keys" in str(caught.value)
        return
    assert outcomes == [True]
    assert str(caught.value) == (
        f"the coordinator at {guarded} has refused the connection of trainer 0; simulations.keys "
        f"({keys[name] or 'null'}) must hold the same keys on the hosts of all ranks"
    )
