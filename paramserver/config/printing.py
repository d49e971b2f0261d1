"""Configs and keys as text: the stored file, the differences of two configs, the list of all keys."""

from collections.abc import Iterator, Mapping
from typing import Any

from paramserver.config.checks import NOT_IN_THIS_VERSION
from paramserver.config.reading import dump
from paramserver.config.rules import show
from paramserver.config.schema import Config
from paramserver.config.table import KEYS, SECTIONS, join

_ABSENT = object()


def dump_yaml(config: Config) -> str:
    """Write every key of the config as YAML; `load_config` of this text gives an equal config."""
    return dump(config.to_mapping())


def differences(a: Config, b: Config) -> list[str]:
    """One line per key whose value differs: "training.batch_size: 32 -> 64", in the order of the keys."""
    before, after = dict(leaves(a.to_mapping())), dict(leaves(b.to_mapping()))
    names = [*before, *(name for name in after if name not in before)]
    pairs = ((name, before.get(name, _ABSENT), after.get(name, _ABSENT)) for name in names)
    # By repr: 1, 1.0 and true are equal and yet not the same argument; nan is the same as nan.
    return [f"{name}: {_shown(old)} -> {_shown(new)}" for name, old, new in pairs if repr(old) != repr(new)]


def leaves(mapping: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a config as a mapping, by dotted name, with their values."""
    for name, value in mapping.items():
        dotted = join(prefix, show(name))
        if isinstance(value, dict) and (value or dotted in KEYS):
            yield from leaves(value, dotted)
        elif value is not None or dotted not in SECTIONS:
            yield dotted, value


def _shown(value: Any) -> str:
    return "(not given)" if value is _ABSENT else show(value)


def describe_keys() -> list[str]:
    """One line per key: name, default, what it accepts, what it is for."""
    lines = []
    for key in KEYS.values():
        default = "(required)" if key.required else show(key.default)
        only = NOT_IN_THIS_VERSION.get(key.name)
        limit = f" (in this version only {' or '.join(map(show, only))})" if only else ""
        lines.append(f"{key.name} = {default}  # {key.rule.wanted()}{limit}: {key.help}")
    return lines
