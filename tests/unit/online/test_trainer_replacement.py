"""A trainer dies and is replaced: its clients send to the replacement, and every sample is received or counted lost."""

import threading
from contextlib import ExitStack

import numpy as np
import pytest
from online_fixtures import PATIENCE_S, field, ingest_spec

from paramserver.client import Client
from paramserver.errors import ClientError, SourceError
from paramserver.online.coordinator import SimulationCoordinator
from paramserver.online.received_log import ReceivedLog
from paramserver.online.receiver import SampleReceiver
from paramserver.online.spec import ReceiverSpec


class Trainer:
    """A receiver and a feeder with an unlimited buffer; ``die`` ends it as SIGKILL does: no message leaves."""

    def __init__(self, coordinator, index, num_trainers, log=None):
        self.log = ReceivedLog() if log is None else log
        self.keys = [tuple(key) for key in self.log.keys().tolist()]
        self.holds = threading.Event()
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
        # In the receiver's thread, in place of OVER to the clients: then there is no connection for that to the
        # coordinator either.
        loop = self.receiver._loop
        loop._send_over = lambda: loop._coordinator.disconnect(loop.spec.coordinator_address)
        self.close()

    def close(self):
        self.receiver.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


class Run:
    """A coordinator and its trainers. For ``with``."""

    def __init__(self, folder, num_trainers, **options):
        spec = ingest_spec(**{"timeout_s": 20.0, **options})
        self.coordinator = SimulationCoordinator(spec, num_trainers, 0, folder)
        self.num_trainers = num_trainers

    def __enter__(self):
        with ExitStack() as opening:
            opening.enter_context(self.coordinator)
            self.trainers = [Trainer(self.coordinator, i, self.num_trainers) for i in range(self.num_trainers)]
            opening.callback(lambda: [trainer.close() for trainer in self.trainers])
            self._opened = opening.pop_all()
        return self

    def __exit__(self, *exception):
        self._opened.close()

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
            with Client(self._run.coordinator.address, **self._options).open(self._simulation) as self.client:
                for step in range(self._steps):
                    assert self._allowed.acquire(timeout=PATIENCE_S)
                    self.client.send(step, {"u": field(self._simulation, step)})
        except BaseException as error:  # noqa: BLE001 - raised to the test
            self.error = error

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
        old.close()
        assert "trainer 0 did not join from here" in str(old.error)
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
