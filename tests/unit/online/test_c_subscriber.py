"""The subscriber in C, with the compiler's sanitizers, against publishers and against what pretends to be one.

Where it is asked in a particular order, so is the one in Python.
"""

import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import zmq
from c_client import CSubscriber, missing, prepare
from torch import nn

from paramserver.config import PublishConfig
from paramserver.errors import ClientError, RunOver
from paramserver.online.protocol import VERSION, Header, MessageKind, pack_json
from paramserver.online.publisher import ModelPublisher
from paramserver.online.security import make_keys
from paramserver.online.weights import Version
from paramserver.subscriber import Subscriber

if missing():
    pytest.skip(missing(), allow_module_level=True)

SEED, DEADLINE_S = 3, 20


@pytest.fixture(scope="module", autouse=True)
def _program():
    prepare(CSubscriber)


class Counter(nn.Module):
    """All of its values are the number of its version."""

    def __init__(self, size=300):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, 2))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def set(self, value):
        for tensor in self.state_dict().values():
            tensor.fill_(value)


@contextmanager
def publishing(folder, generation=1, step=0, run="run", **config):
    made = ModelPublisher(PublishConfig(**config), run, generation, step, folder / "publisher.json")
    with made:
        yield made


class Training:
    """Makes versions in a thread of its own while the block lasts, then suspends their publisher if asked to."""

    def __init__(self, publisher, generation, step, is_lost=False):
        self._publisher, self._generation, self.step, self._is_lost = publisher, generation, step, is_lost
        self._model, self._ends, self.num_copies = Counter(), threading.Event(), 0
        self._thread = threading.Thread(target=self._train)

    def _train(self):
        while not self._ends.wait(0.001):
            self.step += 1
            self._model.set(1000 * self._generation + self.step)
            if self._publisher.is_wanted(self.step):
                self.num_copies += 1
                self._publisher.publish(self.step, self._model.state_dict())

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._ends.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        if self._is_lost:
            self._publisher.suspend()


def publish(publisher, step, model):
    """Publish one version once it is asked for."""
    deadline = time.monotonic() + DEADLINE_S
    while not publisher.is_wanted(step):
        assert time.monotonic() < deadline, "no subscriber has asked"
        time.sleep(0.001)
    publisher.publish(step, model.state_dict())


def check(weights):
    """It is one version, whole."""
    value = 1000 * weights.version.generation + weights.step
    assert sorted(weights) == ["count", "weight"]
    assert {*weights["weight"].flat, *weights["count"].flat} == {value}
    return weights.version


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as one:
        yield one


