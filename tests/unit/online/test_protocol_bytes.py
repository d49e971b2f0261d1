"""The bytes on the wire are those of docs/protocol.md, which clients in other languages follow.

A change of them needs a new ``VERSION`` there and in the code.
"""

import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from c_client import CClient, CSubscriber, missing, prepare
from fake_run import FakeRun

from paramserver.client import Client
from paramserver.cluster.simulation import SimulationEnvironment
from paramserver.online.protocol import (
    VERSION,
    ArrayDescriptor,
    Header,
    MessageKind,
    SimulationReport,
    TrainerDirectory,
    TrainerJoined,
    pack_descriptor,
    pack_integers,
    pack_json,
    pack_opening,
    start_secret,
    unpack_descriptor,
    unpack_integers,
    unpack_json,
    unpack_parameters,
)
from paramserver.online.publisher import ModelVersion, SubscriberRequests
from paramserver.online.receiver import REASONS
from paramserver.online.weights import (
    EXACT,
    MAPPED,
    ROUNDED,
    Description,
    MappedFile,
    TensorLayout,
    Version,
    Weights,
    WeightsRequest,
    apply_difference,
    encode_difference,
)
from paramserver.subscriber import Subscriber

DOCUMENT = Path(__file__).parents[3] / "docs" / "protocol.md"
SECRET = start_secret(b"token", 3, 4)
U, N = np.array([[0.5, -1.0]], "<f4"), np.array([7], "<i8")
FIELDS = (ArrayDescriptor("u", "<f4", (2, 2)), ArrayDescriptor("n", "<i8", (2,)))
DIRECTORY = TrainerDirectory(("tcp://10.0.0.1:5556", "tcp://10.0.0.2:5556"), None, 64, 60.0, 100, FIELDS)
JOINED = TrainerJoined("tcp://10.0.0.1:5556", {3: 2}, {})
REPORT = SimulationReport({3: 2}, [(3, 1)], {"received": 2}, [3], {3: 1}, losses={3: 0.5})


def block(name):
    """Key -> the frames of it in a block of the document."""
    text = DOCUMENT.read_text().partition(f"<!-- {name}: begin -->\n```text\n")[2].partition("```")[0]
    messages = re.findall(r"^([A-Z]+)((?: +(?:hex|text) .*\n)+)", text, flags=re.MULTILINE)
    found = {key: re.findall(r"(hex|text) (.*)\n", frames) for key, frames in messages}
    return {
        key: [bytes.fromhex(text) if form == "hex" else text.encode() for form, text in frames]
        for key, frames in found.items()
    }


def documented():
    """Kind -> the frames of its message in the document."""
    return {MessageKind[kind]: frames for kind, frames in block("bytes").items()}


def header_of(kind):
    if kind in VERSIONS:
        return Header(kind, *VERSIONS[kind], attempt=2)
    return Header(kind, simulation=3, step=STEPS.get(kind, 0), member=1, members=2, attempt=4)


def packed(kind):
    """The frames that the code makes."""
    return [header_of(kind).pack(), *BODIES.get(kind, [])]


def version(step):
    """The one of the document."""
    weight = torch.tensor([[0.5, -1.0, step], [1.0, 2.0, 3.0]])
    return ModelVersion(Version(2, step), {"weight": weight, "count": torch.tensor(step)})


VERSIONS = {MessageKind.GET: (2, 100), MessageKind.WEIGHTS: (2, 101), MessageKind.UNCHANGED: (0, 0)}
STARTS = (Version(1, 0), Version(2, 90))
TENSORS = (TensorLayout("weight", "<f4", (2, 3)), TensorLayout("count", "<i8", ()))
STEPS = {MessageKind.SAMPLE: 7, MessageKind.ACK: 2, MessageKind.BYE: 1}
BODIES = {
    MessageKind.HELLO: pack_opening([1.5, -2.0], SECRET),
    MessageKind.OPEN: pack_opening([1.5, -2.0], SECRET),
    MessageKind.SAMPLE: [pack_descriptor({"u": U, "n": N}), U.tobytes(), N.tobytes()],
    MessageKind.HAD: [pack_integers([0, 2, 5])],
    MessageKind.ACK: [pack_integers([1])],
    MessageKind.WELCOME: [DIRECTORY.pack()],
    MessageKind.PONG: [pack_json({"alive": True})],
    MessageKind.REFUSED: [b"u must be finite, it holds a NaN or an infinity"],
    MessageKind.OVER: [b"the run wants no more samples"],
    MessageKind.JOIN: [b"token", JOINED.pack()],
    MessageKind.REPORT: [REPORT.pack()],
    MessageKind.GET: [WeightsRequest("run", EXACT, 0.0, waits=True).pack()],
    MessageKind.WEIGHTS: [Description("run", EXACT, TENSORS, STARTS).pack(), bytes(version(101).values)],
}


