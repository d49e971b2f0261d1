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


@pytest.mark.parametrize(
    ("pending", "expected"),
    [
        ([{"trainer-1.pt": chunked({"task": 3})}, {"trainer-1": {"task": 2}}], 3),
        ([{"trainer-0": {"task": 0}, "trainer-1": {"task": 4}}, {"trainer-1.pt": chunked({"task": 2})}], 4),
        ([{"trainer-0": {"task": 0}}], 1),
        ([], 1),
    ],
)
def test_the_newest_part_is_that_of_the_newest_checkpoint_written_or_not(tmp_path, pending, expected):
    (tmp_path / "trainer-1.pt").write_bytes(pack({"task": 1}))
    written = [SimpleNamespace(path=tmp_path / "removed"), SimpleNamespace(path=tmp_path)]
    manager = SimpleNamespace(writer=SimpleNamespace(pending=lambda: pending, written=written), _resume=None)
    assert unpack(CheckpointManager.trainer_part(manager, 1, newest=True)) == {"task": expected}


def test_the_part_of_a_lost_trainer_keeps_what_no_other_process_has():
    kept = {"task": {"n": 1}, "flags": {}, "validation": {"loss": 0.5}}
    manager = SimpleNamespace(trainer_part=lambda index, newest: pack({**kept, "buffer": None}))
    found = CheckpointManager._kept_state(manager, 1)
    assert {name: found[name] for name in kept} == kept
