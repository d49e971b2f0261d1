"""Error messages of runs that are refused or fail, and the files that such runs leave."""

import re
from pathlib import Path

from paramserver import evaluate

TASKS = Path(__file__).with_name("invalid_tasks.py")
EVERY_3 = {"training": {"max_steps": 9, "validate_every": 0}, "checkpoint": {"every": 3, "background": False}}


def invalid_task(name):
    return f"{TASKS}:{name}"


def error_message(finished, code=2):
    """The one message that ended a run."""
    assert finished.code == code, finished.output
    assert finished.output.count("error: ") == 1, finished.output
    message = finished.output.partition("error: ")[2]
    assert code != 2 or message.count("\n") == 1, message
    return message


def file_contents(folder):
    """Contents of every file below ``folder``, by path. The lock is left out: it is never removed."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def has_table(output):
    """Whether the output has the closing summary."""
    return re.search(r"^status +\w+\n", output, re.MULTILINE) is not None


def temporary_files(folder):
    return [path for path in folder.rglob("*") if path.name.startswith(".") and path.name != ".lock"]


def readers_of(run_dir, call, capsys):
    """Calls of each program that reads a run's folder; each returns the exit code and the output."""

    def evaluated():
        code = evaluate.main([str(run_dir)])
        return code, capsys.readouterr().err

    yield evaluated
    for given in (run_dir, run_dir / "checkpoints" / "step-00000002"):
        yield lambda given=given: ((finished := call(run_dir, "--resume", given)).code, finished.output)


def assert_readers_refuse(run_dir, call, capsys, pattern, readers=slice(None)):
    """Each program exits with 2 and one line that matches ``pattern``, and changes no file."""
    for read in list(readers_of(run_dir, call, capsys))[readers]:
        before = file_contents(run_dir)
        code, output = read()
        message = output.partition("error: ")[2]
        assert (code, message.count("\n")) == (2, 1), output
        assert re.match(pattern, message), message
        assert file_contents(run_dir) == before


def assert_failed_with(finished, message, checkpoints, steps):
    """The run failed with ``message`` after ``steps``, and its checkpoints are complete."""
    assert finished.summary["status"] == "failed"
    assert message in finished.summary["error"]
    assert finished.summary["steps"] == steps
    assert finished.checkpoints == [f"step-{step:08d}" for step in checkpoints]
    assert finished.summary["checkpoint"] == (finished.checkpoints[-1] if checkpoints else None)
    assert temporary_files(finished.run_dir) == []
