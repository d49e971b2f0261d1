"""Writing, checking, finding, keeping and removing checkpoints."""

import errno
import json
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.serialization import get_safe_globals, safe_globals

from paramserver.checkpoint import BestMetric, find_checkpoint, read_checkpoint, remove_leftovers
from paramserver.checkpoint.save import apply_retention, mark_best, write_checkpoint
from paramserver.checkpoint.serialization import load_archive
from paramserver.errors import CheckpointError, TrainingError, UnsupportedConfiguration

REPOSITORY = Path(__file__).parents[3]
OBJECTS = {
    "model": {"weight": torch.arange(6.0).reshape(2, 3)},
    "trainer-0": {"counts": [1, 2], "sample": np.arange(3, dtype=np.float32), "last": np.float64(0.5)},
    "notes.txt": b"as it is",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "checkpoints"


def write(folder, step, content=b"content"):
    return write_checkpoint(folder, step, {"state": content}, {"mode": "local"})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip_byte(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_reads_back_as_it_was_written(folder):
    path = write_checkpoint(folder, 100, OBJECTS, {"mode": "rpc", "trainers": 2})
    checkpoint = read_checkpoint(path)
    assert path == folder / "step-00000100"
    assert checkpoint.step == 100
    assert checkpoint.manifest.metadata == {"mode": "rpc", "trainers": 2}
    assert checkpoint.names == ("model", "trainer-0", "notes.txt")
    assert torch.equal(checkpoint.load("model")["weight"], OBJECTS["model"]["weight"])
    assert checkpoint.read_bytes("notes.txt") == b"as it is"
    assert (folder / "latest").read_text() == "step-00000100\n"
    assert names(folder) == ["latest", "step-00000100"]


def test_types_that_a_task_has_registered_for_its_files_stay_registered(folder):
    known = [np.zeros(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype("f4"))]
    checkpoint, before = read_checkpoint(write_checkpoint(folder, 100, OBJECTS, {})), set(get_safe_globals())
    assert checkpoint.load("trainer-0")["last"] == 0.5
    assert set(get_safe_globals()) == before
    with safe_globals(known):  # a task calls ``add_safe_globals``
        assert checkpoint.load("trainer-0")["last"] == 0.5
        assert set(get_safe_globals()) == {*before, *known}


def test_threads_read_one_file_at_a_time(folder, monkeypatch):
    """Else the end of one read removes the types of numpy that another one needs."""
    together = threading.Barrier(2)
    monkeypatch.setattr(torch, "load", lambda *_, **options: together.wait(0.2))
    with ThreadPoolExecutor(2) as pool:
        reads = [pool.submit(load_archive, folder / "any.pt") for _ in range(2)]
    assert all(isinstance(read.exception().__cause__, threading.BrokenBarrierError) for read in reads)


def test_numpy_samples_of_a_buffer_load_again(folder):
    state = read_checkpoint(write_checkpoint(folder, 1, OBJECTS, {})).load("trainer-0")
    assert state["counts"] == [1, 2]
    assert state["last"] == 0.5
    np.testing.assert_array_equal(state["sample"], np.arange(3, dtype=np.float32))


def test_model_loads_with_plain_pytorch(folder):
    path = write_checkpoint(folder, 1, OBJECTS, {})
    assert torch.load(path / "model.pt", weights_only=True)["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_manifest_has_the_documented_fields(folder):
    path = write_checkpoint(folder, 7, OBJECTS, {"mode": "ddp"})
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format_version"] == 3
    assert manifest["step"] == 7
    assert manifest["mode"] == "ddp"
    assert manifest["created"].endswith("+00:00")
    for name, entry in manifest["files"].items():
        assert entry["bytes"] == (path / name).stat().st_size
        assert len(entry["sha256"]) == 64
    assert sorted(manifest["files"]) == ["model.pt", "notes.txt", "trainer-0.pt"]


def test_bytes_of_a_pt_file_are_found_by_the_name_of_the_object(folder):
    source = read_checkpoint(write_checkpoint(folder, 1, OBJECTS, {}))
    copied = {"trainer-0.pt": source.read_bytes("trainer-0")}
    assert read_checkpoint(write_checkpoint(folder, 2, copied, {})).load("trainer-0")["counts"] == [1, 2]


def test_an_object_that_is_not_there_is_named_with_those_that_are(folder):
    checkpoint = read_checkpoint(write_checkpoint(folder, 1, OBJECTS, {}))
    with pytest.raises(CheckpointError, match=r"holds no 'optimizer' \(it holds model, trainer-0, notes.txt\)"):
        checkpoint.load("optimizer")


def test_a_file_that_is_no_archive_is_refused_on_load(folder):
    checkpoint = read_checkpoint(write_checkpoint(folder, 1, {"model.pt": b"no archive"}, {}))
    with pytest.raises(CheckpointError, match=r"model\.pt cannot be loaded"):
        checkpoint.load("model")


@pytest.mark.parametrize("name", ["../model", "a/b", ".hidden"])
def test_object_names_stay_inside_the_folder(folder, name):
    with pytest.raises(ValueError, match="plain file name"):
        write_checkpoint(folder, 1, {name: b""}, {})


def test_two_objects_cannot_share_a_file_nor_take_the_manifest(folder):
    with pytest.raises(ValueError, match="plain file name"):
        write_checkpoint(folder, 1, {"model": {}, "model.pt": b""}, {})
    with pytest.raises(ValueError, match="plain file name"):
        write_checkpoint(folder, 1, {"manifest.json": b""}, {})
    with pytest.raises(ValueError, match="manifest's own keys"):
        write_checkpoint(folder, 1, {}, {"step": 2})
    assert not folder.exists() or names(folder) == []


@pytest.mark.parametrize(
    "value", [lambda: None, Path("x"), {1: torch.nn.Linear(1, 1)}], ids=["lambda", "path", "module"]
)
def test_what_could_not_be_loaded_again_is_refused_when_it_is_written(folder, value):
    write(folder, 1)
    with pytest.raises(TrainingError, match=r"trainer-0.* must .*keep tensors, numpy arrays and plain values"):
        write_checkpoint(folder, 2, {"trainer-0": {"state": value}}, {})
    assert names(folder) == ["latest", "step-00000001"]


def test_every_flipped_byte_is_found_and_the_newest_good_one_named(folder):
    write(folder, 1)
    good = write(folder, 2)
    path = write_checkpoint(folder, 3, OBJECTS, {"mode": "rpc"})
    generator = random.Random(20)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for _ in range(12):
            flip_byte(file, generator.randrange(len(whole)))
            with pytest.raises(CheckpointError) as caught:
                read_checkpoint(path)
            assert str(file) in str(caught.value)
            assert f"the newest good one is {good}" in str(caught.value)
            file.write_bytes(whole)
    assert read_checkpoint(path).step == 3


def test_the_newest_good_one_skips_those_that_are_damaged_too(folder):
    good, other, path = write(folder, 1), write(folder, 2), write(folder, 3)
    flip_byte(other / "state", 0)
    (path / "state").unlink()
    with pytest.raises(CheckpointError, match=rf"state is missing; the newest good one is {good}; .* --resume {good}$"):
        read_checkpoint(path)
    flip_byte(good / "state", 0)
    with pytest.raises(CheckpointError, match="no other checkpoint in that folder is good"):
        read_checkpoint(path)


def test_a_file_of_another_length_is_found_by_its_size(folder):
    path = write(folder, 1)
    (path / "state").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="state has 5 bytes where its manifest lists 7"):
        read_checkpoint(path)


@pytest.mark.parametrize(("version", "cure"), [(4, "update"), (2, "resume it with the release that wrote it")])
def test_another_format_version_is_named_and_not_skipped(folder, version, cure):
    write(folder, 1)
    path = write(folder, 2)
    (path / "manifest.json").write_text(json.dumps({"format_version": version, "everything": "else"}))
    assert find_checkpoint(folder.parent) == path
    match = rf"has format version {version}, and this release of paramserver reads version 3; {cure}"
    with pytest.raises(CheckpointError, match=match):
        read_checkpoint(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format_version": 3}', "\xff"])
def test_a_damaged_manifest_is_an_error_of_the_checkpoint(folder, text):
    path = write(folder, 1)
    (path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"manifest\.json (is damaged|cannot be read)"):
        read_checkpoint(path)
    assert find_checkpoint(folder.parent) == path  # it was written, so it is not skipped


def test_find_takes_latest_then_the_newest_that_was_written(folder):
    one, two, three = write(folder, 1), write(folder, 2), write(folder, 3)
    (folder / "latest").write_text("step-00000002\n")
    assert find_checkpoint(folder.parent) == two
    (two / "state").unlink()
    assert find_checkpoint(folder.parent) == two  # damaged, for read_checkpoint to report
    (two / "manifest.json").unlink()
    assert find_checkpoint(folder.parent) == one  # 3 is beyond latest: of a future that was given up
    (folder / "latest").write_text("../elsewhere\n")
    assert find_checkpoint(folder.parent) == three
    (folder / "latest").unlink()
    (three / "manifest.json").unlink()
    assert find_checkpoint(folder.parent) == one


def test_the_message_lists_what_find_checked(tmp_path, folder):
    with pytest.raises(CheckpointError, match="there is no such folder"):
        find_checkpoint(tmp_path / "run")
    path = write(folder, 5)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"latest names step-00000005; .*step-00000005/manifest.json is missing"):
        find_checkpoint(tmp_path / "run")


def test_the_same_step_again_replaces_what_was_there(folder):
    write(folder, 1, b"old")
    write(folder, 1, b"new")
    assert read_checkpoint(folder / "step-00000001").read_bytes("state") == b"new"
    assert names(folder) == ["latest", "step-00000001"]


def test_everything_is_on_the_disk_before_the_name_that_promises_it(folder, monkeypatch):
    write(folder, 1)
    events = []
    fsync, replace = os.fsync, os.replace

    def traced_fsync(descriptor):
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def traced_replace(source, target):
        events.append(f"-> {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    write_checkpoint(folder, 2, {"a": b"", "b": b""}, {})
    temporary, pointer = f".step-00000002.{os.getpid()}.tmp", f".latest.{os.getpid()}.tmp"
    written = ["a", "b", "manifest.json", temporary]
    assert events == [*written, "-> step-00000002", "checkpoints", pointer, "-> latest", "checkpoints"]


@pytest.mark.parametrize(
    ("number", "cure"),
    [(errno.ENOSPC, "lower checkpoint.keep"), (errno.EROFS, "logging.run_dir"), (errno.EIO, "check that disk")],
)
def test_a_disk_error_names_file_and_cure(folder, monkeypatch, number, cure):
    write(folder, 1)

    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(TrainingError, match=cure) as caught:
        write(folder, 2)
    assert "state could not be written" in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert names(folder) == ["latest", "step-00000001"]


def test_a_failed_replacement_brings_the_old_one_back(folder, monkeypatch):
    path = write(folder, 1, b"old")
    replace = os.replace

    def refuse_new(source, target):
        if Path(target) == path and source.name.endswith(".tmp"):
            raise OSError(errno.EIO, "no")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse_new)
    with pytest.raises(TrainingError):
        write(folder, 1, b"new")
    assert read_checkpoint(find_checkpoint(folder.parent)).read_bytes("state") == b"old"
    assert names(folder) == ["latest", "step-00000001"]


def test_a_folder_that_cannot_be_made_is_the_runs_failure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="could not be written"):
        write(tmp_path / "file" / "checkpoints", 1)


def test_retention_keeps_the_newest_the_best_and_latest(folder):
    for step in range(1, 7):
        write(folder, step)
    mark_best(folder, 2)
    assert apply_retention(folder, 2) == [folder / f"step-0000000{step}" for step in (4, 3, 1)]
    assert names(folder) == ["best", "latest", "step-00000002", "step-00000005", "step-00000006"]
    with pytest.raises(UnsupportedConfiguration, match=r"checkpoint.keep \(0\) must be at least 1"):
        apply_retention(folder, 0)


def test_retention_after_a_resume_removes_abandoned_steps_first(folder):
    for step in (1, 2, 3, 8, 9):
        write(folder, step)
    write(folder, 4)
    apply_retention(folder, 3)
    assert names(folder) == ["latest", "step-00000002", "step-00000003", "step-00000004"]


def test_retention_leaves_alone_what_is_not_complete(folder):
    for step in (1, 2, 3):
        write(folder, step)
    (folder / "step-00000001" / "manifest.json").unlink()
    apply_retention(folder, 1)
    assert names(folder) == ["latest", "step-00000001", "step-00000003"]


def test_clean_removes_what_writers_left_whose_ids_others_may_have_by_now_and_nothing_else(folder):
    write(folder, 1)
    used_again = os.getppid()
    gone = [f".step-00000002.{used_again}.tmp", f".step-00000009.{2**22}.gone", f".step-00000001.{used_again}.old"]
    for name in gone:
        (folder / name).mkdir()
        (folder / name / "state").write_bytes(b"half")
    (folder / f".latest.{used_again}.tmp").write_text("step")
    assert sorted(path.name for path in remove_leftovers(folder)) == sorted([*gone, f".latest.{used_again}.tmp"])
    assert names(folder) == ["latest", "step-00000001"]
    assert remove_leftovers(folder / "not there") == []


def test_one_that_was_moved_aside_by_a_dead_writer_is_found_and_returns(folder):
    path = write(folder, 1)
    aside = folder / f".step-00000001.{os.getppid()}.old"
    path.rename(aside)
    assert read_checkpoint(find_checkpoint(folder.parent)).step == 1
    assert remove_leftovers(folder) == []
    assert find_checkpoint(folder.parent) == path


def test_best_counts_and_remembers():
    best = BestMetric("accuracy", "max")
    results = [best.update(value, step) for step, value in enumerate([0.5, 0.5, float("nan"), 0.7, 0.6])]
    assert results == [True, False, False, True, False]
    assert (best.value, best.step, best.without_improvement) == (0.7, 3, 1)
    again = BestMetric("accuracy", "max")
    again.load_state_dict(best.state_dict())
    assert again.state_dict() == best.state_dict()
    assert not again.update(0.7)


def test_best_by_min_starts_with_a_number_and_not_with_nan():
    best = BestMetric("loss", "min")
    assert [best.update(value) for value in (float("nan"), 2.0, 3.0, 1.0)] == [False, True, False, True]


def test_best_of_another_metric_is_not_taken_over():
    best = BestMetric("loss", "min")
    best.update(1.0, 5)
    other = BestMetric("accuracy", "max")
    other.load_state_dict(best.state_dict())
    assert other.value is None


def test_nothing_heavy_is_imported_until_it_is_used():
    program = (
        "import sys, paramserver.checkpoint, paramserver.runs.rundir, paramserver.metrics\n"
        "from paramserver.checkpoint import CheckpointWriter, find_checkpoint, read_checkpoint, remove_leftovers\n"
        "from paramserver.metrics import FanOut, JsonLines, TensorBoard\n"
        "from paramserver.metrics.console import Progress\n"
        "print([name for name in ('torch', 'tensorboard', 'tqdm', 'numpy') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert (answer.stdout.strip(), answer.stderr) == ("[]", "")
