"""The client against a fake run: what it sends, when it waits, and how it ends."""

import gc
import logging
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import zmq
from fake_run import (
    FIELDS,
    FakeRun,
    end_before_close,
    end_before_the_last_ack,
    refuse_33_messages,
    refuse_as_newer_version,
    sample,
    send_all,
)
from process_states import error_in_fork

from paramserver.client import Client, finish, ping
from paramserver.cluster.simulation import SimulationEnvironment
from paramserver.distributed.timeouts import poll_until
from paramserver.errors import ClientError, RunOver, UnsupportedConfiguration
from paramserver.online import sender as sender_module
from paramserver.online.protocol import VERSION, ArrayDescriptor, Header, MessageKind, TrainerDirectory
from paramserver.online.sender import ClientConnection

ZEROS = np.zeros((2, 3), np.float32)


@pytest.fixture
def run():
    with FakeRun() as fake:
        yield fake


@pytest.fixture
def run_of(request):
    opened = []

    def make(*arguments, **options):
        opened.append(FakeRun(*arguments, **options))
        return opened[-1]

    yield make
    for fake in opened:
        fake.__exit__(None)


class InThread:
    """A call in a thread of its own, for as long as a test looks at what it waits for."""

    def __init__(self, function, *arguments):
        self.error = None
        self._call = (function, arguments)
        self._thread = threading.Thread(target=self._run, name="in-thread")
        self._thread.start()

    def _run(self):
        function, arguments = self._call
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def waits(self):
        return self._thread.is_alive()

    def ended(self, timeout_s=20):
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()
        return self.error


# What arrives.


@pytest.mark.parametrize("begins_at", [0, 4, 6, 8])
def test_the_end_of_another_attempt_counts_the_steps_that_the_run_had_before(run, begins_at):
    run.directory = replace(run.directory, first_step=6)
    with Client(run.address, attempt=1).open(7) as client:
        assert client.first_step == 6
        send_all(client, range(begins_at, 10))
    assert run.byes == [Header(MessageKind.BYE, 7, 10 - max(begins_at - 6, 0), attempt=1)]


@pytest.mark.parametrize("simulation", [0, 1, 7])
def test_steps_go_round_the_trainers_and_arrive_as_they_were(run, simulation):
    with Client(run.address).open(simulation, [1.5, -2.0]) as client:
        send_all(client, range(10))
        assert client.parameters.tolist() == [1.5, -2.0]
        assert client.sent == 10
    run.wait_for(lambda: run.byes)
    for trainer in (0, 1):
        assert run.keys()[trainer] == [(simulation, s) for s in range(10) if (simulation + s) % 2 == trainer]
        for header, fields in run.samples[trainer]:
            assert fields["temperature"].tolist() == sample(header.step)["temperature"].tolist()
            assert fields["temperature"].dtype == np.float32
    assert [(who, header.simulation, vector.tolist()) for who, header, vector in sorted(run.opened, key=str)] == [
        (0, simulation, [1.5, -2.0]),
        (1, simulation, [1.5, -2.0]),
    ]
    assert run.byes == [Header(MessageKind.BYE, simulation, 10)]
    assert (client.sent, client.refused) == (10, 0)  # known afterwards too


def test_a_pinned_simulation_connects_to_one_trainer_only(run_of):
    run = run_of(3, single_trainer=2)
    with Client(run.address).open(4) as client:
        send_all(client, [5, 3, 4])
        assert client.parameters.shape == (0,)
    assert run.keys() == {2: [(4, 5), (4, 3), (4, 4)]}
    assert {who for who, _ in run.messages} == {"coordinator", 2}


def test_an_array_may_be_changed_once_it_was_sent(run):
    run.acknowledges = False
    array = np.zeros((2, 3), np.float32)
    client = Client(run.address).open(0)
    for step in range(8):
        array[:] = step
        client.send(step, {"temperature": array})
    array[:] = -1
    run.release()
    client.close()
    got = {
        header.step: set(fields["temperature"].flat) for trainer in (0, 1) for header, fields in run.samples[trainer]
    }
    assert got == {step: {step} for step in range(8)}


