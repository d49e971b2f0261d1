"""The publisher and its subscribers over real sockets: what is delivered, copied, refused, and found again."""

import copy
import errno
import json
import mmap
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
import zmq
from process_states import error_in_fork
from torch import nn

from paramserver.config import PublishConfig
from paramserver.errors import ClientError, RunOver, TaskError, TrainingError, UnsupportedConfiguration
from paramserver.online.protocol import Header, MessageKind
from paramserver.online.publisher import NUM_READERS, TURN_S, ModelPublisher, ModelVersion, SubscriberRequests
from paramserver.online.weights import BFLOAT16, DIFFERENCE, Description, Version, WeightsRequest
from paramserver.platform import SHARES_MEMORY, host_number, open_memory_file
from paramserver.subscriber import Subscriber

TIMEOUT_S = 20


class Model(nn.Module):
    """Every element is the number of the version."""

    def __init__(self, size=1000):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, 3))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def set_to(self, step):
        with torch.no_grad():
            self.weight.fill_(step)
            self.mean.fill_(step)
        return self


@contextmanager
def published(folder, config=None, run="run", generation=1, step=0):
    config = config or PublishConfig()
    with ModelPublisher(config, run, generation, step, folder / "publisher.json") as publisher:
        yield publisher


def train(publisher, model, step):
    """Make a version; return whether it was copied."""
    model.set_to(step)
    if is_wanted := publisher.is_wanted(step):
        publisher.publish(step, model.state_dict())
    return is_wanted


def train_until(publisher, model, step, condition):
    """Make versions until a condition holds; return the last one, and how many were copied."""
    deadline, copies = time.monotonic() + TIMEOUT_S, 0
    while not condition():
        assert time.monotonic() < deadline
        copies += train(publisher, model, step)
        step += 1
        time.sleep(0.001)  # the updates of a run take time too
    return step - 1, copies


@contextmanager
def training(publisher, model):
    """Make versions in a thread."""
    ended = threading.Event()

    def run():
        step = 0
        while not ended.is_set():
            train(publisher, model, step)
            step += 1
            ended.wait(0.001)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def assert_whole(weights):
    assert {float(value) for array in weights.values() for value in (array.min(), array.max())} == {weights.step}


def test_versions_are_whole_and_each_is_newer_than_the_one_before(tmp_path):
    with published(tmp_path) as publisher, training(publisher, Model()), Subscriber(publisher.address) as model:
        weights = model.latest(timeout_s=TIMEOUT_S)
        for _ in range(50):
            assert_whole(weights)
            newer = model.newer_than(weights.version, timeout_s=TIMEOUT_S)
            assert newer.version > weights.version
            weights = newer
    assert weights["weight"].shape == (1000, 3)
    assert weights["mean"].dtype == np.float64


needs_shared_memory = pytest.mark.skipif(not SHARES_MEMORY, reason="memory is not shared here")


@needs_shared_memory
def test_on_one_host_a_version_is_mapped_and_stays_as_it_was(tmp_path):
    model = Model()
    with published(tmp_path) as publisher, ExitStack() as stack:
        train(publisher, model, 5)
        subscribers = [stack.enter_context(Subscriber(publisher.address)) for _ in range(3)]
        held = [subscriber.latest(timeout_s=TIMEOUT_S) for subscriber in subscribers]
        with training(publisher, model):
            newer = [subscriber.newer_than(Version(1, 5), timeout_s=TIMEOUT_S) for subscriber in subscribers]
    # Also once the publisher has dropped it and has ended.
    for weights in (*held, *newer):
        assert_whole(weights)
        assert isinstance(weights.data.obj, mmap.mmap)
        assert not weights["weight"].flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            weights["weight"][0] = 0
    assert {weights.step for weights in held} == {5}


