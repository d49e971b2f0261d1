"""What a run learned, from its records: loss and validation against samples and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["has_numbers", "learned"]


def learned(records: Sequence[Mapping[str, Any]]) -> dict[str, list[list[Any]]]:
    """The points ``loss``, [samples, seconds, loss], and ``validation``, [samples, seconds, {name: value}].

    The records of a validation hold a step, to which the ``train`` records know the samples.

    Args:
        records: the lines of metrics.jsonl.
    """
    train = [one for one in _of_kind(records, "train") if has_numbers(one, "step", "samples", "seconds")]
    samples = {one["step"]: one["samples"] for one in train}
    validation = []
    for one in _of_kind(records, "validation"):
        step, seconds, values = one.get("step"), one.get("seconds"), one.get("values")
        nearest = _nearest(samples, step)
        if seconds is not None and isinstance(values, dict) and nearest is not None and step is not None:
            validation.append([samples[nearest] * step / nearest if nearest else 0, seconds, _numbers(values)])
    return {"loss": [[one["samples"], one["seconds"], one.get("loss")] for one in train], "validation": validation}


def _nearest(samples: Mapping[int, int], step: int | None) -> int | None:
    """The last step up to this one of which the samples are known, else the first one after it."""
    if step is None or not samples:
        return None
    return max((known for known in samples if known <= step), default=min(samples))


def _of_kind(records: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [record for record in records if record.get("kind") == kind]


def has_numbers(record: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(record.get(name), int | float) for name in names)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the text that stands beside a number that is not finite."""
    return {name: value for name, value in values.items() if value is None or isinstance(value, int | float)}
