"""The thread that moves samples from a source into a trainer's buffer."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from paramserver.buffers import Buffer
from paramserver.buffers.positions import AppliedPositions
from paramserver.errors import BufferClosed, SourceError, UnsupportedConfiguration
from paramserver.sources.base import Source


class Feeder:
    """Owns the thread ``feeder-<trainer_index>``, from ``start`` to ``close``.

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
            if self._thread.ident is not None:
                self._thread.join(timeout_s)

    def _run(self) -> None:
        position, total = self.buffer.info().puts, self.source.total
        try:
            for group in self._read(position):
                served = self._served_before(position, len(group))
                position += len(group)
                keys, samples = zip(*group, strict=True)
                # ``last`` finishes the buffer with the last sample, so that a drain starts at the same get in each run.
                mark = self.source.mark()
                self.buffer.put_many(samples, keys, last=position == total, mark=mark, served=served)
            if not self._stopped:
                self.buffer.finish()
        except BufferClosed:
            if self.buffer.closed:
                return  # by ``close``
            self._fail(
                SourceError(
                    f"trainer {self.trainer_index}: the source gave more than the {total} samples of its length"
                )
            )
        except BaseException as error:  # noqa: BLE001 - recorded, and raised to the trainer
            self._fail(error)

    def _served_before(self, position: int, count: int) -> list[int | None] | None:
        """Return for each of ``count`` samples from ``position`` on how often it was applied; None if none was."""
        if position >= self._first_not_applied:
            return None
        return [self._applied.times(n) for n in range(position, position + count)]

    def _fail(self, error: BaseException) -> None:
        # Recorded before the buffer is closed: the trainer wakes up with BufferClosed and asks for the error.
        self._error = error
        self.buffer.close()

    def _read(self, position: int) -> Iterator[Sequence[tuple[Any, Any]]]:
        """Read the source from ``position`` on; its errors become a SourceError that names the sample."""
        try:
            for group in self.source.groups(position):
                yield group
                position += len(group)
        except (GeneratorExit, SourceError, UnsupportedConfiguration):
            raise
        except BaseException as error:  # a user's source may raise anything, a ValueError as well
            raise SourceError(
                f"trainer {self.trainer_index}: the source raised at sample {position}: {error!r}\n"
                f"{traceback.format_exc()}"
            ) from error
