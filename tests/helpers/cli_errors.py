"""What a run that was refused said, and what it left."""

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
    """Every file below, but the lock, which is never removed."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def has_table(output):
    """Whether the closing summary is there."""
    return re.search(r"^status +\w+\n", output, re.MULTILINE) is not None


def temporary_files(folder):
    return [path for path in folder.rglob("*") if path.name.startswith(".") and path.name != ".lock"]


def readers_of(run_dir, call, capsys):
    """What each of the programs says that read a run's folder."""

    def evaluated():
        code = evaluate.main([str(run_dir)])
        return code, capsys.readouterr().err

    yield evaluated
    for given in (run_dir, run_dir / "checkpoints" / "step-00000002"):
        yield lambda given=given: ((finished := call(run_dir, "--resume", given)).code, finished.output)


def assert_readers_refuse(run_dir, call, capsys, said, ways=slice(None)):
    for way in list(readers_of(run_dir, call, capsys))[ways]:
        before = file_contents(run_dir)
        code, output = way()
        message = output.partition("error: ")[2]
        assert (code, message.count("\n")) == (2, 1), output
        assert re.match(said, message), message
        assert file_contents(run_dir) == before


def assert_failed_with(finished, said, checkpoints, steps):
    """The run failed with this message, and what it had until then is there."""
    assert finished.summary["status"] == "failed"
    assert said in finished.summary["error"]
    assert finished.summary["steps"] == steps
    assert finished.checkpoints == [f"step-{step:08d}" for step in checkpoints]
    assert finished.summary["checkpoint"] == (finished.checkpoints[-1] if checkpoints else None)
    assert temporary_files(finished.run_dir) == []
