"""A trainer's ear, with real sockets: what it takes, answers and counts, and how it ends."""

import logging
import threading
from contextlib import ExitStack

import numpy as np
import pytest
import zmq
from online_fixtures import PATIENCE_S, SHAPE, TOKEN, Desk, field, message, opening, plan, post, senders

from paramserver.errors import SourceError, UnsupportedConfiguration
from paramserver.online.protocol import Header, MessageKind, TrainerJoined
from paramserver.online.received_log import ReceivedLog
from paramserver.online.receiver import GROUP, SampleReceiver
from paramserver.online.receiver_stats import FieldStatistics, RunningMoments
from paramserver.online.security import client_security, make_keys, server_security
from paramserver.online.spec import ReceiverSpec


class Hearing:
    """A reception at work, and what it needs, for ``with``."""

    def __init__(self, desk=None, identities=None, **keys):
        self.desk = desk or Desk()
        self.identities = identities or ReceivedLog()
        self.keys = keys

    def __enter__(self):
        self.desk.__enter__()
        self.reception = SampleReceiver(post(self.desk, **self.keys), self.identities)
        self.reception.start()
        return self

    def __exit__(self, *exception):
        try:
            self.reception.close()
        finally:
            self.desk.__exit__()

    def take(self, count):
        """As many, whatever the groups."""
        taken = []
        while len(taken) < count:
            group = self.reception.take(PATIENCE_S)
            assert group, f"{len(taken)} of {count} samples came"
            taken += group
        return taken

    def put(self, count):
        """Take as many, as if the buffer had got them."""
        taken = self.take(count)
        self.reception.taken(len(taken))
        return [one.key for one in taken]


@pytest.fixture
def clients():
    with senders() as new:
        yield new


def test_samples_arrive_and_are_told_when_they_are_taken(clients):
    with Hearing() as hearing:
        sender = clients(hearing.desk.trainer()).open(2)
        for step in range(5):
            sender.sample(2, step)
        taken = hearing.take(5)
        assert [one.key for one in taken] == [(2, step) for step in range(5)]
        assert all(np.array_equal(one.sample["u"], field(*one.key)) for one in taken)
        # Nothing was taken yet: a sign of life is answered, and gives no room.
        sender.touch(2).hear()
        assert sender.said == [(MessageKind.TAKEN, "")]
        assert sender.taken == 0
        hearing.reception.taken(3)
        sender.hear_taken(3)
        hearing.reception.taken(2)
        sender.hear_taken(5)
        assert hearing.reception.figures()["received"] == 5
        assert hearing.reception.figures()["bytes"] == 5 * 4 * SHAPE[0] * SHAPE[1]


def test_the_desk_is_told_who_and_what(clients):
    before = ReceivedLog()
    before.take_over([{"inherited": [], "log": [[7, 0], [7, 1]]}], [2], [(7, 1)])
    before.extend([(8, 0)])
    with Hearing(identities=before, index=1, trainers=3, timeout_s=0.4) as hearing:
        desk = hearing.desk
        sender = clients(desk.trainer(1)).open(2).sample(2, 0).sample(2, 1)
        assert desk.tokens == [TOKEN]
        assert (desk.joined[1].received, desk.joined[1].inherited) == ({8: 1}, {7: 2})
        sender.sample(7, 0)
        desk.wait(lambda: desk.reports and desk.reports[-1].waiting == (2,))  # for room; of 7 nothing is new
        hearing.put(2)
        desk.wait(lambda: desk.counts.get((1, 2)) == 2 and (2, 0) in desk.heard)
        assert desk.reports[-1].figures["received"] == 3
        many = len(desk.reports)
        desk.wait(lambda: len(desk.reports) > many + 3)  # without being asked
        assert (desk.reports[-1].received, desk.reports[-1].waiting) == ({}, ())  # what is as it was is not told again
        desk.heard.clear()
        sender.touch(2)
        desk.wait(lambda: (2, 0) in desk.heard)


def test_what_completes_a_simulation_is_reported_at_once(clients, monkeypatch):
    """Also where others go on: the desk need not wait for the next report."""
    monkeypatch.setattr("paramserver.online.receiver._REPORT_EVERY_S", 1000.0)
    with Hearing(steps=6, trainers=2, timeout_s=10_000.0) as hearing:
        desk = hearing.desk
        desk.wait(lambda: len(desk.reports) == 1)
        sender = clients(desk.trainer()).open(0)
        for step in (0, 2, 4):
            sender.sample(0, step)
        sender.open(2).sample(2, 0).sample(2, 2)
        hearing.take(5)
        hearing.reception.taken(2)
        sender.hear_taken(2)
        assert len(desk.reports) == 1
        hearing.reception.taken(1)
        desk.wait(lambda: desk.counts.get((0, 0)) == 3)
        # And what is the last for now.
        hearing.reception.taken(2)
        desk.wait(lambda: desk.counts.get((0, 2)) == 2)


