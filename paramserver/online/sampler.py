"""Samplers of simulation parameters: each maps the number of a simulation to its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.importing import describe_user_error, load_object

Ranges = Sequence[tuple[str, float, float]]
"""(name, low, high) of each parameter."""

# Keeps these random numbers apart from all others of the seed; see the table in rng.py, which needs torch.
_STREAM = 0x51


class Sampler(Protocol):
    """The interface of a sampler. A user's ``module:Class`` is created with ``(ranges, seed, count)``."""

    def draw(self, index: int) -> Sequence[float]:
        """Return the parameters of simulation ``index``, one number for each range.

        Indices from ``count`` on replace simulations that were given up. The result must depend on the arguments
        alone, because a run that resumes from a checkpoint creates a new sampler.
        """
        ...


class Uniform:
    """Independent uniform parameters: a function of (seed, index).

    Example::

        >>> sampler = Uniform([("t0", 100.0, 500.0)], seed=1, count=10)
        >>> sampler.draw(3) == sampler.draw(3)
        True
        >>> 100.0 <= sampler.draw(3)[0] < 500.0
        True
    """

    def __init__(self, ranges: Ranges, seed: int, count: int) -> None:
        self._ranges = ranges
        self._seed = seed

    def draw(self, index: int) -> list[float]:
        unit = np.random.default_rng([_STREAM, self._seed, index]).random(len(self._ranges))
        return _scaled(unit, self._ranges)


class LatinHypercube:
    """Latin hypercube sampling: each of ``count`` slices of each range is used once (McKay, Beckman, Conover 1979).

    A function of (seed, count, index). Indices from ``count`` on have no slice left and are sampled as by ``Uniform``.
    """

    def __init__(self, ranges: Ranges, seed: int, count: int) -> None:
        self._ranges = ranges
        engine = _qmc("lhs").LatinHypercube(len(ranges), seed=np.random.default_rng([_STREAM, seed]))
        self._unit_points: npt.NDArray[np.float64] = engine.random(count)
        self._beyond = Uniform(ranges, seed, count)

    def draw(self, index: int) -> list[float]:
        if index < len(self._unit_points):
            return _scaled(self._unit_points[index], self._ranges)
        return self._beyond.draw(index)


class Halton:
    """The scrambled Halton sequence (Halton 1960; Owen 2017), which covers the ranges evenly at any length.

    A function of (seed, index); indices from ``count`` on continue the sequence.
    """

    def __init__(self, ranges: Ranges, seed: int, count: int) -> None:
        self._ranges = ranges
        self._qmc = _qmc("halton")
        self._seed = seed

    def draw(self, index: int) -> list[float]:
        engine = self._qmc.Halton(len(self._ranges), seed=np.random.default_rng([_STREAM, self._seed]))
        return _scaled(engine.fast_forward(index).random(1)[0], self._ranges)


class CheckedSampler:
    """A user's sampler, whose results are checked.

    Raises:
        TaskError: from ``draw``, if it raises or returns anything else than one finite number for each range.
    """

    def __init__(self, sampler: Any, ranges: Ranges, reference: str) -> None:
        self._sampler, self._size, self._reference = sampler, len(ranges), reference

    def draw(self, index: int) -> list[float]:
        try:
            vector = np.asarray(self._sampler.draw(index), dtype=np.float64)
        except Exception as error:
            raise TaskError(
                f"simulations.sampler ({self._reference}).draw({index}) raised {describe_user_error(error)}"
            ) from error
        if vector.shape != (self._size,) or not np.isfinite(vector).all():
            raise TaskError(
                f"simulations.sampler ({self._reference}).draw({index}) gave {vector.tolist()}; it must give "
                f"{self._size} finite numbers, one for each of simulations.parameters"
            )
        return list(vector.tolist())


_SAMPLERS: dict[str, Callable[[Ranges, int, int], Sampler]] = {
    "uniform": Uniform,
    "lhs": LatinHypercube,
    "halton": Halton,
}


def make_sampler(name: str, ranges: Ranges, seed: int, count: int, folders: Sequence[Path] = ()) -> Sampler:
    """Create the sampler that ``simulations.sampler`` names.

    A user's class, ``module:Class``, is searched in ``folders``. Without ``ranges``, every result is empty.

    Raises:
        UnsupportedConfiguration: the name is unknown, or scipy is missing.
        TaskError: a user's class cannot be loaded or created.
    """
    if name in _SAMPLERS:
        return _SAMPLERS[name](ranges, seed, count) if ranges else Uniform(ranges, seed, count)
    if ":" not in name:
        raise UnsupportedConfiguration(
            f"simulations.sampler ({name}) must be {', '.join(_SAMPLERS)} or module:Class; choose one"
        )
    user_class = load_object(name, "simulations.sampler", folders)
    try:
        sampler = user_class(list(ranges), seed, count)
    except Exception as error:
        raise TaskError(f"simulations.sampler ({name}) raised {describe_user_error(error)} when it was made") from error
    return CheckedSampler(sampler, ranges, name)


def _scaled(unit: npt.NDArray[np.float64], ranges: Ranges) -> list[float]:
    """Map a point of the unit cube to the ranges."""
    return [low + u * (high - low) for u, (_, low, high) in zip(unit.tolist(), ranges, strict=True)]


def _qmc(name: str) -> Any:
    try:
        from scipy.stats import qmc
    except ImportError as error:
        raise UnsupportedConfiguration(
            f"simulations.sampler ({name}) needs scipy; install paramserver[examples] or choose uniform"
        ) from error
    return qmc
