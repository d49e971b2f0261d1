"""Bookkeeping of a ring of snapshots: which slot holds which version, and how many readers it has. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from paramserver.errors import ParamserverError


@dataclass
class _RingSlot:
    version: int | None = None
    pins: int = 0


class SnapshotRing:
    """A ring of ``slots`` snapshots. A reader pins a slot; neither a pinned slot nor the newest is overwritten.

    Readers that pin one slot each always leave one free for the next version if there are two slots more than readers:
    one for each reader, one for the newest version, and one for the version that replaces it.

    Not thread-safe: the caller's lock covers ``publish`` and the writing of the slot that it returns, so that no reader
    pins a version that is written only in part. There are at least 2 slots.
    """

    def __init__(self, slots: int) -> None:
        if slots < 2:
            raise ParamserverError(
                f"slots ({slots}) must be at least 2, the newest version and the next; use 2 or more"
            )
        self._slots = [_RingSlot() for _ in range(slots)]
        self._newest: int | None = None

    def publish(self, version: int) -> int:
        """Return the slot that holds ``version`` from now on: a free one, preferably unused, else the oldest version.

        Raises:
            ParamserverError: ``version`` is not above the newest, or no slot is free; nothing has changed.
        """
        if self._newest is not None and version <= (newest := self._slots[self._newest].version or 0):
            raise ParamserverError(
                f"version ({version}) must be above {newest}, the newest, which slot {self._newest} holds; publish "
                "each version once, in order"
            )
        # The newest is never overwritten, pinned or not: ``pin()`` without a version must always find one.
        free = [i for i, slot in enumerate(self._slots) if slot.pins == 0 and i != self._newest]
        if not free:
            raise ParamserverError(
                f"version ({version}) must find a free slot, and has none: {self._describe()}; unpin what is no longer "
                "read, or use more slots"
            )
        # Unused slots first and then the oldest version: a version that is not pinned stays available as long as
        # possible.
        chosen = min(free, key=lambda i: (self._slots[i].version is not None, self._slots[i].version or 0))
        # The first changes; every check is above, so a refusal leaves the ring as it was.
        self._slots[chosen].version = version
        self._newest = chosen
        return chosen

    def pin(self, version: int | None = None) -> tuple[int, int]:
        """Retain a version, or the newest, until ``unpin`` has been called as often. Return its slot and the version.

        Raises:
            ParamserverError: no slot holds it (any more).
        """
        versions = [slot.version for slot in self._slots]
        index = self._newest if version is None else versions.index(version) if version in versions else None
        if index is None:
            wanted = "the newest version" if version is None else f"version ({version})"
            raise ParamserverError(f"{wanted} must be in a slot to be pinned: {self._describe()}; pin the newest")
        self._slots[index].pins += 1
        pinned = versions[index]
        assert pinned is not None
        return index, pinned

    def unpin(self, slot: int) -> None:
        """Undo one ``pin``.

        Raises:
            ParamserverError: there is no such slot, or it is not pinned.
        """
        if not 0 <= slot < len(self._slots):
            raise ParamserverError(f"slot ({slot}) must be from 0 to {len(self._slots) - 1}; unpin the one pinned")
        # An additional ``unpin`` would release the slot of another reader, which would then read a version half
        # overwritten.
        if self._slots[slot].pins == 0:
            raise ParamserverError(
                f"slot ({slot}) must be pinned to be unpinned: {self._describe()}; unpin once for each pin"
            )
        self._slots[slot].pins -= 1

    def _describe(self) -> str:
        return ", ".join(
            f"slot {i} is empty" if slot.version is None else f"slot {i} holds {slot.version} with {slot.pins} pin(s)"
            for i, slot in enumerate(self._slots)
        )
