"""Samplers of simulation parameters: each maps the number of a simulation to its parameters."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from paramserver.errors import CheckpointError, TaskError, UnsupportedConfiguration
from paramserver.importing import describe_user_error, load_object

if TYPE_CHECKING:
    from paramserver.online.spec import IngestSpec

Ranges = Sequence[tuple[str, float, float]]
"""(name, low, high) of each parameter."""

# Keeps these random numbers apart from all others of the seed; see the table in rng.py, which needs torch.
_STREAM = 0x51

# How much of the running mean of losses remains after another one.
_MEAN_KEEPS = 0.99


class Sampler(Protocol):
    """The interface of a sampler. A user's ``module:Class`` is created with ``(ranges, seed, count)``.

    One that learns has three more methods: ``observe(simulation, loss)`` is called with the mean loss of samples of a
    simulation that were trained on, about once a second; ``state_dict()`` returns all that ``observe`` and ``draw``
    change, as numbers, texts, lists and dicts of them with texts as keys; ``load_state_dict(state)`` restores it. The
    same calls of ``observe`` and ``draw`` must give the same parameters. All calls come from one thread, or under one
    lock.

    A sampler that has ``density_ratio(index)`` gives the batch a column of this name: the uniform density over the one
    that simulation ``index`` was drawn from. It is called once, after ``draw``.
    """

    def draw(self, index: int) -> Sequence[float]:
        """Return the parameters of simulation ``index``, one number for each range.

        Called once for each simulation, when it first starts. Indices from ``count`` on replace simulations that were
        given up. The result must depend on the arguments, and on what a sampler that learns has in its ``state_dict``,
        alone, because a run that resumes from a checkpoint creates a new sampler.
        """
        ...


class Uniform:
    """Independent uniform parameters: a function of (seed, index)."""

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

    depends_on_count = True

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


class Importance:
    """Draws more simulations where the loss is high: a mixture of uniform draws and Gaussians around simulations.

    With the probability ``share`` a draw is uniform. Otherwise one of the ``window`` newest simulations is chosen, with
    a probability in proportion to its score, and the parameters are drawn from a Gaussian around it, with the standard
    deviation ``sigma`` (of a range), truncated to the ranges. The score of a simulation, to the power ``power``, is its
    first loss / (running mean of all losses); each further one makes it the mean of the score before and the new ratio.

    The idea is that of S. Dymchenko and B. Raffin, "Loss-driven sampling within hard-to-learn areas for
    simulation-based neural network training", 2023, and S. Dymchenko, A. Purandare, B. Raffin, "MelissaDL x Breed:
    Towards Data-Efficient On-line Supervised Training of Multi-parametric Surrogates with Active Learning", 2024
    (https://arxiv.org/abs/2410.05860): adaptive multiple importance sampling, guided by the loss. Here the share of
    uniform draws is constant, Gaussians are truncated, so that the density of each draw is exact, and the score is
    relative to the losses of the same time.
    """

    def __init__(
        self,
        ranges: Ranges,
        seed: int,
        count: int,
        share: float = 0.5,
        sigma: float = 0.1,
        power: float = 1.0,
        window: int = 200,
    ) -> None:
        # Beyond these limits of sigma the density of a draw around one simulation may be no finite number above 0.
        checks: tuple[tuple[str, Any, type, Callable[[Any], bool], str], ...] = (
            ("share", share, Real, lambda n: 0 < n <= 1, "a number above 0 and at most 1"),
            ("sigma", sigma, Real, lambda n: 1e-3 <= n <= 10, "a number from 0.001 to 10"),
            ("power", power, Real, lambda n: 0 <= n < math.inf, "a number, at least 0"),
            ("window", window, Integral, lambda n: n >= 1, "a whole number, at least 1"),
        )
        for name, value, kind, is_valid, rule in checks:
            if isinstance(value, bool) or not isinstance(value, kind) or not is_valid(value):
                raise UnsupportedConfiguration(f"simulations.sampler_args.{name} ({value}) must be {rule}")
        self._ranges, self._seed = ranges, seed
        self._share, self._sigma, self._power, self._window = share, sigma, power, window
        # Of the newest simulations, in the order of their draws: the point in the unit cube, and the score.
        self._points: dict[int, list[float]] = {}
        self._scores: dict[int, float] = {}
        self._mean = 0.0  # of all losses, the newer ones weigh more
        self._ratio = 1.0

    def draw(self, index: int) -> list[float]:
        rng = np.random.default_rng([_STREAM, self._seed, index])
        unit = rng.random(len(self._ranges))
        centers, weights = self._proposals()
        if len(weights):
            low, high = (_normal_cdf((edge - centers) / self._sigma) for edge in (0.0, 1.0))
            if rng.random() >= self._share:
                chosen = rng.choice(len(weights), p=weights)
                quantiles = low[chosen] + unit * (high[chosen] - low[chosen])
                # A quantile of 0 or 1 has no finite deviate; the next number does.
                deviates = map(NormalDist().inv_cdf, np.clip(quantiles, 1e-300, 1 - 2**-53).tolist())
                unit = np.clip(centers[chosen] + self._sigma * np.fromiter(deviates, np.float64), 0.0, 1.0)
            # Logarithms: with many parameters the product over them is beyond what a float can hold.
            heights = -0.5 * ((unit - centers) / self._sigma) ** 2 - np.log(self._sigma * math.sqrt(2 * math.pi))
            logs = (heights - np.log(high - low)).sum(axis=1)
            top = logs.max()
            log_density = top + np.log(weights @ np.exp(logs - top))
            with np.errstate(divide="ignore"):  # a share of 1
                drawn = np.log(1.0 - self._share) + log_density
            self._ratio = max(float(np.exp(-np.logaddexp(np.log(self._share), drawn))), sys.float_info.min)
        else:
            self._ratio = 1.0
        self._points[index] = unit.tolist()
        while len(self._points) > self._window:
            oldest = next(iter(self._points))
            del self._points[oldest]
            self._scores.pop(oldest, None)
        return _scaled(unit, self._ranges)

    def density_ratio(self, index: int) -> float:
        return self._ratio

    def _proposals(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The centers of the Gaussians, and their weights; none before the first loss."""
        scores = np.array([*self._scores.values()])
        if not scores.any():
            return np.empty((0, len(self._ranges))), np.empty(0)
        # Relative to the largest, so that no power of them is beyond what a float can hold, nor are all of them 0.
        weights = (scores / scores.max()) ** self._power
        return np.array([self._points[index] for index in self._scores]), weights / weights.sum()

    def observe(self, simulation: int, loss: float) -> None:
        if loss < 0:
            raise TaskError(
                f"the loss of simulation {simulation} ({loss:g}) must be at least 0, as simulations.sampler "
                "(importance) draws in proportion to it; call self.log_sample_loss(errors) with errors that are, for "
                "example squares"
            )
        if not math.isfinite(loss):
            return  # as a trainer leaves it out
        self._mean = _MEAN_KEEPS * self._mean + (1 - _MEAN_KEEPS) * loss if self._mean else loss
        if simulation in self._points and self._mean:
            score = loss / self._mean
            self._scores[simulation] = (self._scores.get(simulation, score) + score) / 2

    def state_dict(self) -> dict[str, Any]:
        scores = [[index, score] for index, score in self._scores.items()]
        return {"points": [[*point] for point in self._points.items()], "scores": scores, "mean": self._mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._points = {index: list(point) for index, point in state["points"]}
        self._scores, self._mean = dict(state["scores"]), state["mean"]


class CheckedSampler:
    """A sampler whose results are checked, and what a run needs of it.

    Attributes:
        reference: its name in the config.
        learns: whether it observes losses.
        gives_density_ratio: whether samples have one.
        depends_on_count: whether another number of simulations has other parameters from the first one on.
        record: called with what a sampler that learns drew, observed and restored, in this order.

    Raises:
        TaskError: from each method, if that of the sampler raises or returns anything else than its interface has.
        UnsupportedConfiguration: it observes losses and has no state.
    """

    def __init__(self, sampler: Any, ranges: Ranges, reference: str) -> None:
        self._sampler, self._size, self.reference = sampler, len(ranges), reference
        self.record: Callable[[Mapping[str, Any]], None] = lambda entry: None
        self.learns = hasattr(sampler, "observe")
        # Methods after which the state is looked at once, so that one that cannot be stored is no surprise later.
        self._unchecked = {"draw", "observe"} if self.learns else set()
        self.gives_density_ratio = hasattr(sampler, "density_ratio")
        self.depends_on_count = bool(getattr(sampler, "depends_on_count", False))
        self._has_failed = False
        lacking = [name for name in ("state_dict", "load_state_dict") if self.learns and not hasattr(sampler, name)]
        if lacking:
            raise UnsupportedConfiguration(
                f"simulations.sampler ({reference}) has observe and no {' and no '.join(lacking)}, so a resumed run "
                "would draw other parameters; add state_dict() and load_state_dict(state)"
            )

    def _call(self, method: str, *arguments: Any, convert: Callable[[Any], Any] = lambda result: result) -> Any:
        try:
            return convert(getattr(self._sampler, method)(*arguments))
        except TaskError:
            self._has_failed = True
            raise
        except Exception as error:
            self._has_failed = True
            shown = ", ".join(map(str, arguments)) if method != "load_state_dict" else "state"
            raise TaskError(
                f"simulations.sampler ({self.reference}).{method}({shown}) raised {describe_user_error(error)}"
            ) from error

    def draw_with_ratio(self, index: int) -> tuple[list[float], float | None]:
        """The parameters of a simulation, and their density ratio if the sampler gives one."""
        parameters = self.draw(index)
        ratio = None
        if self.gives_density_ratio:
            ratio = self._call("density_ratio", index)
            if not isinstance(ratio, Real) or not 0 < float(ratio) < math.inf:
                raise TaskError(
                    f"simulations.sampler ({self.reference}).density_ratio({index}) gave {ratio!r}; it must give a "
                    "finite number above 0"
                )
            ratio = float(ratio)
        if self.learns:
            self.record({"draw": index, "parameters": parameters, "density_ratio": ratio})
        self._check_state_after("draw")
        return parameters, ratio

    def observe(self, losses: Mapping[int, float]) -> None:
        """Observe the mean loss of each of these simulations, in their order; none after a method has raised.

        The run ends then, and reports that still come must get their reply until it is saved.
        """
        if self.learns and losses and not self._has_failed:
            self.record({"observe": [*losses.items()]})
            for simulation, loss in losses.items():
                self._call("observe", simulation, loss)
            self._check_state_after("observe")

    def _check_state_after(self, method: str) -> None:
        if method in self._unchecked:
            self._unchecked.remove(method)
            self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state that a checkpoint can store."""
        state = self._call("state_dict")
        try:
            copied: dict[str, Any] = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise TaskError(
                f"simulations.sampler ({self.reference}).state_dict() gave what cannot be stored ({error}); it must "
                "give numbers, texts, and lists or dicts of them"
            ) from error
        if copied != state:
            raise TaskError(
                f"simulations.sampler ({self.reference}).state_dict() must give lists, dicts with texts as keys, and "
                "no NaN: tuples and other keys are not restored as they were, and a NaN cannot be compared"
            )
        return {"sampler": self.reference, "state": copied}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Raises:
            CheckpointError: it is that of another sampler.
        """
        if state["sampler"] != self.reference:
            raise CheckpointError(
                f"simulations.sampler ({self.reference}) must be that of the checkpoint, {state['sampler']}, which "
                "has learned; resume with it"
            )
        self._call("load_state_dict", json.loads(json.dumps(state["state"])))

    def draw(self, index: int) -> list[float]:
        vector = self._call("draw", index, convert=lambda drawn: np.asarray(drawn, dtype=np.float64))
        if vector.shape != (self._size,) or not np.isfinite(vector).all():
            raise TaskError(
                f"simulations.sampler ({self.reference}).draw({index}) gave {vector.tolist()}; it must give "
                f"{self._size} finite numbers, one for each of simulations.parameters"
            )
        return list(vector.tolist())


_SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "uniform": Uniform,
    "lhs": LatinHypercube,
    "halton": Halton,
    "importance": Importance,
}


def make_sampler(
    name: str,
    ranges: Ranges,
    seed: int,
    count: int,
    folders: Sequence[Path] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> CheckedSampler:
    """Create the sampler that ``simulations.sampler`` names, with the ``options`` as keyword arguments.

    A user's class, ``module:Class``, is searched in ``folders``. Without ``ranges``, every result is empty.

    Raises:
        UnsupportedConfiguration: the name or an option is unknown, scipy is missing, or a sampler that learns has no
            state or no ``ranges``.
        TaskError: a user's class cannot be loaded or created.
    """
    if name in _SAMPLERS:
        kind = _SAMPLERS[name] if ranges else Uniform
        if kind is not _SAMPLERS[name] and hasattr(_SAMPLERS[name], "observe"):
            raise UnsupportedConfiguration(
                f"simulations.sampler ({name}) must have parameters to draw; add simulations.parameters, or leave the "
                "sampler out"
            )
        try:
            return CheckedSampler(kind(ranges, seed, count, **options), ranges, name)
        except TypeError as error:
            raise UnsupportedConfiguration(
                f"simulations.sampler_args ({dict(options)}) must be options of simulations.sampler ({name}): {error}"
            ) from error
    if ":" not in name:
        raise UnsupportedConfiguration(
            f"simulations.sampler ({name}) must be {', '.join(_SAMPLERS)} or module:Class; choose one"
        )
    user_class = load_object(name, "simulations.sampler", folders)
    try:
        sampler = user_class(list(ranges), seed, count, **options)
    except Exception as error:
        raise TaskError(f"simulations.sampler ({name}) raised {describe_user_error(error)} when it was made") from error
    return CheckedSampler(sampler, ranges, name)


def sampler_of_run(spec: IngestSpec, seed: int, folders: Sequence[Path] = ()) -> CheckedSampler | None:
    """Create the sampler of a run, as ``make_sampler``; None if its simulations come from outside.

    Raises:
        UnsupportedConfiguration: also, a sampler learns where simulations come from outside.
    """
    name, options, count = spec.config.sampler, spec.config.sampler_args, spec.config.count
    if count is not None and spec.is_managed:
        return make_sampler(name, spec.parameters, seed, count, folders, options)
    learns = hasattr(_SAMPLERS.get(name), "observe")
    if learns or (":" in name and make_sampler(name, spec.parameters, seed, count or 1, folders, options).learns):
        raise UnsupportedConfiguration(
            f"simulations.sampler ({name}) must not learn from losses where simulations come from outside and bring "
            "their parameters; set simulations.function or command, or leave the sampler out"
        )
    return None


def _scaled(unit: npt.NDArray[np.float64], ranges: Ranges) -> list[float]:
    """Map a point of the unit cube to the ranges."""
    return [low + u * (high - low) for u, (_, low, high) in zip(unit.tolist(), ranges, strict=True)]


def _normal_cdf(deviates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    cdf = NormalDist().cdf
    return np.array([cdf(deviate) for deviate in deviates.ravel().tolist()]).reshape(deviates.shape)


def replay(record: Iterable[str], make: Callable[[], Any]) -> list[tuple[Any, Any]]:
    """Repeat what a sampler that learns did in a run.

    Args:
        record: the lines of ``sampler.jsonl`` in the folder of the run. One that is incomplete is left out: the process
            died, or the disk was full, while it was written.
        make: creates the sampler of the run: an object of the class, with the arguments that the run gave it.

    Returns:
        (recorded, repeated) of each draw; they are equal.
    """
    entries = []
    for line in record:
        with suppress(json.JSONDecodeError):
            entries.append(json.loads(line))
    size = next((len(entry["parameters"]) for entry in entries if "draw" in entry), 0)
    reference = next((entry["state"]["sampler"] for entry in entries if entry.get("state") is not None), "replay")

    def make_checked() -> CheckedSampler:
        made = make()
        is_checked = isinstance(made, CheckedSampler)
        return made if is_checked else CheckedSampler(made, [("", 0.0, 1.0)] * size, reference)

    sampler, draws = make_checked(), []
    for entry in entries:
        if "state" in entry:  # the run was started or resumed
            sampler = make_checked()
            if entry["state"] is not None:
                sampler.load_state_dict(entry["state"])
        elif "draw" in entry:
            draws.append(((entry["parameters"], entry["density_ratio"]), sampler.draw_with_ratio(entry["draw"])))
        else:
            sampler.observe(dict(entry["observe"]))
    return draws


def _qmc(name: str) -> Any:
    try:
        from scipy.stats import qmc
    except ImportError as error:
        raise UnsupportedConfiguration(
            f"simulations.sampler ({name}) needs scipy; install it, or choose uniform"
        ) from error
    return qmc
