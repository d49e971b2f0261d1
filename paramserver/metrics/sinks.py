"""Sinks of records: the interface, a fan-out to several sinks, and JSON lines, the source of every report."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from paramserver.errors import StorageError, TaskError, kind_and_message
from paramserver.fileio import end_last_line, json_text, then_resume
from paramserver.importing import describe_user_error, load_object

_log = logging.getLogger(__name__)

# A run whose records no longer reach the file that users read ends after this time.
_CHECK_EVERY_S = 1.0

Record = Mapping[str, Any]
"""``{"time": seconds since the epoch, "kind": str, "step": int or None, "rank": int, ...}``"""


class Sink(AbstractContextManager["Sink"]):
    """Receives the records of a run, one at a time. Derive from it to write records to another place.

    ``logging.sinks`` names such classes. Rank 0 makes an object of each, without arguments, once per start of the run.
    The first record is of the kind ``start``: open files and connections then. Records are written while training
    waits, one at a time, by several threads. docs/sinks.md has examples.

    Attributes:
        required: a failure of this sink ends the run. Other sinks are dropped when they fail.

    Example::

        >>> class LossPrinter(Sink):
        ...     def write(self, record):
        ...         if record["kind"] == "train":
        ...             print(record["step"], record["loss"])
        ...     def close(self):
        ...         pass
        >>> with LossPrinter() as sink:
        ...     sink.write({"kind": "train", "step": 1, "loss": 0.5})
        1 0.5
    """

    required = False

    @abstractmethod
    def write(self, record: Record) -> None:
        """Write one record. Neither modify it nor keep a reference: the caller may modify it afterwards."""

    def check(self) -> None:
        """Raise if records that were written are lost. Called before a run is reported as completed."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close. Further calls do nothing."""

    def __exit__(self, *exception: object) -> None:
        self.close()


class FanOut(Sink):
    """Writes every record to several sinks. Thread-safe: all sinks receive all records in the same order.

    A sink that fails is reported once and dropped. The failure of a required sink is raised, after the other sinks have
    received the record. ``on_failure`` is called, without a lock, with a sentence about a sink that failed. Sinks that
    are ``kept`` are closed by others, and not here.
    """

    def __init__(self, sinks: Sequence[Sink], kept: Sequence[Sink] = ()) -> None:
        self.on_failure: Callable[[str], None] = _log.warning
        self._sinks = [*sinks, *kept]
        self._kept = kept
        self._dropped: list[Sink] = []
        self._lock = threading.Lock()

    def write(self, record: Record) -> None:
        reports: list[str] = []
        with self._lock:
            # The lock is held while all sinks write, so that they agree on the order. A copy of the list: a sink that
            # fails is removed from it.
            failures = [self._write_to(sink, record, reports) for sink in list(self._sinks)]
        self._report(reports, failures)

    def _report(self, reports: Sequence[str], failures: Sequence[Exception | None]) -> None:
        """Report what failed, and raise the first failure of a required sink.

        Without the lock, and once every other sink has the record: a handler of the error may write another one.
        """
        for text in reports:
            self.on_failure(text)
        for failure in failures:
            if failure is not None:
                raise failure

    def _write_to(self, sink: Sink, record: Record, reports: list[str]) -> Exception | None:
        """Return the failure of a required sink; drop any other sink that fails, and report it."""
        try:
            sink.write(record)
        except Exception as error:  # noqa: BLE001 - training continues without this sink
            if sink.required:
                return _storage_error(sink, error)
            self._sinks.remove(sink)
            if sink not in self._kept:
                self._dropped.append(sink)
            reports.append(f"{_describe(sink, error)} and gets no more records")
        return None

    def check(self) -> None:
        with self._lock:
            for sink in self._sinks:
                if sink.required:
                    sink.check()

    def _own(self) -> list[Sink]:
        return [sink for sink in self._sinks if sink not in self._kept]

    @property
    def has_own(self) -> bool:
        """Whether there is a sink left that is not kept."""
        return bool(self._own())

    def end_one(self, record: Record) -> None:
        """Write the last record to a sink that is not kept, and close it. To be called until there is none.

        The first sink comes last: its record is made when all others have closed, or failed.
        """
        reports: list[str] = []
        with self._lock:
            sink = self._own()[-1]
            failures = [self._write_to(sink, record, reports)]
            if sink in self._sinks:
                self._sinks.remove(sink)
                failures.append(_close(sink, reports))
        self._report(reports, failures)

    def close(self) -> None:
        with self._lock:
            # Emptied under the lock: a record that another thread writes from now on has none of these sinks, and a
            # second call does nothing.
            own, self._sinks = self._own(), [sink for sink in self._sinks if sink in self._kept]
            dropped, self._dropped = self._dropped, []
            for sink in dropped:
                _close(sink, [])  # its failure was reported when it was dropped
            reports: list[str] = []
            failures = [_close(sink, reports) for sink in own]
        try:
            self._report(reports, failures)
        finally:
            with self._lock:
                self._sinks = []


