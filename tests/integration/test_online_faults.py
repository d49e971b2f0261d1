"""Processes of an online run die: the run completes, and every sample is received or counted as lost."""

import json
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from threading import Event

import numpy as np
import pytest
from c_client import CClient, missing, prepare
from launching import FinishedRun, write_config
from online_runs import SIMULATIONS, STREAMS, ages, online_config, streams, wait_for
from simulations import MAX_STALENESS, field
from stream_tasks import served, starts

from paramserver.client import Client
from paramserver.distributed.timeouts import poll_until
from paramserver.errors import ClientError
from paramserver.subscriber import Subscriber

pytestmark = pytest.mark.processes

COUNT, STEPS, BATCH = 4, 40, 4
ALL = set(product(range(COUNT), range(STEPS)))
IN_C = pytest.mark.skipif(missing() is not None, reason=str(missing()))


class OnlineRun:
    """A run with two trainers that is started and watched. For ``with``."""

    def __init__(
        self,
        fork_server,
        folder,
        outside=False,
        task_args=None,
        mode="rpc",
        task="Fed",
        uneven_inputs="join",
        **sections,
    ):
        self.ledger = folder / "ledger"
        sizes = {"count": COUNT, "at_once": 2, "steps": STEPS, "window": 4}
        function = {"function": None} if outside else {}
        config = online_config(
            folder,
            f"{STREAMS}:{task}",
            {"outside": outside, "pace_s": [0.05], **(task_args or {})},
            {**sizes, **function, **sections.pop("simulations", {})},
            mode=mode,
            training={"uneven_inputs": uneven_inputs},
            buffer={"capacity": 8, **sections.pop("buffer", {})},
            server={"lost_after_s": 3.0, **sections.pop("server", {})},
            **sections,
        )
        file = write_config(folder, **config)
        self.run_dir = folder / "runs" / "run"
        self._start = lambda: fork_server.start(["--config", file, "--set", "logging.name=run"], folder)

    def __enter__(self):
        self.process = self._start().__enter__()
        return self

    def __exit__(self, *exception):
        self.process.__exit__(*exception)

    def wait_until_served(self, count):
        wait_for(lambda: len(served(self.ledger)) >= count)

    def finished(self):
        code = self.process.wait(90)
        output = self.process.output.read_text()
        assert code == 0, output
        return FinishedRun(code, output, self.run_dir)

    @property
    def address(self):
        """Where clients reach the run, once it is known."""
        return self.address_of("clients")

    def address_of(self, whom):
        known = f"{whom} reach this run at "

        def printed():
            lines = self.process.output.read_text().splitlines() if self.process.output.exists() else []
            return next((line.partition(known)[2] for line in lines if known in line), None)

        return poll_until(time.monotonic() + 30, printed, Event())

    def kill(self, pid):
        os.kill(pid, signal.SIGKILL)

    def trained_before_a_death(self, trainers=2):
        """The samples of batches that may have been served without being applied: the last ones before each start."""
        found = []
        for index in range(trainers):
            lines = (self.ledger / f"trainer-{index}").read_text().splitlines()
            for before, _ in starts(self.ledger, index)[1:]:
                found += [tuple(json.loads(line)) for line in lines[:before][-2 * BATCH :]]
        return set(found)


def repeated(ledger):
    return {key for key, times in Counter(served(ledger)).items() if times > 1}


def produce(address, simulation, pace_s=0.0, steps=range(STEPS), client_class=Client):
    """All samples of one simulation from outside; how many were sent."""
    parameters = [0.1 * simulation, 2.0]
    with client_class(address, timeout_s=30).open(simulation, parameters) as client:
        for step in steps:
            time.sleep(pace_s)  # the time that a solver computes
            client.send(step, {"u": field(simulation, step, np.array(parameters))})
        return client.sent


def assert_accounts_agree(run, finished):
    """What was sent was received or lost, and nothing was applied twice."""
    keys = set(served(run.ledger))
    assert keys <= ALL
    assert streams(finished, "received") + finished.summary["simulations"]["lost"] == len(ALL)
    assert streams(finished, "received") <= len(keys)
    assert len(ALL - keys) <= finished.summary["simulations"]["lost"]
    assert finished.summary["samples"] == streams(finished, "received")
    assert finished.summary["simulations"]["complete"] == COUNT


