"""The environment: a cart-pole in numpy, or one of gymnasium.

The equations are those of Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult learning
control problems", IEEE Transactions on Systems, Man, and Cybernetics 13 (1983), without friction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

GRAVITY, CART_KG, POLE_KG, HALF_LENGTH_M, FORCE_N, STEP_S = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TRACK_M, FALLEN_RAD, STEPS = 2.4, math.radians(12), 500
ACTIONS, OBSERVATION = 2, 5  # number of actions, and of the numbers that are observed


class CartPole:
    """A pole on a cart, which each action pushes to the left (0) or to the right (1).

    Each step has the reward 1. An episode ends when the pole has fallen, when the cart leaves the track, or after 500
    steps, so that the best return is 500. What is observed has the time too, as the end depends on it.

    Example::

        >>> cart = CartPole(seed=0)
        >>> cart.reset().shape
        (5,)
        >>> observation, reward, ended = cart.step(1)
    """

    def __init__(self, seed: int | Sequence[int] | None = None) -> None:
        self._rng = np.random.default_rng(seed)

    def reset(self) -> Any:
        """Begin an episode near the upright position; return what is observed."""
        self.state: tuple[float, ...] = tuple(self._rng.uniform(-0.05, 0.05, 4).tolist())
        self.time = 0
        return self._observe()

    def step(self, action: int) -> tuple[Any, float, bool]:
        """Return what is observed then, the reward, and whether the episode has ended."""
        x, speed, angle, turning = self.state
        force, sin, cos, mass = FORCE_N if action else -FORCE_N, math.sin(angle), math.cos(angle), CART_KG + POLE_KG
        push = (force + POLE_KG * HALF_LENGTH_M * turning**2 * sin) / mass
        turn = (GRAVITY * sin - cos * push) / (HALF_LENGTH_M * (4 / 3 - POLE_KG * cos**2 / mass))
        pull = push - POLE_KG * HALF_LENGTH_M * turn * cos / mass
        x, angle = x + STEP_S * speed, angle + STEP_S * turning
        self.state = x, speed + STEP_S * pull, angle, turning + STEP_S * turn
        self.time += 1
        return self._observe(), 1.0, abs(x) > TRACK_M or abs(angle) > FALLEN_RAD or self.time >= STEPS

    def _observe(self) -> Any:
        x, speed, angle, turning = self.state
        return np.array([x / TRACK_M, speed / 2, angle / FALLEN_RAD, turning / 2, self.time / STEPS], np.float32)


class FromGymnasium:
    """An environment of gymnasium with discrete actions, in the place of ``CartPole``.

    Args:
        seed: of all episodes.
        name: of the environment.
    """

    def __init__(self, seed: int | Sequence[int] | None = None, name: str = "CartPole-v1") -> None:
        import gymnasium

        self._environment: Any = gymnasium.make(name)
        self._seeds = np.random.default_rng(seed)

    def reset(self) -> Any:
        """Begin an episode; return what is observed."""
        observation, _ = self._environment.reset(seed=int(self._seeds.integers(2**31)))
        return observation

    def step(self, action: int) -> tuple[Any, float, bool]:
        """Return what is observed then, the reward, and whether the episode has ended."""
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        return observation, float(reward), terminated or truncated


make = CartPole  # or FromGymnasium, of which 4 numbers are observed