def make_sinks(references: Sequence[str], folders: Sequence[Path] = ()) -> list[Sink]:
    """Return the sinks of one's own that ``logging.sinks`` names. The name ``csv`` is not one of them.

    Raises:
        TaskError: there is no such class, it is not derived from `Sink`, or making one raised.
    """
    made = []
    for reference in references:
        if reference == "csv":
            continue
        found = load_object(reference, "logging.sinks", folders)
        if not (isinstance(found, type) and issubclass(found, Sink)):
            raise TaskError(
                f"logging.sinks ({reference}) is {found!r}; it must be derived from paramserver.metrics.Sink"
            )
        try:
            made.append(found())
        except Exception as error:  # user code
            raise TaskError(
                f"logging.sinks ({reference}): {found.__name__}() raised {describe_user_error(error)}; "
                "it must take no arguments, and have the methods write(record) and close()"
            ) from error
    return made


def _describe(sink: Sink, error: Exception) -> str:
    return f"{type(sink).__name__} failed ({kind_and_message(error)})"


def _close(sink: Sink, reports: list[str]) -> Exception | None:
    try:
        sink.close()
    except Exception as error:  # noqa: BLE001 - the other sinks must be closed too
        if sink.required:
            return _storage_error(sink, error)
        reports.append(f"{_describe(sink, error)} when it was closed; its last records may be lost")
    return None


def _storage_error(sink: Sink, error: Exception) -> StorageError:
    """Return the error by which a run ends in good order, also where a sink of the user raises another one."""
    if isinstance(error, StorageError):
        return error
    failure = StorageError(f"{type(sink).__name__} failed, which is required ({describe_user_error(error)})")
    failure.__cause__ = error
    return failure


class JsonLines(Sink):
    """Appends each record to ``path`` as one line of strict JSON (see `json_text`) and flushes it.

    Raises:
        StorageError: the file cannot be opened or written, or it was removed, moved or replaced; noticed by ``check``,
            and by ``write`` within a second.
    """

    required = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Append mode: a resumed run continues the file, and each write lands at its end.
            self._file = path.open("a+b")
            end_last_line(self._file)
            self._identity = self._identity_of(os.fstat(self._file.fileno()))
        except OSError as error:
            raise self._write_error(error) from error
        self._checked = time.monotonic()

    def write(self, record: Record) -> None:
        line = json_text(record) + "\n"
        try:
            self._file.write(line.encode())
            # To the kernel, not to the disk: a record outlives a killed process, and a sync in each step would cost too
            # much.
            self._file.flush()
        except OSError as error:
            raise self._write_error(error) from error
        if time.monotonic() - self._checked > _CHECK_EVERY_S:
            self.check()

    def check(self) -> None:
        # An open file accepts writes after its name is gone, so only the path shows that the records cannot be read.
        try:
            found = self._identity_of(self.path.stat())
        except OSError as error:
            raise self._lost_error(str(error)) from error
        if found != self._identity:
            raise self._lost_error("another file has its name")
        self._checked = time.monotonic()

    @staticmethod
    def _identity_of(status: os.stat_result) -> tuple[int, int]:
        return status.st_dev, status.st_ino

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._write_error(error) from error

    def _lost_error(self, what: str) -> StorageError:
        return StorageError(
            f"metrics file {self.path} must stay in place while the run writes it, and was removed, moved or replaced "
            f"({what}); records are lost: move it back and --resume, or start again"
        )

    def _write_error(self, error: OSError) -> StorageError:
        return StorageError(
            f"metrics file {self.path} must be writable ({error}); free space there or choose another logging.run_dir, "
            f"{then_resume(self.path)}"
        )


def read_records(metrics_file: Path, step: int | None = None) -> Iterator[dict[str, Any]]:
    """Iterate over the records of a file of `JsonLines`, of one ``step`` where it is given; none without the file.

    Lines that a crash tore are left out.
    """
    wanted = (line for line in read_lines(metrics_file) if step is None or head_of(line)[1] == step)
    return (record for line in wanted if (record := parse_record(line)) is not None)


def read_lines(metrics_file: Path) -> Iterator[str]:
    """Iterate over the lines of a file of `JsonLines`; none without the file."""
    if metrics_file.is_file():
        # ``replace``: a crash may leave bytes that are no UTF-8, in a line that is torn.
        with metrics_file.open(encoding="utf-8", errors="replace") as lines:
            yield from lines


def parse_record(line: str) -> dict[str, Any] | None:
    """Return the record in a line of `JsonLines`; None where a crash tore the line."""
    try:
        record = with_numbers(json.loads(line))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


# What ``make_record`` begins with.
_HEAD = re.compile(r'\{"time": [\d.e+-]+, "kind": "(\w+)", "step": (\d+|null)[,}]')


def head_of(line: str) -> tuple[str | None, int | None]:
    """Return the kind and the step of the record in a line of `JsonLines`, where possible without parsing it.

    That takes a fifth of the time: a run that continues looks at all of its records. A line that a crash tore may have
    both, or has none.
    """
    if (head := _HEAD.match(line)) is not None:
        kind, step = head.groups()
        return kind, None if step == "null" else int(step)
    record = parse_record(line) or {}
    return record.get("kind"), record.get("step")


def with_numbers(value: Any) -> Any:
    """Undo what ``json_text`` makes of numbers that are not finite."""
    if not isinstance(value, dict):
        return value
    texts = {f"{key}_text" for key, item in value.items() if item is None} & value.keys()
    return {
        key: float(value[f"{key}_text"]) if f"{key}_text" in texts else with_numbers(item)
        for key, item in value.items()
        if key not in texts
    }
