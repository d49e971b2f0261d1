"""A handler of calls over sockets whose replies come later."""

from __future__ import annotations

import threading

import torch


class LateReplies:
    """Returns futures of three calls, which other threads complete in another order once all are there.

    The reply to call ``number`` is ten times that.
    """

    def __init__(self, owner: str, name: str) -> None:
        self._target = owner, name
        self._pending: dict[int, torch.futures.Future[int]] = {}

    def __call__(self, owner: str, name: str, number: int, *, twice: bool) -> torch.futures.Future[int]:
        assert (owner, name, twice) == (*self._target, True)
        self._pending[number] = torch.futures.Future()
        if len(self._pending) == 3:
            for one in (2, 0, 1):
                threading.Thread(target=self._pending[one].set_result, args=(10 * one,)).start()
        return self._pending[number]
