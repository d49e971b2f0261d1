"""The process of a shard server: connect, join, serve until server 0 ends the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

from paramserver.consistency import Decision
from paramserver.context import ProcessContext
from paramserver.distributed.membership import Member, release_liveness_calls
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.distributed.rpc_calls import RemoteError, register_server, unregister_servers
from paramserver.distributed.session import rpc_shard_server, server_name, tcp_server
from paramserver.errors import PeerLost, PeerRefused
from paramserver.server.client import ShardCoordinatorClient
from paramserver.server.server_run import UpdateExecutor
from paramserver.server.shard_server import ShardServer
from paramserver.task import Task

# A signal to this process is passed on after at most this time, even if heartbeats are rarer.
_POLL_S = 0.2


def serve_shard(
    process: ProcessContext, task: Task, rendezvous: Rendezvous, on_joined: Callable[[], None] = lambda: None
) -> Decision:
    """Serve a shard until server 0 ends the run, and return the decision that ended it.

    ``on_joined`` is called when server 0 has accepted this process.

    Raises:
        ParamserverError: the run failed, here or in another process.
    """
    config, index = process.config, process.role.server_index
    assert index is not None
    with ExitStack() as stack:
        # Until the agent has ended: calls that arrive in between must find the server, or the end of its connection.
        stack.callback(unregister_servers)
        name = stack.enter_context(rpc_shard_server(rendezvous, index))
        # Released last: it notifies server 0 that this process ends deliberately.
        stack.callback(release_liveness_calls)
        client = stack.enter_context(closing(ShardCoordinatorClient(config, index)))
        try:
            assignment = client.join(Member(index, name, index, rendezvous.host_and_pid, kind="server"))
            on_joined()
            client.start_heartbeat()
            updates = stack.enter_context(closing(UpdateExecutor(config.cluster.timeout_s)))
            client.stuck_place = updates.stuck_place
            server = ShardServer(task, config, index, assignment, rendezvous.generation, updates.submit, client.weights)
            updates.before_job = lambda: process.profiler.enter_step(server.shard.version)
            register_server(server)
            if config.server.connects:
                stack.enter_context(tcp_server(rendezvous, server_name(index)))
            client.report_ready(server.shares_memory)
            return _wait_for_end(server, client, process, updates)
        except Exception as error:
            if not isinstance(error, (PeerLost, PeerRefused)):  # these come from server 0
                client.report_failure(RemoteError.reported_by(f"server {index}", error))
            raise


def _wait_for_end(
    server: ShardServer, client: ShardCoordinatorClient, process: ProcessContext, updates: UpdateExecutor
) -> Decision:
    signal_reported = False
    while not server.finished.wait(min(process.config.server.heartbeat_s, _POLL_S)):
        process.stop_limit.beat()  # server 0 decides how the run ends
        client.raise_if_lost()
        if process.stop.event.is_set() and not signal_reported:
            signal_reported = True
            client.request_stop(process.stop.state()[1])
    if isinstance(server.outcome, RemoteError):
        if process.stop.event.is_set() and updates.stuck_place():
            updates.abandon()
        raise server.outcome.error()
    assert server.outcome is not None
    return server.outcome
