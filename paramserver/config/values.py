"""One value against its rule: accepted and converted, or refused in one sentence."""

import math
import numbers
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from paramserver.config.rules import NOUNS, Kind, Rule, at, nearest, show
from paramserver.errors import UnsupportedConfiguration

# What YAML 1.1 takes for text although everybody means a number: 1e-3, 1E6, 2.5e4.
EXPONENT_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")


class _BrokenRuleError(ValueError):
    """A value breaks its rule; the text is what it must be. The cure is the rule's own unless one is given."""

    def __init__(self, must: str, cure: str | None = None) -> None:
        super().__init__(must)
        self.cure = cure


def check_value(name: str, rule: Rule, value: Any, origin: str = "") -> Any:
    """Return ``value`` in the type of its rule.

    Raises:
        UnsupportedConfiguration: origin, name, value, rule and cure in one sentence.
    """
    if value is None and rule.nullable:
        return None
    try:
        converted = _CONVERTERS[rule.kind](value, rule)
        _check_bounds(converted, rule)
    except _BrokenRuleError as broken:
        cure = broken.cure or f"give {rule.wanted()}"
        raise UnsupportedConfiguration(f"{at(origin)}{name} ({show(value, 60)}) must {broken}; {cure}") from None
    return converted


def _check_bounds(value: Any, rule: Rule) -> None:
    if rule.minimum is not None and value < rule.minimum:
        raise _BrokenRuleError(f"be at least {show(rule.minimum)}")
    if rule.above is not None and value <= rule.above:
        raise _BrokenRuleError(f"be above {show(rule.above)}")
    if rule.maximum is not None and value > rule.maximum:
        raise _BrokenRuleError(f"be at most {show(rule.maximum)}")


def _whole(value: Any, rule: Rule) -> int:
    value = _meant(value)
    # The abstract types, so that scalars of numpy from a script are welcome; bool is one of them and is not.
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise _BrokenRuleError("be a whole number")


def _number(value: Any, rule: Rule) -> float:
    value = _meant(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _BrokenRuleError("be a number")
    try:
        converted = float(value)  # a whole number may be too large for it
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted):
        raise _BrokenRuleError("be a finite number")
    return converted


def _meant(value: Any) -> Any:
    return float(value) if isinstance(value, str) and EXPONENT_NUMBER.fullmatch(value) else value


def _switch(value: Any, rule: Rule) -> bool:
    if not isinstance(value, bool):
        raise _BrokenRuleError("be true or false", "write it without quotes")
    return value


def _text(value: Any, rule: Rule) -> str:
    # YAML 1.1 reads the words on and off as booleans; where they are choices, the words were meant.
    if isinstance(value, bool) and {"on", "off"} <= set(rule.choices):
        value = "on" if value else "off"
    if isinstance(value, PurePath):
        value = str(value)
    if rule.choices and value not in rule.choices:
        meant = nearest(show(value), rule.choices)
        raise _BrokenRuleError(
            f"be one of {', '.join(rule.choices)}", f"did you mean {meant}?" if meant else "choose one of them"
        )
    if not isinstance(value, str):
        raise _BrokenRuleError("be text", "put it in quotes")
    if not value.strip():
        raise _BrokenRuleError("not be empty")
    if rule.pattern and not re.fullmatch(rule.pattern, value):
        raise _BrokenRuleError(f"be {rule.form}", f"write it like {rule.example}")
    return value


def _mapping(value: Any, rule: Rule) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _BrokenRuleError(f"be {NOUNS['mapping']}", "write lines like name: value below it")
    for name in value:
        if not isinstance(name, str):
            raise _BrokenRuleError(f"have names that are text, not {show(name, 40)}", "put the name in quotes")
    return {name: _plain(item, (id(value),)) for name, item in value.items()}


def _plain(value: Any, inside: tuple[int, ...]) -> Any:
    """Copy a value in types that YAML can store and give back; a tuple becomes a list."""
    # The exact types: a subclass (an enum, a scalar of numpy) would come back from a file as something else.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if id(value) in inside:
        raise _BrokenRuleError("not contain itself", "write the inner value out")
    inside = (*inside, id(value))
    if isinstance(value, Mapping):
        return {_plain(name, inside): _plain(item, inside) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, inside) for item in value]
    raise _BrokenRuleError(
        f"hold plain values only, not {type(value).__name__}",
        "use text, numbers, true, false, null, lists and mappings",
    )


_CONVERTERS: dict[Kind, Callable[[Any, Rule], Any]] = {
    "int": _whole,
    "float": _number,
    "bool": _switch,
    "str": _text,
    "mapping": _mapping,
}
