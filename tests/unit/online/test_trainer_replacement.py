"""A trainer or rank 0 dies and is replaced: clients continue, and every sample is received or counted as lost."""

import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
from c_client import CClient, missing, prepare
from online_fixtures import PATIENCE_S, field, ingest_spec

from paramserver.client import Client, finish
from paramserver.distributed.timeouts import poll_until
from paramserver.errors import ClientError, SourceError
from paramserver.online.coordinator import CoordinatorJournal, SimulationCoordinator
from paramserver.online.protocol import Header, MessageKind
from paramserver.online.received_log import ReceivedLog
from paramserver.online.receiver import SampleReceiver
from paramserver.online.spec import ReceiverSpec

LANGUAGES = [Client, *([] if missing() else [CClient])]


@pytest.fixture(autouse=True, params=LANGUAGES, ids=["python", "c"][: len(LANGUAGES)])
def _language(request, monkeypatch):
    """The same of the client in Python and of that in C."""
    prepare(request.param)
    monkeypatch.setattr(Sending, "client_class", request.param)


class Trainer:
    """A receiver and a feeder with an unlimited buffer; ``die`` ends it as SIGKILL does: no message leaves."""

    def __init__(self, coordinator, index, num_trainers, log=None):
        self.log = ReceivedLog() if log is None else log
        self.keys = [tuple(key) for key in self.log.keys().tolist()]
        self.holds = threading.Event()
        self.has_room = threading.Event()
        self.has_room.set()
        self.error = None
        self._changed = threading.Condition()
        spec = ReceiverSpec(coordinator.address, coordinator.token, coordinator.spec, index, num_trainers)
        self.receiver = SampleReceiver(spec, self.log)
        self.receiver.start()
        self._thread = threading.Thread(target=self._feed, name=f"feeder {index}")
        self._thread.start()

    def _feed(self):
        try:
            self._store_all()
        except SourceError as error:
            self.error = error

    def _store_all(self):
        while (group := self.receiver.get()) is not None:
            assert self.has_room.wait(PATIENCE_S)
            if self.holds.is_set():
                continue  # taken and never stored
            with self._changed:
                for accepted in group:
                    assert np.array_equal(accepted.sample["u"], field(*accepted.key))
                    self.keys.append(accepted.key)
                self._changed.notify_all()
            self.log.extend(accepted.key for accepted in group)
            self.receiver.mark_stored(len(group))

    def wait_for(self, num_samples):
        assert self.has(num_samples, PATIENCE_S), self.keys

    def has(self, num_samples, timeout_s):
        with self._changed:
            return self._changed.wait_for(lambda: len(self.keys) >= num_samples, timeout_s)

    def checkpoint(self):
        """The log of a replacement that starts from here."""
        log = ReceivedLog()
        log.load_state_dict(self.log.state_dict())
        return log

    def die(self):
        self.holds.set()
        self.close()  # without ``stop`` nothing is sent

    def close(self):
        self.receiver.close()
        self.has_room.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


class Run:
    """A coordinator and its trainers. For ``with``."""

    def __init__(self, folder, num_trainers, **options):
        self.spec = ingest_spec(**{"timeout_s": 20.0, **options})
        self.num_trainers = num_trainers
        self.file = folder / "coordinator.jsonl"

    def __enter__(self):
        self._start(False, None, [None] * self.num_trainers)
        return self

    def _start(self, continues, state, logs):
        with ExitStack() as opening:
            journal = CoordinatorJournal(self.file, continues)
            self.coordinator = opening.enter_context(
                SimulationCoordinator(self.spec, self.num_trainers, 0, self.file.parent, state=state, journal=journal)
            )
            self.trainers = [Trainer(self.coordinator, i, self.num_trainers, log) for i, log in enumerate(logs)]
            opening.callback(lambda: [trainer.close() for trainer in self.trainers])
            self._opened = opening.pop_all()

    def __exit__(self, *exception):
        self._opened.close()

    def checkpoint(self):
        """What rank 0 and the trainers start from after ``lose_rank_0``."""
        return self.coordinator.state_dict(), [trainer.checkpoint() for trainer in self.trainers]

    def lose_rank_0(self):
        """Rank 0 ends; so do the trainers' sessions, and no client learns more than that there is no connection."""
        self.coordinator.suspend()
        self._opened.close()

    def start_rank_0_again(self, state, logs):
        self._start(True, state, logs)

    def replace(self, index, log=None):
        self.trainers[index] = Trainer(self.coordinator, index, self.num_trainers, log)

    def keys(self):
        return sorted(key for trainer in self.trainers for key in trainer.keys)

    def figures(self):
        return self.coordinator.summary()["simulations"]

    def wait_until_finished(self):
        """All simulations are complete, and every receiver has ended."""
        for trainer in self.trainers:
            trainer._thread.join(PATIENCE_S)
            assert not trainer._thread.is_alive(), self.figures()


