"""A checkpoint in memory: when it is the one to resume from, how it comes to the disk, how little room is refused."""

import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from open_writers import open_writer
from torch.utils._pytree import tree_leaves_with_path

from paramserver.checkpoint import find_checkpoint, read_checkpoint, stage_copy
from paramserver.checkpoint.format import list_written
from paramserver.checkpoint.memory import (
    MEMORY,
    check_memory_folder,
    follows,
    make_memory_folder,
    move_to_disk,
    newer_in_memory,
    remove_memory,
)
from paramserver.checkpoint.save import write_checkpoint
from paramserver.checkpoint.staging import FilePool
from paramserver.errors import CheckpointError, StorageError, UnsupportedConfiguration
from paramserver.runs import resume
from paramserver.runs.attempt import resume_transaction
from paramserver.runs.resume import describe_resume
from paramserver.runs.rundir import RunDir

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "run"
    (folder / "checkpoints").mkdir(parents=True)
    return folder


@pytest.fixture
def base(tmp_path):
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def on_disk(run, step):
    return write_checkpoint(run / "checkpoints", step, {"model": {"w": torch.full((4,), float(step))}}, {"trainers": 1})


def in_memory(run, base, step, after, model=None):
    """One whose large tensors are where they were staged; by default it has a single one, and none else."""
    model = {"w": torch.full((2**15,), float(step))} if model is None else model
    folder = make_memory_folder(run, base, {"model": model})
    pool = FilePool(folder)
    stored, blocks, _ = pool.detach(stage_copy(model, pool))
    objects = {"model": stored, "empty": b""}
    return write_checkpoint(folder, step, objects, {"trainers": 1, **follows(after, {"model": blocks})})


@pytest.mark.parametrize(
    ("disk", "step", "after", "wins"),
    [
        (None, 5, [None], True),
        (100, 150, ["step-00000100"], True),
        (100, 150, ["step-00000100", None], True),  # the first one was still being written
        (100, 150, [None], False),  # of another history of the run
        (120, 150, ["step-00000100"], False),  # the run was resumed elsewhere from step 100
        (50, 150, ["step-00000100"], False),  # checkpoints were removed, or an earlier one was chosen
        (100, 100, ["step-00000050", "step-00000100"], False),
        (100, 50, ["step-00000100"], False),
    ],
)
def test_the_newest_of_both_wins_if_it_continues_what_is_on_the_disk(run, base, disk, step, after, wins):
    if disk is not None:
        on_disk(run, disk)
    found = in_memory(run, base, step, after)
    assert newer_in_memory(run) == (found if wins else None)
    assert RunDir(run).has_checkpoint() == (wins or disk is not None)
    sentence = move_to_disk(run)
    assert (sentence is not None) == wins
    assert (run / "checkpoints" / "latest").read_text() == f"step-{step if wins else disk:08d}\n"
    assert not list(base.iterdir())
    assert not (run / "checkpoints" / MEMORY).exists()


@pytest.mark.parametrize("name", ["link", "."])
def test_it_is_found_by_each_path_of_the_run(run, base, tmp_path, monkeypatch, name):
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run)
    path = Path() if name == "." else tmp_path / "link"
    for made_by, found_by in ((run, path), (path, run)):
        found = in_memory(made_by, base, 5, [None])
        assert newer_in_memory(found_by) == found
        remove_memory(found_by)
        assert not list(base.iterdir())
    assert RunDir(Path()).name == "run"


def test_a_relative_folder_is_found_from_elsewhere(run, base, tmp_path, monkeypatch):
    monkeypatch.chdir(base)
    in_memory(run, Path(), 5, [None])
    monkeypatch.chdir(tmp_path)
    assert newer_in_memory(run).parent.parent == base