def test_members_of_a_group_send_their_parts(run):
    for member, rows in ((0, 1), (1, 1)):
        with Client(run.address, member=member, members=2, attempt=3).open(1, [2.0]) as client:
            client.send(0, {"temperature": np.full((rows, 3), member)})
    headers = [header for header, _ in run.samples[1]]
    assert headers == [Header(MessageKind.SAMPLE, 1, 0, member, 2, 3) for member in (0, 1)]
    assert [fields["temperature"].tolist() for _, fields in run.samples[1]] == [[[0.0] * 3], [[1.0] * 3]]
    assert [header for header, _ in run.hellos] == [Header(MessageKind.HELLO, 1, 0, member, 2, 3) for member in (0, 1)]


def test_a_simulation_that_is_started_again_sends_each_step_to_the_same_trainer(run):
    first = Client(run.address).open(3)
    send_all(first, range(4))
    with pytest.raises(ZeroDivisionError), first:
        raise ZeroDivisionError
    with Client(run.address, attempt=1).open(3) as second:
        send_all(second, range(6))
    for trainer in (0, 1):
        steps = [header.step for header, _ in run.samples[trainer] if header.attempt == 1]
        assert steps == [s for s in range(6) if (3 + s) % 2 == trainer]
        assert {h.step for h, _ in run.samples[trainer] if h.attempt == 0} <= set(steps)


# Back-pressure.


def test_a_full_window_blocks_send_and_each_trainer_has_its_own(run):
    run.acknowledges = False
    client = Client(run.address).open(0)
    send_all(client, [0, 2, 4, 6, 1])  # the window of trainer 0 is full, that of trainer 1 is not
    assert client.waited_s == 0
    held = InThread(client.send, 8, sample(8))
    run.wait_for(lambda: run.kinds(0).count(MessageKind.HEARTBEAT) >= 2)
    assert held.waits()
    assert run.keys()[0] == [(0, 0), (0, 2), (0, 4), (0, 6)]
    assert MessageKind.HEARTBEAT not in run.kinds(1)
    run.release()
    assert held.ended() is None
    assert 1.5 < client.waited_s < 20
    client.close()
    assert run.keys() == {0: [(0, s) for s in (0, 2, 4, 6, 8)], 1: [(0, 1)]}


@pytest.mark.parametrize("window", [1, 3])
def test_never_more_than_the_window_is_in_flight(run_of, window):
    run = run_of(1, window=window)
    run.acknowledges = False
    client = Client(run.address).open(0)
    sender = InThread(send_all, client, range(20))
    for taken in range(0, 20 - window, window):
        run.wait_for(lambda most=taken + window: len(run.samples[0]) >= most)
        assert len(run.samples[0]) == taken + window

        def take():
            for key in run.arrived:
                run.acked[key] = run.arrived[key]
                run._send_ack(*key)

        run.order(take)
    run.release()
    assert sender.ended() is None
    client.close()
    assert run.keys()[0] == [(0, step) for step in range(20)]


def test_close_waits_for_all_acks_and_then_sends_bye(run):
    run.acknowledges = False
    client = Client(run.address).open(0)
    send_all(client, range(3))
    closing = InThread(client.close)
    run.wait_for(lambda: {MessageKind.HEARTBEAT} <= set(run.kinds(0)) & set(run.kinds(1)))
    assert closing.waits()
    assert not run.byes
    run.release()
    assert closing.ended() is None
    run.wait_for(lambda: run.byes)
    assert run.byes == [Header(MessageKind.BYE, 0, 3)]


def test_an_exception_leaves_without_bye_and_at_once(run):
    run.acknowledges = False
    began = time.monotonic()
    client = Client(run.address).open(0)
    send_all(client, range(3))
    with pytest.raises(ZeroDivisionError), client:
        raise ZeroDivisionError
    assert time.monotonic() - began < 5
    with Client(run.address).open(1):
        pass
    run.wait_for(lambda: run.byes)
    assert run.byes == [Header(MessageKind.BYE, 1, 0)]  # of the second alone
    with pytest.raises(ClientError, match="this client is closed; make another one"):
        client.send(3, sample(3))


def test_a_client_that_was_not_closed_does_not_hang_the_process(run):
    run.acknowledges = False
    client = Client(run.address).open(0)
    send_all(client, range(3))
    client.myself = client  # collected as a circle, as what an error holds
    collected = weakref.ref(client)
    del client
    ending = InThread(gc.collect)
    assert ending.ended() is None
    assert collected() is None


