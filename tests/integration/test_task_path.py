"""A task named by a relative path: the file that is found does not depend on where the command is given."""

import json

import pytest
from launching import FinishedRun, environment, fork_server, write_config

pytestmark = pytest.mark.processes

TASK = """
from tasks import ReferenceTask


class Mine(ReferenceTask):
    pass
"""


@pytest.fixture
def projects(tmp_path):
    """Two folders with a task.py each, and a config in the first that names it."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        (folder / "task.py").write_text(TASK)
    return folders


def run(folder, *arguments):
    """Run in ``folder``; return the exit code and the output."""
    return fork_server().run(arguments, folder, 60, environment())


@pytest.mark.parametrize(("mode", "task"), [("local", "task.py:Mine"), ("rpc", "task.py:Mine"), ("rpc", "task:Mine")])
def test_the_config_names_a_file_beside_it_and_a_resume_finds_it_again(projects, mode, task):
    first, second = projects
    config = write_config(first, task=task, mode=mode, training={"max_steps": 4})
    code, output = run(second, "--config", config, "--set", "logging.name=run")
    assert code == 0, output
    finished = FinishedRun(code, output, first / "runs" / "run")
    stored = json.loads((finished.run_dir / "environment.json").read_text())
    assert stored["task"] == str(first / "task.py")
    code, output = run(second, "--resume", finished.run_dir, "--set", "training.max_steps=8")
    assert code == 0, output
    assert json.loads((finished.run_dir / "environment.json").read_text())["task"] == str(first / "task.py")
    assert finished.summary["steps"] == 8


def test_a_path_on_the_command_line_is_relative_to_the_current_folder(projects):
    first, second = projects
    config = write_config(first, task="task.py:Mine", training={"max_steps": 4})
    override = ["--set", "task=task.py:Mine", "--set", "logging.name=run"]
    code, output = run(second, "--config", config, "--dry_run", *override)
    assert code == 0, output
    assert f"task Mine, defined in {second / 'task.py'}" in output
    assert run(second, "--config", config, *override)[0] == 0
    stored = json.loads((first / "runs" / "run" / "environment.json").read_text())
    assert stored["task"] == str(second / "task.py")
