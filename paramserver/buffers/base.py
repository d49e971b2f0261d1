"""What a buffer is to its owner: an exchange of samples that can be looked at, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from paramserver.buffers.batch import BufferInfo, Counters
from paramserver.buffers.contents import Contents
from paramserver.buffers.exchange import Exchange
from paramserver.buffers.storage import Take
from paramserver.errors import CheckpointError


class Buffer(Exchange):
    """Samples between many producer threads and ONE consumer thread, the trainer's.

    ``Fifo``, ``Firo`` and ``Reservoir`` say which sample is served next and which goes. ``finish()`` says that no more
    samples will come: what is held is drained. ``close()`` stops at once and wakes everyone with BufferClosed.
    ``timeout=None`` waits without limit and is meant for feeder threads, whose owner calls ``close()``; everyone else
    gives a timeout in seconds. Draws come from ``numpy.random.default_rng(seed)`` and depend on the sequence of puts
    and gets only.

    Args:
        capacity: samples held at most.
        seed: of the draws.
        watermark: samples held before the first get.
        max_bytes: bytes of samples held at most.
        batch_size: the ``n`` that will be asked for, where it is known.
    """

    kind: ClassVar[str]

    def expected_batches(self, samples: int, batch_size: int) -> int | None:
        """Batches that ``samples`` puts will give; None where that depends on timing."""
        return None

    def info(self) -> BufferInfo:
        """Take a snapshot; also of a closed buffer."""
        with self._lock:
            held = self._contents
            return BufferInfo(
                kind=self.kind,
                population=held.count,
                unseen=held.unseen,
                capacity=self.capacity,
                bytes=held.bytes,
                seen_histogram=held.histogram(),
                **vars(self._counters),
            )

    # Checkpoints.

    def state_dict(self, samples: bool = True, take: Take | None = None) -> dict[str, Any]:
        """Everything that the next draws depend on, for ``torch.load(weights_only=True)``, taken under the lock.

        ``counters.puts`` agrees with the content. A finished buffer is finished after loading; who has more samples by
        then sets ``finished`` to False first.

        Args:
            samples: False stores keys only, for samples that ``fetch`` can give back.
            take: gives memory for the columns of samples, of so many bytes; None = fresh memory.

        Raises:
            UnsupportedConfiguration: a sample or key cannot be stored without pickling its class.
            BufferClosed: closed.
        """
        # One lock for all of it: the position of the source is derived from the number of puts.
        with self._lock:
            self._check_open()
            return {
                "kind": self.kind,
                "finished": self._finished,
                "counters": dict(vars(self._counters)),
                "mark": self._mark,
                "rng": self._rng.bit_generator.state,
                **self._own_state(),
                **self._contents.state(self._order(), samples, take),
            }

    def load_state_dict(self, state: dict[str, Any], fetch: Callable[[Any], Any] | None = None) -> None:
        """Replace the content; the next draws are those of the buffer that was saved. For before the feeder starts.

        Args:
            state: of ``state_dict``, of a buffer of the same kind.
            fetch: gives the sample of a key, for a state without samples.

        Raises:
            CheckpointError: another kind, more samples than fit, or keys without ``fetch``.
        """
        self._check_state(state, fetch)
        samples = [fetch(key) for key in state["keys"]] if fetch and state["samples"] is None else None
        contents = Contents(self.capacity, self._contents.max_bytes)
        contents.restore(state, samples)
        # Nothing has changed so far: what is refused leaves the buffer as it was.
        with self._lock:
            self._check_open()
            self._contents = contents
            # The saved order is the order of the slots now, so the same draws give the same samples.
            self._counters = Counters(**state["counters"])
            self._finished = state["finished"]
            self._mark = state["mark"]
            self._rng.bit_generator.state = state["rng"]
            self._restore_order(np.arange(contents.count), contents.unseen)
            self._load_own_state(state)
            self._wake_all()

    def _check_state(self, state: dict[str, Any], fetch: Callable[[Any], Any] | None) -> None:
        if state["kind"] != self.kind:
            raise CheckpointError(
                f"buffer.kind ({self.kind}) must be the checkpoint's, {state['kind']}; set buffer.kind to it"
            )
        count = len(state["keys"])
        if count > self.capacity:
            raise CheckpointError(
                f"capacity ({self.capacity}) must hold the {count} samples of the checkpoint; raise it"
            )
        if count and state["samples"] is None and fetch is None:
            raise CheckpointError(
                f"fetch (None) must be given, the state has {count} keys and no samples; give a function of a key"
            )

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Take back what ``_own_state`` gave."""
