"""Calls that are sent again because they or their replies did not arrive. A handler declares what is right for it.

``repeatable``: called again with the same arguments, it changes nothing. ``executed_once``: each call has a number, and
one that is here again gets its first reply. A call of any other handler is sent once, and its loss ends the session.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar, cast

from paramserver.consistency import TrainerId

Handler = TypeVar("Handler", bound=Callable[..., Any])


_REPEATABLE, _NUMBERED = "is_repeatable", "is_numbered"


def repeatable(handler: Handler) -> Handler:
    """Declare that a handler may be called again with the same arguments: it knows the last ones, or changes nothing.

    Example::

        >>> @repeatable
        ... def version(self):
        ...     return self.step
        >>> is_repeatable(version), is_numbered(version)
        (True, False)
    """
    handler.__dict__[_REPEATABLE] = True
    return handler


def is_repeatable(handler: Callable[..., Any]) -> bool:
    """Return whether a call of this handler may be sent again."""
    return _REPEATABLE in handler.__dict__


def is_numbered(handler: Callable[..., Any]) -> bool:
    """Return whether each call of this handler has a number, by which it knows one that is here again."""
    return _NUMBERED in handler.__dict__


class LastReplies:
    """The reply to the last call of each handler by each trainer; every use holds the server's lock.

    A trainer has one call of a handler in flight, so the last one is enough. ``running`` is held while a handler runs
    for a trainer, so that the same call, sent again, waits for its reply. It is taken before the server's lock.
    """

    def __init__(self) -> None:
        self.running: defaultdict[tuple[int, str], threading.Lock] = defaultdict(threading.Lock)
        self._replies: dict[tuple[int, str], tuple[TrainerId, int, Any]] = {}

    def find(self, sender: TrainerId, handler: str, number: int) -> tuple[Any] | None:
        """Return the reply to a call as a tuple of one; None if it was not executed.

        No trainer waits for the reply to an earlier number: such a message was overtaken.
        """
        known = self._replies.get((sender.trainer_index, handler))
        return None if known is None or known[0] != sender or known[1] < number else (known[2],)

    def set(self, sender: TrainerId, handler: str, number: int, reply: Any) -> None:
        self._replies[sender.trainer_index, handler] = sender, number, reply


def executed_once(handler: Handler) -> Handler:
    """Let a method of the server reply to a call that is repeated as it did before; a future is the same one.

    The class has a ``_lock`` and ``last_replies``. The first argument of the handler is the ``TrainerId`` of the
    sender. A caller that may repeat its call adds the keyword ``number``, which grows from 1. Calls that raise have no
    effect, so they are not recorded.
    """

    @functools.wraps(handler)
    def wrapped(self: Any, sender: TrainerId, *args: Any, number: int = 0) -> Any:
        if not number:
            return handler(self, sender, *args)
        with self._lock:
            running = self.last_replies.running[sender.trainer_index, handler.__name__]
        # No handler blocks, so a call that is repeated while the first one runs in another thread does not wait long.
        with running:
            with self._lock:
                found = self.last_replies.find(sender, handler.__name__, number)
            if found is None:
                # Not under the server's lock: a handler may complete futures, or write files, outside of it.
                found = (handler(self, sender, *args),)
                with self._lock:
                    self.last_replies.set(sender, handler.__name__, number, found[0])
        return found[0]

    wrapped.__dict__.update({_REPEATABLE: True, _NUMBERED: True})
    return cast("Handler", wrapped)