def test_a_fork_cannot_use_a_client_and_does_not_disturb_it(run):
    with Client(run.address).open(0) as client:
        send_all(client, range(3))
        for call in (lambda: client.send(3, sample(3)), client.close):
            assert "must be used by the process that made it" in error_in_fork(call)
        send_all(client, range(3, 9))
    run.wait_for(lambda: run.byes)
    assert run.byes == [Header(MessageKind.BYE, 0, 9)]


# Those who do not answer, or refuse.


def silence(run):
    run.answers = {MessageKind.SAMPLE: None, MessageKind.HEARTBEAT: None}


def test_a_silent_trainer_is_named_after_the_time(run):
    silence(run)
    client = Client(run.address, timeout_s=0.6).open(0)
    send_all(client, [0, 2, 4, 6])
    began = time.monotonic()
    with pytest.raises(ClientError, match=r"trainer 0 at tcp://127\.0\.0\.1:\d+ gave no sign of life for 0\.6 s; that"):
        client.send(8, sample(8))
    assert 0.55 < time.monotonic() - began < 5
    for again in (lambda: client.send(9, sample(9)), client.open):
        with pytest.raises(ClientError, match=r"trainer 0 at .* gave no sign of life"):
            again()
    client.close()  # nothing is left to do
    assert not run.byes


def test_a_trainer_that_replies_is_waited_for_longer_than_the_timeout(run):
    run.acknowledges = False
    client = Client(run.address, timeout_s=1.0).open(0)
    send_all(client, [0, 2, 4, 6])
    held = InThread(client.send, 8, sample(8))
    run.wait_for(lambda: run.kinds(0).count(MessageKind.HEARTBEAT) >= 8)  # twice the limit
    assert held.waits()
    run.release()
    assert held.ended() is None
    client.close()


def test_the_timeout_is_that_of_the_run(run_of):
    run = run_of(1, timeout_s=0.3)
    silence(run)
    client = Client(run.address).open(0)
    client.send(0, sample(0))
    with pytest.raises(ClientError, match=r"trainer 0 at .* gave no sign of life for 0\.3 s"):
        client.close()


def test_a_trainer_that_is_not_replaced_in_time_fails(run):
    run.acknowledges = False
    client = Client(run.address, timeout_s=1.5).open(0)
    send_all(client, range(3))
    run.wait_for(lambda: len(run.samples[1]) == 1)
    run.drop(1)
    with pytest.raises(ClientError, match=r"to trainer 1 at \S+ was lost, and it was not replaced within 1.5 s"):
        client.close()
    assert not run.byes


def test_what_a_trainer_sent_before_it_closed_is_received(run):
    client = Client(run.address, timeout_s=60).open(0)
    run.acknowledges = False
    send_all(client, range(2))
    run.wait_for(lambda: run.samples[0] and run.samples[1])
    run.send_to_all(1, MessageKind.OVER, b"max_steps is reached")
    run.order(lambda: run.trainers[1].close())
    with pytest.raises(RunOver, match=r"^max_steps is reached$"):
        client.close()


@pytest.mark.parametrize("who", ["coordinator", 0])
def test_over_of_one_process_does_not_hide_the_last_ack_of_another(run, who):
    client = Client(run.address).open(0)
    end_before_the_last_ack(run, client, who)
    run.release()
    assert client._sender._trainers[1].socket.poll(20_000)
    client.close()
    assert client.sent == 2


def test_acks_that_came_before_the_run_has_ended_are_read_after_it(run):
    client = Client(run.address).open(0)
    end_before_close(run, client)
    trainer = client._sender._trainers[1]
    assert poll_until(time.monotonic() + 20, lambda: trainer.is_lost() or None, threading.Event())
    client.close()
    assert client.sent == 2


