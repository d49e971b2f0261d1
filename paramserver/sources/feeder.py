"""The thread that carries samples from a source into a trainer's buffer."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from paramserver.buffers import Buffer
from paramserver.errors import BufferClosed, SourceError, UnsupportedConfiguration
from paramserver.sources.base import Source


class Feeder:
    """Owns one thread, from ``start`` to ``close``. What the source raises is kept and raised to the trainer.

    Args:
        source: what is read, from the position that the buffer has reached.
        buffer: what is filled; finished at the end of the source, closed where it fails.
        trainer_index: for messages and the thread's name.
    """

    def __init__(self, source: Source, buffer: Buffer, trainer_index: int) -> None:
        self.source = source
        self.buffer = buffer
        self.trainer_index = trainer_index
        self._error: BaseException | None = None
        self._enough = False
        self._thread = threading.Thread(target=self._run, name=f"feeder-{trainer_index}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        start, total = self.buffer.info().puts, self.source.total
        try:
            position = start
            for group in self._read(start):
                position += len(group)
                keys, samples = zip(*group, strict=True)
                self.buffer.put_many(samples, keys, last=position == total, mark=self.source.mark())
            if not self._enough:  # else more would have come
                self.buffer.finish()
        except BufferClosed:
            if self.buffer.closed:
                return  # the trainer wants no more
            self._fail(
                SourceError(
                    f"trainer {self.trainer_index}: the source gave more than the {total} samples of its length"
                )
            )
        except BaseException as error:  # noqa: BLE001 - kept, and raised to the trainer
            self._fail(error)

    def _read(self, position: int) -> Iterator[Sequence[tuple[Any, Any]]]:
        """The source's samples from ``position`` on; whatever it raises, the error names the sample or says it all."""
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

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self.buffer.close()

    def raise_error(self) -> None:
        """Raise what the source raised."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """No more samples are wanted; what the buffer holds stays for a last look, and a checkpoint."""
        self._enough = True
        self.source.stop()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop reading. A source that does not return within the deadline is left to its daemon thread."""
        self.buffer.close()
        try:
            self.source.close()
        finally:
            if self._thread.ident is not None:
                self._thread.join(timeout_s)
