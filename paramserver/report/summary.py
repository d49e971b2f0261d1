"""What a person reads when a run has ended, from the fields of ``summary.json``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["summary_text"]

Summary = Mapping[str, Any]

_OWN_PATH = ("data", "pull", "forward", "backward", "push", "apply", "wait")
_BESIDE = ("hidden",)
_STARVED = 0.1
_RECEIVED = ("received", "duplicated", "refused")
_STUDY = ("complete", "running", "waiting", "restarted", "given_up")


def summary_text(summary: Summary, run_dir: Path | str) -> str:
    """Return aligned lines ``name  value``; a field that is missing or None has no line, or a dash in its line."""
    lines = [(name, line(summary)) for name, line in _LINES]
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
    for key, noun in (("num_servers", "server"), ("num_trainers", "trainer")):
        count = summary.get(key)
        if count:
            parts.append(f"{count} {noun}" + ("s" if count != 1 else ""))
    return ", ".join(parts)


def _samples(summary: Summary) -> str:
    text = f"{_number(summary.get('samples'))} applied"
    for key, word in (("samples_served", "served"), ("samples_left", "left")):
        if summary.get(key) is not None:
            text += f", {_number(summary[key])} {word}"
    return text


def _speed(summary: Summary) -> str:
    rate = summary.get("samples_per_second")
    return "" if rate is None else f"{rate:.0f} samples/s"


def _validation(summary: Summary) -> str:
    values = summary.get("validation") or {}
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def _step_ms(summary: Summary) -> str:
    return _statistics(summary.get("step_ms"), ("mean", "p50", "p95", "max"), " ms")


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
    """Who spent a tenth of its time or more on waiting for samples."""
    waits = [(one["trainer"], one.get("data_wait_share") or 0.0) for one in summary.get("trainers") or ()]
    starved = [(index, share) for index, share in waits if share >= _STARVED]
    return "; ".join(f"trainer {index} waited {100 * share:.0f} % of the time for data" for index, share in starved)


def _received(summary: Summary) -> str:
    streams = [one["stream"] for one in summary.get("trainers") or () if one.get("stream")]
    if not streams:
        return ""
    counts = {name: sum(_count(stream.get(name)) for stream in streams) for name in _RECEIVED}
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "received")
    expected = [stream.get("expected") for stream in streams]
    return told if None in expected else told.replace(" received", f" received of {sum(expected)} expected", 1)


def _count(told: Any) -> int:
    """A number, or the sum of the numbers of several kinds."""
    return sum(told.values()) if isinstance(told, Mapping) else told or 0


def _simulations(summary: Summary) -> str:
    counts = summary.get("simulations") or {}
    known = [(name, counts[name]) for name in _STUDY if counts.get(name)]
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in known)


def _faults(summary: Summary) -> str:
    faults, restarts = len(summary.get("faults") or ()), summary.get("restarts") or 0
    return f"{faults}, {restarts} restarts" if faults or restarts else ""


def _checkpoint(summary: Summary) -> str:
    path = summary.get("checkpoint")
    return "none was written" if path is None else str(path)


def _time(summary: Summary) -> str:
    seconds = summary.get("seconds")
    return "-" if seconds is None else f"{seconds:.1f} s"


_LINES: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("status", lambda summary: str(summary.get("status") or "-")),
    ("error", lambda summary: str(summary.get("error") or "").split("\n")[0]),
    ("reason", lambda summary: str(summary.get("reason") or "")),
    ("mode", _mode),
    ("steps", lambda summary: _number(summary.get("steps"))),
    ("samples", _samples),
    ("time", _time),
    ("speed", _speed),
    ("loss", lambda summary: _number(summary.get("train_loss"))),
    ("validation", _validation),
    ("step", _step_ms),
    ("phases", _phases(_OWN_PATH)),
    ("beside", _phases(_BESIDE)),
    ("staleness", _staleness),
    ("simulations", _simulations),
    ("received", _received),
    ("data", _starved),
    ("faults", _faults),
    ("checkpoint", _checkpoint),
)
