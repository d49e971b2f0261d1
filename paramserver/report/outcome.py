"""summary.json: what a run came to, from the accounts of its keeper and its trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paramserver.config import Config, mode_of, num_servers_of, num_trainers_of
from paramserver.records import PHASES, DurationHistogram, TrainerTotals, peak_rss_mb


class Counts(Protocol):
    """How stale gradients were."""

    def figures(self) -> dict[str, Any]: ...

    def by_trainer(self) -> list[dict[str, Any]]: ...


class Account(Protocol):
    """What rank 0 counted while the run went on."""

    config: Config
    step: int
    samples: int
    first_samples: int
    seconds: float
    loss: float | None
    validation: dict[str, float]
    checkpoint_pauses_s: list[float]

    @property
    def staleness(self) -> Counts: ...

    dropped: int

    @property
    def last_checkpoint(self) -> str | None: ...


def summarize(
    account: Account, status: str, totals: Sequence[TrainerTotals], reason: str, error: str | None
) -> dict[str, Any]:
    """The fields of summary.json (docs/interface.md, section 5). What is unknown is null."""
    config = account.config
    steps = DurationHistogram()
    for one in totals:
        steps.merge(one.steps)
    seconds = max((t.seconds for t in totals), default=account.seconds)
    applied = account.samples - account.first_samples
    has_servers = mode_of(config).has_servers
    return {
        "status": status,
        "reason": reason,
        "mode": config.mode,
        "consistency": config.server.consistency if has_servers else None,
        "num_servers": num_servers_of(config),
        "num_trainers": num_trainers_of(config),
        "steps": account.step,
        "samples": account.samples,
        "samples_served": sum(t.samples for t in totals),
        "samples_left": _sum_known([t.samples_left for t in totals]),
        "seconds": seconds,
        "samples_per_second": applied / seconds if seconds else None,
        "train_loss": account.loss,
        "validation": account.validation,
        "step_ms": steps.milliseconds(),
        "phases_ms": _phases_ms(totals, steps.count),
        "wire_bytes_per_step": sum(t.wire_bytes for t in totals) / steps.count if steps.count else 0,
        "staleness": {
            **account.staleness.figures(),
            "dropped": account.dropped,
            "trainers": account.staleness.by_trainer(),
        }
        if has_servers
        else None,
        "buffer": _buffer(totals),
        "trainers": [_trainer(t) for t in totals],
        "faults": [],
        "restarts": 0,
        "peak_rss_mb": {
            "server": round(peak_rss_mb(), 1) if has_servers else None,
            "trainer": round(max((t.peak_rss_mb for t in totals), default=0.0), 1) or None,
        },
        "checkpoint": account.last_checkpoint,
        "checkpoint_pause_ms": [round(pause_s * 1e3, 3) for pause_s in account.checkpoint_pauses_s],
        "error": error,
    }


def _sum_known(numbers: Sequence[int | None]) -> int | None:
    known = [n for n in numbers if n is not None]
    return sum(known) if len(known) == len(numbers) and known else None


def _phases_ms(totals: Sequence[TrainerTotals], steps: int) -> dict[str, float]:
    """Mean milliseconds per step and trainer of each phase; together they are the step. ``hidden`` went on beside."""
    if not steps:
        return {}
    return {
        name: round(sum(t.phases_s.get(name, 0.0) for t in totals) / steps * 1e3, 4) for name in (*PHASES, "hidden")
    }


def _trainer(t: TrainerTotals) -> dict[str, Any]:
    """One trainer's own figures, with those of what it received where its samples came from simulations."""
    waited_s = t.buffer.get("get_wait_s", 0.0)
    return {
        "trainer": t.trainer_index,
        "samples": t.samples,
        "samples_per_second": t.samples / t.seconds if t.seconds else None,
        "data_wait_share": round(min(waited_s / t.seconds, 1.0), 4) if t.seconds else None,
        **({"stream": t.buffer["stream"]} if "stream" in t.buffer else {}),
        "peak_rss_mb": round(t.peak_rss_mb, 1),
    }


def _buffer(totals: Sequence[TrainerTotals]) -> dict[str, float]:
    names = ("puts", "gets", "put_wait_s", "get_wait_s")
    return {name: round(sum(t.buffer.get(name, 0) for t in totals), 4) for name in names}
