"""From the configuration to a consistency."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramserver.config import Config, ServerConfig, server_computes
from paramserver.consistency.base import Consistency, RunTerms
from paramserver.consistency.free_running import Async, BackupSync, Bounded, Buffered
from paramserver.consistency.lockstep import Sync
from paramserver.limits import Limits

# The values of server.consistency.
CLASSES: dict[str, type[Consistency]] = {"sync": Sync, "bounded": Bounded, "async": Async}

# By a key of the server section whose value is not its default: backup trainers are a variant of sync, and several
# arrivals one of async; config/checks.py rejects them with others.
_VARIANTS: dict[str, type[Consistency]] = {"arrivals": Buffered, "backup_trainers": BackupSync}


def _variant(config: ServerConfig) -> str | None:
    """Return the key that makes the consistency of a config another class than that of its name."""
    return next((key for key in _VARIANTS if getattr(config, key) != getattr(ServerConfig, key)), None)


def consistency_class(config: ServerConfig) -> type[Consistency]:
    """Return the class of the consistency of a config, which declares what holds for it."""
    variant = _variant(config)
    return CLASSES[config.consistency] if variant is None else _VARIANTS[variant]


def why_never_by_bucket(config: Config) -> str:
    """Return why no update is computed by bucket, as gradients arrive; empty: model and optimizer decide it."""
    if not consistency_class(config.server).waits_for_all:
        return "trainers do not wait for each other"
    if server_computes(config):
        return "the forward runs on the server"
    if config.training.may_skip:
        return "a step whose gradients are not finite is skipped"
    if config.training.weights_samples:
        return "the mean over the trainers is weighted by samples"
    return ""


def key_of_choice(
    config: ServerConfig, fits: Callable[[type[Consistency]], bool]
) -> tuple[str, object, Sequence[object]]:
    """Return the key to change where a consistency must fit: its name, its value, and the values with which it fits."""
    fitting, variant = [name for name, rules in CLASSES.items() if fits(rules)], _variant(config)
    if variant is None or config.consistency not in fitting:
        return "server.consistency", config.consistency, fitting
    value, without = getattr(config, variant), getattr(ServerConfig, variant)
    return f"server.{variant}", value, [without, value] if fits(_VARIANTS[variant]) else [without]


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
