"""SLURM, as far as what starts other programs must know of it."""

from collections.abc import Mapping

JOB_ID = "SLURM_JOB_ID"


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether this process runs inside a SLURM allocation (sbatch, salloc), where srun starts further steps."""
    return bool(environ.get(JOB_ID))
