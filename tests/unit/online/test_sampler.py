"""Parameters of simulations: the same for the same number, and spread as the method promises."""

import builtins

import numpy as np
import pytest

from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.online.sampler import make_sampler

RANGES = (("left", 100.0, 500.0), ("right", -1.0, 1.0), ("top", 0.0, 1e-3))
METHODS = ("uniform", "lhs", "halton")


def draws(name, count, seed=3, ids=None):
    sampler = make_sampler(name, RANGES, seed, count)
    return np.array([sampler.draw(i) for i in (range(count) if ids is None else ids)])


@pytest.mark.parametrize("name", METHODS)
def test_a_draw_depends_on_the_seed_and_the_number_alone(name):
    in_order = draws(name, 20)
    np.testing.assert_array_equal(draws(name, 20, ids=reversed(range(20)))[::-1], in_order)
    assert len(np.unique(in_order)) == in_order.size
    assert not np.isin(draws(name, 20, seed=4), in_order).any()


@pytest.mark.parametrize("name", ["uniform", "halton"])
def test_how_many_are_planned_does_not_matter_where_the_method_allows_it(name):
    np.testing.assert_array_equal(draws(name, 5), draws(name, 50)[:5])


@pytest.mark.parametrize("name", METHODS)
def test_draws_stay_in_their_ranges_also_beyond_the_planned_ones(name):
    found = draws(name, 40, ids=range(120))
    low, high = np.array([(low, high) for _, low, high in RANGES]).T
    assert (found >= low).all()
    assert (found <= high).all()
    middle = (low + high) / 2
    assert (abs(found.mean(0) - middle) < 0.15 * (high - low)).all()
    assert len(np.unique(found[:, 0])) == 120


def slices(found, column, count):
    _, low, high = RANGES[column]
    return sorted(np.floor((found[:, column] - low) / (high - low) * count).astype(int))


@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_latin_hypercube_uses_each_slice_once(column):
    assert slices(draws("lhs", 50), column, 50) == list(range(50))
    assert slices(draws("uniform", 50), column, 50) != list(range(50))


def test_a_latin_hypercube_has_no_slice_left_for_replacements():
    np.testing.assert_array_equal(draws("lhs", 10, ids=[10, 17]), draws("uniform", 10, ids=[10, 17]))


def test_halton_continues_its_sequence():
    np.testing.assert_array_equal(draws("halton", 10, ids=range(10, 30)), draws("halton", 30)[10:])
    # Of base 2: any 16 in a row from a multiple of 16 lie in 16 slices.
    assert slices(draws("halton", 16, ids=range(16, 32)), 0, 16) == list(range(16))


@pytest.mark.parametrize("name", METHODS)
def test_simulations_without_parameters_get_none(name):
    assert make_sampler(name, (), 0, 3).draw(1) == []


@pytest.mark.parametrize("name", ["lhs", "halton"])
def test_without_scipy_the_error_names_the_package(name, monkeypatch):
    real = builtins.__import__

    def without_scipy(module, *rest):
        if module.startswith("scipy"):
            raise ImportError(module)
        return real(module, *rest)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    with pytest.raises(UnsupportedConfiguration, match=rf"{name}\) needs scipy; install it, or "):
        make_sampler(name, RANGES, 0, 3)
    assert len(make_sampler("uniform", RANGES, 0, 3).draw(0)) == 3


def test_an_unknown_name_is_refused():
    with pytest.raises(
        UnsupportedConfiguration, match=r"sampler \(sobol\) must be uniform, lhs, halton, importance or module:Cl"
    ):
        make_sampler("sobol", RANGES, 0, 3)


OWN = """
class Grid:
    def __init__(self, ranges, seed, count):
        self.arguments = (ranges, seed, count)
    def draw(self, index):
        return [low + index for name, low, high in self.arguments[0]]

class Raises(Grid):
    def draw(self, index):
        raise KeyError(index)

class Short(Grid):
    def draw(self, index):
        return super().draw(index)[1:]

class Nan(Grid):
    def draw(self, index):
        return [float("nan")] * 3

class Words(Grid):
    def draw(self, index):
        return "abc"

class NotMade(Grid):
    def __init__(self):
        pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_samplers.py").write_text(OWN)
    yield lambda name: make_sampler(f"own_samplers.py:{name}", RANGES, 7, 3, [tmp_path])
    sys.modules.pop("own_samplers", None)


def test_a_sampler_of_the_user(own):
    assert own("Grid").draw(2) == [102.0, 1.0, 2.0]
    assert own("Grid")._sampler.arguments == (list(RANGES), 7, 3)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Raises", r"draw\(1\) raised KeyError: 1 \(.*own_samplers.py:10\)"),
        ("Short", r"draw\(1\) gave \[0.0, 1.0\]; it must give 3 finite numbers"),
        ("Nan", r"draw\(1\) gave \[nan, nan, nan\]; it must give 3 finite numbers"),
        ("Words", r"draw\(1\) raised ValueError"),
    ],
)
def test_the_result_of_a_users_sampler_is_checked(own, name, sentence):
    with pytest.raises(TaskError, match=sentence):
        own(name).draw(1)


def test_a_class_that_cannot_be_created_or_found_is_reported(own):
    with pytest.raises(TaskError, match=r"NotMade\) raised TypeError.* when it was made"):
        own("NotMade")
    with pytest.raises(TaskError, match=r"has no Missing; it has .*Grid"):
        own("Missing")
