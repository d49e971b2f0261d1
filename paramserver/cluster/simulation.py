"""Environment variables by which a run passes parameters to the simulations that it starts. Standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from paramserver.errors import UnsupportedConfiguration

VARIABLES = {
    "address": "PARAMSERVER_ADDRESS",
    "simulation": "PARAMSERVER_SIMULATION",
    "parameters": "PARAMSERVER_PARAMETERS",
    "attempt": "PARAMSERVER_ATTEMPT",
    "member": "PARAMSERVER_MEMBER",
    "members": "PARAMSERVER_MEMBERS",
    "keys": "PARAMSERVER_KEYS",
    "secret": "PARAMSERVER_SECRET",
    "publisher": "PARAMSERVER_PUBLISHER",
}
# srun gives all processes of a group the same environment except for this variable.
_SRUN_MEMBER = "SLURM_PROCID"


@dataclass(frozen=True)
class SimulationEnvironment:
    """What a run passes to one process of a simulation; None = not set.

    Attributes:
        parameters: sampled by the run for this simulation.
        attempt: number of earlier starts.
        keys: folder of the run's keys.
        secret: of this start, by which its clients prove that the run has started them.
        publisher: address of the versions of the model, for a ``Subscriber``.
    """

    address: str | None = None
    simulation: int | None = None
    parameters: tuple[float, ...] | None = None
    attempt: int | None = None
    member: int | None = None
    members: int | None = None
    keys: str | None = None
    secret: str | None = None
    publisher: str | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> SimulationEnvironment:
        """Read the variables.

        Raises:
            UnsupportedConfiguration: a variable has a wrong value.
        """
        environ = os.environ if environ is None else environ
        members = _read_integer(environ, VARIABLES["members"])
        member = _read_integer(environ, VARIABLES["member"])
        if member is None and members is not None and members > 1:
            member = _read_integer(environ, _SRUN_MEMBER)
        return cls(
            address=environ.get(VARIABLES["address"]) or None,
            simulation=_read_integer(environ, VARIABLES["simulation"]),
            parameters=_read_numbers(environ, VARIABLES["parameters"]),
            attempt=_read_integer(environ, VARIABLES["attempt"]),
            member=member,
            members=members,
            keys=environ.get(VARIABLES["keys"]) or None,
            secret=environ.get(VARIABLES["secret"]) or None,
            publisher=environ.get(VARIABLES["publisher"]) or None,
        )

    def to_environ(self) -> dict[str, str]:
        """Return the variables that pass this to a process; none for attributes that are None."""
        given = {name: value for name in VARIABLES if (value := getattr(self, name)) is not None}
        return {
            VARIABLES[name]: json.dumps(value) if isinstance(value, tuple) else str(value)
            for name, value in given.items()
        }


def _read_integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise UnsupportedConfiguration(
            f"{name} ({text}) must be a whole number from 0; the run sets it, leave it alone"
        )
    return int(text)


def _read_numbers(environ: Mapping[str, str], name: str) -> tuple[float, ...] | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if isinstance(values, list) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        return tuple(float(value) for value in values)
    raise UnsupportedConfiguration(f"{name} ({text}) must be a JSON list of numbers; the run sets it, leave it alone")