class Sending:
    """A client in a thread; ``go(n)`` lets it send up to step n."""

    client_class = Client

    def __init__(self, run, simulation, steps, **options):
        self._allowed = threading.Semaphore(0)
        self._run, self._simulation, self._steps, self._options = run, simulation, steps, options
        self.error = None
        self._thread = threading.Thread(target=self._send, name=f"client {simulation}")
        self._thread.start()

    def go(self, n):
        self._allowed.release(n)

    def _send(self):
        try:
            client = self.client_class(self._run.coordinator.address, **self._options)
            with client.open(self._simulation) as self.client:
                for step in range(self._steps):
                    assert self._allowed.acquire(timeout=PATIENCE_S)
                    self.client.send(step, {"u": field(self._simulation, step)})
        except BaseException as error:  # noqa: BLE001 - raised to the test
            self.error = error

    def sent(self):
        client = getattr(self, "client", None)
        return 0 if client is None else client.sent

    def end(self):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("told", ["before", "after"])
def test_what_was_not_acknowledged_is_sent_to_the_replacement(tmp_path, told):
    """Whether the coordinator knows of the death before the client asks or not."""
    with Run(tmp_path, 2, count=1, steps=40, window=4) as run:
        dies = run.trainers[1]
        dies.holds.set()  # nothing that it receives is acknowledged
        client = Sending(run, 0, 40)
        client.go(8)
        run.trainers[0].wait_for(4)
        if told == "before":
            run.coordinator.trainer_lost(1)
        dies.die()
        client.go(32)
        if told == "after":
            run.coordinator.trainer_lost(1)
        run.replace(1)
        client.end()
        run.wait_until_finished()
        assert run.keys() == [(0, step) for step in range(40)]
        assert (run.figures()["complete"], run.figures()["lost"]) == (1, 0)
        assert client.client.sent == 40


def test_a_replacement_gets_its_samples_while_the_client_waits_for_another_trainer(tmp_path):
    """In lockstep no trainer stores a sample before each has its own: the client must not wait for one alone."""
    with Run(tmp_path, 2, count=1, steps=40, window=4) as run:
        for trainer in run.trainers:
            trainer.has_room.clear()
        client = Sending(run, 0, 40)
        client.go(40)
        assert poll_until(time.monotonic() + PATIENCE_S, lambda: client.sent() == 8 or None, threading.Event())
        waits_for = 8 % run.num_trainers
        dead = 1 - waits_for
        run.coordinator.trainer_lost(dead)
        run.trainers[dead].die()
        run.replace(dead)
        run.trainers[dead].wait_for(4)
        run.trainers[waits_for].has_room.set()
        client.end()
        run.wait_until_finished()
        assert run.keys() == [(0, step) for step in range(40)]


def test_what_only_the_buffer_of_the_dead_trainer_had_is_counted_as_lost(tmp_path):
    with Run(tmp_path, 2, count=1, steps=40, window=4) as run:
        dies = run.trainers[1]
        client = Sending(run, 0, 40)
        client.go(8)
        dies.wait_for(4)
        log = dies.checkpoint()
        client.go(12)
        dies.wait_for(10)
        dies.die()
        run.coordinator.trainer_lost(1)
        run.replace(1, log)
        client.go(20)
        client.end()
        run.wait_until_finished()
        lost = sorted({(0, step) for step in range(40)}.difference(run.keys()))
        assert set(lost) <= {(0, step) for step in range(9, 20, 2)}
        assert len(lost) >= 6 - 4, "all but what was in flight"
        assert len(run.keys()) == len(set(run.keys())) == 40 - len(lost)
        assert run.trainers[1].receiver.counters()["lost"] == run.figures()["lost"] == len(lost)
        assert run.figures()["complete"] == 1


