"""Reading a checkpoint next to the process that trains: one that it removes meanwhile is chosen again."""

import re
import shutil

import pytest
import torch
from launching import train

from paramserver import evaluate
from paramserver.checkpoint import find_checkpoint, load, load_chosen
from paramserver.checkpoint.save import mark_best, write_checkpoint
from paramserver.checkpoint.serialization import load_archive
from paramserver.errors import CheckpointError


def write(run, step):
    return write_checkpoint(run / "checkpoints", step, {"model": {"step": torch.tensor(step)}}, {"mode": "local"})


@pytest.fixture
def run(tmp_path):
    write(tmp_path, 4)
    return tmp_path


class Racer:
    """Goes on with the run each time that a reader has looked at a manifest, so often: one more, the others removed."""

    def __init__(self, monkeypatch, run, times, during="check_digests", step=4):
        self.run, self.left, self.step = run, times, step
        target = {"check_digests": "load.check_digests", "load": "serialization.load_archive"}[during]
        original = {"check_digests": load.check_digests, "load": load_archive}[during]

        def hooked(*arguments):
            self.go_on()
            return original(*arguments)

        monkeypatch.setattr(f"paramserver.checkpoint.{target}", hooked)

    def go_on(self):
        if not self.left:
            return
        self.left -= 1
        before, self.step = self.run / "checkpoints" / f"step-{self.step:08d}", self.step + 1
        write(self.run, self.step)
        if (self.run / "checkpoints" / "best").exists():
            mark_best(self.run / "checkpoints", self.step)
        shutil.rmtree(before)


@pytest.mark.parametrize("during", ["check_digests", "load"])
@pytest.mark.parametrize("which", ["latest", "best"])
@pytest.mark.parametrize("times", [0, 1, 9])
def test_latest_and_best_are_looked_for_again(run, monkeypatch, which, during, times):
    mark_best(run / "checkpoints", 4)
    racer = Racer(monkeypatch, run, times, during)
    checkpoint, (model,) = load_chosen(run, which, "model")
    assert (checkpoint.step, int(model["step"]), racer.left) == (4 + times, 4 + times, 0)


def test_it_gives_up_after_the_maximum_of_attempts(run, monkeypatch):
    racer = Racer(monkeypatch, run, 100)
    with pytest.raises(CheckpointError, match=r"latest of .* was removed or replaced 10 times while it was read; try "):
        load_chosen(run, "latest", "model")
    assert racer.left == 90


def test_one_that_disappears_after_its_pointer_was_read_is_chosen_again(run, monkeypatch):
    """``best`` names a folder that is removed before it is looked at, and the next time another one."""
    mark_best(run / "checkpoints", 4)
    read_pointer = load.read_pointer

    def late(folder, pointer):
        found = read_pointer(folder, pointer)
        racer.go_on()
        return found

    racer = Racer(monkeypatch, run, 1)
    monkeypatch.setattr(load, "read_pointer", late)
    assert load_chosen(run, "best", "model")[0].step == 5


def test_a_step_that_was_removed_is_reported_in_one_sentence(run, monkeypatch):
    Racer(monkeypatch, run, 1)
    with pytest.raises(CheckpointError, match=r"^checkpoint 4 of .* must exist; there are latest and the steps 5$"):
        load_chosen(run, "4", "model")


def test_a_step_that_is_replaced_by_another_of_its_number_is_read_again(run, monkeypatch):
    """As the last one of a run is, where it turns out to be the best."""
    original = load.check_digests

    def replaced(path, manifest):
        monkeypatch.setattr(load, "check_digests", original)
        write_checkpoint(run / "checkpoints", 4, {"model": {"step": torch.arange(9)}}, {"mode": "local"})
        return original(path, manifest)

    monkeypatch.setattr(load, "check_digests", replaced)
    assert load_chosen(run, "4", "model")[1][0]["step"].tolist() == list(range(9))


def test_what_is_damaged_is_refused_at_once(run):
    good = write(run, 3)
    damaged = write(run, 5)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    content = bytearray((damaged / "model.pt").read_bytes())
    content[-100] ^= 1
    (damaged / "model.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"its SHA-256 .*; the newest good one is {good}$"):
        load_chosen(run, "latest", "model")
    shutil.rmtree(good)
    with pytest.raises(CheckpointError, match="no other checkpoint in that folder is good"):
        load_chosen(run, "5", "model")


CONFIG = {
    "training": {"max_steps": 6, "batch_size": 8, "validate_every": 2},
    "checkpoint": {"every": 2, "keep": 5, "background": False},
}


@pytest.mark.processes
def test_evaluate_beside_a_run_that_keeps_one(tmp_path, monkeypatch, capsys):
    """Step 6 goes away when it was chosen, or 4 when it was named; once all is loaded, nothing is needed any more."""
    run = train(tmp_path, "local", 1, **CONFIG)
    folder = run.run_dir / "checkpoints"
    values = {record["step"]: record["values"] for record in run.of_kind("validation")}
    original = load.check_digests

    def removing(path, manifest):
        monkeypatch.setattr(load, "check_digests", original)
        shutil.rmtree(path)
        return original(path, manifest)

    monkeypatch.setattr(load, "check_digests", removing)
    found = evaluate.evaluate_run(run.run_dir)
    assert (found.step, found.values) == (4, pytest.approx(values[4], rel=1e-4))
    monkeypatch.setattr(load, "check_digests", removing)
    assert evaluate.main([str(folder / "step-00000004")]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: checkpoint 4 of \S+ must exist; there are latest and the steps 2\n", error), error
    monkeypatch.setattr("paramserver.parameters.model.build_model", removing_first(folder, monkeypatch))
    assert evaluate.evaluate_run(run.run_dir).step == 2
    assert not list(folder.glob("step-*"))


def removing_first(folder, monkeypatch):
    from paramserver.parameters.model import build_model

    def removing(*arguments):
        shutil.rmtree(find_checkpoint(folder.parent))
        return build_model(*arguments)

    return removing


def test_weights_of_a_run_are_compared_and_those_of_a_file_are_not(start, tmp_path):
    """One bit of a weight: the file loads, and only its digest differs."""
    run = train(tmp_path / "first", "local", 1, **CONFIG)
    file = run.run_dir / "checkpoints" / "step-00000006" / "model.pt"
    weights = torch.load(file, weights_only=True)
    needle = weights["first.weight"].numpy().tobytes()
    content = file.read_bytes()
    place = content.index(needle)
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    refused = start(init_from=str(run.run_dir), folder=tmp_path / "second")
    assert refused.code == 2
    assert refused.output.count("\n") == 1
    assert re.search(rf"error: init_from \({run.run_dir}\): {file} is damaged: its SHA-256", refused.output)
    assert not refused.run_dir.exists()
    taken = start(init_from=str(file), folder=tmp_path / "third")
    assert taken.code == 0, taken.output
    shutil.rmtree(file.parent)
    assert start(init_from=str(run.run_dir), folder=tmp_path / "fourth").code == 0
