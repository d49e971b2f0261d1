"""The thread of a trainer that receives samples, and the feeder's door to it."""

from __future__ import annotations

import threading
from typing import Any

from paramserver.errors import SourceError
from paramserver.online.ear import Ear
from paramserver.online.identities import Identities
from paramserver.online.moments import FieldMoments
from paramserver.online.pending import Bell, Pending
from paramserver.online.post import Post
from paramserver.online.tally import Tally
from paramserver.online.verdicts import Accepted

GROUP = 64
"""Samples that are handed over at once, at most."""


class Reception:
    """Owns the thread ``reception-<trainer>``, from ``start`` to ``close``, and all that it uses.

    ``take`` and ``taken`` are for one thread, the feeder's; it may take its time. Whoever sends may have
    ``simulations.window`` samples on their way, and learns of room by what was ``taken``.

    Args:
        post: where to receive, and what.
        identities: what was received before. The thread marks in it what it accepts; the log is the caller's.
    """

    def __init__(self, post: Post, identities: Identities) -> None:
        self._bell = Bell()
        self._pending = Pending(self._bell)
        self._tally = Tally(identities.counts(), post.plan.sample_bytes, post.trainer_index)
        self._moments = FieldMoments([field.name for field in post.plan.fields])
        self._ear = Ear(post, identities, self._pending, self._bell, self._tally, self._moments)
        self._thread = threading.Thread(target=self._run, name=f"reception-{post.trainer_index}", daemon=True)

    def start(self) -> None:
        """Listen, and tell the desk."""
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._ear:
                self._ear.serve()
        except BaseException as error:  # noqa: BLE001 - kept, and raised to who takes
            self._pending.fail(error)

    def take(self, timeout: float | None = None) -> list[Accepted] | None:
        """What was accepted and not given yet, up to ``GROUP`` of it, in the order in which it came.

        Returns:
            Nothing where none came within ``timeout`` seconds. None at the end: the desk said that the last simulation
            has ended and all was taken, or this is closed.

        Raises:
            SourceError: the desk refused this trainer, or has been silent.
            UnsupportedConfiguration: the address is not this machine's, or pyzmq is missing.
        """
        return self._pending.take(GROUP, timeout)

    def taken(self, n: int) -> None:
        """The buffer has got the next ``n`` of what ``take`` gave."""
        self._pending.taken(n)

    def figures(self) -> dict[str, Any]:
        """What was received, see ``Tally.figures``; ``partial``, samples of which parts are missing; ``clients``."""
        return {
            **self._tally.figures(),
            "partial": len(self._ear.inspector.assembly),
            "clients": self._ear.clients,
        }

    def statistics(self) -> dict[str, dict[str, float]]:
        """Mean and deviation of each field since they were read last, see ``FieldMoments.read``."""
        return self._moments.read()

    def leave(self) -> None:
        """Begin to close: all clients, and the desk, are told that the run is over. Wakes who takes."""
        self._pending.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """The same, and wait for the end. Again: no effect.

        Raises:
            SourceError: the thread has not ended in time.
        """
        self.leave()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise SourceError(f"{self._thread.name} must end within {timeout_s:g} s of its close, and has not")
        self._bell.close()
