"""Numbers, intervals and lists as text for people."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from paramserver.tools.report.statistics import Estimate

DASH = "-"
_MOST_LETTERS = 300


def format_number(value: float | None, digits: int = 3) -> str:
    """A number with ``digits`` significant digits, and all digits before the point; a dash for an unknown one."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    before = math.floor(math.log10(abs(value))) + 1
    if before > 12 or before < -4:
        return f"{value:.{digits - 1}e}"
    text = f"{value:.{max(digits - before, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text and float(value).is_integer() else text


def format_interval(estimate: Estimate | None, scale: float = 1.0, digits: int = 3) -> str:
    """The interval, "5100 to 5300"; a dash where there is none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return DASH
    return f"{format_number(estimate.low * scale, digits)} to {format_number(estimate.high * scale, digits)}"


def format_estimate(estimate: Estimate | None, scale: float = 1.0, digits: int = 3, unit: str = "") -> str:
    """The value and, in brackets, its interval: "5200 (5100 to 5300)"."""
    if estimate is None:
        return DASH
    text = f"{format_number(estimate.value * scale, digits)}{unit}"
    return f"{text} ({format_interval(estimate, scale, digits)})" if estimate.has_interval else text


def format_percent(estimate: Estimate | None) -> str:
    """A share, "89 % (86 to 92)"."""
    return format_estimate(estimate, 100, 2, " %")


def aligned(rows: Sequence[Sequence[str]], numbers: Collection[int]) -> list[str]:
    """The lines of a table of text; columns with ``numbers`` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if number in numbers else "<" for number in range(len(widths))]
    lines = ["  ".join(f"{text:{s}{w}}" for text, s, w in zip(row, sides, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


def quoted(name: str) -> str:
    """A name in backquotes, which mark it in a sentence; backquotes in it become quotes."""
    return f"`{name.replace('`', chr(39))}`"


def capitalize_first(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def too_few(repeats: int) -> str:
    """The subject of a sentence about repeats that have no interval: "two repeats are too few"."""
    return "two repeats are too few" if repeats > 1 else "one repeat is too few"


def join_names(names: Sequence[str], most: int = 6) -> str:
    """The names in a sentence, "a, b and c", or "a, b and 3 more" where there are more than ``most``."""
    shown = list(names) if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    return "".join(shown) if len(shown) < 2 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def first_line(text: str | None) -> str:
    """The first line of an error, cut at ``_MOST_LETTERS``."""
    line = (text or "").strip().split("\n")[0]
    return line if len(line) <= _MOST_LETTERS else f"{line[: _MOST_LETTERS - 3]}..."


def scenario_text(scenario: Mapping[str, Any]) -> str:
    """A scenario in words, "trainer 1 slowed 5 times"; empty for none."""
    return ", ".join(_slow(what) if name == "slow" else f"{name} {_plain(what)}" for name, what in scenario.items())


def _slow(what: Any) -> str:
    if isinstance(what, list):
        return " and ".join(_slow(one) for one in what)
    if not isinstance(what, Mapping):
        return f"slow {_plain(what)}"
    probability = what.get("probability", 1.0)
    chance = "" if probability in (1, None) else f" with probability {probability}"
    factor = what.get("factor", "?")
    factor = format_number(factor) if isinstance(factor, int | float) else factor
    return f"trainer {what.get('trainer', '?')} slowed {factor} times{chance}"


def _plain(what: Any) -> str:
    return " ".join(f"{k} {v}" for k, v in what.items()) if isinstance(what, Mapping) else str(what)
