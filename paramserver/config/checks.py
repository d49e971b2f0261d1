"""Checks that concern more than one key: a table of relations between keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paramserver.config.schema import (
    BUFFERS,
    CLIPPINGS,
    CONSISTENCIES,
    OUTER_OPTIMIZERS,
    Config,
    format_value,
    origin_prefix,
)
from paramserver.config.world import mode_of, num_servers_of, num_trainers_of, server_computes
from paramserver.errors import UnsupportedConfiguration


@dataclass(frozen=True)
class Relation:
    """A rule between ``keys``: ``check(config)`` returns the error message, or None where the rule holds."""

    keys: tuple[str, ...]
    check: Callable[[Config], str | None]


def value_of(config: Config, name: str) -> Any:
    """Return the value of a dotted key or section; None for a key of a section that is null."""
    value: Any = config
    for part in name.split("."):
        value = None if value is None else getattr(value, part)
    return value


def check_config(config: Config, origins: Mapping[str, str], source: str = "") -> None:
    """Refuse values that contradict each other.

    ``origins`` has where each key was given, in the order of assignment. A message names the latest of its keys.

    Raises:
        UnsupportedConfiguration: the first violation.
    """
    for relation in RELATIONS:
        if message := relation.check(config):
            given = [origin for name, origin in origins.items() if name in relation.keys]
            raise UnsupportedConfiguration(origin_prefix(given[-1] if given else source) + message)


def check_batch_size(config: Config) -> None:
    """Refuse a batch size, of a DataLoader, that contradicts other keys.

    Raises:
        UnsupportedConfiguration: the first violation.
    """
    for relation in RELATIONS:
        if "training.batch_size" in relation.keys and (message := relation.check(config)):
            raise UnsupportedConfiguration(message)


def _task(config: Config) -> str | None:
    return None if config.task else "task is missing; give module:Class or path/to/file.py:Class"


def _profile(config: Config) -> str | None:
    profile, max_steps = config.profile, config.training.max_steps
    if profile is None or max_steps is None or profile.start_step < max_steps:
        return None
    return (
        f"profile.start_step ({profile.start_step}) must be less than training.max_steps ({max_steps}), after which "
        "there is no step to trace; lower it"
    )


def _spares(config: Config) -> str | None:
    cluster = config.cluster
    if not cluster.spares or cluster.max_restarts:
        return None
    return (
        f"cluster.spares ({cluster.spares}) must be 0 with cluster.max_restarts (0), as no rank starts again; set it "
        "to 0 or raise cluster.max_restarts"
    )


def _elastic(config: Config) -> str | None:
    if not config.cluster.elastic or config.simulations is None:
        return None
    return (
        "cluster.elastic (True) must be false with simulations, which send to a fixed number of trainers; set it to "
        "false"
    )


def _patience_metric(config: Config) -> str | None:
    if config.training.patience is None or config.checkpoint.best:
        return None
    return (
        f"training.patience ({config.training.patience}) must have a metric to watch; "
        "set checkpoint.best, for example to {metric: accuracy, mode: max}"
    )


def _min_delta(config: Config) -> str | None:
    if not config.training.min_delta or config.training.patience is not None:
        return None
    return (
        f"training.min_delta ({config.training.min_delta}) must be 0 without training.patience, which it is for; set "
        "training.patience"
    )


def _patience_validations(config: Config) -> str | None:
    if config.training.patience is None or config.training.validate_every:
        return None
    return (
        f"training.patience ({config.training.patience}) counts validations, of which training.validate_every (0) "
        "makes none before the end; set training.validate_every"
    )


def _beyond_capacity(problem: str, samples: int, key: str, config: Config) -> str | None:
    """The message for a number of samples that the buffer can never hold; ``key`` is the key to lower."""
    capacity = config.buffer.capacity
    return f"{problem} a buffer of {capacity}; raise buffer.capacity or lower {key}" if samples > capacity else None


def _batch(config: Config) -> str | None:
    batch = config.training.batch_size
    return _beyond_capacity(f"a batch of {batch} can never be gathered from", batch, "training.batch_size", config)


def _step(config: Config) -> str | None:
    batch, batches = config.training.batch_size, config.training.accumulate_batches
    if batches == 1:
        return None
    problem = f"{batches} batches of {batch} for a step can never be held in"
    return _beyond_capacity(problem, batch * batches, "training.accumulate_batches", config)


def _watermark(config: Config) -> str | None:
    watermark = config.buffer.watermark
    problem = f"a watermark of {watermark} can never be reached in"
    return _beyond_capacity(problem, watermark, "buffer.watermark", config)


def _kinds_with(option: str, family: Mapping[str, Sequence[str]] = BUFFERS) -> list[str]:
    """The kinds of buffers, or of another family, that have an option."""
    return [kind for kind, options in family.items() if option in options]


def _new_samples(config: Config) -> str | None:
    new, kind, batch = config.buffer.min_new_per_batch, config.buffer.kind, config.training.batch_size
    kinds = _kinds_with("min_new_per_batch")
    if new and kind not in kinds:
        return (
            f"buffer.min_new_per_batch ({new}) must be 0 with buffer.kind {kind}; set it to 0 or choose the "
            f"{' or '.join(kinds)}"
        )
    if new > batch:
        return f"buffer.min_new_per_batch ({new}) must be at most training.batch_size ({batch}); lower the former"
    return None


def _max_staleness(config: Config) -> str | None:
    limit = config.buffer.max_staleness
    missing = [name for name in ("publish", "simulations") if getattr(config, name) is None]
    if limit is None:
        return None
    if not missing and config.publish is not None and config.publish.every > limit + 1:
        return (
            f"buffer.max_staleness ({limit}) must be at least {config.publish.every - 1} with publish.every "
            f"({config.publish.every}), or samples of the newest version are too old before there is another; raise "
            "it, or lower publish.every"
        )
    if not missing:
        return None
    return (
        f"buffer.max_staleness ({limit}) must be null without the section {missing[0]}, as no sample has a version of "
        f"the model then; add the section, or leave it out"
    )


def _pseudo_epochs(config: Config) -> str | None:
    pseudo_epochs, kind, kinds = config.buffer.pseudo_epochs, config.buffer.kind, _kinds_with("pseudo_epochs")
    if pseudo_epochs == 1 or kind in kinds:
        return None
    return (
        f"buffer.pseudo_epochs ({pseudo_epochs}) must be 1 with the {kind}, which repeats samples until they are "
        f"evicted; set it to 1 or choose {' or '.join(kinds)}"
    )


def _clipping(config: Config) -> str | None:
    given = {name: value for name in CLIPPINGS if (value := getattr(config.training, name)) is not None}
    if len(given) < 2:
        return None
    first, second = list(given)[:2]
    return (
        f"training.{second} ({given[second]}) must be null with training.{first} ({given[first]}), as gradients are "
        "clipped once; keep one of them"
    )


def _backup_trainers(config: Config) -> str | None:
    backups, trainers = config.server.backup_trainers, num_trainers_of(config)
    if not backups or not mode_of(config).has_servers:
        return None
    kinds = _kinds_with("backup_trainers", CONSISTENCIES)
    if config.server.consistency not in kinds:
        return (
            f"server.backup_trainers ({backups}) must be 0 with server.consistency {config.server.consistency}, "
            f"in which no trainer waits for the slowest; set it to 0 or choose {' or '.join(kinds)}"
        )
    if backups >= trainers:
        return (
            f"server.backup_trainers ({backups}) must be at most {trainers - 1}, the trainers less one, or no "
            "gradient is left to apply; lower it or start more trainers"
        )
    return None


def _arrivals(config: Config) -> str | None:
    arrivals, consistency = config.server.arrivals, config.server.consistency
    kinds = _kinds_with("arrivals", CONSISTENCIES)
    if arrivals == 1 or consistency in kinds or not mode_of(config).has_servers:
        return None
    return (
        f"server.arrivals ({arrivals}) must be 1 with server.consistency {consistency}; set it to 1 or choose "
        f"{' or '.join(kinds)}, in which an update is the mean of so many gradients of any trainers"
    )


def _weighted_arrivals(config: Config) -> str | None:
    if config.server.arrivals == 1 or not config.training.weights_samples or not mode_of(config).has_servers:
        return None
    return (
        f"training.outer.weighting (samples) must be trainers with server.arrivals ({config.server.arrivals}), as "
        "gradients are added when they arrive; choose trainers"
    )


def _dynamic_local_steps(config: Config) -> str | None:
    if not config.server.dynamic_local_steps or config.training.local_steps > 1 or not mode_of(config).has_servers:
        return None
    return (
        "server.dynamic_local_steps (true) must be false with training.local_steps (1), of which no trainer can take "
        "fewer; set it to false or raise training.local_steps"
    )


def _decays(config: Config) -> str | None:
    outer = config.training.outer
    for name in ("momentum", "beta2") if outer is not None else ():
        if getattr(outer, name) == 1:
            return f"training.outer.{name} (1) must be below 1, or nothing is ever forgotten; use 0.9 or the like"
    return None


def _delay(config: Config) -> str | None:
    outer, kinds = config.training.outer, _kinds_with("delay", OUTER_OPTIMIZERS)
    if outer is None or outer.delay is None or outer.optimizer in kinds:
        return None
    return (
        f"training.outer.delay ({outer.delay}) must be null with training.outer.optimizer "
        f"({format_value(outer.optimizer)}), which has none; leave it out or choose {' or '.join(kinds)}"
    )


def _rounds_comm_hook(config: Config) -> str | None:
    hook, training = config.ddp.comm_hook, config.training
    if hook == "none" or not training.has_rounds or not mode_of(config).has_process_group:
        return None
    return (
        f"ddp.comm_hook ({hook}) must be none with training.local_steps ({training.local_steps}) or training.outer, as "
        "the model is not wrapped in DistributedDataParallel; leave it out"
    )


def _compression(config: Config) -> str | None:
    compression = config.server.compression
    if compression == "none" or not config.server.must_share_memory or not mode_of(config).has_servers:
        return None
    return (
        f"server.compression ({compression}) must be none with server.transport shared_memory, where gradients are "
        "written in place; leave it out or choose rpc"
    )


# Whether the parameters are larger is not known yet. Where they are, a note of the server reports it.
_ROUNDS_LITTLE = (None, "float32")


def _wire_dtype(config: Config) -> str | None:
    dtype = config.server.wire_dtype
    if not config.server.must_share_memory or dtype in _ROUNDS_LITTLE or server_computes(config):
        return None
    if not mode_of(config).has_servers:
        return None
    return (
        f"server.wire_dtype ({dtype}) must be null or float32 with server.transport shared_memory, where parameters "
        "and gradients are read and written in place; leave it out or choose rpc"
    )


def _served(key: str, allowed: tuple[Any, ...], reason: str, cure: str, *others: str) -> Relation:
    """A rule of ``server.compute: server`` for the value of ``key``, which ``others`` may decide too."""

    def check(config: Config) -> str | None:
        value = num_servers_of(config) if key == "cluster.num_servers" else value_of(config, key)
        if not server_computes(config) or value in allowed:
            return None
        rule = " or ".join(format_value(one) for one in allowed)
        return f"{key} ({value}) must be {rule} with server.compute server, where {reason}; {cure}"

    return Relation(("server.compute", key, *others), check)


def _served_rounds(config: Config) -> str | None:
    if not server_computes(config) or not config.training.has_rounds:
        return None
    return (
        f"training.local_steps ({config.training.local_steps}) and training.outer must be left out with server.compute "
        "server, where no trainer has parameters to step; leave them out or choose server.compute: trainer"
    )


def _one_server_on_gpu(config: Config) -> str | None:
    servers = num_servers_of(config)
    if config.device.server != "cuda" or servers == 1 or not mode_of(config).has_servers:
        return None
    return (
        f"device.server (cuda) must be auto or cpu with cluster.num_servers ({servers}); set cluster.num_servers: 1 or "
        "leave device.server out"
    )


def _one_producer(config: Config) -> str | None:
    section = config.simulations
    if section is None or section.command is None or section.function is None:
        return None
    return (
        f"simulations.command ({format_value(section.command, 40)}) and simulations.function ({section.function}) "
        "must not both be given; keep one"
    )


def _simulation_count(config: Config) -> str | None:
    section = config.simulations
    if section is None or section.count is not None or (section.command is None and section.function is None):
        return None
    return "simulations.count (null) must be given with simulations that the run starts; set it"


_OR_TRAINER = "leave it out or choose server.compute: trainer"
_OR_NUM_GPUS = "leave it out, and give the server its GPUs by device.num_gpus"

RELATIONS: tuple[Relation, ...] = (
    Relation(("task",), _task),
    Relation(("profile.start_step", "training.max_steps"), _profile),
    Relation(("cluster.spares", "cluster.max_restarts"), _spares),
    Relation(("cluster.elastic", "simulations"), _elastic),
    Relation(("training.patience", "checkpoint.best"), _patience_metric),
    Relation(("training.patience", "training.validate_every"), _patience_validations),
    Relation(("training.min_delta", "training.patience"), _min_delta),
    Relation(("training.batch_size", "buffer.capacity"), _batch),
    Relation(("training.accumulate_batches", "training.batch_size", "buffer.capacity"), _step),
    Relation(("buffer.watermark", "buffer.capacity"), _watermark),
    Relation(("buffer.min_new_per_batch", "buffer.kind", "training.batch_size"), _new_samples),
    Relation(("buffer.max_staleness", "publish", "simulations"), _max_staleness),
    Relation(("buffer.pseudo_epochs", "buffer.kind"), _pseudo_epochs),
    Relation(tuple(f"training.{name}" for name in CLIPPINGS), _clipping),
    Relation(("server.backup_trainers", "server.consistency", "cluster.num_trainers"), _backup_trainers),
    Relation(("server.arrivals", "server.consistency"), _arrivals),
    Relation(("server.arrivals", "training.outer.weighting"), _weighted_arrivals),
    Relation(("server.dynamic_local_steps", "training.local_steps"), _dynamic_local_steps),
    Relation(("training.outer.momentum", "training.outer.beta2"), _decays),
    Relation(("training.outer.delay", "training.outer.optimizer"), _delay),
    Relation(("ddp.comm_hook", "training.local_steps", "training.outer"), _rounds_comm_hook),
    Relation(("server.transport", "server.wire_dtype"), _wire_dtype),
    Relation(("server.transport", "server.compression"), _compression),
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
    Relation(("server.compute", "training.local_steps", "training.outer"), _served_rounds),
    _served("device.kind", ("auto", "cpu"), "trainers compute nothing but the loss", _OR_NUM_GPUS),
    _served("training.nonfinite", ("fail",), "no trainer has gradients to check", _OR_TRAINER),
    _served("training.precision", ("float32", "bfloat16"), "no trainer has gradients to unscale", _OR_TRAINER),
    _served("training.ema_decay", (None,), "no trainer has parameters to validate", _OR_TRAINER),
    Relation(("device.server", "cluster.num_servers", "cluster.colocate"), _one_server_on_gpu),
    _served("device.server", ("auto", "cpu"), "the parameters are on the CPU", _OR_NUM_GPUS),
    Relation(("simulations.command", "simulations.function"), _one_producer),
    Relation(("simulations.command", "simulations.function", "simulations.count"), _simulation_count),
)
