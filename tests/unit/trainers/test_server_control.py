"""Which failures a trainer of the parameter server reports, and to whom; how it sends its part of a checkpoint."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from paramserver.checkpoint import serialization
from paramserver.config import config_from_mapping
from paramserver.errors import PeerLost, PeerRefused, TaskError
from paramserver.trainers import server_control
from paramserver.trainers.server_control import ServerControl


@pytest.fixture
def control():
    reported = []

    def to(where):
        return SimpleNamespace(report_failure=lambda failure: reported.append((where, failure.message)), abort=list)

    process = SimpleNamespace(config=None, trainer_index=1, session=0, is_newcomer=False)
    control = ServerControl(process, None, to("rendezvous"))
    control.server, control.sender, control.reported = to("server"), to("sender"), reported
    return control


@pytest.mark.parametrize(
    ("joined", "error", "where"),
    [
        (False, PeerLost("server 1 did not accept this process"), ["rendezvous"]),  # no process watches it yet
        (False, TaskError("no such key"), ["rendezvous"]),
        (False, PeerRefused("the config differs"), []),
        (True, TaskError("no such key"), ["server"]),
        (True, PeerLost("the server is lost"), []),  # the server knows, or is gone
    ],
)
def test_a_failure_is_reported_where_it_is_not_known(control, joined, error, where):
    control.joined = joined
    control.report_failure(error)
    assert [place for place, _ in control.reported] == where
    assert all(str(error) in message for _, message in control.reported)


def test_a_trainer_that_joins_again_reports_no_server_that_it_cannot_reach(control):
    """It tries again; the report would end the run."""
    control.joined, control.process.session = False, 1
    control.report_failure(PeerLost("server 0 did not accept this process"))
    assert control.reported == []
    control.report_failure(TaskError("no such key"))
    assert [place for place, _ in control.reported] == ["rendezvous"]


def test_each_chunk_of_a_part_is_progress(control, monkeypatch):
    def receive(step, chunk):
        progress.append(control.sender._last_progress())

    server = SimpleNamespace(send_part_chunk=receive, finish_part=lambda step, pause_s: None, close=lambda: None)
    agent = SimpleNamespace(worker_id=0, server_addresses=[])
    monkeypatch.setattr(server_control, "rpc_trainer", lambda *args: contextlib.nullcontext(agent))
    monkeypatch.setattr(server_control, "ServerClient", lambda *args: server)
    monkeypatch.setattr(serialization, "CHUNK_BYTES", 1000)
    control.process.stop_limit, progress = None, []
    control.config = config_from_mapping({"mode": "rpc", "task": "m:T", "cluster": {"num_trainers": 1}})
    with control.connected(lambda: False):
        control.send_part(1, {"w": torch.zeros(1000)}, 0.0)
        control.sender.wait()
    assert len(progress) > 4
    assert progress[0] == 0 < progress[1] <= progress[-1]
