"""examples/heat/solver.py: against the solution by separation of variables, its orders, and a sparse direct solve."""

import numpy as np
import pytest
from example_modules import load_example
from scipy.sparse import eye_array, kron
from scipy.sparse.linalg import splu

GIVEN = (150.0, 420.0, 180.0, 350.0, 270.0)
MODES = 60


@pytest.fixture(scope="module")
def solver():
    return load_example("heat", "Heat").solver


def nodes(n):
    return np.arange(1, n + 1) / (n + 1)


def one_side(temperature, along, away):
    """The steady field of a square that has this temperature on one side and 0 on the others."""
    odd = np.arange(1, 2 * MODES, 2) * np.pi
    falls = np.sinh(np.outer(1 - away, odd)) / np.sinh(odd)
    return 4 * temperature * np.einsum("ik,jk,k->ij", np.sin(np.outer(along, odd)), falls, 1 / odd)


def exact(parameters, n, time):
    """Separation of variables (Carslaw and Jaeger, Conduction of Heat in Solids, 1959, chapter V).

    The steady field is the sum of four, one for each side; what is missing from it at the start falls mode by mode. The
    integral of the field times sin(kx x) sin(ky y) obeys a' = inflow - (kx^2 + ky^2) a, by Green's second identity.
    """
    initial, left, right, bottom, top = parameters
    x = nodes(n)
    steady = one_side(left, x, x).T + one_side(right, x, 1 - x).T + one_side(bottom, x, x) + one_side(top, x, 1 - x)
    k = np.arange(1, MODES + 1) * np.pi
    sign = np.where(np.arange(MODES) % 2, 1.0, -1.0)
    whole = (1 - sign) / k
    rate = k[:, None] ** 2 + k[None, :] ** 2
    inflow = np.outer(k * (left - sign * right), whole) + np.outer(whole, k * (bottom - sign * top))
    missing = (initial * np.outer(whole, whole) - inflow / rate) * np.exp(-rate * time)
    sines = np.sin(np.outer(x, k))
    return steady + 4 * sines @ missing @ sines.T


def last(fields):
    *_, field = fields
    return field


def test_the_solution_tends_to_that_of_separation_of_variables(solver):
    time, errors = 1 / 16, []
    for n in (7, 15, 31):
        steps = (n + 1) ** 2 // 4  # so that dt = h^2 / 4, and both errors fall four times when h is halved
        field = last(solver.solve(GIVEN, n, steps, time / steps))
        every = (n + 1) // 8
        errors.append(np.abs(field - exact(GIVEN, n, time))[every - 1 :: every, every - 1 :: every].max())
    assert errors[-1] < 0.3
    assert np.log2(errors[0] / errors[1]) > 1.7
    assert np.log2(errors[1] / errors[2]) > 1.7


def test_it_tends_to_the_steady_field_of_its_sides(solver):
    field = last(solver.solve(GIVEN, 63, 20, 0.1))
    steady = exact(GIVEN, 63, 100.0)
    assert np.abs(field - steady)[8:-8, 8:-8].max() < 0.05
    assert exact((0, 1, 1, 1, 1), 1, 100.0) == pytest.approx(1, abs=1e-6)


def decayed(solver, n, steps, time):
    """How much is left of sin(pi x) sin(2 pi y) after some time, and how much should be."""
    stepper = solver.Stepper(n, time / steps)
    start = np.outer(np.sin(np.pi * nodes(n)), np.sin(2 * np.pi * nodes(n)))
    modes = stepper.to_modes(start)
    for _ in range(steps):
        modes = stepper.step(modes)
    field = stepper.to_modes(modes)
    assert np.allclose(field, start * field[0, 0] / start[0, 0])  # one mode, and nothing else
    return field[0, 0] / start[0, 0], np.exp(-5 * np.pi**2 * time)


@pytest.mark.parametrize(
    ("coarse", "fine", "order"),
    [((255, 8), (255, 16), 1), ((255, 16), (255, 32), 1), ((7, 20000), (15, 20000), 2), ((15, 20000), (31, 20000), 2)],
    ids=["time", "time, finer", "space", "space, finer"],
)
def test_it_is_of_first_order_in_time_and_second_in_space(solver, coarse, fine, order):
    errors = [abs(np.subtract(*decayed(solver, n, steps, 0.02))) for n, steps in (coarse, fine)]
    assert np.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.12)


def test_a_step_is_that_of_a_factorised_sparse_matrix(solver):
    n, dt = 9, 0.003
    initial, left, right, bottom, top = GIVEN
    line = (2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)) * (n + 1) ** 2
    inside = np.zeros((n, n))
    inside[0] += left
    inside[-1] += right
    inside[:, 0] += bottom
    inside[:, -1] += top
    solve = splu((eye_array(n * n) + dt * (kron(line, np.eye(n)) + kron(np.eye(n), line))).tocsc()).solve
    field = np.full(n * n, initial)
    for ours in solver.solve(GIVEN, n, 5, dt):
        field = solve(field + dt * (n + 1) ** 2 * inside.ravel())
        assert np.allclose(ours, field.reshape(n, n), rtol=1e-6)


def test_no_temperature_leaves_the_range_of_what_was_given(solver):
    draw = np.random.default_rng(3)
    for _ in range(20):
        given = draw.uniform(100, 500, 5)
        for field in solver.solve(given, 12, 5, draw.choice([1e-5, 1e-3, 0.1])):
            assert given.min() - 1e-3 <= field.min()
            assert field.max() <= given.max() + 1e-3


def test_each_side_is_where_it_is_said_to_be(solver):
    edges = {"left": np.s_[0], "right": np.s_[-1], "bottom": np.s_[:, 0], "top": np.s_[:, -1]}
    for position, side in enumerate(solver.PARAMETERS[1:], start=1):
        given = np.zeros(5)
        given[position] = 100
        field = last(solver.solve(given, 15, 50))
        means = {name: field[edge].mean() for name, edge in edges.items()}
        assert max(means, key=means.get) == side


def test_fields_are_float32_one_for_each_step(solver):
    fields = list(solver.solve(GIVEN, 5, 3))
    assert [(field.dtype, field.shape) for field in fields] == [(np.float32, (5, 5))] * 3
    assert np.array_equal(fields[1], last(solver.solve(GIVEN, 5, 2)))


def test_what_makes_no_sense_is_refused(solver):
    with pytest.raises(ValueError, match=r"parameters \(4 numbers\) must be initial, left, right, bottom, top"):
        next(solver.solve(GIVEN[:4], 5, 3))
    with pytest.raises(ValueError, match=r"n \(0\) must be at least 1"):
        solver.Stepper(0, 0.1)
