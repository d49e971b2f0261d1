"""The desk with real sockets and real simulations: who is welcome, who is told what, and how it ends."""

import json
import re
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from threading import Event

import pytest
from zmq_peers import Ends, serve

from paramserver.config import SimulationsConfig
from paramserver.distributed.timeouts import poll_until
from paramserver.errors import TaskError, TrainingError, UnsupportedConfiguration
from paramserver.online.coordinator import SimulationCoordinator
from paramserver.online.protocol import Header, MessageKind, TrainerDirectory
from paramserver.online.security import make_keys
from paramserver.online.spec import IngestSpec

ROOT = Path(__file__).parents[3]
OPEN_S = 0.3  # how long nothing must come where nothing may come


@pytest.fixture
def ends():
    made = Ends()
    yield made
    made.close()


@pytest.fixture
def desk_of(tmp_path, monkeypatch):
    """Desks that are closed."""
    made = []
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(trainers=1, state=None, patience_s=60.0, seed=3, events=None, status=dict, **options):
        config = SimulationsConfig(**{"fields": {"t": [2]}, "timeout_s": 20.0, "launcher": "local", **options})
        told = (lambda *event: events.append(event)) if events is not None else (lambda *event: None)
        desk = SimulationCoordinator(
            IngestSpec.of(config),
            trainers,
            seed,
            tmp_path / "logs",
            timeout_s=patience_s,
            folders=[tmp_path],
            state=state,
            status=status,
            on_event=told,
        )
        made.append(desk.__enter__())
        return desk

    yield make
    for desk in made:
        desk.close()


def joined(ends, desk, count=1, starts=True, **received):
    trainers = [ends.trainer(desk, index).join(**received) for index in range(count)]
    for trainer in trainers:
        trainer.until(MessageKind.READY)
    if starts and desk.plan.started_here:
        await_start(desk)
    return trainers


def await_start(desk):
    """Nobody speaks for a simulation before the run has started it."""
    deadline = time.monotonic() + 20
    while not desk.failure and not any(desk.summary()["simulations"][w] for w in ("running", "complete", "given_up")):
        assert time.monotonic() < deadline, "no simulation was started"
        time.sleep(0.005)


def refusal(caller):
    return caller.until(MessageKind.REFUSED)[0].decode()


# Who is welcome.


def test_a_client_is_welcome_when_all_trainers_have_joined(ends, desk_of):
    desk = desk_of(trainers=2, window=7, steps=5, fields={"t": [2, 3], "u": {"shape": [], "dtype": "int64"}})
    early = ends.client(desk.address, 4).hello([0.5])
    (first,) = joined(ends, desk, 1)
    assert early.heard(OPEN_S) is None
    second = ends.trainer(desk, 1).join()
    told = TrainerDirectory.unpack(early.until(MessageKind.WELCOME)[0])
    assert told.trainers == (first.address, second.address)
    assert (told.only, told.window, told.timeout_s, told.steps) == (None, 7, 20.0, 5)
    assert [(field.name, field.dtype, field.shape) for field in told.fields] == [("t", "<f4", (2, 3)), ("u", "<i8", ())]
    late = ends.client(desk.address, 5).hello()
    assert TrainerDirectory.unpack(late.until(MessageKind.WELCOME)[0]) == told


