"""Which state of its task a trainer gets that takes the place of a lost one."""

from types import SimpleNamespace

import numpy as np
import pytest

from paramserver.checkpoint import ChunkedFile, pack, unpack
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
