"""A trainer's own data: the source, the buffer, the thread between them, and the batches that come out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from paramserver.buffers import Batch, Buffer, make_buffer
from paramserver.checkpoint import StagingPool, stage_copy
from paramserver.config import Config
from paramserver.consistency import Announcement, Readiness
from paramserver.errors import BufferClosed, BufferExhausted, TaskError, UnsupportedConfiguration
from paramserver.online.spec import ReceiverSpec
from paramserver.sources import Feeder, Partition, ResumePosition, Source, make_source
from paramserver.sources.factory import refuse_unreachable
from paramserver.task import Task, default_batching

# How long a trainer waits for its own data before it tells the others that it is still waiting.
_PATIENCE_S = 1.0

_FIGURES = ("population", "unseen", "capacity", "puts", "gets", "put_wait_s", "get_wait_s")


class DataStream:
    """Batches of one trainer's share. A context manager: it ends the feeder.

    Args:
        task: gives the samples and forms the batches.
        partition: whose share.
        config: of buffer and batches.
        sampler_kwargs: how a map-style data set is dealt, where not as usual.
        post: where samples of simulations come in; for a source that receives them.
    """

    def __init__(
        self,
        task: Task,
        partition: Partition,
        config: Config,
        sampler_kwargs: dict[str, Any],
        post: ReceiverSpec | None = None,
    ) -> None:
        self.task = task
        self.training = config.training
        self.pseudo_epochs = config.buffer.pseudo_epochs
        self.wait_s = config.cluster.timeout_s
        self.source: Source = make_source(task.train_source(partition), partition, config, sampler_kwargs)
        if post is not None:
            self.source.connect(post)
        try:
            self.buffer: Buffer = make_buffer(
                config.buffer.kind,
                capacity=config.buffer.capacity,
                seed=_draw_seed(config.seed, partition.index),
                watermark=config.buffer.watermark,
                pseudo_epochs=config.buffer.pseudo_epochs,
                max_bytes=config.buffer.max_bytes,
                min_new_per_batch=config.buffer.min_new_per_batch,
                batch_size=config.training.batch_size,
            )
        except ValueError as error:
            raise UnsupportedConfiguration(f"buffer: {error}") from error
        refuse_unreachable(config.buffer.watermark, self.source.expected, partition)
        self.feeder = Feeder(self.source, self.buffer, partition.index)
        self.trainer_index = partition.index
        self._plain = default_batching(task)

    def __enter__(self) -> DataStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.feeder.close()

    def start(self) -> None:
        """Begin to read the source."""
        self.feeder.start()

    def enough(self) -> None:
        """The last batch was taken: whoever makes samples for this trainer may stop."""
        self.feeder.enough()

    @property
    def epoch_samples(self) -> int | None:
        """What one pass over the source serves to all trainers; None where that is unknown."""
        once = self.source.pass_samples
        return None if once is None else once * self.pseudo_epochs

    def available(self) -> Announcement:
        """Wait for the batches of a step, but not for long; how far they are.

        Raises:
            SourceError: the source raised.
        """
        try:
            ready = self._wait(_PATIENCE_S)
        except BufferExhausted:
            return Announcement(Readiness.DRAINED)
        if not ready:
            return Announcement(Readiness.WAITING)
        left = self.buffer.servings_left()
        batches = self.training.accumulate_batches
        if left is not None:
            batches = min(batches, -(-left // self.training.batch_size))
        return Announcement(Readiness.READY, batches)

    def is_ready(self) -> bool:
        """Whether ``available`` would answer at once; it stays so until the next batch is taken."""
        try:
            return self._wait(0.0)
        except BufferExhausted:
            return True

    def _wait(self, timeout_s: float) -> bool:
        with self._source_failures():
            return self.buffer.wait_ready(self.training.batch_size * self.training.accumulate_batches, timeout_s)

    def next_batch(self) -> tuple[Any, int]:
        """A batch as the task's ``collate`` makes it, and its number of samples."""
        with self._source_failures():
            held: Batch = self.buffer.get_batch(self.training.batch_size, self.wait_s)
        if self._plain and held.stacked is not None:
            return held.stacked, len(held)
        samples = [self.task.process_sample(sample) for sample in held.samples]
        try:
            return self.task.collate(samples), len(held)
        except TaskError as error:
            batch_idx = self.buffer.info().batches - 1
            raise TaskError(f"trainer {self.trainer_index}, batch {batch_idx}: {error}") from error

    @contextmanager
    def _source_failures(self) -> Iterator[None]:
        """A buffer that the feeder closed: raise what made it."""
        try:
            yield
        except BufferClosed:
            try:
                self.feeder.check()
            except ValueError as error:  # the buffer's own: what the source raises comes as a SourceError
                raise UnsupportedConfiguration(f"trainer {self.trainer_index}: buffer: {error}") from error
            raise

    @property
    def samples_left(self) -> int | None:
        """Servings that were due and did not take place; None where their number is unknown."""
        if self.source.total is None:
            return self.buffer.servings_left()
        return max(self.source.total * self.pseudo_epochs - self.buffer.info().gets, 0)

    def record(self) -> dict[str, Any]:
        """``figures``, with mean and deviation of the fields of a stream since the last record."""
        figures, fields = self.figures(), self.source.statistics()
        return {**figures, "stream": {**figures["stream"], "fields": fields}} if fields else figures

    def figures(self) -> dict[str, Any]:
        """The buffer's counts and waits, and those of a stream."""
        info = self.buffer.info()
        stream = self.source.figures()
        seen = {str(times): samples for times, samples in info.seen_histogram.items()}
        figures = {name: getattr(info, name) for name in _FIGURES}
        return {**figures, "seen_histogram": seen, **({"stream": {**self._expected(), **stream}} if stream else {})}

    def _expected(self) -> dict[str, int | None]:
        """What this buffer is going to get, and the batches of it; None where that is not known beforehand."""
        samples = self.source.expected
        batches = None if samples is None else self.buffer.expected_batches(samples, self.training.batch_size)
        return {"expected": samples, "expected_batches": batches, "watermark": self.buffer.watermark}

    def state_dict(self, memory: StagingPool | None = None) -> dict[str, Any]:
        """What a checkpoint needs to go on with the next batch; keys in place of samples that can be read again.

        Everything in it is a copy, and the only one that is made; ``memory`` is where samples are copied to.
        """
        take = None if memory is None else memory.take
        with self._source_failures():
            buffer = self.buffer.state_dict(samples=not self.source.refetchable, take=take)
        return {"buffer": buffer, "source": stage_copy(self.source.state_dict(), memory)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back ``state_dict()``, or this trainer's part of what others left; before ``start``."""
        mark = state["buffer"]["mark"]
        if (left := state.get("leftovers")) is not None:
            self.source.reshard([ResumePosition(**one) for one in left], state["buffer"]["keys"])
            mark = self.source.mark()
        else:
            self.source.load_state_dict(state["source"], mark)
        # A run that goes on may have got a larger limit, and then there is more to come.
        finished = state["buffer"]["counters"]["puts"] == self.source.total
        buffer = {**state["buffer"], "finished": finished, "mark": mark}
        self.buffer.load_state_dict(buffer, self.source.fetch if self.source.refetchable else None)


def _draw_seed(seed: int, trainer_index: int) -> int:
    """A seed for a trainer's draws that has nothing to do with those of its neighbours."""
    return int(np.random.SeedSequence([seed, 1 + trainer_index]).generate_state(1, np.uint64)[0])
