"""What a person sees of a run: where it is, its progress, where the start went, and the closing summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from paramserver.config import Config
from paramserver.report.summary import summary_text
from paramserver.sinks import Progress, Record, Sink


class Console(Sink):
    """Writes to one stream; ``logging.progress: off`` leaves the closing summary of a run that made a step.

    Args:
        config: of the run.
        stream: where to.
        changes: lines that are told when the run goes on, and not where that is refused.
    """

    def __init__(self, config: Config, stream: TextIO, changes: Sequence[str] = ()) -> None:
        self._config = config
        self._stream = stream
        self._changes = changes
        self._first_step = 0
        self._progress: Progress | None = None
        self._run_dir = ""
        self._started = False

    def write(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "start":
            self._begin(record)
        elif kind == "note":
            self._say(record["text"])
        elif kind == "phase" and not self._started:
            self._started = True
            self._say(_start_line(record))
        if self._progress is not None:
            self._progress.write(record)
        if kind == "end":
            self._end(record)

    def _begin(self, record: Record) -> None:
        self._run_dir, self._first_step = record["run_dir"], record["step"]
        for line in self._changes:
            self._say(line)
        ranks = "1 process" if record["world_size"] == 1 else f"{record['world_size']} processes"
        verb = "resumed" if record.get("resumed") else "started"
        self._say(f"{record['name']}: {verb}, mode {record['mode']}, {ranks}, in {self._run_dir}")
        self._progress = Progress(
            self._stream, self._config.logging.progress, record["total_steps"], record["total_samples"]
        )

    def _end(self, record: Record) -> None:
        """The closing summary; where no step was made there is only the reason of a good end to tell."""
        summary = record["summary"]
        if record["step"] > self._first_step:
            self._say(summary_text(summary, self._run_dir))
        elif summary["status"] == "completed":
            self._say(f"completed at step {record['step']}, no step was made: {summary['reason']}")

    def _say(self, text: str) -> None:
        if not self._stream.closed:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()


def _start_line(record: Record) -> str:
    phases = record["phases"]
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
    return f"first step after {sum(phases.values()):.1f} s ({parts})"
