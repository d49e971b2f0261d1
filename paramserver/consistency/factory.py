"""The consistency that a configuration asks for."""

from __future__ import annotations

from paramserver.config import Config
from paramserver.consistency.asynchronous import Async, Bounded
from paramserver.consistency.backup import BackupSync
from paramserver.consistency.base import Consistency, RunTerms
from paramserver.consistency.lockstep import Sync
from paramserver.limits import Limits


def make_consistency(config: Config, trainers: int, step: int = 0, samples: int = 0) -> Consistency:
    """The rules of a run.

    Trainers that run freely stand still for checkpoints. They validate a version that is kept for them, without
    standing still, unless the best version is to be saved: what is saved must be what was validated.
    """
    training, server = config.training, config.server
    every = training.validate_every if config.checkpoint.every is None else config.checkpoint.every
    together = config.checkpoint.best is not None or server.consistency == "sync"
    terms = RunTerms(
        trainers,
        Limits.of(training),
        training.uneven_inputs,
        training.batch_size,
        barrier_every=(every, training.validate_every) if together else (every,),
        validate_every=0 if together else training.validate_every,
    )
    if server.consistency == "async":
        return Async(terms, step, samples)
    if server.consistency == "bounded":
        return Bounded(terms, server.staleness_bound, step, samples)
    if server.backup_trainers:
        return BackupSync(terms, server.backup_trainers, step, samples)
    return Sync(terms, step, samples)
