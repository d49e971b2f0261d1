"""Values collected from a file, ``--set`` and flags, the later over the earlier, each with the place it came from."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from paramserver.config.rules import KeyPath, at, show
from paramserver.config.schema import Config
from paramserver.config.table import KEYS, SECTIONS, Key, free_key, join, members, unknown_key
from paramserver.config.values import check_value
from paramserver.errors import UnsupportedConfiguration

Where = Callable[[KeyPath], str]


def everywhere(origin: str) -> Where:
    """Give the same origin for every path: an option has no lines."""
    return lambda _: origin


class Settings:
    """Checked values by dotted key; what was never given keeps its default.

    ``origins`` holds, in the order of assignment, where each key was given last.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def assign(self, path: KeyPath, value: Any, where: Where) -> None:
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
            raise UnsupportedConfiguration(at(where(path)) + unknown_key(name))

    def _name(self, path: KeyPath, where: Where) -> str:
        if path and not isinstance(path[-1], str):
            raise UnsupportedConfiguration(f"{at(where(path))}{unknown_key('.'.join(map(show, path)))}")
        name = ".".join(path)
        parent = ".".join(path[:-1])
        if path and "." in path[-1] and (not parent or parent in SECTIONS):
            section, _, leaf = name.rpartition(".")
            raise UnsupportedConfiguration(
                f"{at(where(path))}{name} must be written as a section: {section} on a line of its own, {leaf} below it"
            )
        return name

    def _assign_section(self, path: KeyPath, value: Any, where: Where) -> None:
        name = ".".join(path)
        nullable = name in SECTIONS and SECTIONS[name].nullable
        if nullable:  # It is one value: given as a whole, it leaves nothing of what was given before.
            self._forget(name)
            self._mark(name, where(path))
        # A section whose keys are all commented out reads as null.
        if value is None:
            return
        if not isinstance(value, Mapping) or (nullable and not value):
            example = members(name)[0]
            raise UnsupportedConfiguration(
                f"{at(where(path))}{name or 'the config'} ({show(value, 60)}) must be a section of keys; "
                f"write {join(name, example)} and the like"
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
                    f"{at(origin)}{'.'.join(path[: length + 1])} ({show(inner, 60)}) must be a mapping to hold "
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
            name = join(prefix, field.name)
            if name in SECTIONS:
                if not SECTIONS[name].nullable or any(given.startswith(f"{name}.") for given in self.values):
                    arguments[field.name] = self._construct(field.metadata["section"], name)
            elif name in self.values:
                arguments[field.name] = self.values[name]
            elif KEYS[name].required:
                origin = next((o for given, o in self.origins.items() if given.startswith(f"{prefix}.")), "")
                raise UnsupportedConfiguration(f"{at(origin)}{name} is missing; give {KEYS[name].help}")
        return kind(**arguments)
