"""How server 0 finds out that a shard server is lost."""

import threading

import pytest
import torch

from paramserver.distributed.membership import Member, Members
from paramserver.errors import PeerLost, ViewChanged
from paramserver.server.coordinator import ShardCoordinator


def test_a_loss_that_a_reply_shows_is_reported_also_where_another_thread_noticed_it_first():
    """That thread may not have reported it yet, and the error of the reply would be taken for that of the run."""
    member = Member(1, "server1", 1, "host, process 7", kind="server")
    coordinator, reported = object.__new__(ShardCoordinator), []
    coordinator._members, coordinator._on_lost = Members(), lambda *loss: reported.append(loss)
    coordinator._members.join(member)
    coordinator._members.lose(member)
    future = torch.futures.Future()
    future.set_exception(RuntimeError("ECONNRESET: connection reset by peer"))
    with pytest.raises(PeerLost, match="is lost: its connection was closed"):
        coordinator._value(1, future)
    assert reported == [(member, "its connection was closed (ECONNRESET: connection reset by peer)")]


def test_a_server_that_joins_twice_in_a_view_waits_for_the_next_one():
    """It has lost server 0, which may not have noticed that yet; its optimizer state was given away when it joined."""
    member = Member(1, "server1", 1, "node1, process 7", kind="server")
    coordinator = object.__new__(ShardCoordinator)
    coordinator._lock, coordinator._states, coordinator._members = threading.RLock(), {2: {}}, Members()
    with pytest.raises(ViewChanged, match=r"^server 1 \(node1, process 7\) joins again; the run returns to its last"):
        coordinator.join(member)
