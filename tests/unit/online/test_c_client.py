"""The client in C, with the compiler's sanitizers, against a fake run: what it sends, when it waits, how it ends."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import pytest
from c_client import CClient, missing, prepare
from fake_run import (
    FakeRun,
    end_before_close,
    end_before_the_last_ack,
    refuse_33_messages,
    refuse_as_newer_version,
    sample,
    send_all,
)

from paramserver.cluster.simulation import SimulationEnvironment
from paramserver.distributed.timeouts import poll_until
from paramserver.errors import ClientError, RunOver
from paramserver.online.protocol import VERSION, ArrayDescriptor, Header, MessageKind, pack_json
from paramserver.online.security import ServerSecurity, make_keys

if missing():
    pytest.skip(missing(), allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def _program():
    prepare(CClient)


@pytest.fixture
def run():
    with FakeRun() as fake:
        yield fake


@pytest.fixture
def opened():
    """Opens clients that the test need not close."""
    clients = []

    def make(address=None, simulation=None, parameters=None, **options):
        client = CClient(address, **options)
        client.open(simulation, parameters)
        clients.append(client)
        return client

    yield make
    for client in clients:
        if client._process.returncode is None:
            client.free()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as one:
        yield one


# What arrives.


def test_samples_arrive_as_they_were_at_the_trainer_of_their_step(run):
    with CClient(run.address).open(7, [1.5, -2.0]) as client:
        send_all(client, range(10))
    run.wait_for(lambda: run.byes)
    assert run.byes == [Header(MessageKind.BYE, 7, 10)]
    for trainer in (0, 1):
        assert run.keys()[trainer] == [(7, s) for s in range(10) if (7 + s) % 2 == trainer]
        for header, fields in run.samples[trainer]:
            assert fields["temperature"].tolist() == sample(header.step)["temperature"].tolist()
    assert [(who, list(vector)) for who, _, vector in sorted(run.opened, key=str)] == [(0, [1.5, -2]), (1, [1.5, -2])]
    assert [(header.simulation, list(vector)) for header, vector in run.hellos] == [(7, [1.5, -2.0])]
    assert (client.sent, client.refused, client.log) == (10, 0, "")


@pytest.mark.parametrize("begins_at", [0, 4, 6, 8])
def test_the_end_of_another_attempt_counts_the_steps_that_the_run_had_before(run, begins_at):
    run.directory = replace(run.directory, first_step=6)
    with CClient(run.address, attempt=1).open(7) as client:
        send_all(client, range(begins_at, 10))
    run.wait_for(lambda: run.byes)
    assert run.byes == [Header(MessageKind.BYE, 7, 10 - max(begins_at - 6, 0), attempt=1)]


def test_the_members_of_a_group_send_parts(run):
    for member in range(2):
        with CClient(run.address, member=member, members=2, attempt=3).open(1) as client:
            client.send(0, {"temperature": np.full((1, 3), member, np.float32)})
            with pytest.raises(ClientError, match=r"shape \[2, 3\], or be a part of it .* this one has \[3, 3\]; resh"):
                client.put("temperature", np.zeros((3, 3), np.float32))
    assert [header for header, _ in run.samples[1]] == [Header(MessageKind.SAMPLE, 1, 0, i, 2, 3) for i in (0, 1)]
    assert [fields["temperature"].tolist() for _, fields in run.samples[1]] == [[[0.0] * 3], [[1.0] * 3]]


def test_fields_of_several_dtypes_and_a_single_number():
    fields = (ArrayDescriptor("u", "<f8", (2,)), ArrayDescriptor("n", "<i4", ()), ArrayDescriptor("v", "<f4", (1, 2)))
    with FakeRun(1, fields=fields, single_trainer=0) as run:
        with CClient(run.address).open(0) as client:
            u, v = np.array([0.1, 2], np.float32), np.array([[0.1, -1e300]])
            client.put("v", np.zeros((1, 2)))  # replaced below
            client.send(4, {"n": np.array(7, np.int32), "u": u, "v": v / 1e300})
            with pytest.raises(ClientError, match=r"field v \(-1e\+300\) must fit into float32; scale it"):
                client.put("v", v)
            with pytest.raises(ClientError, match="field n must be <i4, <f8 is not converted to it; convert it"):
                client.put("n", np.array(7.0))
            with pytest.raises(ClientError, match=r"field \(u\) must be in every sample, it is missing; put it too"):
                client.send(5, {"n": np.array(8, np.int32), "v": np.array([[np.inf, np.nan]])})
            client.send(5, {"u": u})  # what was put before is still there
        (first, second) = (fields for _, fields in run.samples[0])
    assert (first["u"].tolist(), first["n"].tolist()) == (u.astype(np.float64).tolist(), 7)
    assert first["v"].tolist() == (v / 1e300).astype(np.float32).tolist()
    assert (second["n"].tolist(), str(second["v"].tolist())) == (8, "[[inf, nan]]")


def test_all_comes_from_the_environment_of_a_simulation_that_the_run_started(run, own_environ, monkeypatch):
    environment = SimulationEnvironment(run.address, 8, (0.5, -3e-7), 2, 0, 1, None, "a secret")
    for name, value in environment.to_environ().items():
        monkeypatch.setenv(name, value)
    with CClient().open() as client:
        assert client.parameters.tolist() == [0.5, -3e-7]
        client.send(0, sample(0))
    assert run.hellos[0][0] == Header(MessageKind.HELLO, 8, attempt=2)
    assert run.hellos[0][1].tolist() == [0.5, -3e-7]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MEMBERS", "two", r"PARAMSERVER_MEMBERS \(two\) must be a whole number from 0"),
        ("ATTEMPT", "1" * 19, r"PARAMSERVER_ATTEMPT \(1+\) must be a whole number from 0"),
        ("PARAMETERS", '["a"]', r"PARAMSERVER_PARAMETERS \(\[\"a\"\]\) must be a list of numbers"),
        ("MEMBER", "3", r"member \(3\) must be below members \(1\)"),
    ],
)
def test_an_invalid_environment(own_environ, monkeypatch, name, value, message):
    monkeypatch.setenv("PARAMSERVER_ADDRESS", "tcp://127.0.0.1:1")
    monkeypatch.setenv("PARAMSERVER_SIMULATION", "0")
    monkeypatch.setenv(f"PARAMSERVER_{name}", value)
    with pytest.raises(ClientError, match=message):
        CClient().open()


# Back-pressure and faults.


def test_a_full_window_blocks_with_heartbeats_until_there_is_room(run, opened, pool):
    run.acknowledges = False
    client = opened(run.address, 0)
    send_all(client, [0, 1, 2, 4, 6])
    assert client.waited_s == 0
    held = pool.submit(client.send, 8, sample(8))
    run.wait_for(lambda: run.kinds(0).count(MessageKind.HEARTBEAT) >= 2)
    assert not held.done()
    assert run.keys()[0] == [(0, 0), (0, 2), (0, 4), (0, 6)]
    run.release()
    held.result(20)
    assert 1.5 < client.waited_s < 20
    client.close()
    assert run.byes == [Header(MessageKind.BYE, 0, 6)]


def test_a_silent_trainer_is_named_after_the_time(run, opened):
    run.answers = {MessageKind.SAMPLE: None, MessageKind.HEARTBEAT: None}
    client = opened(run.address, 0, timeout_s=0.6)
    send_all(client, [0, 2, 4, 6])
    began = time.monotonic()
    for _ in range(2):  # and every call after it
        with pytest.raises(ClientError, match=r"trainer 0 at tcp://127\.0\.0\.1:\d+ gave no sign of life for 0\.6 s"):
            client.send(8, sample(8))
    assert 0.55 < time.monotonic() - began < 5
    with pytest.raises(ClientError, match="gave no sign of life"):
        client.close()
    assert not run.byes


def test_a_trainer_that_is_not_replaced_in_time_fails(run, opened):
    run.acknowledges = False
    client = opened(run.address, 0, timeout_s=1.5)
    send_all(client, range(3))
    run.wait_for(lambda: len(run.samples[1]) == 1)
    run.drop(1)
    with pytest.raises(ClientError, match=r"to trainer 1 at \S+ was lost, and it was not replaced within 1.5 s"):
        client.close()
    assert "paramserver: trainer 1 at tcp://" in client.log


@pytest.mark.parametrize("who", ["coordinator", 0])
def test_over_ends_a_client_that_waits_and_every_call_after(run, opened, pool, who):
    run.acknowledges = False
    client = opened(run.address, 0)
    send_all(client, [0, 2, 4, 6])
    held = pool.submit(client.send, 8, sample(8))
    run.wait_for(lambda: run.kinds(0).count(MessageKind.HEARTBEAT) >= 1)
    run.send_to_all(who, MessageKind.OVER, b"max_steps is reached")
    with pytest.raises(RunOver, match=r"^max_steps is reached$"):
        held.result(20)
    with pytest.raises(RunOver, match=r"^max_steps is reached$"):
        client.close()
    assert (run.byes, client.sent) == ([], 4)


def test_over_after_the_last_ack_is_no_error(run, opened):
    client = opened(run.address, 0)
    client.send(0, sample(0))
    run.answers[MessageKind.BYE] = lambda header: [header.reply(MessageKind.OVER).pack()]
    client.close()


@pytest.mark.parametrize("who", ["coordinator", 0])
def test_over_of_one_process_does_not_hide_the_last_ack_of_another(run, opened, pool, who):
    client = opened(run.address, 0)
    end_before_the_last_ack(run, client, who)
    closing = pool.submit(client.close)
    assert not wait([closing], 0.5).done
    run.release()
    closing.result()
    assert client.sent == 2


def test_acks_that_came_before_the_run_has_ended_are_read_after_it(run, opened):
    client = opened(run.address, 0)
    ports = {int(address.rpartition(":")[2]) for address in run.directory.trainers}
    end_before_close(run, client)
    has_ended = lambda: ports.isdisjoint(client.connected_ports()) or None  # noqa: E731
    assert poll_until(time.monotonic() + 20, has_ended, threading.Event())
    client.close()
    assert client.sent == 2


def test_a_fork_cannot_use_a_client_and_does_not_disturb_it(run):
    with CClient(run.address).open(0) as client:
        send_all(client, range(3))
        client._call("fork")
        send_all(client, range(3, 9))
    run.wait_for(lambda: run.byes)
    assert run.byes == [Header(MessageKind.BYE, 0, 9)]


def test_calls_on_no_client_are_refused(opened, run):
    """As those of the client in Fortran are before ``open`` and after ``free``."""
    opened(run.address, 0)._call("none")


def test_refusals_are_counted_and_stop_nothing(run, opened):
    client = opened(run.address, 0)
    refuse_33_messages(run, client)
    lines = client.log.splitlines()
    assert len(lines) == 20
    assert lines[0].endswith(" refused a message: temperature must be finite")
    assert lines[1].endswith(" refused a message: step 0 is odd")


def test_a_refusal_by_the_run_has_its_reason(run):
    run.answers[MessageKind.HELLO] = lambda header: [header.reply(MessageKind.REFUSED).pack(), b"not this one"]
    with pytest.raises(ClientError, match=r"the run at \S+ refused this client: not this one$"):
        CClient(run.address).open(9)


def test_another_version_is_named(run):
    run.answers[MessageKind.HELLO] = refuse_as_newer_version
    with pytest.raises(ClientError, match=rf"protocol version \({VERSION + 1}\) must be {VERSION}; use the client"):
        CClient(run.address).open(0)


def test_a_welcome_in_other_bytes_of_the_same_meaning(run):
    text = run.directory.pack().decode()
    text = text.replace(", ", " ,\n\t").replace(": ", " :  ").replace("{", '{ "later": [{"a\\"]": [1, {}]}, "}"], ', 1)
    run.answers[MessageKind.HELLO] = lambda header: [header.reply(MessageKind.WELCOME).pack(), text.encode()]
    with CClient(run.address).open(0) as client:
        assert client.steps == 100
        send_all(client, range(4))
    assert run.keys() == {0: [(0, 0), (0, 2)], 1: [(0, 1), (0, 3)]}


def damaged_welcomes():
    """Cut at each length, and with one byte replaced at random places."""
    directory = {"trainers": ["tcp://127.0.0.1:1"], "single_trainer": None, "window": 4, "timeout_s": 1.0, "steps": 7}
    whole = pack_json({**directory, "fields": [["u", "<f4", [2, 3]]]})
    rng = np.random.default_rng(3)
    found = [b"", b"{}", b"\xff", b"[1]", b'{"trainers": 5}', b"\0", b'"', b"[" * 1000, whole + b"\0", b" " * (1 << 18)]
    found += [whole[:n] for n in range(1, len(whole), 5)]
    for _ in range(60):
        text = bytearray(whole)
        text[rng.integers(len(text))] = rng.choice(list(b'[]{}",:\\0-9eE \0n'))
        found.append(bytes(text))
    return found


def test_no_welcome_harms_the_client(run):
    """The sanitizers would end it. Most are refused by name; a digit that differs is still a welcome."""
    errors = []
    for text in damaged_welcomes():
        answer = [Header(MessageKind.WELCOME).pack(), text]
        run.answers[MessageKind.HELLO] = lambda header, answer=answer: answer
        client = CClient(run.address)
        try:
            client.open(0)
        except ClientError as error:
            errors.append(str(error))
        else:
            client.free()
    assert len(errors) > 40
    assert [error for error in errors if not re.search("understood|field|as the address of|too long", error)] == []


def test_without_a_run_and_with_a_bad_address(own_environ, monkeypatch):
    began = time.monotonic()
    with pytest.raises(ClientError, match=r"the run at tcp://\S+ gave no sign of life for 0\.3 s; see that it runs"):
        CClient("tcp://127.0.0.1:9", timeout_s=0.3).open(0)
    with pytest.raises(ClientError, match=r"address \(tcp://127\.0\.0\.1:many\) must be tcp://host:port"):
        CClient("tcp://127.0.0.1:many").open(0)
    with pytest.raises(ClientError, match=r"keys \(NULL\) must be given with the address tcp://192\.0\.2\.1:5"):
        CClient("tcp://192.0.2.1:5").open(0)
    with pytest.raises(ClientError, match=r"address \(NULL\) must be given where the run has not started"):
        CClient().open(0)
    with pytest.raises(ClientError, match=r"simulation \(-1\) must be given where the run has not started"):
        CClient("tcp://127.0.0.1:9").open()
    monkeypatch.setenv("PARAMSERVER_ADDRESS", "tcp://127.0.0.1:9")
    with pytest.raises(ClientError, match=r"^the run at tcp://127.0.0.1:9 is gone, no process has listened"):
        CClient(timeout_s=60).open(0)
    assert time.monotonic() - began < 20


def test_a_client_may_come_before_the_run(pool):
    with FakeRun() as run:
        port = int(run.address.rpartition(":")[2])
    opening = pool.submit(CClient(f"tcp://127.0.0.1:{port}", timeout_s=30).open, 5)
    with FakeRun(port=port) as run:
        opening.result(20).close()
        assert run.byes == [Header(MessageKind.BYE, 5)]


def test_each_misuse_has_its_sentence_and_sends_nothing(run, opened):
    client = opened(run.address, 0)
    for fields, message in (
        ({"pressure": np.zeros((2, 3), np.float32)}, r"field \(pressure\) must be one that the run declares"),
        (
            {"temperature": np.zeros((3, 2), np.float32)},
            r"must have the shape \[2, 3\], this one has \[3, 2\]; reshape",
        ),
        ({"temperature": np.zeros(6, np.float32)}, r"must have the shape \[2, 3\], this one has \[6\]"),
        ({"temperature": np.zeros((2, 3), np.int64)}, "must be <f4, <i8 is not converted to it"),
        ({}, r"field \(temperature\) must be in every sample"),
    ):
        with pytest.raises(ClientError, match=message):
            client.send(0, fields)
    client.send(3, sample(3))
    for step in (3, 2, -1, 100):
        with pytest.raises(ClientError, match=rf"step \({step}\) must be above the last one \(3\)"):
            client.send(step, sample(step))
    with pytest.raises(ClientError, match="this client was opened before; make another one"):
        client._call("open", "-", "-", 0, 0, -1, -1, -1, -1)
    client._call("close")
    client._call("close")
    with pytest.raises(ClientError, match="this client must be open; it is closed, make another one"):
        client._call("send", 4)
    assert run.keys() == {1: [(0, 3)]}


def test_a_client_that_is_freed_sends_no_bye_and_does_not_wait(run, opened):
    run.acknowledges = False
    client = opened(run.address, 0)
    with CClient(run.address) as unopened, pytest.raises(ClientError, match="call ps_client_open first"):
        unopened.send(0, {})
    send_all(client, range(3))
    began = time.monotonic()
    client.free()
    assert time.monotonic() - began < 5
    assert not run.byes


# Keys.


def test_keys(tmp_path):
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "keys", "other")
    make_keys(tmp_path / "strange")
    with FakeRun(security=lambda context: ServerSecurity(context, tmp_path / "keys")) as run:
        for number, keys in enumerate([tmp_path / "keys", tmp_path / "keys" / "other.key_secret"]):
            with CClient(run.address, keys=keys).open(number) as client:
                send_all(client, range(4))
        assert [header.simulation for header in run.byes] == [0, 1]
        (tmp_path / "strange" / "server.key").write_bytes((tmp_path / "keys" / "server.key").read_bytes())
        with pytest.raises(ClientError, match="that the public key of this client is in the folder clients"):
            CClient(run.address, keys=tmp_path / "strange", timeout_s=1.0).open(2)
        with pytest.raises(ClientError, match=r"nowhere must be a key that can be read \(No such file"):
            CClient(run.address, keys=tmp_path / "nowhere").open(3)
        (tmp_path / "strange" / "server.key").write_text("curve\n")
        with pytest.raises(ClientError, match=r"server\.key must hold a public-key = +of 40 characters"):
            CClient(run.address, keys=tmp_path / "strange").open(4)
