"""Plain values that a run measures: reports of steps, sums, durations, phases of a step, and what trainers log."""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from paramserver.errors import TaskError
from paramserver.platform import core_wait_ns

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paramserver.buffers.positions import Key


Record = dict[str, Any]

PHASES = ("data", "wait", "pull", "forward", "backward", "push", "apply")


def make_record(kind: str, step: int | None, **fields: Any) -> Record:
    """Return a record, which becomes one line of metrics.jsonl."""
    return {"time": time.time(), "kind": kind, "step": step, **fields}


# The quantities that trainers measure of each step: each is declared here, for all that send, combine and show it.


_OVER_TRAINERS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
}


@dataclass(frozen=True)
class Quantity:
    """A number that each trainer measures of each of its steps; of several updates records have the mean.

    Attributes:
        name: its field in ``StepTotals``, ``StepReport`` and ``StepResult``.
        title, unit: in reports, where ``better`` is 1 if more is better, -1 if less is, 0 otherwise.
        tag: on TensorBoard, in csv and for Prometheus.
        record: its name in ``train`` records and results.jsonl; empty: ``name``.
        summary: its name in summary.json, which has it of the last ``train`` record; empty if it has not.
        progress: how the progress shows it, as a format; empty if it does not.
        section: the section of a report whose table has it, and with a ``caption`` a plot of it.
        over_trainers: how the values of the trainers of an update are combined: mean or sum.
        needs: the name of a quantity; where that is 0, ``train`` records lack this one.
        stored: the name of its total in a checkpoint; empty: ``name``.
    """

    name: str
    title: str
    tag: str
    record: str = ""
    unit: str = ""
    better: int = 0
    summary: str = ""
    progress: str = ""
    section: str = "learning"
    caption: str = ""
    over_trainers: str = "mean"
    needs: str = ""
    stored: str = ""

    def __post_init__(self) -> None:
        for name in ("record", "stored"):
            object.__setattr__(self, name, getattr(self, name) or self.name)

    @property
    def label(self) -> str:
        """The title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def _measured(title: str, tag: str, **shown: Any) -> Any:
    """Declare a quantity, as a field; ``shown`` are the further attributes of ``Quantity``."""
    return field(default=0.0, metadata={"title": title, "tag": tag, **shown})


_OF_TABLES = {"unit": "per step", "section": "tables", "over_trainers": "sum", "needs": "table_ids"}


@dataclass(frozen=True, kw_only=True)
class StepQuantities:
    """What trainers measure of each step in addition to its loss; 0 where it is not measured.

    A new quantity is a field here, and its value is set where the step is made (``trainers/base.py``).

    Attributes:
        inner_steps: local steps of a round.
        drift: how far a round moved the parameters, relative to their norm.
        table_ids, table_rows: the ids that the gradients of embedding tables have, and their different rows, of all
            tables and trainers; in ``rpc``.
    """

    inner_steps: float = _measured(
        "local steps per round",
        "rounds/local_steps",
        record="local_steps",
        progress="{:.4g} local steps",
        section="rounds",
        needs="inner_steps",
    )
    drift: float = _measured(
        "drift",
        "rounds/drift",
        section="rounds",
        caption="How far the local steps of a round move the parameters, relative to their norm: mean and range of "
        "repeats.",
        needs="inner_steps",
    )
    table_ids: float = _measured("ids of embedding tables", "tables/ids", **_OF_TABLES)
    table_rows: float = _measured("rows of embedding tables", "tables/rows", **_OF_TABLES)


LOSS = Quantity("loss", "train loss", "train/loss", better=-1, summary="train_loss", stored="losses")
MEASURED = tuple(Quantity(one.name, **one.metadata) for one in fields(StepQuantities))
"""All but the loss, which every step has."""

QUANTITIES = (LOSS, *MEASURED)


def combine(steps: Sequence[StepQuantities]) -> dict[str, Any]:
    """Return the quantities of an update, by name: from the ``StepReport``, or the like, of each of its trainers."""
    return {
        one.name: _OVER_TRAINERS[one.over_trainers]([getattr(step, one.name) for step in steps]) for one in QUANTITIES
    }


@dataclass(frozen=True)
class StepTotals(StepQuantities):
    """What is measured of a step: over the batches of a trainer, or over all trainers that took part.

    ``skipped`` are samples of local steps of a round that were skipped, which are not in ``samples``.
    """

    loss: float
    samples: int
    skipped: int = 0

    def to_report(self, trainer_index: int, version: int, **fields: Any) -> StepReport:
        """Return the report of a trainer's step at ``version`` in which this was measured, with these ``fields``."""
        return StepReport(trainer_index, version, **vars(self), **fields)


