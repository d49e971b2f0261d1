"""Values collected from a file, ``--set`` and flags, the later over the earlier, each with the place it came from.

The keys by their dotted names, read off the dataclasses of `schema`.

What the command line changes: ``--set section.key=value`` and the flags that stand for a key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paramserver.config.parsing import check_value, read_text
from paramserver.config.schema import REQUIRED, Config, KeyPath, Rule, closest_match, format_value, origin_prefix
from paramserver.errors import UnsupportedConfiguration


@dataclass(frozen=True)
class Key:
    """One key, such as ``training.batch_size``. The default of a required key is None."""

    name: str
    rule: Rule
    default: Any
    required: bool
    help: str

    @property
    def is_free(self) -> bool:
        """A dictionary whose names are the user's."""
        return self.rule.kind == "mapping"


@dataclass(frozen=True)
class Section:
    name: str
    nullable: bool
    help: str


def dotted_name(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _entries(kind: type, prefix: str = "") -> Iterator[Key | Section]:
    for field in dataclasses.fields(kind):
        name, metadata = dotted_name(prefix, field.name), field.metadata
        if "section" in metadata:
            yield Section(name, metadata["nullable"], metadata["help"])
            yield from _entries(metadata["section"], name)
        else:
            yield Key(name, metadata["rule"], _default(field), _required(field), metadata["help"])


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if _required(field) else field.default


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is REQUIRED and field.default_factory is REQUIRED


_ENTRIES = tuple(_entries(Config))

KEYS: dict[str, Key] = {entry.name: entry for entry in _ENTRIES if isinstance(entry, Key)}
SECTIONS: dict[str, Section] = {entry.name: entry for entry in _ENTRIES if isinstance(entry, Section)}


def free_key(path: tuple[str, ...]) -> Key | None:
    """Find the free dictionary that ``path`` points into, such as ``task_args`` for ``task_args.model.width``."""
    names = (".".join(path[:length]) for length in range(1, len(path)))
    return next((KEYS[name] for name in names if name in KEYS and KEYS[name].is_free), None)


def child_names(prefix: str) -> list[str]:
    """List the last names of the keys and sections right below a section ("" = the top level)."""
    names = [*KEYS, *SECTIONS]
    return [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == prefix]


def unknown_key_message(name: str) -> str:
    """Say why ``name`` is refused, with the key that was probably meant."""
    parent, _, leaf = name.rpartition(".")
    if parent in KEYS:
        return f"{name} is not a key: {parent} is a single value; write {parent}: <value>"
    # A right key in the wrong section, if there is only one it can belong to.
    namesakes = [known for known in (*KEYS, *SECTIONS) if "." in known and known.rpartition(".")[2] == leaf]
    if len(namesakes) == 1:
        return f"{name} is not a key: {leaf} belongs to {namesakes[0].rpartition('.')[0]}; write {namesakes[0]}"
    meant = _closest_key(name)
    if meant:
        return f"{name} is not a key; did you mean {meant}?"
    where = parent if parent in SECTIONS else ""
    return f"{name} is not a key; the keys of {where or 'a config'} are {', '.join(child_names(where))}"


def _closest_key(name: str) -> str | None:
    """Find the nearest name in the same section, else the nearest of all, by whole or by last names."""
    parent, _, leaf = name.rpartition(".")
    everything = [*SECTIONS, *KEYS]
    # A misspelt section: the last name alone could belong to another one (kind, server, mode).
    if parent and parent not in SECTIONS:
        return closest_match(name, everything)
    if near := closest_match(leaf, child_names(parent)):
        return dotted_name(parent, near)
    lasts = {known.rpartition(".")[2]: known for known in everything}
    near = closest_match(leaf, list(lasts))
    return lasts[near] if near else None


OriginOf = Callable[[KeyPath], str]


def constant_origin(origin: str) -> OriginOf:
    """Give the same origin for every path: an option has no lines."""
    return lambda _: origin


class Settings:
    """Checked values by dotted key; what was never given keeps its default.

    ``origins`` holds, in the order of assignment, where each key was given last.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def assign(self, path: KeyPath, value: Any, where: OriginOf) -> None:
        """Set a key, every key of a section (a mapping), or a name inside a free dictionary.

        Args:
            path: names from the top; () is the whole config.
            value: as read from YAML or given from Python.
            where: the origin that a message about a path begins with.

        Raises:
            UnsupportedConfiguration: not a key, or the value breaks the rule of its key.
        """
        name = self._name(path, where)
        if not path or name in SECTIONS:
            self._assign_section(path, value, where)
        elif name in KEYS:
            self._store(name, check_value(name, KEYS[name].rule, value, where(path)), where(path))
        elif free := free_key(path):
            self._assign_inside(free, path, value, where(path))
        else:
            raise UnsupportedConfiguration(origin_prefix(where(path)) + unknown_key_message(name))

    def _name(self, path: KeyPath, where: OriginOf) -> str:
        if path and not isinstance(path[-1], str):
            raise UnsupportedConfiguration(
                f"{origin_prefix(where(path))}{unknown_key_message('.'.join(map(format_value, path)))}"
            )
        name = ".".join(path)
        parent = ".".join(path[:-1])
        if path and "." in path[-1] and (not parent or parent in SECTIONS):
            section, _, leaf = name.rpartition(".")
            raise UnsupportedConfiguration(
                f"{origin_prefix(where(path))}{name} must be written as a section: {section} on a line of its own, {leaf} below it"
            )
        return name

    def _assign_section(self, path: KeyPath, value: Any, where: OriginOf) -> None:
        name = ".".join(path)
        nullable = name in SECTIONS and SECTIONS[name].nullable
        if nullable:  # It is one value: given as a whole, it leaves nothing of what was given before.
            self._forget(name)
            self._mark(name, where(path))
        # A section whose keys are all commented out reads as null.
        if value is None:
            return
        if not isinstance(value, Mapping) or (nullable and not value):
            example = child_names(name)[0]
            raise UnsupportedConfiguration(
                f"{origin_prefix(where(path))}{name or 'the config'} ({format_value(value, 60)}) must be a section of keys; "
                f"write {dotted_name(name, example)} and the like"
            )
        for leaf, item in value.items():
            self.assign((*path, leaf), item, where)

    def _assign_inside(self, free: Key, path: KeyPath, value: Any, origin: str) -> None:
        """``task_args.model.width = 3``: the names after the free dictionary are the user's."""
        # Checking copies, so what an earlier source gave (a stored config) is not changed through this.
        whole = check_value(free.name, free.rule, self.values.get(free.name, free.default) or {}, origin)
        inner, depth = whole, free.name.count(".") + 1
        for length in range(depth, len(path) - 1):
            inner = inner.setdefault(path[length], {})
            if not isinstance(inner, dict):
                raise UnsupportedConfiguration(
                    f"{origin_prefix(origin)}{'.'.join(path[: length + 1])} ({format_value(inner, 60)}) must be a mapping to hold "
                    f"{'.'.join(path[length + 1 :])}; set it as a whole"
                )
        inner[path[-1]] = value
        self._store(free.name, check_value(free.name, free.rule, whole, origin), origin)

    def _store(self, name: str, value: Any, origin: str) -> None:
        self.values[name] = value
        self._mark(name, origin)

    def _mark(self, name: str, origin: str) -> None:
        # Deleted first, for a dict keeps the place of a key that it holds: the latest must come last.
        self.origins.pop(name, None)
        self.origins[name] = origin

    def _forget(self, section: str) -> None:
        for name in [name for name in self.values if name.startswith(f"{section}.")]:
            del self.values[name]
            del self.origins[name]

    def build(self) -> Config:
        """Make the config of these values; relations between keys are not checked here."""
        config: Config = self._construct(Config, "")
        return config

    def _construct(self, kind: type, prefix: str) -> Any:
        arguments: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
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
    """Assign each ``key=value``, in order; the value is YAML: 64, or {metric: accuracy, mode: max}.

    Raises:
        UnsupportedConfiguration: no "=", no key, malformed YAML, or what `Settings.assign` refuses.
    """
    for override in overrides:
        origin = f"--set {override}"
        path, value = _parse(override, origin)
        settings.assign(path, value, constant_origin(origin))


def _parse(override: str, origin: str) -> tuple[tuple[str, ...], Any]:
    # The first "=" ends the key; a value may hold more of them.
    name, equals, text = override.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise UnsupportedConfiguration(f"{origin}: must be key=value; write for example --set training.batch_size=64")
    return path, read_text(text, origin, numbered=False).value


def apply_flags(settings: Settings, flags: Mapping[str, Any]) -> None:
    """Assign values by dotted key; None means that the flag was not given. The flag of a key has its last name."""
    for name, value in flags.items():
        if value is not None:
            settings.assign(tuple(name.split(".")), value, constant_origin(f"--{name.rpartition('.')[2]}"))
