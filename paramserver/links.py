"""All links of a rank, and the thread that listens to them."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from paramserver.errors import PeerLost
from paramserver.link import Body, Link, wait_ready

_BYE = 255
_LOSS = 254
_CLOSE_S = 5.0


class Message(NamedTuple):
    """``kind`` and ``body`` as they were sent by rank ``peer``."""

    peer: int
    kind: int
    body: Body


class Links:
    """Takes what comes over all links as it comes, gives signs of life, and notices who is lost.

    The end of a connection without a goodbye is a loss at any time, silence only while ``attend`` is on: a process may
    have reasons to stand still that are nobody else's business. One thread uses this object beside the one that it has.

    Args:
        links: by the rank at their other end; closed with this object.
        beat_s: ``server.heartbeat_s``.
        on_lost: called once, in the listening thread, when somebody is lost before this rank said goodbye.
    """

    def __init__(self, links: Mapping[int, Link], beat_s: float, on_lost: Callable[[], None]) -> None:
        self._links = dict(links)
        self._beat_s = beat_s
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._inbox: deque[Message] = deque()
        self._attentive = False
        self._leaving = False
        self.lost: PeerLost | None = None
        self.moved = 0.0
        self._here = list(self._links.values())
        self._slice_s = min([beat_s, *(link.lost_after_s / 10 for link in self._here)])
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="links", daemon=True)
        self._thread.start()

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(self._links)

    # The owner's thread.

    def send(self, peer: int, kind: int, body: bytes | memoryview = b"") -> None:
        """Send a message of ``kind`` (1 to 253).

        Raises:
            PeerLost: that peer is gone.
        """
        self._links[peer].send(kind, body)
        self.moved = time.monotonic()

    def receive(self) -> Message:
        """The next message of anybody. ``moved`` is the last moment at which this waited, and all were alive.

        Raises:
            PeerLost: somebody is lost, and nothing came before that.
        """
        with self._changed:
            while not self._inbox:
                if self.lost is not None:
                    raise self.lost
                if not self._thread.is_alive():
                    raise PeerLost("all other ranks have said goodbye, and nothing more comes from them")
                self.moved = time.monotonic()
                self._changed.wait(self._slice_s)
            return self._inbox.popleft()

    def await_loss(self, timeout_s: float) -> None:
        """Where something else failed because somebody is lost: wait until it is known here who."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None, timeout_s)

    def attend(self, attentive: bool) -> None:
        """Whether silence matters from now on. What was before does not count."""
        for link in self._here:
            link.heard = time.monotonic()
        self._attentive = attentive

    def leave(self) -> None:
        """Say goodbye: from now on nobody is missed here, nor this rank elsewhere."""
        self._leaving = True
        for link in self._here:
            if link.lost is None:
                link.send(_BYE)

    def close(self) -> None:
        """End all connections; those who were told no goodbye miss this rank."""
        self._leaving = True
        self._closed.set()
        for link in self._links.values():
            link.end()
        self._thread.join(_CLOSE_S)
        for link in self._links.values():
            link.close()

    # The listening thread.

    def _listen(self) -> None:
        beaten = 0.0
        while self._here and not self._closed.is_set():
            if time.monotonic() - beaten >= self._beat_s:
                beaten = time.monotonic()
                for link in self._here:
                    link.beat()
            self._wait()
            for link in list(self._here):
                try:
                    self._take(link)
                except PeerLost as loss:
                    self._here.remove(link)
                    self._miss(loss)

    def _wait(self) -> None:
        began = time.monotonic()
        wait_ready(self._here, select.POLLIN, self._slice_s)
        late_s = max(time.monotonic() - began - self._slice_s, 0.0)
        for link in self._here:
            link.heard += late_s  # this process stood still: others cannot be blamed for that time

    def _take(self, link: Link) -> None:
        message = link.poll()
        if message is None:
            if self._attentive:
                link.check_silence()
        elif message[0] == _BYE:
            self._here.remove(link)
        elif message[0] == _LOSS:
            raise PeerLost(bytes(message[1]).decode())
        else:
            with self._changed:
                self._inbox.append(Message(link.peer, *message))
                self._changed.notify_all()

    def _miss(self, loss: PeerLost) -> None:
        if self._leaving or self.lost is not None:
            return  # it ends later than this rank, which needs nobody any more; or because of the first loss
        for link in self._here:
            link.offer(_LOSS, str(loss).encode())  # others have no connection to the one who is lost
        with self._changed:
            self.lost = loss
            self._changed.notify_all()
        self._on_lost()
