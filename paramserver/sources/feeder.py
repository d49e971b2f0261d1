"""The thread that carries samples from a source into a trainer's buffer."""

from __future__ import annotations

import threading
import traceback

from paramserver.buffers import Buffer
from paramserver.errors import BufferClosed, BufferError, SourceError
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
        self._thread = threading.Thread(target=self._run, name=f"feeder-{trainer_index}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        position = self.buffer.info().puts
        try:
            for key, sample in self.source.samples(position):
                self.buffer.put(sample, key)
                position += 1
            self.buffer.finish()
        except BufferClosed:
            return  # the trainer closed its buffer: it wants no more
        except (BufferError, ValueError) as error:
            self._fail(error)
        except BaseException as error:  # noqa: BLE001 - a user's source may raise anything; the trainer re-raises it
            text = traceback.format_exc()
            failure = SourceError(
                f"trainer {self.trainer_index}: the source raised at sample {position}: {error!r}\n{text}"
            )
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self.buffer.close()

    def check(self) -> None:
        """Raise what the source raised."""
        if self._error is not None:
            raise self._error

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop reading. A source that does not return within the deadline is left to its daemon thread."""
        self.buffer.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
