"""What a person sees while a run goes on: one live line on a terminal, or a plain line now and then.

What a person sees of a run: where it is, its progress, where the start went, and the closing summary.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TextIO

from paramserver.config import Config
from paramserver.errors import UnsupportedConfiguration
from paramserver.metrics.sinks import Record, Sink
from paramserver.metrics.summary import summary_text

_EVERY_S = 2.0
_COLUMNS = 110


class Progress(Sink):
    """Shows steps, loss, samples per second, the last validation and the time left.

    A closed stream or broken pipe ends the showing, never the run.

    Args:
        stream: usually ``sys.stderr``.
        style: ``auto``: one live line (by tqdm, where it is installed) if ``stream`` is a terminal, otherwise a plain
            line every 2 seconds at most and one per validation. ``on``: the live line on any stream. ``off``: nothing.
        total_steps: ``training.max_steps``, if it is a limit; where neither total is given, a record "expected" may
            bring one in samples before the first step.
        total_samples: ``training.max_samples``, if it is one; counted where ``total_steps`` is None.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        style: str,
        total_steps: int | None = None,
        total_samples: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if style not in ("auto", "on", "off"):
            raise UnsupportedConfiguration(f"logging.progress ({style}) must be auto, on or off; write one of these")
        by_samples = total_steps is None and total_samples is not None
        self._unit, self._total = ("samples", total_samples) if by_samples else ("step", total_steps)
        self._done = 0
        self._train = ""
        self._validation = ""
        self._display: _Display | None = None
        if style != "off":
            self._display = self._display_for(stream, style, clock)

    def _display_for(self, stream: TextIO, style: str, clock: Callable[[], float]) -> _Display:
        tqdm = _tqdm() if style == "on" or _is_terminal(stream) else None
        if tqdm is None:
            return _PlainLines(stream, self._unit, self._total, clock)
        return _LiveLine(tqdm, stream, self._unit, self._total)

    def write(self, record: Record) -> None:
        if record["kind"] == "train":
            self._done = record["samples" if self._unit == "samples" else "step"]
            self._train = _train_text(record)
            self._show(urgent=False)
        elif record["kind"] == "validation":
            if self._unit == "step":
                self._done = record["step"]
            values = (f"{name} {_number(value)}" for name, value in record["values"].items())
            self._validation = "valid " + " ".join(values)
            self._show(urgent=True)
        elif record["kind"] == "expected" and self._total is None and self._display is not None:
            self._unit, self._total = "samples", record["total_samples"]
            self._display.expect(self._unit, self._total)
        elif record["kind"] == "end":
            self.close()

    def _show(self, urgent: bool) -> None:
        text = ", ".join(part for part in (self._train, self._validation) if part)
        self._guarded(lambda display: display.show(self._done, text, urgent))

    def close(self) -> None:
        self._guarded(lambda display: display.close())
        self._display = None

    def _guarded(self, act: Callable[[_Display], None]) -> None:
        if self._display is None:
            return
        try:
            act(self._display)
        except (OSError, ValueError):  # ValueError is what a closed stream raises
            self._display.abandon()
            self._display = None


def _train_text(record: Record) -> str:
    rate = record.get("samples_per_second")
    loss = f"loss {_number(record.get('loss'))}"
    return loss if rate is None else f"{loss}, {rate:.0f} samples/s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # not a terminal, no descriptor, or closed
        return 0


def _tqdm() -> Any:
    """Return tqdm's class without the thread that it otherwise starts for ever; None where it is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return type("_Bar", (tqdm,), {"monitor_interval": 0})


class _Display(Protocol):
    def expect(self, unit: str, total: int) -> None: ...

    def show(self, done: int, text: str, urgent: bool) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class _PlainLines:
    """Plain lines for logs and pipes."""

    def __init__(self, stream: TextIO, unit: str, total: int | None, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._unit = unit
        self._total = total
        self._clock = clock
        self._start: tuple[float, int] | None = None
        self._shown_s: float | None = None

    def expect(self, unit: str, total: int) -> None:
        self._unit, self._total = unit, total

    def show(self, done: int, text: str, urgent: bool) -> None:
        now_s = self._clock()
        if self._start is None:
            self._start = now_s, done
        if not urgent and self._shown_s is not None and now_s - self._shown_s < _EVERY_S:
            return
        if not urgent:
            self._shown_s = now_s
        of_total = "" if self._total is None else f"/{self._total}"
        print(f"{self._unit} {done}{of_total}: {text}{self._left(now_s, done)}", file=self._stream, flush=True)

    def _left(self, now_s: float, done: int) -> str:
        if self._total is None or self._start is None:
            return ""
        start_s, start = self._start
        if done <= start or now_s <= start_s:
            return ""
        left_s = max(0, self._total - done) * (now_s - start_s) / (done - start)
        return f", {timedelta(seconds=round(left_s))} left"

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class _LiveLine:
    """One line that is drawn over and over."""

    def __init__(self, tqdm: Any, stream: TextIO, unit: str, total: int | None) -> None:
        # A terminal that does not tell its width says 0, and tqdm would draw nothing at all.
        width = {"dynamic_ncols": True} if _columns(stream) else {"ncols": _COLUMNS}
        self._options = {"file": stream, "unit": unit, "total": total, **width}
        self._tqdm = tqdm
        self._bar: Any = None

    def expect(self, unit: str, total: int) -> None:
        """Before the first ``show``."""
        self._options |= {"unit": unit, "total": total}

    def show(self, done: int, text: str, urgent: bool) -> None:
        if self._bar is None:  # not before: the rate and the time left count from the first step that is seen
            self._bar = self._tqdm(initial=done, **self._options)
        self._bar.set_postfix_str(text, refresh=urgent)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()

    def abandon(self) -> None:
        if self._bar is not None:
            self._bar.disable = True  # or its finalizer writes to the stream once more


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
