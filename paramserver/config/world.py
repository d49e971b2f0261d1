"""The world of a run: its size, and the role of each rank, derived from the config and the table of modes."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from paramserver.config.modes import MODES, Mode
from paramserver.config.schema import Config
from paramserver.errors import UnsupportedConfiguration

# Each rank costs memory and a question to the store of rank 0 in every process: more are a mistake.
_MOST_RANKS = 65_536


@dataclass(frozen=True)
class Role:
    """The role of one rank. Exactly one of the two indices is set."""

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
    """Whether the forward of the model runs on the server."""
    return mode_of(config).has_servers and config.server.computes


def trainer_of(config: Config) -> str:
    """Return the "module:Class" of the trainer of a run."""
    mode = mode_of(config)
    return config.trainer or (mode.served_trainer_class if server_computes(config) else mode.trainer_class)


def num_servers_of(config: Config) -> int:
    if not mode_of(config).has_servers:
        return 0
    cluster = config.cluster
    return cluster.num_servers or (cluster.num_trainers if cluster.colocate else 1)


def num_trainers_of(config: Config) -> int:
    return world_size_of(config) - num_servers_of(config)


def world_size_of(config: Config) -> int:
    if mode_of(config).single_process:
        return 1
    return num_servers_of(config) + config.cluster.num_trainers


def is_colocated(config: Config) -> bool:
    """Whether each server shares the host of a trainer, and a command is started for each host."""
    return mode_of(config).has_servers and config.cluster.colocate


def num_commands_of(config: Config) -> int:
    """Return the number of commands that start a run by one each: hosts if servers are co-located."""
    return num_trainers_of(config) if is_colocated(config) else world_size_of(config)


def num_ranks_started(config: Config, commands: int) -> int:
    """Return the number of ranks that so many commands start: each of one host, if servers are co-located."""
    return commands + (config.cluster.num_servers or commands) if is_colocated(config) else commands


def with_world_size(config: Config, world_size: int) -> Config:
    """Return the config for a world of this size, with the number of servers: all other ranks are trainers.

    Raises:
        UnsupportedConfiguration: the mode cannot run with this world size.
    """
    _check_world(config, world_size)
    if not mode_of(config).has_servers:
        cluster = dataclasses.replace(config.cluster, num_trainers=world_size)
        return config if mode_of(config).single_process else dataclasses.replace(config, cluster=cluster)
    servers = _servers_in(config, world_size)
    cluster = dataclasses.replace(config.cluster, num_servers=servers, num_trainers=world_size - servers)
    return dataclasses.replace(config, cluster=cluster)


def with_trainers(config: Config, trainers: int) -> Config:
    """Return the config with which a run continues with so many trainers, of which one at least is no backup."""
    config = with_world_size(config, num_servers_of(config) + trainers)
    backups = min(config.server.backup_trainers, trainers - 1)
    return dataclasses.replace(config, server=dataclasses.replace(config.server, backup_trainers=backups))


def check_servers(mode: Mode, servers: int) -> None:
    """Refuse a number of servers, given as ``--servers``, that a mode cannot have.

    Raises:
        UnsupportedConfiguration: it has servers and the number is 0, or it has none and the number is not 0.
    """
    if mode.has_servers != (servers > 0):
        needed = "at least 1" if mode.has_servers else "0"
        raise UnsupportedConfiguration(
            f"--servers ({servers}) must be {needed} in mode {mode.name}; correct it, or choose another mode"
        )


def roles(config: Config, world_size: int) -> list[Role]:
    """Return the role of each rank, by global rank: servers first, then trainers.

    Raises:
        UnsupportedConfiguration: the mode cannot run with this world size.
    """
    _check_world(config, world_size)
    servers = _servers_in(config, world_size)
    if is_colocated(config) and servers > world_size - servers:
        raise UnsupportedConfiguration(
            f"cluster.num_servers ({servers}) must be at most the number of trainers ({world_size - servers}) with "
            "cluster.colocate, where each server is on the host of a trainer; lower it, or set it to null"
        )
    trainers = [Role(servers + index, "trainer", trainer_index=index) for index in range(world_size - servers)]
    return [*(Role(rank, "server", server_index=rank) for rank in range(servers)), *trainers]


def _servers_in(config: Config, world_size: int) -> int:
    all_colocated = is_colocated(config) and config.cluster.num_servers is None
    return world_size // 2 if all_colocated else num_servers_of(config)


def _check_world(config: Config, world_size: int) -> None:
    if world_size > _MOST_RANKS:
        raise UnsupportedConfiguration(
            f"world_size ({world_size}) must be at most {_MOST_RANKS}; start fewer servers and trainers"
        )
    mode, servers = mode_of(config), max(_servers_in(config, world_size), int(mode_of(config).has_servers))
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
