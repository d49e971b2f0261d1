"""examples/actors: V-trace, the environment, what an actor sends, and runs in which actors and rank 0 are killed."""

import json
import math
import os
import signal
import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from example_modules import EXAMPLES, load_example
from launching import TASKS, FinishedRun, resume
from online_runs import streams, wait_for

from paramserver.config import load_config
from paramserver.online.weights import Version

HERE = EXAMPLES / "actors"
TARGET = 475  # stated in README.md


@pytest.fixture(scope="module")
def actors():
    return load_example("actors", "Actors")


# V-trace.


def drawn(seed, batch=6, n=20, ended=0.1):
    """Log ratios, rewards, discounts and values, in float64."""
    rng = np.random.default_rng(seed)
    discounts = 0.97 * (rng.random((batch, n)) > ended)
    return rng.normal(0, 0.7, (batch, n)), rng.normal(size=(batch, n)), discounts, rng.normal(size=(batch, n + 1))


def by_definition(log_ratios, rewards, discounts, values, clip_rho, clip_c):
    """Equation 1 of the paper, summand by summand."""
    batch, n = rewards.shape
    targets, advantages = np.zeros((batch, n)), np.zeros((batch, n))
    for b in range(batch):
        rho = [min(clip_rho, math.exp(one)) for one in log_ratios[b]]
        c = [min(clip_c, math.exp(one)) for one in log_ratios[b]]
        for s in range(n):
            targets[b, s] = values[b, s]
            for t in range(s, n):
                weight = 1.0
                for i in range(s, t):
                    weight *= discounts[b, i] * c[i]
                delta = rho[t] * (rewards[b, t] + discounts[b, t] * values[b, t + 1] - values[b, t])
                targets[b, s] += weight * delta
        for s in range(n):
            after = values[b, n] if s == n - 1 else targets[b, s + 1]
            advantages[b, s] = rho[s] * (rewards[b, s] + discounts[b, s] * after - values[b, s])
    return targets, advantages


@pytest.mark.parametrize(("clip_rho", "clip_c"), [(1.0, 1.0), (2.0, 0.9), (math.inf, math.inf)])
def test_vtrace_is_what_the_paper_defines(actors, clip_rho, clip_c):
    numbers = drawn(seed=3)
    found = actors.vtrace.vtrace(*map(torch.from_numpy, numbers), clip_rho, clip_c)
    for tensor, expected in zip(found, by_definition(*numbers, clip_rho, clip_c), strict=True):
        assert tensor.dtype == torch.float64
        assert np.abs(tensor.numpy() - expected).max() < 1e-12


def test_on_policy_targets_are_the_n_step_returns(actors):
    _, rewards, discounts, values = drawn(seed=4)
    targets, _ = actors.vtrace.vtrace(*map(torch.from_numpy, (np.zeros_like(rewards), rewards, discounts, values)))
    expected = values[:, -1]
    for s in reversed(range(rewards.shape[1])):
        expected = rewards[:, s] + discounts[:, s] * expected
        assert np.abs(targets[:, s].numpy() - expected).max() < 1e-12


def test_vtrace_has_no_gradient(actors):
    tensors = [torch.from_numpy(one).requires_grad_() for one in drawn(seed=5)]
    assert not any(tensor.requires_grad for tensor in actors.vtrace.vtrace(*tensors))


# The environment.


def test_the_cart_and_the_pole_obey_their_equations_of_motion(actors):
    """Those of the cart and of the pole before they are solved for the two accelerations."""
    physics, rng = actors.environment, np.random.default_rng(0)
    cart = physics.CartPole(0)
    for action in (0, 1) * 20:
        cart.reset()
        x, speed, angle, turning = cart.state = tuple(rng.uniform(-1, 1, 4).tolist())
        cart.step(action)
        assert cart.state[0] == pytest.approx(x + speed * physics.STEP_S)
        assert cart.state[2] == pytest.approx(angle + turning * physics.STEP_S)
        pull, turn = ((cart.state[i] - before) / physics.STEP_S for i, before in ((1, speed), (3, turning)))
        half, mass = physics.HALF_LENGTH_M, physics.CART_KG + physics.POLE_KG
        force = physics.FORCE_N if action else -physics.FORCE_N
        swing = physics.POLE_KG * half * (turn * math.cos(angle) - turning**2 * math.sin(angle))
        assert mass * pull + swing == pytest.approx(force)
        assert 4 / 3 * half * turn + pull * math.cos(angle) == pytest.approx(physics.GRAVITY * math.sin(angle))


