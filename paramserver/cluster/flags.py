"""The rank from the command line: ``--rank``, ``--world_size``, ``--master_addr``, ``--master_port``."""

from dataclasses import dataclass

from paramserver.cluster.base import Environ, ProcessIdentity, assumed_place
from paramserver.cluster.network import DEFAULT_PORT
from paramserver.config import Config, world_size_of
from paramserver.errors import UnsupportedConfiguration


@dataclass(frozen=True)
class RankFlags:
    """The flags as given; None = not given."""

    global_rank: int | None = None
    world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None

    def check(self) -> None:
        """Refuse a flag that is out of its range by itself."""
        if self.global_rank is not None and self.global_rank < 0:
            raise UnsupportedConfiguration(f"--rank ({self.global_rank}) must be at least 0; ranks count from 0")
        if self.world_size is not None and self.world_size < 1:
            raise UnsupportedConfiguration(f"--world_size ({self.world_size}) must be at least 1; count all ranks")
        if self.master_port is not None and not 0 <= self.master_port <= 65535:
            raise UnsupportedConfiguration(
                f"--master_port ({self.master_port}) must be from 0 to 65535; give a free port"
            )
        if self.master_addr is not None and not self.master_addr.strip():
            raise UnsupportedConfiguration("--master_addr () must not be empty; give the host of rank 0")


class FlagEnvironment:
    """Ranks started by hand, each with its ``--rank``; what is not given comes from the config."""

    def __init__(self, flags: RankFlags) -> None:
        self._flags = flags

    def detect(self, environ: Environ) -> bool:
        return self._flags.global_rank is not None

    def identity(self, environ: Environ, config: Config) -> ProcessIdentity:
        flags, global_rank = self._flags, self._flags.global_rank or 0
        world_size = world_size_of(config) if flags.world_size is None else flags.world_size
        if global_rank >= world_size:
            world = f"--world_size ({world_size})"
            if flags.world_size is None:
                world = f"the world size ({world_size}) of the config, as no --world_size is given"
            raise UnsupportedConfiguration(f"--rank ({global_rank}) must be below {world}: ranks count from 0")
        # Port 0 cannot be chosen by ranks that were started apart, so it falls through to the default.
        master_addr = flags.master_addr or config.cluster.master_addr
        local_rank, local_world_size, node_rank = assumed_place(global_rank, world_size, master_addr)
        return ProcessIdentity(
            global_rank=global_rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=flags.master_port or config.cluster.master_port or DEFAULT_PORT,
            store_is_hosted=False,
            # Rank 0 serves a new store for each attempt, so the name need not tell attempts apart.
            job="flags",
            source="flags",
        )
