"""The job that started this command, by which a command that is started again finds the run that it began."""

from __future__ import annotations

from dataclasses import dataclass

from paramserver.cluster.base import Environ, read_number
from paramserver.cluster.slurm import VARIABLES as SLURM
from paramserver.cluster.torchrun import VARIABLES as TORCHRUN, num_restarts

JOB_VARIABLE = "PARAMSERVER_JOB_ID"
"""Set by the user: the name of a job that starts its commands again, under a launcher that is not known here."""

# What torchrun sets where the user gave no --rdzv-id.
_NO_RUN_ID = "none"


@dataclass(frozen=True)
class Job:
    """The job of a scheduler or a launcher that this process is part of.

    Args:
        id: no other job has it, such as ``slurm/4711``.
        restarts: how often it was started again, as far as its launcher counts.
        is_named: by hand, so that each start may be another one of the same job.
    """

    id: str
    restarts: int = 0
    is_named: bool = False

    @property
    def may_continue(self) -> bool:
        """Whether an earlier start of the job may have begun its run."""
        return self.is_named or self.restarts > 0


def find_job(environ: Environ) -> Job | None:
    """Return the job that this process is part of: the one that is named by hand, of SLURM, or of torchrun.

    Raises:
        UnsupportedConfiguration: a number of restarts is none.
    """
    restarts = num_restarts(environ)
    if SLURM["job"] in environ:
        name = SLURM["restart_count"]
        restarts += read_number({name: "0", **environ}, name, "SLURM")
    if named := environ.get(JOB_VARIABLE, "").strip():
        return Job(named, restarts, is_named=True)
    if SLURM["job"] in environ:
        return Job(f"slurm/{environ[SLURM['job']]}", restarts)
    run_id = environ.get(TORCHRUN["run_id"], _NO_RUN_ID)
    return None if run_id == _NO_RUN_ID else Job(f"torchrun/{run_id}", restarts)
