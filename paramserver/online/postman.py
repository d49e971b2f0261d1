"""The way from a client to one trainer: how many samples are on it, and whether there is somebody at its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paramserver.errors import ClientError
from paramserver.online.line import Line, Message
from paramserver.online.messages import Header, Kind
from paramserver.online.zeromq import zmq

_TOUCH_EVERY_S = 1.0
# A trainer whose connection ends may have been told that the run is over, as the desk is about to tell.
_FAREWELL_S = 2.0


class Postman(Line):
    """Sends samples of one member to one trainer.

    A connection that was lost is not made anew: nobody knows what was on it, and a simulation that is started again
    sends all of it, of which the trainer takes what it lacks.

    Args:
        context, name, address, keys: as for ``Line``.
        header: of the member, as in HELLO.
        parameters: of the simulation, packed.
        timeout_s: how long the trainer may be silent while it is waited for.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        name: str,
        address: str,
        keys: str | Path | None,
        *,
        header: Header,
        parameters: bytes,
        timeout_s: float,
    ) -> None:
        self.sent = self.taken = 0
        self._header, self._timeout_s = header, timeout_s
        self._touch_every_s = min(_TOUCH_EVERY_S, timeout_s / 4)
        self._waits_since = self._touched = 0.0
        self._lost_at: float | None = None
        self._monitor: zmq.Socket[Any] | None = None
        super().__init__(context, name, address, keys)
        self.send(header.answer(Kind.OPEN), parameters)

    def _connect(self) -> None:
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        super()._connect()

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        monitors = [] if self._monitor is None or self._lost_at is not None else [self._monitor]
        return [self.socket, *monitors]

    @property
    def outstanding(self) -> int:
        """Samples on their way: the trainer has not said yet that it dealt with them."""
        return self.sent - self.taken

    def post(self, step: int, frames: list[Any]) -> None:
        self.send(self._header.answer(Kind.SAMPLE, step), *frames)
        self.sent += 1

    def hear(self) -> list[Message]:
        """Take note of what was taken; gives what else was said.

        Raises:
            ClientError, RunOver: as ``receive``.
        """
        others = []
        for header, body in self.receive():
            if header.kind is not Kind.TAKEN:
                others.append((header, body))
            elif header.simulation == self._header.simulation and header.step <= self.sent:
                self.taken = max(self.taken, header.step)
        return others

    # Waiting.

    def begin_to_wait(self) -> None:
        """From now on the trainer may not be silent for too long."""
        self._waits_since = self._touched = time.monotonic()

    def touch(self) -> float:
        """Tell that this client lives, when it is time; until when it may be waited before the next call.

        Raises:
            ClientError: the trainer is gone.
        """
        now = time.monotonic()
        if self._lost_at is None and self._is_lost():
            self._lost_at = now
        if self._lost_at is not None:
            if now >= self._lost_at + _FAREWELL_S:
                raise ClientError(f"the connection to {self} was lost; that trainer is gone, see the log of the run")
            return self._lost_at + _FAREWELL_S
        silent_at = max(self.heard, self._waits_since) + self._timeout_s
        if now >= silent_at:
            raise ClientError(
                f"{self} gave no sign of life for {self._timeout_s:g} s; that trainer is gone, see the log of the run"
            )
        if now >= self._touched + self._touch_every_s:
            self._touched = now
            self.send(self._header.answer(Kind.TOUCH))
        return min(silent_at, self._touched + self._touch_every_s)

    def _is_lost(self) -> bool:
        return self._monitor is not None and bool(self._monitor.poll(0))

    def close(self, linger_s: float = 0.0) -> None:
        """Let go of the trainer."""
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        super().close(linger_s)