def test_simulations_are_dealt_to_trainers(ends, desk_of):
    desk = desk_of(trainers=2, deal="simulation")
    joined(ends, desk, 2)
    only = []
    for number in (3, 8, 5, 3):
        only.append(
            TrainerDirectory.unpack(ends.client(desk.address, number).hello().until(MessageKind.WELCOME)[0]).only
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
def test_a_client_that_does_not_fit_is_refused_with_a_sentence(ends, desk_of, options, client, parameters, sentence):
    desk = desk_of(**options)
    joined(ends, desk)
    caller = ends.client(desk.address, **client).hello(parameters)
    assert refusal(caller).startswith(sentence)
    assert sum(desk.summary()["simulations"]["refused"].values()) == 1


@pytest.mark.parametrize("options", [{"command": "sleep 60", "count": 1}, {}])
def test_other_parameters_of_a_simulation_that_is_open_are_refused_and_the_run_goes_on(ends, desk_of, options):
    desk = desk_of(group_size=2, parameters={"a": [0, 1], "b": [0, 1]}, **options)
    joined(ends, desk)
    first, same, other, member = (ends.client(desk.address, members=2, member=m) for m in (0, 0, 0, 1))
    first.hello([0.5, 0.25]).until(MessageKind.WELCOME)
    same.hello([0.5, 0.25]).until(MessageKind.WELCOME)
    member.hello([0.5, 0.25]).until(MessageKind.WELCOME)
    assert refusal(other.hello([0.5, 0.75])) == (
        "parameters ([0.5, 0.75]) of simulation 0 must be those with which it was opened before, [0.5, 0.25]; give "
        "other parameters another simulation id"
    )
    other.hello([0.5, 0.25]).until(MessageKind.WELCOME)
    assert desk.failure is None


def another_version(header):
    return header[:2] + struct.pack("!B", 9) + header[3:]


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([another_version(Header(MessageKind.HELLO).pack()), b""], "protocol version (9) must be 1; install the same"),
        ([b"nonsense"], "a header must have"),
        ([b"x" * len(Header(MessageKind.HELLO).pack())], "these bytes do not begin"),
        ([Header(MessageKind.SAMPLE).pack()], "SAMPLE is nothing that the desk is told"),
        ([Header(MessageKind.HELLO).pack()], "HELLO must have 2 frames, it has 1"),
        ([Header(MessageKind.HELLO).pack(), b"abc"], "parameters must be float64"),
        ([Header(MessageKind.BYE).pack()], "member 0 of simulation 0 is not open"),
        ([Header(MessageKind.JOIN, 0).pack(), b"guess", b"{}"], "JOIN must show the token"),
        ([Header(MessageKind.JOIN, 0).pack()], "JOIN must show the token"),
        ([Header(MessageKind.REPORT, 0).pack(), b"{}"], "trainer 0 did not join from here"),
        ([Header(MessageKind.REPORT, 2**40).pack(), b"{}"], f"trainer {2**40} did not join from here"),
    ],
)
def test_what_is_no_message_for_the_desk_is_answered_counted_and_logged_once(ends, desk_of, caplog, frames, sentence):
    desk = desk_of()
    joined(ends, desk)
    caller = ends.caller(desk.address)
    for _ in range(3):
        caller.socket.send_multipart(frames)
        assert refusal(caller).startswith(sentence)
    assert list(desk.summary()["simulations"]["refused"].values()) == [3]
    (told,) = [record.message for record in caplog.records]
    assert f" from 127.0.0.1: {sentence}" in told
    assert not re.search(r"\b00[0-9a-f]{8}\b", told), "an identity that means nothing to people"
    ends.client(desk.address).hello().until(MessageKind.WELCOME)  # and it goes on


def test_only_trainers_of_the_run_may_join(ends, desk_of):
    desk = desk_of(trainers=1)
    assert refusal(ends.trainer(desk).join(token=b"0" * 32)).startswith("JOIN must show the token of this run")
    assert "trainer (1) must be below the number of trainers (1)" in refusal(ends.trainer(desk, 1).join())
    trainer = ends.trainer(desk)
    trainer.say(Header(MessageKind.JOIN), desk.token, b"{}")
    assert "no announcement of a trainer" in refusal(trainer)
    joined(ends, desk)


def test_a_report_is_answered_and_must_be_one(ends, desk_of):
    desk = desk_of()
    (trainer,) = joined(ends, desk)
    trainer.report()
    trainer.until(MessageKind.READY)
    trainer.say(Header(MessageKind.REPORT), b'{"received": {"a": 1}}')
    assert "no report of a trainer" in refusal(trainer)


def test_a_trainer_that_leaves_ends_the_welcome_and_the_starts(ends, desk_of, program):
    """The run is over then: what ends is not started again, and nothing waits its turn any more."""
    events = []
    desk = desk_of(command=program("hang"), count=4, at_once=1, steps=6, events=events, timeout_s=1.0)
    stranger = ends.caller(desk.address)
    (trainer,) = joined(ends, desk)
    stranger.say(Header(MessageKind.OVER))
    assert "did not join from here" in refusal(stranger)
    assert poll_until(time.monotonic() + 20, lambda: "started" in [kind for kind, _ in events] or None, Event())
    trainer.say(Header(MessageKind.OVER))
    asked(stranger)
    assert ends.client(desk.address, 1).hello().heard()[0] == MessageKind.OVER
    before = list(events)
    assert poll_until(time.monotonic() + 3, lambda: events != before or None, Event()) is None
    assert desk.failure is None


