"""What a run learned, from its records: loss and validation against samples and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["has_numbers", "learned"]


def learned(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """The points ``loss``, [samples, seconds, loss], and ``validation``, [samples, seconds, {name: value}].

    The record of a validation holds a step, of which the samples are the mean of all steps.

    Args:
        records: the lines of metrics.jsonl.
        summary: summary.json; empty where there is none.
    """
    train = [one for one in _of_kind(records, "train") if has_numbers(one, "step", "samples", "seconds")]
    validations = [one for one in _of_kind(records, "validation") if has_numbers(one, "step", "seconds")]
    per_step = _samples_per_step(train, summary)
    return {
        "loss": [[one["samples"], one["seconds"], one.get("loss")] for one in train],
        "validation": [
            [one["step"] * per_step, one["seconds"], _numbers(one.get("values") or {})] for one in validations
        ],
    }


def _samples_per_step(train: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> float:
    last = {"step": summary.get("steps"), "samples": summary.get("samples")}
    if not has_numbers(last, "step", "samples"):
        last = {**train[-1]} if train else {"step": 0, "samples": 0}
    return float(last["samples"] / last["step"]) if last["step"] else 0.0


def _of_kind(records: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [record for record in records if record.get("kind") == kind]


def has_numbers(record: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(record.get(name), int | float) for name in names)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the text that stands beside a number that is not finite."""
    return {name: value for name, value in values.items() if value is None or isinstance(value, int | float)}
