"""YAML text to plain values with line numbers, and the check of one value against the rule of its key.

`read_file` and `read_text` construct plain values only, never Python objects; `dump` is their inverse. `check_value`
converts a value to the type of its rule, or refuses it in one sentence.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml

from paramserver.config.schema import KIND_NAMES, KeyPath, Kind, Rule, closest_match, format_value, origin_prefix
from paramserver.errors import UnsupportedConfiguration

# Numbers that YAML 1.1 reads as text: 1e-3, 1E6, 2.5e4.
EXPONENT_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")


# Limits of a value, far above those of any config in use: messages, YAML and messages between ranks can hold it.
MAX_DEPTH = 50
_MAX_INT = 2**63 - 1
_MAX_INT_BITS = 2048
# How many values and characters aliases (*name) may add to a document: nine lines of them can stand for gigabytes.
_MAX_REPEATED = 100_000


class _BrokenRuleError(ValueError):
    """A value violates its rule: ``must`` states the rule; the cure is that of the rule unless one is given."""

    def __init__(self, must: str, cure: str | None = None) -> None:
        super().__init__(must)
        self.cure = cure


def check_value(name: str, rule: Rule, value: Any, origin: str = "") -> Any:
    """Return ``value`` converted to the type of its rule; mappings are copied.

    Raises:
        UnsupportedConfiguration: the value violates the rule; the message has origin, name, value, rule and cure.
    """
    if value is None and rule.nullable:
        return None
    try:
        converted = _CONVERTERS[rule.kind](value, rule)
        _check_bounds(converted, rule)
    except _BrokenRuleError as broken:
        cure = broken.cure or f"give {rule.describe()}"
        raise UnsupportedConfiguration(
            f"{origin_prefix(origin)}{name} ({format_value(value, 60)}) must {broken}; {cure}"
        ) from None
    return converted


def _check_bounds(value: Any, rule: Rule) -> None:
    if rule.minimum is not None and value < rule.minimum:
        raise _BrokenRuleError(f"be at least {format_value(rule.minimum)}")
    if rule.above is not None and value <= rule.above:
        raise _BrokenRuleError(f"be above {format_value(rule.above)}")
    if rule.maximum is not None and value > rule.maximum:
        raise _BrokenRuleError(f"be at most {format_value(rule.maximum)}")


def _to_int(value: Any, rule: Rule) -> int:
    value = _parse_exponent(value)
    # The abstract type also accepts numpy scalars. bool is a subclass of it and is excluded.
    whole = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole:
        raise _BrokenRuleError("be a whole number")
    if rule.maximum is None and value > _MAX_INT:
        raise _BrokenRuleError(f"be at most {_MAX_INT}")
    return int(value)


def _check_digits(value: int) -> int:
    # Python writes a longer number in hexadecimal only (sys.get_int_max_str_digits), so YAML could not hold it.
    if value.bit_length() > _MAX_INT_BITS:
        raise _BrokenRuleError("have at most 600 digits", "give a smaller number")
    return value


def _to_float(value: Any, rule: Rule) -> float:
    value = _parse_exponent(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _BrokenRuleError("be a number")
    try:
        converted = float(value)  # raises for an int that is too large
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted):
        raise _BrokenRuleError("be a finite number")
    return converted


def _parse_exponent(value: Any) -> Any:
    return float(value) if isinstance(value, str) and EXPONENT_NUMBER.fullmatch(value) else value


def _to_bool(value: Any, rule: Rule) -> bool:
    if not isinstance(value, bool):
        raise _BrokenRuleError("be true or false", "write it without quotes")
    return value


def _to_str(value: Any, rule: Rule) -> str:
    # YAML 1.1 reads the words on and off as booleans. Where one is a choice, the word is meant.
    if isinstance(value, bool) and (word := "on" if value else "off") in rule.choices:
        value = word
    if isinstance(value, PurePath):
        value = str(value)
    if rule.choices and value not in rule.choices:
        word = format_value(value)
        known = next((cure for pattern, cure in rule.cures if re.fullmatch(pattern, word, re.IGNORECASE)), None)
        closest = closest_match(word, rule.choices)
        likely = f"did you mean {closest}?" if closest else "choose one of them"
        raise _BrokenRuleError(f"be {rule.describe()}", known or likely)
    if not isinstance(value, str):
        name = getattr(value, "__name__", None)  # of a function or class that was given in Python
        raise _BrokenRuleError("be text", f"write path/to/file.py:{name}" if name else "put it in quotes")
    try:
        text: str = str(Path(value).expanduser()) if value.startswith("~/") else value
    except RuntimeError:  # such as in a container with any user id
        raise _BrokenRuleError("not begin with ~: this user has no home folder", "set HOME, or write it out") from None
    if not text.strip():
        raise _BrokenRuleError("not be empty")
    if rule.pattern and not re.fullmatch(rule.pattern, text):
        raise _BrokenRuleError(f"be {rule.form}", f"write it like {rule.example}")
    return text


def _to_list(value: Any, rule: Rule) -> tuple[str, ...]:
    """Return a tuple, which is hashable as a config must be."""
    items = () if value is None else value
    if not isinstance(items, (list, tuple)) or not all(
        isinstance(item, str) and re.fullmatch(rule.pattern, item) for item in items
    ):
        raise _BrokenRuleError(f"be {rule.form}", f"write it like {rule.example}")
    if len(set(items)) < len(items):
        raise _BrokenRuleError("name each once", "remove one of the two")
    return tuple(items)


def _to_mapping(value: Any, rule: Rule) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _BrokenRuleError(f"be {KIND_NAMES['mapping']}", "write lines like name: value below it")
    for name in value:
        if not isinstance(name, str):
            raise _BrokenRuleError(f"have names that are text, not {format_value(name, 40)}", "put the name in quotes")
    return {name: _copy_plain(item, (id(value),)) for name, item in value.items()}


def is_plain(value: Any) -> bool:
    """Return whether YAML can express a value: text, numbers, booleans, None, and lists and mappings of these."""
    try:
        _copy_plain(value, ())
    except _BrokenRuleError:
        return False
    return True


def _copy_plain(value: Any, inside: tuple[int, ...]) -> Any:
    """Copy a value in types that survive a round trip through YAML; a tuple becomes a list."""
    # Exact types: a subclass (an enum, a numpy scalar) would be read back as another type.
    if type(value) is int:
        return _check_digits(value)
    if value is None or type(value) in (bool, float, str):
        return value
    if id(value) in inside:
        raise _BrokenRuleError("not contain itself", "write the inner value out")
    if len(inside) > MAX_DEPTH:
        raise _BrokenRuleError(f"be nested at most {MAX_DEPTH} levels deep", "write it flatter")
    inside = (*inside, id(value))
    if isinstance(value, Mapping):
        return {_copy_plain(name, inside): _copy_plain(item, inside) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy_plain(item, inside) for item in value]
    raise _BrokenRuleError(
        f"hold plain values only, not {type(value).__name__}",
        "use text, numbers, true, false, null, lists and mappings",
    )


_CONVERTERS: dict[Kind, Callable[[Any, Rule], Any]] = {
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
    "str": _to_str,
    "list": _to_list,
    "mapping": _to_mapping,
}


_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")
_PLAIN_TAGS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}
# Unquoted 2024-01-01 and = are text here: no key is a date, and names of runs often look like one.
_NOT_RESOLVED = {f"{_TAG}timestamp", f"{_TAG}value"}
# What YAML 1.1 reads as octal and in base 60: 010 is not meant as 8, and 1:30 not as 90.
_NO_NUMBER = r"(?![-+]?(0[0-9_]|[0-9_]+:))"


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader`, except that 1e-3 is a number, and a date, 010 and 1:30 are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - defined by PyYAML
        first: [
            (tag, re.compile(_NO_NUMBER + pattern.pattern, pattern.flags) if tag in _NUMBERS else pattern)
            for tag, pattern in resolvers
            if tag not in _NOT_RESOLVED
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """Quotes strings that `_Loader`, or another reader of YAML 1.1, would not read as text."""

    # A value that is used twice is written twice: aliases are hard to read in a file that users edit.
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML folds these line breaks into a space unless they are escaped, which needs double quotes.
        style = '"' if any(character in data for character in "\x85\u2028\u2029") else None
        return self.represent_scalar(f"{_TAG}str", data, style=style)


_EXPONENT = re.compile(f"^(?:{EXPONENT_NUMBER.pattern})$")
_Dumper.add_representer(str, _Dumper.represent_str)
_Loader.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+.0123456789"))
_Dumper.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+.0123456789"))


@dataclass(frozen=True)
class Document:
    """Plain values, and the line (from 1) of each path of keys."""

    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)


def read_file(file: Path) -> Document:
    """Read the mapping in ``file``.

    Raises:
        UnsupportedConfiguration: the file is unreadable, not UTF-8, empty, malformed or not a mapping; a key is
            repeated; or there is a tag of other than plain YAML.
    """
    document = read_text(_read_utf8(file), str(file))
    if document.value is None:
        raise UnsupportedConfiguration(f"{file} is empty; give at least task: module:Class")
    if not isinstance(document.value, dict):
        raise UnsupportedConfiguration(
            f"{file} ({format_value(document.value, 40)}) must be a mapping of keys to values; "
            "write lines like mode: rpc"
        )
    return document


def _read_utf8(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UnsupportedConfiguration(f"{file} does not exist; give the path of a YAML file") from None
    except IsADirectoryError:
        raise UnsupportedConfiguration(f"{file} is a folder; give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise UnsupportedConfiguration(f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UnsupportedConfiguration(f"{file} cannot be read ({error}); give the path of a YAML file") from None


def read_text(text: str, name: str, *, numbered: bool = True) -> Document:
    """Read one YAML document. Messages have line numbers if ``numbered``: not for text on a command line."""
    try:
        loader = _Loader(text)
        try:
            return _Reader(loader, name, numbered).read()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = f":{text[: error.position].count(chr(10)) + 1}" if numbered else ""
        raise UnsupportedConfiguration(
            f"{name}{line}: not valid YAML: {error.reason} (at character {error.position}); remove it"
        ) from None
    except RecursionError:
        raise UnsupportedConfiguration(f"{name}: nested too deeply; a config has three levels") from None


def dump(value: Any) -> str:
    """Write plain values as YAML that `read_text` reads back unchanged."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read_dumped(text: str) -> Any:
    """Read what `dump` wrote. Not for text of users: the parser, libyaml where PyYAML has it, numbers no lines.

    It takes an eighth of the time of `read_text`.
    """
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class _Reader:
    """Converts the node tree of PyYAML to plain values and records the line of each key."""

    def __init__(self, loader: _Loader, name: str, numbered: bool) -> None:
        self._loader = loader
        self._name = name
        self._numbered = numbered
        self._lines: dict[KeyPath, int] = {}
        self._open: set[int] = set()
        self._converted: set[int] = set()
        self._repeated = 0

    def read(self) -> Document:
        try:
            node = self._loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            raise self._malformed(error) from None
        return Document(None if node is None else self._convert(node, ()), self._lines)

    def _malformed(self, error: yaml.MarkedYAMLError) -> UnsupportedConfiguration:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part).replace("\n", " ")
        line = mark.line + 1 if mark else None
        place = "this line or the one above it" if self._numbered else "the value, or put it in quotes"
        return self._error(line, f"not valid YAML: {problem}; correct {place}")

    def _error(self, line: int | None, message: str) -> UnsupportedConfiguration:
        origin = f"{self._name}:{line}" if self._numbered and line else self._name
        return UnsupportedConfiguration(origin_prefix(origin) + message)

    def _convert(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        if node.tag not in _PLAIN_TAGS:
            tag = node.tag.replace(_TAG, "!!")
            raise self._error(line, f"the tag {tag} is not for a config; use plain text, numbers, lists and mappings")
        # Aliases make the nodes a graph. A cycle in it is an error: it would be an infinite value.
        if id(node) in self._open:
            raise self._error(line, "a value contains itself through an alias (*name); write it out")
        self._count(node, line)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [self._convert(child, (*path, i)) for i, child in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _count(self, node: yaml.Node, line: int) -> None:
        """Refuse a document that is much larger with its aliases written out. Call it before each conversion."""
        if len(self._open) > MAX_DEPTH:
            raise self._error(line, f"nested more than {MAX_DEPTH} levels deep; a config has three levels")
        if id(node) in self._converted:
            self._repeated += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
            if self._repeated > _MAX_REPEATED:
                message = f"aliases (*name) must add at most {_MAX_REPEATED:,} values and characters; use fewer of them"
                raise self._error(line, message)
        self._converted.add(id(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return self._loader.construct_object(node)
        # With an explicit tag PyYAML does not wrap errors of its conversions: !!int x, !!bool x, !!float "".
        # OverflowError: 1:1:1:...:1.5, a number to base 60.
        except (yaml.YAMLError, ValueError, KeyError, IndexError, OverflowError):
            kind = node.tag.replace(_TAG, "")
            message = f"{format_value(node.value, 40)} cannot be read as {kind}; correct it, or put it in quotes"
            raise self._error(node.start_mark.line + 1, message) from None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        # Merged keys (<<) first, so that keys of the mapping itself overwrite their line numbers.
        for key_node, value_node in sorted(node.value, key=lambda pair: bool(pair[0].tag != _MERGE)):
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                merged = {**self._merged(value_node, path), **merged}
                continue
            key = self._convert(key_node, ())
            if not isinstance(key, Hashable):
                raise self._error(line, f"a key ({format_value(key, 40)}) must be text; write lines like mode: rpc")
            here = (*path, key)
            if key in own:
                first = self._lines[here]
                raise self._error(
                    line, f"{format_value(key)} is given twice, first in line {first}; remove one of the two"
                )
            self._lines[here] = line
            own[key] = self._convert(value_node, here)
        return {**merged, **own}

    def _merged(self, node: yaml.Node, path: KeyPath) -> dict[Any, Any]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[Any, Any] = {}
        for child in reversed(nodes):
            value = self._convert(child, path)
            if not isinstance(value, dict):
                raise self._error(
                    child.start_mark.line + 1, "<< must name a mapping; write <<: *name of an &name above"
                )
            merged.update(value)
        return merged
