"""From the configuration to a consistency."""

from __future__ import annotations

from paramserver.config import Config, ServerConfig
from paramserver.consistency.asynchronous import Async, Bounded
from paramserver.consistency.backup import BackupSync
from paramserver.consistency.base import Consistency, RunTerms
from paramserver.consistency.buffered import Buffered
from paramserver.consistency.lockstep import Sync
from paramserver.limits import Limits

# The values of server.consistency.
CLASSES: dict[str, type[Consistency]] = {"sync": Sync, "bounded": Bounded, "async": Async}


def consistency_class(config: ServerConfig) -> type[Consistency]:
    """Return the class of the consistency of a config, which declares what holds for it."""
    # Backup trainers are a variant of sync, and several arrivals one of async; config/checks.py rejects them with
    # others.
    if config.arrivals > 1:
        return Buffered
    return BackupSync if config.backup_trainers else CLASSES[config.consistency]


def make_consistency(config: Config, trainers: int, step: int = 0, samples: int = 0) -> Consistency:
    """Return the consistency of a run.

    Without lockstep, all trainers wait for each other at checkpoints. They validate retained versions without waiting,
    unless the best version is to be saved, as what is saved must be what was validated, or parameters are averaged: no
    averages are retained.
    """
    training, rules = config.training, consistency_class(config.server)
    every = training.validate_every if config.checkpoint.every is None else config.checkpoint.every
    together = config.checkpoint.best is not None or training.ema_decay is not None or rules.validates_together
    in_memory = () if config.checkpoint.memory_every is None else (config.checkpoint.memory_every,)
    terms = RunTerms(
        trainers,
        Limits.of(training),
        training.uneven_inputs,
        training.batch_size,
        barrier_every=((every, training.validate_every) if together else (every,)) + in_memory,
        validate_every=0 if together else training.validate_every,
        has_rounds=training.has_rounds,
    )
    return rules.from_config(config.server, terms, step, samples)
