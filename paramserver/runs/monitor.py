"""Rank 0's figures of a run: steps, samples, losses, validations, staleness, and the records of them."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paramserver.checkpoint import BestMetric
from paramserver.config import Config, mode_of, num_servers_of, num_trainers_of
from paramserver.consistency import Stop
from paramserver.errors import StorageError, TaskError
from paramserver.limits import Limits, end_in_words, is_due
from paramserver.metrics import FanOut
from paramserver.metrics.records import (
    LOG_IN_VALIDATION,
    QUANTITIES,
    LogReducer,
    Record,
    RecordWindow,
    StalenessHistogram,
    StepResult,
    TrainerTotals,
    WeightedSums,
    make_record,
    peak_rss_mb,
)
from paramserver.metrics.summary import totals_of
from paramserver.runs.losses import LossLog
from paramserver.runs.rundir import write_json

_log = logging.getLogger(__name__)


class RunMonitor:
    """Counts what a run does, writes its records and, at the end, its summary. Thread-safe.

    There is one, on rank 0. The server (``rpc``) or the trainer of rank 0 (``ddp``, ``local``) reports every update to
    it; a checkpoint stores its ``state_dict``.
    """

    def __init__(self, config: Config, sink: FanOut, summary_file: Path, losses: LossLog | None = None) -> None:
        self.config = config
        self.losses = losses
        # Of the newest update.
        self.step = self.samples = self.epoch = 0
        self.epoch_end = 0  # samples, applied or skipped, with which the epoch ends; 0 if that is not known
        self.epoch_samples: int | None = None  # of the next one, for all trainers; None if there is only one epoch
        self.seconds = 0.0
        self.loss: float | None = None
        # Samples and training time before this start, or since the last loss of it.
        self.first_samples, self.first_seconds = 0, 0.0
        self.resumes = 0
        # Why the checkpoint was made from which the run resumed; None in a new run, and where it does not say.
        self.resumed_reason: str | None = None
        # Of the newest ``train`` record, by the names in the summary; losses by optimizer where there are several.
        self.measured: dict[str, float | None] = {one.summary: None for one in QUANTITIES if one.summary}
        self.train_losses: dict[str, float] = {}
        self.validation: dict[str, float] = {}
        # Of parameters and gradients, by the index of each trainer; empty in a mode without communication.
        self.transports: dict[int, str] = {}
        self.improved_step: int | None = None  # the step of the newest validation that was the best
        self.staleness = StalenessHistogram()  # of the gradients that the server applied
        self.dropped_pushes = 0  # those that came too late for it
        self.skipped = 0  # samples of steps that were skipped
        best = config.checkpoint.best
        # The best value of ``checkpoint.best.metric``; None where none is configured.
        self.best = None if best is None else BestMetric(best.metric, best.mode, config.training.min_delta)
        self.resume_note: str | None = None
        self.failure: str | None = None  # why the run fails after one more checkpoint
        self.sink_failures: list[str] = []  # sentences about sinks that failed and were dropped
        self._sink = sink
        self._summary_file = summary_file
        # Re-entrant: a method that holds it writes records, and ``record`` takes it.
        self._lock = threading.RLock()
        self._limits = Limits.of(config.training)
        self._window = RecordWindow()
        self.validated_step: int | None = None  # of the newest validation; after a resume, of the newest that was due
        self._due_validated_step: int | None = None
        self._reported_step = 0  # of the last validation, also of one without samples, or of the checkpoint
        trainers = num_trainers_of(config)
        has_several = trainers > 1 or config.training.batches_per_step > 1  # values of one name in a step
        self._reducer = LogReducer(range(trainers)) if has_several else None

    # Records.

    def record(self, record: Record) -> None:
        """Write a record to the sink, and after it the values over all trainers that it completes."""
        with self._lock:
            if record["kind"] == "transport":
                self.transports[record["trainer"]] = record["transport"]
            self._sink.write(record)
            if self._reducer is not None:
                self._write_all(self._reducer.add(record))

    def _write_all(self, records: Sequence[Record]) -> None:
        for record in records:
            self._sink.write(record)

    def note(self, text: str) -> None:
        """Record one sentence for the user."""
        self.record(make_record("note", self.step, rank=0, text=text))

    def sink_failed(self, text: str) -> None:
        """Record that a sink failed, which does not end the run."""
        self.sink_failures.append(text)
        self.note(text)

    def run_started(self, record: Record) -> None:
        """Write the first record of this session, and after it what the user should know about resuming."""
        if self.losses is not None:
            with self._lock:  # a trainer may be lost at the same time
                self.losses.session_began(self.step, self.samples)
        self.record(record)
        if self.resume_note is not None:
            self.note(self.resume_note)

    def expect_samples(self, epoch_samples: int | None) -> None:
        """Set ``epoch_samples``, and record how many samples the run will apply, for sinks that show progress."""
        self.epoch_samples = epoch_samples
        self.epoch_end = self.epoch_end or (self.epoch + 1) * (epoch_samples or 0)
        if (total := self.expected_samples) is not None:
            self.record(make_record("expected", self.step, rank=0, total_samples=total))

    @property
    def expected_samples(self) -> int | None:
        """How many samples the run applies until ``training.max_epochs``; None if that is not known."""
        passes = self.config.training.max_epochs
        if self.epoch_samples is None or passes is None:
            return None
        return self.epoch_end + (passes - self.epoch - 1) * self.epoch_samples

    def trainer_lost(self, trainer_index: int, text: str, returns: bool = False) -> None:
        """Record that a trainer is lost; ``returns`` as in ``add_fault``."""
        with self._lock:
            self.record(make_record("lost", self.step, trainer=trainer_index, text=text))
            if self._reducer is not None:
                self._reducer.remove(trainer_index)
            self.add_fault(text, returns)

    def add_fault(self, text: str, returns: bool = True) -> None:
        """Record a loss for the summary; see ``LossLog.add_fault``."""
        with self._lock:
            if self.losses is not None:
                self.losses.add_fault(self.step, text, returns)

    def trainer_replaced(self, trainer_index: int, incarnation: int) -> None:
        """Record that a process took the place of a lost trainer."""
        with self._lock:
            if self._reducer is not None:
                self._reducer.restore(trainer_index)
            self.record(make_record("joined", self.step, trainer=trainer_index, incarnation=incarnation))
            if self.losses is not None:
                self.losses.add_restart()

    def write_logged(self, step: float = math.inf) -> None:
        """Write what trainers have logged up to ``step``, over those that have logged it."""
        if self._reducer is not None:
            with self._lock:
                self._write_all(self._reducer.flush(step + 1))

    # Progress.

    def gradients_applied(self, staleness: Iterable[tuple[int, int]]) -> None:
        """Count gradients of an update, each with its trainer and its staleness in versions. With a server only."""
        with self._lock:
            for trainer_index, versions in staleness:
                self.staleness.add(trainer_index, versions)

    def update_applied(self, result: StepResult) -> None:
        """Count an update."""
        with self._lock:
            self.step, self.samples, self.loss = result.step, result.samples, result.loss
            self.seconds = result.seconds
            if self.losses is not None:
                self.losses.update_made(self.seconds - self.first_seconds)
            self._window.add(result)
            if result.step % self.config.logging.log_every == 0:
                self._close_window()

    def push_dropped(self) -> None:
        """Count a gradient that came too late to be applied."""
        with self._lock:
            self.dropped_pushes += 1

    def step_skipped(self, trainers: Sequence[int], samples: int, cause: str, scale: float) -> None:
        """Record that a step of some trainers was skipped; ``cause`` and ``scale`` as in ``StepReport``."""
        with self._lock:
            self.skipped += samples
            # Of the step that was not made: a run that resumes from the last one makes it again.
            fields = {"trainers": list(trainers), "samples": samples, "cause": cause}
            fields |= {"scale": scale} if self.config.training.scales_loss else {}
            self.record(make_record("skipped", self.step + 1, rank=0, **fields))

    def _close_window(self) -> None:
        record = self._window.to_record(self.epoch)
        self.measured = {one.summary: record.get(one.record) for one in QUANTITIES if one.summary}
        self.train_losses = record.get("losses", {})
        self.record(record)
        window = self.staleness.pop_window()
        if window["histogram"]:
            each = self.staleness.by_trainer()
            self.record(make_record("staleness", self.step, **window, dropped=self.dropped_pushes, trainers=each))
        self._window = self._window.next_window()

    def enter_epoch(self, epoch: int, end: int) -> None:
        """Set the epoch of the updates that follow, and ``epoch_end``."""
        self.epoch, self.epoch_end = epoch, end

    def record_validation(self, step: int, sums: WeightedSums, since: int | None = None) -> bool:
        """Record a validation over all samples, and return whether it is the best one so far.

        Raises:
            TaskError: it lacks the metric of ``checkpoint.best``.
        """
        with self._lock:
            self._reported_step = max(self._reported_step, step)
            values = sums.means()
            if step == self.validated_step:
                return False
            is_scheduled = is_due(step, self.config.training.validate_every, since=since)
            improved = self.best is not None and self._improves(self.best, sums, step, is_scheduled)
            # Also without samples: a schedule by validation was stepped.
            self.validated_step = step
            if is_scheduled:
                self._due_validated_step = step
            if not sums.samples:
                return False
            self.validation = values
            self.improved_step = step if improved else self.improved_step
            fields = {"values": values, "samples": sums.samples, "seconds": self.seconds, "best": improved}
            self.record(make_record("validation", step, **fields))
            return improved

    def lacks_validation(self, step: int) -> bool:
        """Return whether a validation that was due by ``step`` is not made yet: a resumed run would not make it."""
        every = self.config.training.validate_every
        return every > 0 and step // every > self._reported_step // every

    def _improves(self, best: BestMetric, sums: WeightedSums, step: int, is_scheduled: bool) -> bool:
        if best.metric not in (values := sums.means()):
            returned = f"{', '.join(sorted(values)) or 'nothing'}; {LOG_IN_VALIDATION}"
            raise TaskError(
                f"checkpoint.best.metric ({best.metric}) must be among what validation_step returns; it returns "
                f"{returned if sums.samples else 'nothing: validation_source gave no samples'}"
            )
        return best.update(values[best.metric], step, is_scheduled)

    def stop_reason(self, seconds: float) -> str | None:
        """Return why the run must end after ``seconds`` of training: a failure, patience or time; None to continue.

        Every rank checks the other limits.
        """
        if self.failure is not None:
            return self.failure
        patience = self.config.training.patience
        if patience is not None and self.best is not None and self.best.without_improvement >= patience:
            return f"no improvement of {self.best.metric} in training.patience ({patience}) validations"
        return None if self._limits.max_seconds is None else self._limits.reached_time(seconds)

    @property
    def stop(self) -> Stop:
        """What ``stop_reason`` requests: a run that fails ends as after a signal, with a checkpoint to resume from."""
        return Stop.LIMIT if self.failure is None else Stop.SIGNAL

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores: plain numbers, strings, lists and dicts."""
        with self._lock:
            return {
                "step": self.step,
                "samples": self.samples,
                "seconds": self.seconds,
                "epoch": self.epoch,
                "epoch_end": self.epoch_end,
                "resumes": self.resumes,
                "loss": self.loss,
                "measured": dict(self.measured),
                "train_losses": dict(self.train_losses),
                "validation": dict(self.validation),
                # A run that resumes makes one anew that was made only because this one ended, if it ends there too.
                "validated_step": self._due_validated_step,
                "best": None if self.best is None else self.best.state_dict(),
                "window": self._window.state_dict(),
                "staleness": self.staleness.state_dict(),
                "dropped": self.dropped_pushes,
                **({"skipped": self.skipped} if self.skipped else {}),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, and count this as a resume. ``resume_note`` is set where the best metric changed."""
        self.step, self.samples, self.seconds = state["step"], state["samples"], state["seconds"]
        self.first_samples, self.first_seconds = self.samples, self.seconds
        self.validation = dict(state["validation"])
        self.validated_step = self._due_validated_step = state.get("validated_step")
        self._reported_step = self.step
        self.epoch, self.epoch_end = state["epoch"], state.get("epoch_end", 0)
        self.skipped = state.get("skipped", 0)
        self.resumes, self.resumed_reason = state["resumes"] + 1, state.get("reason")
        # For the summary, if this session makes no update: there was none after the checkpoint.
        self.loss, self.train_losses = state.get("loss"), state.get("train_losses", {})
        self.measured |= state.get("measured", {})
        if "staleness" in state:
            self.staleness.load_state_dict(state["staleness"])
            self.dropped_pushes = state["dropped"]
        own = state.get("window")
        self._window = RecordWindow(self.samples, self.seconds) if own is None else RecordWindow.of_state(own)
        if self.best is not None and state["best"] is not None:
            self.resume_note = self.best.load_state_dict(state["best"])

    # The end.

    def suspend(self) -> None:
        """Write what trainers have logged, and close the sink; the run continues with another monitor."""
        try:
            self.write_logged()
        finally:
            self._sink.close()
            self._end_session()

    def _end_session(self) -> None:
        if self.losses is not None:
            with self._lock:
                self.losses.end_session()

    def close(
        self,
        status: str,
        totals: Sequence[TrainerTotals],
        reason: str = "",
        error: str | None = None,
        *,
        checkpoint: str | None = None,
        checkpoint_pauses_s: Sequence[float] = (),
        simulations: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Write the last records and the summary, and close the sink.

        Training stopped for ``checkpoint_pauses_s``, one value for each checkpoint of this session.

        Raises:
            StorageError: records are lost, or a file cannot be written; the summary then has the status ``failed``. Not
                raised for a ``status`` of ``failed``: the caller raises what made the run fail.
        """
        failures: list[StorageError] = []

        def attempt(write: Callable[[], None]) -> None:
            try:
                write()
            except StorageError as failure:
                failures.append(failure)

        def summarized() -> dict[str, Any]:
            # A run whose records are lost fails of the first error, unless it failed before.
            failed = (status, error) if status == "failed" or not failures else ("failed", str(failures[0]))
            figures = self._figures(totals)
            # docs/interface.md, section 5. An unknown value is None.
            return {
                "status": failed[0],
                "reason": end_in_words(reason, self.config.training, figures["num_trainers"], figures["samples_left"]),
                **figures,
                "checkpoint": checkpoint,
                "sink_failures": list(self.sink_failures),
                "checkpoint_pause_ms": [round(pause_s * 1e3, 3) for pause_s in checkpoint_pauses_s],
                "error": failed[1],
                **(simulations or {}),
            }

        def outcome() -> Record:
            summary = summarized()
            return make_record("end", self.step, status=summary["status"], summary=summary)

        if self._window.steps:
            attempt(self._close_window)
        attempt(self.write_logged)
        attempt(self._sink.check)  # before the summary: a run whose records are lost is not complete
        attempt(lambda: write_json(self._summary_file, summarized()))
        before = summarized()
        while self._sink.has_own:
            attempt(lambda: self._sink.end_one(outcome()))
        summary = summarized()
        if any(summary[name] != before[name] for name in ("status", "sink_failures")):  # a sink failed at its end
            attempt(lambda: write_json(self._summary_file, summary))
        # To the console or the supervisor only now: for them it is the outcome of the run.
        attempt(lambda: self._sink.write(outcome()))
        attempt(self._sink.close)
        attempt(self._end_session)  # the last: it adds the time of this session to that of the earlier ones
        if failures and status != "failed":
            raise failures[0]
        for failure in failures:
            _log.error("%s", failure)
        return summary

    def _figures(self, totals: Sequence[TrainerTotals]) -> dict[str, Any]:
        """Return the figures of the summary that this monitor has counted, and those of trainers."""
        seconds, first_samples, recovery_s = self._time_of_start(totals)
        has_servers, losses = mode_of(self.config).has_servers, self.losses
        staleness = self.staleness.summary() | {"dropped": self.dropped_pushes, "trainers": self.staleness.by_trainer()}
        return {
            "mode": self.config.mode,
            "consistency": self.config.server.consistency if has_servers else None,
            "num_servers": num_servers_of(self.config),
            "num_trainers": num_trainers_of(self.config),
            "transports": {str(i): self.transports[i] for i in sorted(self.transports)} or None,
            "steps": self.step,
            "samples": self.samples,
            **({"samples_skipped": self.skipped} if self.skipped else {}),
            "seconds": seconds,
            "recovery_s": recovery_s,
            "samples_per_second": (self.samples - first_samples) / seconds if seconds else None,
            **self.measured,
            **({"train_losses": self.train_losses} if self.train_losses else {}),
            "last_step_loss": self.loss,
            "validation": self.validation,
            **totals_of(totals),
            "staleness": staleness if has_servers else None,
            "faults": [
                {name: fault[name] for name in ("time", "step", "text")}
                for fault in (() if losses is None else losses.faults)
            ],
            "restarts": 0 if losses is None else losses.restarts,
            "updates_redone": 0 if losses is None else losses.updates_redone,
            "peak_rss_mb": {
                "server": round(peak_rss_mb(), 1) if has_servers else None,
                "trainer": round(max((t.peak_rss_mb or 0.0 for t in totals), default=0.0), 1) or None,
            },
        }

    def _time_of_start(self, totals: Sequence[TrainerTotals]) -> tuple[float, int, float]:
        """Return the training time of this start of the run, its samples before that, and the time after losses."""
        # The clock of a trainer is more recent than its last report, and that of a replaced one is its own.
        own = max([self.seconds - self.first_seconds, *(t.seconds for t in totals)])
        if self.losses is None or self.losses.first_samples is None:
            return own, self.first_samples, 0.0
        return own + self.losses.seconds, self.losses.first_samples, round(self.losses.recovery_s, 3)


def kinds_recorded_later(state: Mapping[str, Any]) -> set[str]:
    """Return the kinds of records of a checkpoint's own step that were written after the checkpoint."""
    kinds: set[str] = set()
    if state.get("window", {}).get("steps"):
        kinds.update(("train", "staleness"))  # of a window that only the end of the run closed
    if state.get("validated_step", state["step"]) != state["step"]:
        kinds.add("validation")  # the last one of a run, if it was not due, or made after a checkpoint that was
    return kinds
