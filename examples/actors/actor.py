"""An actor: plays with the newest policy that the run has published, and sends what it saw, in numpy without torch.

The run starts it as ``simulations.function``. A sample is one unroll: as many steps as the config declares.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, count, islice
from typing import Any

import numpy as np
from environment import CartPole, FromGymnasium, make

from paramserver.client import Client
from paramserver.subscriber import Subscriber

ENVIRONMENTS = 8  # of an actor
TIMEOUT_S = 60  # for the first version
NAMES = ("observations", "actions", "rewards", "terminations", "log_probabilities")


class Policy:
    """The policy of ``task.ActorCritic``, from its parameters by name.

    Args:
        weights: the parameters.
        rng: draws actions; None = the most probable one is taken.
    """

    def __init__(self, weights: Mapping[str, Any], rng: np.random.Generator | None = None) -> None:
        self._layers = [(weights[f"policy.{i}.weight"].T, weights[f"policy.{i}.bias"]) for i in (0, 2)]
        self._rng = rng

    def choose(self, observation: Any) -> tuple[int, float]:
        """Return an action and the logarithm of its probability."""
        (first, bias), (last, last_bias) = self._layers
        logits = (np.tanh(observation @ first + bias) @ last + last_bias).tolist()
        # In floats of Python: calls of numpy cost more for so few numbers.
        largest = max(logits)
        norm = largest + math.log(sum(math.exp(logit - largest) for logit in logits))
        if self._rng is None:
            action = logits.index(largest)
        else:
            bounds = list(accumulate(math.exp(logit - norm) for logit in logits[:-1]))
            action = bisect_right(bounds, self._rng.random())
        return action, logits[action] - norm


def act(parameters: Any, client: Client) -> None:
    """Send as many unrolls as the run expects, each with the version of its policy; without a number, until it ends.

    Several environments take turns, so that the unrolls of a batch are of different episodes.
    """
    (length,) = client.fields["rewards"]
    seed = (client.simulation, client.attempt)
    rng, environments = np.random.default_rng(seed), [make((*seed, number)) for number in range(ENVIRONMENTS)]
    observations = [environment.reset() for environment in environments]
    with Subscriber() as model:
        weights = model.latest(TIMEOUT_S)
        for number in islice(count(), client.first_step, client.steps):
            weights = model.newer_than(weights.version, timeout_s=0) or weights
            policy, turn, steps = Policy(weights, rng), number % ENVIRONMENTS, []
            for _ in range(length):
                observation = observations[turn]
                action, log_probability = policy.choose(observation)
                after, reward, ended = environments[turn].step(action)
                steps.append((observation, action, reward, ended, log_probability))
                observations[turn] = environments[turn].reset() if ended else after
            unroll = dict(zip(NAMES, map(np.array, zip(*steps, strict=True)), strict=True))
            client.send(number, {**unroll, "last_observation": observations[turn]}, version=weights.version)


def play(policy: Policy, environment: CartPole | FromGymnasium) -> float:
    """Return the return of one episode."""
    observation, total, ended = environment.reset(), 0.0, False
    while not ended:
        observation, reward, ended = environment.step(policy.choose(observation)[0])
        total += reward
    return total
