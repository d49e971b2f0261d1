"""Checks that concern more than one key: a table of relations between keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paramserver.config.schema import (
    BUFFERS,
    CLIPPINGS,
    CONSISTENCIES,
    LOADER_KEYS,
    OUTER_OPTIMIZERS,
    Config,
    format_value,
    origin_prefix,
)
from paramserver.config.world import mode_of, num_servers_of, num_trainers_of, server_computes
from paramserver.errors import UnsupportedConfiguration


@dataclass(frozen=True)
class Relation:
    """A rule between ``keys``, which ``broken(config)`` tests.

    ``message`` is the error, as a format: with ``{section.key}`` for the value of a key, and the names of what
    ``values(config)`` returns.
    """

    keys: tuple[str, ...]
    broken: Callable[[Config], Any]
    message: str
    values: Callable[[Config], Mapping[str, Any]] = lambda config: {}

    @property
    def loader_keys(self) -> list[str]:
        """Those of ``LOADER_KEYS`` among its keys."""
        return [name for name in LOADER_KEYS if f"training.{name}" in self.keys]

    def check(self, config: Config) -> str | None:
        """Return the error message; None where the rule holds."""
        return self.message.format(**vars(config), **self.values(config)) if self.broken(config) else None


def value_of(config: Config, name: str) -> Any:
    """Return the value of a dotted key or section; None for a key of a section that is null."""
    value: Any = config
    for part in name.split("."):
        value = None if value is None else getattr(value, part)
    return value


def check_config(config: Config, origins: Mapping[str, str], source: str = "") -> None:
    """Refuse values that contradict each other.

    ``origins`` has where each key was given, in the order of assignment. A message names the latest of its keys. What
    depends on a key that a DataLoader may replace, as it was not given, is left to ``check_reading``.

    Raises:
        UnsupportedConfiguration: the first violation.
    """
    for relation in RELATIONS:
        if all(map(config.has_given, relation.loader_keys)) and (message := relation.check(config)):
            given = [origin for name, origin in origins.items() if name in relation.keys]
            raise UnsupportedConfiguration(origin_prefix(given[-1] if given else source) + message)


def check_reading(config: Config) -> None:
    """Refuse a batch size with which data is read, of a DataLoader or the default, that contradicts other keys.

    Raises:
        UnsupportedConfiguration: the first violation.
    """
    for relation in RELATIONS:
        if relation.loader_keys and (message := relation.check(config)):
            raise UnsupportedConfiguration(message)


def _kinds_with(option: str, family: Mapping[str, Sequence[str]]) -> str:
    """The kinds of a family that have an option, in words."""
    return " or ".join(kind for kind, options in family.items() if option in options)


def _has_servers(config: Config) -> bool:
    return mode_of(config).has_servers


def _lacks(option: str, kind: str, family: Mapping[str, Sequence[str]]) -> bool:
    return option not in family[kind]


def _exceeds(config: Config, samples: int) -> bool:
    """Whether the buffer can never hold so many samples."""
    return samples > config.buffer.capacity


def _lacks_versions(section: str) -> Relation:
    return Relation(
        ("buffer.max_staleness", "publish", "simulations"),
        lambda config: config.buffer.max_staleness is not None and getattr(config, section) is None,
        f"buffer.max_staleness ({{buffer.max_staleness}}) must be null without the section {section}, as no sample has "
        "a version of the model then; add the section, or leave it out",
    )


def _ages_too_fast(config: Config) -> bool:
    """Whether samples of the newest version become too old before there is another."""
    limit, publish = config.buffer.max_staleness, config.publish
    return limit is not None and publish is not None and publish.every > limit + 1


def _never_forgets(decay: str) -> Relation:
    return Relation(
        ("training.outer.momentum", "training.outer.beta2"),
        lambda config: value_of(config, f"training.outer.{decay}") == 1,
        f"training.outer.{decay} (1) must be below 1, or nothing is ever forgotten; use 0.9 or the like",
    )


def _delays_nothing(config: Config) -> bool:
    outer = config.training.outer
    if outer is None or outer.delay is None:
        return False
    return outer.optimizer is None or _lacks("delay", outer.optimizer, OUTER_OPTIMIZERS)


def _clippings(config: Config) -> dict[str, float]:
    """The kinds of clipping that are given, with their values."""
    given = {name: getattr(config.training, name) for name in CLIPPINGS}
    return {name: value for name, value in given.items() if value is not None}


def _first_two(clippings: Mapping[str, float]) -> dict[str, Any]:
    (first, first_value), (second, second_value), *_ = clippings.items()
    return {"first": first, "first_value": first_value, "second": second, "second_value": second_value}


def _ignores(config: Config, option: str) -> bool:
    """Whether the servers, if there are any, have a consistency without this option."""
    return _has_servers(config) and _lacks(option, config.server.consistency, CONSISTENCIES)


def _writes_in_place(config: Config) -> bool:
    return _has_servers(config) and config.server.must_share_memory and not server_computes(config)


def _producers(config: Config) -> list[str]:
    """The keys that are given of those that start simulations."""
    names = ("simulations.command", "simulations.function")
    return [name for name in names if value_of(config, name) is not None]


# Whether the parameters are larger is not known yet. Where they are, a note of the server reports it.
_ROUNDS_LITTLE = (None, "float32")


def _served(key: str, allowed: tuple[Any, ...], reason: str, cure: str, *others: str) -> Relation:
    """A rule of ``server.compute: server`` for the value of ``key``, which ``others`` may decide too."""

    def value(config: Config) -> Any:
        return num_servers_of(config) if key == "cluster.num_servers" else value_of(config, key)

    rule = " or ".join(format_value(one) for one in allowed)
    return Relation(
        ("server.compute", key, *others),
        lambda config: server_computes(config) and value(config) not in allowed,
        f"{key} ({{value}}) must be {rule} with server.compute server, where {reason}; {cure}",
        lambda config: {"value": value(config)},
    )


_OR_TRAINER = "leave it out or choose server.compute: trainer"
_OR_NUM_GPUS = "leave it out, and give the server its GPUs by device.num_gpus"

RELATIONS: tuple[Relation, ...] = (
    Relation(("task",), lambda config: not config.task, "task is missing; give module:Class or path/to/file.py:Class"),
    Relation(
        ("profile.start_step", "training.max_steps"),
        lambda config: config.profile and config.profile.start_step >= (config.training.max_steps or math.inf),
        "profile.start_step ({profile.start_step}) must be less than training.max_steps ({training.max_steps}), after "
        "which there is no step to trace; lower it",
    ),
    Relation(
        ("cluster.spares", "cluster.max_restarts"),
        lambda config: config.cluster.spares and not config.cluster.max_restarts,
        "cluster.spares ({cluster.spares}) must be 0 with cluster.max_restarts (0), as no rank starts again; set it to "
        "0 or raise cluster.max_restarts",
    ),
    Relation(
        ("cluster.elastic", "simulations"),
        lambda config: config.cluster.elastic and config.simulations,
        "cluster.elastic (True) must be false with simulations, which send to a fixed number of trainers; set it to "
        "false",
    ),
    Relation(
        ("training.patience", "checkpoint.best"),
        lambda config: config.training.patience and not config.checkpoint.best,
        "training.patience ({training.patience}) must have a metric to watch; set checkpoint.best, for example to "
        "{{metric: accuracy, mode: max}}",
    ),
    Relation(
        ("training.patience", "training.validate_every"),
        lambda config: config.training.patience and not config.training.validate_every,
        "training.patience ({training.patience}) counts validations, of which training.validate_every (0) makes none "
        "before the end; set training.validate_every",
    ),
    Relation(
        ("training.min_delta", "training.patience"),
        lambda config: config.training.min_delta and config.training.patience is None,
        "training.min_delta ({training.min_delta}) must be 0 without training.patience, which it is for; set "
        "training.patience",
    ),
    Relation(
        ("training.batch_size", "buffer.capacity"),
        lambda config: _exceeds(config, config.training.batch_size),
        "a batch of {training.batch_size} can never be gathered from a buffer of {buffer.capacity}; raise "
        "buffer.capacity or lower training.batch_size",
    ),
    Relation(
        ("training.accumulate_batches", "training.batch_size", "buffer.capacity"),
        lambda config: _exceeds(config, config.training.batch_size * config.training.accumulate_batches),
        "{training.accumulate_batches} batches of {training.batch_size} for a step can never be held in a buffer of "
        "{buffer.capacity}; raise buffer.capacity or lower training.accumulate_batches",
    ),
    Relation(
        ("buffer.watermark", "buffer.capacity"),
        lambda config: _exceeds(config, config.buffer.watermark),
        "a watermark of {buffer.watermark} can never be reached in a buffer of {buffer.capacity}; raise "
        "buffer.capacity or lower buffer.watermark",
    ),
    Relation(
        ("buffer.min_new_per_batch", "buffer.kind"),
        lambda config: config.buffer.min_new_per_batch and _lacks("min_new_per_batch", config.buffer.kind, BUFFERS),
        "buffer.min_new_per_batch ({buffer.min_new_per_batch}) must be 0 with buffer.kind {buffer.kind}; set it to 0 "
        f"or choose the {_kinds_with('min_new_per_batch', BUFFERS)}",
    ),
    Relation(
        ("buffer.min_new_per_batch", "training.batch_size"),
        lambda config: config.buffer.min_new_per_batch > config.training.batch_size,
        "buffer.min_new_per_batch ({buffer.min_new_per_batch}) must be at most training.batch_size "
        "({training.batch_size}); lower the former",
    ),
    _lacks_versions("publish"),
    _lacks_versions("simulations"),
    Relation(
        ("buffer.max_staleness", "publish", "simulations"),
        _ages_too_fast,
        "buffer.max_staleness ({buffer.max_staleness}) must be at least {least} with publish.every ({publish.every}), "
        "or samples of the newest version are too old before there is another; raise it, or lower publish.every",
        lambda config: {"least": value_of(config, "publish.every") - 1},
    ),
    Relation(
        ("buffer.pseudo_epochs", "buffer.kind"),
        lambda config: config.buffer.pseudo_epochs > 1 and _lacks("pseudo_epochs", config.buffer.kind, BUFFERS),
        "buffer.pseudo_epochs ({buffer.pseudo_epochs}) must be 1 with the {buffer.kind}, which repeats samples until "
        f"they are evicted; set it to 1 or choose {_kinds_with('pseudo_epochs', BUFFERS)}",
    ),
    Relation(
        tuple(f"training.{name}" for name in CLIPPINGS),
        lambda config: len(_clippings(config)) > 1,
        "training.{second} ({second_value}) must be null with training.{first} ({first_value}), as gradients are "
        "clipped once; keep one of them",
        lambda config: _first_two(_clippings(config)),
    ),
    Relation(
        ("server.backup_trainers", "server.consistency", "cluster.num_trainers"),
        lambda config: config.server.backup_trainers and _ignores(config, "backup_trainers"),
        "server.backup_trainers ({server.backup_trainers}) must be 0 with server.consistency {server.consistency}, in "
        "which no trainer waits for the slowest; set it to 0 or choose "
        f"{_kinds_with('backup_trainers', CONSISTENCIES)}",
    ),
    Relation(
        ("server.backup_trainers", "server.consistency", "cluster.num_trainers"),
        lambda config: _has_servers(config) and config.server.backup_trainers >= num_trainers_of(config),
        "server.backup_trainers ({server.backup_trainers}) must be at most {most}, the trainers less one, or no "
        "gradient is left to apply; lower it or start more trainers",
        lambda config: {"most": num_trainers_of(config) - 1},
    ),
    Relation(
        ("server.arrivals", "server.consistency"),
        lambda config: config.server.arrivals > 1 and _ignores(config, "arrivals"),
        "server.arrivals ({server.arrivals}) must be 1 with server.consistency {server.consistency}; set it to 1 or "
        f"choose {_kinds_with('arrivals', CONSISTENCIES)}, in which an update is the mean of so many gradients of any "
        "trainers",
    ),
    Relation(
        ("server.arrivals", "training.outer.weighting"),
        lambda config: _has_servers(config) and config.server.arrivals > 1 and config.training.weights_samples,
        "training.outer.weighting (samples) must be trainers with server.arrivals ({server.arrivals}), as gradients "
        "are added when they arrive; choose trainers",
    ),
    Relation(
        ("server.dynamic_local_steps", "training.local_steps"),
        lambda config: _has_servers(config) and config.server.dynamic_local_steps and config.training.local_steps == 1,
        "server.dynamic_local_steps (true) must be false with training.local_steps (1), of which no trainer can take "
        "fewer; set it to false or raise training.local_steps",
    ),
    _never_forgets("momentum"),
    _never_forgets("beta2"),
    Relation(
        ("training.outer.delay", "training.outer.optimizer"),
        _delays_nothing,
        "training.outer.delay ({training.outer.delay}) must be null with training.outer.optimizer ({optimizer}), which "
        f"has none; leave it out or choose {_kinds_with('delay', OUTER_OPTIMIZERS)}",
        lambda config: {"optimizer": format_value(value_of(config, "training.outer.optimizer"))},
    ),
    Relation(
        ("ddp.comm_hook", "training.local_steps", "training.outer"),
        lambda config: (
            mode_of(config).has_process_group and config.ddp.comm_hook != "none" and config.training.has_rounds
        ),
        "ddp.comm_hook ({ddp.comm_hook}) must be none with training.local_steps ({training.local_steps}) or "
        "training.outer, as the model is not wrapped in DistributedDataParallel; leave it out",
    ),
    Relation(
        ("server.transport", "server.wire_dtype"),
        lambda config: _writes_in_place(config) and config.server.wire_dtype not in _ROUNDS_LITTLE,
        "server.wire_dtype ({server.wire_dtype}) must be null or float32 with server.transport shared_memory, where "
        "parameters and gradients are read and written in place; leave it out or choose tcp or rpc",
    ),
    Relation(
        ("server.transport", "server.compression"),
        lambda config: _has_servers(config) and config.server.must_share_memory and config.server.compression != "none",
        "server.compression ({server.compression}) must be none with server.transport shared_memory, where gradients "
        "are written in place; leave it out or choose tcp or rpc",
    ),
    _served(
        "cluster.num_servers",
        (1,),
        "one server holds the whole model",
        "set it to 1 or choose server.compute: trainer",
        "cluster.colocate",
    ),
    _served("server.transport", ("auto", "rpc"), "no parameters are sent", _OR_TRAINER),
    _served("server.wire_dtype", _ROUNDS_LITTLE, "no parameters are sent", _OR_TRAINER),
    _served("server.compression", ("none",), "no gradients of parameters are sent", _OR_TRAINER),
    Relation(
        ("server.compute", "training.local_steps", "training.outer"),
        lambda config: server_computes(config) and config.training.has_rounds,
        "training.local_steps ({training.local_steps}) and training.outer must be left out with server.compute server, "
        "where no trainer has parameters to step; leave them out or choose server.compute: trainer",
    ),
    _served("device.kind", ("auto", "cpu"), "trainers compute nothing but the loss", _OR_NUM_GPUS),
    _served("training.nonfinite", ("fail",), "no trainer has gradients to check", _OR_TRAINER),
    _served("training.precision", ("float32", "bfloat16"), "no trainer has gradients to unscale", _OR_TRAINER),
    _served("training.ema_decay", (None,), "no trainer has parameters to validate", _OR_TRAINER),
    Relation(
        ("device.server", "cluster.num_servers", "cluster.colocate"),
        lambda config: config.device.server == "cuda" and num_servers_of(config) > 1,
        "device.server (cuda) must be auto or cpu with cluster.num_servers ({servers}); set cluster.num_servers: 1 or "
        "leave device.server out",
        lambda config: {"servers": num_servers_of(config)},
    ),
    _served("device.server", ("auto", "cpu"), "the parameters are on the CPU", _OR_NUM_GPUS),
    Relation(
        ("simulations.command", "simulations.function"),
        lambda config: len(_producers(config)) > 1,
        "simulations.command ({command}) and simulations.function ({simulations.function}) must not both be given; "
        "keep one",
        lambda config: {"command": format_value(value_of(config, "simulations.command"), 40)},
    ),
    Relation(
        ("simulations.command", "simulations.function", "simulations.count"),
        lambda config: _producers(config) and value_of(config, "simulations.count") is None,
        "simulations.count (null) must be given with simulations that the run starts; set it",
    ),
)
