"""The script with all checks, among programs that do nothing: when it ends before the first check."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs packages")
@pytest.mark.parametrize("code", [0, 100])
def test_packages_that_cannot_be_installed_although_they_are_needed_fail_it(tmp_path, code):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "awk", "mktemp", "rm"):
        (programs / name).symlink_to(shutil.which(name))
    # The interpreter of its environment makes none, and the first check after the packages ends the script.
    for name, text in {
        "python3": "exit 0",
        "python": "exit 7",
        "timeout": 'shift; "$@"',
        "apt-get": f"exit {code}",
    }.items():
        (programs / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
        (programs / name).chmod(0o755)
    environ = {"PATH": str(programs), "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash", ROOT / ".ci" / "run"], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == (1 if code else 7)
    assert ("could not be installed, and tests need them; install them" in done.stderr) == bool(code)
    assert "slurm-wlm munge" in done.stdout


def test_the_newest_torch_is_installed_after_the_rest_and_before_the_tests(tmp_path):
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir()
    for name in ("bash", "dirname", "mktemp", "rm", "grep"):
        (programs / name).symlink_to(shutil.which(name))
    # It keeps the constraints that it is given.
    text = 'echo "$*" >> $LOG; [[ $* != *"-c "*constraints* ]] || ! grep -q "^torch==" "${@: -3:1}"'
    for name in ("python3", "python"):
        (programs / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
        (programs / name).chmod(0o755)
    environ = {"PATH": str(programs), "TMPDIR": str(tmp_path), "LOG": str(log)}
    done = subprocess.run(
        ["bash", ROOT / ".ci" / "newest_torch"], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    made, installed, upgraded, _, tested = log.read_text().splitlines()
    assert made.startswith("-m venv ")
    assert "-e .[test]" in installed
    assert upgraded.endswith("--upgrade torch")
    assert tested == "-m pytest tests/unit tests/laws/test_torch_private.py"
    assert list(tmp_path.glob("tmp.*")) == []
