"""The CSV sink: the curves of a run as one table, for pandas and spreadsheets."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paramserver.errors import StorageError
from paramserver.metrics.sinks import Record, Sink
from paramserver.metrics.tensorboard import scalars

_COLUMNS = ("step", "time", "name", "value")


class Csv(Sink):
    """Writes each number that has a curve as a row ``step,time,name,value``; the names are TensorBoard's tags.

    The file begins with the records that ``metrics_file`` has already: a resumed run continues its table, without the
    steps after the checkpoint.

    Args:
        path: the file; replaced if it exists.
        metrics_file: metrics.jsonl of the run; it may be missing.

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
        for record in _records_in(metrics_file):
            self._write_rows(record)
        self._file.flush()

    def write(self, record: Record) -> None:
        self._write_rows(record)
        self._file.flush()  # to the kernel: rows outlive a killed process

    def _write_rows(self, record: Record) -> None:
        for name, value in scalars(record):
            if value is not None:
                self._writer.writerow((record.get("step"), record["time"], name, float(value)))

    def close(self) -> None:
        self._file.close()


def _records_in(metrics_file: Path) -> Iterator[dict[str, Any]]:
    if not metrics_file.is_file():
        return
    with metrics_file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = _with_numbers(json.loads(line))
            except ValueError:  # torn by a crash
                continue
            if isinstance(record, dict):
                yield record


def _with_numbers(value: Any) -> Any:
    """Undo what ``json_text`` makes of numbers that are not finite."""
    if not isinstance(value, dict):
        return value
    texts = {f"{key}_text" for key, item in value.items() if item is None} & value.keys()
    return {
        key: float(value[f"{key}_text"]) if f"{key}_text" in texts else _with_numbers(item)
        for key, item in value.items()
        if key not in texts
    }
