"""Straggler simulation: batches of one trainer take a multiple of their computing time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paramserver.errors import TaskError, UnsupportedConfiguration

_EXAMPLE = "write for example --slow trainer=1,factor=5,probability=0.2"


@dataclass(frozen=True)
class SlowdownSpec:
    """A straggler: the index of the trainer, the factor on the time of a batch, and the probability of each batch."""

    trainer: int
    factor: float
    probability: float = 1.0

    def __str__(self) -> str:
        chance = "" if self.probability == 1 else f" with probability {self.probability:g}"
        return f"trainer {self.trainer} slowed {self.factor:g} times{chance}"

    def slows(self, seed: int, trainer_index: int, batch_idx: int) -> bool:
        """Whether this batch is slowed; a function of the arguments only, so that all cases slow the same batches."""
        return trainer_index == self.trainer and seeded_chance(self.probability, seed, trainer_index, batch_idx)


def seeded_chance(probability: float, *entropy: int) -> bool:
    """True with this probability; the result depends on ``entropy`` only."""
    return random.Random("/".join(map(str, entropy))).random() < probability


def parse_slowdown(text: str) -> SlowdownSpec:
    """Parse ``trainer=1,factor=5[,probability=0.1]``.

    Raises:
        UnsupportedConfiguration: a part is missing, unknown or out of its range.
    """
    given: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in _RULES or name in given:
            raise UnsupportedConfiguration(
                f"--slow {text}: {part.strip() or 'an empty part'} must be one of {', '.join(_RULES)}, each once, as "
                f"name=value; {_EXAMPLE}"
            )
        given[name] = value
    missing = [name for name in ("trainer", "factor") if name not in given]
    if missing:
        raise UnsupportedConfiguration(f"--slow {text}: {missing[0]} is missing; {_EXAMPLE}")
    values: dict[str, Any] = {name: _checked(text, name, value) for name, value in given.items()}
    return SlowdownSpec(**values)


def _checked(text: str, name: str, value: str) -> int | float:
    kind, least, most, rule = _RULES[name]
    try:
        number = kind(value)
    except ValueError:
        number = None
    if number is None or not least <= number <= most:  # nan fails too
        raise UnsupportedConfiguration(f"--slow {text}: {name} ({value}) must be {rule}; {_EXAMPLE}")
    return number


_RULES: Mapping[str, tuple[type[int] | type[float], float, float, str]] = {
    "trainer": (int, 0, 10**9, "the index of a trainer, from 0"),
    "factor": (float, 1.0, 1e6, "a number from 1 to 1000000"),
    "probability": (float, 0.0, 1.0, "a number from 0 to 1"),
}


class Slowdown:
    """Extends the computation of a batch to ``factor`` times its duration.

    The trainer waits between forward and backward, so that its gradients arrive as late as from a slow computer:
    ``factor - 1`` times the duration of this batch's forward and of the previous backward. A backward lasts until the
    last gradient is accumulated; what follows (an all-reduce) is not computation. Where the server computes
    (``server.compute: server``) the backward cannot be observed, and the forward includes the server's part.
    """

    def __init__(self, slow: SlowdownSpec, seed: int, trainer_index: int) -> None:
        self._slow, self._seed, self._trainer_index = slow, seed, trainer_index
        self._backward_began = 0.0
        self._backward_s = 0.0
        self._watched: Any = None
        self._waiting = threading.Event()  # never set: a wait on it simulates computation

    def after_forward(self, model: Any, loss: Any, forward_s: float, batch_idx: int) -> None:
        """Call after the forward of each batch; blocks as long as a slow trainer computes, and times the backward."""
        if loss is None:
            raise TaskError("--slow must have a task with one optimizer, whose backward it measures; leave it out")
        if self._slow.slows(self._seed, self._trainer_index, batch_idx):
            self.wait(forward_s + self._backward_s)
        # Hooks of parameters are registered once for each model, the hook of the loss for each batch.
        if self._watched is not model and hasattr(model, "parameters"):
            self._watched = model
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._on_gradient)
        if loss.requires_grad:
            loss.register_hook(self._on_backward)

    def wait(self, computed_s: float) -> None:
        """Block for as long as a slow trainer computes in addition, what took ``computed_s``."""
        self._waiting.wait((self._slow.factor - 1) * computed_s)

    def _on_backward(self, gradient: Any) -> None:
        self._backward_began = time.perf_counter()

    def _on_gradient(self, parameter: Any) -> None:
        self._backward_s = time.perf_counter() - self._backward_began