def test_a_simulation_that_starts_again_sends_what_was_lost(tmp_path):
    with Run(tmp_path, 1, count=1, steps=10) as run:
        client = Sending(run, 0, 10)
        client.go(6)
        run.trainers[0].wait_for(6)
        run.trainers[0].die()
        run.coordinator.trainer_lost(0)
        run.replace(0)
        # A client notices what has happened when it sends, at most ten times a second.
        assert any(run.trainers[0].has(1, timeout_s=1.0) for _ in map(client.go, (1, 1, 1)))
        again = Sending(run, 0, 10, attempt=1)
        again.go(10)
        again.end()
        run.wait_until_finished()
        assert run.keys() == [(0, step) for step in range(10)]
        assert run.figures()["lost"] == run.trainers[0].receiver.counters()["lost"] == 0
        client.go(4)
        client._thread.join(PATIENCE_S)


def test_samples_of_complete_simulations_that_died_with_a_trainer_are_counted(tmp_path):
    """Their clients are gone: the coordinator counts them."""
    with Run(tmp_path, 1, count=2, steps=5) as run:
        for simulation in range(2):
            client = Sending(run, simulation, 5)
            client.go(5 - simulation)
        run.trainers[0].wait_for(9)
        deadline = threading.Event()
        for _ in range(400):
            if run.figures()["complete"] == 1 and run.coordinator._tracker.num_received(1) == 4:
                break
            deadline.wait(0.05)
        run.trainers[0].die()
        run.coordinator.trainer_lost(0)
        run.replace(0)
        client.go(1)
        client.end()
        run.wait_until_finished()
        assert run.figures()["complete"] == 2
        assert run.figures()["lost"] + len(run.keys()) == 10
        assert run.figures()["lost"] >= 5
        again = SimulationCoordinator(run.coordinator.spec, 1, 0, tmp_path, state=run.coordinator.state_dict())
        assert again.summary()["simulations"]["lost"] == run.figures()["lost"]


def test_a_trainer_that_is_not_dead_is_refused_after_it_was_replaced(tmp_path):
    """It was frozen; its clients, which are connected to it, change to the replacement."""
    with Run(tmp_path, 1, count=1, steps=20, window=2) as run:
        old = run.trainers[0]
        client = Sending(run, 0, 20)
        client.go(4)
        old.wait_for(4)
        old.holds.set()
        run.coordinator.trainer_lost(0)
        run.replace(0, old.checkpoint())
        client.go(16)
        client.end()
        run.wait_until_finished()
        assert old.error is None, "its session ends by what the server reports"
        old.close()
        assert run.keys() == [(0, step) for step in range(20)]
        assert run.figures()["refused"]["unknown_peer"] >= 1


def test_a_trainer_without_a_replacement_fails_its_clients_within_the_timeout(tmp_path):
    with Run(tmp_path, 1, count=1, steps=20) as run:
        client = Sending(run, 0, 20, timeout_s=1.5)
        client.go(4)
        run.trainers[0].wait_for(4)
        run.trainers[0].die()
        run.coordinator.trainer_lost(0)
        client.go(16)
        with pytest.raises(ClientError, match=r"its trainers were not ready within|was not replaced within 1\.5 s"):
            client.end()


# Rank 0 dies, and returns from a checkpoint.


def all_steps(simulations, steps):
    return {(simulation, step) for simulation in range(simulations) for step in range(steps)}


def assert_complete(run, num_samples, simulations):
    run.wait_until_finished()
    assert len(run.keys()) == len(set(run.keys()))
    assert run.figures()["complete"] == simulations
    # The last report of a trainer may reach the coordinator after the trainer has ended.
    deadline = time.monotonic() + PATIENCE_S
    counted = poll_until(
        deadline, lambda: run.figures()["lost"] + len(run.keys()) == num_samples or None, threading.Event()
    )
    assert counted, (run.figures(), run.keys())


@pytest.mark.parametrize("has_checkpoint", [True, False])
@pytest.mark.parametrize("steps", [40, None])
def test_clients_from_outside_continue_with_the_rank_0_that_returns(tmp_path, steps, has_checkpoint):
    with Run(tmp_path, 2, count=1, steps=steps, window=4) as run:
        address = run.coordinator.address
        client = Sending(run, 0, 40)
        client.go(8)
        for trainer in run.trainers:
            trainer.wait_for(4)
        saved = run.checkpoint() if has_checkpoint else (None, [None, None])
        client.go(12)
        for trainer in run.trainers:
            trainer.wait_for(10)
        run.lose_rank_0()
        client.go(10)  # they are not received before rank 0 returns
        run.start_rank_0_again(*saved)
        assert run.coordinator.address == address
        client.go(10)
        client.end()
        assert_complete(run, 40, 1)
        # What was acknowledged after the checkpoint is gone: all of it but for a window of each trainer, whose last
        # samples may be stored but not acknowledged when rank 0 ends. These are sent again.
        before = 8 if has_checkpoint else 0
        assert 20 - before - 2 * 4 <= run.figures()["lost"] <= 20 - before
        assert all_steps(1, 40).difference(run.keys()) <= {(0, step) for step in range(before, 20)}


