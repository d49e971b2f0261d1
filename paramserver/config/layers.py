"""Layers of settings: values from a file, then ``--set``, then flags; a later layer overrides an earlier one.

`KEYS` and `SECTIONS` list the schema by dotted name. `Settings` collects checked values and where each was given, and
builds the `Config`; `apply_overrides` and `apply_flags` assign what the command line gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paramserver.config.parsing import MAX_DEPTH, check_value, read_text
from paramserver.config.schema import REQUIRED, Config, KeyPath, Rule, closest_match, format_value, origin_prefix
from paramserver.errors import UnsupportedConfiguration


@dataclass(frozen=True)
class Key:
    """One config key, such as ``training.batch_size``. The default of a required key is None."""

    name: str
    rule: Rule
    default: Any
    required: bool
    help: str


@dataclass(frozen=True)
class Section:
    """One section of keys, such as ``training`` or ``checkpoint.best``."""

    name: str
    nullable: bool
    help: str


def dotted_name(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _entries(kind: type, prefix: str = "") -> Iterator[Key | Section]:
    for field in _fields(kind):
        name, metadata = dotted_name(prefix, field.name), field.metadata
        if "section" in metadata:
            yield Section(name, metadata["nullable"], metadata["help"])
            yield from _entries(metadata["section"], name)
        else:
            default, required = metadata["default"], metadata["default"] is REQUIRED
            yield Key(name, metadata["rule"], None if required else default, required, metadata["help"])


def _fields(kind: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.metadata]


_ENTRIES = tuple(_entries(Config))

KEYS: dict[str, Key] = {entry.name: entry for entry in _ENTRIES if isinstance(entry, Key)}
SECTIONS: dict[str, Section] = {entry.name: entry for entry in _ENTRIES if isinstance(entry, Section)}


def free_key(path: tuple[str, ...]) -> Key | None:
    """Return the free dictionary that contains ``path``, such as ``task_args`` for ``task_args.model.width``."""
    names = (".".join(path[:length]) for length in range(1, len(path)))
    return next((KEYS[name] for name in names if name in KEYS and KEYS[name].rule.kind == "mapping"), None)


def own_name(mapping: Mapping[Any, Any], part: str) -> Any:
    """Return the name in ``mapping`` that is written as ``part``, such as the number 0 as "0"; without one ``part``."""
    return part if part in mapping else next((name for name in mapping if format_value(name) == part), part)


def child_names(prefix: str) -> list[str]:
    """Return the last names of the direct children of a section ("" = the top level)."""
    names = [*KEYS, *SECTIONS]
    return [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == prefix]


# What the task builds, and so has no key. Names of optimizers, schedules and models in other frameworks.
_OF_THE_TASK = {
    **dict.fromkeys(("learning_rate", "base_lr", "init_lr", "initial_lr", "max_lr", "start_lr", "learningrate"), "lr"),
    **{
        name: name
        for name in (
            *("lr", "weight_decay", "momentum", "betas", "nesterov", "optimizer", "optim", "optimizers", "loss"),
            *("scheduler", "schedule", "lr_scheduler", "lr_scheduler_type", "warmup_steps", "warmup_ratio", "gamma"),
            *("model", "hidden_size", "num_layers", "dropout", "dataset", "data", "data_dir", "label_smoothing"),
        )
    },
}
# Names in other frameworks (Lightning, transformers, accelerate, DeepSpeed, keras) of what has a key here.
_NAMED_ELSEWHERE = {
    "training.max_epochs": ("epochs", "num_epochs", "n_epochs", "num_train_epochs", "nb_epochs", "epoch"),
    "training.max_steps": ("num_steps", "total_steps", "iterations", "max_iters", "max_iterations"),
    "training.max_seconds": ("max_time", "time_limit"),
    "training.batch_size": (
        *("train_batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu", "batchsize"),
        *("micro_batch_size", "local_batch_size", "bs"),
    ),
    "training.validation_batch_size": ("eval_batch_size", "per_device_eval_batch_size", "val_batch_size"),
    "training.accumulate_batches": (
        *("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accumulation_steps", "accumulation_steps"),
    ),
    "training.clip_grad_norm": (
        *("gradient_clip_val", "max_grad_norm", "grad_clip", "gradient_clipping", "clip_grad", "clipnorm", "clip_norm"),
    ),
    "training.clip_grad_value": ("clipvalue", "clip_value", "grad_clip_value"),
    "training.precision": ("dtype", "torch_dtype", "mixed_precision", "fp16", "bf16", "amp", "half_precision"),
    "training.validate_every": ("val_check_interval", "check_val_every_n_epoch", "eval_steps", "eval_interval"),
    "training.loader_workers": ("num_workers", "dataloader_num_workers", "n_workers"),
    "training.patience": ("early_stopping_patience", "early_stopping"),
    "checkpoint.every": ("save_steps", "save_every", "every_n_train_steps", "save_interval", "checkpoint_interval"),
    "checkpoint.keep": ("save_total_limit", "save_top_k", "keep_last"),
    "logging.log_every": ("logging_steps", "log_every_n_steps", "log_interval", "log_steps", "print_freq"),
    "logging.run_dir": ("output_dir", "log_dir", "logdir", "default_root_dir", "save_dir", "out_dir"),
    "logging.name": ("run_name", "experiment_name", "exp_name", "experiment"),
    "mode": ("strategy", "distributed_backend", "accelerator", "distribution"),
    "cluster.num_trainers": ("nproc_per_node", "num_processes", "devices", "n_gpu", "gpus", "workers", "trainers"),
    "cluster.num_servers": ("num_ps", "servers", "parameter_servers"),
    "init_from": ("pretrained", "load_from", "weights", "ckpt", "checkpoint_path"),
    "seed": ("random_seed", "random_state", "manual_seed", "data_seed", "seed_everything"),
}
_KEY_OF = {other: key for key, others in _NAMED_ELSEWHERE.items() for other in others}


def _named_elsewhere(leaf: str) -> str | None:
    """Return what to write in place of a name that another framework uses."""
    name = leaf.lower().replace("-", "_")
    if name in _OF_THE_TASK:
        return (
            f"the task builds its model, optimizer and data; write task_args.{_OF_THE_TASK[name]}, an argument of the "
            "task's constructor"
        )
    return f"write {_KEY_OF[name]}" if name in _KEY_OF else None


# What an earlier version had as a key. The config that a run stores contains every key, so the default is accepted and
# left out; for any other value: what to write instead.
_ARGUMENTS_OF_DDP = {"find_unused_parameters": False, "static_graph": False, "gradient_as_bucket_view": True}
_REMOVED: dict[str, tuple[Any, str]] = {
    **{
        f"ddp.{name}": (default, f"write it into ddp.extra, as in ddp.extra: {{{name}: ...}}")
        for name, default in {**_ARGUMENTS_OF_DDP, "bucket_cap_mb": None}.items()
    },
    "server.heartbeat_s": (1.0, "leave it out: it follows from server.lost_after_s"),
}


def unknown_key_message(name: str) -> str:
    """Return the message that refuses ``name`` and suggests the key that was probably meant."""
    parent, _, leaf = name.rpartition(".")
    cure = _named_elsewhere(leaf)
    if parent in KEYS and not cure:
        return f"{name} is not a key: {parent} is a single value; write {parent}: <value>"
    if leaf.lower() in _OF_THE_TASK and cure:  # rather than of the outer optimizer of rounds
        return f"{name} is not a key: {cure}"
    # An existing key in the wrong section, where only one section has a key of this name.
    namesakes = [known for known in (*KEYS, *SECTIONS) if "." in known and known.rpartition(".")[2] == leaf]
    if len(namesakes) == 1:
        return f"{name} is not a key: {leaf} belongs to {namesakes[0].rpartition('.')[0]}; write {namesakes[0]}"
    if cure:
        return f"{name} is not a key: {cure}"
    if closest := _closest_key(name):
        return f"{name} is not a key; did you mean {closest}?"
    where = parent if parent in SECTIONS else ""
    return f"{name} is not a key; the keys of {where or 'a config'} are {', '.join(child_names(where))}"


def _closest_key(name: str) -> str | None:
    """Return the most similar name in the same section, else of all keys, by full or last name."""
    parent, _, leaf = name.rpartition(".")
    names = [*SECTIONS, *KEYS]
    # The section is misspelt: compare full names, because several sections have a kind, a server or a mode.
    if parent and parent not in SECTIONS:
        return closest_match(name, names)
    if near := closest_match(leaf, child_names(parent)):
        return dotted_name(parent, near)
    lasts = {known.rpartition(".")[2]: known for known in names}
    near = closest_match(leaf, list(lasts))
    return lasts[near] if near else None


# Returns where the value of a path was given, for messages: "digits.yaml:7", or "--set seed=1".
OriginOf = Callable[[KeyPath], str]


def constant_origin(origin: str) -> OriginOf:
    """Return the same origin for every path: an option of the command line has no line numbers."""
    return lambda _: origin


class Settings:
    """Checked values by dotted key, and where each was given last, in the order of assignment; others keep defaults."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def assign(self, path: KeyPath, value: Any, origin_of: OriginOf) -> None:
        """Set a key, every key of a section (a mapping), or a name inside a free dictionary.

        ``path`` has the names from the top; () is the whole config.

        Raises:
            UnsupportedConfiguration: there is no such key, or the value violates the rule of its key.
        """
        name = self._name(path, origin_of)
        if not path or name in SECTIONS:
            self._assign_section(path, value, origin_of)
        elif name in KEYS:
            self._store(name, check_value(name, KEYS[name].rule, value, origin_of(path)), origin_of(path))
        elif free := free_key(path):
            self._assign_inside(free, path, value, origin_of(path))
        elif name in _REMOVED:
            default, cure = _REMOVED[name]
            if value != default:
                raise UnsupportedConfiguration(
                    f"{origin_prefix(origin_of(path))}{name} ({format_value(value)}) must not be given: it is no key "
                    f"any more; {cure}"
                )
        else:
            raise UnsupportedConfiguration(origin_prefix(origin_of(path)) + unknown_key_message(name))

    def _name(self, path: KeyPath, origin_of: OriginOf) -> str:
        if path and not isinstance(path[-1], str):
            raise UnsupportedConfiguration(
                f"{origin_prefix(origin_of(path))}{unknown_key_message('.'.join(map(format_value, path)))}"
            )
        name = ".".join(path)
        parent = ".".join(path[:-1])
        if path and "." in path[-1] and (not parent or parent in SECTIONS):
            section, _, leaf = name.rpartition(".")
            raise UnsupportedConfiguration(
                f"{origin_prefix(origin_of(path))}{name} must be written as a section: "
                f"{section} on a line of its own, {leaf} below it"
            )
        return name

    def _assign_section(self, path: KeyPath, value: Any, origin_of: OriginOf) -> None:
        name = ".".join(path)
        nullable = name in SECTIONS and SECTIONS[name].nullable
        if nullable:  # A nullable section is one value: assigning it replaces everything that was given before.
            for given in [given for given in self.values if given.startswith(f"{name}.")]:
                del self.values[given]
                del self.origins[given]
            self._record_origin(name, origin_of(path))
        # YAML reads a section whose keys are all commented out as null.
        if value is None:
            return
        example = child_names(name)[0]
        if value == {} and nullable and not any(KEYS[dotted_name(name, leaf)].required for leaf in child_names(name)):
            value = {example: KEYS[dotted_name(name, example)].default}  # so that the section is there
        if not isinstance(value, Mapping) or (nullable and not value):
            raise UnsupportedConfiguration(
                f"{origin_prefix(origin_of(path))}{name or 'the config'} ({format_value(value, 60)}) must be "
                f"a section of keys; write {dotted_name(name, example)} and the like"
            )
        for leaf, item in value.items():
            self.assign((*path, leaf), item, origin_of)

    def _assign_inside(self, free: Key, path: KeyPath, value: Any, origin: str) -> None:
        """Assign to a name inside a free dictionary, such as ``task_args.model.width``."""
        # check_value copies, so the mapping of an earlier layer (a stored config) is not modified.
        whole = check_value(free.name, free.rule, self.values.get(free.name, free.default) or {}, origin)
        inner, depth = whole, free.name.count(".") + 1
        for length in range(depth, len(path) - 1):
            inner = inner.setdefault(own_name(inner, path[length]), {})
            if not isinstance(inner, dict):
                raise UnsupportedConfiguration(
                    f"{origin_prefix(origin)}{'.'.join(path[: length + 1])} ({format_value(inner, 60)}) must be "
                    f"a mapping to hold {'.'.join(path[length + 1 :])}; set it as a whole"
                )
        inner[own_name(inner, path[-1])] = value
        self._store(free.name, check_value(free.name, free.rule, whole, origin), origin)

    def _store(self, name: str, value: Any, origin: str) -> None:
        self.values[name] = value
        self._record_origin(name, origin)

    def _record_origin(self, name: str, origin: str) -> None:
        # Removed first: a dict keeps the position of an existing key, and the latest key must come last.
        self.origins.pop(name, None)
        self.origins[name] = origin

    def build(self) -> Config:
        """Build the config. Relations between keys are checked by `checks.check_config`."""
        config: Config = self._construct(Config, "")
        return dataclasses.replace(config, given=frozenset(self.origins))

    def _construct(self, kind: type, prefix: str) -> Any:
        arguments: dict[str, Any] = {}
        for field in _fields(kind):
            name = dotted_name(prefix, field.name)
            if name in SECTIONS:
                if not SECTIONS[name].nullable or any(given.startswith(f"{name}.") for given in self.values):
                    arguments[field.name] = self._construct(field.metadata["section"], name)
            elif name in self.values:
                arguments[field.name] = self.values[name]
            elif KEYS[name].required:
                origin = next((o for given, o in self.origins.items() if given.startswith(f"{prefix}.")), "")
                raise UnsupportedConfiguration(f"{origin_prefix(origin)}{name} is missing; give {KEYS[name].help}")
        return kind(**arguments)


