"""Every folder of unit tests has fast ones, and the list of slow ones names tests that exist."""

import ast
import re

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


def test_files_that_start_runs_of_several_processes_have_tests_of_which_a_session_runs_some_cases():
    """All cases of each would take minutes: see ``sample`` of tests/helpers/fast_tier.py."""
    files = [file for folder in ("integration", "examples") for file in (ROOT / "tests" / folder).glob("test_*.py")]
    starts = {file.name: text for file in files if starts_ranks(text := file.read_text())}
    assert len(starts) > 40
    assert [name for name, text in sorted(starts.items()) if "mark.processes" not in text] == []


def starts_ranks(text):
    """Whether a test of this text names a mode with several processes, and what starts them."""
    imported = re.search(r"^from launching import (\([^)]*\)|.*)", text, re.MULTILINE)
    starters = {"launch", "train", "fork_server", "ranks_without_supervisor"}
    return bool(imported and starters & set(re.findall(r"\w+", imported[1])) and re.search(r'"(rpc|ddp)"', text))