@pytest.mark.parametrize("kind", MessageKind, ids=lambda kind: kind.name)
def test_a_message_has_the_bytes_of_the_document(kind):
    assert documented()[kind] == packed(kind)


def test_the_bytes_of_the_document_are_read_as_what_they_mean():
    found = documented()
    for kind, (header, *_) in found.items():
        assert Header.unpack(header) == header_of(kind)
    for kind in (MessageKind.HELLO, MessageKind.OPEN):
        assert unpack_parameters(found[kind][1]).tolist() == [1.5, -2.0]
    assert TrainerDirectory.unpack(found[MessageKind.WELCOME][1]) == DIRECTORY
    assert unpack_descriptor(found[MessageKind.SAMPLE][1]) == (
        ArrayDescriptor("u", "<f4", (1, 2)),
        ArrayDescriptor("n", "<i8", (1,)),
    )
    assert unpack_integers(found[MessageKind.HAD][1]) == [0, 2, 5]
    assert TrainerJoined.unpack(found[MessageKind.JOIN][2]) == JOINED
    assert SimulationReport.unpack(found[MessageKind.REPORT][1]).received == REPORT.received
    assert unpack_json(found[MessageKind.PONG][1]) == {"alive": True}
    assert WeightsRequest.unpack(found[MessageKind.GET][1]) == WeightsRequest("run", EXACT, 0.0, waits=True)
    weights = Weights(Version(2, 101), Description.unpack(found[MessageKind.WEIGHTS][1]), found[MessageKind.WEIGHTS][2])
    assert {name: array.tolist() for name, array in weights.items()} == NEWEST


def test_the_tables_of_the_document_have_every_kind_and_reason():
    text = DOCUMENT.read_text()
    rows = re.findall(r"^\| (\d+) ([A-Z]+) \|", text, flags=re.MULTILINE)
    assert {(int(number), name) for number, name in rows} == {(kind.value, kind.name) for kind in MessageKind}
    assert f"| 2 | uint8 | version of the protocol: {VERSION} |" in text
    assert [reason for reason in REASONS if f"`{reason}`" not in text] == []


NEWEST = {"weight": [[0.5, -1.0, 101.0], [1.0, 2.0, 3.0]], "count": 101}


def replies(*steps, request):
    """What a publisher with these versions, each of which it has sent to another peer rounded, replies to a message."""
    requests = SubscriberRequests("run", STARTS, lambda: False)
    for step in steps:
        requests.publish(version(step), 0.0)
        rounded = WeightsRequest("run", "bfloat16").pack()
        assert requests.handle(b"other", [Header(MessageKind.GET).pack(), rounded], 0.0)
    return [[bytes(frame) for frame in frames] for _, frames in requests.handle(b"peer", request, 0.0)]


def test_a_publisher_replies_with_the_bytes_of_the_document():
    found = documented()
    asked = found[MessageKind.GET]
    assert replies(100, 101, request=asked) == [found[MessageKind.WEIGHTS]]
    assert replies(100, request=asked) == [found[MessageKind.UNCHANGED]]
    [[header, text]] = replies(100, request=found[MessageKind.HELLO])
    assert Header.unpack(header) == Header(MessageKind.REFUSED)
    assert text == b"HELLO is nothing that a publisher is sent"


def test_a_difference_has_the_bytes_of_the_document():
    found = block("difference")
    [base], [values], [places], [changes] = (found[key] for key in ("BASE", "VALUES", "PLACES", "CHANGES"))
    assert (bytes(version(100).rounded[1]), bytes(version(101).rounded[1])) == (base, values)
    [(*start, first, second)] = replies(100, 101, request=found["GET"])
    assert start == found["WEIGHTS"][:2]
    for frames in ([first, second], found["WEIGHTS"][2:]):
        assert [zlib.decompress(frame) for frame in frames] == [places, changes]
        assert apply_difference(base, frames) == values


def test_a_mapped_version_has_the_bytes_of_the_document():
    found = block("mapped")
    request = WeightsRequest("run", EXACT, 0.0, waits=True, host="HOST")
    assert found["GET"] == [header_of(MessageKind.GET).pack(), request.pack()]
    about = Description("run", MAPPED, TENSORS, STARTS, file=MappedFile(4711, 12, "2f" * 16))
    assert found["WEIGHTS"] == [header_of(MessageKind.WEIGHTS).pack(), about.pack()]
    assert WeightsRequest.unpack(found["GET"][1]) == request
    assert Description.unpack(found["WEIGHTS"][1]) == about