def asked(caller):
    caller.say(Header(MessageKind.PING))
    return json.loads(caller.until(MessageKind.PONG)[0])


def test_whoever_asks_learns_that_the_run_is_alive(ends, desk_of):
    desk = desk_of(trainers=2, count=3, steps=9, status=lambda: {"step": 41})
    caller = ends.caller(desk.address)
    assert asked(caller) == {
        "alive": True,
        "step": 41,
        "simulations": {"waiting": 0, "running": 0, "complete": 0, "given_up": 0},
        "trainers": [],
    }
    first, second = joined(ends, desk, 2)
    ends.client(desk.address, 1).hello().until(MessageKind.WELCOME)
    second.report()
    first.report(_1=8)
    first.until(MessageKind.READY)
    told = asked(caller)
    assert told["simulations"] == {"waiting": 0, "running": 1, "complete": 0, "given_up": 0}
    assert [(one["index"], one["samples"], 0 <= one["reported_s"] < 5) for one in told["trainers"]] == [
        (0, 8, True),
        (1, 0, True),
    ]


# Simulations from outside.


def test_all_trainers_are_told_when_the_last_is_complete(ends, desk_of):
    events = []
    desk = desk_of(trainers=2, count=2, steps=4, events=events)
    first, second = joined(ends, desk, 2)
    clients = [ends.client(desk.address, number).hello() for number in range(2)]
    for client in clients:
        client.until(MessageKind.WELCOME)
    first.report(_0=2, _1=2)
    second.report(_0=2, _1=1)
    second.until(MessageKind.READY)
    assert first.socket.poll(1000 * OPEN_S)
    assert not desk.finished
    second.report(_1=2)
    first.until(MessageKind.FINISH)
    second.until(MessageKind.FINISH)
    assert desk.finished
    assert desk.failure is None
    assert [kind for kind, _ in events] == ["complete", "complete", "finish"]
    assert ends.client(desk.address, 1).hello().heard() == (MessageKind.OVER, b"the run wants no more samples")
    assert desk.summary() == {
        "simulations": {
            "planned": 2,
            "waiting": 0,
            "running": 0,
            "complete": 2,
            "given_up": 0,
            "restarted": 0,
            "silent": [],
            "refused": {},
        }
    }


def test_the_last_may_be_said(ends, desk_of):
    desk = desk_of()
    (trainer,) = joined(ends, desk)
    client = ends.client(desk.address, 7).hello()
    client.until(MessageKind.WELCOME)
    ends.caller(desk.address).say(Header(MessageKind.LAST))
    client.bye(12)
    trainer.until(MessageKind.FINISH)


def test_where_the_run_counts_itself_nobody_else_says_the_last(ends, desk_of):
    desk = desk_of(command="sleep 60", count=1)
    joined(ends, desk)
    caller = ends.caller(desk.address)
    caller.say(Header(MessageKind.LAST))
    assert "starts its simulations itself" in refusal(caller)


def test_a_silence_of_all_is_a_failure_that_can_be_asked_for(ends, desk_of):
    desk = desk_of(count=3, steps=4, patience_s=0.1, timeout_s=0.4)
    joined(ends, desk)
    client = ends.client(desk.address, 1).hello()
    client.until(MessageKind.WELCOME)
    desk._thread.join(20)
    assert isinstance(desk.failure, TrainingError)
    assert str(desk.failure).startswith("nothing came for 0.4 s, and simulation 1 is not complete")
    client.until(MessageKind.OVER)


def test_a_resumed_run_knows_what_was_complete_and_a_trainer_may_come_anew(ends, desk_of):
    desk = desk_of(count=2, steps=4)
    (trainer,) = joined(ends, desk)
    for number in range(2):
        ends.client(desk.address, number).hello().until(MessageKind.WELCOME)
    trainer.report(_0=4, _1=3)
    trainer.until(MessageKind.READY)
    state = desk.state_dict()
    desk.close()
    again = desk_of(count=2, steps=4, state=state)
    (trainer,) = joined(ends, again, _0=4, _1=3)
    assert again.summary()["simulations"]["complete"] == 1
    replaced = ends.trainer(again).join(_0=4, _1=4)
    replaced.until(MessageKind.FINISH)
    trainer.report()
    assert "did not join from here" in refusal(trainer)


