"""The registry of cluster environments, and the identity of this process according to them.

To add an environment (Kubernetes, MPI):

1. Write one file in this folder with a subclass of :class:`~paramserver.cluster.base.ClusterEnvironment`: a table
   ``variables`` of what it sets, ``detect``, ``global_rank``, ``world_size``, ``master_addr`` and ``master_port``;
   ``local_rank``, ``local_world_size`` and ``node_rank`` if it provides them; ``store_is_hosted`` and ``job`` if it
   serves a store. Read variables with ``read_variable`` and ``read_number``, whose errors name the variable.
2. Add the class to ``ENVIRONMENTS``, before environments whose variables it sets too.

Nothing else needs to change: flags override the addresses of every environment, and the rest of the package sees a
:class:`~paramserver.cluster.base.ProcessIdentity` only.
"""

import dataclasses

from paramserver.cluster.base import ClusterEnvironment, Environ, ProcessIdentity, RankFlags
from paramserver.cluster.flags import FlagEnvironment
from paramserver.cluster.job_token import read_token
from paramserver.cluster.slurm import SlurmEnvironment
from paramserver.cluster.torchrun import EnvVarEnvironment, TorchrunEnvironment
from paramserver.config import Config, num_ranks_started, num_trainers_of, with_world_size
from paramserver.errors import UnsupportedConfiguration

# The first that detects itself is used. A worker of torchrun has the variables of EnvVarEnvironment too, and a task of
# srun may be a torchrun, or set these variables itself.
ENVIRONMENTS: tuple[type[ClusterEnvironment], ...] = (
    FlagEnvironment,
    TorchrunEnvironment,
    EnvVarEnvironment,
    SlurmEnvironment,
)


def resolve_identity(flags: RankFlags, environ: Environ, config: Config) -> ProcessIdentity | None:
    """Return the identity of this process by ``--rank``, else by its environment variables.

    Returns:
        None if neither gives a rank: then this process starts all ranks on this machine.

    Raises:
        UnsupportedConfiguration: a flag or variable is wrong, they contradict each other, or the mode cannot run in
            such a world.
    """
    flags.check()
    token = read_token(config.cluster.token_file, environ)
    environment = next((e for e in ENVIRONMENTS if e.detect(environ, flags)), None)
    if environment is None:
        if flags.world_size is not None:  # refused here, before any rank is started
            _check_world(config, flags, num_ranks_started(config, flags.world_size), "--world_size")
        return None
    identity = _with_flags(environment(environ, config, flags).identity(), flags)
    if not flags.supervised:
        identity = _with_servers(identity, flags, config)
    started_by = "--world_size" if identity.source == FlagEnvironment.source else identity.source
    _check_world(config, flags, identity.world_size, started_by)
    if config.cluster.elastic and identity.launch:
        raise UnsupportedConfiguration(
            f"cluster.elastic (True) must be false under {identity.source}, which fixes the number of processes; set "
            "it to false, or start the ranks in another way"
        )
    if token is not None and identity.store_is_hosted:
        raise UnsupportedConfiguration(
            f"{token.source} cannot be proved at the store that {identity.source} serves; give --master_port, so that "
            "rank 0 serves the store itself, or leave the token out"
        )
    return dataclasses.replace(identity, token=token)


def _check_world(config: Config, flags: RankFlags, world_size: int, started_by: str) -> None:
    trainers = num_trainers_of(with_world_size(config, world_size))
    if flags.num_trainers is not None and flags.num_trainers != trainers:
        raise UnsupportedConfiguration(
            f"--num_trainers ({flags.num_trainers}) must be the {trainers} that {started_by} leaves for trainers; "
            "leave the flag out, or start as many"
        )


def _with_servers(identity: ProcessIdentity, flags: RankFlags, config: Config) -> ProcessIdentity:
    """Count the ranks of co-located servers too. Host i has server i, as far as there are servers, and trainer i."""
    world_size = num_ranks_started(config, identity.world_size)
    servers = world_size - identity.world_size
    is_server = identity.global_rank < servers and not flags.is_colocated_trainer
    rank = identity.global_rank if is_server else identity.global_rank + servers
    return dataclasses.replace(identity, global_rank=rank, world_size=world_size)


def _with_flags(identity: ProcessIdentity, flags: RankFlags) -> ProcessIdentity:
    """Override the addresses by flags. The world size is fixed by what started the ranks."""
    if flags.world_size is not None and flags.world_size != identity.world_size:
        raise UnsupportedConfiguration(
            f"--world_size ({flags.world_size}) must be the {identity.world_size} that {identity.source} started; "
            "leave the flag out"
        )
    master_addr = (flags.master_addr or identity.master_addr).strip("[]")
    master_port = flags.master_port or identity.master_port
    moved = (master_addr, master_port) != (identity.master_addr, identity.master_port)
    return dataclasses.replace(
        identity,
        master_addr=master_addr,
        master_port=master_port,
        # The agent of torchrun serves a store at its own address only.
        store_is_hosted=identity.store_is_hosted and not moved,
        launch="" if moved else identity.launch,
    )