@pytest.mark.parametrize("steps", [10, None])
def test_simulations_that_were_closed_before_rank_0_died_are_lost_and_not_waited_for(tmp_path, steps):
    """Simulation 0 is in the checkpoint, 1 only in the buffers that are gone; 2 comes after the return."""
    with Run(tmp_path, 2, count=3, steps=steps) as run:
        saved = None
        for number in range(2):
            client = Sending(run, number, 10)
            client.go(10)
            client.end()
            saved = saved or run.checkpoint()
        run.lose_rank_0()
        run.start_rank_0_again(*saved)
        client = Sending(run, 2, 10)
        client.go(10)
        client.end()
        assert_complete(run, 30, 3)
        assert set(run.keys()) == {(number, step) for number in (0, 2) for step in range(10)}


def test_a_client_that_continues_sends_all_samples_to_the_same_trainer(tmp_path):
    """The checkpoint is from before it was opened: without the journal it would go to the trainer with the fewest."""
    with Run(tmp_path, 2, count=2, deal="simulation", window=4) as run:
        saved = run.checkpoint()
        for number in (0, 1):
            client = Sending(run, number, 12)
            client.go(12 if number == 0 else 6)
            run.trainers[number].wait_for(12 if number == 0 else 6)
            if number == 0:
                client.end()
        run.lose_rank_0()
        run.start_rank_0_again(*saved)
        client.go(6)
        client.end()
        assert_complete(run, 24, 2)
        assert run.trainers[0].keys == []
        assert {(1, step) for step in range(6, 12)} <= set(run.trainers[1].keys) <= {(1, step) for step in range(12)}


def test_the_last_simulation_is_still_the_last_after_rank_0_returned(tmp_path):
    with Run(tmp_path, 1) as run:
        saved = run.checkpoint()
        client = Sending(run, 4, 10)
        client.go(5)
        run.trainers[0].wait_for(5)
        finish(run.coordinator.address)
        run.lose_rank_0()
        run.start_rank_0_again(*saved)
        client.go(5)
        client.end()
        assert_complete(run, 10, 1)


def test_a_client_that_closes_while_rank_0_is_away_waits_for_it(tmp_path):
    """All of its samples are acknowledged; that it is done must reach the run."""
    with Run(tmp_path, 1, count=1) as run:
        client = Sending(run, 0, 6)
        client.go(5)
        run.trainers[0].wait_for(5)
        run.lose_rank_0()
        client.go(1)
        client._thread.join(0.5)
        assert client._thread.is_alive()
        run.start_rank_0_again(None, [None])
        client.end()
        assert_complete(run, 6, 1)


@pytest.mark.timeout(60)
def test_a_client_without_samples_is_closed_by_the_rank_0_that_returns(tmp_path):
    with Run(tmp_path, 1, count=1, steps=None) as run:
        client = Sending.client_class(run.coordinator.address).open(0)
        run.lose_rank_0()
        run.start_rank_0_again(None, [None])
        client.close()
        assert_complete(run, 0, 1)


def test_a_client_of_a_run_that_does_not_return_fails_within_its_timeout(tmp_path):
    with Run(tmp_path, 1, count=1) as run:
        client = Sending(run, 0, 6, timeout_s=1.5)
        client.go(5)
        run.trainers[0].wait_for(5)
        run.lose_rank_0()
        client.go(1)
        with pytest.raises(ClientError, match=r"is gone|was not replaced within"):
            client.end()


def test_simulations_of_the_run_are_not_in_the_journal_of_clients(tmp_path):
    handler = SimulationCoordinator(
        ingest_spec(command="true", count=1, parameters={"a": [0, 1]}),
        1,
        0,
        tmp_path,
        journal=CoordinatorJournal(tmp_path / "coordinator.jsonl", continues=False),
    )._handler
    handler._clients[0, 0] = (b"client", Header(MessageKind.HELLO))
    ((_, frames),) = handler.handle(b"client", [Header(MessageKind.BYE, step=3).pack()], 0.0)
    assert Header.unpack(frames[0]).kind is MessageKind.READY
    assert not (tmp_path / "coordinator.jsonl").exists()
