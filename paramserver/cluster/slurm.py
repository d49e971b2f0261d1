"""The rank of a task that SLURM's ``srun`` started, from the variables of its step.

Names: https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
import shutil
from itertools import product

from paramserver.cluster.base import Environ, RankFlags, VariableEnvironment, read_number, read_variable
from paramserver.cluster.network import is_loopback
from paramserver.errors import UnsupportedConfiguration

VARIABLES = {
    "global_rank": "SLURM_PROCID",
    "world_size": "SLURM_STEP_NUM_TASKS",
    "local_rank": "SLURM_LOCALID",
    "local_world_size": "SLURM_STEP_TASKS_PER_NODE",
    "node_rank": "SLURM_NODEID",
    "master_addr": "SLURM_STEP_NODELIST",
    "job": "SLURM_JOB_ID",
    "step": "SLURM_STEP_ID",
    # Of the job, in a batch script.
    "num_tasks": "SLURM_NTASKS",
    "num_nodes": "SLURM_JOB_NUM_NODES",
    # Only in a job that was started again.
    "restart_count": "SLURM_RESTART_COUNT",
    # Optional: of this host.
    "num_gpus": "SLURM_GPUS_ON_NODE",
    # Optional: in which order the tasks are on the nodes.
    "distribution": "SLURM_DISTRIBUTION",
    "plane_size": "SLURM_DIST_PLANESIZE",
    # Only in a heterogeneous job.
    "num_groups": "SLURM_HET_SIZE",
}

# Below the ports that Linux gives to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000
# Between the ports of consecutive jobs. By the golden ratio: the ports of steps of hundreds of jobs in a row differ.
_PORTS_APART = 9_271


class SlurmEnvironment(VariableEnvironment):
    """A task of a step of several tasks.

    Rank 0 is on the first host of the step, and its port follows from the numbers of job and step. In the config,
    ``cluster.master_port``, and an address of ``cluster.master_addr`` that other hosts can reach, take precedence.
    """

    source = set_by = "srun"
    known_by = "SLURM_STEP_ID is set, for several tasks"
    variables = VARIABLES

    @classmethod
    def detect(cls, environ: Environ, flags: RankFlags) -> bool:
        # A step of one task is an ordinary process: a shell (srun --pty), or a command that starts all ranks itself.
        return VARIABLES["step"] in environ and environ.get(VARIABLES["world_size"], "1") != "1"

    @classmethod
    def job_id(cls, environ: Environ) -> str | None:
        return f"slurm/{environ[VARIABLES['job']]}" if VARIABLES["job"] in environ else None

    @classmethod
    def num_restarts(cls, environ: Environ) -> int:
        return super().num_restarts(environ) if VARIABLES["job"] in environ else 0

    @classmethod
    def allocated_gpus(cls, environ: Environ) -> int:
        gpus = environ.get(VARIABLES["num_gpus"], "")
        return int(gpus) if VARIABLES["job"] in environ and gpus.isdecimal() else 0

    @classmethod
    def unused_tasks(cls, environ: Environ) -> str:
        if VARIABLES["job"] not in environ or VARIABLES["step"] in environ:
            return ""
        for key, what in (("num_tasks", "tasks"), ("num_nodes", "nodes")):
            number = environ.get(VARIABLES[key], "")
            if number.isdecimal() and int(number) > 1:
                return f"{number} {what} ({VARIABLES[key]})"
        return ""

    @property
    def _tasks_per_node(self) -> str:
        return read_variable(self.environ, self.variables["local_world_size"], self.source)

    @property
    def local_world_size(self) -> int:
        counts = expand_counts(self._tasks_per_node)
        if self.node_rank >= len(counts):
            raise UnsupportedConfiguration(
                f"{self.variables['local_world_size']} ({self._tasks_per_node}) must have a count for node "
                f"{self.node_rank}; start the ranks with srun, which sets it"
            )
        return counts[self.node_rank]

    @property
    def host_ranks(self) -> tuple[int, ...]:
        variables, tasks_per_node = self.variables, self._tasks_per_node
        distribution = self.environ.get(variables["distribution"], "block")
        # Such as cyclic:block, whose second word is about the cores of a node.
        kind = re.split("[:,=]", distribution)[0]
        if variables["num_groups"] in self.environ:
            kind = "block"  # the groups follow one another, and the variable may be that of another group
        # Each node takes so many tasks in turn: in a block all of its own.
        at_once = self.world_size
        if kind == "cyclic":
            at_once = 1
        elif kind == "plane":
            at_once = read_number(self.environ, variables["plane_size"], self.source, minimum=1)
        counts = enumerate(expand_counts(tasks_per_node))
        turns = sorted((index // at_once, node) for node, count in counts for index in range(count))
        here = tuple(rank for rank, (_, node) in enumerate(turns) if node == self.node_rank)
        if here[self.local_rank] != self.global_rank:
            raise UnsupportedConfiguration(
                f"{variables['global_rank']} ({self.global_rank}) must follow from {variables['local_rank']} "
                f"({self.local_rank}) and {variables['node_rank']} ({self.node_rank}) by "
                f"{variables['local_world_size']} ({tasks_per_node}) and {variables['distribution']} ({distribution}), "
                "which may be block, cyclic or plane, and block in a heterogeneous job; start the ranks with srun "
                "--distribution=block"
            )
        return here

    @property
    def master_addr(self) -> str:
        hosts = expand_hosts(read_variable(self.environ, self.variables["master_addr"], self.source))
        configured = self.config.cluster.master_addr
        return configured if len(hosts) == 1 or not is_loopback(configured) else hosts[0]

    @property
    def master_port(self) -> int:
        number = self._number("job") * _PORTS_APART + self._number("step")
        return self.config.cluster.master_port or _FIRST_PORT + number % _NUM_PORTS

    @property
    def job_step(self) -> str:
        return f"step {self._number('step')} of job {self._number('job')}"


def step_command(launcher: str, environ: Environ, tasks: int) -> list[str]:
    """Return the words that start so many ``tasks`` of a simulation as one step; none if each is started by itself.

    ``launcher`` is ``simulations.launcher``.

    Raises:
        UnsupportedConfiguration: srun is not on the PATH.
    """
    if launcher != "srun" and not (launcher == "auto" and in_slurm_allocation(environ)):
        return []
    if shutil.which("srun", path=environ.get("PATH")) is None:
        raise UnsupportedConfiguration(
            f"simulations.launcher ({launcher}) needs srun, which is not on the PATH; choose local"
        )
    # The step of the ranks has all CPUs unless it was started with --exact, and others would wait for its end. What
    # overlaps shares all CPUs: --exact might give the same one to all, and without --cpu-bind it has that of the rank.
    share = ["--overlap", "--cpu-bind=none"] if VARIABLES["step"] in environ else ["--exact"]
    # It ends when one of its processes fails.
    return ["srun", f"--ntasks={tasks}", *share, "--kill-on-bad-exit=1", "--input=none"]


def in_slurm_allocation(environ: Environ) -> bool:
    """Return whether this process runs inside a SLURM allocation (sbatch, salloc), where srun starts further steps."""
    return bool(environ.get(VARIABLES["job"]))


def expand_hosts(text: str) -> list[str]:
    """Return the names in a list of hosts as SLURM writes it.

    Raises:
        UnsupportedConfiguration: a bracket or a range is not complete.
    """
    hosts = []
    for group in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        parts = [
            _expand_ranges(part[1:-1], text) if part[0] == "[" else [part]
            for part in re.split(r"(\[.*?\])", group)
            if part
        ]
        hosts += ["".join(chosen) for chosen in product(*parts)]
    if not hosts or "[" in re.sub(r"\[[^\[\]]*\]", "", text) or "]" in re.sub(r"\[[^\[\]]*\]", "", text):
        raise _malformed(text)
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers = []
    for one in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", one)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _malformed(text)
        numbers += [str(n).zfill(len(match[1])) for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers


def _malformed(text: str) -> UnsupportedConfiguration:
    return UnsupportedConfiguration(
        f"{VARIABLES['master_addr']} ({text}) must be a list of hosts such as gpu[07-09,12]; give --master_addr"
    )


def expand_counts(text: str) -> list[int]:
    """Return the number of tasks of each node, from the form in which SLURM writes it.

    Raises:
        UnsupportedConfiguration: it has another form.
    """
    counts: list[int] = []
    for one in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", one)
        if match is None:
            raise UnsupportedConfiguration(
                f"{VARIABLES['local_world_size']} ({text}) must be counts such as 2(x3),1; start the ranks with srun, "
                "which sets it"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
