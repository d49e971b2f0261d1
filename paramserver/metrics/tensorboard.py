"""The sinks of curves, TensorBoard and a table (csv), and the mapping of records to the tags of both."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.errors import StorageError
from paramserver.metrics.records import LOSS, MEASURED
from paramserver.metrics.sinks import Record, Sink, read_records

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


Scalar = tuple[str, float]

_TRAIN = {
    LOSS.record: LOSS.tag,
    "samples_per_second": "samples_per_second",
    "step_ms": "step_ms",
    **{one.record: one.tag for one in MEASURED},
}
_STALENESS = {"mean": "server/staleness", "p95": "server/staleness_p95", "max": "server/staleness_max"}
_BUFFER = ("population", "unseen", "put_wait_s", "get_wait_s")
_STREAM = ("received", "refused", "stale", "duplicated", "partial", "clients")
_FIELD = ("mean", "deviation")
_CHECKPOINT = {key: f"checkpoint/{key}" for key in ("seconds", "pause_ms")}
# Tags of curves that are not logged, and other names in their rows, as patterns.
_GROUPS = ("buffer", "fields", "rounds", "stream", "train/loss", "valid")
_RESERVED = "|".join(
    (*_TRAIN.values(), *_CHECKPOINT.values(), r"lr(/\d+)?", "server/staleness.*", "kind", "samples", "step", "time")
) + "".join(f"|{group}/.*" for group in _GROUPS)


def _train(record: Record) -> Iterator[Scalar]:
    yield from _tagged(record, _TRAIN)
    for name, loss in record.get("losses", {}).items():
        yield f"train/loss/{name}", loss
    yield from _rates(record, "lr")


def _rates(record: Record, tag: str) -> Iterator[Scalar]:
    rates = record.get("lr") or []
    for index, rate in enumerate(rates):
        # One group has the plain tag, which is the same for all runs that are compared.
        yield tag if len(rates) == 1 else f"{tag}/{index}", rate


def _validation(record: Record) -> Iterator[Scalar]:
    for name, value in record["values"].items():
        yield f"valid/{name}", value


def _buffer(record: Record) -> Iterator[Scalar]:
    place = f"trainer-{record['trainer']}"
    yield from _tagged(record, {key: f"buffer/{place}/{key}" for key in _BUFFER})
    stream = record.get("stream") or {}
    yield from _tagged(stream, {key: f"stream/{place}/{key}" for key in _STREAM})
    for name, statistics in (stream.get("fields") or {}).items():
        yield from _tagged(statistics, {key: f"fields/{name}/{place}/{key}" for key in _FIELD})


def _logged(record: Record) -> Iterator[Scalar]:
    reduction = record.get("reduce")
    if reduction in (None, "none") or record["kind"] == "reduced":  # else a record of the kind reduced follows
        trainer = f"/trainer-{record['trainer']}" if reduction == "none" else ""
        yield unreserved(record["name"]) + trainer, record["value"]


def unreserved(name: str, separator: str = "/") -> str:
    """Return the tag of a number that a task logs: ``log/`` is put before what may be the tag of another curve."""
    is_reserved = re.fullmatch(_RESERVED.replace("/", separator), name, re.DOTALL)
    return f"log{separator}{name}" if is_reserved else name


def _staleness(record: Record) -> Iterator[Scalar]:
    yield from _tagged(record, _STALENESS)
    for one in record.get("trainers", ()):
        yield f"server/staleness/trainer-{one['trainer']}", one["mean"]


def _tagged(record: Record, tags: dict[str, str]) -> Iterator[Scalar]:
    for key, tag in tags.items():
        # A missing figure has no point: 0 would look like a measurement.
        if record.get(key) is not None:
            yield tag, record[key]


_KINDS: dict[str, Callable[[Record], Iterator[Scalar]]] = {
    "train": _train,
    "validation": _validation,
    "buffer": _buffer,
    "inner": lambda record: _rates(record, f"rounds/trainer-{record['trainer']}/lr"),
    "checkpoint": lambda record: _tagged(record, _CHECKPOINT),
    "log": _logged,
    "reduced": _logged,
    "staleness": _staleness,
}


def scalars(record: Record) -> list[Scalar]:
    """Return the scalars of ``record`` as tags and values; none for kinds that have no curve.

    Example::

        >>> scalars({"time": 0.0, "kind": "validation", "step": 1, "values": {"loss": 0.5, "accuracy": 0.75}})
        [('valid/loss', 0.5), ('valid/accuracy', 0.75)]
    """
    kind = _KINDS.get(record["kind"])
    # A number of a list that is not finite is None when it is read from metrics.jsonl.
    return [(tag, value) for tag, value in kind(record) if value is not None] if kind else []


def _histograms(record: Record) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Histograms of whole numbers as tags and values, given as value to count."""
    if record["kind"] == "buffer" and record.get("seen_histogram"):
        yield f"buffer/trainer-{record['trainer']}/seen", record["seen_histogram"]
    if record["kind"] == "buffer" and (staleness := (record.get("stream") or {}).get("staleness")):
        yield f"stream/trainer-{record['trainer']}/staleness", staleness
    if record["kind"] == "staleness":
        yield "server/staleness_histogram", record["histogram"]
        for one in record["trainers"]:
            yield f"server/staleness_histogram/trainer-{one['trainer']}", one["histogram"]


