"""The generators of a process: seeding, saving and restoring their states."""

import io
import itertools
import random
from unittest import mock

import numpy as np
import pytest
import torch
from any_optimizers import OF_TORCH, build

from paramserver.optim.parallel_step import generators_of_update
from paramserver.rng import random_states, restore_random_states, seed_all, update_generators, validation_generators


@pytest.fixture(autouse=True)
def restored_generators():
    states = random_states()
    yield
    restore_random_states(states)


def drawn() -> tuple:
    """Numbers of every generator; an odd count of normal deviates each, so that a cached one is part of the state."""
    return (
        torch.randn(3).tolist(),
        np.random.standard_normal(3).tolist(),
        random.gauss(0, 1),
        [random.random() for _ in range(3)],
    )


def test_a_state_as_an_earlier_version_stored_it_is_restored():
    states = {**random_states(), "random": random.getstate()}
    expected = drawn()
    restore_random_states(states)
    assert drawn() == expected


def test_the_same_seed_gives_the_same_numbers():
    seed_all(5, 2)
    first = drawn()
    seed_all(5, 2)
    assert drawn() == first


def test_nearby_seeds_give_unrelated_streams():
    seen = []
    for seeds in itertools.product(range(6), range(6)):
        seed_all(*seeds)
        seen.append((torch.rand(1).item(), np.random.random_sample(), random.random()))
    for column in zip(*seen, strict=True):
        assert len(set(column)) == 36
    firsts = [s[0] for s in seen]
    assert abs(np.corrcoef(firsts[:-1], firsts[1:])[0, 1]) < 0.5


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_any_seed_of_the_config_is_accepted(seed):
    seed_all(seed)
    seed_all(seed, 1, 0)
    assert 0 <= torch.initial_seed() < 2**63


@pytest.mark.parametrize("stored", [False, True])
def test_restored_states_continue_where_they_were_saved(stored):
    seed_all(7)
    drawn()
    states = random_states()
    expected = [drawn(), drawn()]
    if stored:  # as in a checkpoint
        file = io.BytesIO()
        torch.save(states, file)
        file.seek(0)
        states = torch.load(file, weights_only=True)
    seed_all(8)
    restore_random_states(states)
    assert [drawn(), drawn()] == expected


def test_a_cached_deviate_is_part_of_the_state():
    seed_all(3)
    np.random.standard_normal()
    random.gauss(0, 1)
    states = random_states()
    expected = np.random.standard_normal(), random.gauss(0, 1)
    np.random.seed(1)
    random.seed(1)
    restore_random_states(states)
    assert (np.random.standard_normal(), random.gauss(0, 1)) == expected


def test_each_gpu_continues_the_state_of_its_place(monkeypatch):
    """Of the first GPU of a trainer, whatever its number; more or fewer of them keep or lose their own."""
    states = {torch.device("cuda", i): torch.tensor([i]) for i in range(4)}
    module = mock.Mock(get_rng_state=states.get)
    module.set_rng_state = lambda state, device: states.update({device: state})
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    stored = random_states([torch.device("cuda", 2), torch.device("cuda", 3)])
    restore_random_states(stored, [torch.device("cuda", 0)])
    assert [int(state) for state in states.values()] == [2, 1, 2, 3]
    restore_random_states(stored, [torch.device("cpu")])
    restore_random_states(random_states([torch.device("cpu")]), list(states))
    assert [int(state) for state in states.values()] == [2, 1, 2, 3]


@pytest.mark.claim("optimizer-draws")
def test_an_update_draws_by_seed_version_and_server_and_leaves_the_generators_as_they_were():
    def updated(*key):
        with update_generators(*key):
            return drawn()

    drawn()
    states = random_states()
    expected = drawn()
    restore_random_states(states)
    first = updated(0, 100)
    assert drawn() == expected
    assert updated(0, 100, 0) == first
    assert first not in [updated(0, 100, 1), updated(0, 101), updated(1, 100)]
    with validation_generators(0, 100, 0):
        assert drawn() != first


@pytest.mark.claim("optimizer-draws")
def test_the_optimizers_of_torch_draw_nothing_and_their_generators_are_not_exchanged():
    for name, optimizer in trained_with(OF_TORCH):
        before = torch.get_rng_state()
        with generators_of_update(optimizer, 0, 100):
            assert torch.equal(torch.get_rng_state(), before), name
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), before), name
    for name, optimizer in trained_with(["Lion", "Langevin", "NoisySGD"]):
        before = torch.get_rng_state()
        with generators_of_update(optimizer, 0, 100):
            assert not torch.equal(torch.get_rng_state(), before), name
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), before), name


def trained_with(names):
    for name in names:
        weight = torch.nn.Parameter(torch.ones(2, 2))
        weight.grad = torch.ones(2, 2)
        yield name, build(name, [weight])


@pytest.mark.claim("validation-draws")
def test_a_validation_draws_by_seed_version_and_share_and_leaves_the_generators_as_they_were():
    def validated(*key):
        with validation_generators(*key):
            return drawn()

    seed_all(4)
    drawn()
    states = random_states()
    expected = drawn()
    restore_random_states(states)
    first = validated(0, 100, 1)
    assert drawn() == expected
    assert validated(0, 100, 1) == first
    assert first not in [validated(0, 100, 0), validated(0, 200, 1), validated(1, 100, 1)]
    # A share within another validation, and a validation that fails.
    restore_random_states(states)
    with validation_generators(0, 100, 0):
        assert validated(0, 100, 1) == first
    assert drawn() == expected
    restore_random_states(states)
    with pytest.raises(RuntimeError), validation_generators(0, 100, 0):
        torch.rand(2).view(3)
    assert drawn() == expected


@pytest.mark.parametrize("accelerator", [None, torch.device("cuda")])
def test_the_seed_is_that_of_manual_seed_which_is_called_where_torch_is_built_for_another_device(
    monkeypatch, accelerator
):
    seeds = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    real = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or real(seed))
    seed_all(5, 2)
    values = torch.randn(3)
    assert len(seeds) == (accelerator is not None)
    real(torch.initial_seed())
    assert torch.equal(torch.randn(3), values)
