"""Ranks started by hand: ``--rank``, or ``--role`` and ``--index``; ``--master_addr`` and ``--master_port``."""

import dataclasses

from paramserver.cluster.base import ClusterEnvironment, Environ, ProcessIdentity, RankFlags
from paramserver.cluster.network import DEFAULT_PORT
from paramserver.config import is_colocated, mode_of, num_commands_of, num_servers_of, num_trainers_of, with_world_size
from paramserver.errors import UnsupportedConfiguration


class FlagEnvironment(ClusterEnvironment):
    """A process that was started with ``--rank`` or ``--role``. Flags that are not given come from the config."""

    source = "flags"

    @classmethod
    def detect(cls, environ: Environ, flags: RankFlags) -> bool:
        return flags.global_rank is not None or flags.role is not None

    @property
    def global_rank(self) -> int:
        global_rank = self._rank_of_role() if self.flags.global_rank is None else self.flags.global_rank
        if global_rank >= self.world_size:
            world = f"--world_size ({self.world_size})"
            if self.flags.world_size is None:
                world = f"the world size ({self.world_size}) of the config, as no --world_size is given"
            raise UnsupportedConfiguration(f"--rank ({global_rank}) must be below {world}: ranks count from 0")
        return global_rank

    @property
    def world_size(self) -> int:
        return num_commands_of(self.config) if self.flags.world_size is None else self.flags.world_size

    @property
    def master_addr(self) -> str:
        return self.flags.master_addr or self.config.cluster.master_addr

    @property
    def master_port(self) -> int:
        # Ranks that were started separately cannot agree on a free port, so port 0 means the default.
        return self.flags.master_port or self.config.cluster.master_port or DEFAULT_PORT

    def identity(self) -> ProcessIdentity:
        servers = None if self.flags.role is None else num_servers_of(self.config)
        return dataclasses.replace(super().identity(), servers=servers)

    def _rank_of_role(self) -> int:
        role, servers = self.flags.role, num_servers_of(self.config)
        if role == "server" and not servers:
            raise UnsupportedConfiguration(
                f"--role (server) must be trainer in mode {mode_of(self.config).name}, which has no servers; start no "
                "server, or choose mode rpc"
            )
        if is_colocated(self.config):
            raise UnsupportedConfiguration(
                f"--role ({role}) cannot be used with cluster.colocate (True), where one command starts both roles of "
                "a host; give --rank, which counts hosts, or set cluster.colocate to false"
            )
        index = self.flags.index
        if index is None:
            raise UnsupportedConfiguration(
                f"--index must be given with --role ({role}); add it, counting the processes of the role from 0"
            )
        # Refuses a world that is too small for its servers.
        trainers = num_trainers_of(with_world_size(self.config, self.world_size))
        count = servers if role == "server" else trainers
        if index >= count:
            raise UnsupportedConfiguration(
                f"--index ({index}) must be below the number of {role}s ({count}); correct it, or give --num_{role}s"
            )
        return index if role == "server" else servers + index
