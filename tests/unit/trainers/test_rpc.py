"""Which failures a trainer of the parameter server reports, and to whom."""

from types import SimpleNamespace

import pytest

from paramserver.errors import PeerLost, PeerRefused, TaskError
from paramserver.trainers import RpcTrainer


@pytest.fixture
def trainer():
    reported = []

    def to(where):
        return SimpleNamespace(report_failure=lambda failure: reported.append((where, failure.message)), abort=list)

    trainer = object.__new__(RpcTrainer)
    trainer.trainer_index, trainer.reported = 1, reported
    trainer.process = SimpleNamespace(session=0, is_newcomer=False)
    trainer.server, trainer.rendezvous, trainer._sender = to("server"), to("rendezvous"), to("sender")
    return trainer


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
def test_a_failure_is_reported_where_it_is_not_known(trainer, joined, error, where):
    trainer.joined = joined
    trainer.report_failure(error)
    assert [place for place, _ in trainer.reported] == where
    assert all(str(error) in message for _, message in trainer.reported)


def test_a_trainer_that_joins_again_reports_no_server_that_it_cannot_reach(trainer):
    """It tries again; the report would end the run."""
    trainer.joined, trainer.process.session = False, 1
    trainer.report_failure(PeerLost("server 0 did not accept this process"))
    assert trainer.reported == []
    trainer.report_failure(TaskError("no such key"))
    assert [place for place, _ in trainer.reported] == ["rendezvous"]
