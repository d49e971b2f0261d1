"""Reads whose random numbers depend on (seed, epoch, index) only."""

import random

import numpy as np
import pytest
import torch
from loader_tasks import Fails, LateNoise, Noisy, NoisyGroups

from paramserver.rng import GeneratorStates, random_states, restore_random_states, seed_all
from paramserver.sources import DatasetSource, Partition
from paramserver.sources.reader import SampleReader


@pytest.fixture(autouse=True)
def restored_generators():
    states = random_states()
    yield
    restore_random_states(states)


def numbers(sample):
    """All that was drawn for a sample."""
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in sample.items()}


def read(data, epoch, indices, skip=0, seed=3):
    samples, error = SampleReader(data, seed).read(epoch, indices, skip)
    assert error is None
    return [numbers(sample) for sample in samples]


@pytest.mark.parametrize("data", [Noisy(), LateNoise()])
def test_a_sample_draws_the_same_wherever_it_is_read(data):
    seed_all(1)
    whole = read(data, 2, range(24))
    seed_all(2)
    assert whole == read(data, 2, range(12)) + read(data, 2, range(12, 24))
    assert [whole[17]] == read(data, 2, [17])
    assert whole[5:] == read(data, 2, range(24), skip=5)
    assert whole[17] != read(data, 3, [17])[0]
    assert whole[17] != read(data, 2, [17], seed=4)[0]


def test_samples_of_a_pass_differ():
    for name in ("torch", "numpy", "random"):
        assert len({repr(sample[name]) for sample in read(Noisy(), 0, range(24))}) == 24


def test_a_group_draws_the_same_if_only_its_end_is_needed():
    whole = read(NoisyGroups(), 0, range(8))
    assert read(NoisyGroups(), 0, range(8), skip=3) == whole[3:]
    assert read(NoisyGroups(), 0, range(3, 8)) != whole[3:]


def drawn():
    return torch.randn(3).tolist(), np.random.standard_normal(3).tolist(), random.gauss(0, 1), random.random()


@pytest.mark.parametrize("data", [Noisy(), NoisyGroups(), LateNoise(), Fails(bad=20)])
def test_reading_leaves_the_generators_as_they_were(data):
    """From the second read on with the deviate that numpy has cached; the first read of all is before any step."""
    reader = SampleReader(data, seed=3)
    reader.read(0, range(24))
    seed_all(7)
    expected = [drawn() for _ in range(3)]
    seed_all(7)
    found = []
    for epoch in range(3):
        found.append(drawn())
        reader.read(epoch, range(24))
    assert found == expected


def test_the_first_draw_is_undone_too():
    seed_all(7)
    expected = drawn()
    seed_all(7)
    SampleReader(Noisy(), seed=3).read(0, range(4))
    assert drawn() == expected


def test_a_data_set_that_draws_nothing_is_not_seeded(monkeypatch):
    monkeypatch.setattr("paramserver.sources.reader.seed_read", lambda *entropy: pytest.fail("seeded"))
    assert SampleReader(list("abc"), seed=3).read(0, [2, 0]) == (["c", "a"], None)


def test_another_default_generator_of_numpy_is_left_alone():
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        before = np.random.get_bit_generator().state
        GeneratorStates.take(gauss=True).restore()
        assert read(Noisy(), 0, [1])[0]["torch"] == read(Noisy(), 0, [1])[0]["torch"]
        assert np.random.get_bit_generator().state != before, "its numbers are those of the program that set it"
    finally:
        np.random.set_bit_generator(own)


@pytest.mark.parametrize("kind", [Noisy, NoisyGroups])
def test_samples_are_the_same_from_every_position_and_when_fetched_again(kind):
    def made():
        return DatasetSource(kind(23), Partition(1, 2), seed=3, passes=3, group=4)

    seed_all(1)
    whole = [(key, numbers(sample)) for key, sample in made().samples(0)]
    assert len(whole) == 33
    assert whole[0][1] != dict(whole[11:])[whole[0][0]], "another pass draws other numbers"
    for position in range(33):
        assert [(key, numbers(sample)) for key, sample in made().samples(position)] == whole[position:]
    held = [20, 3, 21, 22, 12]
    fetched = made().fetch_all([whole[n][0] for n in held], held)
    assert [numbers(sample) for sample in fetched] == [whole[n][1] for n in held]


@pytest.mark.parametrize("kind", [Noisy, NoisyGroups])
def test_what_was_stored_with_another_order_is_fetched_by_its_key(kind):
    source = DatasetSource(kind(23), Partition(0, 1), seed=3, passes=1, group=4)
    order = [key for key, _ in source.samples(0)]
    assert [sample["index"] for sample in source.fetch_all(order[::-1], range(23))] == order[::-1]


def test_an_error_of_a_fetch_is_that_of_the_data_set():
    source = DatasetSource(Fails(bad=5), Partition(0, 1), seed=3)
    with pytest.raises(ValueError, match="sample file 5 is damaged"):
        source.fetch_all([5], [0])