@needs_shared_memory
@pytest.mark.parametrize("fault", ["gone", "other"])
def test_values_that_cannot_be_mapped_are_sent(tmp_path, monkeypatch, fault):
    def fails(pid, descriptor):
        calls.append(descriptor)
        if fault == "gone":
            raise FileNotFoundError
        return os.open(other, os.O_RDONLY)  # of the same size

    calls, model, other = [], Model(), tmp_path / "other"
    monkeypatch.setattr("paramserver.subscriber.open_memory_file", fails)
    with published(tmp_path) as publisher, Subscriber(publisher.address) as subscriber:
        train(publisher, model, 1)
        other.write_bytes(bytes(12_032 + 8 + 32))  # two tensors and an id
        assert_whole(weights := subscriber.latest(timeout_s=TIMEOUT_S))
        assert not isinstance(weights.data, memoryview) or not isinstance(weights.data.obj, mmap.mmap)
        # After three failures it is as if none could be: the values are sent from then on.
        with training(publisher, model):
            for _ in range(5):
                weights = subscriber.newer_than(weights.version, timeout_s=TIMEOUT_S)
                assert_whole(weights)
        assert len(calls) == 3


@needs_shared_memory
def test_a_subscriber_that_looks_later_maps_the_version_that_was_for_it(tmp_path):
    model = Model()
    with published(tmp_path) as publisher, ExitStack() as stack:
        first, second = (stack.enter_context(Subscriber(publisher.address)) for _ in range(2))
        with training(publisher, model):
            version = first.latest(timeout_s=TIMEOUT_S).version
            newest, deadline = second.latest(timeout_s=TIMEOUT_S), time.monotonic() + TIMEOUT_S
            # Between its calls, each of which asks for the next version, others are made for another subscriber.
            while (weights := first.newer_than(version, timeout_s=0)) is None:
                assert time.monotonic() < deadline
                for _ in range(2):
                    newest = second.newer_than(newest.version, timeout_s=TIMEOUT_S)
        assert_whole(weights)
        assert version < weights.version < newest.version
        assert isinstance(weights.data.obj, mmap.mmap)


def asking(host, timeout_s=9.0):
    return [Header(MessageKind.GET).pack(), WeightsRequest(timeout_s=timeout_s, waits=True, host=host).pack()]


def test_subscribers_of_this_host_read_in_turns():
    requests = SubscriberRequests("run", (Version(1, 0),), lambda: True)
    here = [str(number).encode() for number in range(2 * NUM_READERS + 2)]
    for peer in here:
        assert not requests.handle(peer, asking(host_number()), 0.0)
    assert not requests.handle(b"elsewhere", asking(""), 0.0)
    sent = [peer for peer, _ in requests.publish(ModelVersion(Version(1, 1), Model().state_dict()), 1.0)]
    assert sent == [*here[:NUM_READERS], b"elsewhere"]
    assert not requests.waits_for_newer
    # One of them asks again: the next one's turn. The others take longer than a turn.
    replies = requests.handle(here[0], asking(host_number()), 1.0)
    assert [peer for peer, _ in replies] == [here[NUM_READERS]]
    assert requests.waits_for_newer
    assert requests.next_at() == pytest.approx(1.0 + TURN_S)
    replies = requests.expire(requests.next_at())
    assert [peer for peer, _ in replies] == here[NUM_READERS + 1 : 2 * NUM_READERS + 1]
    # The last one has had no turn when the run ends.
    (peer, [header, _]), *over = requests.end()
    assert (peer, Header.unpack(header).kind) == (here[-1], MessageKind.WEIGHTS)
    assert {peer for peer, _ in over} == {*here, b"elsewhere"}


def test_a_subscriber_whose_turn_does_not_come_is_answered_when_its_time_is_over():
    requests = SubscriberRequests("run", (Version(1, 0),), lambda: False)
    requests.publish(ModelVersion(Version(1, 1), Model().state_dict()), 0.0)
    readers = [str(number).encode() for number in range(NUM_READERS)]
    for peer in readers:
        assert requests.handle(peer, asking(host_number()), 0.0)
    assert not requests.handle(b"late", asking(host_number(), TURN_S / 2), 0.0)
    assert requests.next_at() == pytest.approx(TURN_S / 2)
    assert [peer for peer, _ in requests.expire(TURN_S / 2)] == [b"late"]
    assert requests.handle(b"at once", asking(host_number(), 0.0), 0.0)


