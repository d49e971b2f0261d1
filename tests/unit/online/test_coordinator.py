"""The coordinator with real sockets and real simulations: whom it accepts, what it sends, and how it closes."""

import json
import re
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Event

import pytest
import zmq
from process_states import is_alive, wait_until_ended
from zmq_peers import DEADLINE_S, Peers, serve

from paramserver.config import SimulationsConfig
from paramserver.distributed.timeouts import poll_until
from paramserver.errors import StorageError, TaskError, TrainingError, UnsupportedConfiguration
from paramserver.online.coordinator import SimulationCoordinator, open_router
from paramserver.online.protocol import Header, MessageKind, SimulationReport, TrainerDirectory
from paramserver.online.security import make_keys
from paramserver.online.spec import IngestSpec

ROOT = Path(__file__).parents[3]
OPEN_S = 0.3  # how long nothing must come where nothing may come


@pytest.fixture
def peers():
    made = Peers()
    yield made
    made.close()


@pytest.fixture
def coordinator_of(tmp_path, monkeypatch):
    """Coordinators that are closed."""
    made = []
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(
        trainers=1, state=None, patience_s=60.0, seed=3, events=None, status=dict, is_stopping=lambda: False, **options
    ):
        config = SimulationsConfig(**{"fields": {"t": [2]}, "timeout_s": 20.0, "launcher": "local", **options})
        record = (lambda *event: events.append(event)) if events is not None else (lambda *event: None)
        coordinator = SimulationCoordinator(
            IngestSpec.from_config(config),
            trainers,
            seed,
            tmp_path / "logs",
            timeout_s=patience_s,
            folders=[tmp_path],
            state=state,
            status=status,
            is_stopping=is_stopping,
            on_event=record,
        )
        made.append(coordinator.__enter__())
        return coordinator

    yield make
    for coordinator in made:
        coordinator.close()


def joined(peers, coordinator, count=1, starts=True, **received):
    trainers = [peers.trainer(coordinator, index).join(**received) for index in range(count)]
    for trainer in trainers:
        trainer.receive_kind(MessageKind.READY)
    if starts and coordinator.spec.is_managed:
        await_start(coordinator)
    return trainers


def await_start(coordinator):
    """A client may open a simulation only after the run has started it."""
    deadline = time.monotonic() + 20
    while not coordinator.failure and not any(
        coordinator.summary()["simulations"][w] for w in ("running", "complete", "given_up")
    ):
        assert time.monotonic() < deadline, "no simulation was started"
        time.sleep(0.005)


def refusal(caller):
    return caller.receive_kind(MessageKind.REFUSED)[0].decode()


# Which clients it accepts.


def test_a_client_gets_welcome_when_all_trainers_have_joined(peers, coordinator_of):
    coordinator = coordinator_of(
        trainers=2, window=7, steps=5, fields={"t": [2, 3], "u": {"shape": [], "dtype": "int64"}}
    )
    early = peers.client(coordinator.address, 4).hello([0.5])
    (first,) = joined(peers, coordinator, 1)
    assert early.receive(OPEN_S) is None
    second = peers.trainer(coordinator, 1).join()
    directory = TrainerDirectory.unpack(early.receive_kind(MessageKind.WELCOME)[0])
    assert directory.trainers == (first.address, second.address)
    assert (directory.single_trainer, directory.window, directory.timeout_s, directory.steps) == (None, 7, 20.0, 5)
    assert [(field.name, field.dtype, field.shape) for field in directory.fields] == [
        ("t", "<f4", (2, 3)),
        ("u", "<i8", ()),
    ]
    late = peers.client(coordinator.address, 5).hello()
    assert TrainerDirectory.unpack(late.receive_kind(MessageKind.WELCOME)[0]) == directory


def test_simulations_are_dealt_to_trainers(peers, coordinator_of):
    coordinator = coordinator_of(trainers=2, deal="simulation")
    joined(peers, coordinator, 2)
    only = []
    for number in (3, 8, 5, 3):
        only.append(
            TrainerDirectory.unpack(
                peers.client(coordinator.address, number).hello().receive_kind(MessageKind.WELCOME)[0]
            ).single_trainer
        )
    assert only == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("options", "client", "parameters", "sentence"),
    [
        ({"parameters": {"a": [0, 1], "b": [0, 1]}}, {}, [1.0], "parameters (1) must be 2 numbers: a, b"),
        ({}, {}, [1.0, float("nan")], "parameters ([1.0, nan]) must be finite"),
        ({"count": 3}, {"simulation": 3}, [], "simulation (3) must be below simulations.count (3)"),
        (
            {"group_size": 2},
            {"members": 3},
            [],
            "simulation 0 has a group of 3, which must be simulations.group_size (2)",
        ),
        (
            {"count": 3, "command": "sleep 60"},
            {"simulation": 2},
            [],
            "simulation (2) must be one that the run has started",
        ),
        ({"count": 3, "command": "sleep 60"}, {"attempt": 1}, [], "attempt (1) of simulation 0 must be the present 0"),
    ],
)
def test_a_client_that_does_not_fit_is_refused_with_a_message(
    peers, coordinator_of, options, client, parameters, sentence
):
    coordinator = coordinator_of(**options)
    joined(peers, coordinator)
    token = coordinator.token if coordinator.spec.is_managed else None
    caller = peers.client(coordinator.address, **client).hello(parameters, token)
    assert refusal(caller).startswith(sentence)
    assert sum(coordinator.summary()["simulations"]["refused"].values()) == 1


