"""Every folder of unit tests has fast ones, and the list of slow ones names tests that exist."""

import ast

from fast_tier import LONGEST, ROOT, SLOW, may_be_fast


def test_every_slow_test_exists():
    missing = []
    for name in sorted(SLOW):
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text()) if (ROOT / file).is_file() else ast.Module([], [])
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        missing += [name] if not functions or (function and function not in functions) else []
    assert missing == []


def test_every_long_file_exists():
    assert [name for name in LONGEST if not (ROOT / name).is_file()] == []


def test_every_folder_has_fast_tests():
    folders = {file.parent for file in (ROOT / "tests" / "unit").rglob("test_*.py")}
    assert len(folders) > 20
    assert [f.name for f in sorted(folders) if not any(map(may_be_fast, f.glob("test_*.py")))] == []
