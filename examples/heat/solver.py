"""The heat equation in the unit square, by implicit finite differences; needs numpy only.

    du/dt = d2u/dx2 + d2u/dy2,   u = initial at t = 0,   u = left, right, bottom, top on the four sides

A step is backward Euler, which is stable for any length of step, on the five-point stencil. The matrix of the stencil
is that of one dimension in x plus that in y, whose eigenvectors are sines. So the linear system of a step is solved
directly by two small matrix products (Lynch, Rice and Thomas, "Direct solution of partial difference equations by
tensor product methods", Numerische Mathematik 6, 1964). A factorisation of the whole sparse matrix would fill in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

Grid = npt.NDArray[np.float64]
Field = npt.NDArray[np.float32]

PARAMETERS = ("initial", "left", "right", "bottom", "top")
"""Temperatures, in this order: at the start, and on the sides x = 0, x = 1, y = 0 and y = 1."""

DIFFUSIVITY = "diffusivity"
"""A sixth parameter, which the steps of a simulation are multiplied by; 1 if it is left out."""

DT = 0.002
"""The default step. In 100 steps the slowest mode of a field decays to 2 %."""

LOW, HIGH = 100.0, 500.0
"""The range of all temperatures, as in config.yaml."""

MEAN, SPREAD = (LOW + HIGH) / 2, (HIGH - LOW) / 12**0.5

VALIDATION_SEED = 20230723


class Stepper:
    """Backward Euler on the ``n`` x ``n`` inner points of a regular grid.

    ``field[i, j]`` is the temperature at ``x = (i + 1) h``, ``y = (j + 1) h``, with ``h = 1 / (n + 1)``.

    Args:
        n: inner points in each direction.
        dt: length of a step.
        sides: the temperatures left, right, bottom and top.
    """

    def __init__(self, n: int, dt: float, sides: Sequence[float] = (0.0, 0.0, 0.0, 0.0)) -> None:
        if n < 1 or dt <= 0:
            raise ValueError(f"n ({n}) must be at least 1 and dt ({dt}) above 0")
        h = 1.0 / (n + 1)
        modes = np.arange(1, n + 1)
        eigenvalues = (2.0 * np.sin(0.5 * np.pi * h * modes) / h) ** 2
        self._sines = np.sqrt(2.0 * h) * np.sin(np.pi * h * np.outer(modes, modes))  # symmetric, its own inverse
        self._divisor = 1.0 + dt * (eigenvalues[:, None] + eigenvalues[None, :])
        self._inflow = self.to_modes(dt / h**2 * _boundary(n, sides))

    def to_modes(self, field: Grid) -> Grid:
        """Transform a field to the basis of eigenvectors. The transform is its own inverse."""
        modes: Grid = self._sines @ field @ self._sines
        return modes

    def step(self, modes: Grid) -> Grid:
        """Advance a transformed field by one step."""
        after: Grid = (modes + self._inflow) / self._divisor
        return after


def _boundary(n: int, sides: Sequence[float]) -> Grid:
    """The boundary term of the stencil: a point next to a side has that side as a neighbour."""
    left, right, bottom, top = sides
    added = np.zeros((n, n))
    added[0, :] += left
    added[-1, :] += right
    added[:, 0] += bottom
    added[:, -1] += top
    return added


def solve(parameters: Iterable[float], n: int, steps: int, dt: float = DT) -> Iterator[Field]:
    """Yield the field after each step.

    Args:
        parameters: the temperatures that ``PARAMETERS`` names, and ``DIFFUSIVITY`` if the simulations differ in it.
        n: inner points in each direction.
        steps: number of steps.
        dt: length of a step.

    Yields:
        float32 [n, n]: step ``s``, from 0, is the field at time ``(s + 1) dt``.
    """
    initial, *sides = (float(value) for value in parameters)
    if len(sides) == len(PARAMETERS):
        dt *= sides.pop()
    if len(sides) != len(PARAMETERS) - 1:
        raise ValueError(f"parameters ({len(sides) + 1} numbers) must be {', '.join(PARAMETERS)}")
    stepper = Stepper(n, dt, sides)
    modes = stepper.to_modes(np.full((n, n), initial))
    for _ in range(steps):
        modes = stepper.step(modes)
        yield stepper.to_modes(modes).astype(np.float32)
