"""A ring of snapshots never overwrites a slot with readers, and always has one for the next version."""

import pytest
from hypothesis import given, seed, settings, strategies as st

from paramserver.errors import ParamserverError
from paramserver.transport.shared_memory import SnapshotRing


def test_versions_take_the_oldest_free_slot():
    ring = SnapshotRing(3)
    assert [ring.publish(version) for version in (4, 5, 7)] == [0, 1, 2]
    assert ring.publish(8) == 0  # holds 4, the oldest
    assert ring.pin(5) == (1, 5)
    assert ring.publish(9) == 2  # 1 is pinned, 0 the newest
    assert ring.pin() == (2, 9)
    assert ring.pin(8) == (0, 8)


def test_the_newest_stays_until_it_is_replaced():
    ring = SnapshotRing(2)
    ring.publish(0)
    ring.pin()
    ring.unpin(0)
    assert ring.publish(1) == 1
    assert ring.pin() == (1, 1)


def test_a_slot_is_free_when_its_last_pin_is_gone():
    ring = SnapshotRing(2)
    ring.publish(1)
    assert ring.pin() == ring.pin(1) == (0, 1)
    ring.publish(2)
    ring.unpin(0)
    with pytest.raises(ParamserverError, match=r"^version \(3\) must find a free slot, .*slot 0 holds 1 with 1 pin"):
        ring.publish(3)
    assert ring.pin() == (1, 2)  # the refusal changed nothing
    ring.unpin(0)
    assert ring.publish(3) == 0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda ring: ring.publish(5), r"version \(5\) must be above 5, the newest, which slot 0 holds"),
        (lambda ring: ring.publish(4), r"version \(4\) must be above 5"),
        (lambda ring: ring.pin(4), r"version \(4\) must be in a slot .*slot 0 holds 5 with 0 pin.*slot 1 is empty"),
        (lambda ring: ring.unpin(0), r"slot \(0\) must be pinned"),
        (lambda ring: ring.unpin(2), r"slot \(2\) must be from 0 to 1"),
        (lambda ring: ring.unpin(-1), r"slot \(-1\) must be from 0 to 1"),
        (lambda ring: SnapshotRing(2).pin(), r"the newest version must be in a slot .*slot 0 is empty"),
        (lambda ring: SnapshotRing(1), r"slots \(1\) must be at least 2"),
    ],
)
def test_errors_name_the_slot_and_the_rule(act, message):
    ring = SnapshotRing(2)
    ring.publish(5)
    with pytest.raises(ParamserverError, match=f"^{message}"):
        act(ring)


@seed(19)
@settings(max_examples=200, deadline=None)
@given(
    readers=st.integers(1, 5),
    acts=st.lists(st.tuples(st.sampled_from(["publish", "pull", "leave"]), st.integers(0, 4))),
)
def test_with_two_slots_more_than_readers_there_is_always_one_to_publish_to(readers, acts):
    ring = SnapshotRing(readers + 2)
    memory = {ring.publish(0): 0}  # what is written in each slot
    held: dict[int, tuple[int, int]] = {}
    newest = 0
    for act, reader in acts:
        reader %= readers
        if act == "publish":
            newest += 1
            memory[ring.publish(newest)] = newest
        elif (old := held.pop(reader, None)) is not None:
            ring.unpin(old[0])
        if act == "pull":
            held[reader] = ring.pin()
            assert held[reader][1] == newest
        assert all(memory[slot] == version for slot, version in held.values())
        assert newest in memory.values()
