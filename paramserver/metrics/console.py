"""Sinks that print: `Progress` shows the progress of a run, `Console` adds the start and the closing summary."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any, TextIO

from paramserver.config import Config
from paramserver.limits import Limits
from paramserver.metrics.records import MEASURED
from paramserver.metrics.sinks import Record, Sink
from paramserver.metrics.summary import summary_text

_INTERVAL_S = 2.0
# A run whose limit is further away ends in another way, and ``timedelta`` has a limit.
_LONGEST_SHOWN_S = 10 * 365 * 86400.0
_DEFAULT_COLUMNS, _DEFAULT_ROWS = 110, 24
# Those of tqdm without its rate: the records have one.
_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}{postfix}]"
_BAR_WITHOUT_TOTAL = "{n_fmt} {unit} [{elapsed}{postfix}]"


class Console(Sink):
    """Prints the start of a run, its notes and progress, and the closing summary.

    With ``logging.progress: off`` only the progress is left out. ``changes`` are lines about a resumed run: printed at
    its start, so not where the resume is refused.
    """

    def __init__(self, config: Config, stream: TextIO, changes: Sequence[str] = ()) -> None:
        self._config = config
        self._stream = stream
        self._changes = changes
        self._first_step = 0
        self._progress = Progress(stream, "off")  # until the start
        self._run_dir = ""
        self._started = False

    def write(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "start":
            self._on_start(record)
        elif kind == "note":
            self._print(record["text"])
        elif kind == "phase" and not self._started:
            self._started = True
            phases = record["phases"]
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
            self._print(f"first step after {sum(phases.values()):.1f} s ({parts})")
        self._progress.write(record)
        if kind == "end":
            self._on_end(record)

    def _on_start(self, record: Record) -> None:
        self._progress.close()  # of ranks that start again after a loss
        self._run_dir, self._first_step = record["run_dir"], record.get("first_step", record["step"])
        for line in self._changes:
            self._print(line)
        ranks = "1 process" if record["world_size"] == 1 else f"{record['world_size']} processes"
        verb = "resumed" if record.get("resumed") else "started"
        self._print(f"{record['name']}: {verb}, mode {record['mode']}, {ranks}, in {self._run_dir}")
        self._progress = Progress(
            self._stream,
            self._config.logging.progress,
            record["total_steps"],
            record["total_samples"],
            step_name="round" if self._config.training.has_rounds else "step",
        )

    def _on_end(self, record: Record) -> None:
        """Print the closing summary, or only the reason where the run ended before its first step."""
        summary = record["summary"]
        if record["step"] > self._first_step:
            self._print(summary_text(summary, self._run_dir, self._first_step))
        elif summary["status"] == "completed":
            # Nothing that a config limits: simulations have sent nothing, or too little for a step of all trainers.
            limits = "training.max_epochs, max_steps, max_samples or max_seconds"
            raises = f"; to continue, raise the limit that is reached ({limits})"
            training, reached = self._config.training, Limits.of(self._config.training)
            is_limited = (
                training.max_epochs is not None
                or reached.reached(record["step"], summary["samples"]) is not None
                or reached.reached_time(summary["seconds"]) is not None
            )
            cure = raises if is_limited and not self._config.simulations else ""
            self._print(f"completed at step {record['step']}, no step was made: {summary['reason']}{cure}")

    def _print(self, text: str) -> None:
        self._progress.clear()
        # Closed, full or gone, as after the end of a terminal, or no stream at all: that ends no run.
        with suppress(AttributeError, OSError, ValueError):
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._progress.close()


class Progress(Sink):
    """Shows steps, loss, samples per second, the last validation and the remaining time.

    A closed stream or a broken pipe stops the display, never the run.

    Args:
        style: ``auto``: one live line (with tqdm, if installed) if ``stream`` is a terminal, and a bar in a notebook;
            otherwise a plain line at most every 2 seconds and one per validation. ``on``: the live line on any stream.
            ``off``: nothing.
        total_steps: ``training.max_steps``, if it is a limit. Where neither total is given, a record "expected" may
            set a total of samples before the first step.
        step_name: what a step is called.
        total_samples: ``training.max_samples``, if it is a limit; used where ``total_steps`` is None.
    """

    def __init__(
        self,
        stream: TextIO,
        style: str,
        total_steps: int | None = None,
        total_samples: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        step_name: str = "step",
    ) -> None:
        by_samples = total_steps is None and total_samples is not None
        self._unit, self._total = ("samples", total_samples) if by_samples else (step_name, total_steps)
        self._step_name = step_name
        self._done: int | None = None  # not known before the first record of this session that has it
        self._train = ""
        self._validation = ""
        self._display: _PlainLines | _LiveLine | None = None
        if style != "off":
            tqdm = _tqdm() if style == "on" or _is_terminal(stream) or _is_notebook() else None
            self._display = _PlainLines(stream, clock) if tqdm is None else _LiveLine(tqdm, stream)

    def write(self, record: Record) -> None:
        if record["kind"] == "train":
            self._done = record["samples" if self._unit == "samples" else "step"]
            self._train = _train_text(record)
            self._show(record["step"], urgent=False)
        elif record["kind"] == "validation":
            if self._unit != "samples":
                self._done = record["step"]
            values = (f"{name} {_format_number(value)}" for name, value in record["values"].items())
            self._validation = "valid " + " ".join(values)
            self._show(record["step"], urgent=True)
        elif record["kind"] == "expected" and self._total is None:
            self._unit, self._total = "samples", record["total_samples"]
        elif record["kind"] == "end":
            self.close()

    def _show(self, step: int, urgent: bool) -> None:
        text = ", ".join(part for part in (self._train, self._validation) if part)
        # A validation before the first record ``train`` has a step, and not the samples that were applied.
        count = (self._step_name, step, None) if self._done is None else (self._unit, self._done, self._total)
        self._call_display(lambda display: display.show(*count, text, urgent))

    def clear(self) -> None:
        """Remove the live line, if any, before another text is printed. The next record shows it again."""
        self._call_display(lambda display: display.clear())

    def close(self) -> None:
        self._call_display(lambda display: display.close())
        self._display = None

    def _call_display(self, call: Callable[[_PlainLines | _LiveLine], None]) -> None:
        if self._display is None:
            return
        try:
            call(self._display)
        except (OSError, ValueError):  # a closed stream raises ValueError
            self._display.abandon()
            self._display = None


def _train_text(record: Record) -> str:
    rate = record.get("samples_per_second")
    losses = record.get("losses") or {"": record.get("loss")}
    loss = "train loss " + " ".join(f"{name} {_format_number(value)}".strip() for name, value in losses.items())
    shown = [one.progress.format(record[one.record]) for one in MEASURED if one.progress and one.record in record]
    return ", ".join([loss, *shown, *(() if rate is None else (f"{rate:.0f} samples/s",))])


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # closed, or no whole stream
        return False


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # not a terminal, no descriptor, or closed
        return 0


def _is_notebook() -> bool:
    """Return whether this process runs the cells of a notebook. One that only starts such processes does not."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _tqdm() -> Any:
    """Return the class of tqdm, without its monitor thread, which never ends; None where tqdm is not installed."""
    try:
        # In a notebook a widget, if ipywidgets is installed.
        tqdm = import_module("tqdm.auto" if _is_notebook() else "tqdm").tqdm
    except ImportError:
        return None
    return type("_Bar", (tqdm,), {"monitor_interval": 0})


