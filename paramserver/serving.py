"""A rank that is a server beside the first, from its connection to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from paramserver import hosting
from paramserver.config import Config
from paramserver.consistency import Decision
from paramserver.errors import PeerLost, PeerRefused
from paramserver.meeting import Meeting
from paramserver.membership import Member, release_lifelines
from paramserver.process import Process
from paramserver.protocol import Enrollment
from paramserver.remote import RemoteServer
from paramserver.session import rpc_shard_server
from paramserver.shard_server import ShardServer
from paramserver.task import Task
from paramserver.transport.wire import Failure

# A signal to this process is passed on so soon, however seldom its heart beats.
_LOOK_S = 0.2


def serve_shard(process: Process, task: Task, meeting: Meeting) -> Decision:
    """Own a shard until the first server says that the run is over; what ended it.

    Raises:
        ParamserverError: the run failed, here or elsewhere.
    """
    config, index = process.config, process.role.server_index
    assert index is not None
    with ExitStack() as stack:
        name = stack.enter_context(rpc_shard_server(meeting, index))
        remote = stack.enter_context(_first_server(config, index))
        try:
            enrollment: Enrollment = remote.call(
                "conductor.enroll", Member(index, name, index, meeting.place, kind="server")
            )
            remote.start_heartbeat()
            server = ShardServer(task, config, index, enrollment)
            hosting.host(server)
            stack.callback(hosting.host, None)
            remote.call("conductor.ready", index, server.shares_memory)
            return _await_end(server, remote, process)
        except Exception as error:
            _give_up(remote, index, error)
            raise


@contextmanager
def _first_server(config: Config, server_index: int) -> Iterator[RemoteServer]:
    remote = RemoteServer(config, server_index, "conductor.beat")
    try:
        yield remote
    finally:
        remote.close()
        release_lifelines()


def _await_end(server: ShardServer, remote: RemoteServer, process: Process) -> Decision:
    told = False
    while not server.finished.wait(min(process.config.server.heartbeat_s, _LOOK_S)):
        remote.check()
        if process.stop.event.is_set() and not told:
            told = True
            remote.call("conductor.ask_to_stop", process.stop.state()[1])
    outcome: Any = server.outcome
    if isinstance(outcome, Failure):
        raise outcome.error()
    assert isinstance(outcome, Decision)
    return outcome


def _give_up(remote: RemoteServer, server_index: int, error: Exception) -> None:
    """Tell the first server why this one ends, unless that is how it knows."""
    if isinstance(error, (PeerLost, PeerRefused)):
        return
    remote.call("conductor.give_up", server_index, Failure.told_by(f"server {server_index}", error))