@pytest.fixture
def router():
    """A socket that pretends to be a publisher; its address."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as one:
        one.linger = 0
        one.rcvtimeo = 1000 * DEADLINE_S
        one.bind("tcp://127.0.0.1:*")
        yield one, one.last_endpoint.decode()


def receive(router):
    """The next request: who has sent it, its header and its JSON."""
    peer, first, body = router.recv_multipart()
    return peer, Header.unpack(first), json.loads(body)


def reply(router, peer, header, kind, version=(0, 0), frames=()):
    first = Header(kind, *version, attempt=header.attempt).pack()
    router.send_multipart([peer, first, *frames])


both = pytest.mark.parametrize("subscriber_class", [Subscriber, CSubscriber])
ABOUT = {"run": "a", "encoding": "exact", "tensors": [["w", "<f4", [2]]], "starts": [[1, 0]], "base": None}
VALUES = np.array([0.5, -1.0], "<f4").tobytes()


# What arrives.


def test_tensors_of_every_dtype_arrive_as_they_are(tmp_path, pool):
    model, expected = nn.Module(), {}
    for i, dtype in enumerate(["|b1", "|u1", "|i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16"]):
        values = np.arange(5 + i).astype(dtype)
        expected[f"t{i}"] = values
        model.register_buffer(f"t{i}", torch.from_numpy(values.copy()))
    rounded = torch.tensor([[1.0, -0.1, float("inf")], [3e38, 1e-40, 0.0]]).bfloat16()
    for name, tensor in (("rounded", rounded), ("number", torch.tensor(7)), ("empty", torch.zeros(3, 0))):
        model.register_buffer(name, tensor)
        expected[name] = tensor.float().numpy() if tensor is rounded else tensor.numpy()
    with publishing(tmp_path, run='a "b" \u00e9, {[') as publisher, CSubscriber(publisher.address) as subscriber:
        for step in (0, 1):  # the second request has the name of the run
            got = pool.submit(subscriber.newer_than, Version(1, step - 1) if step else Version(0, 0), DEADLINE_S)
            publish(publisher, step, model)
            weights = got.result()
            assert weights.version == Version(1, step)
            assert list(weights) == list(expected)
            for name, array in expected.items():
                assert (weights[name].dtype, weights[name].shape) == (array.dtype, array.shape)
                assert weights[name].tobytes() == array.tobytes(), name
    assert subscriber.log == ""


def test_values_may_be_rounded_on_their_way(tmp_path, pool):
    model = nn.Linear(7, 5).double()
    model.register_buffer("count", torch.tensor([2**40 + 1]))
    with publishing(tmp_path) as publisher, CSubscriber(publisher.address, encoding="bfloat16") as subscriber:
        for step in (4, 9):  # the second is no difference
            got = pool.submit(subscriber.newer_than, Version(1, step - 1), DEADLINE_S)
            publish(publisher, step, model)
            weights = got.result()
            for name, tensor in model.state_dict().items():
                expected = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
                assert weights[name].dtype == expected.numpy().dtype
                assert weights[name].tolist() == expected.tolist()
            with torch.no_grad():
                model.weight[0, 0] += 1


def test_versions_are_whole_and_never_older_while_publishers_are_lost_and_return(tmp_path):
    rng = random.Random(SEED)
    found, step = [Version(0, 0)], 0
    with publishing(tmp_path, 1) as publisher:
        subscriber = CSubscriber(publisher.address)
        publisher.suspend()
    with subscriber:
        for generation in range(2, 8):
            with (
                publishing(tmp_path, generation, step) as publisher,
                Training(publisher, generation, step, is_lost=True) as training,
            ):
                until = len(found) + rng.randrange(3, 60)
                deadline = time.monotonic() + DEADLINE_S
                while len(found) < until and time.monotonic() < deadline:
                    weights = subscriber.newer_than(found[-1], rng.choice([0, 0, 0.01, 1]))
                    if weights is not None:
                        assert check(weights) > found[-1]
                        found.append(weights.version)
                    if rng.random() < 0.2:
                        assert check(subscriber.latest(1)) >= found[-1]
                assert len(found) >= until
            assert subscriber.newer_than(found[-1]._replace(generation=generation + 1), 0) is None
            step = max(0, training.step - rng.randrange(100))  # back to a checkpoint
        first = {version.generation: version.step for version in reversed(found)}
        assert list(first)[:-1] == [*range(7, 1, -1)]
        # Several of them have returned to a step before the last one that was received, and it says so.
        last = {version.generation: version.step for version in found}
        returns = [g for g in range(3, 8) if not subscriber.is_current(Version(g - 1, last[g - 1]))]
        assert returns
        assert not subscriber.is_current(Version(2, 10**9))
        assert subscriber.is_current(found[-1])
    assert 1 <= subscriber.log.count("has returned to a checkpoint, and has taken back versions up to step ") <= 5
    assert len(subscriber.log.splitlines()) <= 5


def test_of_many_subscribers_each_has_its_own_pace(tmp_path):
    def read(subscriber, pause_s):
        seen = [Version(0, 0)]
        while len(seen) < 12:
            weights = subscriber.newer_than(seen[-1], DEADLINE_S)
            assert check(weights) > seen[-1]
            seen.append(weights.version)
            time.sleep(pause_s)
        return len(seen)

    with (
        publishing(tmp_path, every=2) as publisher,
        Training(publisher, 1, 0) as training,
        ThreadPoolExecutor(4) as pool,
    ):
        subscribers = [CSubscriber(publisher.address) for _ in range(4)]
        assert [*pool.map(read, subscribers, [0, 0.01, 0.02, 0.05])] == [12] * 4
        for subscriber in subscribers:
            subscriber.free()
        assert training.num_copies <= training.step // 2 + 1


# Waits.


def test_a_version_is_waited_for_as_long_as_is_asked(tmp_path, pool):
    model = Counter()
    with publishing(tmp_path) as publisher, CSubscriber(publisher.address) as subscriber:
        got = pool.submit(subscriber.latest, DEADLINE_S)
        model.set(1005)
        publish(publisher, 5, model)
        assert check(got.result()) == (1, 5)
        for timeout_s in (0, 0.3):
            began = time.monotonic()
            assert subscriber.newer_than(Version(1, 5), timeout_s) is None
            assert timeout_s <= time.monotonic() - began < timeout_s + 2
        assert subscriber.newer_than(Version(1, 3), 0).version == (1, 5)
        began = time.monotonic()
        assert subscriber.latest(DEADLINE_S).version == (1, 5)  # no newer one can be made
        assert time.monotonic() - began < 5
        got = pool.submit(subscriber.newer_than, Version(1, 5), DEADLINE_S)
        model.set(1006)
        publish(publisher, 6, model)
        assert check(got.result()) == (1, 6)


def test_without_a_publisher_it_fails_by_name_and_may_be_asked_again(tmp_path):
    with publishing(tmp_path) as publisher:
        address = publisher.address
    with CSubscriber(address) as subscriber:
        for timeout_s in (0, 0.3):
            began = time.monotonic()
            message = rf"the publisher of the run at {address} has sent no version of the model within {timeout_s:g} s;"
            with pytest.raises(ClientError, match=message):
                subscriber.latest(timeout_s)
            assert timeout_s <= time.monotonic() - began < timeout_s + 2
            assert subscriber.newer_than(Version(0, 0), 0) is None
        with publishing(tmp_path, 2) as publisher, Training(publisher, 2, 0):
            assert publisher.address == address
            assert check(subscriber.latest(DEADLINE_S)).generation == 2


@both
def test_a_subscriber_has_one_request_at_a_time(router, subscriber_class):
    socket, address = router
    with subscriber_class(address) as subscriber:
        deadline = time.monotonic() + DEADLINE_S
        while not socket.poll(0):  # until it is connected
            assert subscriber.newer_than(Version(0, 0), 0) is None
            assert time.monotonic() < deadline
        for _ in range(50):
            assert subscriber.newer_than(Version(0, 0), 0) is None
        peer, header, asked = receive(socket)
        assert header == Header(MessageKind.GET, attempt=1)
        asked.pop("host", None)
        assert asked == {"run": "", "encoding": "exact", "timeout_s": 0.0, "waits": True, "holds": False}
        assert not socket.poll(100)
        reply(socket, peer, header, MessageKind.WEIGHTS, Version(2, 7), [pack_json(ABOUT), VALUES])
        while (weights := subscriber.newer_than(Version(1, 9), 0)) is None:
            assert time.monotonic() < deadline
        assert (weights.version, weights["w"].tolist()) == (Version(2, 7), [0.5, -1.0])
        # The call that takes over a version asks for the next one.
        peer, header, asked = receive(socket)
        assert header == Header(MessageKind.GET, 2, 7, attempt=2)
        assert asked["run"] == "a"


@both
def test_what_comes_late_or_is_no_newer_is_not_taken_over(router, pool, subscriber_class):
    socket, address = router
    with subscriber_class(address) as subscriber:
        got = pool.submit(subscriber.newer_than, Version(1, 4), DEADLINE_S)
        peer, header, asked = receive(socket)
        assert (header.simulation, header.step, asked["timeout_s"]) == (1, 4, pytest.approx(DEADLINE_S, abs=5))
        # A publisher waits for ten minutes at most, and the subscriber asks again.
        reply(socket, peer, header, MessageKind.UNCHANGED)
        peer, header, asked = receive(socket)
        reply(socket, peer, header, MessageKind.WEIGHTS, Version(1, 5), [pack_json(ABOUT), VALUES])
        assert got.result().version == (1, 5)
        got = pool.submit(subscriber.latest, DEADLINE_S)
        peer, header, asked = receive(socket)
        assert (header.step, asked["waits"]) == (5, False)
        other = [pack_json(ABOUT), b"\1" * 8]
        reply(socket, peer, header._replace(attempt=header.attempt - 1), MessageKind.WEIGHTS, Version(1, 4), other)
        reply(socket, peer, header, MessageKind.UNCHANGED)
        weights = got.result()
        assert (weights.version, weights["w"].tolist()) == (Version(1, 5), [0.5, -1.0])
        # Of another run every version is newer.
        got = pool.submit(subscriber.newer_than, Version(1, 5), DEADLINE_S)
        peer, header, asked = receive(socket)
        about = pack_json({**ABOUT, "run": "b"})
        reply(socket, peer, header, MessageKind.WEIGHTS, Version(1, 1), [about, VALUES])
        assert got.result().version == (1, 1)
    if subscriber_class is CSubscriber:
        assert re.search(r'publishes versions of another run now: "b"$', subscriber.log.strip())


# Ends.


def test_over_ends_a_wait_and_every_call_after(tmp_path, pool):
    with publishing(tmp_path) as publisher, CSubscriber(publisher.address) as subscriber:
        got = pool.submit(subscriber.latest, DEADLINE_S)
        publish(publisher, 1, Counter())
        assert got.result().version == (1, 1)
        got = pool.submit(subscriber.newer_than, Version(1, 1), DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while not publisher.is_wanted(1) and not publisher._requests.waiting:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        publisher.close()
        for call in (got.result, lambda: subscriber.latest(1), lambda: subscriber.newer_than(Version(1, 1), 0)):
            with pytest.raises(RunOver, match=r"^the run has ended, and publishes no more versions$"):
                call()


def refused(header):
    return [header.pack(), b"not this one"]


def of_another_version(header):
    return [header.pack()[:2] + bytes([VERSION + 1]) + header.pack()[3:], b"not this one"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refused, r"the publisher of the run at \S+ refused this subscriber: not this one$"),
        (of_another_version, rf"protocol version \({VERSION + 1}\) must be {VERSION}; use the client of the same"),
    ],
)
def test_a_refusal_ends_it_with_its_reason(router, pool, answer, message):
    socket, address = router
    with CSubscriber(address) as subscriber:
        got = pool.submit(subscriber.latest, DEADLINE_S)
        peer, *_ = receive(socket)
        socket.send_multipart([peer, *answer(Header(MessageKind.REFUSED))])
        for call in (got.result, lambda: subscriber.latest(1)):
            with pytest.raises(ClientError, match=message):
                call()


def damaged_versions():
    """Description and values: cut at each length, with one byte replaced at random places, and chosen ones."""
    whole = pack_json({**ABOUT, "tensors": [["w", "<f4", [2, 1]], ["v", "bfloat16", [3]]]})
    values = bytes(64 + 6)
    rng = np.random.default_rng(SEED)
    found = [[b"", b""], [whole], [], [whole, values[:-1]], [whole, values + b"\0"], [b"[" * 1000, values]]
    for shape in ([2**40, 2**40], [2**62], [1] * 40, [-1], [None], 5, None):
        found.append([pack_json({**ABOUT, "tensors": [["w", "<f4", shape]]}), values])
    for tensor in (
        ["w", "<q4", [1]],
        ["w", "<f0", [1]],
        ["w", "<f", [1]],
        ["w", 4, [1]],
        [1, "<f4", [1]],
        ["w"],
        5,
        [],
    ):
        found.append([pack_json({**ABOUT, "tensors": [tensor]}), values])
    found += [[pack_json({**ABOUT, key: value}), values] for key in ABOUT for value in (None, 5, "x", [5], {"a": 1})]
    found += [[whole[:n], values] for n in range(1, len(whole), 9)]
    for _ in range(60):
        text = bytearray(whole)
        text[rng.integers(len(text))] = rng.choice(list(b'[]{}",:\\0-9eE \0n'))
        found.append([bytes(text), values])
    return found


def test_no_version_harms_the_subscriber(router, pool):
    """The sanitizers would end it. Most are refused by name; a digit that differs is still a version."""
    socket, address = router
    errors = []
    damaged = damaged_versions()
    for frames in damaged:
        subscriber = CSubscriber(address)
        got = pool.submit(subscriber.latest, DEADLINE_S)
        peer, header, _ = receive(socket)
        reply(socket, peer, header, MessageKind.WEIGHTS, Version(1, 1), frames)
        try:
            got.result()
        except ClientError as error:
            errors.append(str(error))
        subscriber.free()
    assert len(errors) > len(damaged) / 2
    assert [error for error in errors if not re.search("understood|whose dtype|16 dimensions", error)] == []


def test_each_misuse_has_its_sentence(tmp_path):
    for options, message in (
        ({"address": "tcp://127.0.0.1:many"}, r"address \(tcp://127\.0\.0\.1:many\) must be tcp://host:port"),
        ({"address": "tcp://192.0.2.1:5"}, r"keys \(NULL\) must be given with the address tcp://192\.0\.2\.1:5"),
        ({"encoding": "float8"}, r"encoding \(float8\) must be exact or bfloat16; correct it"),
        ({"keys": tmp_path / "nowhere"}, r"nowhere must be a key that can be read \(No such file"),
    ):
        with pytest.raises(ClientError, match=message):
            CSubscriber(**{"address": "tcp://127.0.0.1:9", **options})
    with CSubscriber("tcp://127.0.0.1:9") as subscriber:
        with pytest.raises(ClientError, match=r"timeout_s \(-1\) must be a number of seconds from 0"):
            subscriber.latest(-1)
        with pytest.raises(ClientError, match=r"timeout_s \(nan\) must be a number of seconds from 0"):
            subscriber.newer_than(Version(0, 0), float("nan"))
        with pytest.raises(ClientError, match=r"version \(-1, 4\) must have a generation and a step from 0"):
            subscriber.newer_than(Version(-1, 4), 1)
        with pytest.raises(ClientError, match="this subscriber was opened before; make another one"):
            subscriber._call("open", "tcp://127.0.0.1:9", "-", "exact")
        assert subscriber.newer_than(Version(0, 0), 0) is None


def test_keys(tmp_path):
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "keys", "other")
    make_keys(tmp_path / "strange")
    (tmp_path / "strange" / "server.key").write_bytes((tmp_path / "keys" / "server.key").read_bytes())
    with publishing(tmp_path, keys=str(tmp_path / "keys")) as publisher, Training(publisher, 1, 0):
        for keys in (tmp_path / "keys", tmp_path / "keys" / "other.key_secret"):
            with CSubscriber(publisher.address, keys=keys) as subscriber:
                check(subscriber.latest(DEADLINE_S))
        with (
            CSubscriber(publisher.address, keys=tmp_path / "strange") as subscriber,
            pytest.raises(ClientError, match="that the public key of this client is in the folder clients"),
        ):
            subscriber.latest(1)
