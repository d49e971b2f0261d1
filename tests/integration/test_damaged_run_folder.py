"""A run's folder that was damaged on purpose, or copied badly: one sentence, exit code 2, and nothing is lost."""

import errno
import json
import os
import shutil

import pytest
from cli_errors import assert_readers_refuse, error_message, file_contents

from paramserver.checkpoint.format import _manifest_digest, step_of


def put(path, what):
    """In the place of ``path``."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    {"folder": path.mkdir, "loop": lambda: path.symlink_to(path), "pipe": lambda: os.mkfifo(path), "file": path.touch}[
        what
    ]()


FILES = ("config.yaml", "environment.json", "summary.json", "metrics.jsonl", "metrics.superseded.jsonl")


@pytest.mark.parametrize("what", ["folder", "loop", "pipe"])
@pytest.mark.parametrize("name", [*FILES, "checkpoints/latest", "checkpoints/best"])
def test_something_else_in_the_place_of_a_file(run_dir, call, capsys, name, what):
    """A pipe is not waited for."""
    put(run_dir / name, what)
    assert_readers_refuse(
        run_dir, call, capsys, rf"{run_dir / name} must be a file, as the run wrote it, and is none; move it"
    )


@pytest.mark.parametrize("what", ["file", "loop"])
@pytest.mark.parametrize("name", ["checkpoints", "logs", "tensorboard"])
def test_something_else_in_the_place_of_a_folder(run_dir, call, capsys, name, what):
    put(run_dir / name, what)
    assert_readers_refuse(
        run_dir, call, capsys, rf"{run_dir / name} must be a folder, as the run made it, and is none; move it"
    )


@pytest.mark.parametrize("name", [".lock", ".lock.json", ".reserved.json"])
def test_a_folder_in_the_place_of_a_lock(run_dir, call, name):
    put(run_dir / name, "folder")
    assert "must be a folder that this user can write to (Is a directory)" in error_message(
        call(run_dir, "--resume", run_dir)
    )
    put(run_dir / name, "file")
    assert call(run_dir, "--resume", run_dir).code == 0


@pytest.mark.parametrize("name", ["file", "empty", "loop", "x" * 300, "nul\0", "nowhere"])
def test_a_folder_that_is_no_run(tmp_path, call, start, name):
    given = tmp_path / name
    if name in ("file", "loop"):
        put(given, name)
    if name == "empty":
        given.mkdir()
    assert str(given) in error_message(call(given, "--resume", given))
    before = sorted(tmp_path.rglob("*"))
    assert f"init_from ({given})" in error_message(start(init_from=str(given), folder=tmp_path / "new"))
    assert [path for path in sorted(tmp_path.rglob("*")) if "new" not in path.relative_to(tmp_path).parts] == before


def test_a_file_that_this_user_may_not_write_is_refused_before_the_first_step(run_dir, call, monkeypatch):
    """Root may write everywhere, so the answer of the system is given here."""
    for name in ("checkpoints", "logs", "metrics.jsonl", "checkpoints/latest"):
        closed, access = run_dir / name, os.access
        with monkeypatch.context() as patched:
            patched.setattr(os, "access", lambda path, mode, closed=closed, access=access, **_: path != closed)
            before = file_contents(run_dir)
            expected = error_message(call(run_dir, "--resume", run_dir / "checkpoints" / "step-00000002"))
        assert expected.startswith(f"{closed} must be ")
        assert file_contents(run_dir) == before


# The manifest.


def sealed(change):
    """As another program would write it, with the right digest."""

    def write(path):
        content = json.loads(path.read_text())
        content.pop("manifest_sha256")
        change(content)
        path.write_text(json.dumps({**content, "manifest_sha256": _manifest_digest(content)}))

    return write


def with_file(name):
    return sealed(lambda content: content["files"].update({name: {"bytes": 0, "sha256": ""}}))


MANIFESTS = {
    "10 MB": (lambda path: path.write_text("[" * 10_000_000), "is damaged"),
    "deep": (lambda path: path.write_text('{"a":' * 200_000), "is damaged"),
    "a long number": (lambda path: path.write_text('{"format_version": ' + "9" * 10_000 + "}"), "is damaged"),
    "a list": (lambda path: path.write_text("[1]"), "is damaged"),
    "a number": (lambda path: path.write_text("3"), "is damaged"),
    "other text": (lambda path: path.write_bytes(b"\xff\xfe{"), "cannot be read"),
    "a folder": (lambda path: put(path, "folder"), r"cannot be read \(it is not a file\)"),
    "a loop": (lambda path: put(path, "loop"), r"cannot be read \(it is not a file\)"),
    "a pipe": (lambda path: put(path, "pipe"), r"cannot be read \(it is not a file\)"),
    "outside": (with_file("../latest"), "'../latest' is not the plain name of a file"),
    "absolute": (with_file("/etc/hostname"), "'/etc/hostname' is not the plain name of a file"),
    "nul": (with_file("a\0"), "is not the plain name of a file"),
    "no name": (with_file("\ud800"), "is damaged"),
    "infinite": (sealed(lambda content: content.update(step=float("inf"))), "is damaged"),
    "another step": (sealed(lambda content: content.update(step=7)), r"manifest\.json is of step 7"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_is_none(run_dir, call, capsys, start, tmp_path, name):
    """The message names the newest good one, from which a resume skips the damaged one."""
    damage, expected = MANIFESTS[name]
    step_2, step_4 = (run_dir / "checkpoints" / f"step-0000000{step}" for step in (2, 4))
    damage(step_4 / "manifest.json")
    expected = rf"{step_4}.*{expected}.*; the newest good one is {step_2}"
    assert_readers_refuse(run_dir, call, capsys, expected, slice(0, 2))
    error_message(start(init_from=str(run_dir), folder=tmp_path / "new"))
    if name in ("10 MB", "a loop", "another step"):
        finished = call(run_dir, "--resume", step_2)
        assert finished.code == 0, finished.output
        assert finished.summary["steps"] == 4


@pytest.mark.parametrize("trainers", [2, 10**9, 10**30])
def test_a_manifest_that_promises_more_parts_than_there_are(run_dir, call, trainers):
    sealed(lambda content: content.update(trainers=trainers))(run_dir / "checkpoints/step-00000004/manifest.json")
    assert "holds no 'trainer-1' (it holds " in error_message(call(run_dir, "--resume", run_dir))


# Where the newest is.


@pytest.mark.parametrize("text", [b"../x", b"\xff\xfe", b"step-00000002\0", b"step-" + b"9" * 5000, b"step-00000099"])
def test_a_pointer_to_nothing_is_as_none(run_dir, call, text):
    (run_dir / "checkpoints" / "latest").write_bytes(text)
    finished = call(run_dir, "--resume", run_dir, "--set", "training.max_steps=5")
    assert finished.code == 0, finished.output
    assert f"resuming {run_dir} from step-00000004\n" in finished.output
    assert finished.checkpoints[-1] == "step-00000005"


@pytest.mark.parametrize("what", ["file", "loop"])
def test_no_folder_in_the_place_of_a_checkpoint(run_dir, call, what):
    put(run_dir / "checkpoints" / "step-00000004", what)
    finished = call(run_dir, "--resume", run_dir)
    assert finished.code == 0, finished.output
    assert f"resuming {run_dir} from step-00000002\n  skipped: " in finished.output
    assert finished.load("run")["step"] == 4


def test_what_may_not_be_looked_at_is_not_passed_over(run_dir, call, monkeypatch):
    hidden, lstat = run_dir / "checkpoints" / "step-00000004", os.lstat

    def refusing(path, **options):
        if str(path).startswith(str(hidden)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return lstat(path, **options)

    (hidden / "manifest.json").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", refusing)
        assert f"{hidden}/manifest.json is missing" in error_message(call(run_dir, "--resume", run_dir))


@pytest.mark.parametrize(
    ("name", "step"),
    [("step-00000004", 4), ("step-123456789", 123456789), ("step-" + "1" * 19, None), ("step-٠٠٠٠٠٠٠٤", None)],
)
def test_the_name_of_a_checkpoint_has_so_many_plain_digits(name, step):
    assert step_of(name) == step


# What a start or an attempt wrote down.


@pytest.mark.parametrize("text", ['{"folders": 3}', '{"folders": [1, null, "a\\u0000"]}', "[]", "\udcff"])
def test_an_unreadable_environment_is_ignored(run_dir, call, text):
    (run_dir / "environment.json").write_text(text, errors="surrogateescape")
    assert call(run_dir, "--resume", run_dir, "--set", "training.max_steps=5").code == 0


@pytest.mark.parametrize(
    "note", ["{", "[]", '{"first_step": "x"}', '{"first_step": 4, "checkpoints": 3, "events": []}']
)
def test_an_unreadable_note_of_an_attempt_is_ignored(run_dir, call, note):
    (run_dir / ".attempt").mkdir()
    (run_dir / ".attempt" / "note.json").write_text(note)
    finished = call(run_dir, "--resume", run_dir, "--set", "training.max_steps=5")
    assert finished.code == 0, finished.output
    assert not (run_dir / ".attempt").exists()


@pytest.mark.parametrize("what", ["file", "loop", "pipe"])
def test_something_else_in_the_place_of_that_note(run_dir, call, what):
    put(run_dir / ".attempt", what)
    put(run_dir / ".attempt.new", what)
    assert call(run_dir, "--resume", run_dir, "--set", "training.max_steps=5").code == 0


def test_records_that_are_no_text_are_kept_beside(run_dir, call):
    (run_dir / "metrics.superseded.jsonl").write_bytes(b"\xff\xfe\n")
    with (run_dir / "metrics.jsonl").open("ab") as records:
        records.write(b"\xff\xfe\n")
    finished = call(run_dir, "--resume", run_dir / "checkpoints" / "step-00000002")
    assert finished.code == 0, finished.output
    assert [record["step"] for record in finished.of_kind("train")] == [1, 2, 3, 4]
    assert len((run_dir / "metrics.superseded.jsonl").read_text().splitlines()) > 2