def test_the_end_is_reported_at_once(monkeypatch):
    monkeypatch.setattr("paramserver.online.receiver._REPORT_EVERY_S", 1000.0)
    with Hearing(timeout_s=10_000.0) as hearing:
        hearing.desk.wait(lambda: len(hearing.desk.reports) == 1)
        hearing.desk.finish()
        assert hearing.reception.take(PATIENCE_S) is None
        hearing.desk.wait(lambda: len(hearing.desk.reports) == 2)


def test_duplicates_are_dropped_and_counted(clients):
    with Hearing() as hearing:
        first = clients(hearing.desk.trainer()).open(0)
        for step in range(4):
            first.sample(0, step)
        hearing.put(4)
        first.hear_taken(4)
        # The simulation is started again, and sends everything again, and more.
        again = clients(hearing.desk.trainer()).open(0, attempt=1)
        for step in range(6):
            again.sample(0, step, attempt=1)
        assert hearing.put(2) == [(0, 4), (0, 5)]
        again.hear_taken(6)
        assert hearing.reception.figures()["duplicated"] == 4
        assert hearing.reception.take(0.05) == []


def test_samples_that_wait_are_known_already(clients):
    with Hearing() as hearing:
        sender = clients(hearing.desk.trainer()).open(0).sample(0, 0).sample(0, 0)
        sender.hear_taken(1)
        assert len(hearing.take(1)) == 1
        assert hearing.reception.figures()["duplicated"] == 1


def test_groups_are_limited():
    with senders() as clients, Hearing(window=1000) as hearing:
        sender = clients(hearing.desk.trainer()).open()
        for step in range(3 * GROUP):
            sender.sample(0, step)
        sender.sample(0, 0).hear_taken(1)  # all before it have come
        groups = [hearing.reception.take(PATIENCE_S) for _ in range(3)]
        assert [len(group) for group in groups] == [GROUP] * 3
        assert hearing.reception.take(0.0) == []


def test_more_than_the_window_is_refused(clients):
    with Hearing(window=2) as hearing:
        sender = clients(hearing.desk.trainer()).open()
        for step in range(3):
            sender.sample(0, step)
        assert sender.hear()[0] is MessageKind.REFUSED
        sender.hear_taken(1)
        hearing.put(2)
        sender.hear_taken(3).sample(0, 2)
        assert hearing.put(1) == [(0, 2)]
        assert hearing.reception.figures()["refusals"] == {"window": 1}


def test_refusals_are_answered_counted_and_logged_once_per_kind_and_source(clients, caplog):
    with Hearing(steps=5) as hearing:
        one, other = (clients(hearing.desk.trainer()) for _ in range(2))
        one.open(0)
        other.open(1)
        with caplog.at_level(logging.WARNING, "paramserver"):
            for _ in range(3):
                one.sample(0, 9).send([message(0, 0)[0], b"{}", b""]).send([b"noise"])
            other.sample(1, 9)
            one.hear_until(lambda: one.taken == 6)
            one.hear_until(lambda: sum(kind is MessageKind.REFUSED for kind, _ in one.said) == 9)
            other.hear_taken(1)
    told = [record.message for record in caplog.records]
    assert len(told) == 4
    assert sum("step (9) must be below simulations.steps (5)" in text for text in told) == 2
    assert sum("trainer 0 refused a message of simulation 0 (attempt 0): " in text for text in told) == 2
    assert sum("a client on 127.0.0.1: " in text for text in told) == 1
    assert hearing.reception.figures()["refusals"] == {"step": 4, "malformed": 6}
    assert hearing.reception.figures()["refused"] == 10
    assert one.taken == 6


def test_parts_wait_for_each_other(clients):
    with Hearing(group_size=2) as hearing:
        members = [clients(hearing.desk.trainer()).open(0, member=i, members=2) for i in range(2)]
        for step in range(3):
            members[0].sample(0, step, {"u": field(0, step)[:1]}, member=0, members=2)
        members[0].touch(member=0, members=2).hear()
        assert (members[0].taken, hearing.reception.figures()["partial"]) == (0, 3)
        members[1].sample(0, 1, {"u": field(0, 1)[1:]}, member=1, members=2)
        assert hearing.put(1) == [(0, 1)]
        for member in members:
            member.hear_taken(1)
        assert hearing.reception.figures()["partial"] == 2


def test_a_client_that_connects_anew_under_its_name_goes_on(clients):
    with Hearing() as hearing:
        first = clients(hearing.desk.trainer(), b"solver 4").open(0).sample(0, 0)
        hearing.put(1)
        first.hear_taken(1)
        second = clients(hearing.desk.trainer(), b"solver 4").sample(0, 1)
        hearing.put(1)
        second.hear_taken(2)