@pytest.mark.parametrize("who", ["coordinator", 0])
def test_over_ends_a_sender_that_waits_and_every_call_after(run, who):
    run.acknowledges = False
    client = Client(run.address).open(0)
    send_all(client, [0, 2, 4, 6])
    held = InThread(client.send, 8, sample(8))
    run.wait_for(lambda: run.kinds(0).count(MessageKind.HEARTBEAT) >= 1)
    run.send_to_all(who, MessageKind.OVER, b"the run wants no more samples")
    error = held.ended()
    assert type(error) is RunOver
    assert str(error) == "the run wants no more samples"
    with pytest.raises(RunOver):
        client.send(9, sample(9))
    client.close()
    assert not run.byes
    assert client.sent == 4


def test_over_ends_a_sender_that_has_room(run, monkeypatch):
    monkeypatch.setattr("paramserver.online.sender._RECEIVE_INTERVAL_S", 0.0)
    client = Client(run.address).open(0)
    run.acknowledges = False
    client.send(0, sample(0))
    run.wait_for(lambda: run.samples[0])
    run.send_to_all(0, MessageKind.OVER)
    assert client._sender._trainers[0].socket.poll(20_000)
    with pytest.raises(RunOver, match="the run wants no more samples"):
        client.send(2, sample(2))
    assert client.waited_s == 0


def test_over_at_hello(run):
    run.answers[MessageKind.HELLO] = lambda header: [header.reply(MessageKind.OVER).pack(), b"it is over"]
    with pytest.raises(RunOver, match=r"^it is over$"):
        Client(run.address).open(0)


def test_refusals_are_counted_logged_once_and_stop_nothing(run, caplog):
    caplog.set_level(logging.WARNING, "paramserver.client")
    client = Client(run.address).open(0)
    refuse_33_messages(run, client)
    assert len(caplog.messages) == 20  # as many sentences as are worth a line
    assert caplog.messages[0].startswith("trainer 0 at tcp://")
    assert caplog.messages[0].endswith(" refused a message: temperature must be finite")


def test_a_refusal_by_the_run_has_its_reason(run):
    run.answers[MessageKind.HELLO] = lambda header: [
        header.reply(MessageKind.REFUSED).pack(),
        b"simulation (9) must be below 5",
    ]
    client = Client(run.address)
    with pytest.raises(ClientError, match=r"the run at \S+ refused this client: simulation \(9\) must be below 5$"):
        client.open(9)
    run.answers.clear()
    with client.open(4):  # it was never open, so it may be now
        pass
    run.wait_for(lambda: run.byes)


def test_another_version_is_named(run):
    run.answers[MessageKind.HELLO] = refuse_as_newer_version
    with pytest.raises(ClientError, match=rf"protocol version \({VERSION + 1}\) must be {VERSION}; install the same"):
        Client(run.address).open(0)


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff", b"[1]", b'{"trainers": 5}'])
def test_an_invalid_welcome(run, body):
    run.answers[MessageKind.HELLO] = lambda header: [header.reply(MessageKind.WELCOME).pack(), body]
    with pytest.raises(ClientError, match="answered what cannot be understood"):
        Client(run.address).open(0)


def test_without_a_run(free_port):
    began = time.monotonic()
    with pytest.raises(
        ClientError, match=r"the run at tcp://\S+ gave no sign of life for 0\.3 s; see that it runs and"
    ):
        Client(f"tcp://127.0.0.1:{free_port}", timeout_s=0.3).open(0)
    assert time.monotonic() - began < 5


def test_a_simulation_that_the_run_started_does_not_wait_for_another_run(free_port, monkeypatch):
    monkeypatch.setattr(sender_module, "_GONE_S", 0.2)
    monkeypatch.setenv("PARAMSERVER_ADDRESS", f"tcp://127.0.0.1:{free_port}")
    with pytest.raises(ClientError, match=rf"^the run at tcp://127.0.0.1:{free_port} is gone, no process has listened"):
        Client(timeout_s=60).open(0)


def test_a_run_that_goes_before_it_answers_is_not_waited_for(free_port, monkeypatch):
    monkeypatch.setattr(sender_module, "_GONE_S", 0.2)
    with ThreadPoolExecutor(1) as pool:
        client = asks_one_that_leaves(pool, free_port)
        with pytest.raises(ClientError, match="is gone, no process has listened there for"):
            client.result(20)