def test_what_comes_to_the_disk_is_the_same_checkpoint(run, base):
    large = torch.arange(2**17).reshape(2**8, 2**9)
    model = {
        "large": large,
        "tied": large,
        "transposed": (large + 1).T,
        "bfloat16": torch.randn(2**16).bfloat16(),
        "bool": torch.rand(2**17) > 0.5,
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 3),
        "nested": [{"step": 2, "exp_avg": torch.randn(2**15)}, torch.randn(5)],
    }
    found = in_memory(run, base, 5, [None], model)
    assert len(list(found.parent.glob("block-*"))) == 5
    assert (found / "model.pt").stat().st_size < 2**14
    assert move_to_disk(run) == f"step-00000005 was in memory ({found.parent}), and is on the disk now"
    there = read_checkpoint(run / "checkpoints" / "step-00000005")
    assert there.manifest.metadata == {"trainers": 1}
    assert there.read_bytes("empty") == b""
    read = there.load("model")
    assert list(read) == list(model)
    for (path, value), (_, other) in zip(*map(tree_leaves_with_path, (model, read)), strict=True):
        if not isinstance(value, torch.Tensor):
            assert value == other
            continue
        assert (value.dtype, value.stride()) == (other.dtype, other.stride()), path
        assert torch.equal(value, other), path
    assert read["tied"].data_ptr() == read["large"].data_ptr()
    tensors = 2**17 * 8 * 2 + 2**16 * 2 + 2**17 + 2**15 * 4
    assert (
        tensors < (there.path / "model.pt").stat().st_size < tensors + 2**13
    )  # each once, without the rest of a block
    assert not list(base.iterdir())


def test_one_stays_as_it_is_while_the_next_ones_are_staged(run, base):
    pool = FilePool(base)
    kept = stage_copy({"w": torch.ones(2**15)}, pool)
    for number in range(4):
        copied = stage_copy({"w": torch.full((2**15,), float(number))}, pool)
        stored, names, size_bytes = pool.detach(copied)
        assert (names, size_bytes) == (["block-1"], 2**17)  # it is used again, and no other is made
        assert torch.equal(FilePool.attach(stored, names, base)["w"], copied["w"])
        assert bool((kept["w"] == 1).all())
        del copied
    pool.trim()
    assert [path.name for path in base.iterdir()] == ["block-0"]


def test_no_block_keeps_a_descriptor(run, base):
    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    before, pool = count(), FilePool(base)
    copied = stage_copy([torch.ones(2**15) for _ in range(20)], pool)
    stored, names, _ = pool.detach(copied)
    read = FilePool.attach(stored, names, base)
    assert (len(names), len(read), count()) == (20, 20, before)
    read[0].zero_()
    assert bool((copied[0] == 1).all())


def test_without_room_for_a_block_it_is_stored_as_others_are(run, base, monkeypatch):
    pool = FilePool(base)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    copied = stage_copy({"w": torch.ones(2**15)}, pool)
    stored, names, size_bytes = pool.detach(copied)
    assert (stored["w"] is copied["w"], names, size_bytes, list(base.iterdir())) == (True, [], 0, [])


def test_a_block_whose_file_is_removed_is_stored_as_others_are(run, base):
    pool = FilePool(base)
    copied = stage_copy({"w": torch.ones(2**15), "v": torch.ones(2**16)}, pool)
    (base / "block-0").unlink()
    stored, names, size_bytes = pool.detach(copied)
    assert (stored["w"] is copied["w"], names, size_bytes) == (True, ["block-1"], 2**18)


@pytest.mark.parametrize("damage", ["block", "no block"])
def test_one_without_its_blocks_gives_way_to_the_disk(run, base, damage):
    on_disk(run, 100)
    found = in_memory(run, base, 150, ["step-00000100"])
    block = found.parent / "block-0"
    block.unlink() if damage == "no block" else block.write_bytes(b"short")
    sentence = move_to_disk(run)
    assert sentence.startswith(f"the checkpoint in memory is not used: {block} cannot be read (")
    assert (run / "checkpoints" / "latest").read_text() == "step-00000100\n"
    assert not list(base.iterdir())


