"""What a sink is, and one that passes records on to several.

Records as lines of JSON: the truth from which every report is made.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from paramserver.errors import TrainingError
from paramserver.fileio import json_text

_log = logging.getLogger(__name__)

Record = Mapping[str, Any]
"""``{"time": seconds since the epoch, "kind": str, "step": int or None, "rank": int, ...}``"""


class Sink(ABC):
    """Receives records, one at a time. ``required``: without it a run must not go on."""

    required = False

    @abstractmethod
    def write(self, record: Record) -> None:
        """Take in one record; it is not changed, and may be after the call."""

    @abstractmethod
    def close(self) -> None:
        """Bring everything out. Closing again does nothing."""

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class FanOut(Sink):
    """Passes every record on to all its sinks, from any thread, in one order.

    A sink that fails is reported once and gets nothing more, except a required one: its failure is raised, after the
    others have had the record.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._dropped: list[Sink] = []
        self._lock = threading.Lock()

    def write(self, record: Record) -> None:
        with self._lock:
            failures = [self._passed(sink, record) for sink in list(self._sinks)]
        _raise_first(failures)

    def _passed(self, sink: Sink, record: Record) -> Exception | None:
        """Return the failure of a required sink; drop any other that fails."""
        try:
            sink.write(record)
        except Exception as error:  # noqa: BLE001 - whatever a display does wrong, training goes on
            if sink.required:
                return error
            self._sinks.remove(sink)
            self._dropped.append(sink)
            _log.warning(
                "%s failed (%s: %s) and gets no more records", type(sink).__name__, type(error).__name__, error
            )
        return None

    def close(self) -> None:
        with self._lock:
            sinks, self._sinks = self._sinks, []
            dropped, self._dropped = self._dropped, []
            for sink in dropped:
                _closed(sink, logging.DEBUG)  # its failure was reported when it was dropped
            failures = [_closed(sink, logging.WARNING) for sink in sinks]
        _raise_first(failures)


def _closed(sink: Sink, level: int) -> Exception | None:
    try:
        sink.close()
    except Exception as error:  # noqa: BLE001 - the other sinks are closed all the same
        if sink.required:
            return error
        _log.log(level, "%s failed when closed (%s: %s)", type(sink).__name__, type(error).__name__, error)
    return None


def _raise_first(failures: list[Exception | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure


class JsonLines(Sink):
    """Appends one line per record to ``path`` and flushes it; see ``json_text`` for tensors and numbers not finite.

    Raises:
        TrainingError: the file cannot be opened or written.
    """

    required = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("ab")
            self._torn = self._is_torn()
        except OSError as error:
            raise self._refusal(error) from error

    def _is_torn(self) -> bool:
        """Tell whether a crash left the last line without its end: a new record must not become part of it."""
        if self._file.tell() == 0:
            return False
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"

    def write(self, record: Record) -> None:
        line = json_text(record) + "\n"
        if self._torn:
            line = "\n" + line
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            raise self._refusal(error) from error
        self._torn = False

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"metrics file {self.path} must be writable ({error}); free space there or choose another logging.run_dir, "
            "then --resume"
        )