@dataclass(frozen=True)
class StepReport(StepQuantities):
    """One trainer's contribution to one step, sent with its gradients.

    Attributes:
        version: the version of the parameters that the gradient was computed at.
        samples: number of samples in its batches.
        loss: mean over its batches.
        seconds: training time of this trainer so far.
        used: for each parameter, whether it has a gradient; None: all have one.
        positions: of its samples in the trainer's order, if it pushes to a server; see ``buffers/positions.py``.
        keys: of its samples, if they are of a stream, which has no such order.
        optimizer: the name of the one that is stepped, where there are several.
        inner_s: seconds of the local steps of a round, without the pull of the version.
        nonfinite: what of it is NaN or infinite, "loss" or "gradient", so that the step is skipped; empty if nothing
            is, or nothing was checked.
        scale: of its losses in the backward; its gradients are without it.
        skipped: samples of local steps of a round that were skipped, which are not in ``samples``.
    """

    trainer_index: int
    version: int
    samples: int
    loss: float
    seconds: float
    used: tuple[bool, ...] | None = None
    positions: Sequence[int] = ()
    keys: Sequence[Key] = ()
    optimizer: str = ""
    inner_s: float = 0.0
    nonfinite: str = ""
    scale: float = 1.0
    skipped: int = 0


@dataclass(frozen=True)
class StepResult(StepQuantities):
    """The result of an update, with what its trainers measured.

    Attributes:
        step: the version that the update made.
        samples: samples applied up to and including this update.
        lr: learning rate of each parameter group with which the update was made.
        seconds: training time so far.
        apply_s: duration of the optimizer step.
        held_s: time that the push waited on the server.
        dropped: the push arrived too late, or the step was skipped, and was not applied; the other values are those of
            the current version.
        optimizer: as in ``StepReport``.
    """

    step: int
    samples: int
    loss: float
    lr: tuple[float, ...]
    seconds: float
    apply_s: float = 0.0
    held_s: float = 0.0
    dropped: bool = False
    optimizer: str = ""