def test_gaps_of_a_difference_are_written_as_the_document_has_it():
    examples = re.findall(r"(\d+) is `([0-9a-f ]+)`", DOCUMENT.read_text())
    assert len(examples) == 4
    for gap, expected in examples:
        changed = np.zeros(4096, "<u2")
        changed[int(gap)] = 1
        places, changes = map(zlib.decompress, encode_difference(bytes(8192), changed.tobytes()))
        assert (places, changes) == (bytes.fromhex(expected), b"\1\0")


@pytest.fixture
def publisher():
    """A socket that pretends to be one."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger, router.rcvtimeo = 0, 20_000
        router.bind("tcp://127.0.0.1:*")
        yield router


@pytest.mark.parametrize("encoding", [EXACT, ROUNDED])
@pytest.mark.parametrize("subscriber_class", [Subscriber, *([] if missing() else [CSubscriber])])
def test_a_subscriber_sends_and_reads_the_bytes_of_the_document(publisher, subscriber_class, encoding, monkeypatch):
    """It has received the version before, and asks for the newest."""
    prepare(subscriber_class)
    monkeypatch.setattr("paramserver.subscriber.SHARES_MEMORY", False)
    address = publisher.last_endpoint.decode()
    takes_difference = subscriber_class is Subscriber and encoding == ROUNDED
    expected = block("difference" if takes_difference else "bytes")
    with subscriber_class(address, encoding=encoding) as subscriber, ThreadPoolExecutor(1) as pool:
        got = pool.submit(subscriber.latest, 20)
        peer, *asked = publisher.recv_multipart()
        [reply] = replies(100, request=asked)
        publisher.send_multipart([peer, *reply])
        assert got.result().version == (2, 100)
        assert subscriber.newer_than(Version(2, 100), 0) is None
        peer, *asked = publisher.recv_multipart()
        fields = unpack_json(expected["GET"][1]) | {"encoding": encoding}
        assert (asked[0], unpack_json(asked[1])) == (expected["GET"][0], fields)
        if subscriber_class is Subscriber:
            assert asked[1] == pack_json(fields)
        if encoding == EXACT or takes_difference:
            publisher.send_multipart([peer, *expected["WEIGHTS"]])
        else:
            publisher.send_multipart([peer, *replies(101, request=asked)[0]])
        weights = subscriber.newer_than(Version(2, 100), 20)
        assert weights.version == (2, 101)
        assert {name: array.tolist() for name, array in weights.items()} == NEWEST


class Recorder(FakeRun):
    """Keeps the first message of each kind as it came."""

    def __init__(self, **options):
        self.first = {}
        super().__init__(**options)

    def _receive(self, who, peer, first, *frames):
        self.first.setdefault(Header.unpack(first).kind, [first, *frames])
        super()._receive(who, peer, first, *frames)


VERSION_COLUMN = ArrayDescriptor("version", "<i8", (2,))


def test_a_run_that_takes_versions_has_the_bytes_of_the_document():
    found = block("version")
    directory = replace(DIRECTORY, optional=(VERSION_COLUMN,))
    assert found["WELCOME"] == [header_of(MessageKind.WELCOME).pack(), directory.pack()]
    assert TrainerDirectory.unpack(found["WELCOME"][1]) == directory
    assert found["SAMPLE"][1] == pack_descriptor({"u": U, "n": N, "version": np.array([2, 100])})
    assert np.frombuffer(found["SAMPLE"][-1], "<i8").tolist() == [2, 100]


@pytest.mark.parametrize("version", [None, (2, 100)])
@pytest.mark.parametrize("client_class", [Client, *([] if missing() else [CClient])])
def test_a_client_sends_the_bytes_of_the_document(own_environ, monkeypatch, client_class, version):
    prepare(client_class)
    with Recorder(fields=FIELDS, optional=(VERSION_COLUMN,) if version else (), timeout_s=2.0) as run:
        environment = SimulationEnvironment(run.address, 3, (1.5, -2.0), 4, 1, 2, None, SECRET)
        for name, value in environment.to_environ().items():
            monkeypatch.setenv(name, value)
        run.acknowledges = False
        client = client_class().open()
        client.send(7, {"u": U, "n": N}, version)
        run.answers[MessageKind.HEARTBEAT] = lambda header: [
            header.reply(MessageKind.ACK, 1).pack()  # it is waited for: everything is processed now
        ]
        client.close()
    found, expected = run.first, documented()
    if version:
        expected[MessageKind.SAMPLE] = block("version")["SAMPLE"]
    for kind in ("HELLO", "OPEN", "SAMPLE", "HEARTBEAT", "BYE"):
        assert found[MessageKind[kind]] == expected[MessageKind[kind]], kind
