"""Who does what: the ranks of a world by the table of modes."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from paramserver.config.modes import MODES, Mode
from paramserver.config.schema import Config
from paramserver.errors import UnsupportedConfiguration


@dataclass(frozen=True)
class Role:
    """What one rank is. Exactly one of the two indices is a number."""

    global_rank: int
    kind: Literal["server", "trainer"]
    server_index: int | None = None
    trainer_index: int | None = None

    def __str__(self) -> str:
        index = self.trainer_index if self.server_index is None else self.server_index
        return f"{self.kind} {index}"


def mode_of(config: Config) -> Mode:
    return MODES[config.mode]


def server_computes(config: Config) -> bool:
    """Whether the model's forward runs on a server."""
    return mode_of(config).has_servers and config.server.compute == "server"


def trainer_of(config: Config) -> str:
    """The "module:Class" of the run's trainer."""
    mode = mode_of(config)
    return config.trainer or (mode.served_trainer_class if server_computes(config) else mode.trainer_class)


def num_servers_of(config: Config) -> int:
    return config.cluster.num_servers if mode_of(config).has_servers else 0


def num_trainers_of(config: Config) -> int:
    return world_size_of(config) - num_servers_of(config)


def world_size_of(config: Config) -> int:
    """Count the ranks of the run where the world size is given by the config alone."""
    if mode_of(config).single_process:
        return 1
    return num_servers_of(config) + config.cluster.num_trainers


def with_world_size(config: Config, world_size: int) -> Config:
    """Fit the config to a world of this size: the ranks that are no servers are its trainers.

    Raises:
        UnsupportedConfiguration: the mode cannot run in such a world.
    """
    _check_world(config, world_size)
    if mode_of(config).single_process:
        return config
    cluster = dataclasses.replace(config.cluster, num_trainers=world_size - num_servers_of(config))
    return dataclasses.replace(config, cluster=cluster)


def roles(config: Config, world_size: int) -> list[Role]:
    """List the role of each rank, by global rank: servers first, then trainers.

    Raises:
        UnsupportedConfiguration: the mode cannot run in such a world.
    """
    _check_world(config, world_size)
    servers = num_servers_of(config)
    return [
        Role(rank, "server", server_index=rank)
        if rank < servers
        else Role(rank, "trainer", trainer_index=rank - servers)
        for rank in range(world_size)
    ]


def _check_world(config: Config, world_size: int) -> None:
    mode, servers = mode_of(config), num_servers_of(config)
    if mode.single_process and world_size != 1:
        raise UnsupportedConfiguration(
            f"world_size ({world_size}) must be 1 in mode {mode.name}, which is one process; "
            "leave it out or choose another mode"
        )
    if world_size < servers + 1:
        of = f"{servers} for the servers and 1 for a trainer" if servers else "1 for a trainer"
        raise UnsupportedConfiguration(
            f"world_size ({world_size}) must be at least {servers + 1} in mode {mode.name}: {of}; start more ranks"
        )