@pytest.mark.parametrize("options", [{"command": "sleep 60", "count": 1}, {}])
def test_other_parameters_of_a_simulation_that_is_open_are_refused_and_the_run_continues(
    peers, coordinator_of, options
):
    coordinator = coordinator_of(group_size=2, parameters={"a": [0, 1], "b": [0, 1]}, **options)
    (trainer,) = joined(peers, coordinator)
    token = coordinator.token if options else None
    first, same, other, member = (peers.client(coordinator.address, members=2, member=m) for m in (0, 0, 0, 1))
    for one in (first, same, member):
        one.hello([0.5, 0.25], token).receive_kind(MessageKind.WELCOME)
    trainer.report(_0=1)
    trainer.receive_kind(MessageKind.READY)
    assert refusal(other.hello([0.5, 0.75], token)) == (
        "parameters ([0.5, 0.75]) of simulation 0 must be those with which it was opened before, [0.5, 0.25]; give "
        "other parameters another simulation id"
    )
    other.hello([0.5, 0.25], token).receive_kind(MessageKind.WELCOME)
    assert coordinator.failure is None


def test_a_client_that_opens_a_simulation_and_sends_nothing_does_not_keep_the_real_one_out(peers, coordinator_of):
    coordinator = coordinator_of()
    (trainer,) = joined(peers, coordinator)
    peers.client(coordinator.address, attempt=9).hello([9.0]).receive_kind(MessageKind.WELCOME)
    real = peers.client(coordinator.address).hello([0.5])
    real.receive_kind(MessageKind.WELCOME)
    trainer.report(_0=1)
    trainer.receive_kind(MessageKind.READY)
    late = peers.client(coordinator.address, attempt=9).hello([9.0])
    assert "must be those with which it was opened before, [0.5]" in refusal(late)
    real.bye(1)
    peers.connect(coordinator.address).send(Header(MessageKind.FINISH))
    trainer.receive_kind(MessageKind.DRAIN)  # the real one is complete


def test_a_client_of_an_earlier_attempt_that_is_closed_leaves_the_next_one_open(peers, coordinator_of):
    coordinator = coordinator_of(steps=None, count=1)
    (trainer,) = joined(peers, coordinator)
    frozen, again = (peers.client(coordinator.address, attempt=attempt) for attempt in (0, 1))
    for client in (frozen, again):
        client.hello([0.5]).receive_kind(MessageKind.WELCOME)
    for client, samples in ((frozen, 2), (again, 4)):
        trainer.report(_0=samples)
        trainer.receive_kind(MessageKind.READY)
        client.bye(samples)
        client.receive_kind(MessageKind.READY)
    trainer.receive_kind(MessageKind.DRAIN)
    assert coordinator.summary()["simulations"]["lost"] == 0


def test_a_simulation_of_the_run_is_opened_with_the_secret_of_its_start_only(peers, coordinator_of):
    coordinator = coordinator_of(command="sleep 60", count=1)
    early = peers.client(coordinator.address).hello()
    assert "must be opened with the secret of this start" in refusal(early)
    joined(peers, coordinator)
    for token in (None, b"guess"):
        assert "must be opened with the secret of this start" in refusal(
            peers.client(coordinator.address).hello(token=token)
        )
    peers.client(coordinator.address).hello(token=coordinator.token).receive_kind(MessageKind.WELCOME)
    assert coordinator.summary()["simulations"]["refused"] == {"secret": 3}


