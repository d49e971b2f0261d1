"""The bytes on the wire are those of docs/protocol.md, which clients in other languages follow.

A change of them needs a new ``VERSION`` there and in the code.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from c_client import CClient, missing
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
from paramserver.online.receiver import REASONS

DOCUMENT = Path(__file__).parents[3] / "docs" / "protocol.md"
SECRET = start_secret(b"token", 3, 4)
U, N = np.array([[0.5, -1.0]], "<f4"), np.array([7], "<i8")
FIELDS = (ArrayDescriptor("u", "<f4", (2, 2)), ArrayDescriptor("n", "<i8", (2,)))
DIRECTORY = TrainerDirectory(("tcp://10.0.0.1:5556", "tcp://10.0.0.2:5556"), None, 64, 60.0, 100, FIELDS)
JOINED = TrainerJoined("tcp://10.0.0.1:5556", {3: 2}, {})
REPORT = SimulationReport({3: 2}, [(3, 1)], {"received": 2}, [3], {3: 1})


def documented():
    """Kind -> the frames of its message in the document."""
    block = DOCUMENT.read_text().partition("<!-- bytes: begin -->\n```text\n")[2].partition("```")[0]
    messages = re.findall(r"^([A-Z]+)((?: +(?:hex|text) .*\n)+)", block, flags=re.MULTILINE)
    found = {kind: re.findall(r"(hex|text) (.*)\n", frames) for kind, frames in messages}
    return {
        MessageKind[kind]: [bytes.fromhex(text) if form == "hex" else text.encode() for form, text in frames]
        for kind, frames in found.items()
    }


def packed(kind):
    """The frames that the code makes."""
    header = Header(kind, simulation=3, step=STEPS.get(kind, 0), member=1, members=2, attempt=4)
    return [header.pack(), *BODIES.get(kind, [])]


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
}


@pytest.mark.parametrize("kind", MessageKind, ids=lambda kind: kind.name)
def test_a_message_has_the_bytes_of_the_document(kind):
    assert documented()[kind] == packed(kind)


def test_the_bytes_of_the_document_are_read_as_what_they_mean():
    found = documented()
    for kind, (header, *_) in found.items():
        assert Header.unpack(header) == Header(kind, 3, STEPS.get(kind, 0), 1, 2, 4)
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


def test_the_tables_of_the_document_have_every_kind_and_reason():
    text = DOCUMENT.read_text()
    rows = re.findall(r"^\| (\d+) ([A-Z]+) \|", text, flags=re.MULTILINE)
    assert {(int(number), name) for number, name in rows} == {(kind.value, kind.name) for kind in MessageKind}
    assert f"| 2 | uint8 | version of the protocol: {VERSION} |" in text
    assert [reason for reason in REASONS if f"`{reason}`" not in text] == []


class Recorder(FakeRun):
    """Keeps the first message of each kind as it came."""

    def __init__(self, **options):
        self.first = {}
        super().__init__(**options)

    def _receive(self, who, peer, first, *frames):
        self.first.setdefault(Header.unpack(first).kind, [first, *frames])
        super()._receive(who, peer, first, *frames)


@pytest.mark.parametrize("client_class", [Client, *([] if missing() else [CClient])])
def test_a_client_sends_the_bytes_of_the_document(own_environ, monkeypatch, client_class):
    with Recorder(fields=FIELDS, timeout_s=2.0) as run:
        environment = SimulationEnvironment(run.address, 3, (1.5, -2.0), 4, 1, 2, None, SECRET)
        for name, value in environment.to_environ().items():
            monkeypatch.setenv(name, value)
        run.acknowledges = False
        client = client_class().open()
        client.send(7, {"u": U, "n": N})
        run.answers[MessageKind.HEARTBEAT] = lambda header: [
            header.reply(MessageKind.ACK, 1).pack()  # it is waited for: everything is processed now
        ]
        client.close()
    found, expected = run.first, documented()
    for kind in ("HELLO", "OPEN", "SAMPLE", "HEARTBEAT", "BYE"):
        assert found[MessageKind[kind]] == expected[MessageKind[kind]], kind
