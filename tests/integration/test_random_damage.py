"""Checkpoints that are damaged at random: each is refused by the name of the file, and the one before it loads."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the scripts are modules of the checkout, which is not always importable

from tests.measure.damaged_checkpoints import DAMAGES, examine, make_source  # noqa: E402

pytestmark = pytest.mark.processes

SEEDS = 50


def test_a_checkpoint_that_is_damaged_at_random_is_refused_and_the_one_before_loads(tmp_path):
    """They have rows of the ledger, and parts that the server made for a lost trainer."""
    finished, config = make_source(tmp_path / "source")
    outcomes = [examine(seed, finished, config, tmp_path / str(seed)) for seed in range(SEEDS)]
    assert {outcome.damage for outcome in outcomes} == set(DAMAGES)
    assert any(outcome.substitute for outcome in outcomes)
    assert [problem for outcome in outcomes for problem in outcome.problems] == []
