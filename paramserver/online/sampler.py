"""The parameters of each simulation, drawn from its number."""

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

# Apart from the streams that trainers draw from with the same seed.
_STREAM = 0x51


class Sampler(Protocol):
    """What ``module:Class`` must offer; it is made with ``(ranges, seed, count)``."""

    def draw(self, index: int) -> Sequence[float]:
        """The parameters of simulation ``index``, one number for each range.

        Those from ``count`` on take the place of simulations that were given up. It should be a function of its
        arguments alone: a run that goes on from a checkpoint makes a new sampler.
        """
        ...


class Uniform:
    """Each parameter by itself, evenly between its bounds: a function of (seed, index)."""

    def __init__(self, ranges: Ranges, seed: int, count: int) -> None:
        self._bounds = _Bounds(ranges)
        self._seed = seed

    def draw(self, index: int) -> list[float]:
        unit = np.random.default_rng([_STREAM, self._seed, index]).random(self._bounds.size)
        return self._bounds.scale(unit)


class LatinHypercube:
    """Each of ``count`` slices of each parameter's range is used once (McKay, Beckman, Conover 1979).

    A function of (seed, count, index). Those from ``count`` on have no slice left and are drawn as by ``Uniform``.
    """

    def __init__(self, ranges: Ranges, seed: int, count: int) -> None:
        self._bounds = _Bounds(ranges)
        engine = _qmc("lhs").LatinHypercube(self._bounds.size, seed=np.random.default_rng([_STREAM, seed]))
        self._design: npt.NDArray[np.float64] = engine.random(count)
        self._beyond = Uniform(ranges, seed, count)

    def draw(self, index: int) -> list[float]:
        return self._bounds.scale(self._design[index]) if index < len(self._design) else self._beyond.draw(index)


class Halton:
    """The scrambled sequence of Halton (1960; Owen 2017), which fills the ranges evenly however far it goes.

    A function of (seed, index); those from ``count`` on are the next of the sequence.
    """

    def __init__(self, ranges: Ranges, seed: int, count: int) -> None:
        self._bounds = _Bounds(ranges)
        self._qmc = _qmc("halton")
        self._seed = seed

    def draw(self, index: int) -> list[float]:
        engine = self._qmc.Halton(self._bounds.size, seed=np.random.default_rng([_STREAM, self._seed]))
        return self._bounds.scale(engine.fast_forward(index).random(1)[0])


class Checked:
    """A user's sampler, each of whose draws is looked at.

    Raises:
        TaskError: from ``draw``, where it raised or gave something else than one finite number for each range.
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


_KNOWN: dict[str, Callable[[Ranges, int, int], Sampler]] = {"uniform": Uniform, "lhs": LatinHypercube, "halton": Halton}


def make_sampler(name: str, ranges: Ranges, seed: int, count: int, folders: Sequence[Path] = ()) -> Sampler:
    """The sampler that ``simulations.sampler`` names.

    Args:
        name: ``uniform``, ``lhs``, ``halton`` or ``module:Class``.
        ranges: of the parameters; where there are none, every draw is empty.
        seed: of the run.
        count: how many simulations are planned.
        folders: where a user's class is looked for.

    Raises:
        UnsupportedConfiguration: there is none of this name, or scipy is missing.
        TaskError: a user's class cannot be loaded or made.
    """
    if name in _KNOWN:
        return _KNOWN[name](ranges, seed, count) if ranges else Uniform(ranges, seed, count)
    if ":" not in name:
        raise UnsupportedConfiguration(
            f"simulations.sampler ({name}) must be {', '.join(_KNOWN)} or module:Class; choose one"
        )
    user_class = load_object(name, "simulations.sampler", folders)
    try:
        sampler = user_class(list(ranges), seed, count)
    except Exception as error:
        raise TaskError(f"simulations.sampler ({name}) raised {describe_user_error(error)} when it was made") from error
    return Checked(sampler, ranges, name)


class _Bounds:
    def __init__(self, ranges: Ranges) -> None:
        self.size = len(ranges)
        self._low = np.array([low for _, low, _ in ranges])
        self._high = np.array([high for _, _, high in ranges])

    def scale(self, unit: npt.NDArray[np.float64]) -> list[float]:
        """From [0, 1) to the ranges."""
        return list((self._low + unit * (self._high - self._low)).tolist())


def _qmc(name: str) -> Any:
    try:
        from scipy.stats import qmc
    except ImportError as error:
        raise UnsupportedConfiguration(
            f"simulations.sampler ({name}) needs scipy; install paramserver[examples] or choose uniform"
        ) from error
    return qmc