@dataclass
class RecordWindow:
    """What was measured of the steps since the last ``train`` record.

    It is part of a checkpoint, so a resumed run writes the same record as a run that was not stopped.

    Attributes:
        samples_before, seconds_before: samples and training time at the beginning of the window.
        steps: their number.
        step, samples, seconds, lr: values of the last step.
        by_optimizer: steps and the sum of losses of each optimizer, where there are several.
        totals: the sum of each quantity, by its name.
    """

    samples_before: int = 0
    seconds_before: float = 0.0
    steps: int = 0
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    lr: tuple[float, ...] = ()
    by_optimizer: dict[str, tuple[int, float]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)

    def add(self, result: StepResult) -> None:
        for one in QUANTITIES:
            self.totals[one.name] = self.totals.get(one.name, 0.0) + getattr(result, one.name)
        self.steps += 1
        if result.optimizer:
            steps, losses = self.by_optimizer.get(result.optimizer, (0, 0.0))
            self.by_optimizer[result.optimizer] = steps + 1, losses + result.loss
        self.step, self.samples, self.lr = result.step, result.samples, result.lr
        self.seconds = result.seconds

    def next_window(self) -> RecordWindow:
        """Return the window that begins where this one ends."""
        return RecordWindow(self.samples, self.seconds)

    def to_record(self, epoch: int) -> Record:
        elapsed_s = self.seconds - self.seconds_before
        is_timed = self.samples_before > 0 and elapsed_s > 0  # the first window includes the start of the run
        measured = {
            one.record: self.totals[one.name] / self.steps
            for one in QUANTITIES
            if not one.needs or self.totals[one.needs]
        }
        losses = {name: losses / steps for name, (steps, losses) in sorted(self.by_optimizer.items())}
        return make_record(
            "train",
            self.step,
            **measured,
            samples=self.samples,
            epoch=epoch,
            lr=list(self.lr),
            samples_per_second=(self.samples - self.samples_before) / elapsed_s if is_timed else None,
            step_ms=elapsed_s / self.steps * 1e3 if is_timed else None,
            seconds=self.seconds,
            **({"losses": losses} if losses else {}),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores: plain values."""
        own = dict(vars(self))
        totals = own.pop("totals")
        return own | {one.stored: totals.get(one.name, 0.0) for one in QUANTITIES}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> RecordWindow:
        """Return the window of a ``state_dict()``, also of one that lacks the quantities of later versions."""
        own = dict(state)
        return cls(totals={one.name: own.pop(one.stored, 0.0) for one in QUANTITIES}, **own)


class DurationHistogram:
    """Counts of durations in logarithmic bins of 2 %, so that quantiles over processes and runs merge exactly."""

    _GROWTH = math.log(1.02)
    _SMALLEST_S = 1e-6

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}
        self.count = 0
        self.total_s = 0.0
        self.max_s = 0.0

    def add(self, duration_s: float) -> None:
        index = round(math.log(max(duration_s, self._SMALLEST_S) / self._SMALLEST_S) / self._GROWTH)
        self.bins[index] = self.bins.get(index, 0) + 1
        self.count += 1
        self.total_s += duration_s
        self.max_s = max(self.max_s, duration_s)

    def merge(self, other: DurationHistogram) -> None:
        for index, count in other.bins.items():
            self.bins[index] = self.bins.get(index, 0) + count
        self.count += other.count
        self.total_s += other.total_s
        self.max_s = max(self.max_s, other.max_s)

    def quantile_s(self, q: float) -> float:
        """Return the quantile ``q`` (0 to 1) in seconds, within 1 %."""
        if not self.count:
            return 0.0
        indices = sorted(self.bins)
        cumulated = list(accumulate(self.bins[index] for index in indices))
        place = bisect.bisect_left(cumulated, q * self.count)
        return min(self._SMALLEST_S * math.exp(indices[min(place, len(indices) - 1)] * self._GROWTH), self.max_s)

    def summary_ms(self) -> dict[str, float]:
        """Return mean, quantiles and maximum in milliseconds, as in summary.json."""
        mean_s = self.total_s / self.count if self.count else 0.0
        quantiles = {f"p{int(q * 100)}": round(self.quantile_s(q) * 1e3, 4) for q in (0.5, 0.9, 0.95, 0.99)}
        return {"mean": round(mean_s * 1e3, 4), **quantiles, "max": round(self.max_s * 1e3, 4)}


class PhaseClock:
    """Attributes the time of a trainer to the phases of a step; the phases sum to the step.

    Call ``lap(phase)`` at the end of each phase and ``end_step`` at the end of the step. Time of a step that did not
    end is not counted. ``on_step`` is called at the end of each step with ``time.perf_counter()``, the duration in
    seconds, and the seconds of each phase and of ``hidden``.
    """

    def __init__(self) -> None:
        self.on_step: Callable[[float, float, Mapping[str, float]], None] | None = None
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.hidden_s = 0.0
        self.steps = DurationHistogram()
        self._last = time.perf_counter()
        self._begin_step()

    @property
    def total_s(self) -> float:
        """Seconds of all steps, and of the laps of the present one."""
        return self.steps.total_s + self.present_s

    @property
    def present_s(self) -> float:
        """Seconds of the laps of the present step."""
        return sum(self._step.values())

    def lap(self, phase: str) -> None:
        """Attribute the time since the last lap to ``phase``."""
        now = time.perf_counter()
        self._step[phase] += now - self._last
        self._last = now

    def lap_shared(self, phase: str, **others_s: float) -> None:
        """Like ``lap``, but attribute known parts of the time to other phases."""
        before = self._step[phase]
        self.lap(phase)
        for other, seconds in others_s.items():
            share_s = min(seconds, self._step[phase] - before)
            self._step[phase] -= share_s
            self._step[other] += share_s

    def add_hidden(self, seconds: float) -> None:
        """Add overlapped time: communication of this step that ran concurrently with the phases (``hidden``)."""
        self._step_hidden_s += seconds

    def end_step(self) -> float:
        """End the step and return its duration in seconds. The time since the last lap counts as ``wait``."""
        self.lap("wait")
        duration_s = self._last - self._step_started
        self.steps.add(duration_s)
        for phase, seconds in self._step.items():
            self.seconds[phase] += seconds
        self.hidden_s += self._step_hidden_s
        if self.on_step is not None:
            self.on_step(self._last, duration_s, {**self._step, "hidden": self._step_hidden_s})
        self._begin_step()
        return duration_s

    def skip(self) -> None:
        """Discard the time since the last step: a validation, a checkpoint, the start, a wait without a step."""
        self._last = time.perf_counter()
        self._begin_step()

    def _begin_step(self) -> None:
        self._step = dict.fromkeys(PHASES, 0.0)
        self._step_hidden_s = 0.0
        self._step_started = self._last


class RunClock:
    """The training time of a run with a server: that in which any of its trainers trains, after ``before`` seconds.

    The clocks of trainers (``PhaseClock``) cannot be compared: they begin at different times, and stand still while a
    trainer validates alone.
    """

    def __init__(self, before: float) -> None:
        self._before = before
        self._began = time.perf_counter()
        self._stopped: float | None = self._began

    @property
    def seconds(self) -> float:
        now = time.perf_counter() if self._stopped is None else self._stopped
        return self._before + now - self._began

    def start(self, ago_s: float = 0.0) -> None:
        """Continue, without the time since it was stopped but for the last ``ago_s`` of it; nothing if it runs."""
        if self._stopped is not None:
            began = max(self._stopped, time.perf_counter() - ago_s)
            self._before, self._began, self._stopped = self.seconds, began, None

    def stop(self) -> None:
        """Stand still from now on."""
        self._stopped = time.perf_counter() if self._stopped is None else self._stopped

    def undo_stop(self) -> None:
        """Continue as if it had not been stopped."""
        self._stopped = None


@dataclass
class TrainerTotals:
    """Totals of one trainer over a run, sent to rank 0 at the end.

    ``samples_before`` of the samples were served before the last resume; ``seconds`` and ``steps`` count from it on. A
    default that is None is what is not known of a trainer that did not reach the end.
    """

    trainer_index: int
    samples: int = 0
    samples_before: int = 0
    batches: int = 0
    inner_steps: int = 0
    samples_left: int | None = None
    seconds: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)
    steps: DurationHistogram = field(default_factory=DurationHistogram)
    buffer: dict[str, Any] = field(default_factory=dict)
    peak_rss_mb: float | None = None
    wire_bytes: int | None = None
    core_wait_share: float | None = None
    threads: int | None = None
    tables: dict[str, TableUse] = field(default_factory=dict)  # by name


TABLE_RANGES = 64
"""The use of a table is counted in so many ranges of rows, of the same size."""


@dataclass
class TableUse:
    """What the gradients of a trainer had of an embedding table.

    ``rows`` are those of the table, and ``ends`` where the rows of each server end. ``ids`` are all that were used, and
    the rest counts the different rows of each step: by range of the table, and by server.
    """

    rows: int
    row_bytes: int
    ends: list[int]
    ids: int = 0
    by_range: list[int] = field(default_factory=lambda: [0] * TABLE_RANGES)
    by_server: list[int] = field(default_factory=list)

    @property
    def used_rows(self) -> int:
        """How many different rows the steps used, in all."""
        return sum(self.by_range)

    def add(self, num_ids: int, rows: npt.NDArray[np.int64]) -> None:
        """Count a gradient for ``rows``, ascending, that was computed with so many ids."""
        import numpy as np  # here, as a launcher imports this module

        self.ids += num_ids
        edges = np.arange(TABLE_RANGES + 1) * self.rows // TABLE_RANGES
        in_ranges = np.diff(np.searchsorted(rows, edges)).tolist()
        self.by_range = [total + count for total, count in zip(self.by_range, in_ranges, strict=True)]
        in_servers = np.diff(np.searchsorted(rows, [0, *self.ends])).tolist()
        self.by_server = [a + b for a, b in zip(self.by_server or [0] * len(self.ends), in_servers, strict=True)]


# The cure of a message that misses a name among the values of a validation.
LOG_IN_VALIDATION = "return it there, in a LightningModule by self.log in validation_step: other hooks log records only"


@dataclass
class WeightedSums:
    """Sums of validation metrics, weighted by samples, so that parts of several trainers merge to the exact mean.

    Metrics that are no means are objects with ``compute()`` and ``merge_state(other)``, which are merged too.
    """

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    samples: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    _computed: dict[str, float] = field(default_factory=dict)

    def add(self, means: Mapping[str, float], samples: int) -> None:
        for name, value in means.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * samples
            self.counts[name] = self.counts.get(name, 0) + samples
        self.samples += samples

    def merge(self, other: WeightedSums) -> None:
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + other.counts[name]
        self.samples += other.samples
        self._computed.clear()
        for name, metric in other.metrics.items():
            if name in self.metrics:
                self.metrics[name].merge_state(metric)
            else:
                self.metrics[name] = metric

    def means(self) -> dict[str, float]:
        """Return the mean of each sum, and what each metric computes: once, as that may take long.

        Raises:
            TaskError: a metric does not compute one number.
        """
        for name, metric in self.metrics.items():
            if name not in self._computed:
                self._computed[name] = _compute(name, metric)
        means = {name: value / self.counts[name] for name, value in self.sums.items() if self.counts[name]}
        return means | self._computed


def _compute(name: str, metric: Any) -> float:
    value = metric.compute()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
        raise TaskError(
            f"validation_step: {name}: {type(metric).__name__}.compute() must return one number ({error}); reduce it "
            "there, or return several metrics"
        ) from error


def merge_sums(parts: Mapping[int, WeightedSums]) -> WeightedSums:
    """Merge the sums of all trainers in the order of their indices, so that the result does not depend on timing."""
    total = WeightedSums()
    for index in sorted(parts):
        total.merge(parts[index])
    return total


class CoreWait:
    """Measures the share of the time from now on for which this thread could run and had no core."""

    def __init__(self) -> None:
        self._began, self._waited_ns = time.perf_counter(), core_wait_ns()

    def share(self) -> float | None:
        """Return it, for the thread that made this object; None where the kernel does not count."""
        now, waited_ns = time.perf_counter(), core_wait_ns()
        if waited_ns is None or self._waited_ns is None or now <= self._began:
            return None
        return min((waited_ns - self._waited_ns) / 1e9 / (now - self._began), 1.0)


def peak_rss_mb() -> float:
    """Return the peak resident memory of this process, in units of 2**20 bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# What trainers log in the same step, combined into one value.

Reduction = Literal["mean", "sum", "max", "none"]


def _sum(values: Iterable[float]) -> float:
    """Return the exact sum, or what adding the values gives where ``fsum`` raises."""
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # huge values, and infinities of both signs
        return sum(values)


def largest(values: Iterable[float]) -> float:
    """Return the maximum, which is NaN where one is, as that of torch; Python's depends on their order then."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


_OPERATIONS: dict[str, Callable[[list[tuple[float, float]]], float]] = {
    "mean": lambda pairs: _sum(v * w for v, w in pairs) / (math.fsum(w for _, w in pairs) or math.nan),
    "sum": lambda pairs: _sum(value for value, _ in pairs),
    "max": lambda pairs: largest(value for value, _ in pairs),
}
REDUCTIONS = (*_OPERATIONS, "none")


@dataclass
class _Logged:
    """The values of one name in one step, each with its weight."""

    operation: str
    values: dict[int, list[tuple[float, float]]] = field(default_factory=dict)


class LogReducer:
    """Combines the records ``log`` of each step, of trainers that take their steps together, or of one.

    A value is complete once each trainer has recorded something of a later step. Trainers that log nothing in a step
    have no part in its value. Those that are logged once the run has decided to end (``at_end``) are complete with it:
    a checkpoint of that step may be written before the records of all trainers are here.
    """

    def __init__(self, trainers: Iterable[int]) -> None:
        self._reached = dict.fromkeys(trainers, -1)  # the step of each trainer's newest record
        self._complete = -1  # values of steps below it are complete
        self._pending: dict[tuple[int, str], _Logged] = {}
        self._at_end: dict[tuple[int, str], _Logged] = {}

    def add(self, record: Mapping[str, object]) -> list[Record]:
        """Take a record of any kind, in the order in which its trainer made it; return what is complete now."""
        trainer, step = record.get("trainer"), record.get("step")
        if not isinstance(trainer, int) or not isinstance(step, int) or trainer not in self._reached:
            return []
        self._reached[trainer] = max(self._reached[trainer], step)
        operation = record.get("reduce")
        if record["kind"] == "log" and operation in _OPERATIONS:
            pending = self._at_end if record.get("at_end") else self._pending
            logged = pending.setdefault((step, str(record["name"])), _Logged(str(operation)))
            pair = float(record["value"]), float(record.get("weight", 1))  # type: ignore[arg-type]
            logged.values.setdefault(trainer, []).append(pair)
        before, self._complete = self._complete, min(self._reached.values())
        # Otherwise nothing is complete that was not before; all that is pending would be looked at for each record.
        return self.flush(self._complete) if self._complete != before or step < before else []

    def flush(self, before: float = math.inf) -> list[Record]:
        """Return the values of all steps below ``before``, in their order, also those that lack trainers.

        Without ``before`` the run has ended.
        """
        done = sorted(key for key in self._pending if key[0] < before)
        records = [self._to_record(*key, self._pending.pop(key)) for key in done]
        if before == math.inf:
            records += [self._to_record(*key, self._at_end.pop(key)) for key in sorted(self._at_end)]
        return records

    def remove(self, trainer: int) -> None:
        """No longer wait for a trainer: it is lost."""
        if len(self._reached) > 1:
            self._reached.pop(trainer, None)

    def restore(self, trainer: int) -> None:
        """Wait for a trainer again, from the steps on that the others make now."""
        self._reached.setdefault(trainer, max(self._reached.values()))

    @staticmethod
    def _to_record(step: int, name: str, logged: _Logged) -> Record:
        # In the order of trainers, not of arrival: the same numbers are added in every run.
        pairs = [pair for trainer in sorted(logged.values) for pair in logged.values[trainer]]
        value = _OPERATIONS[logged.operation](pairs)
        fields = {"name": name, "value": value, "reduce": logged.operation, "trainers": len(logged.values)}
        return make_record("reduced", step, rank=0, **fields)


_P95 = Fraction(95, 100)  # exact, so that rounding never moves the rank, however many gradients there are


class StalenessHistogram:
    """How often gradients of each trainer were applied at each staleness (versions)."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[int]] = {}
        self._window: Counter[int] = Counter()

    def add(self, trainer_index: int, staleness: int) -> None:
        """Count an applied gradient."""
        self._counts.setdefault(trainer_index, Counter())[staleness] += 1
        self._window[staleness] += 1

    def summary(self) -> dict[str, Any]:
        """Return ``mean``, ``p95`` (the smallest value that 95 % do not exceed), ``max`` and ``histogram``.

        ``histogram`` maps the staleness, as a string, to the number of gradients, in ascending order. Without any
        gradient the figures are 0 and it is empty.
        """
        return summarize_staleness(sum(self._counts.values(), Counter()))

    def by_trainer(self) -> list[dict[str, Any]]:
        """Return the summary of each trainer that has pushed a gradient, with its index as ``trainer``."""
        return [{"trainer": index, **summarize_staleness(counts)} for index, counts in sorted(self._counts.items())]

    def pop_window(self) -> dict[str, Any]:
        """Return the summary of what was added since the last call."""
        window, self._window = self._window, Counter()
        return summarize_staleness(window)

    def state_dict(self) -> dict[str, Any]:
        """Return all counts, as JSON values."""
        counts = {str(index): _to_json(counts) for index, counts in sorted(self._counts.items())}
        return {"counts": counts, "window": _to_json(self._window)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all counts by those of ``state_dict()``."""
        self._counts = {int(index): _from_json(histogram) for index, histogram in state["counts"].items()}
        self._window = _from_json(state.get("window", {}))


def _to_json(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(value): counts[value] for value in sorted(counts)}


def _from_json(histogram: Mapping[str, int]) -> Counter[int]:
    return Counter({int(value): count for value, count in histogram.items()})


def summarize_staleness(counts: Mapping[int, int]) -> dict[str, Any]:
    """Return the summary of gradients by staleness, as of ``StalenessHistogram``."""
    total = sum(counts.values())
    if not total:
        return {"mean": 0.0, "p95": 0, "max": 0, "histogram": {}}
    mean = sum(value * count for value, count in counts.items()) / total
    not_above, p95 = 0, 0
    for p95 in sorted(counts):
        not_above += counts[p95]
        if not_above >= _P95 * total:
            break
    return {"mean": mean, "p95": p95, "max": max(counts), "histogram": _to_json(counts)}
