"""Messages that clients begin and do not finish: how much memory they take, and whom the limit does not concern."""

import threading
import time

import pytest
from online_fixtures import PATIENCE_S, FakeCoordinator, field, open_message, receiver_spec, sample_message, senders
from raw_zmtp import raw_clients

from paramserver.client import ping
from paramserver.config import SimulationsConfig
from paramserver.distributed.timeouts import poll_until
from paramserver.online import coordinator as coordinator_module
from paramserver.online.coordinator import SimulationCoordinator
from paramserver.online.protocol import MessageKind
from paramserver.online.received_log import ReceivedLog
from paramserver.online.receiver import SampleReceiver
from paramserver.online.spec import IngestSpec

MIB = 2**20


@pytest.fixture
def new_client():
    with raw_clients() as new:
        yield new


@pytest.fixture
def coordinator(tmp_path, monkeypatch):
    """One whose limit is 4 MiB."""
    monkeypatch.setattr(coordinator_module, "_MAX_MESSAGE_BYTES", 4 * MIB)
    spec = IngestSpec.from_config(SimulationsConfig(fields={"u": [2]}))
    with SimulationCoordinator(spec, 1, 0, tmp_path / "logs") as made:
        yield made


@pytest.fixture
def trainer():
    """The address of a receiver of samples of 48 bytes, and so with a limit of some 1 MiB; and the receiver."""
    with FakeCoordinator() as fake:
        receiver = SampleReceiver(receiver_spec(fake), ReceivedLog())
        receiver.start()
        try:
            yield fake.trainer(), receiver
        finally:
            receiver.close()


def send_until_ended(client, part):
    """Parts of one message, until the connection has ended; returns the bytes that were sent."""
    deadline, sent = time.monotonic() + PATIENCE_S, 0
    while client.is_connected() and client.send_part(part):
        assert time.monotonic() < deadline, f"{sent} bytes of a message were taken"
        sent += len(part)
        if sent > 64 * MIB:  # enough: not as fast as the machine allows, which is no matter of the limit
            threading.Event().wait(0.01)
    return sent


def ended(*clients):
    """Those of which the connection has ended, as soon as it is one."""

    def found():
        return [client for client in clients if not client.is_connected()] or None

    return poll_until(time.monotonic() + PATIENCE_S, found, threading.Event())


@pytest.mark.claim("unfinished-message")
@pytest.mark.parametrize("part_bytes", [3 * MIB, 64 * 1024, 100])
def test_an_unfinished_message_to_the_coordinator_costs_its_client_the_connection(coordinator, new_client, part_bytes):
    assert send_until_ended(new_client(coordinator.address), bytes(part_bytes)) > 2 * MIB
    assert ping(coordinator.address)["alive"]


@pytest.mark.claim("unfinished-message")
def test_the_limit_of_the_coordinator_is_that_of_all_clients_together(coordinator, new_client):
    """No one of them exceeds it; the one that holds most is ended."""
    small, large, other = (new_client(coordinator.address) for _ in range(3))
    for client, size in ((small, 1), (large, 3), (other, 1)):
        assert client.send_part(bytes(size * MIB))
    assert ended(small, large, other) == [large]
    assert small.is_connected()
    assert other.is_connected()


@pytest.mark.claim("unfinished-message")
@pytest.mark.parametrize("part_bytes", [512 * 1024, 1000])
def test_an_unfinished_message_to_a_trainer_costs_its_client_the_connection(trainer, new_client, part_bytes):
    address, receiver = trainer
    send_until_ended(new_client(address), bytes(part_bytes))
    with senders() as new:
        new(address).open().sample(0, 0)
        assert [one.key for one in receiver.get(PATIENCE_S)] == [(0, 0)]


@pytest.mark.claim("unfinished-message")
def test_one_that_sends_finished_messages_first_is_no_exception(trainer, new_client):
    address, receiver = trainer
    client = new_client(address)
    for message in (open_message(0), sample_message(0, 0)):
        for number, part in enumerate(message, start=1):
            client.send_part(bytes(part), more=number < len(message))
    assert [one.key for one in receiver.get(PATIENCE_S)] == [(0, 0)]
    send_until_ended(client, bytes(100_000))


def test_a_message_that_takes_its_time_and_many_that_are_finished_are_received(trainer, new_client):
    """Far more bytes than the limit, over one connection, in messages below it; a long pause within one of them."""
    address, receiver = trainer
    slow = new_client(address)
    for part in open_message(7):
        slow.send_part(bytes(part), more=part is not None and part != open_message(7)[-1])
    first, *rest = sample_message(7, 0)
    slow.send_part(first)
    with senders() as new:
        sender = new(address).open(0)
        noise = bytes(900_000)
        for _ in range(40):
            sender.send([noise])
            while sender.receive()[0] is not MessageKind.REFUSED:
                pass
        sender.sample(0, 0, {"u": field(0, 0)})
        assert [one.key for one in receiver.get(PATIENCE_S)] == [(0, 0)]
    for number, part in enumerate(rest, start=1):
        slow.send_part(bytes(part), more=number < len(rest))
    assert [one.key for one in receiver.get(PATIENCE_S)] == [(7, 0)]
    assert slow.is_connected()