def test_a_run_that_comes_back_at_once_receives_the_request_again(free_port, run_of):
    with ThreadPoolExecutor(1) as pool:
        client = asks_one_that_leaves(pool, free_port)
        run_of(1, port=free_port)
        client.result(20).close()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_that_comes_back_with_another_number_of_trainers_ends_its_clients(free_port, before, after):
    """A sample that is kept would be another trainer's now, and be received twice if the simulation starts again."""
    with FakeRun(before, port=free_port) as run:
        client = Client(run.address, timeout_s=20).open(0)
        send_all(client, range(4))
        run.wait_for(lambda: sum(map(len, run.samples.values())) == 4)
    with FakeRun(after, port=free_port):
        for call in (client.close, lambda: client.send(4, sample(4))):
            with pytest.raises(ClientError, match=f"must have {before} trainers .* and has {after} now; start this"):
                call()


def asks_one_that_leaves(pool, port):
    with listening(port) as silent:
        client = pool.submit(Client(f"tcp://127.0.0.1:{port}", timeout_s=30).open, 0)
        assert silent.poll(10_000), "HELLO did not come"
    return client


@contextmanager
def listening(port):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    try:
        router.bind(f"tcp://127.0.0.1:{port}")
        yield router
    finally:
        context.destroy(0)


@pytest.fixture
def free_port():
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
    context.term()
    return port


def test_a_client_may_come_before_the_run(free_port, run_of):
    client = Client(f"tcp://127.0.0.1:{free_port}", timeout_s=20)
    opening = InThread(client.open, 5)
    run = run_of(port=free_port)
    assert opening.ended() is None
    client.close()
    run.wait_for(lambda: run.byes)
    assert run.byes == [Header(MessageKind.BYE, 5)]


def test_a_run_whose_trainers_are_not_there_yet_is_waited_for_while_it_lives(run, monkeypatch):
    monkeypatch.setattr("paramserver.online.sender._PING_INTERVAL_S", 0.1)
    run.answers[MessageKind.HELLO] = None
    client = Client(run.address, timeout_s=1.0)
    opening = InThread(client.open, 5)
    run.wait_for(lambda: run.kinds("coordinator").count(MessageKind.PING) >= 20)  # twice the silence that is allowed
    assert opening.waits()
    run.send_to_all("coordinator", MessageKind.WELCOME, run.directory.pack())
    assert opening.ended() is None
    client.close()
    assert run.kinds("coordinator").count(MessageKind.HELLO) == 1


def test_but_not_forever(run, monkeypatch):
    monkeypatch.setattr("paramserver.online.sender._PING_INTERVAL_S", 0.1)
    monkeypatch.setattr("paramserver.online.sender._ALIVE_FACTOR", 1.2)
    run.answers[MessageKind.HELLO] = None
    with pytest.raises(
        ClientError, match=r"lives, but its trainers were not ready within \d+ s; see the log of the run"
    ):
        Client(run.address, timeout_s=1.0).open(0)


# Fields.

WHOLE = (
    ArrayDescriptor("x", "<f4", (2,)),
    ArrayDescriptor("n", "<i4", ()),
    ArrayDescriptor("flag", "|b1", (1,)),
    ArrayDescriptor("small", "<u2", (1,)),
)
GOOD = {"x": np.ones(2, np.float32), "n": 3, "flag": [True], "small": np.array([9], np.uint16)}


@pytest.fixture(scope="module")
def several():
    with FakeRun(1, fields=WHOLE, window=1000, steps=None) as fake:
        yield fake