# How it opens and closes.


def test_closing_tells_clients_and_frees_the_port(ends, desk_of):
    desk = desk_of(trainers=2)
    held = ends.client(desk.address, 1).hello()
    held.tell(MessageKind.PING)
    held.until(MessageKind.PONG)
    (trainer,) = joined(ends, desk)
    ends.trainer(desk, 1).join()
    held.until(MessageKind.WELCOME)
    gone = ends.client(desk.address, 2).hello()
    gone.until(MessageKind.WELCOME)
    gone.bye(0)
    gone.tell(MessageKind.PING)
    gone.until(MessageKind.PONG)
    desk.close()
    desk.close()
    assert held.heard()[0] is MessageKind.OVER
    assert gone.heard(OPEN_S) is None
    assert trainer.heard(0) is None
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of what listens, not of what was connected
        host, _, port = desk.address.removeprefix("tcp://").rpartition(":")
        free.bind((host, int(port)))


def test_a_desk_that_nobody_came_to_closes(desk_of):
    desk = desk_of(trainers=3, command="sleep 60", count=1)
    desk.close()
    assert desk.failure is None
    assert desk.summary()["simulations"]["waiting"] == 1


def test_an_address_that_cannot_be_opened_is_refused(desk_of):
    taken = desk_of()
    port = int(taken.address.rpartition(":")[2])
    with pytest.raises(
        UnsupportedConfiguration, match=rf"port \({port}\) on simulations.address \(127.0.0.1\) cannot be"
    ):
        desk_of(port=port)
    with pytest.raises(UnsupportedConfiguration, match=r"address \(host.invalid\) must be an address of rank 0's host"):
        desk_of(address="host.invalid", keys="/tmp")
    with pytest.raises(UnsupportedConfiguration, match=r"address \(0.0.0.0\) must be the one on which clients reach"):
        desk_of(address="0.0.0.0", keys="/tmp")


def test_with_keys_only_who_has_one_is_heard(ends, desk_of, tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys)
    desk = desk_of(keys=str(keys))
    trainer = ends.trainer(desk, keys=keys).join()
    trainer.until(MessageKind.READY)
    stranger = ends.trainer(desk).join()
    assert stranger.heard(OPEN_S) is None


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
        client._delivery.settle()
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
def test_simulations_are_started_watched_and_started_again(ends, desk_of, program, tmp_path, how):
    events = []
    timeout_s = 4.0 if how == "hang" else 20.0
    desk = desk_of(trainers=2, command=program(how), count=4, at_once=2, steps=6, events=events, timeout_s=timeout_s)
    trainers = joined(ends, desk, 2)
    serve(trainers, lambda: desk.failure or all(trainer.finished for trainer in trainers))
    assert desk.failure is None
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
    assert desk.summary()["simulations"] == {
        "planned": 4,
        "waiting": 0,
        "running": 0,
        "complete": 4,
        "given_up": 0,
        "restarted": len(restarted),
        "silent": [],
        "refused": {},
    }


def test_a_resumed_run_starts_only_what_is_not_complete(ends, desk_of, program):
    events = []
    desk = desk_of(command=program("well"), count=4, steps=6, parameters={"a": [0, 1]}, events=events)
    (trainer,) = joined(ends, desk)
    serve([trainer], lambda: trainer.counts.get(1, 0) == 6)
    state = desk.state_dict()
    desk.close()
    started = {details["simulation"]: details["parameters"] for kind, details in events if kind == "started"}
    events.clear()
    again = desk_of(command=program("well"), count=4, steps=6, parameters={"a": [0, 1]}, state=state, events=events)
    anew = ends.trainer(again)
    anew.samples = set(trainer.samples)
    anew.join(**{f"_{key}": count for key, count in trainer.counts.items()})
    serve([anew], lambda: anew.finished)
    assert samples_of([anew]) == ALL
    complete = {key for key, count in trainer.counts.items() if count == 6}
    begun = {details["simulation"]: details["parameters"] for kind, details in events if kind == "started"}
    assert complete >= {0, 1}
    assert begun.keys() == set(range(4)) - complete
    assert all(started[key] == begun[key] for key in started.keys() & begun.keys())


