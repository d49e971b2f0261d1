"""The folder of a new run: made once, held until the start is over, and taken over where a start never began a run."""

import errno
import fcntl
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from launching import SIGNAL_TASKS, launch
from lock_holder import hold_in_subprocess

from paramserver.config import Config, LoggingConfig
from paramserver.errors import UnsupportedConfiguration
from paramserver.runs import rundir
from paramserver.runs.attempt import ResumeJournal, reserve_run
from paramserver.runs.rundir import RunDir
from paramserver.runtime.supervisor import first_error


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch):
    monkeypatch.setattr("paramserver.runs.attempt.time.strftime", lambda form: "now")


def reserve(base, name):
    return reserve_run(Config(task="m:A", logging=LoggingConfig(run_dir=str(base), name=name)))


def reserved(base, name):
    with reserve(base, name) as run:
        return run


def test_a_new_run_has_its_folders_and_places(tmp_path):
    run = reserved(tmp_path / "runs", "first")
    assert run == RunDir(tmp_path / "runs" / "first")
    assert sorted(path.name for path in run.path.iterdir()) == [".lock", "checkpoints", "logs"]
    places = {
        run.config_file: "config.yaml",
        run.environment_file: "environment.json",
        run.metrics_file: "metrics.jsonl",
        run.tensorboard_dir: "tensorboard",
        run.checkpoints_dir: "checkpoints",
        run.summary_file: "summary.json",
        run.log_file(3): "logs/rank-3.log",
    }
    assert {str(path.relative_to(run.path)): path for path in places} == {name: path for path, name in places.items()}


def began(run):
    run.config_file.write_text("task: m:A\n")
    return run


def test_a_name_that_exists_is_refused_and_a_default_one_counts_on(tmp_path):
    began(reserved(tmp_path, "first"))
    cure = r"first exists already; choose another logging.name, or remove the folder, which has no checkpoint"
    with pytest.raises(UnsupportedConfiguration, match=cure):
        reserved(tmp_path, "first")
    assert [reserved(tmp_path, None).name for _ in range(3)] == ["a-rpc-now", "a-rpc-now-2", "a-rpc-now-3"]


def test_a_folder_that_cannot_be_reserved_is_not_taken_for_one_that_is_in_use(tmp_path, monkeypatch):
    """As on a full disk, or where the file system has no locks. It refuses once: another name would be reserved."""
    flock = fcntl.flock

    def refuse_once(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "first").mkdir()
    for name in (None, "first"):
        monkeypatch.setattr(fcntl, "flock", refuse_once)
        with pytest.raises(UnsupportedConfiguration) as raised:
            reserved(tmp_path, name)
        assert str(first_error(raised.value)).startswith(
            f"run folder {tmp_path / (name or 'a-rpc-now')} must be a folder that this user can write to (No space left"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["first"], "the one that was there"


def test_a_full_disk_is_named_with_its_cure_and_nothing_is_left(tmp_path, monkeypatch):
    """A file can be made there, and not written."""

    def refuse(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = began(reserved(tmp_path, "began"))
    before = sorted(run.path.iterdir())
    monkeypatch.setattr(rundir, "atomic_write_text", refuse)
    cure = r"must be a folder that this user can write to \(No space left.*\); free space on that disk"
    with pytest.raises(UnsupportedConfiguration, match=cure):
        reserved(tmp_path, "first")
    with pytest.raises(UnsupportedConfiguration, match=cure), run.reserve(resuming=True):
        pass
    assert list(tmp_path.iterdir()) == [run.path]
    assert sorted(run.path.iterdir()) == before


@pytest.mark.parametrize("refused", ["logs", "checkpoints"])
def test_a_disk_that_is_full_once_the_folder_is_reserved_keeps_nothing_of_it(tmp_path, monkeypatch, refused):
    make = Path.mkdir

    def refuse(path, *arguments, **options):
        if path.name == refused:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        make(path, *arguments, **options)

    (tmp_path / "there").mkdir()
    monkeypatch.setattr(Path, "mkdir", refuse)
    for name in (None, "first", "there"):
        with pytest.raises(UnsupportedConfiguration, match=r"\(No space left.*\); free space on that disk"):
            reserved(tmp_path, name)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_full_disk_is_named_by_a_resume_and_nothing_is_left(tmp_path, monkeypatch):
    """What a resume changes is copied first, and may be restored from the copy."""
    run = began(reserved(tmp_path, "began"))
    journal, before = ResumeJournal(run), sorted(run.path.iterdir())
    copy, cure = shutil.copy2, r"run folder .*began must be a folder .*\(No space left.*\); free space on that disk"

    def refuse(source, target):
        target.write_text("ta")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source, None, target)

    monkeypatch.setattr(shutil, "copy2", refuse)
    with pytest.raises(UnsupportedConfiguration, match=cure):
        journal.record(0)
    assert sorted(run.path.iterdir()) == before
    monkeypatch.setattr(shutil, "copy2", copy)
    journal.record(0)
    run.config_file.write_text("task: m:B\n")
    monkeypatch.setattr(shutil, "copy2", refuse)
    with pytest.raises(UnsupportedConfiguration, match=cure):
        journal.roll_back()
    monkeypatch.setattr(shutil, "copy2", copy)
    journal.roll_back()
    assert run.config_file.read_text() == "task: m:A\n"
    assert sorted(run.path.iterdir()) == before


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "/abs"])
def test_a_name_is_one_folder(tmp_path, name):
    with pytest.raises(UnsupportedConfiguration, match="must be the name of one folder"):
        reserved(tmp_path, name)


