"""Which process am I: the answer, and what gives it. The environment is read in this folder only."""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Protocol

from paramserver.cluster.network import is_loopback
from paramserver.config import Config
from paramserver.errors import UnsupportedConfiguration

Environ = Mapping[str, str]


@dataclass(frozen=True)
class ProcessIdentity:
    """One process among those of the run.

    Args:
        global_rank, world_size: the place in the run.
        local_rank, local_world_size: the place among the ranks of this host.
        node_rank: which host.
        master_addr, master_port: where the ranks meet.
        store_is_hosted: an agent (torchrun's) already serves a TCPStore there, so that no rank may bind the port.
        job: a prefix that all ranks of this attempt share, and no other attempt on the same store.
        source: what told: flags, torchrun, environment (variables set by hand) or supervisor.
    """

    global_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    store_is_hosted: bool
    job: str
    source: str


class ClusterEnvironment(Protocol):
    """Something that started this process and knows its rank."""

    def detect(self, environ: Environ) -> bool:
        """Whether this process was started that way."""
        ...

    def identity(self, environ: Environ, config: Config) -> ProcessIdentity:
        """Read the identity; UnsupportedConfiguration where a variable is missing or wrong."""
        ...


def process_environ() -> MutableMapping[str, str]:
    """Return the environment of this process, for those that pass it on."""
    return os.environ


def read_text(environ: Environ, name: str, set_by: str) -> str:
    """Return the value of a variable that must be there."""
    value = environ.get(name, "").strip()
    if not value:
        raise UnsupportedConfiguration(f"{name} must be set, as {set_by} does; start the ranks with it, or give --rank")
    return value


def read_number(environ: Environ, name: str, set_by: str, *, minimum: int = 0, below: int | None = None) -> int:
    """Return a whole number from ``minimum`` up, and less than ``below``."""
    text = read_text(environ, name, set_by)
    if not (text.isascii() and text.isdigit()):
        raise UnsupportedConfiguration(
            f"{name} ({text}) must be a whole number from {minimum}; start the ranks with {set_by}"
        )
    number = int(text)
    if number < minimum:
        raise UnsupportedConfiguration(f"{name} ({number}) must be at least {minimum}; correct the variable")
    if below is not None and number >= below:
        raise UnsupportedConfiguration(f"{name} ({number}) must be below {below}: ranks count from 0")
    return number


def assumed_place(global_rank: int, world_size: int, master_addr: str) -> tuple[int, int, int]:
    """Guess (local_rank, local_world_size, node_rank) where nobody tells.

    Ranks that meet on the loopback share a host; otherwise each is taken to have a host of its own.
    """
    return (global_rank, world_size, 0) if is_loopback(master_addr) else (0, 1, global_rank)
