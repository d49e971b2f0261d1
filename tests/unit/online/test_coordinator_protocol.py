"""Every message to the coordinator gets the right reply, whatever it holds."""

import random
from pathlib import Path

import pytest

from paramserver.config import SimulationsConfig
from paramserver.online.coordinator_protocol import RequestHandler
from paramserver.online.protocol import (
    Header,
    MessageKind,
    SimulationReport,
    TrainerDirectory,
    TrainerJoined,
    pack_opening,
    pack_parameters,
    start_secret,
)
from paramserver.online.sampler import make_sampler
from paramserver.online.spec import IngestSpec
from paramserver.online.tracker import ExternalSimulations, ManagedSimulations

TOKEN = b"0123456789abcdef"


def valid(random):
    """A message that may be taken, without the secret."""
    simulation, member = random.randrange(5), random.randrange(2)

    def header(kind, step=0):
        return Header(kind, simulation, step, member, 2, random.randrange(2)).pack()

    return random.choice(
        [
            [header(MessageKind.HELLO), pack_parameters([random.random()])],
            [header(MessageKind.BYE, random.randrange(9))],
            [header(MessageKind.PING)],
            [Header(MessageKind.JOIN, 0).pack(), random.randbytes(16), TrainerJoined("tcp://9", {}, {}).pack()],
            [Header(MessageKind.REPORT, 0).pack(), SimulationReport({simulation: 3}, [(simulation, 0)]).pack()],
        ]
    )


def mutated(random, frames):
    frames = list(frames)
    for _ in range(random.randrange(3)):
        which = random.randrange(len(frames)) if frames else 0
        how = random.randrange(5)
        if how == 0 or not frames:
            frames.insert(which, random.randbytes(random.randrange(40)))
        elif how == 1:
            del frames[which]
        elif how == 2:
            frames[which] = frames[which][: random.randrange(len(frames[which]) + 1)]
        elif frames[which]:
            at = random.randrange(len(frames[which]))
            frames[which] = frames[which][:at] + random.randbytes(1) + frames[which][at + 1 :]
    return frames


def test_of_twenty_thousand_messages_none_raises_and_no_unknown_peer_passes_for_a_trainer():
    seeded = random.Random(7)
    config = SimulationsConfig(
        fields={"t": [2]}, parameters={"a": [0, 1]}, group_size=2, count=5, steps=4, timeout_s=1e9
    )
    tracker = ExternalSimulations(config, 1, 1e9)
    handler = RequestHandler(IngestSpec.from_config(config), tracker, 1, TOKEN, dict)
    joined = [Header(MessageKind.JOIN, 0).pack(), TOKEN, TrainerJoined("tcp://1", {}, {}).pack()]
    answers = handler.handle(b"trainer", joined, 0.0)
    assert [Header.unpack(frames[0]).kind for _, frames in answers] == [MessageKind.READY]
    kinds = set()
    for i in range(20_000):
        message = mutated(seeded, valid(seeded))
        for peer, frames in handler.handle(b"unknown-%d" % (i % 50), message, float(i)):
            assert peer.startswith(b"unknown")
            answer = Header.unpack(frames[0]).kind
            assert answer in (MessageKind.REFUSED, MessageKind.WELCOME, MessageKind.PONG, MessageKind.READY)
            kinds.add((answer, Header.unpack(message[0]).kind if answer is not MessageKind.REFUSED else None))
        tracker.poll(float(i))
        assert not tracker.done
    assert kinds == {
        (MessageKind.REFUSED, None),
        (MessageKind.WELCOME, MessageKind.HELLO),
        (MessageKind.PONG, MessageKind.PING),
        (MessageKind.READY, MessageKind.BYE),
    }
    assert handler.trainers[0].peer == b"trainer"
    assert not any(tracker.num_received(number) for number in range(5))
    assert tracker.simulations.keys() == set(range(5))
    assert handler.refused["unknown_peer"] > 1000
    assert handler.refused["malformed"] > 1000
    assert handler.refused["simulation"] > 10