def test_an_episode_ends_when_the_pole_falls_or_after_500_steps(actors):
    def episode(choose):
        cart = actors.environment.CartPole(seed=1)
        observation, steps, ended = cart.reset(), 0, False
        while not ended:
            observation, reward, ended = cart.step(choose(observation))
            steps += 1
            assert reward == 1.0
        return steps, observation

    steps, fallen = episode(lambda _: 1)
    assert steps < 15
    assert abs(fallen[2]) > 1
    steps, standing = episode(lambda seen: int(0.02 * seen[0] + 0.2 * seen[1] + 0.21 * seen[2] + seen[3] > 0))
    assert (steps, standing[4]) == (500, 1.0)
    assert np.abs(standing[:3:2]).max() < 1


# An actor.


class Weights(dict):
    version = Version(1, 0)


@pytest.fixture
def published(actors, monkeypatch):
    """Versions in place of a run: a newer one with every second request."""
    made = []

    class Published:
        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def latest(self, timeout_s):
            torch.manual_seed(len(made))
            model = actors.task.ActorCritic(8)
            weights = Weights({name: tensor.numpy() for name, tensor in model.state_dict().items()})
            weights.version = Version(1, len(made))
            made.append((weights.version, model))
            return weights

        def newer_than(self, version, timeout_s):
            assert (version, timeout_s) == (made[-1][0], 0)
            self.asked = not getattr(self, "asked", False)
            return None if self.asked else self.latest(0)

    monkeypatch.setattr(actors.actor, "Subscriber", Published)
    return made


class Recorder:
    """In place of a client, of a run that wants this."""

    def __init__(self, simulation, steps, length=32):
        config = load_config(HERE / "config.yaml")
        self.declared = {name: field["shape"] for name, field in config.simulations.fields.items()}
        self.fields = {"rewards": (length,)}
        self.simulation, self.attempt, self.steps, self.first_step = simulation, 0, steps, 0
        self.sent = []

    def send(self, step, fields, version=None):
        assert step == self.first_step + len(self.sent)
        self.sent.append((fields, version))