@pytest.mark.parametrize("damage", ["content", "size", "manifest", "removed"])
def test_a_damaged_one_gives_way_to_the_disk(run, base, damage, caplog):
    on_disk(run, 100)
    found = in_memory(run, base, 150, ["step-00000100"])
    file = found / ("manifest.json" if damage == "manifest" else "model.pt")
    if damage == "removed":
        shutil.rmtree(found.parent)
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content[:-1] if damage == "size" else content)
    sentence = move_to_disk(run)
    assert (run / "checkpoints" / "latest").read_text() == "step-00000100\n"
    if damage == "content":
        assert sentence.startswith("the checkpoint in memory is not used: ")
        assert "model.pt is damaged" in sentence
        assert caplog.messages == [sentence]
    assert not list(base.iterdir())


def test_that_of_another_run_is_neither_used_nor_removed(run, base):
    on_disk(run, 100)
    found = in_memory(run, base, 150, ["step-00000100"])
    copy = run.with_name("copy")
    shutil.copytree(run, copy)
    assert newer_in_memory(copy) is None
    remove_memory(copy)
    assert newer_in_memory(run) == found


def test_two_runs_never_share_a_folder(run, base):
    assert make_memory_folder(run, base, {}) != make_memory_folder(run, base, {})


@pytest.mark.parametrize("name", ["r" * 255, "r" + "é" * 127], ids=["long", "in the middle of a character"])
def test_the_name_of_a_run_may_be_as_long_as_that_of_a_folder(base, tmp_path, name):
    (run := tmp_path / name).joinpath("checkpoints").mkdir(parents=True)
    found = on_disk(run, 1)
    stored = in_memory(run, base, 2, [found.name])
    assert str(stored).encode()  # as in a message
    assert newer_in_memory(run) == stored
    assert move_to_disk(run) is not None
    assert not list(base.iterdir())


def test_a_folder_that_no_file_names_is_not_made(run, base, monkeypatch):
    def refuse(path, text):
        assert not list(base.iterdir())  # where a kill comes here, nothing is left behind
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paramserver.checkpoint.memory.atomic_write_bytes", refuse)
    with pytest.raises(StorageError, match=r"checkpoints/memory could not be written .*free space"):
        make_memory_folder(run, base, {})
    assert not list(base.iterdir())


def test_a_resume_by_hand_names_it_and_writes_it_to_the_disk(run, base):
    on_disk(run, 100)
    found = in_memory(run, base, 150, ["step-00000100"])
    (run / "config.yaml").write_text("task: a:B\ntraining: {max_steps: 200}\n")
    from paramserver.config import load_config

    config = load_config(run / "config.yaml")
    first = f"resuming {run} from step-00000150, which is in memory ({found.parent})"
    assert describe_resume(RunDir(run), config) == [first]
    with resume_transaction(RunDir(run)):
        assert (run / "checkpoints" / "latest").read_text() == "step-00000150\n"
    assert describe_resume(RunDir(run), config) == [f"resuming {run} from step-00000150"]
    _, changed, note = describe_resume(RunDir(run), load_config(run / "config.yaml", overrides=["task_args.lr=0.5"]))
    assert changed == "  changed: task_args.lr: (not given) -> 0.5"
    assert note.startswith("  note: the optimizer and its schedule continue with what the checkpoint has of them")


def test_a_chosen_checkpoint_abandons_it_on_the_disk(run, base):
    chosen = on_disk(run, 100)
    in_memory(run, base, 150, ["step-00000100"])
    with resume_transaction(RunDir(run, chosen)):
        assert [path.name for path in list_written(run / "checkpoints")] == ["step-00000100", "step-00000150"]
    assert not list(base.iterdir())