@pytest.mark.parametrize("kind", ["fifo", "firo"])
def test_a_trainer_of_a_run_with_simulations_is_killed(tmp_path, fork_server, kind):
    with OnlineRun(fork_server, tmp_path, task_args={"kill": [1, 6]}, buffer={"kind": kind}) as run:
        finished = run.finished()
    assert len(starts(run.ledger, 1)) == 2, "it was not killed"
    assert len(starts(run.ledger, 0)) == 1
    assert_accounts_agree(run, finished)
    assert repeated(run.ledger) <= run.trained_before_a_death()
    assert 0 < finished.summary["simulations"]["lost"] <= 8 + 2 * BATCH, "at most the content of a buffer"
    assert f"{finished.summary['simulations']['lost']} lost" in finished.output
    assert finished.summary["simulations"]["restarted"] == 0, "the fault of a trainer is none of theirs"


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_a_trainer_dies_after_a_resume_with_another_number_of_trainers(tmp_path, fork_server, before, after):
    """What its buffer was given of others is lost, unless a simulation sends it again, and nothing counts twice."""
    sections = {"cluster": {"num_trainers": before}, "task_args": {"stop": 4}, "buffer": {"capacity": 8}}
    with OnlineRun(fork_server, tmp_path, **sections) as run:
        assert run.process.wait(90) == 3, run.process.output.read_text()
    first = Counter(served(run.ledger))
    run.ledger = tmp_path / "second" / "ledger"
    run.ledger.mkdir(parents=True)
    settings = {"task_args.stop": "null", "task_args.ledger": run.ledger, "task_args.kill": f"[{after - 1}, 0]"}
    settings |= {"cluster.num_trainers": after, "buffer.capacity": 16}
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    code, output = fork_server.run(["--resume", run.run_dir, *flags], tmp_path, timeout_s=90)
    assert code == 0, output
    finished = FinishedRun(code, output, run.run_dir)
    assert len(starts(run.ledger, after - 1)) == 2, "it was not killed"
    assert len(json.loads((run.run_dir / "losses.json").read_text())["faults"]) == 1
    received, lost = streams(finished, "received"), finished.summary["simulations"]["lost"]
    assert received + lost == len(ALL)
    assert finished.summary["samples"] == received, "each is applied once"
    assert finished.summary["simulations"]["complete"] == COUNT
    assert lost <= 16 + 2 * BATCH, "at most the content of a buffer"
    keys = first + Counter(served(run.ledger))
    assert {key for key, times in keys.items() if times > 1} <= run.trained_before_a_death(after)
    assert len(ALL - keys.keys()) <= lost


@pytest.mark.parametrize(
    ("consistency", "pace_s", "client_class"),
    [
        ("sync", 0.0, Client),
        ("sync", 0.03, Client),
        ("bounded", 0.0, Client),
        ("async", 0.0, Client),
        pytest.param("sync", 0.0, CClient, marks=IN_C),
    ],
)
def test_a_trainer_of_a_run_with_clients_from_outside_is_killed(
    tmp_path, fork_server, consistency, pace_s, client_class
):
    prepare(client_class)
    rules = {"consistency": consistency}
    with OnlineRun(fork_server, tmp_path, outside=True, task_args={"kill": [1, 6]}, server=rules) as run:
        address = run.address
        with ThreadPoolExecutor(COUNT) as pool:
            sent = list(pool.map(lambda i: produce(address, i, pace_s, client_class=client_class), range(COUNT)))
        finished = run.finished()
    assert sent == [STEPS] * COUNT
    assert len(starts(run.ledger, 1)) == 2, "it was not killed"
    assert_accounts_agree(run, finished)
    assert repeated(run.ledger) <= run.trained_before_a_death()


