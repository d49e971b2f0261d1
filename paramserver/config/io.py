"""From a file, a stored config or a mapping, and the command line, to one checked `Config`.

Configs and keys as text: the stored file, the differences of two configs, the list of all keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paramserver.config.checks import NOT_IN_THIS_VERSION, check_config
from paramserver.config.layers import (
    KEYS,
    SECTIONS,
    Settings,
    apply_flags,
    apply_overrides,
    constant_origin,
    dotted_name,
)
from paramserver.config.parsing import dump, read_file
from paramserver.config.schema import Config, format_value

_NO_FLAGS: Mapping[str, Any] = MappingProxyType({})


def load_config(
    file: Path | None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] = _NO_FLAGS,
    base: Mapping[str, Any] | None = None,
) -> Config:
    """Build the effective config: flag over ``--set`` over file over default.

    Args:
        file: a YAML file; None = defaults only.
        overrides: ``section.key=value`` texts, as after ``--set``; the later over the earlier.
        flags: values by dotted key; None stands for a flag that was not given.
        base: a stored config (``Config.to_mapping()``) in place of the file, when a run is resumed.

    Raises:
        UnsupportedConfiguration: what the user gave is wrong; the message begins with file and line, or the option.
        ValueError: both ``file`` and ``base``.
    """
    if file is not None and base is not None:
        raise ValueError(f"file ({file}) and base must not be given together; a stored config stands in for the file")
    settings, source = Settings(), ""
    if file is not None:
        source = str(file)
        document = read_file(Path(file))
        settings.assign((), document.value, lambda path: f"{source}:{document.lines.get(path, 1)}")
    elif base is not None:
        source = "the stored config"
        settings.assign((), base, constant_origin(source))
    apply_overrides(settings, overrides)
    apply_flags(settings, flags)
    return _checked(settings, source)


def config_from_mapping(mapping: Mapping[str, Any], origin: str | None = None) -> Config:
    """Build a config from nested mappings, as from Python. ``origin`` begins every message.

    Raises:
        UnsupportedConfiguration: a key or value is wrong.
    """
    source = origin or ""
    settings = Settings()
    settings.assign((), mapping, constant_origin(source))
    return _checked(settings, source)


def _checked(settings: Settings, source: str) -> Config:
    config = settings.build()
    check_config(config, settings.origins, source)
    return config


_ABSENT = object()


def dump_yaml(config: Config) -> str:
    """Write every key of the config as YAML; `load_config` of this text gives an equal config."""
    return dump(config.to_mapping())


def differences(a: Config, b: Config) -> list[str]:
    """One line per key whose value differs: "training.batch_size: 32 -> 64", in the order of the keys."""
    before, after = dict(flatten_mapping(a.to_mapping())), dict(flatten_mapping(b.to_mapping()))
    names = [*before, *(name for name in after if name not in before)]
    pairs = ((name, before.get(name, _ABSENT), after.get(name, _ABSENT)) for name in names)
    # By repr: 1, 1.0 and true are equal and yet not the same argument; nan is the same as nan.
    return [f"{name}: {_shown(old)} -> {_shown(new)}" for name, old, new in pairs if repr(old) != repr(new)]


def flatten_mapping(mapping: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a config as a mapping, by dotted name, with their values."""
    for name, value in mapping.items():
        dotted = dotted_name(prefix, format_value(name))
        if isinstance(value, dict) and (value or dotted in KEYS):
            yield from flatten_mapping(value, dotted)
        elif value is not None or dotted not in SECTIONS:
            yield dotted, value


def _shown(value: Any) -> str:
    return "(not given)" if value is _ABSENT else format_value(value)


def describe_keys() -> list[str]:
    """One line per key: name, default, what it accepts, what it is for."""
    lines = []
    for key in KEYS.values():
        default = "(required)" if key.required else format_value(key.default)
        only = NOT_IN_THIS_VERSION.get(key.name)
        limit = f" (in this version only {' or '.join(map(format_value, only))})" if only else ""
        lines.append(f"{key.name} = {default}  # {key.rule.wanted()}{limit}: {key.help}")
    return lines
