"""Records as lines of JSON: the truth from which every report is made."""

import os
from pathlib import Path

from paramserver.checkpoint.disk import json_text
from paramserver.errors import TrainingError
from paramserver.sinks.base import Record, Sink

__all__ = ["JsonLines"]


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
