"""The thread that moves samples from a source into a trainer's buffer."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paramserver.buffers import Buffer
from paramserver.buffers.positions import AppliedPositions
from paramserver.errors import BufferClosed, SourceError, UnsupportedConfiguration, kind_and_message
from paramserver.sources.base import KeyedSamples, Source


@dataclass(frozen=True)
class _Group:
    """Samples that were read together; arguments of ``Buffer.put_many``."""

    samples: Sequence[Any]
    keys: Sequence[Any]
    served: Sequence[int | None] | None
    mark: Any
    last: bool

    def part(self, start: int, stop: int | None = None) -> _Group:
        """Return the samples from ``start`` on, and before ``stop``."""
        served = None if self.served is None else self.served[start:stop]
        is_last = self.last and (stop is None or stop >= len(self.samples))
        return replace(self, samples=self.samples[start:stop], keys=self.keys[start:stop], served=served, last=is_last)


class Feeder:
    """Owns the thread ``feeder-<trainer_index>``, from ``start`` to ``close``.

    A source that must not be read while the training thread works is read by calls of ``read`` instead of ``start``.

    The thread finishes the buffer at the end of the source. If anything raises, the thread records the error and closes
    the buffer; the trainer's next get raises BufferClosed, and the trainer then calls ``raise_error``.

    Args:
        source: read from the position that the buffer has reached.
        buffer: what is filled.
        trainer_index: for messages and the thread's name.
        applied: which samples were applied before this process started, if it replaces one that was lost; they are not
            served again.

    Example::

        >>> from paramserver.buffers import Fifo
        >>> from paramserver.sources import IterableSource, Partition
        >>> feeder = Feeder(IterableSource([1.5, 2.5], Partition(0, 1)), Fifo(capacity=8), trainer_index=0)
        >>> feeder.start()
        >>> feeder.buffer.get_batch(2, timeout=10.0).samples
        [1.5, 2.5]
        >>> feeder.close()
    """

    def __init__(
        self, source: Source, buffer: Buffer, trainer_index: int, applied: AppliedPositions | None = None
    ) -> None:
        self.source = source
        self.buffer = buffer
        self.trainer_index = trainer_index
        self._applied = applied or AppliedPositions()
        self._first_not_applied = max(self._applied.above, default=self._applied.low - 1) + 1
        self._error: BaseException | None = None
        self._stopped = False
        self._groups = self._read_groups()
        self._pending: _Group | None = None  # read, and not put
        self._may_read: Callable[[int], bool] = lambda position: True
        self._thread = threading.Thread(target=self._run, name=f"feeder-{trainer_index}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def raise_error(self) -> None:
        """Raise what ended the thread, if it failed. Call it after a BufferClosed."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop the producers; the content of the buffer stays for a checkpoint."""
        # Set first: the thread must not finish the buffer of a source that ends early.
        self._stopped = True
        self.source.stop()

    def close(self, timeout_s: float = 5.0) -> None:
        """Close buffer and source and join the thread. It stays as a daemon if the source does not return in time."""
        # The buffer first: the thread may wait in it for room.
        self.buffer.close()
        try:
            self.source.close()
        finally:
            if self._thread.ident is None:
                self._groups.close()
            else:
                self._thread.join(timeout_s)

    def limit_ahead(self, may_read: Callable[[int], bool]) -> None:
        """Let ``read`` read no sample ahead at a position of which ``may_read`` is false.

        What was read of such a group and is not in the buffer is read again, as the data set may have changed.
        """
        self._may_read = may_read
        if self._pending is not None:
            self._pending = None
            self._groups.close()
            self._groups = self._read_groups()

    @property
    def is_at_limit(self) -> bool:
        """Whether the next sample may not be read ahead, but only for the batch that needs it."""
        return not self._may_read(self.buffer.puts)

    def read(self, samples: int, timeout_s: float, is_ahead: bool = True) -> bool:
        """Without the thread: read until the buffer is ahead of a step of so many samples (``Buffer.is_ahead``).

        Reading stops at the end of the source, at a limit (``limit_ahead``), when the buffer is full, and with the
        first group that ends after ``timeout_s``. An error closes the buffer, as in the thread. Return whether the
        buffer is ahead, or can hold no more: what is drawn then does not depend on timing. Without ``is_ahead`` what a
        batch of so many samples lacks is read, and beyond a limit nothing else is put.
        """
        buffer, deadline = self.buffer, time.monotonic() + timeout_s
        try:
            while not (buffer.finished or buffer.closed):
                if buffer.is_ahead(samples) if is_ahead else buffer.wait_ready(samples, 0.0):
                    break
                at_limit = self.is_at_limit
                if is_ahead and at_limit:
                    return True
                group = self._pending or next(self._groups, None)
                if group is None:
                    if not self._stopped:
                        buffer.finish()
                    return True
                part = group.part(0, max(samples - len(buffer), 1)) if at_limit else group
                done = buffer.offer(part.samples, part.keys, last=part.last, mark=part.mark, served=part.served)
                self._pending = group.part(done) if done < len(group.samples) else None
                if done < len(part.samples):
                    return True
                if time.monotonic() >= deadline:
                    return buffer.finished or buffer.is_ahead(samples)
        except BaseException as error:  # noqa: BLE001 - raised by ``raise_error``
            self._end_with(error)
        return True

    def _run(self) -> None:
        try:
            put = self._put_in_parts if self.source.acknowledges else self._put
            for group in self._groups:
                put(group)
            if not self._stopped:
                self.buffer.finish()
        except BaseException as error:  # noqa: BLE001 - recorded, and raised to the trainer
            self._end_with(error)
        finally:
            self._groups.close()  # here: worker processes end with this thread

    def _put(self, group: _Group) -> int:
        return self.buffer.put_many(group.samples, group.keys, last=group.last, mark=group.mark, served=group.served)

    def _put_in_parts(self, group: _Group) -> None:
        """Put a group, and let the source know of each part that is stored, while the rest waits for room."""
        while group.samples:
            done = self.buffer.offer(group.samples, group.keys, last=group.last, served=group.served)
            if not done:
                done = self._put(group.part(0, 1))
            self.source.mark_stored(done)
            group = group.part(done)

    def _read_groups(self) -> Generator[_Group, None, None]:
        """Read the source; its errors become a SourceError that names the sample."""
        position, total = self.buffer.info().puts, self.source.total
        try:
            for group in self.source.groups(position):
                served = None  # how often each of them was applied before
                if position < self._first_not_applied:
                    served = [self._applied.times(n) for n in range(position, position + len(group))]
                if isinstance(group, KeyedSamples):
                    keys, samples = group.keys, group.samples
                else:
                    keys, samples = zip(*group, strict=True)
                position += len(keys)
                # ``last`` finishes the buffer with the last sample, so that a drain starts at the same get in each run.
                yield _Group(samples, keys, served, self.source.mark(), position == total)
        except (GeneratorExit, SourceError, UnsupportedConfiguration):
            raise
        except BaseException as error:  # a user's source may raise anything, a ValueError as well
            at = f", {self.source.failed_at}" if self.source.failed_at else ""
            raise SourceError(
                f"trainer {self.trainer_index}: the source raised at sample {position}{at}: {kind_and_message(error)}\n"
                f"{traceback.format_exc()}"
            ) from error

    def _end_with(self, error: BaseException) -> None:
        if self.buffer.closed:
            return  # by ``close``, which ends worker processes too
        if isinstance(error, BufferClosed):
            total = self.source.total
            error = SourceError(
                f"trainer {self.trainer_index}: the source gave more than the {total} samples of its length"
            )
        # Recorded before the buffer is closed: the trainer wakes up with BufferClosed and asks for the error.
        self._error = error
        self.buffer.close()
