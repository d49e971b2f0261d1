"""The data of one trainer: its source, its buffer, the feeder thread between them, and the batches of each step."""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paramserver.buffers import Buffer, make_buffer
from paramserver.buffers.positions import AppliedPositions, Key
from paramserver.buffers.sample_tree import pack_keys, unpack_keys
from paramserver.buffers.storage import stored_samples
from paramserver.checkpoint import StagingPool, stage_copy
from paramserver.config import Config
from paramserver.consistency import Announcement, Readiness
from paramserver.errors import (
    BufferClosed,
    BufferExhausted,
    CheckpointError,
    ParamserverError,
    SourceError,
    TaskError,
    UnsupportedConfiguration,
)
from paramserver.importing import describe_user_error, name_user_error
from paramserver.online.spec import ReceiverSpec
from paramserver.sources import Feeder, Partition, ResumePosition, Source, make_source
from paramserver.sources.dataset import DatasetSource
from paramserver.sources.factory import Reading, check_watermark, resolve_reading
from paramserver.sources.iterable import IterableSource
from paramserver.sources.loader import WorkerOptions
from paramserver.sources.stream import Stream
from paramserver.task import Task, sampler_of, uses_default_batching

# How long a trainer waits for its data before it announces to the other processes that it is still waiting.
_ANNOUNCE_AFTER_S = 1.0

STARVATION_S = 5.0
"""A trainer whose samples are all too old reports that after so long without a batch."""

# Kinds of sources, what only their states have, and their names.
_KINDS = (
    (DatasetSource, {"length", "rest"}, "a map-style data set"),
    (IterableSource, {"origin"}, "an iterable"),
    (Stream, {"inherited", "log"}, "samples of simulations"),
)

_SUMS = ("puts", "gets", "put_wait_s", "get_wait_s")
_BUFFER_FIGURES = ("population", "unseen", "capacity", *_SUMS)


def collate_of(task: Task, reading: Reading, hook: str) -> Callable[[list[Any]], Any]:
    """Return what makes a batch of samples: ``collate`` of the task, or the ``collate_fn`` of its DataLoader.

    Raises:
        TaskError: there are both.
    """
    if reading.collate is None:
        return task.collate
    if getattr(task.collate, "__func__", None) is not Task.collate:
        raise TaskError(f"{type(task).__name__} has a collate, and the DataLoader of {hook} a collate_fn; remove one")
    return reading.collate


