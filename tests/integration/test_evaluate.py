"""A stored model is validated as the run validated it, and nothing of the run changes."""

import json
import shutil

import pytest
from launching import environment, fork_server, launch, train

from paramserver import evaluate

CONFIG = {
    "training": {"max_steps": 6, "batch_size": 8, "validate_every": 2, "validation_batch_size": 7},
    "checkpoint": {"every": 2, "keep": 5, "background": False, "best": {"metric": "loss", "mode": "max"}},
    "logging": {"tensorboard": False},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("evaluate"), "local", 1, **CONFIG)


def entries(folder):
    """All that is in a folder, with when it was changed, and the folder itself."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return {p: (p.lstat().st_mtime_ns, p.read_bytes() if p.is_file() else None) for p in paths}


@pytest.mark.processes
def test_each_checkpoint_evaluates_to_what_the_run_recorded(run, capsys):
    before = entries(run.run_dir)
    for record in run.of_kind("validation"):
        assert evaluate.main([str(run.run_dir), "--checkpoint", str(record["step"]), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["values"] == pytest.approx(record["values"], rel=1e-6)
        assert (found["step"], found["samples"]) == (record["step"], record["samples"])
    assert entries(run.run_dir) == before


def test_a_read_only_folder_is_evaluated_and_left_as_it_is(run, tmp_path):
    """Also one that has no logs, as where only the checkpoints of a run were kept. (Root may write anywhere.)"""
    kept = tmp_path / "kept"
    shutil.copytree(run.run_dir, kept, ignore=shutil.ignore_patterns("logs", "metrics.jsonl", "latest"))
    folders = [kept, *(path for path in kept.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    before = entries(kept)
    try:
        assert evaluate.evaluate_run(kept).step == 6
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert entries(kept) == before


@pytest.mark.processes
def test_best_and_latest_and_another_batch_size(run, capsys):
    worst = max(run.of_kind("validation"), key=lambda record: record["values"]["loss"])
    best = evaluate.evaluate_run(run.run_dir, "best")
    assert best.step == worst["step"]  # best is the largest loss here
    latest = evaluate.evaluate_run(run.run_dir, overrides=["training.validation_batch_size=1"])
    assert latest.step == 6
    assert latest.values == pytest.approx(run.of_kind("validation")[-1]["values"], rel=1e-5)
    assert evaluate.main([str(run.run_dir)]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["checkpoint"] == "step-00000006"
    assert float(rows["loss"]) == pytest.approx(latest.values["loss"], rel=1e-4)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--checkpoint", "5"], "there are latest and the steps 6, 4, 2"),
        (["--checkpoint", "last"], "checkpoint last of"),
        (["--set", "task_args.validation=0"], "nothing to validate"),
        (["--set", "task_args.optimizer_name=x"], "takes other arguments"),
        (["--set", "training.batch=1"], "batch_size"),
    ],
)
def test_what_cannot_be_validated_is_reported_in_one_sentence(run, capsys, arguments, expected):
    assert evaluate.main([str(run.run_dir), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert expected in error


def test_a_folder_that_is_no_run(tmp_path, capsys):
    assert evaluate.main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.processes
def test_a_task_that_logs_and_counts_finds_what_it_expects(tmp_path):
    """In another process, from elsewhere, with a task that has stored something and logs while it validates."""
    (tmp_path / "own.py").write_text(
        """
from tasks import ReferenceTask

class Own(ReferenceTask):
    seen = 0

    def on_checkpoint(self, state):
        state["seen"] = 41

    def on_resume(self, state):
        self.seen = state["seen"]

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        assert not model.training
        self.log("seen", self.seen + self.trainer.trainer_index)
        return {**super().validation_step(model, batch, valid_batch_idx, batch_idx), "batch_idx": float(batch_idx)}
"""
    )
    run = launch(tmp_path, task=f"{tmp_path}/own.py:Own", **CONFIG)
    assert run.code == 0, run.output
    code, output = fork_server().run([run.run_dir, "--json"], tmp_path, 90, environment(), program="evaluate")
    assert code == 0, output
    found = json.loads(output)
    assert found["logged"] == {"seen": 41.0}
    assert found["values"]["batch_idx"] == 6.0


def test_an_on_resume_that_uses_what_training_makes_is_named(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "own.py").write_text(
        """
from tasks import ReferenceTask

class Own(ReferenceTask):
    def train_source(self, partition):
        self.data = super().train_source(partition)
        return self.data

    def on_resume(self, state):
        self.data.level = 1
"""
    )
    assert evaluate.main([str(run.run_dir), "--set", f"task={tmp_path}/own.py:Own", "--set", "mode=rpc"]) == 1
    sentence = capsys.readouterr().err.splitlines()[0]
    assert sentence.startswith("error: on_resume raised AttributeError: Own has no attribute 'data' where a stored")
    assert sentence.endswith(f"make it in __init__ or build_model ({tmp_path}/own.py:10)")
    # It is not called where trainer 0 was lost before the first checkpoint.
    load = evaluate.load_chosen

    def load_without_state(*names):
        checkpoint, (weights, part, state) = load(*names)
        return checkpoint, (weights, {**part, "random": None, "task": {}}, state)

    monkeypatch.setattr(evaluate, "load_chosen", load_without_state)
    assert evaluate.main([str(run.run_dir), "--set", f"task={tmp_path}/own.py:Own"]) == 0


def test_hooks_find_the_values_of_the_evaluation_and_may_stop(run, tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        """
from tasks import ReferenceTask

class Own(ReferenceTask):
    def on_validation_start(self, batch_idx):
        self.before = dict(self.trainer.validation)

    def on_validation_end(self, batch_idx):
        self.log("before", self.before["loss"])
        self.log("twice", 2 * self.trainer.validation["loss"])
        self.trainer.stop("the loss is low")

class NoSteps(ReferenceTask):
    def on_validation_end(self, batch_idx):
        self.trainer.step

class Fails(ReferenceTask):
    def on_validation_start(self, batch_idx):
        1 / 0
"""
    )
    own = f"--set task={tmp_path}/own.py:"
    assert evaluate.main([str(run.run_dir), "--json", "--checkpoint", "2", *f"{own}Own".split()]) == 0
    found = json.loads(capsys.readouterr().out)
    before, twice = run.of_kind("validation")[0]["values"]["loss"], 2 * found["values"]["loss"]
    assert found["logged"] == {"before": before, "twice": pytest.approx(twice)}
    assert evaluate.main([str(run.run_dir), *f"{own}NoSteps".split()]) == 2
    assert "self.trainer has no step in an evaluation or prediction; it has trainer_index," in capsys.readouterr().err
    assert evaluate.main([str(run.run_dir), *f"{own}Fails".split()]) == 1
    assert "error: on_validation_start raised ZeroDivisionError" in capsys.readouterr().err


def test_a_checkpoint_without_averages_names_the_cure(run, capsys):
    assert evaluate.main([str(run.run_dir), "--set", "training.ema_decay=0.9"]) == 2
    error = capsys.readouterr().err
    assert "step-00000006 has no averages, as it was made without training.ema_decay" in error
    assert "add --set training.ema_decay=null" in error
    assert evaluate.main([str(run.run_dir), "--set", "training.ema_decay=null"]) == 0


def test_its_json_is_strict(run, monkeypatch, capsys):
    found = evaluate.Evaluation("step-1", 1, 4, {"corr": float("nan")}, {})
    monkeypatch.setattr(evaluate, "evaluate_run", lambda *arguments: found)
    assert evaluate.main([str(run.run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"] == {"corr": None, "corr_text": "nan"}