def apply_overrides(settings: Settings, overrides: Sequence[str]) -> None:
    """Assign each ``key=value``, in order. The value is YAML, such as 64 or {metric: accuracy, mode: max}.

    Raises:
        UnsupportedConfiguration: no "=", an empty key, malformed YAML, or a value that `Settings.assign` refuses.
    """
    for override in overrides:
        origin = format_value(f"--set {override}", 120)
        path, value = _parse(override, origin)
        settings.assign(path, value, constant_origin(origin))


def _parse(override: str, origin: str) -> tuple[tuple[str, ...], Any]:
    # The first "=" ends the key; the value may contain others.
    name, equals, text = override.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise UnsupportedConfiguration(f"{origin}: must be key=value; write for example --set training.batch_size=64")
    if len(path) > MAX_DEPTH:
        raise UnsupportedConfiguration(f"{origin}: nested more than {MAX_DEPTH} levels deep; a config has three levels")
    if text.lstrip().startswith("#"):
        raise UnsupportedConfiguration(
            f"{origin}: a value that begins with # is a comment, and none is left; put it in quotes, inside those of "
            f"the shell: --set \"{name}='{text}'\""
        )
    value = read_text(text, origin, numbered=False).value
    key = KEYS.get(".".join(path))
    if isinstance(value, bool | int | float) and key and key.rule.kind == "str" and not key.rule.choices:
        value = text.strip()  # such as logging.name=4711: a shell takes quotes away
    return path, value


def apply_flags(settings: Settings, flags: Mapping[str, Any]) -> None:
    """Assign values by dotted key; None means that the flag was not given. A flag has the last name of its key."""
    for name, value in flags.items():
        if value is not None:
            settings.assign(tuple(name.split(".")), value, constant_origin(f"--{name.rpartition('.')[2]}"))
