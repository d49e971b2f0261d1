"""A simulated straggler: which trainer, how often, and by how much."""

import time

import pytest
import torch
from torch import nn

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.bench import slowdown as slowdown_module
from paramserver.tools.bench.slowdown import Slowdown, SlowdownSpec, parse_slowdown, seeded_chance


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        ("trainer=1,factor=5", SlowdownSpec(1, 5.0, 1.0)),
        ("probability=0.1, factor=2.5 ,trainer=0", SlowdownSpec(0, 2.5, 0.1)),
    ],
)
def test_what_is_written_is_read(text, slow):
    assert parse_slowdown(text) == slow


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty part must be one of trainer, factor, probability"),
        ("trainer=1", "factor is missing"),
        ("factor=5", "trainer is missing"),
        ("trainer=1,factor=5,speed=2", "speed=2 must be one of"),
        ("trainer=1,trainer=0,factor=5", "trainer=0 must be one of trainer, factor, probability, each once"),
        ("trainer=one,factor=5", "trainer (one) must be the index of a trainer"),
        ("trainer=-1,factor=5", "trainer (-1) must be the index of a trainer"),
        ("trainer=1.5,factor=5", "trainer (1.5) must be the index of a trainer"),
        ("trainer=1,factor=0.5", "factor (0.5) must be a number from 1 to 1000000"),
        ("trainer=1,factor=nan", "factor (nan) must be a number from 1 to 1000000"),
        ("trainer=1,factor=2,probability=1.1", "probability (1.1) must be a number from 0 to 1"),
    ],
)
def test_what_is_wrong_is_named(text, message):
    with pytest.raises(UnsupportedConfiguration) as caught:
        parse_slowdown(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"--slow {text}: ")


def test_only_the_named_trainer_is_slow():
    assert all(SlowdownSpec(1, 5.0).slows(seed, 1, batch) for seed in range(3) for batch in range(50))
    assert not any(SlowdownSpec(1, 5.0).slows(0, 0, batch) for batch in range(50))
    assert not any(SlowdownSpec(1, 5.0, 0.0).slows(0, 1, batch) for batch in range(50))


def test_chance_is_that_of_seed_trainer_and_batch():
    def hits(seed):
        return [SlowdownSpec(0, 5.0, 0.2).slows(seed, 0, batch) for batch in range(4000)]

    assert hits(0) == hits(0)
    assert hits(0) != hits(1)
    assert abs(sum(hits(0)) / 4000 - 0.2) < 0.02
    two = [[seeded_chance(0.2, 0, trainer, batch) for batch in range(4000)] for trainer in range(2)]
    assert abs(sum(a and b for a, b in zip(*two, strict=True)) / 4000 - 0.04) < 0.01


class Waits:
    """Replaces the event that a slowdown waits on."""

    def __init__(self):
        self.seconds = []

    def wait(self, seconds):
        self.seconds.append(seconds)


@pytest.fixture
def waits(monkeypatch):
    made = Waits()
    monkeypatch.setattr(slowdown_module.threading, "Event", lambda: made)
    return made


class Heavy(torch.autograd.Function):
    """Its backward takes 50 ms."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.05)  # simulated work
        return gradient


def test_a_batch_waits_for_its_forward_and_the_last_backward(waits):
    model, slowdown = nn.Linear(3, 1), Slowdown(SlowdownSpec(0, 4.0), 0, 0)
    for batch in range(3):
        loss = model(Heavy.apply(torch.ones(2, 3, requires_grad=True)) if batch else torch.ones(2, 3)).sum()
        loss = Heavy.apply(loss)
        slowdown.after_forward(model, loss, 0.01, batch)
        loss.backward()
        time.sleep(0.2)  # an all-reduce that follows is not computation
    assert waits.seconds[0] == pytest.approx(3 * 0.01)
    assert 3 * 0.06 <= waits.seconds[1] < 3 * 0.15
    assert 3 * 0.06 <= waits.seconds[2] < 3 * 0.15


def test_a_fast_trainer_never_waits(waits):
    model, slowdown = nn.Linear(3, 1), Slowdown(SlowdownSpec(1, 4.0), 0, 0)
    loss = model(torch.ones(2, 3)).sum()
    slowdown.after_forward(model, loss, 0.01, 0)
    loss.backward()
    assert waits.seconds == []


def test_a_model_that_is_elsewhere_has_no_backward_to_see(waits):
    slowdown = Slowdown(SlowdownSpec(0, 3.0), 0, 0)
    for batch in range(2):
        loss = torch.ones((), requires_grad=True) * 2
        slowdown.after_forward(object(), loss, 0.5, batch)
        loss.backward()
    assert waits.seconds == [1.0, 1.0]
