"""Which of the environments this process is in."""

import dataclasses

from paramserver.cluster.base import ClusterEnvironment, Environ, ProcessIdentity
from paramserver.cluster.flags import FlagEnvironment, RankFlags
from paramserver.cluster.torchrun import EnvVarEnvironment, TorchrunEnvironment
from paramserver.config import Config, with_world_size
from paramserver.errors import UnsupportedConfiguration


def resolve_identity(flags: RankFlags, environ: Environ, config: Config) -> ProcessIdentity | None:
    """Tell who this process is: by ``--rank``, else by its environment, else None: start all ranks on this machine.

    Raises:
        UnsupportedConfiguration: a flag or variable is wrong, they contradict each other, or the mode cannot run in
            such a world.
    """
    flags.check()
    # The order is the precedence. Workers of torchrun have the variables of HandSet too.
    environments: tuple[ClusterEnvironment, ...] = (FlagEnvironment(flags), TorchrunEnvironment(), EnvVarEnvironment())
    found = next((environment for environment in environments if environment.detect(environ)), None)
    if found is None:
        if flags.world_size is not None:  # refused here, not in the children
            with_world_size(config, flags.world_size)
        return None
    identity = _with_flags(found.identity(environ, config), flags)
    with_world_size(config, identity.world_size)
    return identity


def _with_flags(identity: ProcessIdentity, flags: RankFlags) -> ProcessIdentity:
    """Put flags above the environment; but how many ranks there are was settled by whoever started them."""
    if flags.world_size is not None and flags.world_size != identity.world_size:
        raise UnsupportedConfiguration(
            f"--world_size ({flags.world_size}) must be the {identity.world_size} that {identity.source} started; "
            "leave the flag out"
        )
    master_addr = flags.master_addr or identity.master_addr
    master_port = flags.master_port or identity.master_port
    moved = (master_addr, master_port) != (identity.master_addr, identity.master_port)
    return dataclasses.replace(
        identity,
        master_addr=master_addr,
        master_port=master_port,
        # The agent serves its own address only.
        store_is_hosted=identity.store_is_hosted and not moved,
    )