def test_of_many_that_want_a_name_each_gets_its_own(tmp_path):
    with ExitStack() as held, ThreadPoolExecutor(8) as pool:
        enter = held.enter_context
        runs = list(pool.map(lambda _: enter(reserve(tmp_path, None)).name, range(24)))
        assert len(set(runs)) == 24
        reservations = [pool.submit(lambda: enter(reserve(tmp_path, "wanted"))) for _ in range(8)]
        assert sum(reservation.exception() is None for reservation in reservations) == 1


def test_of_many_that_find_a_folder_in_which_nothing_began_one_takes_it(tmp_path):
    for number in range(5):
        reserved(tmp_path, f"left-{number}")
        with ExitStack() as held, ThreadPoolExecutor(8) as pool:
            name, enter = f"left-{number}", held.enter_context
            reservations = [pool.submit(lambda name=name, enter=enter: enter(reserve(tmp_path, name))) for _ in "x" * 8]
            assert sum(reservation.exception() is None for reservation in reservations) == 1


def test_what_a_start_left_is_taken_over_and_tidied(tmp_path):
    run = reserved(tmp_path, "first")
    run.log_file(0).write_text("logged\n")
    left = ("summary.json", ".config.yaml.42.tmp", ".lock", ".reserved")
    for name in left:
        (run.path / name).write_text("{}")
    with reserve(tmp_path, "first") as again:
        assert again == run
        assert sorted(path.name for path in run.path.iterdir()) == [
            ".lock",
            ".reserved",
            ".reserved.json",
            "checkpoints",
            "logs",
        ]
        assert run.log_file(0).read_text() == "logged\n"
    assert not list(run.path.glob(".reserved*"))


@pytest.mark.parametrize("there", ["config.yaml", "checkpoints/step-00000003", "own-notes.txt", "metrics.jsonl"])
def test_a_folder_with_something_to_lose_is_left_alone(tmp_path, there):
    run = reserved(tmp_path, "first")
    (run.path / there).mkdir() if "step" in there else (run.path / there).write_text("")
    with pytest.raises(UnsupportedConfiguration, match="exists already"):
        reserved(tmp_path, "first")
    assert (run.path / there).exists()


def test_a_folder_that_another_start_holds_is_left_alone_until_that_one_is_killed(tmp_path):
    with hold_in_subprocess(
        "from paramserver.config import Config, LoggingConfig; from paramserver.runs.attempt import reserve_run",
        "reserve_run(Config(task='m:A', logging=LoggingConfig(run_dir=str(folder), name='first')))",
        tmp_path,
    ) as holder:
        with pytest.raises(UnsupportedConfiguration, match="exists already"):
            reserved(tmp_path, "first")
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(20)
    assert reserved(tmp_path, "first").logs_dir.is_dir()


def test_a_folder_that_a_rank_still_writes_to_is_left_alone(tmp_path):
    run = reserved(tmp_path, "first")
    with run.lock(), pytest.raises(UnsupportedConfiguration, match="exists already"):
        reserved(tmp_path, "first")


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "whom"), [("local", "self"), ("rpc", "parent")])
def test_a_start_that_was_killed_before_the_run_began_is_repeated(tmp_path, mode, whom):
    config = {
        "task": f"{SIGNAL_TASKS}:DiesAtTheStart",
        "task_args": {"mark": str(tmp_path / "mark"), "whom": whom},
        "training": {"max_steps": 2},
        "cluster": {"num_trainers": 1},
    }
    first = launch(tmp_path, mode=mode, **config)
    assert first.code == -signal.SIGKILL, first.output
    assert "config.yaml" not in (tmp_path / "mark").read_text().split()
    assert not (first.run_dir / "config.yaml").exists()
    second = launch(tmp_path, mode=mode, **config)
    assert second.code == 0, second.output
    assert second.summary["steps"] == 2
    left = [path.name for path in second.run_dir.iterdir() if path.name.startswith(".")]
    assert left == [".lock"]
