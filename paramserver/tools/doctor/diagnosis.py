"""What ``paramserver doctor`` found: problems with their cures, and facts by subject; as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.report.formatting import plural

WIDTH = 80
_NAMES = 18  # columns of the names of facts


@dataclass(frozen=True)
class Finding:
    """Something to mend, or with ``is_problem`` False something to know.

    ``text`` is what is wrong, without a period at the end, and ``cure`` what to do. With several hosts, ``host`` is
    where. A problem: a run would fail, or not do what was asked for.
    """

    text: str
    cure: str
    host: str = ""
    is_problem: bool = True


@dataclass(frozen=True)
class Fact:
    """One line of a subject.

    ``text`` is for people, ``value`` for programs (None = the text). A choice has a reason, ``why``. ``key`` is that of
    the value in JSON; empty = the name.
    """

    name: str
    text: str
    value: Any = None
    why: str = ""
    key: str = ""


@dataclass
class Subject:
    """Facts of one subject."""

    title: str
    facts: list[Fact] = field(default_factory=list)

    def add(self, name: str, text: str, value: Any = None, why: str = "", key: str = "") -> None:
        self.facts.append(Fact(name, text, value, why, key))


@dataclass
class Diagnosis:
    """Findings, and facts by subject."""

    findings: list[Finding] = field(default_factory=list)
    subjects: list[Subject] = field(default_factory=list)

    def problem(self, text: str, cure: str) -> None:
        """Add something that has to be mended."""
        self.findings.append(Finding(text, cure))

    def refusal(self, error: UnsupportedConfiguration) -> None:
        """Add what a run would be refused for: a message of the form "name (value) must rule; cure"."""
        text, separator, cure = str(error).rpartition("; ")
        self.problem(text if separator else cure, cure if separator else "correct it")

    def note(self, text: str, cure: str) -> None:
        """Add something that works and could be better."""
        self.findings.append(Finding(text, cure, is_problem=False))

    @property
    def problems(self) -> list[Finding]:
        return [one for one in self.findings if one.is_problem]

    @property
    def exit_code(self) -> int:
        return int(bool(self.problems))

    def to_json(self) -> dict[str, Any]:
        def listed(findings: Iterable[Finding]) -> list[dict[str, str]]:
            return [{"text": one.text, "cure": one.cure, "host": one.host} for one in findings]

        return {
            "problems": listed(self.problems),
            "notes": listed(one for one in self.findings if not one.is_problem),
            **{
                subject.title: {fact.key or fact.name: _plain(fact) for fact in subject.facts}
                for subject in self.subjects
            },
            "exit_code": self.exit_code,
        }

    def to_text(self) -> str:
        """Return the text for a terminal of 80 columns."""
        problems, notes = self.problems, [one for one in self.findings if not one.is_problem]
        counts = [plural(len(found), word) for found, word in ((problems, "problem"), (notes, "note")) if found]
        lines = [f"paramserver doctor: {', '.join(counts) or 'no problems'}"]
        for one in (*problems, *notes):
            kind, place = "problem" if one.is_problem else "note", f"{one.host}: " if one.host else ""
            lines += ["", *_wrap(f"{kind:>9}: ", place + one.text), *_wrap(f"{'cure':>9}: ", one.cure)]
        for subject in self.subjects:
            lines += ["", subject.title, *(line for fact in subject.facts for line in _fact_lines(fact))]
        return "\n".join(lines)


def _plain(fact: Fact) -> Any:
    value = fact.text if fact.value is None else fact.value
    return {"value": value, "why": fact.why} if fact.why else value


def _fact_lines(fact: Fact) -> list[str]:
    text = f"{fact.text} ({fact.why})" if fact.why else fact.text
    if len(fact.name) < _NAMES:
        return _wrap(f"  {fact.name:<{_NAMES}}", text)
    return [f"  {fact.name}", *_wrap(" " * (_NAMES + 2), text)]


def _wrap(first: str, text: str) -> list[str]:
    """Break a text behind ``first`` into lines. Long words, such as paths, are not broken: they are copied."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