@pytest.mark.parametrize(
    ("name", "value", "arrived"),
    [
        ("x", np.array([1.5, 2.5]), [1.5, 2.5]),
        ("x", np.array([1, 2], np.int64), [1.0, 2.0]),
        ("x", np.array([1, 2], ">f4"), [1.0, 2.0]),
        ("x", np.array([0.1, 0.2]), np.array([0.1, 0.2], np.float32).tolist()),
        ("x", [np.inf, np.nan], [np.inf, np.nan]),
        ("x", np.arange(4, dtype=np.float32)[::2], [0.0, 2.0]),
        ("n", np.int64(-(2**31)), -(2**31)),
        ("x", np.ma.masked_array([1.0, 2.0], [False, False]), [1.0, 2.0]),
        ("small", np.array([2**16 - 1], np.uint64), [2**16 - 1]),
        ("small", [7], [7]),
        ("flag", [1], [True]),
    ],
)
def test_numbers_that_fit_are_converted(several, name, value, arrived):
    before = len(several.samples[0])
    with Client(several.address).open(0) as client:
        client.send(0, {**GOOD, name: value})
    (_, fields) = several.samples[0][before]
    assert list(fields) == ["x", "n", "flag", "small"]
    np.testing.assert_array_equal(fields[name], arrived)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": 1}, r"field \(y\) must be one of x, n, flag, small; rename or leave it out"),
        ({"x": None}, r"field x must have the shape \(2,\), this one has \(\); reshape it"),
        ({"x": np.zeros((1, 2))}, r"field x must have the shape \(2,\), this one has \(1, 2\)"),
        (
            {"x": np.zeros(2, complex)},
            "field x must be float32, complex128 is not converted to it implicitly; convert it",
        ),
        ({"x": ["a", "b"]}, "field x must be float32, <U1 is not converted to it"),
        ({"x": [[1.0], [1.0, 2.0]]}, r"field x must be an array of numbers \(.*\); convert it"),
        ({"x": [1e300, 0.0]}, r"field x \(1e\+300\) must fit into float32; scale it, or declare a larger dtype"),
        ({"n": 2.0}, "field n must be int32, float64 is not"),
        ({"n": 2**31}, r"field n \(2147483648\) must fit into int32"),
        ({"small": np.array([2**16], np.uint32)}, r"field small \(65536\) must fit into uint16"),
        ({"small": np.array([-1], np.int16)}, r"field small \(-1\) must fit into uint16"),
        ({"small": [9.0]}, "field small must be uint16, float64 is not converted to it"),
        ({"flag": [2]}, r"field flag \(2\) must fit into bool"),
        ({"x": np.ma.masked_array([1.0, 1e36], [False, True])}, "field x must have no masked values.*; fill them"),
        ({"n": object()}, "field n must be int32, object is not"),
    ],
)
def test_a_field_that_does_not_fit_is_refused_and_nothing_is_sent(several, change, message):
    before = len(several.samples[0])
    with Client(several.address).open(0) as client:
        with pytest.raises(ClientError, match=message):
            client.send(0, {**GOOD, **change})
        client.send(0, GOOD)  # the step was not used up
        assert client.sent == 1
    assert len(several.samples[0]) == before + 1


def test_a_missing_field_is_named(several):
    with (
        Client(several.address).open(0) as client,
        pytest.raises(ClientError, match=r"field \(flag\) must be in every"),
    ):
        client.send(0, {name: value for name, value in GOOD.items() if name != "flag"})


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (0, 3), (2,), (2, 3, 1), ()])
def test_a_part_must_be_one(run, shape):
    with (
        Client(run.address, members=2).open(0) as client,
        pytest.raises(
            ClientError, match=r"must be a part of the shape \(2, 3\) along its first dimension, this one has"
        ),
    ):
        client.send(0, {"temperature": np.zeros(shape)})


# Misuse.


def test_each_misuse_has_its_message(run):
    client = Client(run.address)
    with pytest.raises(
        ClientError, match=r"must be open before it sends; call open\(simulation_id, parameters\) first"
    ):
        client.send(0, sample(0))
    with pytest.raises(ClientError, match="has no parameters before open"):
        client.parameters  # noqa: B018
    client.open(2)
    with pytest.raises(ClientError, match="this client is open already, for simulation 2; make another one"):
        client.open(3)
    client.send(0, sample(0))
    with pytest.raises(ClientError, match=r"step \(0\) must be sent once, it was sent before"):
        client.send(0, sample(0))
    client.send(2, sample(2))
    with pytest.raises(ClientError, match=r"step \(2\) must be sent once"):
        client.send(2, sample(2))
    client.close()
    client.close()
    with pytest.raises(ClientError, match="this client is closed; make another one"):
        client.send(1, sample(1))
    with pytest.raises(ClientError, match="this client is closed; make another one"):
        client.open(3)
    with pytest.raises(ValueError, match="read-only"):
        client.parameters[:] = 0
    assert client.sent == 2
    never = Client(run.address)
    never.close()
    with pytest.raises(ClientError, match="this client is closed"):
        never.open(0)