class _PlainLines:
    """Plain lines, for logs and pipes. ``abandon`` is called instead of ``close`` when the stream is closed."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._start: tuple[float, int] | None = None
        self._shown_s: float | None = None
        self._newest: tuple[str, int, int | None, str] | None = None  # that was not shown yet

    def show(self, unit: str, done: int, total: int | None, text: str, urgent: bool) -> None:
        now_s = self._clock()
        if self._start is None and total is not None:
            self._start = now_s, done
        if not urgent and self._shown_s is not None and now_s - self._shown_s < _INTERVAL_S:
            self._newest = unit, done, total, text
            return
        self._newest = None
        if not urgent:
            self._shown_s = now_s
        of_total = "" if total is None else f"/{total}"
        print(f"{unit} {done}{of_total}: {text}{self._remaining(now_s, done, total)}", file=self._stream, flush=True)

    def _remaining(self, now_s: float, done: int, total: int | None) -> str:
        if total is None or self._start is None:
            return ""
        start_s, start = self._start
        if done <= start or now_s <= start_s:
            return ""
        left_s = max(0, total - done) * (now_s - start_s) / (done - start)
        return f", {timedelta(seconds=round(left_s))} left" if left_s < _LONGEST_SHOWN_S else ""

    def clear(self) -> None:
        pass

    def close(self) -> None:
        if self._newest is not None:  # the last line has the numbers of the summary
            self.show(*self._newest, urgent=True)

    def abandon(self) -> None:
        pass


class _LiveLine:
    """One line that is redrawn in place, by tqdm; otherwise as ``_PlainLines``."""

    def __init__(self, tqdm: Any, stream: TextIO) -> None:
        # A terminal of unknown size reports 0 columns and rows, for which tqdm draws nothing.
        fits = _columns(stream) or _is_notebook()
        size = {"dynamic_ncols": True} if fits else {"ncols": _DEFAULT_COLUMNS, "nrows": _DEFAULT_ROWS}
        self._options = {"file": stream, **size}
        self._tqdm = tqdm
        self._bar: Any = None

    def show(self, unit: str, done: int, total: int | None, text: str, urgent: bool) -> None:
        if self._bar is not None and self._bar.unit != unit:
            self._bar.close()
            self._bar = None
        if self._bar is None:  # created here: rate and remaining time count from the first step shown
            form = _BAR if total else _BAR_WITHOUT_TOTAL
            self._bar = self._tqdm(initial=done, bar_format=form, unit=unit, total=total, **self._options)
        self._bar.set_postfix_str(text, refresh=urgent)
        self._bar.update(done - self._bar.n)

    def clear(self) -> None:
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()

    def abandon(self) -> None:
        if self._bar is not None:
            self._bar.disable = True  # otherwise its finalizer writes to the closed stream