def another_version(header):
    return header[:2] + struct.pack("!B", 9) + header[3:]


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([another_version(Header(MessageKind.HELLO).pack()), b""], "protocol version (9) must be 1; install the same"),
        ([b"nonsense"], "a header must have"),
        ([b"x" * len(Header(MessageKind.HELLO).pack())], "these bytes do not begin"),
        ([Header(MessageKind.SAMPLE).pack()], "SAMPLE must not be sent to the coordinator"),
        ([Header(MessageKind.HELLO).pack()], "HELLO must have 2 frames, it has 1"),
        ([Header(MessageKind.HELLO).pack(), b"abc"], "parameters must be float64"),
        ([Header(MessageKind.BYE).pack()], "member 0 of simulation 0 is not open"),
        ([Header(MessageKind.JOIN, 0).pack(), b"guess", b"{}"], "JOIN must show the token"),
        ([Header(MessageKind.JOIN, 0).pack()], "JOIN must show the token"),
        ([Header(MessageKind.REPORT, 0).pack(), b"{}"], "trainer 0 did not join from here"),
        ([Header(MessageKind.REPORT, 2**40).pack(), b"{}"], f"trainer {2**40} did not join from here"),
    ],
)
def test_what_is_no_message_for_the_coordinator_is_answered_counted_and_logged_once(
    peers, coordinator_of, caplog, frames, sentence
):
    coordinator = coordinator_of()
    joined(peers, coordinator)
    caller = peers.connect(coordinator.address)
    for _ in range(3):
        caller.socket.send_multipart(frames)
        assert refusal(caller).startswith(sentence)
    assert list(coordinator.summary()["simulations"]["refused"].values()) == [3]
    (text,) = [record.message for record in caplog.records]
    assert f" from 127.0.0.1: {sentence}" in text
    assert not re.search(r"\b00[0-9a-f]{8}\b", text), "a routing id means nothing to users"
    peers.client(coordinator.address).hello().receive_kind(MessageKind.WELCOME)  # and it continues


@pytest.mark.parametrize("parts", [100_000 * [b""], 7 * [bytes(10 * 2**20)]], ids=["many", "large"])
def test_a_message_of_too_many_parts_or_bytes_is_not_kept_and_costs_its_sender_the_connection(
    peers, coordinator_of, parts
):
    """Each of its parts alone is small enough."""
    coordinator = coordinator_of()
    joined(peers, coordinator)
    caller = peers.connect(coordinator.address)
    ping(caller)
    lost = caller.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        caller.socket.send_multipart([Header(MessageKind.PING).pack(), *parts])
        assert lost.poll(1000 * 20), "it is still connected"
    finally:
        caller.socket.disable_monitor()
        lost.close()
    peers.client(coordinator.address).hello().receive_kind(MessageKind.WELCOME)  # and it continues
    # None if the limit of messages that are not finished was reached before its last part had arrived.
    assert coordinator.summary()["simulations"]["refused"] in ({"malformed": 1}, {})


def test_only_trainers_of_the_run_may_join(peers, coordinator_of):
    coordinator = coordinator_of(trainers=1)
    assert refusal(peers.trainer(coordinator).join(token=b"0" * 32)).startswith("JOIN must show the token of this run")
    assert "trainer (1) must be below the number of trainers (1)" in refusal(peers.trainer(coordinator, 1).join())
    trainer = peers.trainer(coordinator)
    trainer.send(Header(MessageKind.JOIN), coordinator.token, b"{}")
    assert "no announcement of a trainer" in refusal(trainer)
    joined(peers, coordinator)


def test_a_report_is_answered_and_must_be_one(peers, coordinator_of):
    coordinator = coordinator_of()
    (trainer,) = joined(peers, coordinator)
    trainer.report()
    trainer.receive_kind(MessageKind.READY)
    trainer.send(Header(MessageKind.REPORT), b'{"received": {"a": 1}}')
    assert "no report of a trainer" in refusal(trainer)


def test_after_a_trainer_leaves_no_client_is_accepted_and_nothing_is_started(peers, coordinator_of, program):
    """The run is over then: a simulation that ends is not restarted, and no other one is started."""
    events = []
    coordinator = coordinator_of(command=program("hang"), count=4, at_once=1, steps=6, events=events, timeout_s=1.0)
    unknown = peers.connect(coordinator.address)
    (trainer,) = joined(peers, coordinator)
    unknown.send(Header(MessageKind.OVER))
    assert "did not join from here" in refusal(unknown)
    assert poll_until(time.monotonic() + 20, lambda: "started" in [kind for kind, _ in events] or None, Event())
    trainer.send(Header(MessageKind.OVER))
    ping(unknown)
    assert peers.client(coordinator.address, 1).hello().receive()[0] == MessageKind.OVER
    before = list(events)
    assert poll_until(time.monotonic() + 2, lambda: events != before or None, Event()) is None
    assert coordinator.failure is None


def ping(caller):
    caller.send(Header(MessageKind.PING))
    return json.loads(caller.receive_kind(MessageKind.PONG)[0])


