"""What a run tells a simulation that it starts: the variables of its environment. Standard library only.

SLURM, as far as what starts other programs must know of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from paramserver.errors import UnsupportedConfiguration

ADDRESS = "PARAMSERVER_ADDRESS"
SIMULATION = "PARAMSERVER_SIMULATION"
PARAMETERS = "PARAMSERVER_PARAMETERS"
ATTEMPT = "PARAMSERVER_ATTEMPT"
MEMBER = "PARAMSERVER_MEMBER"
MEMBERS = "PARAMSERVER_MEMBERS"
KEYS = "PARAMSERVER_KEYS"
# Where srun starts a whole group, all its processes get one environment, and this tells them apart.
_SRUN_MEMBER = "SLURM_PROCID"


@dataclass(frozen=True)
class SimulationEnvironment:
    """One process of a simulation, as the run that starts it sees it; None = not told.

    Attributes:
        address: of the run, for clients: ``tcp://host:port``.
        simulation: its number.
        parameters: what the run drew for it.
        attempt: how often it was started before.
        member: which process of the simulation's group.
        members: how many there are in the group.
        keys: folder of the run's keys.
    """

    address: str | None = None
    simulation: int | None = None
    parameters: tuple[float, ...] | None = None
    attempt: int | None = None
    member: int | None = None
    members: int | None = None
    keys: str | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str] | None = None) -> SimulationEnvironment:
        """Read it.

        Args:
            environ: None = that of this process.

        Raises:
            UnsupportedConfiguration: a variable that holds something else.
        """
        told = os.environ if environ is None else environ
        members = _whole(told, MEMBERS)
        member = _whole(told, MEMBER)
        if member is None and members is not None and members > 1:
            member = _whole(told, _SRUN_MEMBER)
        return cls(
            address=told.get(ADDRESS) or None,
            simulation=_whole(told, SIMULATION),
            parameters=_numbers(told, PARAMETERS),
            attempt=_whole(told, ATTEMPT),
            member=member,
            members=members,
            keys=told.get(KEYS) or None,
        )

    def variables(self) -> dict[str, str]:
        """What tells all this to a process; nothing for what is None."""
        values = {
            ADDRESS: self.address,
            SIMULATION: self.simulation,
            PARAMETERS: None if self.parameters is None else json.dumps(self.parameters),
            ATTEMPT: self.attempt,
            MEMBER: self.member,
            MEMBERS: self.members,
            KEYS: self.keys,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def _whole(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise UnsupportedConfiguration(
            f"{name} ({text}) must be a whole number from 0; the run sets it, leave it alone"
        )
    return int(text)


def _numbers(environ: Mapping[str, str], name: str) -> tuple[float, ...] | None:
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


JOB_ID = "SLURM_JOB_ID"


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether this process runs inside a SLURM allocation (sbatch, salloc), where srun starts further steps."""
    return bool(environ.get(JOB_ID))