class DataStream:
    """The batches of one trainer's partition. A context manager, which stops the feeder at its exit.

    The training loop calls ``start`` once, then for each step ``available`` and as many ``next_batch`` as the step has,
    then ``stop_feeding``.

    Args:
        sampler_kwargs: how a map-style data set is partitioned, if not by default; see ``DatasetSource``.
        receiver_spec: where samples of simulations arrive; for a source that receives them.
        samples: what ``task.train_source`` returned before; None = call it.
        keeps_served: whether ``pop_served`` is called in each step.
    """

    def __init__(
        self,
        task: Task,
        partition: Partition,
        config: Config,
        sampler_kwargs: dict[str, Any],
        receiver_spec: ReceiverSpec | None = None,
        samples: Any = None,
        keeps_served: bool = True,
    ) -> None:
        self.task = task
        self._keeps_served = keeps_served
        self.pseudo_epochs = config.buffer.pseudo_epochs
        self.timeout_s = config.cluster.timeout_s
        self.trainer_index = partition.index
        samples = task.train_source(partition) if samples is None else samples
        reading = resolve_reading(samples, partition, config, sampler=sampler_of(task, partition))
        config = reading.config
        self.training = config.training
        self._reading = reading
        self._collate = collate_of(task, reading, "train_source")
        self.source: Source = make_source(reading, partition, config, sampler_kwargs)
        if receiver_spec is not None:
            self.source.connect(receiver_spec)
        # Those of the model with which samples were made; None if samples have none.
        self.versions = self.source.versions if isinstance(self.source, Stream) else None
        # Whether samples are served only while their version is new enough (``buffer.max_staleness``).
        self.limits_staleness = self.versions is not None and self.versions.max_staleness is not None
        self._waits_since: float | None = None  # since there is no batch
        self._expired_before = 0  # samples that were removed as too old before the last batch
        self._has_reported = False  # that there is no batch, as samples are too old
        # A data set may draw from the default generators, which are one per process: it is read in processes of its
        # own, or here while nothing else is computed.
        workers = self.training.loader_workers
        self._reads_between_steps = isinstance(self.source, DatasetSource) and not workers
        if workers:
            if reading.init_fn is not None and task.worker_init_fn is not None:
                raise TaskError(
                    f"{type(task).__name__} and the DataLoader of train_source have a worker_init_fn; remove one"
                )
            self.source.use_workers(WorkerOptions(workers, reading.init_fn or task.worker_init_fn, partition.index))
        self._is_ahead = self._is_limited = False
        self._config = config
        self.buffer = self._make_buffer()
        # Whether the batches that follow are known before they are read: of a data set, each sample once.
        is_dataset = isinstance(self.source, DatasetSource)
        self._counts_ahead = self.training.has_rounds and is_dataset and not self.buffer.repeats
        self._held_samples = self._samples_held_for_step()
        check_watermark(config.buffer.watermark, self.source.expected, partition)
        self.feeder = Feeder(self.source, self.buffer, partition.index)
        self._applied = AppliedPositions()
        # Positions of the samples that were served since the last ``pop_served``, per batch; of a stream, their keys.
        self._served: list[npt.NDArray[np.int64]] = []
        self._served_keys: list[Key] = []
        # Of each batch of a stream whose losses are not reported yet, the keys.
        self._computed_keys: deque[list[Key]] = deque()
        self._default_batching = uses_default_batching(task) and reading.collate is None and not reading.gives_batches

    def _make_buffer(self, *entropy: int) -> Buffer:
        config = self._config
        # Independent random streams: trainer i draws the same in every mode, whatever the other trainers do.
        seed = np.random.SeedSequence([config.seed, 1 + self.trainer_index, *entropy]).generate_state(1, np.uint64)
        try:
            buffer = make_buffer(
                config.buffer.kind,
                capacity=config.buffer.capacity,
                seed=int(seed[0]),
                watermark=config.buffer.watermark,
                pseudo_epochs=config.buffer.pseudo_epochs,
                max_bytes=config.buffer.max_bytes,
                min_new_per_batch=config.buffer.min_new_per_batch,
                batch_size=config.training.batch_size,
            )
        except ValueError as error:
            raise UnsupportedConfiguration(f"buffer: {error}") from error
        if self.limits_staleness and self.versions is not None:
            buffer.limit_age(self.versions.step_of)
        return buffer

    def set_version(self, step: int, limit: int | None = None) -> None:
        """Set the version that the next batches are for, which decides which samples are too old.

        ``limit`` is the step of the newest version that samples can have by now; None if it is not known.
        """
        if self.versions is not None:
            self.versions.step, self.versions.limit = step, limit

    def _samples_held_for_step(self) -> int:
        """Return how many samples are in the buffer before a step begins.

        Raises:
            UnsupportedConfiguration: it can never hold them.
        """
        training, capacity = self.training, self._config.buffer.capacity
        if self._counts_ahead:
            return training.batch_size * training.accumulate_batches
        samples = training.batch_size * training.batches_per_step
        if samples > capacity:
            raise UnsupportedConfiguration(
                f"training.local_steps ({training.local_steps}) must be at most "
                f"{capacity // (training.batch_size * training.accumulate_batches)} with a buffer of {capacity}, which "
                f"holds the {samples} samples of a round before it begins; raise buffer.capacity or lower "
                "training.local_steps"
            )
        return samples

    def __enter__(self) -> DataStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.feeder.close()

    def start(self) -> None:
        """Start to read the source in the feeder thread, unless it is a data set that is read between steps."""
        if not self._reads_between_steps:
            self.feeder.start()

    def stop_feeding(self) -> None:
        """Stop the producers of samples. Call it after the last batch; the buffer can still be saved."""
        self.feeder.stop()

    # A step.

    def available(self, timeout_s: float = _ANNOUNCE_AFTER_S) -> Announcement:
        """Return whether the batches of a step are in the buffer; wait up to ``timeout_s`` seconds for them.

        A step takes ``training.batches_per_step`` batches, or as many as are left. READY and DRAINED hold until the
        next batch is taken. Of a round of local steps, the batches of the first one are in the buffer, or of all where
        the number that is left is not known.

        Raises:
            SourceError: the source raised.
        """
        samples, batches = self._held_samples, self.training.batches_per_step
        if self.versions is not None and self.versions.oldest is not None:
            self.buffer.expire(self.versions.oldest)
        try:
            ready = self.buffer.wait_ready(samples, 0.0 if self._reads_between_steps else timeout_s)
            if self._reads_between_steps and not (self._is_ahead and ready):
                self.read_ahead(timeout_s)
                # Not before: with another content of the buffer other samples would be drawn.
                is_held = self._is_ahead and self.buffer.wait_ready(samples, 0.0)
                ready = self._is_ahead = self._is_ahead and (is_held or self.feeder.is_at_limit)
            if not ready:
                if timeout_s > 0:
                    self._report_starvation()
                return Announcement(Readiness.WAITING)
        except BufferExhausted:
            return Announcement(Readiness.DRAINED)
        except BufferClosed:
            self._raise_source_error()
            raise
        left = self.buffer.remaining_servings()
        if left is None and (self._counts_ahead or self.feeder.is_at_limit):
            left = self._due
        if left is not None:
            batches = min(batches, -(-left // self.training.batch_size))
        most = self._reading.largest_batch or self.training.batch_size
        return Announcement(Readiness.READY, batches, samples=batches * most)

    def _report_starvation(self) -> None:
        """Report once, after some seconds without a batch, that samples are removed because they are too old."""
        now, refused = time.monotonic(), self.buffer.num_expired - self._expired_before
        self._waits_since = self._waits_since or now
        if not refused or self._has_reported or now - self._waits_since < STARVATION_S:
            return
        assert isinstance(self.source, Stream)
        assert self.versions is not None
        self._has_reported = True
        self.source.report_starvation(self.versions.describe_starvation(self.trainer_index, refused))

    def read_ahead(self, timeout_s: float = _ANNOUNCE_AFTER_S) -> None:
        """Read the samples of the next step, if they are read between steps. Call it once a step's batches are taken.

        Then the next step can be announced during this one. What is not read within ``timeout_s`` is read by
        ``available``, while the other trainers are informed that this one waits. Samples of a pass that is not entered
        (``enter_epoch``) are counted, and read with their batch.
        """
        if self._reads_between_steps and not self._is_ahead and timeout_s > 0:
            self._is_ahead = self.feeder.read(self._held_samples, timeout_s)

    def enter_epoch(self, epoch: int) -> None:
        """Let samples of passes up to this one be read ahead, and no others: hooks may change the data set before.

        Without a call all passes are. A buffer whose draws depend on what it holds is filled in any case.
        """
        source = self.source
        if self._reads_between_steps and self.buffer.in_order and self.pseudo_epochs == 1:
            assert isinstance(source, DatasetSource)
            # Where all that follows was applied before, by a process that was lost, only a read finds the end.
            self.feeder.limit_ahead(lambda position: source.order.pass_of(position) <= epoch or self._due == 0)
            self._is_limited = True

    def wait_batches(self) -> None:
        """Wait for the batches of the next local step of a round, which has been announced."""
        # Otherwise ``next_batch`` waits, and they arrive meanwhile.
        while self._reads_between_steps and self.available().readiness is Readiness.WAITING:
            pass

    @property
    def received(self) -> int:
        """Samples that have come from simulations, also those that had come before."""
        figures = self.source.figures() if isinstance(self.source, Stream) else {}
        return sum(figures.get(name, 0) for name in ("received", "duplicated"))

    @property
    def blocks(self) -> bool:
        """Whether simulations wait for room in the buffer."""
        return isinstance(self.source, Stream) and self.buffer.put_waits

    def next_batch(self) -> tuple[Any, int]:
        """Return a batch as ``collate`` makes it, of the task or of its DataLoader, and its number of samples.

        Raises:
            SourceError: the source raised.
            TaskError: ``collate`` refused the samples.
        """
        try:
            if self._is_limited:
                self.feeder.read(self.training.batch_size, math.inf, is_ahead=False)
            batch = self.buffer.get_batch(self.training.batch_size, self.timeout_s)
        except BufferClosed:
            self._raise_source_error()
            raise
        self._is_ahead = False
        if self.versions is not None:
            self._waits_since, self._has_reported, self._expired_before = None, False, self.buffer.num_expired
            rows = [one["version"] for one in batch.samples] if batch.stacked is None else batch.stacked["version"]
            self.versions.count_served(np.asarray(rows))
        if isinstance(self.source, Stream):
            self._computed_keys.append(batch.keys)
        if self._keeps_served:
            if self.source.repeatable:
                self._served.append(batch.positions)
            elif isinstance(self.source, Stream):
                self._served_keys += batch.keys
        if self._default_batching and batch.stacked is not None:
            return batch.stacked, batch.size
        found = batch.samples[0] if self._reading.gives_batches else batch.samples
        samples: list[Any] = []
        try:
            samples += map(self.task.process_sample, found)
            return self._collate(samples), len(samples)
        except TaskError as error:
            raise TaskError(f"trainer {self.trainer_index}, batch {self._last_batch_idx}: {error}") from error
        except ParamserverError:
            raise  # a sentence of its own
        except Exception as error:
            where = f"trainer {self.trainer_index}, batch {self._last_batch_idx}"
            keys = batch.keys[0] if self._reading.gives_batches else batch.keys
            if len(samples) < len(found):
                what = f"process_sample raised for {self._name_samples([keys[len(samples)]])}"
            else:
                what = f"collate raised for {self._name_samples(keys)}"
            raise SourceError(f"{where}: {what}: {describe_user_error(error)}") from error

    @property
    def _last_batch_idx(self) -> int:
        return self.buffer.info().batches - 1

    def _name_samples(self, keys: Sequence[Any]) -> str:
        """Name samples by their keys: those of a data set are its indices."""
        what = "sample"
        if isinstance(self.source, DatasetSource):
            what, keys = "index", self.source.indices_of(keys)
        shown = ", ".join(map(str, keys[:8])) + (", ..." if len(keys) > 8 else "")
        return f"{what} {shown}"

    def report_losses(self, losses: Tensor | None) -> None:
        """Report the loss of each sample of the oldest batch that is not reported yet; None = they are not known.

        Raises:
            TaskError: they must be known, as the sampler of the simulations learns from them.
        """
        if not isinstance(self.source, Stream):
            return
        keys = self._computed_keys.popleft()
        if losses is not None:
            self.source.report_losses([simulation for simulation, _ in keys], losses.tolist())
        elif self.source.needs_losses:
            raise TaskError(
                "training_step must give the loss of each sample, as simulations.sampler learns from it; "
                "return a vector with one loss per sample, or call self.log_sample_loss(losses)"
            )

    def pop_served(self) -> tuple[npt.NDArray[np.int64], list[Key]]:
        """Return which samples were served since the last call; call it once a step, for the push.

        They are positions if the source is repeatable; keys if it is a stream, whose order has no meaning in another
        process.
        """
        served, self._served = self._served, []
        keys, self._served_keys = self._served_keys, []
        return np.concatenate(served) if served else np.empty(0, np.int64), keys

    def _raise_source_error(self) -> None:
        """Raise the error for which the feeder closed the buffer, if it did."""
        try:
            self.feeder.raise_error()
        except ValueError as error:  # the buffer's; an error of the source is a SourceError
            raise UnsupportedConfiguration(f"trainer {self.trainer_index}: buffer: {error}") from error

    # Records.

    @property
    def epoch_samples(self) -> int | None:
        """How many samples one pass over the source serves to all trainers together; None if unknown."""
        once = self.source.samples_per_pass
        return None if once is None else once * self.pseudo_epochs

    @property
    def _due(self) -> int | None:
        """How many servings are due, of samples that are read and of those that are not; None if unknown."""
        if self.source.total is None:
            return self.buffer.remaining_servings()
        info = self.buffer.info()
        applied_ahead = sum(self._ahead(info.puts).values())
        return max(self.source.total * self.pseudo_epochs - info.gets - applied_ahead, 0)

    @property
    def samples_left(self) -> int | None:
        """How many servings were due and did not take place; None if their number is unknown."""
        left = self._due
        return None if left and self._reading.gives_batches else left  # of whole batches their number is known

    def record(self) -> dict[str, Any]:
        """Return ``figures``, with mean and deviation of a stream's fields since the last record."""
        figures, fields = self.figures(), self.source.statistics()
        if self.versions is not None and "stream" in figures:
            figures["stream"]["staleness"] = self.versions.pop_histogram()
        return {**figures, "stream": {**figures["stream"], "fields": fields}} if fields else figures

    def figures(self) -> dict[str, Any]:
        """Return the counts and waits of the buffer, and those of a stream."""
        info = self.buffer.info()
        figures: dict[str, Any] = {name: getattr(info, name) for name in _BUFFER_FIGURES}
        figures["seen_histogram"] = {str(times): samples for times, samples in info.seen_histogram.items()}
        if stream := self.source.figures():
            expected = self.source.expected
            batches = None if expected is None else self.buffer.expected_batches(expected, self.training.batch_size)
            watermark = self.buffer.watermark
            figures["stream"] = {"expected": expected, "expected_batches": batches, "watermark": watermark, **stream}
            if self.limits_staleness:
                figures["stream"]["stale"] = info.stale
        return figures

    def figures_since(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``figures`` without the puts, gets and waits that were in them ``before``."""
        figures = self.figures()
        return figures | {name: figures[name] - before.get(name, 0) for name in _SUMS}

    # Checkpoints.

    def state_dict(self, memory: StagingPool | None = None) -> dict[str, Any]:
        """Return what a checkpoint needs to continue with the next batch. Samples are copied to ``memory``."""
        allocate = None if memory is None else memory.acquire
        try:
            buffer = self.buffer.state_dict(samples=not self.source.refetchable, allocate=allocate)
        except BufferClosed:
            self._raise_source_error()
            raise
        source, puts = self.source.state_dict(), buffer["counters"]["puts"]
        ahead = self._ahead(puts)
        if not buffer["keys"] and not ahead:
            self.source.release_order(source, puts)
        buffer["keys"] = pack_keys(buffer["keys"])
        state = {"buffer": buffer, "source": stage_copy(source, memory)}
        if ahead and self.source.repeatable:
            state |= {"buffer": None, "applied": self._served_positions().state_dict()}
        return state

    def _ahead(self, puts: int) -> dict[int, int]:
        """Return the samples that were applied before ``load_after_loss`` and that the feeder has not reached."""
        return {p: times for p, times in self._applied.above.items() if p >= puts}

    def _served_positions(self) -> AppliedPositions:
        applied, ahead = self.buffer.applied(), self._ahead(self.buffer.info().puts)
        return AppliedPositions(applied.low, applied.above | ahead, applied.count + sum(ahead.values()))

    def applied(self) -> AppliedPositions:
        """Return which samples were served, without those since the last ``pop_served``: their step is not applied.

        For a source that is repeatable.
        """
        served = [position for batch in self._served for position in batch.tolist()]
        account, due = self._served_positions(), self.buffer.times_due or 1
        first = min([account.low, *served])
        times = {**dict.fromkeys(range(first, account.low), due), **account.above}
        for position in served:
            times[position] = max(times[position] - 1, 0)
        applied = AppliedPositions(first, {p: n for p, n in times.items() if n}, account.count - len(served))
        applied.add([], self.buffer.times_due)
        return applied

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``, or this trainer's part of a resharded checkpoint. Call it before ``start``."""
        state = {**state, "buffer": {**state["buffer"], "keys": unpack_keys(state["buffer"]["keys"])}}
        mark = state["buffer"]["mark"]
        partly = self._load_source(state, mark)
        if state.get("leftovers") is not None:
            mark = self.source.mark()
        # A resumed run may have a higher limit of epochs, so that more samples follow, or a lower one.
        total, puts = self.source.total, state["buffer"]["counters"]["puts"]
        buffer = {**state["buffer"], "finished": total is not None and puts >= total, "mark": mark}
        if total is not None and puts > total and self.source.refetchable:
            positions = buffer["positions"].tolist()
            due = [n for n, position in enumerate(positions) if position < total]
            buffer |= {name: buffer[name][due] for name in ("positions", "served")}
            buffer["keys"] = [buffer["keys"][n] for n in due]
            # Those that are dropped are read again by a run with a higher limit.
            puts = min((position for position in positions if position >= total), default=puts)
            buffer["counters"] = {**buffer["counters"], "puts": puts}
        fetch = None
        if self.source.refetchable and buffer["samples"] is None:
            fetched = iter(self.source.fetch_all(buffer["keys"], buffer["positions"].tolist()))
            fetch = lambda key: next(fetched)  # noqa: E731 - the buffer asks for its keys in their order
        elif isinstance(self.source, Stream) and buffer["samples"] is not None:
            first = next(stored_samples(buffer["samples"], 1))
            self.source.check_fields(first)
            if self.source.with_columns(first).keys() != first.keys():  # the config had other sections
                stored = map(self.source.with_columns, stored_samples(buffer["samples"], len(buffer["keys"])))
                buffer["samples"], fetch = None, lambda key: next(stored)
        with name_user_error(f"trainer {self.trainer_index}: the data set, which gives the buffer's samples again,"):
            self.buffer.load_state_dict(buffer, fetch)
        self._applied = self.buffer.applied()
        if partly:
            self._applied.add(partly, self.buffer.times_due)
            self.feeder = Feeder(self.source, self.buffer, self.trainer_index, self._applied)
        if isinstance(self.source, Stream):
            stored = state["buffer"]
            held = {key for key, times in zip(stored["keys"], stored["served"].tolist(), strict=True) if not times}
            self._applied = AppliedPositions(count=self._applied.count, stale=self.buffer.stale)
            self.source.received_log.truncate(stored["counters"]["puts"])  # what follows was in no buffer
            self._applied.keys.update(self.source.keys_without(held))
        elif not self.source.repeatable:
            self._applied = AppliedPositions(self.buffer.info().puts)

    def positions(self) -> AppliedPositions:
        """Return which samples were applied before ``start``, in the order of ``source.state_dict()``.

        With both, and what is applied from then on, ``load_after_loss`` continues in another process.
        """
        return copy.deepcopy(self._applied)

    def load_after_loss(self, state: Mapping[str, Any] | None, applied: AppliedPositions) -> None:
        """Continue in place of a lost trainer. Call it instead of ``load_state_dict``, before ``start``.

        The state has that of the source under ``source``, as ``state_dict()`` does; None if it was at its start.
        ``applied`` are its samples that were applied until its loss.
        """
        if state is not None:
            applied.add(self._load_source(state), self.buffer.times_due)
        self._applied = applied
        if isinstance(self.source, Stream):
            applied = AppliedPositions(
                self.source.continue_after(applied.keys), count=applied.count, stale=applied.stale
            )
        # Other draws than those of the process that was lost.
        self.buffer = self._make_buffer(applied.count)
        if applied.low or applied.stale:
            self.buffer.skip(applied.low, applied.stale)
        self.feeder = Feeder(self.source, self.buffer, self.trainer_index, applied)

    def _check_kind(self, source: Mapping[str, Any], buffer: Mapping[str, Any] | None) -> None:
        """Refuse the state of a source of another kind. Which states a user's own ``Source`` can load is its matter."""
        own = "a Source of its own"
        now = next((name for kind, _, name in _KINDS if isinstance(self.source, kind)), own)
        before = next((name for _, keys, name in _KINDS if keys <= source.keys()), own)
        lacks_samples = buffer is not None and buffer["keys"] and buffer["samples"] is None
        if now != before and (now != own or (lacks_samples and not self.source.refetchable)):
            raise CheckpointError(
                f"train_source gives {now}, it must give {before} as when the checkpoint was written; use init_from to "
                "continue from the weights with other data"
            )

    def _load_source(self, state: Mapping[str, Any], mark: Any = None) -> list[int]:
        """Return positions that were applied fewer times than due before a resharding, as often as they were."""
        partly: Mapping[int, int] = {}
        left = state.get("leftovers")
        self._check_kind(state["source"] if left is None else left[0]["state"], state.get("buffer"))
        if left is None:
            self.source.load_state_dict(state["source"], mark)
        else:
            if not self.source.refetchable and any(one.get("applied") for one in left):
                raise CheckpointError(
                    f"a checkpoint that was made while one of its {len(left)} trainers was lost must resume with as "
                    "many, as its samples cannot be read by key; set cluster.num_trainers or --world_size to it"
                )
            held = [] if state["buffer"] is None else state["buffer"]["keys"]
            due = self.buffer.times_due or 1
            shared = self.source.reshard([ResumePosition(**one, times_due=due) for one in left], held)
            if shared is None and any(one.get("partly") or (due > 1 and one.get("applied")) for one in left):
                raise CheckpointError(
                    f"samples that were served fewer times than buffer.pseudo_epochs ({due}) must stay, and "
                    f"{type(self.source).__name__}.reshard returns None; set cluster.num_trainers to {len(left)}, or "
                    "return their positions"
                )
            partly = shared or {}
        return [position for position, times in partly.items() for _ in range(times)]
