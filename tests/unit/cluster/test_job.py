"""The job that started a command, and the run that an earlier attempt of it left."""

import dataclasses
import json
from pathlib import Path

import pytest

from paramserver.cluster import Job, find_job
from paramserver.config import ClusterConfig, Config, LoggingConfig, dump_yaml
from paramserver.errors import CheckpointError, UnsupportedConfiguration
from paramserver.runs.resume import earlier_attempt, lost_processes
from paramserver.runs.rundir import RunDir


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, Job("slurm/7", 0)),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}, Job("slurm/7", 0)),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, Job("slurm/7", 2)),
        ({"TORCHELASTIC_RUN_ID": "seven", "TORCHELASTIC_RESTART_COUNT": "0"}, Job("torchrun/seven", 0)),
        ({"TORCHELASTIC_RUN_ID": "seven", "TORCHELASTIC_RESTART_COUNT": "1"}, Job("torchrun/seven", 1)),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, None),  # of any torchrun without --rdzv-id
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, Job("slurm/7", 1)),
        ({"PARAMSERVER_JOB_ID": "mine", "SLURM_JOB_ID": "7"}, Job("mine", 0, is_named=True)),
        ({"PARAMSERVER_JOB_ID": " "}, None),
    ],
)
def test_the_job_of_a_launcher(environ, job):
    assert find_job(environ) == job


def test_a_wrong_number_of_restarts_is_named():
    with pytest.raises(UnsupportedConfiguration, match=r"SLURM_RESTART_COUNT \(two\) must be a whole number"):
        find_job({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "two"})
    with pytest.raises(UnsupportedConfiguration, match=r"TORCHELASTIC_RESTART_COUNT \(-1\) must be a whole number"):
        find_job({"TORCHELASTIC_RUN_ID": "seven", "TORCHELASTIC_RESTART_COUNT": "-1"})


CONFIG = Config(task="tasks:One", mode="rpc", seed=1)


@pytest.fixture
def config(tmp_path):
    return dataclasses.replace(CONFIG, logging=LoggingConfig(run_dir=str(tmp_path)))


def make_run(config, name, job, started="2026-01-01T00:00:00+00:00", **about):
    run = RunDir(Path(config.logging.run_dir) / name)
    run.path.mkdir()
    run.config_file.write_text(dump_yaml(config))
    run.environment_file.write_text(json.dumps({"job": job, "started": started, **about}))
    return run


def found(config, monkeypatch, run=None, **environ):
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", **environ}.items():
        monkeypatch.setenv(name, value)
    earlier = earlier_attempt(config, run, None)
    return None if earlier is None else earlier.path.name


def test_a_job_that_starts_again_finds_its_newest_run_of_this_config(config, monkeypatch):
    make_run(config, "first", "slurm/7")
    make_run(config, "newest", "slurm/7", started="2026-01-02T00:00:00+00:00")
    make_run(dataclasses.replace(config, seed=2), "other-seed", "slurm/7", started="2026-01-03T00:00:00+00:00")
    make_run(config, "other-job", "slurm/8", started="2026-01-04T00:00:00+00:00")
    make_run(config, "no-job", None, started="2026-01-05T00:00:00+00:00")
    assert found(config, monkeypatch) == "newest"
    assert found(config, monkeypatch, SLURM_RESTART_COUNT="0") is None
    assert found(config, monkeypatch, SLURM_JOB_ID="9") is None


def test_the_number_of_trainers_and_the_address_may_change(config, monkeypatch):
    make_run(config, "run", "slurm/7")
    cluster = ClusterConfig(num_trainers=5, master_addr="node7", master_port=1234)
    assert found(dataclasses.replace(config, cluster=cluster), monkeypatch) == "run"


def test_a_run_of_a_name_is_found_by_it_alone(config, monkeypatch):
    named = dataclasses.replace(config, logging=dataclasses.replace(config.logging, name="mine"))
    make_run(named, "mine", "slurm/7")
    assert found(dataclasses.replace(named, seed=2), monkeypatch) == "mine"
    assert found(config, monkeypatch, SLURM_RESTART_COUNT="0") is None
    other = dataclasses.replace(config, logging=dataclasses.replace(config.logging, name="other"))
    assert found(other, monkeypatch) is None


@pytest.mark.parametrize("name", [None, "broken"])
def test_a_broken_config_of_a_run_of_the_job_is_named_with_two_cures(config, monkeypatch, name):
    make_run(config, "other-job", "slurm/8", started="2026-01-03T00:00:00+00:00").config_file.write_text("seed: [")
    broken = make_run(config, "broken", "mine", started="2026-01-02T00:00:00+00:00")
    make_run(config, "older", "mine")
    broken.config_file.write_text("seed: many")
    config = dataclasses.replace(config, logging=dataclasses.replace(config.logging, name=name))
    with pytest.raises(CheckpointError) as caught:
        found(config, monkeypatch, PARAMSERVER_JOB_ID="mine")
    assert str(caught.value) == (
        f"{broken.path} is a run of this job (mine), which this start may continue, and its config cannot be read "
        f"({broken.config_file}:1: seed (many) must be a whole number); correct that file, or move the folder away to "
        "begin a new run"
    )
    make_run(config, "newest", "mine", started="2026-01-04T00:00:00+00:00")
    if name is None:
        assert found(config, monkeypatch, PARAMSERVER_JOB_ID="mine") == "newest"


def test_a_checkpoint_that_the_user_chose_is_left_behind_by_later_attempts(config, monkeypatch):
    run = make_run(config, "run", "slurm/7")
    chosen = RunDir(run.path, run.checkpoints_dir / "step-00000003")
    assert found(config, monkeypatch, chosen) == "run"
    assert found(config, monkeypatch, chosen, SLURM_JOB_ID="8") is None
    assert found(config, monkeypatch, chosen, SLURM_RESTART_COUNT="0") is None
    named = make_run(config, "named", "mine")  # whether this is another start of the job is not known
    assert found(config, monkeypatch, named, PARAMSERVER_JOB_ID="mine", SLURM_RESTART_COUNT="0") is None


@pytest.mark.parametrize(
    ("status", "lost"), [(None, True), ("failed", True), ("interrupted", False), ("completed", False)]
)
def test_what_an_attempt_lost(config, status, lost):
    run = make_run(config, "run", "slurm/7")
    if status:
        run.summary_file.write_text(json.dumps({"status": status}))
    assert lost_processes(run)  # it has no checkpoint
    (run.checkpoints_dir / "step-00000003").mkdir(parents=True)
    (run.checkpoints_dir / "step-00000003" / "manifest.json").touch()
    assert lost_processes(run) is lost
