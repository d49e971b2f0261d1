"""The folder of a run: made once, locked, found again, truncated to a step."""

import json
import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from lock_holder import hold_in_subprocess

from paramserver.config import Config, LoggingConfig
from paramserver.errors import CheckpointError, UnsupportedConfiguration
from paramserver.fileio import json_text
from paramserver.metrics import sinks
from paramserver.metrics.records import make_record
from paramserver.runs.attempt import furthest_step, reserve_run
from paramserver.runs.resume import open_run
from paramserver.runs.rundir import (
    environment_record,
    newest_run,
    supersede_metrics,
    write_json,
)


def create_run(base, name):
    with reserve_run(Config(task="m:A", logging=LoggingConfig(run_dir=str(base), name=name))) as run:
        return run


def test_open_takes_run_folders_only(tmp_path):
    run = create_run(tmp_path, "first")
    assert open_run(run.path) == run
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"neither config\.yaml nor checkpoints"):
        open_run(tmp_path / "other")
    with pytest.raises(CheckpointError, match="must exist"):
        open_run(tmp_path / "missing")


def make_run(base, name, started, config):
    run = create_run(base, name)
    run.config_file.write_text(config)
    if started:
        write_json(run.environment_file, {"started": started})
    return run.path


def test_the_newest_run_is_by_start_time_within_a_name_or_task(tmp_path):
    late = make_run(tmp_path, "a", "2024-05-02T10:00:00+00:00", "task: m:A\n")
    # Written as a later hour, but in a zone that is ahead: the earlier of the two.
    early = make_run(tmp_path, "b", "2024-05-02T11:30:00+02:00", "task: m:A\nlogging: {name: x}\n")
    other = make_run(tmp_path, "c", "2025-05-02T10:00:00+00:00", "task: m:B\n")
    make_run(tmp_path, "torn", "2026-01-01T00:00:00+00:00", "task: {")
    (tmp_path / "no run").mkdir()
    assert newest_run(tmp_path, task="m:A") == late
    assert newest_run(tmp_path, task="m:B") == other
    assert newest_run(tmp_path, name="b") == newest_run(tmp_path, name="x") == early
    assert newest_run(tmp_path).name == "torn"


@pytest.mark.parametrize("copy", ["sine-backup", "sine.old", "backup", "before-lr"])
def test_a_copy_is_not_resumed_in_place_of_its_run(tmp_path, copy):
    run = make_run(tmp_path, "sine", "2026-01-01T00:00:00+00:00", "task: m:A\nlogging: {name: sine}\n")
    environment = json.loads((run / "environment.json").read_text())
    write_json(run / "environment.json", environment | {"name": "sine"})
    shutil.copytree(run, tmp_path / copy)
    assert newest_run(tmp_path, name="sine") == newest_run(tmp_path, task="m:A") == run
    # It was resumed by its own folder since.
    write_json(tmp_path / copy / "environment.json", {"started": "2026-01-02T00:00:00+00:00", "name": copy})
    assert newest_run(tmp_path, name="sine") == run
    run.rename(tmp_path / "renamed")
    shutil.rmtree(tmp_path / copy)
    assert newest_run(tmp_path, name="sine") == tmp_path / "renamed"


def test_a_run_without_a_start_time_counts_by_its_folder(tmp_path):
    old, new = (make_run(tmp_path, name, None, "task: m:A\n") for name in ("old", "new"))
    os.utime(old, (1e9, 1e9))
    os.utime(new, (1e9 + 5, 1e9 + 5))
    assert newest_run(tmp_path, task="m:A") == new
    (old / "environment.json").write_text('{"started": "20')
    os.utime(old, (1e9 + 9, 1e9 + 9))
    assert newest_run(tmp_path, task="m:A") == old


def test_the_message_of_no_run_names_what_was_wanted_and_checked(tmp_path):
    make_run(tmp_path, "a", None, "task: m:A\n")
    with pytest.raises(CheckpointError, match=r"a run of task m:B, and holds none \(1 folders were looked at\)"):
        newest_run(tmp_path, task="m:B")
    with pytest.raises(CheckpointError, match=r"of logging\.name x"):
        newest_run(tmp_path / "missing", name="x")


def hold_lock(path):
    """Start another process that holds the run's lock until its standard input is closed."""
    return hold_in_subprocess("from paramserver.runs.rundir import RunDir", "RunDir(folder).lock()", path)


def test_two_processes_cannot_hold_one_run(tmp_path):
    run = create_run(tmp_path, "first")
    with hold_lock(run.path) as holder:
        expected = rf"in use by another run \(process {holder.pid} on host {socket.gethostname()}\)"
        with pytest.raises(UnsupportedConfiguration, match=expected), run.lock():
            pass
        holder.stdin.close()
        assert holder.wait(20) == 0
    with run.lock():
        assert json.loads((run.path / ".lock.json").read_text())["pid"] == os.getpid()
    assert not (run.path / ".lock.json").exists()


def test_the_place_of_a_run_that_was_moved_stays_free(tmp_path):
    """A run that is moved back must not come to be in a folder of its name."""
    run = create_run(tmp_path, "first")
    run.path.rename(tmp_path / "moved")
    for lock in (run.lock, run.reserve):
        with pytest.raises(UnsupportedConfiguration, match=r"first must be a folder .*No such file"), lock():
            pass
    assert not run.path.exists()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    run = create_run(tmp_path, "first")
    with hold_lock(run.path) as holder:
        holder.kill()
        holder.wait(20)
    with run.lock(), pytest.raises(UnsupportedConfiguration, match=f"process {os.getpid()}"), run.lock():
        pass


