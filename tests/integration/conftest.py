"""Fixtures of the tests of whole runs."""

import pytest
from forkserver import FORKED_LOADER
from stored_run import original, run_dir

__all__ = ["forked_loaders", "original", "run_dir"]


@pytest.fixture
def forked_loaders(monkeypatch):
    """Runs whose loaders are forks that import no torch: each has one in every rank."""
    monkeypatch.setenv(FORKED_LOADER, "1")
