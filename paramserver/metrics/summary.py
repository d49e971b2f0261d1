"""The summary of a run: the fields of ``summary.json``, and the table that is printed at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paramserver.metrics.records import PHASES, TABLE_RANGES, DurationHistogram, TableUse, TrainerTotals

_BUFFER = ("puts", "gets", "put_wait_s", "get_wait_s")


def totals_of(trainers: Sequence[TrainerTotals]) -> dict[str, Any]:
    """Return the fields of summary.json that follow from the totals of the trainers. An unknown value is None."""
    steps, left = DurationHistogram(), [t.samples_left for t in trainers]
    for one in trainers:
        steps.merge(one.steps)
    counted = [t for t in trainers if t.wire_bytes is not None]  # those of a trainer that is lost are not known
    wire_bytes, served = sum(t.wire_bytes or 0 for t in counted), sum(t.samples - t.samples_before for t in counted)
    return {
        "samples_served": sum(t.samples for t in trainers) if trainers else None,
        "samples_left": None if not left or None in left else sum(n or 0 for n in left),
        "step_ms": steps.summary_ms() if steps.count else None,
        # Mean per step and trainer of each phase; their sum is the step. ``hidden`` overlaps them.
        "phases_ms": {
            name: round(sum(t.phases_s.get(name, 0.0) for t in trainers) / steps.count * 1e3, 4)
            for name in ((*PHASES, "hidden") if steps.count else ())
        },
        **({"inner_steps": inner_steps} if (inner_steps := sum(t.inner_steps for t in trainers)) else {}),
        "wire_bytes_per_step": wire_bytes / steps.count if steps.count and counted else None,
        "wire_bytes_per_sample": wire_bytes / served if served else None,
        **({"tables": tables} if (tables := _tables_of(trainers, steps.count)) else {}),
        "buffer": {name: round(sum(t.buffer.get(name, 0) for t in trainers), 4) for name in _BUFFER}
        if trainers
        else None,
        "trainers": [_trainer(t) for t in trainers],
    }


def _tables_of(trainers: Sequence[TrainerTotals], steps: int) -> dict[str, Any]:
    """Return the figures of each embedding table, per step and trainer."""
    tables = {}
    for name in dict.fromkeys(name for one in trainers for name in one.tables):
        uses = [one.tables[name] for one in trainers if name in one.tables]
        rows, row_bytes = uses[0].rows, uses[0].row_bytes
        used_rows = sum(use.used_rows for use in uses) / max(steps, 1)
        tables[name] = {
            "rows": rows,
            "ids_per_step": round(sum(use.ids for use in uses) / max(steps, 1), 1),
            "rows_per_step": round(used_rows, 1),
            "bytes_per_step": round(used_rows * row_bytes),
            "bytes_of_all_rows": rows * row_bytes,
            **_places_of(uses),
        }
    return tables


def _places_of(uses: Sequence[TableUse]) -> dict[str, Any]:
    """Return which range of a table is used most, and what each server has of the used rows."""
    total = sum(use.used_rows for use in uses)
    if not total:
        return {}
    by_range = [sum(counts) for counts in zip(*(use.by_range for use in uses), strict=True)]
    busiest, rows = by_range.index(max(by_range)), uses[0].rows
    by_server = [sum(counts) for counts in zip(*(use.by_server for use in uses if use.by_server), strict=True)]
    return {
        "busiest_rows": [edge * rows // TABLE_RANGES for edge in (busiest, busiest + 1)],
        "busiest_share": round(by_range[busiest] / total, 4),
        "server_shares": [round(count / total, 4) for count in by_server],
    }


def _trainer(t: TrainerTotals) -> dict[str, Any]:
    """Return the figures of one trainer, with those of the received samples where they came from simulations."""
    waited_s = t.buffer.get("get_wait_s", 0.0)
    return {
        "trainer": t.trainer_index,
        "samples": t.samples,
        **({"inner_steps": t.inner_steps} if t.inner_steps else {}),
        "samples_per_second": (t.samples - t.samples_before) / t.seconds if t.seconds else None,
        "data_wait_share": round(min(waited_s / t.seconds, 1.0), 4) if t.seconds else None,
        "core_wait_share": None if t.core_wait_share is None else round(t.core_wait_share, 4),
        "threads": t.threads,
        **({"stream": t.buffer["stream"]} if "stream" in t.buffer else {}),
        "peak_rss_mb": None if t.peak_rss_mb is None else round(t.peak_rss_mb, 1),
    }


Summary = Mapping[str, Any]

_OWN_PATH = ("data", "pull", "forward", "backward", "push", "apply", "wait")
_OVERLAPPED = ("hidden",)
_STARVED = 0.1
# Measured on two cores, both used by torch: 0.02 to 0.04 on a quiet machine, 0.33 to 0.35 with another busy program.
_CONTENDED = 0.15
_RECEIVED = ("received", "lost", "stale", "duplicated", "refused")
_SIMULATION_COUNTS = ("complete", "running", "waiting", "restarted", "given_up", "lost")


def summary_text(summary: Summary, run_dir: Path | str, first_step: int = 0) -> str:
    """Return the table that is printed at the end of a run.

    A field of summary.json that is missing or None has no line, or a dash in its line. ``first_step`` is where the run
    was resumed: times and speeds count from there, ``steps`` and ``samples`` from 0.
    """
    lines = [(name, line(summary)) for name, line in _LINES]
    if first_step:
        lines = [(name, f"{text} since step {first_step}" if name == "time" else text) for name, text in lines]
    tensorboard = Path(run_dir) / "tensorboard"
    lines.append(("tensorboard", f"tensorboard --logdir {tensorboard}" if tensorboard.is_dir() else ""))
    lines.append(("folder", str(run_dir)))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines if text) + "\n"


def _number(value: Any, unit: str = "") -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) >= 1000):
        return f"{int(value)}{unit}"
    return f"{value:.4g}{unit}" if isinstance(value, float) else f"{value}{unit}"


def _mode(summary: Summary) -> str:
    parts = [str(summary.get("mode") or "-")]
    if summary.get("consistency"):
        parts.append(str(summary["consistency"]))
    counts = (("num_servers", "server"), ("num_trainers", "trainer"))
    parts += [_with_noun(count, noun) for key, noun in counts if (count := summary.get(key))]
    return ", ".join(parts)


def transport_text(transports: Mapping[str, str] | None) -> str:
    """Return the transport of all trainers, or that of each where they differ."""
    by_name: dict[str, list[str]] = {}
    for trainer, name in (transports or {}).items():
        by_name.setdefault(name, []).append(trainer)
    if len(by_name) < 2:
        return "".join(by_name)
    return ", ".join(
        f"{name} (trainer{'s' if len(trainers) > 1 else ''} {', '.join(trainers)})"
        for name, trainers in by_name.items()
    )


def _steps(summary: Summary) -> str:
    inner = summary.get("inner_steps")
    return _number(summary.get("steps")) + (f" rounds, {inner} local steps" if inner else "")


def _samples(summary: Summary) -> str:
    text = f"{_number(summary.get('samples'))} applied"
    for key, word in (("samples_skipped", "skipped"), ("samples_served", "served"), ("samples_left", "left")):
        number = summary.get(key)
        # Where the reason names what is left, and why, it is not a figure that asks for an explanation.
        if number is not None and not (word == "left" and f"; {number} sample" in _reason(summary)):
            text += f", {_number(number)} {word}"
    return text


def _reason(summary: Summary) -> str:
    return str(summary.get("reason") or "")


def _train_loss(summary: Summary) -> str:
    by_optimizer = summary.get("train_losses") or {}
    if not by_optimizer:
        return _number(summary.get("train_loss"))
    return ", ".join(f"{name} {_number(value)}" for name, value in by_optimizer.items())


def _validation(summary: Summary) -> str:
    values = summary.get("validation") or {}
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def _tables(summary: Summary) -> str:
    return "; ".join(
        f"{name} {own['rows_per_step']:,.0f} of {own['rows']:,} rows a step, for {own['ids_per_step']:,.0f} ids"
        for name, own in (summary.get("tables") or {}).items()
    )


def _staleness(summary: Summary) -> str:
    staleness = summary.get("staleness") or {}
    dropped = f", {_number(staleness['dropped'])} dropped" if staleness.get("dropped") else ""
    return _statistics(staleness, ("mean", "p95", "max"), "") + dropped


def _statistics(values: Mapping[str, Any] | None, keys: tuple[str, ...], unit: str) -> str:
    known = [(key, (values or {}).get(key)) for key in keys]
    return ", ".join(f"{key} {_number(value, unit)}" for key, value in known if value is not None)


def _phases(names: tuple[str, ...]) -> Callable[[Summary], str]:
    def line(summary: Summary) -> str:
        phases = summary.get("phases_ms") or {}
        step_ms = (summary.get("step_ms") or {}).get("mean")
        known = [(name, phases[name]) for name in names if phases.get(name)]
        return ", ".join(f"{name} {value:.3g} ms{_share(value, step_ms)}" for name, value in known)

    return line


def _share(part_ms: float, step_ms: float | None) -> str:
    return f" ({100 * part_ms / step_ms:.0f} %)" if step_ms else ""


def _starved(summary: Summary) -> str:
    """Name the trainers that spent a tenth of their time or more waiting for samples."""
    waits = [(one["trainer"], one.get("data_wait_share") or 0.0) for one in _trainers(summary)]
    starved = [(index, share) for index, share in waits if share >= _STARVED]
    return "; ".join(f"trainer {index} waited {100 * share:.0f} % of the time for data" for index, share in starved)


def core_wait_text(summary: Summary) -> str:
    """Name the trainers whose several threads had to wait for cores; empty without such.

    One thread that waits is merely slower by that share. Several wait for each other at every operation, and are many
    times slower.
    """
    known = [(one["trainer"], one.get("core_wait_share") or 0.0, one.get("threads") or 1) for one in _trainers(summary)]
    waited = [
        f"trainer {index} waited {100 * share:.0f} % of the time for a core, with {threads} threads"
        for index, share, threads in known
        if threads > 1 and share >= _CONTENDED
    ]
    return f"{'; '.join(waited)}: set OMP_NUM_THREADS to the number of free cores" if waited else ""


def _trainers(summary: Summary) -> Sequence[Mapping[str, Any]]:
    return summary.get("trainers") or ()


def _received(summary: Summary) -> str:
    streams = [one["stream"] for one in _trainers(summary) if one.get("stream")]
    if not streams:
        return ""
    counts = {name: sum(_count(stream.get(name)) for stream in streams) for name in _RECEIVED}
    text = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "received")
    expected = [stream.get("expected") for stream in streams]
    return text if None in expected else text.replace(" received", f" received of {sum(expected)} expected", 1)


def _count(value: Any) -> int:
    """A number, or the sum of the numbers of several kinds."""
    return sum(value.values()) if isinstance(value, Mapping) else value or 0


def _simulations(summary: Summary) -> str:
    counts = summary.get("simulations") or {}
    known = [(name, counts[name]) for name in _SIMULATION_COUNTS if counts.get(name)]
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in known)


def _faults(summary: Summary) -> str:
    faults, restarts = len(summary.get("faults") or ()), summary.get("restarts") or 0
    redone = summary.get("updates_redone") or 0
    if not (faults or restarts):
        return ""
    return f"{faults}, {_with_noun(restarts, 'restart')}, {_with_noun(redone, 'update')} made again"


def _with_noun(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


_LINES: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("status", lambda summary: str(summary.get("status") or "-")),
    ("error", lambda summary: str(summary.get("error") or "").split("\n")[0]),
    ("reason", _reason),
    ("mode", _mode),
    ("transport", lambda summary: transport_text(summary.get("transports"))),
    ("steps", _steps),
    ("samples", _samples),
    ("time", lambda summary: "-" if (s := summary.get("seconds")) is None else f"{s:.1f} s"),
    ("recovery", lambda summary: f"{s:.1f} s between sessions" if (s := summary.get("recovery_s")) else ""),
    ("speed", lambda summary: "" if (rate := summary.get("samples_per_second")) is None else f"{rate:.0f} samples/s"),
    ("train loss", _train_loss),
    ("valid", _validation),
    ("step", lambda summary: _statistics(summary.get("step_ms"), ("mean", "p50", "p95", "max"), " ms")),
    ("phases", _phases(_OWN_PATH)),
    ("overlapped", _phases(_OVERLAPPED)),
    ("tables", _tables),
    ("staleness", _staleness),
    ("simulations", _simulations),
    ("received", _received),
    ("data", _starved),
    ("cores", core_wait_text),
    ("faults", _faults),
    ("sinks", lambda summary: "; ".join(summary.get("sink_failures") or ())),
    ("checkpoint", lambda summary: "none was written" if (path := summary.get("checkpoint")) is None else str(path)),
)