def test_a_hello_of_a_simulation_that_the_run_started_waits_with_its_secret_for_a_replacement():
    config = SimulationsConfig(function="simulate.py:simulate", fields={"t": [2]}, count=1, at_once=1, steps=4)
    tracker = ManagedSimulations(config, 1, make_sampler("uniform", [("a", 0.5, 0.5)], 0, 1), Path("logs"))
    handler = RequestHandler(IngestSpec.from_config(config), tracker, 1, TOKEN, dict)

    def join(address):
        return handler.handle(
            b"trainer", [Header(MessageKind.JOIN, 0).pack(), TOKEN, TrainerJoined(address, {}, {}).pack()], 1.0
        )

    join("tcp://1")
    (started,) = tracker.poll(2.0)
    secret = start_secret(TOKEN, started.simulation, started.attempt)
    hello = [Header(MessageKind.HELLO, 0).pack(), *pack_opening(started.parameters, secret)]
    handler.trainer_lost(0)
    assert handler.handle(b"client", hello, 3.0) == []
    replies = {peer: Header.unpack(frames[0]).kind for peer, frames in join("tcp://2")}
    assert replies == {b"trainer": MessageKind.READY, b"client": MessageKind.WELCOME}
    assert not handler.refused


@pytest.mark.parametrize("managed", [True, False])
def test_silence_is_not_judged_while_a_trainer_is_missing(managed):
    """Clients wait for the replacement: their HELLO gets no reply, and a PING does not name the simulation."""
    function = "simulate.py:simulate" if managed else None
    config = SimulationsConfig(function=function, fields={"t": [2]}, count=1, steps=4, timeout_s=60.0)
    sampler = make_sampler("uniform", [("a", 0.5, 0.5)], 0, 1)
    tracker = ManagedSimulations(config, 2, sampler, Path("logs")) if managed else ExternalSimulations(config, 2, 1.0)
    handler = RequestHandler(IngestSpec.from_config(config), tracker, 2, TOKEN, dict)

    def join(index, now):
        joined = [Header(MessageKind.JOIN, index).pack(), TOKEN, TrainerJoined("tcp://1", {}, {}).pack()]
        handler.handle(b"trainer %d" % index, joined, now)

    join(0, 0.0)
    join(1, 0.0)
    if not managed:
        handler.handle(b"client", [Header(MessageKind.HELLO, 0).pack(), *pack_opening([], None)], 1.0)
    tracker.poll(1.0)
    handler.trainer_lost(1)
    assert tracker.poll(500.0) == []
    join(1, 600.0)
    assert tracker.poll(660.0) == []
    assert tracker.failure is None
    (silent,) = tracker.poll(661.0)
    assert "silent for 60 s" in (silent.reason if managed else silent.text)
    assert (tracker.failure is None) is managed


@pytest.mark.parametrize("deal", ["round_robin", "simulation"])
def test_another_attempt_begins_at_the_first_step_that_a_trainer_lacks(deal):
    config = SimulationsConfig(fields={"t": [2]}, group_size=2, count=5, steps=40, timeout_s=1e9, deal=deal)
    tracker = ExternalSimulations(config, 2, 1e9)
    handler = RequestHandler(IngestSpec.from_config(config), tracker, 2, TOKEN, dict)

    def join(index, **fields):
        joined = TrainerJoined(f"tcp://{index}", {}, {}, **fields)
        handler.handle(b"trainer-%d" % index, [Header(MessageKind.JOIN, index).pack(), TOKEN, joined.pack()], 0.0)

    def report(index, first_missing):
        body = SimulationReport({0: 9}, first_missing=first_missing).pack()
        handler.handle(b"trainer-%d" % index, [Header(MessageKind.REPORT, index).pack(), body], 1.0)

    def hello(attempt, member):
        header = Header(MessageKind.HELLO, 0, 0, member, 2, attempt)
        ((_, frames),) = handler.handle(b"client", [header.pack(), *pack_opening([], None)], 2.0)
        return TrainerDirectory.unpack(frames[1])

    join(0)
    join(1)
    assert b"first_step" not in hello(0, 0).pack()
    report(0, {0: 18})
    report(1, {0: 19})
    assert hello(0, 1).first_step == 0, "the one of the first member"
    # With ``deal: simulation`` trainer 0 has all steps of it.
    assert (hello(1, 0).first_step, hello(1, 1).first_step) == (18, 18)
    report(0, {0: 22})
    assert hello(1, 1).first_step == 18
    assert hello(2, 0).first_step == (19 if deal == "round_robin" else 22)
    join(0)  # another process, which has received nothing
    assert hello(3, 0).first_step == 0
    join(0, first_missing={0: 6})
    assert hello(4, 0).first_step == 6
