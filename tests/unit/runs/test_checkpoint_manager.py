"""Which state of its task a trainer gets that takes the place of a lost one, and what stays in memory."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from paramserver.checkpoint import ChunkedFile, pack, unpack
from paramserver.errors import StorageError
from paramserver.runs.checkpoint_manager import CheckpointManager


def chunked(part):
    file = ChunkedFile()
    file.append(np.frombuffer(pack(part), np.uint8))
    return file


def at(step, **files):
    return {"run": {"step": step}, **{name.replace("_", "-"): file for name, file in files.items()}}


def writer(pending=(), written=()):
    written = [SimpleNamespace(step=step, path=path) for step, path in written]
    return SimpleNamespace(pending=lambda: list(pending), written=written)


CHUNKED = {"run": {"step": 9}, "trainer-1.pt": chunked({"task": 9})}


@pytest.mark.parametrize(
    ("on_disk", "in_memory", "expected"),
    [
        ([CHUNKED, at(5, trainer_1={"task": 5})], None, 9),
        ([at(5, trainer_0={"task": 0}, trainer_1={"task": 5})], None, 5),
        ([at(5, trainer_0={"task": 0})], None, 2),
        ([], None, 2),
        ([], writer([at(3, trainer_1={"task": 3})]), 3),
        ([], writer([CHUNKED]), 9),
        ([at(5, trainer_1={"task": 5})], writer([at(3, trainer_1={"task": 3})]), 5),
        ([at(5, trainer_1={"task": 5})], writer([CHUNKED]), 9),
        ([], writer(written=[(1, "older"), (4, "newer")]), 4),
        ([at(5, trainer_1={"task": 5})], writer(written=[(1, "older"), (4, "newer")]), 5),
    ],
)
def test_the_newest_part_is_that_of_the_newest_checkpoint_written_or_not(tmp_path, on_disk, in_memory, expected):
    for folder, step in (("older", 1), ("disk", 2), ("newer", 4)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "trainer-1.pt").write_bytes(pack({"task": step}))
    for written in in_memory.written if in_memory else ():
        written.path = tmp_path / written.path
    disk = writer(on_disk, [(2, tmp_path / "disk"), (6, tmp_path / "removed")])
    manager = SimpleNamespace(writer=disk, _memory=in_memory, _resume=None)
    assert unpack(CheckpointManager.trainer_part(manager, 1, newest=True)) == {"task": expected}


def test_the_part_of_a_lost_trainer_keeps_what_no_other_process_has():
    kept = {"task": {"n": 1}, "flags": {}, "validation": {"loss": 0.5}}
    manager = SimpleNamespace(trainer_part=lambda index, newest: pack({**kept, "buffer": None}))
    found = CheckpointManager._kept_state(manager, 1)
    assert {name: found[name] for name in kept} == kept


@pytest.mark.parametrize(
    ("latest", "fails", "kept"),
    [
        ("step-00000004", False, ["new"]),
        ("step-00000004", True, ["new"]),
        ("step-00000003", True, ["old"]),
        (None, True, []),
        ("unreadable", False, ["new"]),
        ("unreadable", True, ["old", "new"]),  # either may be the one to resume from
    ],
)
def test_what_the_newest_checkpoint_in_memory_consists_of_is_kept(tmp_path, latest, fails, kept):
    if latest == "unreadable":
        (tmp_path / "latest").mkdir()
    elif latest is not None:
        (tmp_path / "latest").write_text(latest)
    in_memory = {"step-00000003": {"model": "old"}}
    manager = SimpleNamespace(_memory=SimpleNamespace(folder=tmp_path), _in_memory=in_memory)
    copies = {"step-00000004": {"model": "new"}}
    CheckpointManager._keep_in_memory(manager, "step-00000004", copies, ended(fails))
    assert [copy["model"] for copy in manager._in_memory.values()] == kept


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_kept_for_want_of_knowledge_is_lent_again_by_the_next_checkpoint(tmp_path, fails):
    """It has no blocks, as there is no room for a third one."""
    (tmp_path / "latest").write_text("step-00000004")
    in_memory = {"step-00000003": {"model": "old"}, "step-00000004": {"model": "new"}}
    manager = SimpleNamespace(_memory=SimpleNamespace(folder=tmp_path), _in_memory=in_memory)
    CheckpointManager._keep_in_memory(manager, "step-00000005", {}, ended(fails))
    assert list(manager._in_memory) == (["step-00000004"] if fails else [])


def ended(fails):
    done = Future()
    done.set_exception(StorageError("no descriptor is left")) if fails else done.set_result(None)
    return done
