"""A run that is stored in this repository resumes in every mode: the stored format does not change unnoticed.

Where it has to change, raise ``FORMAT_VERSION`` and run ``python tests/fixtures/stored_run/make.py``.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from launching import FinishedRun, main_in_process, resume

from paramserver import run
from paramserver.checkpoint import find_checkpoint, read_checkpoint
from paramserver.checkpoint.format import FORMAT_VERSION

STORED = Path(__file__).parents[1] / "fixtures" / "stored_run"


@pytest.fixture
def stored(tmp_path):
    shutil.copy(STORED / "tiny_task.py", tmp_path)
    shutil.copytree(STORED / "run", tmp_path / "run")
    return FinishedRun(0, "", tmp_path / "run")


def test_the_stored_run_is_of_the_current_format(stored):
    checkpoint = read_checkpoint(find_checkpoint(stored.run_dir))
    assert checkpoint.manifest.format_version == FORMAT_VERSION
    assert (checkpoint.step, checkpoint.num_trainers) == (4, 2)
    assert checkpoint.names == ("model", "optimizer", "run", "trainer-0", "trainer-1")


@pytest.mark.claim("wire-dtype")
@pytest.mark.parametrize("by", ["command", "api"])
def test_a_default_of_an_earlier_version_is_not_what_the_user_asked_for(stored, by):
    config = stored.run_dir / "config.yaml"
    assert "wire_dtype: float32" in config.read_text()
    task = f"{stored.run_dir.parent / 'tiny_task.py'}:TinyTask"
    if by == "command":
        given = ["mode=local", "training.max_steps=5", f"task={task}"]
        code, output = main_in_process("--resume", stored.run_dir, *(word for g in given for word in ("--set", g)))
        assert code == 0, output
        assert "  changed: server.wire_dtype: float32 -> null\n" in output
    else:
        run(config={"mode": "local", "task": task, "training": {"max_steps": 5}}, resume=stored.run_dir)
    assert yaml.safe_load(config.read_text())["server"]["wire_dtype"] is None


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "trainers"), [("rpc", 2), ("ddp", 2), ("local", 1)])
def test_the_stored_run_resumes(stored, mode, trainers):
    """With two trainers it ends as without the stop; with one, which gets both shares, as when it was stored."""
    task = f"task={stored.run_dir.parent / 'tiny_task.py'}:TinyTask"
    more = resume(stored, "--set", f"mode={mode}", "--set", "training.max_steps=8", "--set", task)
    assert more.code == 0, more.output
    assert more.summary["steps"] == 8
    assert more.summary["samples"] == 4 * 2 * 2 + 4 * 2 * trainers
    records = more.records_as_they_are
    assert [r["step"] for r in records if r["kind"] == "train"] == [3, 6, 8]
    assert [r["step"] for r in records if r["kind"] == "validation"] == [2, 4, 6, 8]
    expected = json.loads((STORED / "expected.json").read_text())[str(trainers)]
    for name, value in more.load("model").items():
        torch.testing.assert_close(value.flatten().tolist(), expected[name], rtol=1e-9, atol=0)