@needs_shared_memory
def test_memory_of_a_version_is_freed_when_its_subscriber_has_left():
    requests = SubscriberRequests("run", (Version(1, 0),), lambda: False)
    asks = [Header(MessageKind.GET).pack(), WeightsRequest(host=host_number()).pack()]
    requests.publish(ModelVersion(Version(1, 1), Model().state_dict()), 0.0)
    assert requests.handle(b"a", asks, 0.0)
    memory = weakref.ref(requests.newest.memory)
    requests.publish(ModelVersion(Version(1, 2), Model().state_dict()), 0.0)
    requests.expire(0.0)
    requests.expire(9.0)
    assert memory() is not None
    requests.expire(11.0)
    assert memory() is None
    assert requests.handle(b"a", asks, 12.0)
    memory = weakref.ref(requests.newest.memory)
    requests.publish(ModelVersion(Version(1, 3), Model().state_dict()), 0.0)
    assert requests.handle(b"a", asks, 13.0)  # it has what it asked for before
    assert memory() is None


@needs_shared_memory
def test_a_version_that_is_dropped_meanwhile_is_asked_for_again(tmp_path, monkeypatch):
    def opens(pid, descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise FileNotFoundError
        return open_memory_file(pid, descriptor)

    calls, model = [], Model()
    monkeypatch.setattr("paramserver.subscriber.open_memory_file", opens)
    with published(tmp_path) as publisher, Subscriber(publisher.address) as subscriber, training(publisher, model):
        found = [subscriber.latest(timeout_s=TIMEOUT_S)]
        for _ in range(4):
            found.append(subscriber.newer_than(found[-1].version, timeout_s=TIMEOUT_S))
    for weights in found:
        assert_whole(weights)
    assert [isinstance(weights.data, memoryview) for weights in found] == [True, False, True, True, True]
    assert len(calls) == 5


@needs_shared_memory
def test_without_a_descriptor_a_version_is_sent(tmp_path, monkeypatch, caplog):
    def fails(name, sealable):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("paramserver.online.publisher.memory_file", fails)
    with published(tmp_path) as publisher, Subscriber(publisher.address) as subscriber:
        train(publisher, Model(), 3)
        assert_whole(subscriber.latest(timeout_s=TIMEOUT_S))
    assert "as they cannot map them ([Errno 24] Too many open files)" in caplog.text


@needs_shared_memory
def test_a_version_closes_its_file():
    version = ModelVersion(Version(1, 5), Model().state_dict())
    descriptor = version.memory.file.descriptor
    os.close(open_memory_file(os.getpid(), descriptor))
    del version
    with pytest.raises(FileNotFoundError):
        open_memory_file(os.getpid(), descriptor)


def test_without_subscribers_only_the_first_version_is_copied(tmp_path):
    model = Model()
    with published(tmp_path) as publisher:
        assert [train(publisher, model, step) for step in range(5)] == [True, False, False, False, False]
        with Subscriber(publisher.address) as subscriber:
            # Of version 4 there is no copy yet: the subscriber waits for one, which is made at the next opportunity.
            waiting = threading.Thread(target=subscriber.latest, args=(TIMEOUT_S,))
            waiting.start()
            _, copies = train_until(publisher, model, 5, lambda: not waiting.is_alive())
            waiting.join()
        assert copies == 1
        assert train(publisher, model, 1_000_000) is False


def test_any_number_of_subscribers_share_one_copy_of_a_version(tmp_path):
    model, received = Model(), []

    def follow(address):
        with Subscriber(address) as subscriber:
            version = subscriber.latest(TIMEOUT_S).version
            for _ in range(5):
                version = subscriber.newer_than(version, TIMEOUT_S).version
                received.append(version)

    with published(tmp_path, PublishConfig(every=10)) as publisher:
        threads = [threading.Thread(target=follow, args=(publisher.address,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        last, copies = train_until(publisher, model, 0, lambda: not any(thread.is_alive() for thread in threads))
        assert copies <= last // 10 + 1
    steps = sorted({version.step for version in received})
    assert all(after - before >= 10 for before, after in pairwise(steps))
    assert len(received) == 40


def test_versions_have_a_distance_in_seconds_too(tmp_path):
    model = Model()
    with published(tmp_path, PublishConfig(every_s=3600.0)) as publisher, Subscriber(publisher.address) as subscriber:
        train(publisher, model, 0)
        weights = subscriber.latest(TIMEOUT_S)
        train(publisher, model, 1)
        assert subscriber.newer_than(weights.version, 0.3) is None
        assert train(publisher, model, 2) is False


def test_a_timeout_of_0_asks_and_returns_what_has_arrived(tmp_path):
    """An actor that never waits still gets newer versions."""
    with published(tmp_path) as publisher, training(publisher, Model()), Subscriber(publisher.address) as model:
        weights, steps, deadline = model.latest(TIMEOUT_S), [], time.monotonic() + TIMEOUT_S
        while len(steps) < 5:
            assert time.monotonic() < deadline
            weights = model.newer_than(weights.version, timeout_s=0) or weights
            steps += [weights.step] if weights.step > max(steps, default=0) else []


def test_without_a_newer_version_the_latest_is_the_one_before(tmp_path):
    with published(tmp_path) as publisher, Subscriber(publisher.address) as model:
        train(publisher, Model(), 0)
        first = model.latest(TIMEOUT_S)
        began = time.monotonic()
        assert model.latest(TIMEOUT_S) is first
        assert time.monotonic() - began < TIMEOUT_S / 2  # no wait for what nobody makes
        assert model.newer_than(first.version, 0.2) is None
        assert model.newer_than(Version(0, 0), 0.2) is first


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_rounded_versions_are_the_same_with_and_without_differences(tmp_path, size):
    """Bit for bit, over versions of which most elements stay as they are after rounding."""
    torch.manual_seed(0)
    model = Model(size)
    with published(tmp_path) as publisher, Subscriber(publisher.address, encoding="bfloat16") as follower:
        with torch.no_grad():
            model.weight.normal_()
        for step in range(30):
            with torch.no_grad():
                model.weight += 1e-4 * torch.randn_like(model.weight)
            received = []
            wanted = publisher.is_wanted(step)  # from now on a request waits for this version
            thread = threading.Thread(target=lambda into=received: into.append(follower.latest(TIMEOUT_S)))
            thread.start()
            deadline = time.monotonic() + TIMEOUT_S
            while thread.is_alive():
                assert time.monotonic() < deadline
                if wanted:
                    publisher.publish(step, model.state_dict())
                thread.join(0.001)
                wanted = publisher.is_wanted(step)
            (weights,) = received
            with Subscriber(publisher.address, encoding="bfloat16") as other:
                whole = other.latest(TIMEOUT_S)
            assert weights.version == whole.version == Version(1, step)
            assert bytes(weights.data) == bytes(whole.data)
            rounded = model.weight.detach().to(torch.bfloat16).float().numpy()
            np.testing.assert_array_equal(weights["weight"], rounded)


def test_float64_is_rounded_by_way_of_float32():
    """As docs/protocol.md states: the nearest of the last one would be 1 + 2**-7."""
    values = torch.tensor([1 + 2**-7, 1 + 2**-8, 1 + 2**-8 + 2**-40], dtype=torch.float64)
    _, rounded = ModelVersion(Version(1, 0), {"w": values}).rounded
    assert np.frombuffer(rounded[:6], "<u2").tolist() == [0x3F81, 0x3F80, 0x3F80]


def encodings(requests, version, tensors, have):
    """The encoding in which a subscriber that has ``have`` is sent a version."""
    header = Header(MessageKind.GET, *have, attempt=1).pack()
    request = WeightsRequest("run", "bfloat16", 10.0, waits=True, holds=True).pack()
    ((_, frames),) = [
        *requests.handle(b"a", [header, request], 0.0),
        *requests.publish(ModelVersion(version, tensors), 0.0),
    ]
    return Description.unpack(frames[1]).encoding


def test_a_difference_is_sent_where_it_pays_and_its_version_is_kept():
    requests = SubscriberRequests("run", (Version(1, 0),), lambda: True)
    first = {"w": torch.randn(10_000)}
    assert encodings(requests, Version(1, 0), first, Version(0, 0)) == BFLOAT16
    few = {"w": first["w"].clone()}
    few["w"][7] += 1
    assert encodings(requests, Version(1, 1), few, Version(1, 0)) == DIFFERENCE
    assert encodings(requests, Version(1, 2), {"w": torch.randn(10_000)}, Version(1, 1)) == BFLOAT16
    assert encodings(requests, Version(1, 3), {"w": torch.randn(10_001)}, Version(1, 2)) == BFLOAT16
    requests.publish(ModelVersion(Version(1, 4), few), 0.0)
    assert encodings(requests, Version(1, 5), few, Version(1, 4)) == BFLOAT16  # which nobody was sent rounded
    for step in range(6, 14):
        assert encodings(requests, Version(1, step), few, Version(1, step - 1)) == DIFFERENCE
    assert encodings(requests, Version(1, 14), few, Version(1, 5)) == BFLOAT16  # that is not kept any more
    assert encodings(requests, Version(1, 15), few, Version(1, 12)) == DIFFERENCE


def test_a_version_of_a_higher_generation_is_newer_and_tells_what_was_taken_back(tmp_path, caplog):
    model = Model()
    with published(tmp_path) as publisher:
        subscriber = Subscriber(publisher.address)
        train(publisher, model, 150)
        assert subscriber.latest(TIMEOUT_S).version == Version(1, 150)
        publisher.suspend()
        address = publisher.address
    with subscriber, published(tmp_path, generation=2, step=100) as returned:
        assert returned.address == address  # the same port
        train(returned, model, 100)
        weights = subscriber.newer_than(Version(1, 150), TIMEOUT_S)
        assert weights.version == Version(2, 100)
        assert [weights.is_current(Version(1, step)) for step in (100, 101, 150)] == [True, False, False]
    assert "versions up to step 150 were taken back" in caplog.text


@pytest.mark.parametrize("name", ["first", "second"])
def test_another_run_at_the_same_address_is_reported(tmp_path, caplog, name):
    """Also one of the same name, in a folder of its own."""
    model = Model()
    with published(tmp_path, run=name) as publisher:
        subscriber = Subscriber(publisher.address)
        train(publisher, model, 500)
        subscriber.latest(TIMEOUT_S)
        publisher.suspend()
    (tmp_path / "other").mkdir()
    config = PublishConfig(port=int(publisher.address.rpartition(":")[2]))
    with subscriber, published(tmp_path / "other", config, run="second") as other:
        train(other, model, 3)
        assert subscriber.newer_than(Version(1, 500), TIMEOUT_S).run_name == "second"
    assert "another run (second) publishes" in caplog.text


def test_the_end_of_the_run_ends_every_wait(tmp_path):
    with published(tmp_path) as publisher:
        train(publisher, Model(), 0)
        waits, idle = Subscriber(publisher.address), Subscriber(publisher.address)
        version = waits.latest(TIMEOUT_S).version
        idle.latest(TIMEOUT_S)
        ended = []

        def wait():
            with pytest.raises(RunOver, match="the run has ended"):
                waits.newer_than(version, TIMEOUT_S)
            ended.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
    began = time.monotonic()
    thread.join()
    assert ended[0] - began < TIMEOUT_S / 2
    for _ in range(2):  # and so does every later call
        with pytest.raises(RunOver):
            idle.latest(TIMEOUT_S)
    waits.close()
    waits.close()
    idle.close()


def test_without_a_publisher_a_wait_has_an_end():
    with Subscriber("tcp://127.0.0.1:1") as model:
        assert model.newer_than(Version(1, 0), 0.3) is None
        with pytest.raises(ClientError, match=r"has sent no version of the model within 0\.3 s; see that the run"):
            model.latest(0.3)


@pytest.mark.parametrize("timeout_s", [-1, float("inf"), float("nan"), None, "1"])
def test_a_timeout_is_a_number_of_seconds(timeout_s):
    with Subscriber("tcp://127.0.0.1:1") as model, pytest.raises(ClientError, match="must be a number of seconds"):
        model.latest(timeout_s)


@pytest.mark.parametrize("version", [(1, 2**70), (-1, 0), (1,), None, "ab", (1, True)])
def test_what_is_no_version_is_refused_and_the_next_call_works(tmp_path, version):
    with published(tmp_path) as publisher, Subscriber(publisher.address) as model:
        train(publisher, Model(), 4)
        with pytest.raises(ClientError, match=r"version|generation|step"):
            model.newer_than(version, 0.1)
        assert model.latest(TIMEOUT_S).step == 4


def test_a_request_that_is_refused_is_not_waited_for(tmp_path, monkeypatch):
    with published(tmp_path) as publisher, Subscriber(publisher.address) as model:
        train(publisher, Model(), 4)
        with monkeypatch.context() as patched:
            patched.setattr(WeightsRequest, "pack", lambda self: b"[]")
            with pytest.raises(ClientError, match=r"refused this subscriber: .* must be a JSON object"):
                model.latest(TIMEOUT_S)
        assert model.latest(TIMEOUT_S).step == 4


def test_a_fork_cannot_use_a_subscriber_and_does_not_disturb_it(tmp_path):
    with published(tmp_path) as publisher, Subscriber(publisher.address) as model:
        train(publisher, Model(), 4)
        version = model.latest(TIMEOUT_S).version
        for call in (lambda: model.latest(0), lambda: model.newer_than(version, 1)):
            assert "must be used by the process that made it" in error_in_fork(call)
        assert error_in_fork(model.close) == ""
        assert model.latest(TIMEOUT_S).step == 4


def test_a_subscriber_that_is_closed_says_so():
    with Subscriber("tcp://127.0.0.1:1") as model:
        pass
    for call in (lambda: model.latest(1), lambda: model.newer_than((0, 0), 1)):
        with pytest.raises(ClientError, match="this subscriber is closed; make another one"):
            call()


@pytest.mark.parametrize("encoding", ["exact", "bfloat16"])
def test_weights_can_be_copied_and_sent_to_another_process(tmp_path, encoding):
    with published(tmp_path) as publisher, Subscriber(publisher.address, encoding=encoding) as model:
        train(publisher, Model(), 4)
        weights = model.latest(TIMEOUT_S)
        for copied in (pickle.loads(pickle.dumps(weights)), copy.deepcopy(weights)):
            assert (copied.version, list(copied)) == (weights.version, list(weights))
            assert_whole(copied)


@pytest.mark.parametrize(
    ("address", "options", "text"),
    [
        ("127.0.0.1:5", {}, "must be tcp://host:port"),
        ("tcp://10.1.2.3:5", {}, "keys .None. must be given"),
        ("tcp://127.0.0.1:5", {"encoding": "int8"}, "encoding .int8. must be exact or bfloat16"),
    ],
)
def test_a_subscriber_is_refused_in_one_sentence(address, options, text):
    with pytest.raises(ClientError, match=text):
        Subscriber(address, **options)


def test_keys_are_required_beyond_loopback(tmp_path):
    with pytest.raises(UnsupportedConfiguration, match=r"publish\.keys \(null\) must be given with publish\.address 0"):
        ModelPublisher(PublishConfig(address="0.0.0.0"), "run", 1, 0, tmp_path / "publisher.json")


def test_with_keys_only_their_owners_subscribe(tmp_path):
    from paramserver.online.security import make_keys

    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "others")
    with published(tmp_path, PublishConfig(keys=str(tmp_path / "keys"))) as publisher:
        train(publisher, Model(), 0)
        with Subscriber(publisher.address, keys=tmp_path / "keys") as model:
            assert_whole(model.latest(TIMEOUT_S))
        hint = "the public key of this client is in the folder clients of its keys"
        with Subscriber(publisher.address, keys=tmp_path / "others") as model, pytest.raises(ClientError, match=hint):
            model.latest(1.0)
        with Subscriber(publisher.address) as model, pytest.raises(ClientError):
            model.latest(0.5)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([b"x"], "a header must have"),
        ([Header(MessageKind.GET).pack()], "GET is nothing"),
        ([Header(MessageKind.HELLO).pack(), b"{}"], "HELLO is nothing that a publisher"),
        ([Header(MessageKind.GET).pack(), b"[]"], "must be a JSON object"),
        ([b"ps\xff" + Header(MessageKind.GET).pack()[3:], b"{}"], r"protocol version \(255\) must be"),
    ],
)
def test_what_is_no_request_is_refused_and_the_publisher_continues(tmp_path, frames, text):
    with published(tmp_path) as publisher, zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        train(publisher, Model(), 0)
        peer.connect(publisher.address)
        peer.send_multipart(frames)
        assert peer.poll(1000 * TIMEOUT_S)
        header, message = peer.recv_multipart()
        assert Header.unpack(header).kind is MessageKind.REFUSED
        assert re.search(text, message.decode())
        with Subscriber(publisher.address) as model:
            assert_whole(model.latest(TIMEOUT_S))


def test_a_subscriber_that_never_reads_delays_no_other(tmp_path):
    model, request = Model(200_000), WeightsRequest("run", "exact", 10.0, waits=True).pack()
    with (
        published(tmp_path) as publisher,
        training(publisher, model),
        Subscriber(publisher.address) as follower,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as slow,
    ):
        slow.linger, slow.rcvhwm = 0, 1
        slow.connect(publisher.address)
        version = follower.latest(TIMEOUT_S).version
        for number in range(1, 20):
            slow.send_multipart([Header(MessageKind.GET, attempt=number).pack(), request])
            version = follower.newer_than(version, TIMEOUT_S).version


@pytest.mark.parametrize("kind", ["sparse", "float8"])
def test_a_tensor_that_no_subscriber_can_receive_is_refused_by_name(kind):
    tensor = torch.eye(2).to_sparse() if kind == "sparse" else torch.zeros(2).to(torch.float8_e4m3fn)
    with pytest.raises(TaskError, match="publish cannot send w of the model, which is of"):
        ModelVersion(Version(1, 0), {"w": tensor})


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.float16, torch.complex64, torch.bfloat16]
)
def test_every_other_dtype_arrives(tmp_path, dtype):
    model = nn.Module()
    model.register_buffer("values", torch.tensor([[0.0, 1.0, 2.0]]).to(dtype).t())
    with published(tmp_path) as publisher, Subscriber(publisher.address) as subscriber:
        assert publisher.is_wanted(0)
        publisher.publish(0, model.state_dict())
        received = subscriber.latest(TIMEOUT_S).state_dict()["values"]
    expected = model.values.float() if dtype is torch.bfloat16 else model.values
    assert torch.equal(received, expected.contiguous())


