"""Limits of a run, and the epoch of a sample."""

import pytest

from paramserver.config import TrainingConfig
from paramserver.limits import ALL_SERVED, Limits, end_in_words, is_due, no_more_data


@pytest.mark.parametrize(
    ("limits", "steps", "samples", "reason"),
    [
        (Limits(), 10**9, 10**9, None),
        (Limits(max_steps=5), 4, 10**9, None),
        (Limits(max_steps=5), 5, 0, "training.max_steps (5) reached"),
        (Limits(max_steps=5), 6, 0, "training.max_steps (5) reached"),
        (Limits(max_samples=100), 10**9, 99, None),
        (Limits(max_samples=100), 0, 100, "training.max_samples (100) reached"),
        (Limits(max_samples=100), 0, 130, "training.max_samples (100) reached"),
        (Limits(max_steps=5, max_samples=100), 5, 100, "training.max_steps (5) reached"),
        (Limits(max_seconds=0.001), 10**9, 10**9, None),
    ],
)
def test_the_first_limit_that_is_reached_is_named(limits, steps, samples, reason):
    assert limits.reached(steps, samples) == reason


@pytest.mark.parametrize(
    ("seconds", "reason"), [(0.0, None), (1.49, None), (1.5, "training.max_seconds (1.5) reached"), (9.0, "training")]
)
def test_training_time_is_a_separate_limit(seconds, reason):
    message = Limits(max_seconds=1.5).reached_time(seconds)
    assert message is None if reason is None else message.startswith(reason)
    assert Limits(max_steps=1).reached_time(1e9) is None


def test_limits_are_those_of_the_config():
    training = TrainingConfig(max_steps=3, max_samples=40, max_seconds=2.0, max_epochs=9)
    assert Limits.of(training) == Limits(3, 40, 2.0)
    assert Limits.of(TrainingConfig()) == Limits(None, None, None)


def test_an_interval_is_due_at_its_multiples():
    assert [step for step in range(1, 10) if is_due(step, 3)] == [3, 6, 9]
    assert [step for step in range(1, 4) if is_due(step, 1)] == [1, 2, 3]
    assert not any(is_due(step, 0) for step in range(10))


@pytest.mark.parametrize(
    ("reason", "changes", "trainers", "left", "words"),
    [
        (no_more_data(1), {}, 2, 12, "20 epochs done; 12 samples are less than a step of both trainers"),
        (no_more_data(1), {}, 2, 1, "20 epochs done; 1 sample is less than a step of both trainers"),
        (no_more_data(3), {}, 4, 127, "20 epochs done; 127 samples are less than a step of all 4 trainers"),
        (no_more_data(0), {"accumulate_batches": 2}, 2, 64, "20 epochs done; 64 samples are less than a step of both "),
        (ALL_SERVED, {}, 2, 0, "20 epochs done"),
        (ALL_SERVED, {"max_epochs": 1}, 1, 0, "1 epoch done"),
        (no_more_data(1), {}, 2, 64, f"{no_more_data(1)}; join uses the 64 samples that are left"),
        (ALL_SERVED, {}, 2, 64, ALL_SERVED),
        (no_more_data(1), {}, 2, None, no_more_data(1)),
        (no_more_data(1), {"max_epochs": None}, 2, 12, no_more_data(1)),
        (ALL_SERVED, {"max_epochs": None}, 2, 0, ALL_SERVED),
        ("training.max_steps (5) reached", {}, 2, 0, "training.max_steps (5) reached"),
        ("it is good enough", {}, 2, 0, "it is good enough"),
    ],
)
def test_a_run_whose_epochs_are_done_says_so_and_no_other(reason, changes, trainers, left, words):
    training = TrainingConfig(**{"max_epochs": 20, "batch_size": 32, **changes})
    assert end_in_words(reason, training, trainers, left).startswith(words)
