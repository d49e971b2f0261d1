"""A resume that fails before its first step leaves the run as it was: records and settings too."""

import json

import pytest
from cli_errors import has_table
from launching import SIGNAL_TASKS, main_in_process, resume, resume_in_process, train

from paramserver.checkpoint.format import LATEST
from paramserver.runs.attempt import ResumeJournal
from paramserver.runs.rundir import RunDir

STEPS = {
    "training": {"max_steps": 12, "validate_every": 4},
    "checkpoint": {"every": 4, "keep": 9, "background": False, "best": {"metric": "loss", "mode": "min"}},
}
WORDS = ("python", "-m", "paramserver.launch", "--resume")
TENSORBOARD = {"logging": {"tensorboard": True}}


@pytest.fixture
def run(tmp_path):
    return train(tmp_path, "local", 1, **STEPS, **TENSORBOARD)


def content(run):
    """All files of a run, but for who holds it."""
    files = {p.relative_to(run.run_dir): p for p in run.run_dir.rglob("*") if p.is_file()}
    return {
        str(name): path.read_bytes() for name, path in files.items() if not path.name.startswith((".lock", ".reserved"))
    }


def without_logs(files):
    return {name: held for name, held in files.items() if not name.startswith("logs")}


def test_a_refused_resume_from_an_older_step_loses_no_record(run):
    before = without_logs(content(run))
    chosen = run.run_dir / "checkpoints" / "step-00000004"
    code, output = main_in_process("--resume", chosen, "--set", "task_args.batch_norm=false")
    assert code == 2
    assert "another model" in output
    assert without_logs(content(run)) == before
    more = resume_in_process(run, "--set", "training.max_steps=14")
    assert more.code == 0, more.output
    assert [r["step"] for r in more.of_kind("train")] == list(range(1, 15))


@pytest.mark.parametrize("step", [None, 4])
@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("nan", 1), ("SIGTERM", 3)])
def test_a_resume_that_ends_before_it_makes_a_step_leaves_the_run_as_it_was(run, how, code, step):
    """Its settings too: the next one has those of the run, not those of an attempt that came to nothing."""
    before = without_logs(content(run))
    given = run.run_dir if step is None else run.run_dir / "checkpoints" / f"step-{step:08d}"
    changed = (f"task={SIGNAL_TASKS}:EndsAtTheStart", f"task_args={{how: {how}}}", "training.max_steps=20")
    result = main_in_process("--resume", given, *(word for change in changed for word in ("--set", change)))
    assert result[0] == code, result[1]
    assert not has_table(result[1])
    assert without_logs(content(run)) == before
    if code == 3:
        last = run.run_dir / "checkpoints" / f"step-{step or 12:08d}"
        assert f"no step was made, so the run is as it was before. Resume with: {' '.join(WORDS)} {last}\n" in result[1]
    more = resume_in_process(run, "--set", "training.max_steps=14")
    assert more.code == 0, more.output
    assert [r["step"] for r in more.of_kind("train")] == list(range(1, 15))


def test_a_resume_that_has_nothing_to_do_says_so_and_the_run_keeps_its_figures(run):
    before = without_logs(content(run))
    more = resume_in_process(run)
    assert more.code == 0, more.output
    assert not has_table(more.output)
    assert more.output.endswith(
        "completed at step 12, no step was made: training.max_steps (12) reached; "
        "to continue, raise the limit that is reached (training.max_epochs, max_steps, max_samples or max_seconds)\n"
    )
    assert without_logs(content(run)) == before
    assert more.summary["train_loss"] is not None
    assert has_table(resume_in_process(run, "--set", "training.max_steps=13").output)


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_so_it_does_with_several_processes(tmp_path, mode):
    run = train(tmp_path, mode, 2, **STEPS)
    before = without_logs(content(run))
    changed = (f"task={SIGNAL_TASKS}:EndsAtTheStart", "task_args={how: raise}", "training.clip_grad_norm=3")
    more = resume(run, *(word for change in changed for word in ("--set", change)))
    assert more.code == 1, more.output
    assert "it ends here" in more.output
    assert not has_table(more.output)
    assert without_logs(content(run)) == before
    assert resume(run).code == 0, "there is nothing to do"
    assert without_logs(content(run)) == before


def attempt_and_die(run, step, *, made=None):
    """Change the folder like a process that resumed from ``step``, made step ``made``, and was killed."""
    folder = RunDir(run.run_dir)
    ResumeJournal(folder).record(step)
    folder.config_file.write_text(folder.config_file.read_text().replace("seed: 0", "seed: 7"))
    (folder.checkpoints_dir / LATEST).write_text(f"step-{step:08d}\n")
    folder.summary_file.unlink()
    kept = [line for line in folder.metrics_file.read_text().splitlines() if (json.loads(line)["step"] or 0) <= step]
    kept += [json.dumps({"time": 0.0, "kind": "train", "step": made})] if made else []
    folder.metrics_file.write_text("".join(f"{line}\n" for line in kept))
    (folder.tensorboard_dir / "events.out.tfevents.9.new").write_bytes(b"purge")


def test_what_a_killed_attempt_left_is_undone_by_the_next(run):
    before = content(run)
    attempt_and_die(run, 4)
    assert content(run) != before
    ResumeJournal(RunDir(run.run_dir)).roll_back()
    assert content(run) == before


def test_the_next_resume_does_it(run):
    attempt_and_die(run, 4)
    more = resume_in_process(run, "--set", "training.max_steps=14")
    assert more.code == 0, more.output
    assert "seed: 0" in (run.run_dir / "config.yaml").read_text()
    assert [r["step"] for r in more.of_kind("train")] == list(range(1, 15))
    assert not (run.run_dir / ".attempt").exists()


def test_an_attempt_that_made_a_step_is_kept(run):
    attempt_and_die(run, 4, made=5)
    ResumeJournal(RunDir(run.run_dir)).roll_back()
    assert "seed: 7" in (run.run_dir / "config.yaml").read_text()
    assert not (run.run_dir / ".attempt").exists()


def test_an_unfinished_note_is_ignored(run):
    before = content(run)
    (run.run_dir / ".attempt.new").mkdir()
    (run.run_dir / ".attempt.new" / "0-config.yaml").write_text("torn")
    ResumeJournal(RunDir(run.run_dir)).roll_back()
    assert {n: c for n, c in content(run).items() if ".attempt.new" not in n} == before
    assert resume_in_process(run, "--set", "training.max_steps=13").code == 0
    assert not (run.run_dir / ".attempt.new").exists()