@pytest.mark.parametrize("step", [-1, 100, 1.0, "1", None, True, 2**63])
def test_an_invalid_step(run, step):
    with Client(run.address).open(0) as client:
        with pytest.raises(ClientError, match=r"^step \(.*\) must be "):
            client.send(step, sample(0))
        client.send(np.int64(99), sample(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"member": 2, "members": 2}, r"member \(2\) must be below members \(2\); count from 0"),
        ({"member": -1}, r"member \(-1\) must be a whole number from 0"),
        ({"members": 0}, r"members \(0\) must be a whole number from 1"),
        ({"members": 65536}, r"members \(65536\) must be a whole number from 1, below 65536"),
        ({"attempt": 2**32}, r"attempt \(4294967296\) must be"),
        ({"timeout_s": 0}, r"timeout_s \(0\) must be a number of seconds, above 0 and finite"),
        ({"timeout_s": float("nan")}, r"timeout_s \(nan\) must be a number of seconds, above 0 and finite"),
        ({"timeout_s": "5"}, r"timeout_s \('5'\) must be a number of seconds, above 0 and finite"),
        (
            {"address": None},
            r"address \(None\) must be given where the run has not started this process \(PARAMSERVER_ADD",
        ),
    ],
)
def test_invalid_arguments(options, message):
    with pytest.raises(ClientError, match=message):
        Client(**{"address": "tcp://127.0.0.1:1", **options})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), r"simulation_id \(None\) must be given where"),
        ((-1,), r"simulation_id \(-1\) must be a whole number"),
        ((True,), r"simulation_id \(True\) must be"),
        ((0, ["a"]), "parameters .* must be numbers"),
        ((0, [10**400]), "parameters .* must be numbers"),
        ((0, [1.0, float("nan")]), "parameters .* must be finite"),
    ],
)
def test_an_invalid_simulation(run, arguments, message):
    with pytest.raises(ClientError, match=message):
        Client(run.address).open(*arguments)
    assert run.messages == []


@pytest.mark.parametrize("address", ["127.0.0.1:80", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "http://127.0.0.1:80", ""])
def test_an_invalid_address(address):
    with pytest.raises(ClientError, match=r"address \(.*\) must be (tcp://host:port|given)"):
        Client(address, timeout_s=1).open(0)


def test_an_address_that_is_no_text():
    with pytest.raises(ClientError, match=r"address \(5999\) must be a text, tcp://host:port"):
        ping(5999)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1, "5", None])
@pytest.mark.parametrize("call", [ping, finish])
def test_a_call_without_a_simulation_does_not_wait_for_an_invalid_time(call, timeout_s):
    with pytest.raises(ClientError, match=r"timeout_s \(.*\) must be a number of seconds, at least 0 and finite"):
        call("tcp://127.0.0.1:1", timeout_s=timeout_s)


def test_beyond_this_machine_keys_are_needed():
    with pytest.raises(
        ClientError, match=r"keys \(None\) must be given with the address tcp://10\.0\.0\.1:80, which is"
    ):
        Client("tcp://10.0.0.1:80", timeout_s=1).open(0)


# From the environment of a run.


def test_all_comes_from_the_environment_and_arguments_come_first(run, monkeypatch):
    environment = SimulationEnvironment(
        run.address, simulation=6, parameters=(0.1, 2.0), attempt=2, member=1, members=3
    )
    for name, value in environment.to_environ().items():
        monkeypatch.setenv(name, value)
    with Client().open() as client:
        assert client.parameters.tolist() == [0.1, 2.0]
    with Client(attempt=5, member=0).open(8) as client:
        assert client.parameters.tolist() == []  # those of simulation 6 are not its own
    with Client().open(6, [3.0]) as client:
        assert client.parameters.tolist() == [3.0]
    assert [(header, vector.tolist()) for header, vector in run.hellos] == [
        (Header(MessageKind.HELLO, 6, 0, 1, 3, 2), [0.1, 2.0]),
        (Header(MessageKind.HELLO, 8, 0, 0, 3, 5), []),
        (Header(MessageKind.HELLO, 6, 0, 1, 3, 2), [3.0]),
    ]


