"""Every test leaves the process as it found it; one that does not fails."""

import pytest
from helpers.hygiene import Snapshot


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = Snapshot.take()
    yield
    left = before.leaks()
    before.restore_environ()
    if left:
        pytest.fail(f"this test left behind: {'; '.join(left)}", pytrace=False)


@pytest.fixture
def own_environ(nothing_left_behind):
    """For tests of what writes to the environment on purpose: it is put back before anybody looks."""
    before = Snapshot.take()
    yield
    before.restore_environ()
