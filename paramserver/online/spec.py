"""What the section ``simulations`` asks for, checked whole before anything starts.

What a sample of a simulation must be: its fields, declared beforehand.

What the source of a trainer must know to receive samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paramserver.cluster import is_loopback
from paramserver.config import SimulationsConfig
from paramserver.errors import UnsupportedConfiguration
from paramserver.online.protocol import DTYPES, ArrayDescriptor

RESERVED = ("simulation", "step", "parameters")
"""What a sample holds beside its fields; no field may be called so."""

_KEYS = ("shape", "dtype", "finite")


@dataclass(frozen=True)
class FieldSpec:
    """One array of every sample.

    Attributes:
        name: its key in a sample.
        dtype: as numpy writes it, little-endian: ``<f4``.
        shape: of a whole sample.
        finite: refuse what holds a NaN or an infinity.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    finite: bool = False

    @property
    def shaped(self) -> ArrayDescriptor:
        return ArrayDescriptor(self.name, self.dtype, self.shape)


def read_fields(declared: Mapping[str, Any]) -> tuple[FieldSpec, ...]:
    """The fields that ``simulations.fields`` declares.

    ``name: [100, 100]`` is float32 of this shape; ``name: {shape: [100, 100], dtype: float64, finite: true}`` says all.

    Raises:
        UnsupportedConfiguration: none, a name that is taken, a key, shape or dtype that is none.
    """
    if not declared:
        raise UnsupportedConfiguration(
            "simulations.fields must name what a sample holds; for example {temperature: [100, 100]}"
        )
    return tuple(_read_field(str(name), value) for name, value in declared.items())


def _read_field(name: str, value: Any) -> FieldSpec:
    key = f"simulations.fields.{name}"
    if name in RESERVED:
        raise UnsupportedConfiguration(f"{key} must not be one of {', '.join(RESERVED)}; rename it")
    options = value if isinstance(value, Mapping) else {"shape": value}
    unknown = [option for option in options if option not in _KEYS]
    if unknown:
        raise UnsupportedConfiguration(f"{key}.{unknown[0]} is no key; known are {', '.join(_KEYS)}")
    finite = options.get("finite", False)
    if not isinstance(finite, bool):
        raise UnsupportedConfiguration(f"{key}.finite ({finite}) must be true or false")
    return FieldSpec(name, _dtype(key, options.get("dtype", "float32")), _shape(key, options.get("shape")), finite)


def _dtype(key: str, word: Any) -> str:
    try:
        name: str = np.dtype(word).newbyteorder("<").str
    except TypeError:
        name = ""
    if name not in DTYPES:
        raise UnsupportedConfiguration(f"{key}.dtype ({word}) must be bool, an integer or a float; for example float32")
    return name


def _shape(key: str, sizes: Any) -> tuple[int, ...]:
    if isinstance(sizes, Sequence) and not isinstance(sizes, str) and all(type(n) is int and n > 0 for n in sizes):
        return tuple(sizes)
    raise UnsupportedConfiguration(f"{key}.shape ({sizes}) must be a list of positive whole numbers; [] is one number")


@dataclass(frozen=True)
class IngestSpec:
    """Online training, as the config says it.

    Attributes:
        config: the section.
        fields: of every sample.
        parameters: (name, low, high) of every simulation, in order.
    """

    config: SimulationsConfig
    fields: tuple[FieldSpec, ...]
    parameters: tuple[tuple[str, float, float], ...]

    @classmethod
    def of(cls, config: SimulationsConfig) -> IngestSpec:
        """Read and check the section.

        Raises:
            UnsupportedConfiguration: a field or range that is none, or an address that others reach without keys.
        """
        plan = cls(config, read_fields(config.fields), _ranges(config.parameters))
        _check_parts(plan)
        _check_keys(config)
        return plan

    @property
    def shaped(self) -> tuple[ArrayDescriptor, ...]:
        return tuple(field.shaped for field in self.fields)

    @property
    def sample_bytes(self) -> int:
        """Of all fields of one sample."""
        return sum(field.bytes for field in self.shaped)

    @property
    def started_here(self) -> bool:
        """Whether the run starts its simulations itself."""
        return self.config.command is not None or self.config.function is not None

    @property
    def expected_samples(self) -> int | None:
        """Of all trainers together; None where simulations or their steps are not counted beforehand."""
        count, steps = self.config.count, self.config.steps
        return None if count is None or steps is None else count * steps

    def expected_for(self, index: int, trainers: int) -> int | None:
        """What one trainer is going to get; None where that is not known."""
        count, steps = self.config.count, self.config.steps
        if count is None or steps is None or self.config.deal != "round_robin":
            return None
        return sum(self.steps_for(simulation, index, trainers) or 0 for simulation in range(count))

    def steps_for(self, simulation: int, index: int, trainers: int) -> int | None:
        """How many samples of a simulation one trainer is going to get, if any; None where that is not known."""
        steps = self.config.steps
        if steps is None or self.config.deal != "round_robin":
            return steps
        whole, rest = divmod(steps, trainers)
        return whole + ((index - simulation) % trainers < rest)


def _ranges(parameters: Mapping[str, Any]) -> tuple[tuple[str, float, float], ...]:
    return tuple(_range(str(name), value) for name, value in parameters.items())


def _range(name: str, value: Any) -> tuple[str, float, float]:
    match value:
        case [int() | float() as low, int() | float() as high] if not isinstance(low, bool) and low < high:
            return name, float(low), float(high)
    raise UnsupportedConfiguration(
        f"simulations.parameters.{name} ({value}) must be [low, high] with low below high; for example [100, 500]"
    )


def _check_parts(plan: IngestSpec) -> None:
    single = [field.name for field in plan.fields if not field.shape]
    if plan.config.group_size > 1 and single:
        raise UnsupportedConfiguration(
            f"simulations.fields.{single[0]}.shape ([]) must have a dimension along which the "
            f"{plan.config.group_size} processes of a simulation divide it; give it one, for example [1]"
        )


def _check_keys(config: SimulationsConfig) -> None:
    if config.keys is None and not is_loopback(config.address):
        raise UnsupportedConfiguration(
            f"simulations.keys (null) must be given with simulations.address {config.address}, which others can reach; "
            "make them with: paramserver keys FOLDER"
        )
    if config.keys is not None and not Path(config.keys).is_dir():
        raise UnsupportedConfiguration(
            f"simulations.keys ({config.keys}) must be a folder; make it with: paramserver keys {config.keys}"
        )


@dataclass(frozen=True)
class ReceiverSpec:
    """The place of one trainer in an online run.

    Attributes:
        desk: address of the desk: ``tcp://host:port``.
        token: secret of the run, which the desk made.
        plan: what is sent.
        trainer_index: which trainer this is.
        trainers: how many there are.
        host: the address of this machine on which clients reach the trainer.
        timeout_s: how long the desk may be silent.
    """

    desk: str
    token: bytes
    plan: IngestSpec
    trainer_index: int
    trainers: int
    host: str = "127.0.0.1"
    timeout_s: float = 60.0

    @property
    def keys(self) -> str | None:
        """Folder of the run's keys; None = without, on loopback."""
        return self.plan.config.keys