def test_a_ping_returns_the_state_of_the_run(peers, coordinator_of):
    coordinator = coordinator_of(trainers=2, count=3, steps=9, status=lambda: {"step": 41})
    caller = peers.connect(coordinator.address)
    assert ping(caller) == {
        "alive": True,
        "step": 41,
        "simulations": {"waiting": 0, "running": 0, "complete": 0, "given_up": 0},
        "trainers": [],
    }
    first, second = joined(peers, coordinator, 2)
    peers.client(coordinator.address, 1).hello().receive_kind(MessageKind.WELCOME)
    second.report()
    first.report(_1=8)
    first.receive_kind(MessageKind.READY)
    state = ping(caller)
    assert state["simulations"] == {"waiting": 0, "running": 1, "complete": 0, "given_up": 0}
    assert [(one["index"], one["samples"], 0 <= one["reported_s"] < 5) for one in state["trainers"]] == [
        (0, 8, True),
        (1, 0, True),
    ]


# Simulations from outside.


def test_all_trainers_drain_when_the_last_is_complete(peers, coordinator_of):
    events = []
    coordinator = coordinator_of(trainers=2, count=2, steps=4, events=events)
    first, second = joined(peers, coordinator, 2)
    clients = [peers.client(coordinator.address, number).hello() for number in range(2)]
    for client in clients:
        client.receive_kind(MessageKind.WELCOME)
    first.report(_0=2, _1=2)
    second.report(_0=2, _1=1)
    second.receive_kind(MessageKind.READY)
    assert first.socket.poll(1000 * OPEN_S)
    assert not coordinator.finished
    second.report(_1=2)
    first.receive_kind(MessageKind.DRAIN)
    second.receive_kind(MessageKind.DRAIN)
    assert coordinator.finished
    assert coordinator.failure is None
    assert [kind for kind, _ in events] == ["complete", "complete", "finish"]
    assert peers.client(coordinator.address, 1).hello().receive() == (
        MessageKind.OVER,
        b"the run wants no more samples",
    )
    assert coordinator.summary() == {
        "simulations": {
            "planned": 2,
            "waiting": 0,
            "running": 0,
            "complete": 2,
            "given_up": 0,
            "restarted": 0,
            "lost": 0,
            "silent": [],
            "refused": {},
        }
    }


def test_finish_ends_the_run_when_what_was_opened_is_complete(peers, coordinator_of):
    coordinator = coordinator_of()
    (trainer,) = joined(peers, coordinator)
    client = peers.client(coordinator.address, 7).hello()
    client.receive_kind(MessageKind.WELCOME)
    peers.connect(coordinator.address).send(Header(MessageKind.FINISH))
    client.bye(12)
    trainer.receive_kind(MessageKind.DRAIN)


def test_finish_is_refused_where_the_run_starts_its_simulations(peers, coordinator_of):
    coordinator = coordinator_of(command="sleep 60", count=1)
    joined(peers, coordinator)
    caller = peers.connect(coordinator.address)
    caller.send(Header(MessageKind.FINISH))
    assert "starts its simulations itself" in refusal(caller)


def test_silence_of_all_simulations_sets_failure(peers, coordinator_of):
    coordinator = coordinator_of(count=3, steps=4, patience_s=0.1, timeout_s=0.4)
    joined(peers, coordinator)
    client = peers.client(coordinator.address, 1).hello()
    client.receive_kind(MessageKind.WELCOME)
    assert poll_until(time.monotonic() + 20, lambda: coordinator.failure, Event())
    assert isinstance(coordinator.failure, TrainingError)
    assert str(coordinator.failure).startswith("nothing came for 0.4 s, and simulation 1 is not complete")
    client.receive_kind(MessageKind.OVER)


def test_after_a_failure_trainers_get_replies_until_the_run_has_saved(peers, coordinator_of):
    events = []
    coordinator = coordinator_of(count=3, steps=4, patience_s=0.1, timeout_s=0.1, events=events)
    (trainer,) = joined(peers, coordinator)
    assert poll_until(time.monotonic() + 20, lambda: events or None, Event())
    assert events == [("failed", {"text": str(coordinator.failure)})]
    trainer.report(_0=2)
    trainer.receive_kind(MessageKind.READY)
    assert coordinator._thread.is_alive()


def test_a_resumed_run_knows_what_was_complete_and_a_trainer_may_rejoin(peers, coordinator_of):
    coordinator = coordinator_of(count=2, steps=4)
    (trainer,) = joined(peers, coordinator)
    for number in range(2):
        peers.client(coordinator.address, number).hello().receive_kind(MessageKind.WELCOME)
    trainer.report(_0=4, _1=3)
    trainer.receive_kind(MessageKind.READY)
    state = coordinator.state_dict()
    coordinator.close()
    again = coordinator_of(count=2, steps=4, state=state)
    (trainer,) = joined(peers, again, _0=4, _1=3)
    assert again.summary()["simulations"]["complete"] == 1
    replaced = peers.trainer(again).join(_0=4, _1=4)
    replaced.receive_kind(MessageKind.DRAIN)
    trainer.report()
    assert "did not join from here" in refusal(trainer)


