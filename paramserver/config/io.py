"""Load a checked `Config` from a file, a mapping and the command line; write it, compare two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paramserver.config.checks import check_config
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
from paramserver.config.schema import Config, KeyPath, format_value


def load_config(
    file: Path | None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
    stored: bool = False,
    given: Mapping[str, Any] | None = None,
) -> Config:
    """Load the effective config. A flag overrides ``--set``, which overrides the file, which overrides the default.

    Args:
        flags: values by dotted key; None for a flag that was not given.
        base: a stored config (``Config.to_mapping()``) instead of the file, when a run is resumed.
        stored: the file is that of a run that is resumed, see ``without_old_defaults``.
        given: the entries of ``base`` that this start was given; None = all of it is stored.

    Raises:
        UnsupportedConfiguration: an unknown key, a value that violates its rule, or values that contradict each other.
            The message begins with file and line, or with the option.
        ValueError: both ``file`` and ``base`` are given.
    """
    if file is not None and base is not None:
        raise ValueError(f"file ({file}) and base must not be given together; a stored config stands in for the file")
    settings, source = Settings(), ""
    if file is not None:
        source = str(file)
        document = read_file(Path(file))
        value = without_old_defaults(document.value) if stored else document.value
        settings.assign((), value, lambda path: f"{source}:{document.lines.get(path, 1)}")
    elif base is not None:
        source = "the stored config" if given is None else "the given config"
        settings.assign((), base, lambda path: source if given and _holds(given, path) else "the stored config")
    apply_overrides(settings, overrides)
    apply_flags(settings, flags or {})
    return _checked(settings, source)


def without_old_defaults(stored: Any) -> Any:
    """Return what the ``config.yaml`` of a run holds, without defaults of an earlier version.

    ``server.wire_dtype`` was float32 by default, which rounds float64.
    """
    server = stored.get("server") if isinstance(stored, Mapping) else None
    if not isinstance(server, Mapping) or server.get("wire_dtype") != "float32":
        return stored
    return {**stored, "server": {name: value for name, value in server.items() if name != "wire_dtype"}}


def _holds(mapping: Mapping[str, Any], path: KeyPath) -> bool:
    """Return whether a nested mapping has an entry at ``path``."""
    held: Any = mapping
    for name in path:
        if not isinstance(held, Mapping) or name not in held:
            return False
        held = held[name]
    return bool(path)


def config_from_mapping(mapping: Mapping[str, Any]) -> Config:
    """Build a checked config from nested mappings. Use it to configure a run from Python.

    Raises:
        UnsupportedConfiguration: an unknown key, a value that violates its rule, or values that contradict each other.
    """
    settings = Settings()
    settings.assign((), mapping, constant_origin(""))
    return _checked(settings, "")


def _checked(settings: Settings, source: str) -> Config:
    config = settings.build()
    check_config(config, settings.origins, source)
    return config


_ABSENT = object()


def dump_yaml(config: Config) -> str:
    """Return the config as YAML; `load_config` of this text gives an equal config.

    It has every key, except for those of `LOADER_KEYS` that were not given: a DataLoader of the task replaces them.
    """
    return dump(config.given_mapping())


def differences(a: Config, b: Config) -> list[str]:
    """Return one line per key whose value differs, in the order of the keys."""
    before, after = dict(flatten_mapping(a.to_mapping())), dict(flatten_mapping(b.to_mapping()))
    names = [*before, *(name for name in after if name not in before)]
    pairs = ((name, before.get(name, _ABSENT), after.get(name, _ABSENT)) for name in names)
    # By repr: 1, 1.0 and true are equal but are different arguments, and nan is the same value as nan.
    return [
        f"{name}: {_format_or_absent(old)} -> {_format_or_absent(new)}"
        for name, old, new in pairs
        if repr(old) != repr(new)
    ]


def flatten_mapping(mapping: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the keys of a config mapping with their values, by dotted name."""
    for name, value in mapping.items():
        dotted = dotted_name(prefix, format_value(name))
        if isinstance(value, dict) and (value or dotted in KEYS):
            yield from flatten_mapping(value, dotted)
        elif value is not None or dotted not in SECTIONS:
            yield dotted, value


def _format_or_absent(value: Any) -> str:
    return "(not given)" if value is _ABSENT else format_value(value)
