"""A ring of snapshots never overwrites a slot with readers, and always has one for the next version."""

import pytest
import torch
from hypothesis import given, seed, settings, strategies as st

from paramserver.errors import ParamserverError
from paramserver.parameters.flat import FlatLayout
from paramserver.transport.shared_memory import RingSnapshots

LAYOUT = FlatLayout((torch.float64,), (1,), ())


class Ring:
    """A ring of snapshots of a version that the test sets, in the memory of this process."""

    def __init__(self, readers):
        self.memory = []
        self.version = 0
        self.snapshots = RingSnapshots(self, LAYOUT, readers, lambda: (self.version, [torch.tensor([self.version])]))
        self.unpin = self.snapshots.unpin

    def allocate(self, key, layout):
        self.memory.append(layout.allocate())
        return self.memory[-1]

    def pin(self, version):
        """Make ``version`` the current one, and pin it."""
        self.version = version
        slot = self.snapshots.pin()
        assert self.held(slot) == version
        return slot

    def held(self, slot):
        return int(self.memory[slot][0])


def test_versions_take_the_oldest_free_slot():
    ring = Ring(1)
    slots = []
    for version in (4, 5, 7, 8):
        slots.append(ring.pin(version))
        ring.unpin(slots[-1])
    assert slots == [0, 1, 2, 0]  # 8 takes that of 4, the oldest
    assert ring.pin(8) == 0
    assert ring.pin(9) == 1
    assert ring.pin(10) == 2


def test_the_newest_stays_until_it_is_replaced():
    ring = Ring(0)
    ring.pin(0)
    ring.unpin(0)
    assert ring.pin(1) == 1
    assert ring.pin(1) == 1


def test_a_slot_is_free_when_its_last_pin_is_gone():
    ring = Ring(0)
    assert ring.pin(1) == ring.pin(1) == 0
    ring.pin(2)
    ring.unpin(0)
    with pytest.raises(ParamserverError, match=r"^version \(3\) must find a free slot, .*slot 0 holds 1 with 1 pin"):
        ring.pin(3)
    assert ring.pin(2) == 1  # the refusal changed nothing
    ring.unpin(0)
    assert ring.pin(3) == 0


def test_an_error_names_the_slot_and_the_rule():
    ring = Ring(0)
    ring.unpin(ring.pin(5))
    with pytest.raises(ParamserverError, match=r"^slot \(0\) must be pinned .*slot 0 holds 5 .*slot 1 is empty"):
        ring.unpin(0)


@seed(19)
@settings(max_examples=200, deadline=None)
@given(
    readers=st.integers(1, 5),
    acts=st.lists(st.tuples(st.sampled_from(["update", "pull", "leave"]), st.integers(0, 4))),
)
def test_with_two_slots_more_than_readers_there_is_always_one_for_the_next_version(readers, acts):
    ring = Ring(readers)
    held: dict[int, tuple[int, int]] = {}  # slot and version of each reader
    newest = 0
    for act, reader in acts:
        reader %= readers
        if act == "update":
            newest += 1
        elif (old := held.pop(reader, None)) is not None:
            ring.unpin(old[0])
        if act == "pull":
            held[reader] = ring.pin(newest), newest
        assert all(ring.held(slot) == version for slot, version in held.values())
