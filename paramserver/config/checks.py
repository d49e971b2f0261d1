"""What no single key can tell: values of later versions, and relations between keys. Two tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paramserver.config.schema import Config, format_value, origin_prefix
from paramserver.config.world import mode_of, num_trainers_of, server_computes
from paramserver.errors import UnsupportedConfiguration

# Key -> the values that this version can do. All others are parsed and checked like the rest, then refused.
NOT_IN_THIS_VERSION: dict[str, tuple[Any, ...]] = {
    "server.on_loss": ("fail",),
    "cluster.max_restarts": (0,),
    "cluster.elastic": (False,),
    "cluster.token_file": (None,),
    "training.loader_workers": (0,),
    "device.server": ("auto", "cpu"),
}


@dataclass(frozen=True)
class Relation:
    """``broken(config)`` says in one sentence what is wrong between ``keys``, or gives None."""

    keys: tuple[str, ...]
    check: Callable[[Config], str | None]


def value_of(config: Config, name: str) -> Any:
    """Return the value of a dotted key or section; below a section that is null: None."""
    value: Any = config
    for part in name.split("."):
        value = None if value is None else getattr(value, part)
    return value


def check_config(config: Config, origins: Mapping[str, str], source: str = "") -> None:
    """Refuse what this version cannot do, then what contradicts itself.

    Args:
        config: values that each keep their own rule.
        origins: where each key was given, the latest last; a message names the latest of the keys that it is about.
        source: the origin of what was never given.

    Raises:
        UnsupportedConfiguration: the first thing found.
    """
    # Versions first: what a later version needs may well contradict what this one checks.
    for name, accepted in NOT_IN_THIS_VERSION.items():
        value = value_of(config, name)
        if value not in accepted:
            shown, use = format_value(value, 60), " or ".join(map(format_value, accepted))
            raise UnsupportedConfiguration(
                f"{origin_prefix(origins.get(name, ''))}not in this version: {name} ({shown}); use {use}"
            )
    for relation in RELATIONS:
        if message := relation.check(config):
            given = [origin for name, origin in origins.items() if name in relation.keys]
            raise UnsupportedConfiguration(origin_prefix(given[-1] if given else source) + message)


def _task(config: Config) -> str | None:
    return None if config.task else "task is missing; give module:Class or path/to/file.py:Class"


def _patience(config: Config) -> str | None:
    if config.training.patience is None or config.checkpoint.best:
        return None
    return (
        f"training.patience ({config.training.patience}) must have a metric to watch; "
        "set checkpoint.best, for example to {metric: accuracy, mode: max}"
    )


def _patience_sees(config: Config) -> str | None:
    if config.training.patience is None or config.training.validate_every:
        return None
    return (
        f"training.patience ({config.training.patience}) counts validations, of which training.validate_every (0) "
        "makes none before the end; set training.validate_every"
    )


def _batch_fits(config: Config) -> str | None:
    batch, capacity = config.training.batch_size, config.buffer.capacity
    if batch <= capacity:
        return None
    return (
        f"a batch of {batch} can never be gathered from a buffer of {capacity}; "
        "raise buffer.capacity or lower training.batch_size"
    )


def _step_fits(config: Config) -> str | None:
    batch, batches, capacity = config.training.batch_size, config.training.accumulate_batches, config.buffer.capacity
    if batch * batches <= capacity or batches == 1:
        return None
    return (
        f"{batches} batches of {batch} for a step can never be held in a buffer of {capacity}; "
        "raise buffer.capacity or lower training.accumulate_batches"
    )


def _watermark_fits(config: Config) -> str | None:
    watermark, capacity = config.buffer.watermark, config.buffer.capacity
    if watermark <= capacity:
        return None
    return (
        f"a watermark of {watermark} can never be reached in a buffer of {capacity}; "
        "raise buffer.capacity or lower buffer.watermark"
    )


def _new_samples(config: Config) -> str | None:
    new, kind, batch = config.buffer.min_new_per_batch, config.buffer.kind, config.training.batch_size
    if new and kind != "reservoir":
        return (
            f"buffer.min_new_per_batch ({new}) must be 0 with buffer.kind {kind}; set it to 0 or choose the reservoir"
        )
    if new > batch:
        return f"buffer.min_new_per_batch ({new}) must be at most training.batch_size ({batch}); lower the former"
    return None


def _pseudo_epochs(config: Config) -> str | None:
    if config.buffer.pseudo_epochs == 1 or config.buffer.kind != "reservoir":
        return None
    return (
        f"buffer.pseudo_epochs ({config.buffer.pseudo_epochs}) must be 1 with the reservoir, which repeats samples "
        "by itself; set it to 1 or choose fifo or firo"
    )


def _heartbeat(config: Config) -> str | None:
    silence, beat = config.server.lost_after_s, config.server.heartbeat_s
    if silence > beat:
        return None
    return (
        f"server.lost_after_s ({silence}) must be above server.heartbeat_s ({beat}), or every trainer counts as lost; "
        "raise it or lower the other"
    )


def _backup_trainers(config: Config) -> str | None:
    backups, trainers = config.server.backup_trainers, num_trainers_of(config)
    if not backups or not mode_of(config).has_servers:
        return None
    if config.server.consistency != "sync":
        return (
            f"server.backup_trainers ({backups}) must be 0 with server.consistency {config.server.consistency}, "
            "in which nobody waits for the slowest; set it to 0 or choose sync"
        )
    if backups >= trainers:
        return (
            f"server.backup_trainers ({backups}) must be at most {trainers - 1}, the trainers less one, or no "
            "gradient is left to apply; lower it or start more trainers"
        )
    return None


def _wire(config: Config) -> str | None:
    narrow, wanted = config.server.wire_dtype, config.server.transport
    if wanted != "shared_memory" or narrow == "float32" or server_computes(config) or not mode_of(config).has_servers:
        return None
    return (
        f"server.wire_dtype ({narrow}) must be float32 with server.transport shared_memory, where parameters and "
        "gradients are read and written in place; leave it out or choose rpc"
    )


def _served_alone(config: Config) -> str | None:
    if not server_computes(config) or config.cluster.num_servers == 1:
        return None
    return (
        f"cluster.num_servers ({config.cluster.num_servers}) must be 1 with server.compute server, where one server "
        "holds the whole model; set it to 1 or choose server.compute: trainer"
    )


def _served_by_messages(config: Config) -> str | None:
    if not server_computes(config) or config.server.transport != "shared_memory":
        return None
    return (
        "server.transport (shared_memory) must be auto or rpc with server.compute server, where no parameters travel; "
        "leave it out or choose server.compute: trainer"
    )


def _served_in_full(config: Config) -> str | None:
    if not server_computes(config) or config.server.wire_dtype == "float32":
        return None
    return (
        f"server.wire_dtype ({config.server.wire_dtype}) must be float32 with server.compute server, where no "
        "parameters travel; leave it out or choose server.compute: trainer"
    )


def _served_devices(config: Config) -> str | None:
    if not server_computes(config) or config.device.kind != "cuda":
        return None
    return (
        "device.kind (cuda) must be auto or cpu with server.compute server, where trainers compute nothing but the "
        "loss; leave it out, and give the server its GPUs by device.num_gpus"
    )


def _one_producer(config: Config) -> str | None:
    told = config.simulations
    if told is None or told.command is None or told.function is None:
        return None
    return (
        f"simulations.command ({format_value(told.command, 40)}) and simulations.function ({told.function}) must not both be "
        "given; keep one"
    )


def _simulations_counted(config: Config) -> str | None:
    told = config.simulations
    if told is None or told.count is not None or (told.command is None and told.function is None):
        return None
    return "simulations.count (null) must be given with simulations that the run starts; set it"


RELATIONS: tuple[Relation, ...] = (
    Relation(("task",), _task),
    Relation(("training.patience", "checkpoint.best"), _patience),
    Relation(("training.patience", "training.validate_every"), _patience_sees),
    Relation(("training.batch_size", "buffer.capacity"), _batch_fits),
    Relation(("training.accumulate_batches", "training.batch_size", "buffer.capacity"), _step_fits),
    Relation(("buffer.watermark", "buffer.capacity"), _watermark_fits),
    Relation(("buffer.min_new_per_batch", "buffer.kind", "training.batch_size"), _new_samples),
    Relation(("buffer.pseudo_epochs", "buffer.kind"), _pseudo_epochs),
    Relation(("server.lost_after_s", "server.heartbeat_s"), _heartbeat),
    Relation(("server.backup_trainers", "server.consistency", "cluster.num_trainers"), _backup_trainers),
    Relation(("server.transport", "server.wire_dtype"), _wire),
    Relation(("server.compute", "cluster.num_servers"), _served_alone),
    Relation(("server.compute", "server.transport"), _served_by_messages),
    Relation(("server.compute", "server.wire_dtype"), _served_in_full),
    Relation(("server.compute", "device.kind"), _served_devices),
    Relation(("simulations.command", "simulations.function"), _one_producer),
    Relation(("simulations.command", "simulations.function", "simulations.count"), _simulations_counted),
)
