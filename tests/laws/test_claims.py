"""Each claim of tests/claims.py is shown by a test, and each test that shows one names it as it stands there."""

import re
from pathlib import Path

from tests.claims import CLAIMS

TESTS = Path(__file__).resolve().parents[1]
MARKER = re.compile(r"pytest\.mark\.claim\(([^)]*)\)")


def test_each_claim_has_a_test_and_each_marker_a_claim():
    shown = {
        name
        for file in TESTS.rglob("test_*.py")
        for arguments in MARKER.findall(file.read_text())
        for name in re.findall(r'"([^"]+)"', arguments)
    }
    assert shown == {name for claims in CLAIMS.values() for name in claims}
