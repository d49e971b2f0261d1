"""The keys by their dotted names, read off the dataclasses of `schema`."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paramserver.config.rules import REQUIRED, Rule, nearest
from paramserver.config.schema import Config


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


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _entries(kind: type, prefix: str = "") -> Iterator[Key | Section]:
    for field in dataclasses.fields(kind):
        name, metadata = join(prefix, field.name), field.metadata
        if "section" in metadata:
            yield Section(name, metadata["nullable"], metadata["help"])
            yield from _entries(metadata["section"], name)
        else:
            yield Key(name, metadata["rule"], _default(field), _required(field), metadata["help"])


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if _required(field) else field.default


def _required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is REQUIRED and field.default_factory is REQUIRED


_ENTRIES = tuple(_entries(Config))

KEYS: dict[str, Key] = {entry.name: entry for entry in _ENTRIES if isinstance(entry, Key)}
SECTIONS: dict[str, Section] = {entry.name: entry for entry in _ENTRIES if isinstance(entry, Section)}


def free_key(path: tuple[str, ...]) -> Key | None:
    """Find the free dictionary that ``path`` points into, such as ``task_args`` for ``task_args.model.width``."""
    names = (".".join(path[:length]) for length in range(1, len(path)))
    return next((KEYS[name] for name in names if name in KEYS and KEYS[name].is_free), None)


def members(prefix: str) -> list[str]:
    """List the last names of the keys and sections right below a section ("" = the top level)."""
    names = [*KEYS, *SECTIONS]
    return [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == prefix]


def unknown_key(name: str) -> str:
    """Say why ``name`` is refused, with the key that was probably meant."""
    parent, _, leaf = name.rpartition(".")
    if parent in KEYS:
        return f"{name} is not a key: {parent} is a single value; write {parent}: <value>"
    # A right key in the wrong section, if there is only one it can belong to.
    namesakes = [known for known in (*KEYS, *SECTIONS) if "." in known and known.rpartition(".")[2] == leaf]
    if len(namesakes) == 1:
        return f"{name} is not a key: {leaf} belongs to {namesakes[0].rpartition('.')[0]}; write {namesakes[0]}"
    meant = _meant(name)
    if meant:
        return f"{name} is not a key; did you mean {meant}?"
    where = parent if parent in SECTIONS else ""
    return f"{name} is not a key; the keys of {where or 'a config'} are {', '.join(members(where))}"


def _meant(name: str) -> str | None:
    """Find the nearest name in the same section, else the nearest of all, by whole or by last names."""
    parent, _, leaf = name.rpartition(".")
    everything = [*SECTIONS, *KEYS]
    # A misspelt section: the last name alone could belong to another one (kind, server, mode).
    if parent and parent not in SECTIONS:
        return nearest(name, everything)
    if near := nearest(leaf, members(parent)):
        return join(parent, near)
    lasts = {known.rpartition(".")[2]: known for known in everything}
    near = nearest(leaf, list(lasts))
    return lasts[near] if near else None
