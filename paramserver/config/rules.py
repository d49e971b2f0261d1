"""What the value of a config key must be: one `Rule` per key, for checks, listing and documentation alike."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["int", "float", "bool", "str", "mapping"]

# The names from the top to a key; those of free dictionaries need not be text until they are checked.
KeyPath = tuple[Any, ...]

NOUNS: dict[Kind, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "mapping": "a mapping of names to values",
}


@dataclass(frozen=True)
class Rule:
    """The values that a key accepts.

    Args:
        kind: the type. A bool is no number; a whole number is a float as well, and 1e6 is a whole number.
        nullable: null is accepted.
        choices: the words that a text may be; empty = any.
        minimum, maximum: bounds of a number, included.
        above: bound of a number, excluded.
        pattern: a regular expression that the whole text matches, said in words by `form` and shown by `example`.
    """

    kind: Kind
    nullable: bool = False
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    pattern: str = ""
    form: str = ""
    example: str = ""

    def wanted(self) -> str:
        """Say the rule in a few words: "a positive whole number, or null"."""
        return self._wanted() + (", or null" if self.nullable else "")

    def _wanted(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.minimum is not None and self.maximum is not None:
            return f"{NOUNS[self.kind]} from {show(self.minimum)} to {show(self.maximum)}"
        if self.minimum == 1 or self.above == 0:
            return NOUNS[self.kind].replace("a ", "a positive ")
        if self.minimum == 0:
            return NOUNS[self.kind].replace("a ", "0 or a positive ")
        return self.form or NOUNS[self.kind]


def whole(minimum: int, maximum: int | None = None, *, nullable: bool = False) -> Rule:
    return Rule("int", nullable=nullable, minimum=minimum, maximum=maximum)


def positive(*, nullable: bool = False) -> Rule:
    return Rule("float", nullable=nullable, above=0)


def switch() -> Rule:
    return Rule("bool")


def choice(*words: str) -> Rule:
    return Rule("str", choices=words)


def text(pattern: str = "", form: str = "", example: str = "", *, nullable: bool = False) -> Rule:
    return Rule("str", nullable=nullable, pattern=pattern, form=form, example=example)


def mapping(*, nullable: bool = False) -> Rule:
    return Rule("mapping", nullable=nullable)


REQUIRED: Any = dataclasses.MISSING


def key(default: Any, rule: Rule, help: str) -> Any:
    """Make a dataclass field that is a config key; a ``default`` of ``REQUIRED`` means none."""
    metadata = {"rule": rule, "help": help}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata, hash=False)
    return dataclasses.field(default=default, metadata=metadata)


def section(kind: type, help: str, *, nullable: bool = False) -> Any:
    """Make a dataclass field that is a section of keys; a nullable one is null until one of its keys is given."""
    metadata = {"section": kind, "nullable": nullable, "help": help}
    if nullable:
        return dataclasses.field(default=None, metadata=metadata)
    return dataclasses.field(default_factory=kind, metadata=metadata)


def show(value: Any, limit: int | None = None, depth: int = 4) -> str:
    """Write a value as YAML would, on one line, cut after ``limit`` characters."""
    if value is None or isinstance(value, bool):
        line = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, str):
        line = value if value and value.isprintable() and value == value.strip() else repr(value)
    elif isinstance(value, (Mapping, list, tuple)):
        line = _show_nested(value, depth)
    else:
        line = str(value)
    return line if limit is None or len(line) <= limit else line[: limit - 3] + "..."


def _show_nested(value: Any, depth: int) -> str:
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{show(k)}: {show(v, depth=depth - 1)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(show(v, depth=depth - 1) for v in value) + "]"


def nearest(word: str, known: Sequence[str]) -> str | None:
    """Find the known word that ``word`` was probably meant to be."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.6)), None)


def at(origin: str) -> str:
    """Begin a message with the place where the value was given."""
    return f"{origin}: " if origin else ""
