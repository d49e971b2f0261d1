"""What the section ``simulations`` asks for, checked whole before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramserver.cluster import is_loopback
from paramserver.config import SimulationsConfig
from paramserver.errors import UnsupportedConfiguration
from paramserver.online.fields import Field, read_fields
from paramserver.online.messages import Shaped


@dataclass(frozen=True)
class Plan:
    """Online training, as the config says it.

    Attributes:
        config: the section.
        fields: of every sample.
        parameters: (name, low, high) of every simulation, in order.
    """

    config: SimulationsConfig
    fields: tuple[Field, ...]
    parameters: tuple[tuple[str, float, float], ...]

    @classmethod
    def of(cls, config: SimulationsConfig) -> Plan:
        """Read and check the section.

        Raises:
            UnsupportedConfiguration: a field or range that is none, or an address that others reach without keys.
        """
        plan = cls(config, read_fields(config.fields), _ranges(config.parameters))
        _check_parts(plan)
        _check_keys(config)
        return plan

    @property
    def shaped(self) -> tuple[Shaped, ...]:
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


def _check_parts(plan: Plan) -> None:
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