def test_a_function_is_called_with_its_parameters_and_an_open_client(ends, desk_of, program):
    desk = desk_of(function="simulating.py:simulate", count=4, at_once=4, steps=6)
    (trainer,) = joined(ends, desk)
    serve([trainer], lambda: trainer.finished)
    assert samples_of([trainer]) == ALL
    assert trainer.duplicated == 0


@pytest.mark.parametrize("takes", [True, False])
def test_closing_ends_simulations_that_run(ends, desk_of, program, tmp_path, takes):
    desk = desk_of(function="simulating.py:endless", count=2, at_once=2)
    (trainer,) = joined(ends, desk)
    trainer.takes = takes
    serve([trainer], lambda: len(trainer.counts) == 2)
    desk.close()
    assert desk.failure is None
    assert not trainer.finished


def test_one_that_goes_on_after_its_last_sample_is_told_and_ended(ends, desk_of):
    events = []
    desk = desk_of(command="sleep 60", count=2, steps=5, events=events, timeout_s=1.0)
    (trainer,) = joined(ends, desk)
    client = ends.client(desk.address, 0).hello()
    client.until(MessageKind.WELCOME)
    trainer.report(_0=5)
    client.until(MessageKind.OVER)
    second = ends.client(desk.address, 1)
    serve([trainer], lambda: [kind for kind, _ in events].count("started") == 2)
    second.hello().until(MessageKind.WELCOME)
    assert [kind for kind, _ in events] == ["started", "complete", "started"]


def test_a_command_that_always_fails_fails_the_run_with_one_sentence(ends, desk_of, tmp_path):
    events = []
    desk = desk_of(command="sh -c 'echo no; exit 4'", count=5, max_restarts=1, at_once=2, events=events)
    (trainer,) = joined(ends, desk)
    serve([trainer], lambda: desk.failure)
    desk._thread.join(20)
    assert isinstance(desk.failure, TrainingError)
    assert "3 simulations in a row failed 2 times each; the last of them, simulation " in str(desk.failure)
    assert "ended with exit code 4; its output is in" in str(desk.failure)
    assert [kind for kind, _ in events].count("given_up") == 3
    assert "no\n" in (tmp_path / "logs" / "simulation-0.log").read_text()


def test_a_sampler_that_raises_fails_the_run(ends, desk_of, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "raising.py").write_text(
        "class Raising:\n def __init__(self, *a): pass\n def draw(self, index): raise LookupError('no more')\n"
    )
    desk = desk_of(command="sleep 60", count=1, sampler="raising.py:Raising")
    (trainer,) = joined(ends, desk)
    serve([trainer], lambda: desk.failure)
    assert isinstance(desk.failure, TaskError)
    assert "LookupError: no more" in str(desk.failure)
    sys.modules.pop("raising", None)


def test_simulations_end_when_their_desk_is_killed(ends, tmp_path, program):
    import os
    import subprocess

    text = f"""
import signal, sys
from pathlib import Path
from paramserver.config import SimulationsConfig
from paramserver.online.coordinator import SimulationCoordinator
from paramserver.online.spec import IngestSpec
config = SimulationsConfig(command="sh -c 'echo $$; sleep 600'", count=1, fields={{"t": [2]}}, launcher="local")
with SimulationCoordinator(IngestSpec.of(config), 1, 0, Path({str(tmp_path)!r})) as desk:
    print(desk.address, desk.token.decode(), flush=True)
    signal.pause()
"""
    run = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    with run:
        address, token = run.stdout.readline().split()

        class Told:
            pass

        Told.address, Told.token = address.decode(), token
        joined(ends, Told, starts=False)
        log = tmp_path / "simulation-0.log"
        while not (log.exists() and len(log.read_text().split("\n")) > 2):
            signal.sigtimedwait([signal.SIGUSR2], 0.02)
        pid = int(log.read_text().split("\n")[1])
        assert Path(f"/proc/{pid}").exists()
        run.kill()
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            break
        signal.sigtimedwait([signal.SIGUSR2], 0.02)
    else:
        raise AssertionError("it outlived its run")
