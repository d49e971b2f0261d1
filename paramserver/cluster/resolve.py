"""The registry of cluster environments, and the identity and the job of this process according to them.

To add an environment (Kubernetes, MPI):

1. Write one file in this folder with a subclass of :class:`~paramserver.cluster.base.ClusterEnvironment`: a table
   ``variables`` of what it sets, ``detect``, ``global_rank``, ``world_size``, ``master_addr`` and ``master_port``;
   ``local_rank``, ``local_world_size`` and ``node_rank`` if it provides them; ``host_ranks`` if the ranks of a host may
   not be consecutive; ``store_is_hosted`` and ``job`` if it serves a store. Of a scheduler ``job_id``,
   ``job_step``, ``restart_count`` in the table, ``allocated_gpus`` and ``unused_tasks``.
   Read variables with ``read_variable`` and ``read_number``, whose errors name the variable.
2. Add the class to ``ENVIRONMENTS``, before environments whose variables it sets too.

Nothing else needs to change: flags override the addresses of every environment, and the rest of the package sees a
:class:`~paramserver.cluster.base.ProcessIdentity` only.
"""

import dataclasses
from dataclasses import dataclass

from paramserver.cluster.base import ClusterEnvironment, Environ, ProcessIdentity, RankFlags, read_number
from paramserver.cluster.network import DEFAULT_PORT, check_master_addr, read_token
from paramserver.cluster.slurm import SlurmEnvironment
from paramserver.cluster.torchrun import EnvVarEnvironment, TorchrunEnvironment
from paramserver.config import (
    Config,
    is_colocated,
    mode_of,
    num_commands_of,
    num_ranks_started,
    num_servers_of,
    num_trainers_of,
    with_world_size,
)
from paramserver.errors import UnsupportedConfiguration


class FlagEnvironment(ClusterEnvironment):
    """A process that was started with ``--rank`` or ``--role``. Flags that are not given come from the config."""

    source = "flags"
    known_by = "--rank or --role is given"

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


# The first that detects itself is used. A worker of torchrun has the variables of EnvVarEnvironment too, and a task of
# srun may be a torchrun, or set these variables itself.
ENVIRONMENTS: tuple[type[ClusterEnvironment], ...] = (
    FlagEnvironment,
    TorchrunEnvironment,
    EnvVarEnvironment,
    SlurmEnvironment,
)


def environment_class(source: str) -> type[ClusterEnvironment]:
    """Return the environment of this ``ProcessIdentity.source``, which declares what holds for it."""
    return next(environment for environment in ENVIRONMENTS if environment.source == source)


def resolve_identity(flags: RankFlags, environ: Environ, config: Config) -> ProcessIdentity | None:
    """Return the identity of this process by ``--rank``, else by its environment variables.

    None if neither gives a rank: then this process starts all ranks on this machine.

    Raises:
        UnsupportedConfiguration: a flag or variable is wrong, they contradict each other, or the mode cannot run in
            such a world.
    """
    flags.check()
    token = read_token(config.cluster.token_file, environ)
    environment = next((e for e in ENVIRONMENTS if e.detect(environ, flags)), None)
    if environment is None:
        check_master_addr(config.cluster.master_addr)
        if flags.world_size is not None:  # refused here, before any rank is started
            _check_world(config, flags, num_ranks_started(config, flags.world_size), "--world_size")
        return None
    flags = _with_variables(flags, environ)
    identity = _with_flags(environment(environ, config, flags).identity(), flags)
    check_master_addr(identity.master_addr)
    if not flags.supervised:
        identity = _with_servers(identity, flags, config)
    started_by = "--world_size" if identity.source == FlagEnvironment.source else identity.source
    _check_world(config, flags, identity.world_size, started_by)
    if config.cluster.elastic and environment.ends_all_ranks:
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


def _with_variables(flags: RankFlags, environ: Environ) -> RankFlags:
    """Complete the flags by MASTER_ADDR and MASTER_PORT, which mean the same whatever has started the ranks."""
    variables = EnvVarEnvironment.variables
    master_addr, master_port = flags.master_addr or environ.get(variables["master_addr"], "").strip(), flags.master_port
    if not master_port and environ.get(variables["master_port"]):
        master_port = read_number(environ, variables["master_port"], EnvVarEnvironment.set_by, minimum=1, below=65536)
    return dataclasses.replace(flags, master_addr=master_addr or None, master_port=master_port)


