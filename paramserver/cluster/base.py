"""The identity of a process in a run, and the interface of what knows it.

Environment variables are read in this folder only.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from paramserver.cluster.network import JobToken, is_loopback
from paramserver.config import Config
from paramserver.errors import UnsupportedConfiguration

Environ = Mapping[str, str]


@dataclass(frozen=True)
class ProcessIdentity:
    """One process among those of the run.

    Args:
        master_addr, master_port: address of rank 0's store.
        store_is_hosted: an agent (torchrun's) serves a TCPStore there already, so no rank may bind the port.
        job: a prefix that all ranks of this attempt share, and no other attempt on the same store.
        source: where the identity comes from: flags, torchrun, environment (variables set by hand), srun or supervisor.
        launch: a prefix that all attempts of a launcher share which starts all ranks again after a loss and keeps its
            store meanwhile; empty without one.
        token: the job token; None = the store is open to all that reach it.
        restarts_all: the launcher starts all ranks again after the loss of one, so none continues without it.
        servers: how many of the ranks are servers, if this process was started by ``--role``; None = by its rank.
        host_ranks: the ranks of this host in the order of their local ranks; empty = consecutive ones.
        job_step: what a scheduler started as the ranks of this run, and of no other; empty without one.
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
    launch: str = ""
    token: JobToken | None = None
    restarts_all: bool = False
    servers: int | None = None
    host_ranks: tuple[int, ...] = ()
    job_step: str = ""

    @property
    def ranks_here(self) -> Sequence[int]:
        """The ranks of this host, in the order of their local ranks."""
        first = self.global_rank - self.local_rank
        return self.host_ranks or range(first, first + self.local_world_size)

    def name(self, *global_ranks: int) -> str:
        """Return ranks, or without arguments this one, as they were started: by their roles, or by their ranks."""
        ranks = global_ranks or (self.global_rank,)
        if self.servers is None:
            return f"rank {list_numbers(ranks)}"
        servers, trainers = ([r for r in ranks if (r < self.servers) == is_server] for is_server in (True, False))
        return " and ".join(
            f"{kind} {list_numbers([rank - first for rank in group])} (rank {list_numbers(group)})"
            for kind, first, group in (("server", 0, servers), ("trainer", self.servers, trainers))
            if group
        )


@dataclass(frozen=True)
class RankFlags:
    """``--rank``, ``--world_size``, ``--role`` and the like of the command line; None = not given, nor by ``--set``.

    Args:
        role, index: the kind of this process, and its number among those of the kind, in place of a rank.
        num_trainers: must agree with what started the ranks.
        supervised: a supervisor gives them, which counts all ranks, also where servers are co-located.
        is_colocated_trainer: this process is the trainer of a host with a co-located server.
    """

    global_rank: int | None = None
    world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    supervised: bool = False
    is_colocated_trainer: bool = False
    role: str | None = None
    index: int | None = None
    num_trainers: int | None = None

    def check(self) -> None:
        """Raise ``UnsupportedConfiguration`` for a flag that is out of its range, or contradicts another one."""
        if self.role is not None and self.global_rank is not None:
            raise UnsupportedConfiguration(
                f"--role ({self.role}) and --rank ({self.global_rank}) both name this process; leave one of them out"
            )
        if self.index is not None and self.role is None:
            raise UnsupportedConfiguration(
                f"--index ({self.index}) must be given together with --role, whose processes it counts; add --role"
            )
        if self.index is not None and self.index < 0:
            raise UnsupportedConfiguration(
                f"--index ({self.index}) must be at least 0; processes of a role count from 0"
            )
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


DEFAULT_JOB = "job"
"""``ProcessIdentity.job`` where rank 0 serves the store itself."""


class ClusterEnvironment(ABC):
    """What started this process and knows its rank: a command line, a launcher, a job scheduler.

    A subclass defines ``detect``, ``global_rank``, ``world_size``, ``master_addr`` and ``master_port``, and properties
    for those further fields of ``ProcessIdentity`` that it provides. See ``resolve.ENVIRONMENTS`` for how to add one.
    """

    source: ClassVar[str]
    """Name of the environment, for messages and ``ProcessIdentity.source``."""

    known_by: ClassVar[str]
    """What ``detect`` has found, in words."""

    ends_all_ranks: ClassVar[bool] = False
    """Whether the loss of one rank ends all of them, so that none continues without it."""

    variables: ClassVar[Mapping[str, str]] = {}
    """Environment variable by property; ``restart_count`` is how often the launcher has started its ranks again."""

    def __init__(self, environ: Environ, config: Config, flags: RankFlags) -> None:
        self.environ = environ
        self.config = config
        self.flags = flags

    @classmethod
    @abstractmethod
    def detect(cls, environ: Environ, flags: RankFlags) -> bool:
        """Return whether this environment started the process."""

    # What holds for every process in an allocation, also for one that is not started as a rank.

    @classmethod
    def job_id(cls, environ: Environ) -> str | None:
        """Return the name of the job of this process, which no other job has; None outside of one."""
        return None

    @classmethod
    def num_restarts(cls, environ: Environ) -> int:
        """Return how often the launcher has started this process again; 0 if it did not start it."""
        name = cls.variables.get("restart_count")
        return 0 if name is None else read_number({name: "0", **environ}, name, cls.source)

    @classmethod
    def allocated_gpus(cls, environ: Environ) -> int:
        """Return how many GPUs of this host, by ``variables["num_gpus"]``, the job has; 0 without any."""
        return 0

    @classmethod
    def unused_tasks(cls, environ: Environ) -> str:
        """Return how many tasks the allocation has if this process is not one of its tasks; empty if just one."""
        return ""

    @property
    @abstractmethod
    def global_rank(self) -> int: ...

    @property
    @abstractmethod
    def world_size(self) -> int: ...

    @property
    @abstractmethod
    def master_addr(self) -> str: ...

    @property
    @abstractmethod
    def master_port(self) -> int: ...

    @property
    def local_rank(self) -> int:
        return infer_placement(self.global_rank, self.world_size, self.master_addr)[0]

    @property
    def local_world_size(self) -> int:
        return infer_placement(self.global_rank, self.world_size, self.master_addr)[1]

    @property
    def node_rank(self) -> int:
        return infer_placement(self.global_rank, self.world_size, self.master_addr)[2]

    @property
    def store_is_hosted(self) -> bool:
        """Whether the environment serves a TCPStore at ``master_addr:master_port``; if not, rank 0 does."""
        return False

    @property
    def job(self) -> str:
        """A prefix that differs between attempts on one store. A store that rank 0 serves is new in each attempt."""
        return DEFAULT_JOB

    def identity(self) -> ProcessIdentity:
        """Read all properties.

        Raises:
            UnsupportedConfiguration: a variable or flag is missing or wrong.
        """
        names = [one.name for one in fields(ProcessIdentity) if hasattr(type(self), one.name)]
        return ProcessIdentity(**{name: getattr(self, name) for name in names})


class VariableEnvironment(ClusterEnvironment):
    """An environment with a variable for each number of a process: see ``variables``."""

    set_by: ClassVar[str]
    """The launcher that sets the variables, for messages."""

    def _number(self, key: str, *, minimum: int = 0, below: int | None = None) -> int:
        return read_number(self.environ, self.variables[key], self.set_by, minimum=minimum, below=below)

    @property
    def global_rank(self) -> int:
        return self._number("global_rank", below=self.world_size)

    @property
    def world_size(self) -> int:
        return self._number("world_size", minimum=1)

    @property
    def local_rank(self) -> int:
        return self._number("local_rank", below=self.local_world_size)

    @property
    def node_rank(self) -> int:
        return self._number("node_rank")

    def identity(self) -> ProcessIdentity:
        identity = super().identity()
        here = identity.ranks_here
        if here[0] < 0 or here[-1] >= identity.world_size:
            local_rank, local_world_size, rank, world_size = (
                f"{self.variables.get(key, key)} ({getattr(identity, key)})"
                for key in ("local_rank", "local_world_size", "global_rank", "world_size")
            )
            raise UnsupportedConfiguration(
                f"{local_rank} and {local_world_size} must agree with {rank} and {world_size}, and put ranks {here[0]} "
                f"to {here[-1]} on this host; correct them, and give the ranks of a host consecutive numbers"
            )
        return identity


def infer_placement(global_rank: int, world_size: int, master_addr: str) -> tuple[int, int, int]:
    """Return (local_rank, local_world_size, node_rank) where the environment does not provide them.

    Ranks that connect over the loopback share a host; otherwise each is assumed to have its own host.
    """
    return (global_rank, world_size, 0) if is_loopback(master_addr) else (0, 1, global_rank)


def list_numbers(numbers: Iterable[int], most: int = 6) -> str:
    """Return numbers in a sentence: consecutive ones as ranges, of which at most ``most`` are listed."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = runs if len(runs) <= most else runs[: most - 1]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in shown)
    return text if shown is runs else f"{text} and {sum(map(len, runs[most - 1 :]))} more"


def process_environ() -> MutableMapping[str, str]:
    """Return the environment variables of this process, for code that passes them on."""
    return os.environ


def read_variable(environ: Environ, name: str, set_by: str) -> str:
    """Return the value of a required variable.

    Raises:
        UnsupportedConfiguration: it is missing or blank.
    """
    value = environ.get(name, "").strip()
    if not value:
        raise UnsupportedConfiguration(f"{name} must be set, as {set_by} does; start the ranks with it, or give --rank")
    return value


def read_number(environ: Environ, name: str, set_by: str, *, minimum: int = 0, below: int | None = None) -> int:
    """Return the value of a required variable as a whole number from ``minimum`` up, and less than ``below``."""
    text = read_variable(environ, name, set_by)
    if not (text.isascii() and text.isdigit()):
        raise UnsupportedConfiguration(
            f"{name} ({text}) must be a whole number from {minimum}; start the ranks with {set_by}"
        )
    number = int(text)
    if number < minimum:
        raise UnsupportedConfiguration(f"{name} ({number}) must be at least {minimum}; correct the variable")
    if below is not None and number >= below:
        if minimum:
            raise UnsupportedConfiguration(f"{name} ({number}) must be below {below}; correct the variable")
        raise UnsupportedConfiguration(f"{name} ({number}) must be below {below}: ranks count from 0")
    return number
