"""Specifications of an online run: what the config section ``simulations`` asks for, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paramserver.cluster import is_loopback
from paramserver.config import Config, SimulationsConfig
from paramserver.errors import UnsupportedConfiguration
from paramserver.online.protocol import DTYPES, VERSION_ROW, ArrayDescriptor
from paramserver.online.weights import Version

RESERVED = ("simulation", "step", "parameters")
"""What a sample holds in addition to its fields; no field may have one of these names."""

OPTIONAL = ("density_ratio",)
"""What samples hold in addition where the run knows it of their simulation; likewise."""

_KEYS = ("shape", "dtype", "finite")


@dataclass(frozen=True)
class FieldSpec(ArrayDescriptor):
    """One array of every whole sample. If it must be ``finite``, arrays that hold a NaN or an infinity are refused."""

    finite: bool = False


VERSION_COLUMN = FieldSpec(VERSION_ROW.name, VERSION_ROW.dtype, VERSION_ROW.shape)
"""The column with the version of the weights with which a sample was made: generation and step."""

COLUMNS: dict[FieldSpec, Any] = {VERSION_COLUMN: (0, 0)}
"""What a sample may hold in addition, where the config has it, and its value in samples that are sent without it."""


_WINDOW, _WINDOW_BYTES = 64, 64 * 2**20


def parse_fields(
    declared: Mapping[str, Any], reserved: Sequence[str] = (*RESERVED, *OPTIONAL)
) -> tuple[FieldSpec, ...]:
    """Parse ``simulations.fields``.

    ``name: [100, 100]`` is float32 of this shape. ``name: {shape: [100, 100], dtype: float64, finite: true}`` is the
    full form.

    Raises:
        UnsupportedConfiguration: no field, a reserved name, or an unknown key, shape or dtype.
    """
    if not declared:
        raise UnsupportedConfiguration(
            "simulations.fields must name what a sample holds; for example {temperature: [100, 100]}"
        )
    return tuple(_parse_field(str(name), value, reserved) for name, value in declared.items())


def _parse_field(name: str, value: Any, reserved: Sequence[str]) -> FieldSpec:
    key = f"simulations.fields.{name}"
    if name in reserved:
        raise UnsupportedConfiguration(f"{key} must not be one of {', '.join(reserved)}; rename it")
    options = value if isinstance(value, Mapping) else {"shape": value}
    unknown = [option for option in options if option not in _KEYS]
    if unknown:
        raise UnsupportedConfiguration(f"{key}.{unknown[0]} is no key; known are {', '.join(_KEYS)}")
    finite = options.get("finite", False)
    if not isinstance(finite, bool):
        raise UnsupportedConfiguration(f"{key}.finite ({finite}) must be true or false")
    return FieldSpec(name, _parse_dtype(key, options.get("dtype", "float32")), _parse_shape(key, options), finite)


def _parse_dtype(key: str, value: Any) -> str:
    try:
        # Little-endian as on the wire, whatever this machine uses.
        name: str = np.dtype(value).newbyteorder("<").str
    except TypeError:
        name = ""
    if name not in DTYPES:
        raise UnsupportedConfiguration(
            f"{key}.dtype ({value}) must be bool, an integer or a float; for example float32"
        )
    return name


def _parse_shape(key: str, options: Mapping[str, Any]) -> tuple[int, ...]:
    sizes = options.get("shape")
    # ``type``, as a bool is an int too; and a text is a sequence.
    if isinstance(sizes, Sequence) and not isinstance(sizes, str) and all(type(n) is int and n > 0 for n in sizes):
        return tuple(sizes)
    raise UnsupportedConfiguration(f"{key}.shape ({sizes}) must be a list of positive whole numbers; [] is one number")


@dataclass(frozen=True)
class IngestSpec:
    """The parsed section ``simulations``, with (name, low, high) of each parameter. Create it with ``of_run``.

    Samples have the ``columns`` in addition to the fields. With ``max_staleness`` (``buffer.max_staleness``) each must
    have a version.
    """

    config: SimulationsConfig
    fields: tuple[FieldSpec, ...]
    parameters: tuple[tuple[str, float, float], ...]
    columns: tuple[FieldSpec, ...] = ()
    max_staleness: int | None = None

    @classmethod
    def of_run(cls, config: Config) -> IngestSpec:
        """Parse and check the section of a config that has it. Raises as ``from_config``."""
        assert config.simulations is not None
        columns = () if config.publish is None else (VERSION_COLUMN,)
        return cls.from_config(config.simulations, columns, config.buffer.max_staleness)

    @classmethod
    def from_config(
        cls, config: SimulationsConfig, columns: tuple[FieldSpec, ...] = (), max_staleness: int | None = None
    ) -> IngestSpec:
        """Parse and check the section.

        Raises:
            UnsupportedConfiguration: an invalid field or range, or an address beyond loopback without keys.
        """
        parameters = tuple(_parse_range(str(name), value) for name, value in config.parameters.items())
        fields = parse_fields(config.fields, (*RESERVED, *OPTIONAL, *(column.name for column in columns)))
        spec = cls(config, fields, parameters, columns, max_staleness)
        _check_groups(spec)
        # Checked here, before anything listens: a run that others can reach must never be open to everyone for a
        # moment.
        check_keys("simulations", config.address, config.keys)
        return spec

    @property
    def required_columns(self) -> tuple[FieldSpec, ...]:
        """Those of the columns without which a sample is refused."""
        return () if self.max_staleness is None else (VERSION_COLUMN,)

    @property
    def sample_bytes(self) -> int:
        return sum(field.num_bytes for field in self.fields)

    @cached_property
    def window(self) -> int:
        """Samples of one process that may wait in front of the buffer of one trainer."""
        most = min(_WINDOW, max(_WINDOW_BYTES // self.sample_bytes, 2))  # with 2 one is sent while one is stored
        return self.config.window or most

    @property
    def is_managed(self) -> bool:
        return self.config.command is not None or self.config.function is not None

    def expected_for(self, trainer_index: int, num_trainers: int) -> int | None:
        """Samples that one trainer receives in the run; None = not known before the end."""
        count, steps = self.config.count, self.config.steps
        # Without round_robin one trainer receives a whole simulation, and is chosen only when that is opened.
        if count is None or steps is None or self.config.deal != "round_robin":
            return None
        return sum(self.steps_for(simulation, trainer_index, num_trainers) or 0 for simulation in range(count))

    def range_for(self, simulation: int, trainer_index: int, num_trainers: int) -> tuple[int, int]:
        """The first step of a simulation that one trainer receives, if it receives any, and the steps to its next."""
        if self.config.deal != "round_robin":
            return 0, 1
        # See ``TrainerDirectory.trainer_for``.
        return (trainer_index - simulation) % num_trainers, num_trainers

    def steps_for(self, simulation: int, trainer_index: int, num_trainers: int) -> int | None:
        """Samples of one simulation that one trainer receives, if it receives any; None = not known before the end."""
        first, stride = self.range_for(simulation, trainer_index, num_trainers)
        return None if self.config.steps is None else len(range(first, self.config.steps, stride))


def _parse_range(name: str, value: Any) -> tuple[str, float, float]:
    match value:
        case [int() | float() as low, int() | float() as high] if not {type(low), type(high)} & {bool}:
            if low < high and math.isfinite(high - low):
                return name, float(low), float(high)
    raise UnsupportedConfiguration(
        f"simulations.parameters.{name} ({value}) must be [low, high], finite, with low below high; for example "
        "[100, 500]"
    )


def _check_groups(spec: IngestSpec) -> None:
    scalars = [field.name for field in spec.fields if not field.shape]
    if spec.config.group_size > 1 and scalars:
        raise UnsupportedConfiguration(
            f"simulations.fields.{scalars[0]}.shape ([]) must have a dimension along which the "
            f"{spec.config.group_size} processes of a simulation divide it; give it one, for example [1]"
        )


def check_keys(section: str, address: str, keys: str | None) -> None:
    """Refuse an address beyond loopback without keys, and keys that are no folder.

    Raises:
        UnsupportedConfiguration: they are such; the message names the keys of ``section``.
    """
    if keys is None and not is_loopback(address):
        raise UnsupportedConfiguration(
            f"{section}.keys (null) must be given with {section}.address {address}, which others can reach; make them "
            "with: paramserver keys FOLDER"
        )
    if keys is not None and not Path(keys).is_dir():
        raise UnsupportedConfiguration(
            f"{section}.keys ({keys}) must be a folder, seen from {Path.cwd()}; name the one of this run, or make one "
            f"with: paramserver keys {keys}"
        )


@dataclass(frozen=True)
class ReceiverSpec:
    """What one trainer needs to receive samples.

    Attributes:
        token: secret of the run, created by the coordinator; a trainer shows it in JOIN.
        host: the address of this machine on which clients reach the trainer.
        timeout_s: silence of the coordinator after which the trainer fails.
        starts: the first version of each generation of the run, if samples have versions.
        learns: whether the sampler of the simulations learns from losses.
    """

    coordinator_address: str
    token: bytes
    ingest: IngestSpec
    trainer_index: int
    num_trainers: int
    host: str = "127.0.0.1"
    timeout_s: float = 60.0
    starts: tuple[Version, ...] = ()
    learns: bool = False

    @property
    def keys(self) -> str | None:
        """Folder of the run's keys; None = no encryption, on loopback."""
        return self.ingest.config.keys