def test_an_actor_sends_unrolls_with_the_version_of_its_policy(actors, published):
    client = Recorder(simulation=4, steps=24)
    actors.actor.act(None, client)
    assert [version for _, version in client.sent] == [(1, (1 + number) // 2) for number in range(24)]
    models = dict(published)
    for fields, version in client.sent:
        assert {name: list(np.shape(array)) for name, array in fields.items()} == client.declared
        logits, _ = models[version](torch.from_numpy(fields["observations"]))
        taken = logits.log_softmax(-1)[range(32), fields["actions"]]
        assert np.abs(taken.detach().numpy() - fields["log_probabilities"]).max() < 1e-5
    # Each environment goes on in its next turn.
    for turn in range(8):
        mine = [fields for fields, _ in client.sent[turn::8]]
        for fields, after in pairwise(mine):
            assert np.array_equal(fields["last_observation"], after["observations"][0])
        time = np.concatenate([fields["observations"][:, 4] for fields in mine])
        ended = np.concatenate([fields["terminations"] for fields in mine])
        assert ended.any()
        assert np.array_equal(time[1:] == 0, ended[:-1])


def test_an_actor_continues_where_the_run_lacks_an_unroll(actors, published):
    client = Recorder(simulation=4, steps=24)
    client.first_step = 20
    actors.actor.act(None, client)
    assert len(client.sent) == 4


def test_actors_differ_and_an_actor_that_starts_again_too(actors, published):
    def first_of(simulation, attempt):
        published.clear()
        client = Recorder(simulation, steps=1)
        client.attempt = attempt
        actors.actor.act(None, client)
        return client.sent[0][0]["observations"].tolist()

    assert first_of(0, 0) == first_of(0, 0)
    assert first_of(0, 0) != first_of(1, 0) != first_of(0, 1) != first_of(0, 0)


def test_actions_are_drawn_with_their_probabilities(actors):
    torch.manual_seed(0)
    model, seen = actors.task.ActorCritic(8), np.full(5, 0.7, np.float32)
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    policy = actors.actor.Policy(arrays, np.random.default_rng(0))
    found = [policy.choose(seen) for _ in range(20_000)]
    expected = model(torch.from_numpy(seen))[0].detach().softmax(-1)
    assert np.mean([action for action, _ in found]) == pytest.approx(float(expected[1]), abs=0.015)
    assert all(math.exp(log) == pytest.approx(float(expected[action]), rel=1e-5) for action, log in found[:100])
    assert actors.actor.Policy(arrays).choose(seen)[0] == int(expected.argmax())


# Runs.


class ActorsRun:
    """A run of the example that is started and watched. For ``with``."""

    def __init__(self, fork_server, folder, mode, **values):
        self.run_dir, self.mode, self.killed = folder / "runs" / "run", mode, False
        values |= {"logging.run_dir": folder / "runs", "logging.name": "run", "logging.tensorboard": "false"}
        flags = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        self._start = lambda: fork_server.start(["--config", HERE / "config.yaml", "--mode", mode, *flags], folder)

    def __enter__(self):
        self.process = self._start().__enter__()
        return self

    def __exit__(self, *exception):
        self.process.__exit__(*exception)

    def kill_rank_0(self, timeout_s):
        """As soon as there is a checkpoint."""
        wait_for(lambda: any((self.run_dir / "checkpoints").glob("step-*/manifest.json")), timeout_s)
        os.kill(json.loads((self.run_dir / ".lock.json").read_text())["pid"], signal.SIGKILL)
        self.killed = True

    def finished(self, timeout_s):
        code = self.process.wait(timeout_s)
        done = FinishedRun(code, self.process.output.read_text(), self.run_dir)
        if self.mode == "local" and self.killed:  # no supervisor starts it again
            assert code is None
            done = resume(done, timeout_s=timeout_s)
        assert done.code == 0, done.output
        return done

    @property
    def has_lost_rank_0(self):
        if self.mode == "local":
            return self.killed
        return json.loads((self.run_dir / "losses.json").read_text())["view"] == 2


SMALL = {"simulations.count": 4, "simulations.steps": 16, "training.batch_size": 4, "task_args.episodes": 2}
SMALL |= {"buffer.capacity": 8, "task_args.target": 1000, "training.validate_every": 0, "logging.log_every": 1}


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_each_unroll_is_received_once(fork_server, tmp_path, mode):
    with ActorsRun(fork_server, tmp_path, mode, **SMALL) as run:
        finished = run.finished(90)
    summary = finished.summary
    assert (summary["simulations"]["complete"], streams(finished, "received")) == (4, 64)
    assert summary["samples"] + streams(finished, "stale") == 64
    assert 8 <= summary["validation"]["return"] <= 500
    served = [record["stream"]["staleness"] for record in finished.of_kind("buffer")]
    assert sum(count for one in served for count in one.values()) == summary["samples"]
    assert max(int(staleness) for one in served for staleness in one) <= 4


KILLED = TASKS.with_name("killed_actors.py")


@pytest.mark.nightly  # test_online_faults.py kills actors, trainers and rank 0
@pytest.mark.processes
@pytest.mark.parametrize("mode", ["local", "rpc", "ddp"])
def test_actors_and_rank_0_are_killed_and_each_unroll_is_received_once(fork_server, tmp_path, mode):
    values = SMALL | {"checkpoint.every": 2, "checkpoint.best": "null"}
    values |= {"simulations.function": f"{KILLED}:act_slowly", "simulations.steps": 32}
    with ActorsRun(fork_server, tmp_path, mode, **values) as run:
        run.kill_rank_0(60)
        finished = run.finished(120)
    summary = finished.summary
    assert run.has_lost_rank_0
    assert summary["simulations"]["restarted"] >= 1, "no actor was killed"
    assert (summary["simulations"]["complete"], summary["simulations"]["lost"]) == (4, 0)
    assert streams(finished, "received") == summary["samples"] + streams(finished, "stale") == 128


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_the_stated_return_is_reached_while_actors_and_rank_0_are_killed(fork_server, tmp_path, mode):
    with ActorsRun(fork_server, tmp_path, mode, **{"simulations.function": f"{KILLED}:act"}) as run:
        run.kill_rank_0(300)
        finished = run.finished(600)
    assert finished.summary["reason"].startswith("the return is ")
    assert max(record["values"]["return"] for record in finished.of_kind("validation")) >= TARGET
    # Not `restarted`: an actor that waits for its next attempt when rank 0 is killed is only started by the next one.
    assert any(tmp_path.glob("killed-*")), "no actor was killed"
    assert run.has_lost_rank_0


def test_gymnasium_takes_the_place_of_the_cart_pole(actors, monkeypatch):
    """It has the methods that an actor calls, and its two ends of an episode are one."""
    seeds, ends = [], [(False, False), (True, False), (False, True)]

    class Environment:
        def reset(self, seed):
            seeds.append(seed)
            return np.zeros(4, np.float32), {}

        def step(self, action):
            return np.full(4, action, np.float32), 1, *ends[action], {}

    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(make=lambda name: Environment()))
    environment = actors.environment.FromGymnasium((3, 1))
    assert environment.reset().tolist() == [0.0] * 4
    assert [environment.step(action)[1:] for action in range(3)] == [(1.0, False), (1.0, True), (1.0, True)]
    environment.reset()
    assert len(set(seeds)) == 2