@pytest.mark.parametrize(
    "producer",
    [
        SimulationEnvironment(),
        SimulationEnvironment("tcp://h:1", 3, (1.0, 1e-300, 0.1), 1, 2, 4, "/keys"),
        SimulationEnvironment(parameters=(), simulation=0, attempt=0),
    ],
)
def test_the_environment_is_what_is_read(producer):
    assert SimulationEnvironment.from_environ(producer.to_environ()) == producer


@pytest.mark.parametrize(
    ("environ", "member"),
    [
        ({"SLURM_PROCID": "3"}, None),  # of an allocation that is no group
        ({"SLURM_PROCID": "3", "PARAMSERVER_MEMBERS": "1"}, None),
        ({"SLURM_PROCID": "3", "PARAMSERVER_MEMBERS": "4"}, 3),
        ({"SLURM_PROCID": "0", "PARAMSERVER_MEMBERS": "4", "PARAMSERVER_MEMBER": "2"}, 2),
    ],
)
def test_srun_sets_the_member_of_a_group(environ, member):
    assert SimulationEnvironment.from_environ(environ).member == member


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SIMULATION", "-1", r"PARAMSERVER_SIMULATION \(-1\) must be a whole number from 0; the run sets it"),
        ("MEMBERS", "two", r"PARAMSERVER_MEMBERS \(two\) must be a whole number"),
        ("PARAMETERS", "1,2", r"PARAMSERVER_PARAMETERS \(1,2\) must be a JSON list of numbers"),
        ("PARAMETERS", "[true]", r"PARAMSERVER_PARAMETERS \(\[true\]\) must be"),
        ("PARAMETERS", "3", r"PARAMSERVER_PARAMETERS \(3\) must be"),
    ],
)
def test_an_invalid_environment(name, value, message):
    with pytest.raises(UnsupportedConfiguration, match=message):
        SimulationEnvironment.from_environ({f"PARAMSERVER_{name}": value})


# Without a simulation.


def test_a_run_that_lives_answers_a_ping(run, free_port):
    assert ping(run.address) == {"alive": True}
    with pytest.raises(ClientError, match=r"gave no sign of life for 0\.2 s"):
        ping(f"tcp://127.0.0.1:{free_port}", timeout_s=0.2)


def test_finish_returns_once_it_was_received(run):
    finish(run.address)
    assert run.kinds("coordinator")[:2] == [MessageKind.FINISH, MessageKind.PING]
    run.answers[MessageKind.FINISH] = lambda header: [
        header.reply(MessageKind.REFUSED).pack(),
        b"it starts its simulations itself",
    ]
    with pytest.raises(ClientError, match="refused this client: it starts its simulations itself"):
        finish(run.address)
    run.answers[MessageKind.FINISH] = lambda header: [header.reply(MessageKind.OVER).pack()]
    finish(run.address)


def test_an_invalid_pong(run):
    run.answers[MessageKind.PING] = lambda header: [header.reply(MessageKind.PONG).pack(), b"yes"]
    with pytest.raises(ClientError, match="answered what cannot be understood: the body must be JSON"):
        ping(run.address)


def test_a_directory_survives_pack_and_unpack():
    welcome = TrainerDirectory(("tcp://a:1", "tcp://b:2"), None, 4, 20.0, None, FIELDS)
    assert TrainerDirectory.unpack(welcome.pack()) == welcome
    assert [replace(welcome, single_trainer=1).trainer_for(5, step) for step in range(3)] == [1, 1, 1]


def test_a_client_that_computes_for_long_keeps_its_other_connections():
    """A run that is gone is tried again and again; the events of ZeroMQ are not read, and nothing blocks."""
    context = zmq.Context()
    context.rcvhwm = 1  # as every one that is made here, so that it is soon reached
    context.linger, context.reconnect_ivl = 0, 1
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        connection, other = ClientConnection(context, "the run", address, None), context.socket(zmq.DEALER)
        events = other.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
        other.connect(address)
        retried = 0
        while retried < 1500 and events.poll(3000):
            events.recv_multipart()
            retried += 1
        connection.disconnected_s()  # read while a request waits
        connection.close()
        other.disable_monitor()
        for one in (events, other):
            one.close(0)
        context.term()
    assert retried == 1500
