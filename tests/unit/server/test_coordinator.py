"""How server 0 finds out that a shard server is lost."""

import pytest
import torch
from servers import NoNetwork

from paramserver.config import ClusterConfig, Config
from paramserver.context import StopRequest
from paramserver.distributed.membership import Member
from paramserver.distributed.rpc_calls import NO_TIMEOUT_S, completed_future
from paramserver.errors import GenerationChanged, PeerLost
from paramserver.parameters.flat import FlatLayout, FlatTensors
from paramserver.parameters.sharding import full_shard
from paramserver.server.coordinator import ShardCoordinator
from paramserver.server.server_run import ServerRun
from paramserver.server.shard_server import ShardServer
from paramserver.server.updates import Updates
from paramserver.transport.messages import SnapshotTensor


class Store:
    """No parameters."""

    parameters = FlatTensors({})


def make_coordinator():
    config, shard = Config(cluster=ClusterConfig(num_servers=2)), full_shard(FlatLayout.of([]))
    return ShardCoordinator(
        config, ServerRun(), NoNetwork(), StopRequest(), Store, (shard, shard), (dict,), (), 0, lambda: (None, "")
    )


def test_a_loss_that_a_reply_shows_is_reported_also_where_another_thread_noticed_it_first():
    """That thread may not have reported it yet, and the error of the reply would be taken for that of the run."""
    member = Member(1, "server1", 1, "host, process 7", kind="server")
    coordinator, reported = make_coordinator(), []
    coordinator.join(member)
    coordinator.on_lost = lambda *loss: reported.append(loss)
    reset = RuntimeError("ECONNRESET: connection reset by peer")
    with pytest.raises(PeerLost, match="is lost: its connection was closed"):
        raise coordinator.unreachable(1, reset)
    with pytest.raises(PeerLost, match="is lost: its connection was closed"):
        raise coordinator.unreachable(1, reset)
    assert reported == [(member, "its connection was closed (ECONNRESET: connection reset by peer)")] * 2


def test_a_server_that_joins_twice_in_a_view_waits_for_the_next_one():
    """It has lost server 0, which may not have noticed that yet; its optimizer state was given away when it joined."""
    member = Member(1, "server1", 1, "node1, process 7", kind="server")
    coordinator = make_coordinator()
    coordinator.join(member)
    with pytest.raises(GenerationChanged, match=r"^server 1 \(node1, process 7\) joins again; the run returns"):
        coordinator.join(member)


class ShardOfServer0:
    """Has no snapshot."""

    def delete_snapshot(self, snapshot):
        pass


def test_a_server_may_take_any_time_for_what_grows_with_its_shard():
    """Otherwise a large shard over a slow network would count as lost at each checkpoint."""
    limits_s = {}

    class Recorded(NoNetwork):
        def send(self, name, timeout_s, handler, *args, **kwargs):
            limits_s[handler.__name__] = timeout_s
            return completed_future(None) if handler is ShardServer.read_rows else torch.futures.Future()

        def send_deferred(self, name, handler, *args, **kwargs):
            limits_s[handler.__name__] = NO_TIMEOUT_S
            return torch.futures.Future()

    config, shard = Config(cluster=ClusterConfig(num_servers=2)), full_shard(FlatLayout.of([]))
    updates = Updates(
        config, Store, ShardOfServer0(), (shard, shard), ["server1"], Recorded(), ServerRun(), lambda: False, None
    )
    updates.with_state(print, print)
    rows = updates._with_streams(1, 1, {"table": SnapshotTensor(0, "exp_avg", (4, 2), torch.float32)})
    rows["table"].read(0, 1)  # of a limited size
    updates._delete_snapshot(1)
    updates._call_others(ShardServer.apply, None)
    limited = {name for name, limit_s in limits_s.items() if limit_s != NO_TIMEOUT_S}
    assert limited == {"read_rows", "delete_snapshot"}
    assert limits_s.keys() - limited == {"collect_state", "apply"}