# How it opens and closes.


def test_closing_sends_over_to_clients_and_frees_the_port(peers, coordinator_of):
    coordinator = coordinator_of(trainers=2)
    held = peers.client(coordinator.address, 1).hello()
    held.send_kind(MessageKind.PING)
    held.receive_kind(MessageKind.PONG)
    (trainer,) = joined(peers, coordinator)
    peers.trainer(coordinator, 1).join()
    held.receive_kind(MessageKind.WELCOME)
    gone = peers.client(coordinator.address, 2).hello()
    gone.receive_kind(MessageKind.WELCOME)
    gone.bye(0)
    gone.send_kind(MessageKind.PING)
    gone.receive_kind(MessageKind.PONG)
    coordinator.close()
    coordinator.close()
    assert held.receive()[0] is MessageKind.OVER
    assert gone.receive(OPEN_S) is None
    assert trainer.receive(0) is None
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of what listens, not of what was connected
        host, _, port = coordinator.address.removeprefix("tcp://").rpartition(":")
        free.bind((host, int(port)))


def test_it_closes_before_any_trainer_has_joined(coordinator_of):
    coordinator = coordinator_of(trainers=3, command="sleep 60", count=1)
    coordinator.close()
    assert coordinator.failure is None
    assert coordinator.summary()["simulations"]["waiting"] == 1


def test_an_address_that_cannot_be_opened_is_refused(coordinator_of):
    taken = coordinator_of()
    port = int(taken.address.rpartition(":")[2])
    with pytest.raises(
        UnsupportedConfiguration, match=rf"port \({port}\) on simulations.address \(127.0.0.1\) cannot be"
    ):
        coordinator_of(port=port)
    with pytest.raises(UnsupportedConfiguration, match=r"address \(host.invalid\) must be an address of rank 0's host"):
        coordinator_of(address="host.invalid", keys="/tmp")
    with pytest.raises(UnsupportedConfiguration, match=r"address \(0.0.0.0\) must be the one on which clients reach"):
        coordinator_of(address="0.0.0.0", keys="/tmp")


def test_with_keys_a_trainer_without_one_gets_no_reply(peers, coordinator_of, tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys)
    coordinator = coordinator_of(keys=str(keys))
    trainer = peers.trainer(coordinator, keys=keys).join()
    trainer.receive_kind(MessageKind.READY)
    unknown = peers.trainer(coordinator)
    unknown.socket.sndtimeo = 0
    with suppress(zmq.Again):  # its connection may have ended already
        unknown.join()
    assert unknown.receive(OPEN_S) is None


@pytest.mark.claim("send-deadlines")
def test_a_peer_that_reads_nothing_does_not_block_the_coordinator(peers):
    """A ROUTER drops what it cannot deliver; a send that did wait would have no time for it."""
    router = open_router(SimulationsConfig(fields={"t": [2]}))
    try:
        assert router._router.sndtimeo == 0
        peer = peers.connect(router.address)
        peer.send(Header(MessageKind.PING))
        received = []
        deadline = time.monotonic() + DEADLINE_S
        while not received:  # the poll also ends when a connection begins
            assert time.monotonic() < deadline
            router.poll([], 0.1)
            received = list(router.receive(1))
        ((name, _),) = received
        router.send([(name.bytes, [bytes(2**16)])] * 4000)
        assert peer.socket.poll(round(1000 * DEADLINE_S))
    finally:
        router.close()


@pytest.mark.claim("wrong-shape")
def test_what_trainers_refuse_is_an_event_once_for_each_kind(peers, coordinator_of):
    events = []
    coordinator = coordinator_of(trainers=2, events=events)
    trainers = joined(peers, coordinator, 2)
    for trainer, texts in zip(trainers, ({"shape": "u is wrong"}, {"shape": "so is v", "step": "9"}), strict=True):
        trainer.send(Header(MessageKind.REPORT, trainer.index), SimulationReport({}, first_refusals=texts).pack())
        trainer.receive_kind(MessageKind.READY)
    trainers[0].report()
    trainers[0].receive_kind(MessageKind.READY)
    assert [details["text"] for kind, details in events if kind == "refused"] == ["u is wrong", "9"]


# Simulations of the run.