def test_an_absurd_frame_costs_its_client_the_connection_and_no_memory(clients):
    with Hearing() as hearing:
        bad, good = (clients(hearing.desk.trainer()).open(i) for i in range(2))
        bad.touch(0).hear()
        bad.send([Header(MessageKind.SAMPLE).pack(), b"[]", bytes(2**22)])
        for _ in range(100):
            bad.touch(0)  # those before it has connected anew may be lost
            if bad.socket.poll(200):
                break
        assert bad.hear() == (MessageKind.REFUSED, "simulation 0 (attempt 0, member 0) must be opened first")
        assert set(hearing.reception.figures()["refusals"]) == {"unopened"}
        good.sample(1, 0)
        assert hearing.put(1) == [(1, 0)]


def test_what_an_older_attempt_sent_gives_the_newer_no_room(clients):
    """One client that opens again under its name begins to count anew."""
    with Hearing() as hearing:
        sender = clients(hearing.desk.trainer()).open(0).sample(0, 0).sample(0, 1)
        hearing.take(2)
        sender.open(0, attempt=1).sample(0, 2, attempt=1)
        hearing.take(1)
        hearing.reception.taken(2)
        sender.touch(0, attempt=1).hear()
        assert sender.said == [(MessageKind.TAKEN, "")]
        assert sender.taken == 0
        hearing.reception.taken(1)
        sender.hear_taken(1)
        assert len(sender.said) == 2


# The end.


def test_after_the_last_simulation_what_waits_is_given_and_then_nothing(clients):
    with Hearing() as hearing:
        sender = clients(hearing.desk.trainer()).open()
        for step in range(3):
            sender.sample(0, step)
        taken = hearing.take(3)
        hearing.desk.finish()
        assert hearing.reception.take(0.1) == []  # the buffer has not got them yet
        hearing.reception.taken(3)
        assert hearing.reception.take(PATIENCE_S) is None
        assert len(taken) == 3
        sender.hear_taken(3)
        # Who comes late, or lives, is told.
        sender.touch().hear_until(lambda: sender.said[-1][0] is MessageKind.OVER)
        late = clients(hearing.desk.trainer()).open(5)
        assert late.hear() == (MessageKind.OVER, "the run wants no more samples")
        assert hearing.reception.figures()["received"] == 3


def test_closing_wakes_who_takes_and_tells_all_clients(clients):
    with Hearing() as hearing:
        sender = clients(hearing.desk.trainer()).open().sample(0, 0)
        hearing.put(1)
        sender.hear_taken(1)
        found = []
        thread = threading.Thread(target=lambda: found.append(hearing.reception.take(None)))
        thread.start()
        hearing.reception.close()
        thread.join(PATIENCE_S)
        assert found == [None]
        assert sender.hear() == (MessageKind.OVER, "the run wants no more samples")
        hearing.desk.wait(lambda: hearing.desk.left == {0})
        hearing.reception.close()  # again: nothing


def test_it_can_be_closed_before_it_began():
    with Desk() as desk:
        reception = SampleReceiver(post(desk), ReceivedLog())
        reception.close()
        assert reception.take(0.0) is None


@pytest.mark.parametrize("desk", [Desk(answers=False), Desk(refuses="the token must be this run's")])
def test_a_desk_that_is_silent_or_refuses_ends_it(desk):
    with Hearing(desk, timeout_s=0.4) as hearing:
        says = "must be this run's" if desk.refuses else r"heard nothing of the desk at .* for 0.4 s; rank 0 is gone"
        with pytest.raises(SourceError, match=f"trainer 0 .*{says}"):
            hearing.reception.take(PATIENCE_S)
        with pytest.raises(SourceError):
            hearing.reception.take(PATIENCE_S)


def test_a_desk_that_falls_silent_ends_it_though_samples_flow(clients):
    desk = Desk()
    with Hearing(desk, timeout_s=0.4) as hearing:
        sender = clients(desk.trainer()).open()
        desk.wait(lambda: desk.reports)
        desk.answers = False

        def flow():
            for step in range(10_000):
                sender.sample(0, step)
                hearing.put(1)

        with pytest.raises(SourceError, match="rank 0 is gone"):
            flow()


def test_after_the_end_the_desk_may_go():
    desk = Desk()
    with Hearing(desk, timeout_s=0.2) as hearing:
        desk.trainer()
        desk.answers = False
        desk.finish()
        assert hearing.reception.take(PATIENCE_S) is None
        many = len(desk.reports)
        desk.wait(lambda: len(desk.reports) > many + 8)
        assert hearing.reception.take(PATIENCE_S) is None


def test_an_address_of_another_machine_is_refused():
    with Desk() as desk:
        reception = SampleReceiver(ReceiverSpec(desk.address, TOKEN, plan(), 0, 1, host="203.0.113.7"), ReceivedLog())
        reception.start()
        with pytest.raises(UnsupportedConfiguration, match=r"trainer 0 cannot listen on 203\.0\.113\.7"):
            reception.take(PATIENCE_S)
        reception.close()