def _histogram_fields(histogram: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of TensorBoard's histogram, with one bucket per value that occurs and one per gap."""
    counts = {int(value): count for value, count in histogram.items()}
    # Halfway between whole numbers, on both sides of each value: a gap of any width is one empty bucket.
    limits = sorted({value + side for value in counts for side in (-0.5, 0.5)})[1:]
    return {
        "min": min(counts),
        "max": max(counts),
        "num": sum(counts.values()),
        "sum": sum(value * count for value, count in counts.items()),
        "sum_squares": sum(value * value * count for value, count in counts.items()),
        "bucket_limit": limits,
        "bucket": [counts.get(int(limit - 0.5), 0) for limit in limits],
    }


class TensorBoard(Sink):
    """Writes TensorBoard event files. TensorBoard is imported at the first record that needs it.

    The events of earlier sessions are invalid from ``purge_step`` on, the step from which the run continues. ``kept``
    are the records of it that stay valid, which are written again: TensorBoard purges whole steps.

    Raises:
        StorageError: the folder was removed or moved; noticed by the next ``write``.
    """

    def __init__(self, folder: Path, purge_step: int | None = None, kept: Sequence[Record] = ()) -> None:
        self.folder = folder
        self.purge_step = purge_step
        self._kept = kept
        self._writer: SummaryWriter | None = None

    def write(self, record: Record) -> None:
        if record["kind"] == "start":
            self._get_writer()  # the import takes a tenth of a second, which should not delay a step
            return
        points = scalars(record)
        if not points:
            return
        writer = self._get_writer()
        # Here, because the writer's own thread would print a traceback.
        if not self.folder.is_dir():
            raise StorageError(
                f"TensorBoard folder {self.folder} must stay in place while the run writes it, and was removed or "
                "moved; its events are lost, their records are in metrics.jsonl"
            )
        from tensorboard.compat.proto.summary_pb2 import (  # type: ignore[import-untyped]
            HistogramProto,
            Summary,
        )

        # One event for all of them: each event wakes the thread of the writer, in the middle of a step.
        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in points]
        for tag, histogram in _histograms(record):
            values.append(Summary.Value(tag=tag, histo=HistogramProto(**_histogram_fields(histogram))))
        # The time of the record: records of trainers are written later than they were made.
        writer._get_file_writer().add_summary(  # type: ignore[no-untyped-call]
            Summary(value=values), record.get("step"), walltime=record["time"]
        )

    def _get_writer(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # ``purge_step`` makes TensorBoard hide the events of steps that a resumed run makes again.
            self._writer = SummaryWriter(str(self.folder), purge_step=self.purge_step)
            for record in self._kept:
                self.write(record)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


_COLUMNS = ("step", "time", "name", "value")


class Csv(Sink):
    """Writes each number that has a curve as a row ``step,time,name,value``; the names are TensorBoard's tags.

    The file begins with the records that ``metrics_file`` has already: a resumed run continues its table, without the
    steps after the checkpoint. ``path`` is replaced if it exists, and ``metrics_file`` (metrics.jsonl) may be missing.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path, metrics_file: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8", newline="")
        except OSError as error:
            raise StorageError(f"{path} must be writable ({error}); move it away, or leave csv out") from error
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(_COLUMNS)
        for record in read_records(metrics_file):
            self._write_rows(record)
        self._file.flush()

    def write(self, record: Record) -> None:
        self._write_rows(record)
        self._file.flush()  # to the kernel: rows outlive a killed process

    def _write_rows(self, record: Record) -> None:
        for name, value in scalars(record):
            self._writer.writerow((record.get("step"), record["time"], name, float(value)))

    def close(self) -> None:
        self._file.close()