SIMULATION = """
import os, signal, sys
import numpy as np
from paramserver.client import Client

def simulate(parameters, client, steps=6, first=0):
    for step in range(first, steps):
        client.send(step, {"t": np.full(2, step, np.float32)})

def endless(parameters, client):
    step = 0
    while True:
        client.send(step, {"t": np.zeros(2, np.float32)})
        step += 1

if __name__ == "__main__":
    how, simulation, attempt = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    client = Client().open()
    if how != "well" and simulation == 1 and attempt == 0:
        simulate((), client, steps=3)
        client._sender.flush()
        if how == "crash":
            os._exit(9)
        if how == "hang":
            signal.pause()
    with client:
        simulate(client.parameters, client)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "simulating.py").write_text(SIMULATION)
    return lambda how: f"{sys.executable} {tmp_path}/simulating.py {how} {{simulation}} {{attempt}}"


def samples_of(trainers):
    return sorted(key for trainer in trainers for key in trainer.samples)


ALL = [(simulation, step) for simulation in range(4) for step in range(6)]


@pytest.mark.parametrize("how", ["well", "crash", "hang"])
def test_simulations_are_started_watched_and_started_again(peers, coordinator_of, program, tmp_path, how):
    events = []
    timeout_s = 4.0 if how == "hang" else 20.0
    coordinator = coordinator_of(
        trainers=2, command=program(how), count=4, at_once=2, steps=6, events=events, timeout_s=timeout_s
    )
    trainers = joined(peers, coordinator, 2)
    serve(trainers, lambda: coordinator.failure or all(trainer.finished for trainer in trainers))
    assert coordinator.failure is None
    assert samples_of(trainers) == ALL
    kinds = [kind for kind, _ in events]
    assert kinds.count("complete") == 4
    assert kinds[-1] == "finish"
    restarted = [details["text"] for kind, details in events if kind == "restarted"]
    if how == "hang":  # on a machine that stands still for a while, others look silent too
        assert "simulation 1, attempt 0: it was silent for 4 s; it is started again" in restarted
    else:
        crash = ["simulation 1, attempt 0: it ended with exit code 9; it is started again"]
        assert restarted == (crash if how == "crash" else [])
        assert sum(trainer.duplicated for trainer in trainers) == 3 * len(restarted)
    log = (tmp_path / "logs" / "simulation-1.log").read_text()
    assert log.count("--- simulation 1") == 1 + sum(text.startswith("simulation 1,") for text in restarted)
    started = [details for kind, details in events if kind == "started"]
    assert len(started) == 4 + len(restarted)
    assert coordinator.summary()["simulations"] == {
        "planned": 4,
        "waiting": 0,
        "running": 0,
        "complete": 4,
        "given_up": 0,
        "restarted": len(restarted),
        "lost": 0,
        "silent": [],
        "refused": {},
    }


def test_a_resumed_run_starts_only_what_is_not_complete(peers, coordinator_of, program):
    events = []
    coordinator = coordinator_of(command=program("well"), count=4, steps=6, parameters={"a": [0, 1]}, events=events)
    (trainer,) = joined(peers, coordinator)
    serve([trainer], lambda: trainer.counts.get(1, 0) == 6)
    state = coordinator.state_dict()
    coordinator.close()
    started = {details["simulation"]: details["parameters"] for kind, details in events if kind == "started"}
    events.clear()
    again = coordinator_of(
        command=program("well"), count=4, steps=6, parameters={"a": [0, 1]}, state=state, events=events
    )
    anew = peers.trainer(again)
    anew.samples = set(trainer.samples)
    anew.join(**{f"_{key}": count for key, count in trainer.counts.items()})
    serve([anew], lambda: anew.finished)
    assert samples_of([anew]) == ALL
    complete = {key for key, count in trainer.counts.items() if count == 6}
    begun = {details["simulation"]: details["parameters"] for kind, details in events if kind == "started"}
    assert complete >= {0, 1}
    assert begun.keys() == set(range(4)) - complete
    assert all(started[key] == begun[key] for key in started.keys() & begun.keys())


@pytest.mark.parametrize(("count", "sampler", "warns"), [(5, "lhs", True), (4, "lhs", False), (5, "halton", False)])
def test_a_hypercube_that_is_continued_with_another_count_is_a_warning(coordinator_of, caplog, count, sampler, warns):
    options = {"command": "sleep 60", "parameters": {"a": [0, 1]}, "sampler": sampler}
    state = coordinator_of(count=4, **options).state_dict()
    coordinator_of(count=count, state=state, **options)
    assert ("simulations.count (5) is not that of the checkpoint (4)" in caplog.text) == warns


def test_a_function_is_called_with_its_parameters_and_an_open_client(peers, coordinator_of, program):
    coordinator = coordinator_of(function="simulating.py:simulate", count=4, at_once=4, steps=6)
    (trainer,) = joined(peers, coordinator)
    serve([trainer], lambda: trainer.finished)
    assert samples_of([trainer]) == ALL
    assert trainer.duplicated == 0


@pytest.mark.parametrize("acknowledges", [True, False])
def test_closing_ends_simulations_that_run(peers, coordinator_of, program, tmp_path, acknowledges):
    coordinator = coordinator_of(function="simulating.py:endless", count=2, at_once=2)
    (trainer,) = joined(peers, coordinator)
    trainer.acknowledges = acknowledges
    serve([trainer], lambda: len(trainer.counts) == 2)
    coordinator.close()
    assert coordinator.failure is None
    assert not trainer.finished


def test_one_that_continues_after_its_last_sample_gets_over_and_is_killed(peers, coordinator_of):
    events = []
    coordinator = coordinator_of(command="sleep 60", count=2, steps=5, events=events, timeout_s=1.0)
    (trainer,) = joined(peers, coordinator)
    client = peers.client(coordinator.address, 0).hello(token=coordinator.token)
    client.receive_kind(MessageKind.WELCOME)
    trainer.report(_0=5)
    client.receive_kind(MessageKind.OVER)
    second = peers.client(coordinator.address, 1)
    serve([trainer], lambda: [kind for kind, _ in events].count("started") == 2)
    second.hello(token=coordinator.token).receive_kind(MessageKind.WELCOME)
    assert [kind for kind, _ in events] == ["started", "complete", "started"]


@pytest.mark.parametrize(
    ("work_s", "timeout_s", "stops", "ends"), [(1, 30, False, True), (60, 1, False, False), (60, 30, True, False)]
)
@pytest.mark.parametrize("done", [False, True])
def test_a_complete_simulation_may_end_before_the_run(
    peers, coordinator_of, tmp_path, work_s, timeout_s, stops, ends, done
):
    """Until it is late, or the run is to stop. Another one is not complete, unless all are done."""
    stop, command = Event(), f"sh -c 'sleep {work_s}; touch {tmp_path}/{{simulation}}'"
    options = {"command": command, "count": 2, "at_once": 2, "steps": 5, "timeout_s": timeout_s}
    coordinator = coordinator_of(**options, is_stopping=stop.is_set)
    (trainer,) = joined(peers, coordinator)
    trainer.report(_0=5, **({"_1": 5} if done else {}))
    counts = lambda: coordinator.summary()["simulations"]  # noqa: E731
    assert poll_until(time.monotonic() + 20, lambda: counts()["complete"] == 1 + done or None, Event())
    if not done:
        trainer.send(Header(MessageKind.OVER))
    if stops:
        stop.set()
    began = time.monotonic()
    coordinator.finish()
    assert time.monotonic() - began < 15
    assert coordinator.failure is None
    assert (tmp_path / "0").exists() == ends
    assert counts()["complete"] == 1 + done


def test_a_command_that_always_fails_fails_the_run_with_one_message(peers, coordinator_of, tmp_path):
    events = []
    coordinator = coordinator_of(command="sh -c 'echo no; exit 4'", count=5, max_restarts=1, at_once=2, events=events)
    (trainer,) = joined(peers, coordinator)
    serve([trainer], lambda: coordinator.failure)
    assert isinstance(coordinator.failure, TrainingError)
    assert "3 simulations in a row failed 2 times each; the last of them, simulation " in str(coordinator.failure)
    assert 'ended with exit code 4, and its last line is "no"; its output is in' in str(coordinator.failure)
    assert [kind for kind, _ in events].count("given_up") == 3
    assert "no\n" in (tmp_path / "logs" / "simulation-0.log").read_text()


def test_simulations_that_end_after_the_request_to_stop_have_not_failed(peers, coordinator_of, tmp_path):
    """SLURM sends the signal before its time limit to the steps of simulations too."""
    stops, again = Event(), []

    class Events(list):
        def append(self, event):
            super().append(event)
            if len(self) == 3:
                stops.set()
                (tmp_path / "stop").touch()

    command = f"sh -c 'until test -e {tmp_path}/stop; do sleep 0.02; done; kill -USR1 $$'"
    options = {"command": command, "count": 5, "at_once": 3, "max_restarts": 0}
    events = Events()
    coordinator = coordinator_of(**options, events=events, is_stopping=stops.is_set)
    joined(peers, coordinator)
    ended = lambda: (len(events) >= 3 and not coordinator._runner.running) or None  # noqa: E731
    assert poll_until(time.monotonic() + 20, ended, Event())
    state = coordinator.state_dict()
    coordinator.close()
    assert coordinator.failure is None
    assert [kind for kind, _ in events] == ["started"] * 3
    joined(peers, coordinator_of(**{**options, "command": "sleep 60"}, state=state, events=again))
    assert poll_until(time.monotonic() + 20, lambda: len(again) == 3 or None, Event())
    assert [details["simulation"] for _, details in again] == [0, 1, 2]


def test_a_simulation_is_started_before_the_next_is_drawn(peers, coordinator_of, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "drawing.py").write_text(
        f"import pathlib, time\nfolder = pathlib.Path({str(tmp_path)!r})\n"
        "class Drawing:\n def __init__(self, *a): pass\n def draw(self, index):\n"
        "  end = time.monotonic() + 20\n"
        "  while index and not (folder / '0').exists():\n   assert time.monotonic() < end\n"
        "  (folder / 'drawn').write_text(str(time.monotonic()))\n  return []\n"
    )
    command = f"sh -c 'touch {tmp_path}/{{simulation}}; sleep 60'"
    coordinator = coordinator_of(command=command, count=2, at_once=2, sampler="drawing.py:Drawing")
    joined(peers, coordinator)
    started = lambda: (tmp_path / "1").exists() or None  # noqa: E731
    assert poll_until(time.monotonic() + 30, lambda: coordinator.failure or started(), Event()) is True
    assert coordinator._tracker.simulations[1].since_s > float((tmp_path / "drawn").read_text())
    sys.modules.pop("drawing", None)


def test_a_sampler_that_raises_fails_the_run(peers, coordinator_of, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "raising.py").write_text(
        "class Raising:\n def __init__(self, *a): pass\n def draw(self, index): raise LookupError('no more')\n"
    )
    coordinator = coordinator_of(command="sleep 60", count=1, sampler="raising.py:Raising")
    (trainer,) = joined(peers, coordinator)
    serve([trainer], lambda: coordinator.failure)
    assert isinstance(coordinator.failure, TaskError)
    assert "LookupError: no more" in str(coordinator.failure)
    sys.modules.pop("raising", None)


def test_after_a_sampler_has_raised_trainers_get_replies_although_they_report_losses(
    peers, coordinator_of, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "forgets.py").write_text(
        "class Forgets:\n def __init__(self, *a): pass\n def draw(self, index): return []\n"
        " def observe(self, simulation, loss): raise LookupError('no such simulation')\n"
        " def state_dict(self): return {}\n def load_state_dict(self, state): pass\n"
    )
    coordinator = coordinator_of(command="sleep 60", count=1, sampler="forgets.py:Forgets")
    (trainer,) = joined(peers, coordinator)
    with_loss = SimulationReport({}, [], losses={0: 1.0}).pack()
    trainer.send(Header(MessageKind.REPORT), with_loss)
    assert poll_until(time.monotonic() + 20, lambda: coordinator.failure, Event())
    trainer.send(Header(MessageKind.REPORT), with_loss)
    trainer.receive_kind(MessageKind.READY)
    assert "LookupError: no such simulation" in str(coordinator.failure)
    sys.modules.pop("forgets", None)


def test_after_the_disk_is_full_trainers_get_replies_although_clients_report(peers, coordinator_of):
    coordinator = coordinator_of()
    (trainer,) = joined(peers, coordinator)

    def fail(*reported):
        raise StorageError("the disk is full")

    coordinator._handler.record = fail
    user = peers.connect(coordinator.address)
    user.send(Header(MessageKind.FINISH))
    assert poll_until(time.monotonic() + 20, lambda: coordinator.failure, Event())
    user.send(Header(MessageKind.FINISH))
    user.send(Header(MessageKind.PING))
    user.receive_kind(MessageKind.PONG)
    trainer.report()
    trainer.receive_kind(MessageKind.READY)
    assert "the disk is full" in str(coordinator.failure)


def test_simulations_end_when_their_coordinator_is_killed(peers, tmp_path, program):
    import os
    import subprocess

    text = f"""
import signal, sys
from pathlib import Path
from paramserver.config import SimulationsConfig
from paramserver.online.coordinator import SimulationCoordinator
from paramserver.online.spec import IngestSpec
config = SimulationsConfig(command="sh -c 'echo $$; sleep 600'", count=1, fields={{"t": [2]}}, launcher="local")
with SimulationCoordinator(IngestSpec.from_config(config), 1, 0, Path({str(tmp_path)!r})) as coordinator:
    print(coordinator.address, coordinator.token.decode(), flush=True)
    signal.pause()
"""
    run = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    with run:
        address, token = run.stdout.readline().split()

        class Address:
            pass

        Address.address, Address.token = address.decode(), token
        joined(peers, Address, starts=False)
        log = tmp_path / "simulation-0.log"
        while not (log.exists() and len(log.read_text().split("\n")) > 2):
            signal.sigtimedwait([signal.SIGUSR2], 0.02)
        pid = int(log.read_text().split("\n")[1])
        assert is_alive(pid)
        run.kill()
    wait_until_ended([pid])
