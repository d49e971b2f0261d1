"""Ranks started by hand: ``--rank``, ``--world_size``, ``--master_addr``, ``--master_port``."""

from paramserver.cluster.base import ClusterEnvironment, Environ, RankFlags
from paramserver.cluster.network import DEFAULT_PORT
from paramserver.config import num_commands_of
from paramserver.errors import UnsupportedConfiguration


class FlagEnvironment(ClusterEnvironment):
    """A process that was started with ``--rank``. Flags that are not given come from the config.

    Example::

        >>> from paramserver.config import Config
        >>> FlagEnvironment({}, Config(mode="ddp"), RankFlags(global_rank=1, world_size=2)).identity().local_rank
        1
    """

    source = "flags"

    @classmethod
    def detect(cls, environ: Environ, flags: RankFlags) -> bool:
        return flags.global_rank is not None

    @property
    def global_rank(self) -> int:
        global_rank = self.flags.global_rank or 0
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
