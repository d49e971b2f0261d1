"""Which failures a trainer of the parameter server reports, and to whom."""

from types import SimpleNamespace

import pytest

from paramserver.errors import PeerLost, PeerRefused, TaskError
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