def test_a_file_that_is_not_the_publishers_is_named(tmp_path):
    (tmp_path / "publisher.json").write_text(json.dumps({"port": "x"}))
    with pytest.raises(TrainingError, match=r"publisher\.json must be what the publisher wrote there"):
        ModelPublisher(PublishConfig(), "run", 1, 0, tmp_path / "publisher.json")


def test_a_run_that_has_lost_count_of_its_generations_is_another_one(tmp_path):
    stored = []
    for generation, step in ((3, 7), (1, 0), (2, 5)):
        with published(tmp_path, generation=generation, step=step):
            stored.append(json.loads((tmp_path / "publisher.json").read_text()))
    assert [one["starts"] for one in stored] == [[[3, 7]], [[1, 0]], [[1, 0], [2, 5]]]
    assert stored[0]["id"] != stored[1]["id"] == stored[2]["id"]


def test_a_port_that_is_taken_is_named(tmp_path):
    with published(tmp_path) as publisher:
        port = int(publisher.address.rpartition(":")[2])
        second = ModelPublisher(PublishConfig(port=port), "run", 1, 0, tmp_path / "publisher.json")
        with pytest.raises(UnsupportedConfiguration, match=rf"publish\.port \({port}\) on publish\.address"), second:
            pass


def test_a_subscriber_needs_no_torch():
    code = "import sys, paramserver.subscriber; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
