"""A run with one fault goes on, or ends with one sentence. All faults are in docs/faults.csv."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the scripts are modules of the checkout, which is not always importable

from tests.measure.faults import Cell, References, run_cell  # noqa: E402
from tests.measure.kills import Kills, run_kills  # noqa: E402

pytestmark = pytest.mark.processes

# Every other cell of rpc has the transport rpc: parameters and gradients are messages, also on one host.
CELLS = [
    # A trainer, in every phase and every way to die.
    "sync/trainer/joining/exit",
    "sync/trainer/first_step/stop/rpc",
    "sync/trainer/mid_step/raise",
    "sync/trainer/validation/hold/rpc",
    "sync/trainer/validation/kill",
    "sync/trainer/checkpoint/kill/rpc",
    "sync/trainer/shutdown/kill",
    "rollback/trainer/mid_step/kill/rpc",
    "rollback/trainer/shutdown/kill",  # the other one has finished by then
    "bounded/trainer/validation/kill/rpc",
    "backup/trainer/validation/kill",
    "async/trainer/mid_step/kill/rpc",
    "backup/trainer/mid_step/stop_10s",
    "ddp/trainer/checkpoint/kill",
    "ddp/trainer/mid_step/disk",
    # The server.
    "sync/server/joining/kill/rpc",
    "sync/server/first_step/exit",
    "sync/server/mid_step/hold/rpc",
    "sync/server/validation/raise",
    "sync/server/checkpoint/kill/rpc",
    "sync/server/shutdown/stop",
    "bounded/server/mid_step/stop/rpc",
    "async/server/checkpoint/kill",
    "sync/server/checkpoint/disk/rpc",
    # A shard server.
    "sync/shard/joining/kill",
    "sync/shard/first_step/kill/rpc",
    "async/shard/mid_step/kill",
    # The supervisor.
    "sync/supervisor/mid_step/kill/rpc",
    "ddp/supervisor/mid_step/stop_10s",
    "sync/supervisor/shutdown/kill",
]


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    return References(tmp_path_factory.mktemp("references"))


@pytest.mark.sampled(5)  # of both transports
@pytest.mark.claim("rpc-faults")
@pytest.mark.parametrize("name", CELLS)
def test_a_run_survives(tmp_path, references, name):
    """It completes with every sample applied as often as is due, or ends in one sentence; nothing is left behind."""
    cell = Cell(*name.split("/"))
    assert cell.impossible() is None
    outcome = run_cell(cell, tmp_path / "run", references)
    assert outcome.problems == [], outcome
    if cell.fault in ("raise", "disk"):
        expected = "the injected error" if cell.fault == "raise" else "must be writable"
        assert expected in outcome.outcome or "could not be written" in outcome.outcome


@pytest.mark.nightly  # the cells above have kills in each phase
@pytest.mark.claim("rpc-faults")
@pytest.mark.parametrize(("role", "transport"), [("server", "auto"), ("trainer", "auto"), ("trainer", "rpc")])
def test_a_run_survives_kills_at_random_instants(tmp_path, references, role, transport):
    """The parameters are those of a run without kills."""
    consistency = "sync" if role == "server" else "rollback"
    kills = Kills(role, consistency, "adam", seed=1, count=2, transport=transport)
    outcome = run_kills(kills, tmp_path / "run", references)
    assert outcome.kills == 2
    assert outcome.problems == []