@pytest.mark.parametrize("consistency", ["sync", "bounded"])
def test_a_full_buffer_does_not_block_the_samples_that_another_trainer_waits_for(tmp_path, fork_server, consistency):
    rules = {"consistency": consistency, "staleness_bound": 0}
    with OnlineRun(fork_server, tmp_path, outside=True, task_args={"pace_s": [0.0]}, server=rules) as run:
        address = run.address
        for simulation in range(COUNT):
            # More samples for trainer 0 than its buffer and the window hold, before the first for trainer 1.
            steps = sorted(range(STEPS), key=lambda step, i=simulation: (i + step) % 2)
            assert produce(address, simulation, steps=steps) == STEPS
        finished = run.finished()
    assert sorted(served(run.ledger)) == sorted(ALL)
    assert finished.summary["samples"] == streams(finished, "received") == len(ALL)


@pytest.mark.parametrize(
    ("task", "uneven_inputs"), [("FedWithCalls", "stop"), ("FedWithDigests", "stop"), ("FedWithDigests", "join")]
)
def test_a_full_buffer_of_a_rank_of_ddp_does_not_block_the_samples_that_another_waits_for(
    tmp_path, fork_server, task, uneven_inputs
):
    """As after a return to a checkpoint, which has lost more samples of one rank than of the other."""
    options = {"mode": "ddp", "task": task, "task_args": {"pace_s": [0.0]}}
    with OnlineRun(fork_server, tmp_path, outside=True, uneven_inputs=uneven_inputs, **options) as run:
        address = run.address
        for simulation in range(COUNT):
            # More samples for one rank than its buffer and the window hold, before the first for the other.
            steps = sorted(range(STEPS), key=lambda step, i=simulation: (i // 2 + i + step) % 2)
            assert produce(address, simulation, steps=steps) == STEPS
        finished = run.finished()
    digests = [
        dict(map(json.loads, (tmp_path / "digests" / f"trainer-{index}").read_text().splitlines()))
        for index in range(2)
    ]
    together = digests[0].keys() & digests[1].keys()
    for alone in (min(digests[0].keys() - together), min(digests[1].keys() - together)):
        assert any(step > alone for step in together), "no rank went on without the other, and then with it"
    assert [digests[0][step] for step in sorted(together)] == [digests[1][step] for step in sorted(together)]
    assert streams(finished, "received") == len(ALL)
    assert uneven_inputs == "stop" or sorted(served(run.ledger)) == sorted(ALL)


def test_a_full_buffer_that_blocks_samples_of_another_rank_ends_a_run_that_needs_all_ranks(tmp_path, fork_server):
    """No update is made without a rank where the model is not wrapped in DistributedDataParallel."""
    options = {"mode": "ddp", "uneven_inputs": "stop", "trainer": f"{STREAMS}:Unwrapped"}
    limits = {"cluster": {"timeout_s": 3}, "simulations": {"timeout_s": 4.0}}
    with OnlineRun(fork_server, tmp_path, outside=True, **limits, **options) as run:
        with pytest.raises(ClientError):
            produce(run.address, 0, steps=sorted(range(STEPS), key=lambda step: step % 2))  # those for rank 0 first
        assert run.process.wait(60) == 1
        output = run.process.output.read_text()
    assert "the buffer of trainer 0 is full, no trainer has received a sample for 4 s (cluster.timeout_s" in output


def test_a_slow_simulation_that_no_full_buffer_blocks_ends_no_run_that_needs_all_ranks(tmp_path, fork_server):
    """Simulation 0 is blocked by the buffer of rank 0, and simulation 1 computes longer than ``cluster.timeout_s``."""
    options = {"mode": "ddp", "uneven_inputs": "stop", "trainer": f"{STREAMS}:Unwrapped", "simulations": {"count": 2}}
    with OnlineRun(fork_server, tmp_path, outside=True, cluster={"timeout_s": 3}, **options) as run:
        address, parameters = run.address, [0.1, 2.0]
        even_first = sorted(range(STEPS), key=lambda step: step % 2)  # of simulation 0 those for rank 0
        with ThreadPoolExecutor(1) as pool:
            blocked = pool.submit(produce, address, 0, steps=even_first)
            with Client(address, timeout_s=30).open(1, parameters) as client:
                time.sleep(4.5)  # the time that a solver computes
                for step in even_first:
                    client.send(step, {"u": field(1, step, np.array(parameters))})
            assert blocked.result() == STEPS
        finished = run.finished()
    assert finished.summary["samples"] == 2 * STEPS


def test_rank_0_publishes_what_another_rank_of_ddp_trained_without_it(tmp_path, fork_server):
    """What makes samples may wait for the newest model before it makes those that rank 0 waits for."""
    with OnlineRun(fork_server, tmp_path, outside=True, mode="ddp", publish={"every": 1}) as run:
        address = run.address
        steps = sorted(range(STEPS), key=lambda step: step % 2 == 0)  # of simulation 0 the odd ones are for rank 1
        parameters = [0.0, 2.0]
        with (
            Client(address, timeout_s=30).open(0, parameters) as client,
            Subscriber(run.address_of("subscribers")) as model,
        ):
            first = model.latest(timeout_s=30)
            for number, step in enumerate(steps):
                if number == STEPS // 2:
                    newer = model.newer_than(first.version, timeout_s=30)
                    assert newer is not None, "rank 0 has published nothing"
                    assert not any((step + simulation) % 2 == 0 for simulation, step in served(run.ledger))
                client.send(step, {"u": field(0, step, np.array(parameters))})
        for simulation in range(1, COUNT):
            assert produce(address, simulation) == STEPS
        finished = run.finished()
    assert sorted(served(run.ledger)) == sorted(ALL)
    assert finished.summary["samples"] == len(ALL)


def pid_of_rank_0(run):
    holder = run.run_dir / ".lock.json"
    wait_for(holder.exists)
    return json.loads(holder.read_text())["pid"]


def views(run):
    return json.loads((run.run_dir / "losses.json").read_text())["view"]


@pytest.mark.parametrize("every", [3, 0])
def test_rank_0_of_a_run_with_simulations_is_killed(tmp_path, fork_server, every):
    """It returns from a checkpoint, or from the beginning: its simulations start again and send everything."""
    with OnlineRun(fork_server, tmp_path, checkpoint={"every": every}) as run:
        run.wait_until_served(60)
        assert not every or list((run.run_dir / "checkpoints").glob("step-*/manifest.json"))
        run.kill(pid_of_rank_0(run))
        finished = run.finished()
    assert views(run) == 2, "it was not killed"
    assert [len(starts(run.ledger, index)) for index in range(2)] == [1, 1], "the trainers' processes stay"
    assert set(served(run.ledger)) == ALL
    assert finished.summary["samples"] == streams(finished, "received") == len(ALL)
    assert (finished.summary["simulations"]["complete"], finished.summary["simulations"]["lost"]) == (COUNT, 0)
    if every:
        assert finished.summary["simulations"]["restarted"] == 0, "the fault of rank 0 is none of theirs"
        assert len(served(run.ledger)) < 60 + len(ALL), "it began anew"


@pytest.mark.parametrize("client_class", [Client, pytest.param(CClient, marks=IN_C)])
def test_rank_0_of_a_run_with_clients_from_outside_is_killed(tmp_path, fork_server, client_class):
    """They find it again at its address; what they had released since the checkpoint is lost and counted."""
    prepare(client_class)
    with OnlineRun(fork_server, tmp_path, outside=True, checkpoint={"every": 3}) as run:
        address = run.address
        with ThreadPoolExecutor(COUNT) as pool:
            # The last one comes after the return, the first may be closed before.
            send = partial(produce, address, client_class=client_class)
            sending = [pool.submit(send, number, 0.02 * number) for number in range(COUNT - 1)]
            run.wait_until_served(60)
            run.kill(pid_of_rank_0(run))
            sending.append(pool.submit(send, COUNT - 1))
            assert [one.result(60) for one in sending] == [STEPS] * COUNT
        finished = run.finished()
    assert views(run) == 2, "it was not killed"
    assert run.process.output.read_text().count(f"clients reach this run at {address}\n") == 2
    lost = finished.summary["simulations"]["lost"]
    assert streams(finished, "received") + lost == len(ALL)
    assert finished.summary["samples"] == streams(finished, "received")
    assert 0 < lost < 60
    assert set(served(run.ledger)) <= ALL
    assert finished.summary["simulations"]["complete"] == COUNT


@pytest.mark.parametrize("outside", [False, True])
def test_a_trainer_is_killed_and_all_return_to_the_checkpoint(tmp_path, fork_server, outside):
    """With ``on_loss: rollback`` rank 0 lives on: another coordinator takes the place of the first in its process."""
    options = {"checkpoint": {"every": 3}, "server": {"on_loss": "rollback"}, "task_args": {"kill": [1, 6]}}
    with OnlineRun(fork_server, tmp_path, outside=outside, **options) as run:
        if outside:
            address = run.address
            with ThreadPoolExecutor(COUNT) as pool:
                assert list(pool.map(lambda number: produce(address, number), range(COUNT))) == [STEPS] * COUNT
        finished = run.finished()
    assert views(run) == 2, "nothing was killed"
    assert len(starts(run.ledger, 1)) == 2
    lost = finished.summary["simulations"]["lost"]
    assert finished.summary["samples"] == streams(finished, "received") == len(ALL) - lost
    assert finished.summary["simulations"]["complete"] == COUNT
    assert outside or (lost, set(served(run.ledger))) == (0, ALL)


@pytest.mark.parametrize("outside", [False, True])
def test_a_rank_of_ddp_is_killed_and_all_start_again(tmp_path, fork_server, outside):
    """Clients from outside find the run at its address, and get no OVER."""
    options = {"checkpoint": {"every": 3}, "task_args": {"kill": [1, 6]}, "mode": "ddp"}
    with OnlineRun(fork_server, tmp_path, outside=outside, **options) as run:
        if outside:
            address = run.address
            with ThreadPoolExecutor(COUNT) as pool:
                assert list(pool.map(lambda number: produce(address, number), range(COUNT))) == [STEPS] * COUNT
        finished = run.finished()
    assert all(len(starts(run.ledger, index)) >= 2 for index in range(2)), "nothing was killed"
    lost = finished.summary["simulations"]["lost"]
    assert finished.summary["samples"] == streams(finished, "received") == len(ALL) - lost
    assert finished.summary["simulations"]["complete"] == COUNT
    assert outside or (lost, set(served(run.ledger))) == (0, ALL)


ACTORS = {
    "task": "FedWithVersions",
    "simulations": {"function": f"{SIMULATIONS}:act"},
    "publish": {"every": 1},
    "buffer": {"max_staleness": MAX_STALENESS},
}


def assert_accounts_of_actors_agree(run, finished):
    """sent = received + lost, and received = applied + stale: nothing is held at the end."""
    lost, stale = finished.summary["simulations"]["lost"], streams(finished, "stale")
    assert streams(finished, "received") + lost == len(ALL)
    assert finished.summary["samples"] + stale == streams(finished, "received")
    assert stale > 0
    assert finished.summary["simulations"]["complete"] == COUNT


@pytest.mark.parametrize(("mode", "killed"), [("rpc", "rank 0"), ("rpc", "trainer"), ("ddp", "trainer")])
def test_samples_of_actors_are_received_once_when_processes_die(tmp_path, fork_server, mode, killed):
    """Actor 1 dies too, and starts again. After a return versions that were taken back count from the checkpoint."""
    options = {"task_args": {"kill": [1, 4]}} if killed == "trainer" else {}
    with OnlineRun(fork_server, tmp_path, mode=mode, checkpoint={"every": 3}, **ACTORS, **options) as run:
        if killed == "rank 0":
            run.wait_until_served(24)
            run.kill(pid_of_rank_0(run))
        finished = run.finished()
    assert_accounts_of_actors_agree(run, finished)
    if killed == "rank 0":
        assert views(run) == 2, "it was not killed"
    else:
        assert len(starts(run.ledger, 1)) >= 2, "it was not killed"
    begun = dict(json.loads((run.run_dir / "publisher.json").read_text())["starts"])
    generations = len(begun)
    assert generations == (1 if (mode, killed) == ("rpc", "trainer") else 2)
    for *_, (generation, version), step in ages(tmp_path):
        # The step may be one of the generation before, too.
        counted = min(version, begun[2]) if generation < generations else version
        assert min(step - version, step - counted) <= MAX_STALENESS
    if generations == 2:
        assert finished.summary["simulations"]["lost"] == 0
        assert finished.summary["simulations"]["restarted"] <= 1, "the fault of a rank is none of theirs"
