"""How a rank tells its supervisor what happens: one JSON line per event through a pipe."""

from __future__ import annotations

import errno
import json
import os
import threading
import traceback
from typing import Any

from paramserver.errors import ParamserverError
from paramserver.sinks import Record, Sink

# What the supervisor's display and its summary need; the rest stays in the run's folder.
_SHOWN = frozenset({"start", "note", "expected", "train", "validation", "phase", "end"})


class Channel(Sink):
    """The writing end of a rank's pipe. Closing the process closes it, so the supervisor always learns of the end."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._file = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def write(self, record: Record) -> None:
        if record["kind"] in _SHOWN:
            self._send("record", dict(record))

    def failed(self, error: BaseException) -> None:
        """Report what ends this rank."""
        self._send("error", describe(error))

    def _send(self, event: str, body: dict[str, Any]) -> None:
        with self._lock:
            try:
                self._file.write(json.dumps({"event": event, "body": body}, default=str) + "\n")
            except (BrokenPipeError, ValueError):
                return  # the supervisor is gone; the signal that its death sends ends this rank in good order

    def close(self) -> None:
        """Nothing: the pipe stays open for an error until the process ends."""


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES)


def first_error(error: BaseException) -> BaseException:
    """What ended the run. A disk that refuses its last files too is met on the way out, and is not the first error."""
    while True:
        refusal = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(refusal, OSError) or refusal.errno not in _DISK or refusal.__context__ is None:
            return error
        error = refusal.__context__


def describe(error: BaseException) -> dict[str, Any]:
    """An error as plain values: kind, message, exit code, and the traceback where that says more than the message."""
    error = first_error(error)
    exit_code = error.exit_code if isinstance(error, ParamserverError) else 1
    text = str(error) if isinstance(error, ParamserverError) else f"{type(error).__name__}: {error}"
    says_all = exit_code != 1 or (isinstance(error, ParamserverError) and error.says_all)
    lines = [] if says_all else traceback.format_exception(error)
    return {"kind": type(error).__name__, "message": text, "exit_code": exit_code, "traceback": "".join(lines)}
