"""What a coordinator that takes the place of another one must know beyond the last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paramserver.errors import TrainingError
from paramserver.online.protocol import Header, MessageKind


class CoordinatorJournal:
    """A file of the run folder to which a coordinator appends while it runs, one JSON object per line.

    It has the port, so that clients from outside find the next coordinator at the address that they know, and which of
    them have opened and closed a simulation: HELLO, BYE and FINISH. A client that has sent BYE may be gone, and does
    not send its samples again; one that has not is waited for.

    A line is written before the client gets its answer. It survives the end of the process, not that of the host. If it
    ``continues``, another coordinator of this run wrote the file, else it is started anew. ``port`` is that of the last
    coordinator, or None, and ``received`` has the HELLO, BYE and FINISH of earlier ones.
    """

    def __init__(self, file: Path, continues: bool) -> None:
        self._file = file
        self.port: int | None = None
        self.received: list[Header] = []
        if not continues:
            file.unlink(missing_ok=True)
        elif file.exists():
            # The last line is incomplete where the process died while it wrote: its client got no answer.
            for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
                try:
                    self._read(json.loads(line))
                except (ValueError, LookupError, TypeError, RecursionError) as error:
                    raise TrainingError(
                        f"{file}, line {number}, must be what the coordinator wrote there ({error}); the simulations "
                        "cannot continue: start the run again, from a checkpoint with --resume"
                    ) from error

    def _read(self, entry: dict[str, Any]) -> None:
        if "port" in entry:
            self.port = entry["port"]
        else:
            self.received.append(Header(**{**entry, "kind": MessageKind[entry["kind"]]}))

    def record_port(self, port: int) -> None:
        self._append({"port": port})

    def record(self, header: Header) -> None:
        self._append({**header._asdict(), "kind": header.kind.name})

    def _append(self, entry: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
