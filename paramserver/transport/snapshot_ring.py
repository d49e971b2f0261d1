"""Which slot of a ring of snapshots holds which version, and who still reads it. Numbers only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from paramserver.errors import ParamserverError


@dataclass
class _RingSlot:
    version: int | None = None
    pins: int = 0


class SnapshotRing:
    """A ring of ``slots`` snapshots. Whoever reads a slot pins it; a pinned slot and the newest are not written to.

    Holders that pin one slot each leave one free for the next version if there are two slots more than holders: one for
    each of them, one for the newest version, and one for that which replaces it.

    Not safe from several threads: the owner's lock covers ``publish`` and the writing of the slot that it named, so
    that nobody pins a version that is half written.

    Args:
        slots: how many, at least 2.
    """

    def __init__(self, slots: int) -> None:
        if slots < 2:
            raise ParamserverError(
                f"slots ({slots}) must be at least 2, the newest version and the next; use 2 or more"
            )
        self._slots = [_RingSlot() for _ in range(slots)]
        self._newest: int | None = None

    def publish(self, version: int) -> int:
        """The slot that holds ``version`` from now on: one that is free, at best never used, else the oldest version.

        Raises:
            ParamserverError: ``version`` is not above the newest, or no slot is free; nothing has changed.
        """
        if self._newest is not None and version <= (newest := self._version(self._newest)):
            raise ParamserverError(
                f"version ({version}) must be above {newest}, the newest, which slot {self._newest} holds; publish "
                "each version once, in order"
            )
        free = [i for i, slot in enumerate(self._slots) if slot.pins == 0 and i != self._newest]
        if not free:
            raise ParamserverError(
                f"version ({version}) must find a free slot, and has none: {self._in_words()}; unpin what is no longer "
                "read, or use more slots"
            )
        chosen = min(free, key=self._age)
        self._slots[chosen].version = version
        self._newest = chosen
        return chosen

    def pin(self, version: int | None = None) -> tuple[int, int]:
        """Keep a version until ``unpin`` has been called as often as this.

        Args:
            version: None = the newest.

        Returns:
            Its slot, and the version.

        Raises:
            ParamserverError: no slot holds it (any more).
        """
        index = self._newest if version is None else self._find(version)
        if index is None:
            wanted = "the newest version" if version is None else f"version ({version})"
            raise ParamserverError(f"{wanted} must be in a slot to be pinned: {self._in_words()}; pin the newest")
        self._slots[index].pins += 1
        return index, self._version(index)

    def unpin(self, slot: int) -> None:
        """Undo one ``pin``.

        Raises:
            ParamserverError: there is no such slot, or nobody has pinned it.
        """
        if not 0 <= slot < len(self._slots):
            raise ParamserverError(f"slot ({slot}) must be from 0 to {len(self._slots) - 1}; unpin the one pinned")
        if self._slots[slot].pins == 0:
            raise ParamserverError(
                f"slot ({slot}) must be pinned to be unpinned: {self._in_words()}; unpin once for each pin"
            )
        self._slots[slot].pins -= 1

    def _version(self, index: int) -> int:
        version = self._slots[index].version
        assert version is not None
        return version

    def _age(self, index: int) -> tuple[bool, int]:
        version = self._slots[index].version
        return version is not None, version or 0

    def _find(self, version: int) -> int | None:
        return next((i for i, slot in enumerate(self._slots) if slot.version == version), None)

    def _in_words(self) -> str:
        return ", ".join(
            f"slot {i} is empty" if slot.version is None else f"slot {i} holds {slot.version} with {slot.pins} pin(s)"
            for i, slot in enumerate(self._slots)
        )