def _check_world(config: Config, flags: RankFlags, world_size: int, started_by: str) -> None:
    trainers = num_trainers_of(with_world_size(config, world_size))
    if flags.num_trainers is not None and flags.num_trainers != trainers:
        raise UnsupportedConfiguration(
            f"--num_trainers ({flags.num_trainers}), or the key in --set, must be the {trainers} that {started_by} "
            "leaves for trainers; leave it out, or start as many"
        )


def _with_servers(identity: ProcessIdentity, flags: RankFlags, config: Config) -> ProcessIdentity:
    """Count the ranks of co-located servers too. Host i has server i, as far as there are servers, and trainer i."""
    world_size = num_ranks_started(config, identity.world_size)
    servers = world_size - identity.world_size
    is_server = identity.global_rank < servers and not flags.is_colocated_trainer
    rank = identity.global_rank if is_server else identity.global_rank + servers
    host_ranks = tuple(other + rank - identity.global_rank for other in identity.host_ranks)
    return dataclasses.replace(identity, global_rank=rank, world_size=world_size, host_ranks=host_ranks)


def _with_flags(identity: ProcessIdentity, flags: RankFlags) -> ProcessIdentity:
    """Override the addresses by flags. The world size is fixed by what started the ranks."""
    if flags.world_size is not None and flags.world_size != identity.world_size:
        raise UnsupportedConfiguration(
            f"--world_size ({flags.world_size}) must be the {identity.world_size} that {identity.source} started; "
            "leave the flag out"
        )
    master_addr = (flags.master_addr or identity.master_addr).strip("[]")
    master_port = flags.master_port or identity.master_port
    # The agent of torchrun serves its store at one port, whatever the name by which its host is reached.
    moved = master_port != identity.master_port
    if not identity.store_is_hosted:
        moved = moved or master_addr != identity.master_addr
    return dataclasses.replace(
        identity,
        master_addr=master_addr,
        master_port=master_port,
        store_is_hosted=identity.store_is_hosted and not moved,
        launch="" if moved else identity.launch,
    )


JOB_VARIABLE = "PARAMSERVER_JOB_ID"
"""Set by the user: the name of a job that starts its commands again, under a launcher that is not known here."""


@dataclass(frozen=True)
class Job:
    """The job of a scheduler or a launcher that this process is part of.

    No other job has the same ``id``, such as ``slurm/4711``. ``restarts`` is as far as its launcher counts. A job that
    ``is_named`` was named by hand, so each start may be another one of the same job.
    """

    id: str
    restarts: int = 0
    is_named: bool = False

    @property
    def may_continue(self) -> bool:
        """Whether an earlier start of the job may have begun its run."""
        return self.is_named or self.restarts > 0


def find_job(environ: Environ) -> Job | None:
    """Return the job that this process is part of: the one that is named by hand, or of a launcher.

    Raises:
        UnsupportedConfiguration: a number of restarts is none.
    """
    restarts = sum(environment.num_restarts(environ) for environment in ENVIRONMENTS)
    if named := environ.get(JOB_VARIABLE, "").strip():
        return Job(named, restarts, is_named=True)
    # A scheduler comes before what it starts.
    ids = (environment.job_id(environ) for environment in reversed(ENVIRONMENTS))
    found = next((job_id for job_id in ids if job_id is not None), None)
    return None if found is None else Job(found, restarts)


def allocated_gpus(environ: Environ) -> tuple[int, str]:
    """Return how many GPUs of this host the job has, and the variable that counts them; 0 without any."""
    counts = ((e.allocated_gpus(environ), e.variables.get("num_gpus", "")) for e in ENVIRONMENTS)
    return max(counts, default=(0, ""))


def one_of_several(environ: Environ) -> str:
    """Return by which variables of torchrun this process is one of several; empty if it is not."""
    for environment in (TorchrunEnvironment, EnvVarEnvironment):
        number = environ.get(environment.variables["world_size"], "1")
        if environment.detect(environ, RankFlags()) and number.strip() != "1":
            return environment.known_by
    return ""


def unused_tasks(environ: Environ) -> str:
    """Return a warning if the allocation has tasks and this process, which has no rank, is none of them; or empty."""
    names = EnvVarEnvironment.variables
    if names["global_rank"] in environ and not EnvVarEnvironment.detect(environ, RankFlags()):
        return (
            f"warning: {names['global_rank']} is set without {names['world_size']}, and all ranks are started on this "
            "host; set both for this process to be one of them"
        )
    for environment in ENVIRONMENTS:
        if unused := environment.unused_tasks(environ):
            return (
                f"warning: this allocation has {unused}, and all ranks are started on this host; start the command "
                f"with {environment.source} to use them"
            )
    return ""