@pytest.mark.parametrize("closed", ["its folder", "the one around it"])  # the latter is such as /run/user/1000
def test_that_of_another_user_is_not_passed_over(run, base, monkeypatch, closed):
    on_disk(run, 100)
    folder, looks = in_memory(run, base, 150, ["step-00000100"]).parent, Path.stat

    def refuse(path, **options):
        if path == folder:
            raise PermissionError(13, "Permission denied")
        return looks(path, **options)

    if closed == "the one around it":
        monkeypatch.setattr(Path, "stat", refuse)
    (run / "logs").mkdir()
    (run / "logs" / "notes.log").touch()  # what is no log of the run may belong to anyone
    monkeypatch.setattr(resume, "_may", lambda path, mode: path not in (folder, run / "logs" / "notes.log"))
    named = run / "checkpoints" / MEMORY
    refusal = (
        f"{re.escape(str(folder))} must be what this user can read and write, .* or remove {re.escape(str(named))}"
    )
    with pytest.raises(UnsupportedConfiguration, match=refusal), resume_transaction(RunDir(run)):
        pass
    assert named.is_file()
    assert list(base.iterdir()) == [folder]
    named.unlink()
    with resume_transaction(RunDir(run)):
        assert find_checkpoint(run).name == "step-00000100"


@pytest.mark.parametrize("name", ["a\x85b", "a\u2028b", "a\nb", "a\udcffb"])
def test_the_path_of_a_run_may_have_any_character(tmp_path, name):
    (run := tmp_path / name / "run\x0bname").joinpath("checkpoints").mkdir(parents=True)
    (base := tmp_path / f"{name} in memory").mkdir()
    found = in_memory(run, base, 150, [None])
    assert newer_in_memory(run) == found
    remove_memory(run)
    assert not list(base.iterdir())


@pytest.mark.parametrize("refused", ["the checkpoint", "the start"])
def test_a_chosen_checkpoint_that_is_refused_loses_nothing(run, base, refused):
    chosen = on_disk(run, 100)
    in_memory(run, base, 150, ["step-00000100"])
    if refused == "the checkpoint":
        chosen = chosen.with_name("step-00000101")
    with pytest.raises(CheckpointError), resume_transaction(RunDir(run, chosen)):
        raise CheckpointError("such as one of another model")
    with resume_transaction(RunDir(run)):
        assert find_checkpoint(run).name == "step-00000150"


def test_too_little_room_says_how_much_is_needed(run, base, monkeypatch):
    sparse = torch.zeros(2**19, 1).to_sparse_coo()
    objects = {"model": {"w": torch.zeros(2**20)}, "trainer-0": {"buffer": [torch.zeros(2**20), 3], "rows": sparse}}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**25, 2**24, 2**24 - 1))
    with pytest.raises(StorageError, match=r"room for two .* needs 16\.0 MiB and has 16\.0 MiB free; make it larger"):
        make_memory_folder(run, base, objects)
    assert not list(base.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**25, 2**24, 2**24))
    assert make_memory_folder(run, base, objects).is_dir()


def test_a_folder_that_is_none_is_named(run, base):
    with pytest.raises(StorageError, match=r"memory_folder \(.*nowhere\) must be a folder, .* \(No such file"):
        make_memory_folder(run, base / "nowhere", {})


def test_a_folder_in_which_nothing_can_be_made_is_refused_at_the_start(base, monkeypatch):
    check_memory_folder(base)
    assert not list(base.iterdir())
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write to every folder
    with pytest.raises(UnsupportedConfiguration, match=r"memory_folder \(.*\) must be .* \(it cannot be written to\);"):
        check_memory_folder(base)


def test_a_write_that_is_refused_later_does_not_end_an_optional_writer(base, monkeypatch):
    with open_writer(base, keep=1, background=False, optional=True) as writer:
        monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        failed = writer.submit(1, {"a": b"1"}, {})
        assert isinstance(failed.exception(), StorageError)
        assert not list(base.iterdir())
        monkeypatch.undo()
        writer.submit(2, {"a": b"1"}, {})
        assert writer.submit(3, {"a": b"1"}, {}).result().path.name == "step-00000003"
        assert sorted(path.name for path in base.iterdir()) == ["latest", "step-00000003"]