def test_others_than_the_feeder_may_look_while_samples_come(clients):
    """Figures, statistics and states are taken while everything is in motion."""
    with Hearing(window=64) as hearing:
        address, stop = hearing.desk.trainer(), threading.Event()

        def send(simulation, sender):
            sender.open(simulation)
            for step in range(300):
                sender.sample(simulation, step)
                sender.hear_until(lambda step=step: step - sender.taken < 60)
            sender.hear_taken(300)

        def look():
            while not stop.is_set():
                figures = hearing.reception.figures()
                assert 0 <= figures["received"] <= 1200
                hearing.reception.statistics()

        threads = [threading.Thread(target=send, args=(i, clients(address))) for i in range(4)]
        threads.append(threading.Thread(target=look))
        for thread in threads:
            thread.start()
        keys = []
        while len(keys) < 1200:
            keys += hearing.put(1)
        for thread in threads[:4]:
            thread.join(PATIENCE_S)
        stop.set()
        threads[4].join(PATIENCE_S)
        assert sorted(keys) == [(i, step) for i in range(4) for step in range(300)]
        for i in range(4):
            assert [step for simulation, step in keys if simulation == i] == list(range(300))


def test_who_was_never_opened_is_told_so(clients):
    with Hearing() as hearing:
        sender = clients(hearing.desk.trainer()).sample(3, 0)
        assert sender.hear() == (
            MessageKind.REFUSED,
            "simulation 3 (attempt 0, member 0) must be opened first",
        )
        sender.hear_taken(1)
        sender.send(opening(3)).sample(3, 0)
        assert hearing.put(1) == [(3, 0)]


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
    assert moments.row() == {"mean": 2.0, "deviation": 1.0, "count": 2, "not_finite": 5}


def test_one_sample_in_seven_is_looked_at_from_one_reading_to_the_next():
    fields = FieldStatistics(["u"])
    for value in range(15):
        fields.see([{"u": np.full(2, value)}])
    assert fields.read() == {"u": {"mean": 7.0, "deviation": np.std([0, 7, 14]), "count": 6, "not_finite": 0}}
    assert fields.read() == {"u": {"mean": 0.0, "deviation": 0.0, "count": 0, "not_finite": 0}}
    fields.see([{"u": np.full(2, 3.0)}])
    assert fields.read()["u"]["mean"] == 3.0


def test_of_samples_that_came_together_one_is_looked_at():
    fields = FieldStatistics(["u"])
    samples = [{"u": np.full(1, value)} for value in range(40)]
    for first, last in ((0, 1), (1, 4), (4, 7), (7, 9), (9, 40)):  # 0; too few since; too few; 8; 39
        fields.see(samples[first:last])
    assert fields.read()["u"]["mean"] == np.mean([0, 8, 39])
    assert fields.read()["u"]["count"] == 0


def test_fields_of_what_arrives_are_measured(clients):
    with Hearing() as hearing:
        clients(hearing.desk.trainer()).open(4).sample(4, 2)
        hearing.put(1)
        assert hearing.reception.statistics()["u"] == {"mean": 4002.0, "deviation": 0.0, "count": 12, "not_finite": 0}


def test_only_who_has_a_key_is_heard(tmp_path):
    own, others = tmp_path / "keys", tmp_path / "others"
    make_keys(own)
    make_keys(others)
    with ExitStack() as stack:
        context, elsewhere = (stack.enter_context(zmq.Context()) for _ in range(2))
        security = stack.enter_context(server_security(context, own))
        desk = stack.enter_context(context.socket(zmq.ROUTER))
        security.protect(desk)
        port = desk.bind_to_random_port("tcp://127.0.0.1")
        reception = SampleReceiver(
            ReceiverSpec(f"tcp://127.0.0.1:{port}", TOKEN, plan(keys=str(own)), 0, 1), ReceivedLog()
        )
        stack.callback(reception.close)
        reception.start()
        assert desk.poll(1000 * PATIENCE_S)  # the trainer has the run's own keys
        address = TrainerJoined.unpack(desk.recv_multipart()[3]).address
        known, stranger, plain = (stack.enter_context(elsewhere.socket(zmq.DEALER)) for _ in range(3))
        client_security(known, own)
        client_security(stranger, others)
        for simulation, one in ((2, stranger), (1, plain), (0, known)):
            one.linger = 0
            one.connect(address)
            one.send_multipart(opening(simulation))
            one.send_multipart(message(simulation, 0))
        assert [one.key for one in reception.take(PATIENCE_S)] == [(0, 0)]
        assert reception.take(0.3) == []
        assert reception.figures()["refused"] == 0
