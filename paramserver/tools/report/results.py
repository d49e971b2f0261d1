"""``results.jsonl``: the result of each case of a benchmark, a line for each repeat; and the target of validations."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any

from paramserver.errors import UnsupportedConfiguration
from paramserver.fileio import end_last_line
from paramserver.metrics.records import MEASURED

FORMAT = 1
RESULTS_FILE = "results.jsonl"
COUNTED_BY_KERNEL, COMPUTED_RING = "counted by the kernel", "computed, ring all-reduce"
COMPUTED_SHARED = "computed, all-reduce in shared memory"
COMPLETED, FAILED = "completed", "failed"
LOCAL, NO_COMMUNICATION = "local", "no communication"
_BASELINES = (LOCAL, NO_COMMUNICATION)

Numbers = Mapping[str, float | None]

CURVES = tuple(one.record for one in MEASURED)
"""The quantities that have learning curves, next to the loss."""


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Results:
    """All records of a file in its order; ``notes`` are sentences about its defects for the reader of a report."""

    source: str
    results: tuple[CaseResult, ...]
    notes: tuple[str, ...] = ()


_HUGE = 1e300  # larger than any measurement or sum of measurements
# The rule of a field: a check, and its wording for messages.
Rule = tuple[Callable[[Any], bool], str]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_HUGE < value < _HUGE


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(v is None or _is_number(v) for v in value.values())


def _are_counts(value: Any, digits: int) -> bool:
    """Whether ``value`` maps whole numbers, as text of at most ``digits`` digits, to counts."""
    if not isinstance(value, dict):
        return False
    return all(len(k) <= digits and k.isdecimal() and _is_count(v) for k, v in value.items())


def _points_of(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def is_points(value: Any) -> bool:
        return isinstance(value, list) and all(
            isinstance(p, list) and len(p) == 3 and _is_number(p[0]) and _is_number(p[1]) and is_value(p[2])
            for p in value
        )

    return is_points


def _is_staleness(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    parts = [value, *(part for part in value.get("trainers") or () if isinstance(part, dict))]
    figures = all(part.get(name) is None or _is_number(part[name]) for part in parts for name in ("mean", "p95", "max"))
    return figures and all(_are_counts(part.get("histogram") or {}, 9) for part in parts)


def _are_tables(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(own, dict) for own in value.values()):
        return False
    figures = [figure for own in value.values() for figure in own.values()]
    return all(_is_number(x) or (isinstance(x, list) and all(map(_is_number, x))) for x in figures)


_NAME: Rule = (lambda v: isinstance(v, str) and bool(v), "a name")
_TEXT: Rule = (lambda v: isinstance(v, str), "text")
_COUNT: Rule = (_is_count, "a whole number from 0 on")
_NUMBER: Rule = (_is_number, "a number")
_FIGURE: Rule = (lambda v: _is_number(v) and v >= 0, "a number from 0 on")
_NUMBERS: Rule = (_is_numbers, "a mapping of names to numbers")
_MAPPING: Rule = (lambda v: isinstance(v, dict), "a mapping")


def _points_rule(name: str) -> Rule:
    return _points_of(lambda v: v is None or _is_number(v)), f"a list of [samples, seconds, {name}]"


def _required(rule: Rule) -> Any:
    """Declare a field that each record has, and the rule for its value."""
    return field(metadata={"rule": rule})


def _known(rule: Rule, unknown: Callable[[], Any] = NoneType) -> Any:
    """Declare a field that a record may have; ``unknown`` makes its value where it has none."""
    return field(default_factory=unknown, metadata={"rule": rule})


@dataclass(frozen=True)
class CaseResult:
    """One case in one repeat. Unknown values are None or empty; figures are of the time after the warm-up.

    Attributes:
        baseline: "local" (one process) or "no communication" (the trainers' loops without an exchange) for a baseline.
        scenario: a disturbance, such as {"slow": {"trainer": 1, "factor": 5.0, "probability": 1.0}}.
        wall_s: from the start of its first process to the end of its last; ``seconds`` is the measured training.
        per_trainer: samples/s of each trainer; ``per_process``: of all, divided by the number of trainers and servers.
        transports: of parameters and gradients, by the index of each trainer.
        wire_bytes_per_sample: of applied samples; None where the trainers exchanged or counted nothing.
        loss: points (samples, seconds, loss); ``validation``: points (samples, seconds, {name: value}).
        quantities: points of each of ``CURVES``, in the file as fields of their own.
        best: the best validation: its ``name``, ``value`` and ``samples``, and whether ``less_is_better``.
        target: the metric and the value that ``time_to_target_s`` and ``samples_to_target`` refer to.
        environment: versions, host, cores, commit, config (its text) and command.
    """

    case: str = _required(_NAME)
    repeat: int = _required(_COUNT)
    mode: str = _required(_NAME)
    trainers: int = _required((lambda v: _is_count(v) and v > 0, "a whole number from 1 on"))
    servers: int = _required(_COUNT)
    status: str = _required((lambda v: v in (COMPLETED, FAILED), f"{COMPLETED} or {FAILED}"))
    overrides: Mapping[str, Any] = _known(_MAPPING, dict)
    scenario: Mapping[str, Any] = _known(_MAPPING, dict)
    baseline: str | None = _known((lambda v: v in _BASELINES, " or ".join(_BASELINES)))
    error: str | None = _known(_TEXT)
    started: float | None = _known(_NUMBER)
    wall_s: float | None = _known(_FIGURE)
    seconds: float | None = _known(_FIGURE)
    steps: int | None = _known(_COUNT)
    samples: int | None = _known(_COUNT)
    samples_per_second: float | None = _known(_FIGURE)
    per_trainer: tuple[float | None, ...] = _known(
        (lambda v: isinstance(v, list) and all(x is None or _is_number(x) for x in v), "a list of numbers"), tuple
    )
    per_process: float | None = _known(_FIGURE)
    transports: Mapping[str, str] = _known(
        (
            lambda v: isinstance(v, dict) and all(isinstance(name, str) for name in v.values()),
            "a mapping of trainers to names",
        ),
        dict,
    )
    step_ms: Mapping[str, float | None] = _known(_NUMBERS, dict)
    step_bins: Mapping[int, int] = _known((lambda v: _are_counts(v, 4), "a mapping of bins to counts"), dict)
    phases_ms: Mapping[str, float | None] = _known(_NUMBERS, dict)
    wire_bytes_per_step: float | None = _known(_FIGURE)
    wire_bytes_per_sample: float | None = _known(_FIGURE)
    wire_bytes_source: str | None = _known(_TEXT)
    model_bytes: int | None = _known(_COUNT)
    staleness: Mapping[str, Any] | None = _known(
        (_is_staleness, "a mapping with mean, p95, max, histogram and trainers")
    )
    tables: Mapping[str, Mapping[str, Any]] = _known(
        (_are_tables, "a mapping of names to the figures of an embedding table"), dict
    )
    cpu_s: Mapping[str, float | None] = _known(_NUMBERS, dict)
    peak_rss_mb: Mapping[str, float | None] = _known(_NUMBERS, dict)
    loss: tuple[tuple[float, float, float | None], ...] = _known(_points_rule("loss"), tuple)
    validation: tuple[tuple[float, float, Numbers], ...] = _known(
        (_points_of(_is_numbers), "a list of [samples, seconds, {name: value}]"), tuple
    )
    quantities: Mapping[str, tuple[tuple[float, float, float | None], ...]] = field(
        default_factory=lambda: dict.fromkeys(CURVES, ())
    )
    best: Mapping[str, Any] | None = _known(_MAPPING)
    target: Mapping[str, float] | None = _known(_NUMBERS)
    time_to_target_s: float | None = _known(_FIGURE)
    samples_to_target: float | None = _known(_FIGURE)
    predicted: Mapping[str, Any] | None = _known(_MAPPING)
    environment: Mapping[str, Any] = _known(_MAPPING, dict)

    @property
    def is_completed(self) -> bool:
        return self.status == COMPLETED

    def to_mapping(self) -> dict[str, Any]:
        """The record as it is written to the file; a number that is not finite becomes null."""
        own = asdict(self)
        quantities = own.pop("quantities")
        return {"format": FORMAT, **_finite({**own, **quantities})}


_RULES: dict[str, Rule] = {
    **{one.name: one.metadata["rule"] for one in fields(CaseResult) if one.metadata},
    **{name: _points_rule(name) for name in CURVES},
}
_REQUIRED = tuple(one.name for one in fields(CaseResult) if one.default_factory is MISSING)
FIELDS = tuple(_RULES)
"""The names in a record of the file."""

_CURE = "take the line out, or benchmark again"


def parse_result(record: Any, where: str) -> CaseResult:
    """Check a record of ``results.jsonl``. A field that this version does not know is left out.

    ``where`` is the file and line, for the message.

    Raises:
        UnsupportedConfiguration: it is of another format version, or a field is missing or not what it must be.
    """
    if not isinstance(record, dict):
        raise UnsupportedConfiguration(f"{where}: a line must be one record, {{...}}; {_CURE}")
    if record.get("format") != FORMAT:
        raise UnsupportedConfiguration(
            f"{where}: format ({record.get('format')}) must be {FORMAT}, which this version reads; "
            "use the version that wrote the results, or benchmark again"
        )
    # Fields of a later version are ignored, and null means unknown, so that old and new files can be read alike.
    given = {name: record[name] for name in _RULES if record.get(name) is not None}
    for name in (*_REQUIRED, *given):
        check, words = _RULES[name]
        if name not in given or not check(given[name]):
            raise UnsupportedConfiguration(
                f"{where}: {name} ({_short(given.get(name, 'missing'))}) must be {words}; {_CURE}"
            )
    return CaseResult(**_frozen(given))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _frozen(given: dict[str, Any]) -> dict[str, Any]:
    found = {**given, **curve_fields({name: given[name] for name in ("loss", "validation", *CURVES) if name in given})}
    if "per_trainer" in given:
        found["per_trainer"] = tuple(given["per_trainer"])
    if "step_bins" in given:
        found["step_bins"] = {int(index): count for index, count in given["step_bins"].items()}
    return {name: value for name, value in found.items() if name not in CURVES}


def curve_fields(points: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, Any]:
    """Return the fields of a ``CaseResult`` that hold learning curves, from the points of each by name."""
    curves = {name: tuple((samples, seconds, value) for samples, seconds, value in of) for name, of in points.items()}
    quantities = {name: curves.pop(name, ()) for name in CURVES}
    return {**curves, "quantities": quantities}


def read_results(path: Path) -> Results:
    """Read ``results.jsonl``, or the one in the folder ``path``.

    An incomplete last line is left out, with a note: its writer was killed. Of two records of the same case and repeat
    the later one counts, with a note.

    Raises:
        UnsupportedConfiguration: there is no such file, it holds no record, or a line is none of this format.
    """
    path = path / RESULTS_FILE if path.is_dir() else path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnsupportedConfiguration(
            f"{path} must be a file of results that can be read ({error.strerror or error}); "
            f"give a {RESULTS_FILE} or the folder that holds it"
        ) from error
    lines = content.split(b"\n")
    torn = lines.pop()  # what follows the last line end
    notes = []
    found = [_parsed(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if torn.strip():
        if _is_record(torn):
            found.append(_parsed(torn, f"{path}:{len(lines) + 1}"))
        else:
            notes.append(f"The last line of {path} is incomplete and left out: its writer was stopped.")
    if not found:
        raise UnsupportedConfiguration(f"{path} must hold a record, and holds none; benchmark again")
    # A dict keeps the first place of a key and its last value: the order of the file, and the later record.
    latest = {(one.case, one.repeat): one for one in found}
    if len(latest) < len(found):
        notes.append(f"{path} holds {len(found) - len(latest)} repeats twice: the later record counts.")
    return Results(str(path), tuple(latest.values()), tuple(notes))


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parsed(line: bytes, where: str) -> CaseResult:
    try:
        # NaN and Infinity, which are no JSON but which some writers use, become null.
        record = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise UnsupportedConfiguration(
            f"{where}: a line must be a record in JSON, and this one is damaged ({error}); {_CURE}"
        ) from None
    return parse_result(record, where)


def append_result(path: Path, result: CaseResult) -> None:
    """Append a record and flush it to the disk, so that it survives an interrupt or a crash.

    An incomplete last line, left by a writer that was killed, is removed first.

    Raises:
        UnsupportedConfiguration: the file cannot be written.
    """
    try:
        with path.open("a+b") as file:
            end_last_line(file)
            file.write(json.dumps(result.to_mapping(), allow_nan=False).encode() + b"\n")
            # On the disk before the next run starts: a run takes minutes, and a crash must cost one only.
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UnsupportedConfiguration(
            f"{path} must be a file that this user can write ({error.strerror or error}); choose another --out"
        ) from error


# The value that a validation metric is to reach.

# A metric whose name contains one of these is better when it is smaller.
_SMALLER = ("loss", "error", "perplexity", "mse", "mae")


@dataclass(frozen=True)
class Target:
    """A value that a validation metric is to reach: at least, or with ``at_most`` at most."""

    name: str
    value: float
    at_most: bool

    def is_met(self, values: Numbers) -> bool:
        found = values.get(self.name)
        if found is None:
            return False
        return found <= self.value if self.at_most else found >= self.value


def parse_target(text: str) -> Target:
    """Parse ``name=value``: at most for a loss or an error, judged by its name, at least otherwise.

    Raises:
        UnsupportedConfiguration: ``text`` is not of this form.
    """
    name, _, word = (part.strip() for part in text.partition("="))
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not name or not math.isfinite(value):
        raise UnsupportedConfiguration(
            f"--target ({text}) must be the name of a validation metric and a number; write for example accuracy=0.95"
        )
    # As in TensorBoard, and as it was there in earlier versions.
    name = {"Loss/valid": "loss"}.get(name, name.removeprefix("valid/"))
    return Target(name, value, _less_is_better(name))


def _less_is_better(name: str) -> bool:
    return any(part in name.lower() for part in _SMALLER)


def best_validation(
    validation: Sequence[Sequence[Any]], metric: str | None = None, mode: str | None = None
) -> dict[str, Any] | None:
    """Return the best of the points of a run, for ``CaseResult.best``; None where none has the metric.

    Without a metric it is ``loss``; without a mode (``min`` or ``max``) the name decides.
    """
    name = "loss" if metric is None else metric
    less = mode == "min" if mode is not None else _less_is_better(name)
    known = [(values[name], samples) for samples, _, values in validation if values.get(name) is not None]
    if not known:
        return None
    value, samples = (min if less else max)(known, key=lambda one: one[0])  # the first of equal ones
    return {"name": name, "value": value, "samples": samples, "less_is_better": less}


def first_reached(validation: Sequence[tuple[float, float, Numbers]], target: Target) -> tuple[float, float] | None:
    """Samples and seconds of the first validation that meets ``target``; None where none does."""
    return next(((samples, seconds) for samples, seconds, values in validation if target.is_met(values)), None)


def with_target(result: CaseResult, target: Target) -> CaseResult:
    samples, seconds = first_reached(result.validation, target) or (None, None)
    return replace(result, target={target.name: target.value}, time_to_target_s=seconds, samples_to_target=samples)