def test_a_process_that_has_the_id_of_a_killed_one_uses_no_folder(tmp_path):
    """In a container that starts again the same small ids are in use again."""
    run = create_run(tmp_path, "first")
    with run.lock():
        assert run.used_on() == socket.gethostname()
        holder = json.loads((run.path / ".lock.json").read_text())
    for started, host in ((holder["started"] + 1, None), (0, holder["host"])):  # 0: not known
        (run.path / ".lock.json").write_text(json.dumps({**holder, "started": started}))
        assert run.used_on() == host


def test_a_holder_that_has_not_written_its_id_is_a_holder_all_the_same(tmp_path):
    run = create_run(tmp_path, "first")
    with run.lock():
        (run.path / ".lock.json").write_text("{")
        with pytest.raises(UnsupportedConfiguration, match="has not written its id"), run.lock():
            pass


def test_write_json_replaces_and_knows_no_nan(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"loss": 1.0})
    write_json(path, {"loss": float("nan"), "values": [1, float("inf")], "path": tmp_path})
    assert json.loads(path.read_text()) == {
        "loss": None,
        "loss_text": "nan",
        "values": [1, None],
        "path": str(tmp_path),
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"kind": "start", "step": None}, *({"kind": "train", "step": step} for step in (10, 20, 30, 40))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_records_after_the_checkpoint_move_and_those_without_a_step_stay(metrics):
    assert supersede_metrics(metrics, 20) == 2
    assert [record["step"] for record in records(metrics)] == [None, 10, 20]
    superseded = metrics.with_name("metrics.superseded.jsonl")
    assert [record["step"] for record in records(superseded)] == [30, 40]
    assert supersede_metrics(metrics, 20) == 0
    assert supersede_metrics(metrics, 10) == 1
    assert [record["step"] for record in records(superseded)] == [30, 40, 20]


def test_records_of_the_checkpoints_step_that_came_later_move_by_their_kind(metrics):
    with metrics.open("a") as file:
        file.write('{"kind": "validation", "step": 20}\n{"kind": "validation", "step": 10}\n')
    assert supersede_metrics(metrics, 20, {"validation"}) == 3
    kept = [(record["kind"], record["step"]) for record in records(metrics)]
    assert kept == [("start", None), ("train", 10), ("train", 20), ("validation", 10)]


def test_records_of_the_checkpoints_step_that_the_end_of_the_run_made_move(metrics):
    with metrics.open("a") as file:
        file.write('{"kind": "buffer", "step": 20, "end": true}\n{"kind": "buffer", "step": 20}\n')
    assert supersede_metrics(metrics, 20) == 3
    assert [record["kind"] for record in records(metrics)] == ["start", "train", "train", "buffer"]
    assert not any(record.get("end") for record in records(metrics))


def test_a_line_that_a_crash_tore_moves_too(metrics):
    with metrics.open("a") as file:
        file.write('{"kind": "train", "step": 5')
    assert supersede_metrics(metrics, 40) == 1
    assert len(records(metrics)) == 5
    superseded = metrics.with_name("metrics.superseded.jsonl")
    assert superseded.read_text() == '{"kind": "train", "step": 5\n'


def test_of_lines_that_the_run_wrote_only_those_of_the_step_and_the_last_are_parsed(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    kinds = [("train", 10), ("start", None), ("train", 20), ("buffer", 20), ("train", 30)]
    lines = [json_text(make_record(kind, step, rank=0, values={"loss": 1.0})) for kind, step in kinds]
    path.write_text("\n".join([*lines, lines[0][:-1]]))  # torn behind its head
    parsed = []
    monkeypatch.setattr(sinks.json, "loads", lambda line: parsed.append(line) or json.JSONDecoder().decode(line))
    assert supersede_metrics(path, 20, {"buffer"}) == 3
    assert parsed == [lines[2], lines[3], lines[0][:-1]]
    assert path.read_text().splitlines() == lines[:3]
    assert list(sinks.read_records(path, 20)) == [json.loads(lines[2])]
    assert furthest_step(path) == 20


def test_a_crash_between_the_two_files_moves_nothing_twice(metrics, monkeypatch):
    replace = os.replace

    def crash_at_metrics(source, target):
        if Path(target) == metrics:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", crash_at_metrics)
        with pytest.raises(KeyboardInterrupt):
            supersede_metrics(metrics, 20)
    assert len(records(metrics)) == 5
    assert supersede_metrics(metrics, 20) == 2
    assert len(records(metrics.with_name("metrics.superseded.jsonl"))) == 2


def test_without_metrics_there_is_nothing_to_move(tmp_path):
    assert supersede_metrics(tmp_path / "metrics.jsonl", 3) == 0
    assert not list(tmp_path.iterdir())


def test_the_environment_records_what_the_run_started_with(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    record = environment_record(["paramserver", "launch"])
    assert record["command"] == ["paramserver", "launch"]
    assert record["versions"]["python"] == platform.python_version()
    assert set(record["versions"]) == {"python", "torch", "numpy", "paramserver"}
    assert all(record["versions"].values())
    assert record["host"] == socket.gethostname()
    assert record["git_commit"] is None
    assert record["started"].endswith("+00:00")
    assert json.loads(json.dumps(record)) == record


def test_the_environment_names_the_commit_of_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    commit = environment_record([])["git_commit"]
    assert len(commit) == 40
    monkeypatch.setattr(subprocess, "run", lambda *_, **options: raise_timeout(options["timeout"]))
    assert environment_record([])["git_commit"] is None


def raise_timeout(timeout_s):
    raise subprocess.TimeoutExpired("git", timeout_s)
