"""Runs with checkpoints in memory: a process dies, and what it had trained since the last one is made again."""

import re
import shutil
from collections import namedtuple

import pytest
from launching import TASKS, assert_equal_runs, launch, resume_in_process, run_concurrently, run_in_process

pytestmark = pytest.mark.processes

FAULTS = TASKS.with_name("injected_faults.py")
EVERY = 4
# Written before training continues, so that the steps that are made again are known.
IN_MEMORY = {"every": 0, "memory_every": EVERY, "background": False}
Usage = namedtuple("Usage", "total used free")


def run(folder, mode, fault=None, target=0, start=launch, after=None, task="Injected", **sections):
    """A run of 12 steps; the fault befalls rank ``target`` in the seventh, once a file ``after`` is there."""
    folder.mkdir()
    (folder / "shm").mkdir()
    checkpoint = sections.pop("checkpoint", IN_MEMORY)
    return start(
        folder,
        task=f"{FAULTS}:{task}",
        task_args={"folder": str(folder), "fault": fault, "target": target, "after": after},
        mode=mode,
        cluster={"num_trainers": 1 if mode == "local" else 2, "timeout_s": 60},
        checkpoint=({"memory_folder": str(folder / "shm")} if "memory_every" in checkpoint else {}) | checkpoint,
        **sections,
    )


def in_memory(finished):
    """The steps of checkpoints in memory, and of those on the disk, by the records."""
    records = finished.of_kind("checkpoint")
    return [[r["step"] for r in records if (r["reason"] == "memory") == memory] for memory in (True, False)]


def notes(finished):
    return [record["text"] for record in finished.of_kind("note")]


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_a_death_of_rank_0_costs_the_steps_since_the_one_in_memory(tmp_path, mode):
    whole, finished = run_concurrently(
        lambda: run(tmp_path / "whole", mode, checkpoint={"every": 0}),
        lambda: run(tmp_path / "faulty", mode, fault="kill"),
    )
    assert whole.code == finished.code == 0, finished.output
    assert (tmp_path / "faulty" / "mark").exists()
    shm = tmp_path / "faulty" / "shm"
    assert any(f"step-00000004 was in memory ({shm}" in note for note in notes(finished))
    assert finished.summary["restarts"] == 1
    assert 0 < finished.summary["updates_redone"] <= EVERY
    assert_equal_runs(whole, finished, trainers=2)
    # The one that the run returned to is on the disk too; nothing is left in memory.
    assert finished.checkpoints == ["step-00000004", "step-00000012"]
    assert not list(shm.iterdir())
    assert in_memory(finished) == [[4, 8, 12], [12]]


@pytest.mark.parametrize("consistency", ["bounded", "async"])
def test_trainers_that_run_freely_stop_for_it_too(tmp_path, consistency):
    """Trainers continue while the parts of others arrive, so the fault waits until the checkpoint is written."""
    options = {"server": {"consistency": consistency}, "after": "shm/*/latest"}
    finished = run(tmp_path / "run", "rpc", fault="kill", **options)
    assert finished.code == 0, finished.output
    assert (tmp_path / "run" / "mark").exists()
    # The other trainer may have made more steps by then.
    assert any(re.search(r"step-0000000[48] was in memory", note) for note in notes(finished)), finished.output
    assert finished.summary["updates_redone"] <= EVERY
    assert finished.summary["steps"] == 12
    in_memory_at, on_disk_at = in_memory(finished)
    assert (in_memory_at[-2:], on_disk_at) == ([8, 12], [12])  # the record of the first may have died with the server


def test_a_local_run_that_is_killed_is_resumed_by_hand_from_the_one_in_memory(tmp_path):
    whole = run(tmp_path / "whole", "local", checkpoint={"every": 5}, start=run_in_process)
    killed = run(tmp_path / "killed", "local", fault="kill", target=None)
    assert killed.code == -9
    assert (tmp_path / "killed" / "mark").exists()
    assert not list((killed.run_dir / "checkpoints").glob("step-*"))
    resumed = resume_in_process(killed)
    assert resumed.code == 0, resumed.output
    assert f"from step-00000004, which is in memory ({tmp_path / 'killed' / 'shm'}" in resumed.output
    assert_equal_runs(whole, resumed)
    assert not list((tmp_path / "killed" / "shm").iterdir())


@pytest.mark.parametrize("mode", ["local", "rpc"])
def test_a_run_returns_to_large_tensors_where_they_were_copied(tmp_path, mode):
    options = {"task": "InjectedLarge", "checkpoint": IN_MEMORY | {"memory_every": 2}}
    start = run_in_process if mode == "local" else launch
    whole = run(tmp_path / "whole", mode, start=start, **options)
    # In ``rpc`` the fault waits for a file that a checkpoint after the first has.
    killed = run(tmp_path / "killed", mode, fault="kill", target=None if mode == "local" else 0, **options)
    assert (tmp_path / "killed" / "mark").exists()
    shm = tmp_path / "killed" / "shm"
    if mode == "local":
        (folder,) = shm.iterdir()
        # The last and the one before it: of each tensor of the layer and its two averages of the optimizer.
        assert len(list(folder.glob("block-*"))) == 6
        killed = resume_in_process(killed)
    assert killed.code == 0, killed.output
    assert any(f"step-00000006 was in memory ({shm}" in note for note in notes(killed)) or mode == "local"
    assert_equal_runs(whole, killed, trainers=1 if mode == "local" else 2)
    assert not list(shm.iterdir())


def test_a_step_with_a_checkpoint_on_the_disk_has_none_in_memory(tmp_path):
    options = {**IN_MEMORY, "every": 6, "memory_every": 2, "keep": 9, "best": {"metric": "accuracy", "mode": "max"}}
    finished = run(tmp_path / "run", "local", checkpoint=options, training={"validate_every": 6}, start=run_in_process)
    assert finished.code == 0, finished.output
    assert in_memory(finished) == [[2, 4, 8, 10], [6, 12]]
    assert finished.checkpoints == ["step-00000006", "step-00000012"]


def test_it_stays_after_a_failure_until_the_run_completes(tmp_path):
    failed = run(tmp_path / "run", "local", fault="raise", target=None, start=run_in_process)
    assert failed.code == 1
    assert failed.summary["checkpoint"] is None
    (folder,) = (tmp_path / "run" / "shm").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000004"]
    assert resume_in_process(failed).code == 0
    assert not list((tmp_path / "run" / "shm").iterdir())


def test_too_little_room_ends_the_run_at_the_first_one(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 100))
    finished = run(tmp_path / "run", "local", start=run_in_process)
    assert finished.code == 1
    assert "MiB and has 0.0 MiB free; make it larger" in finished.output
    assert finished.summary["steps"] == EVERY


@pytest.mark.parametrize("mode", ["rpc", "ddp", "local"])
def test_a_folder_that_is_missing_is_refused_before_the_first_step(tmp_path, mode):
    checkpoint = IN_MEMORY | {"memory_folder": str(tmp_path / "nowhere"), "background": True}
    finished = run(tmp_path / "run", mode, checkpoint=checkpoint)
    assert finished.code == 2
    assert f"checkpoint.memory_folder ({tmp_path / 'nowhere'}) must be a folder" in finished.output
    assert not finished.run_dir.exists()


def test_memory_that_is_full_later_is_noted_once(tmp_path, monkeypatch):
    from paramserver.checkpoint import save, writer

    written = writer.write_checkpoint

    def refuse(folder, step, *objects):
        if "shm" in str(folder) and step in (4, 8):
            with save.explain_disk_errors(folder):
                raise OSError(28, "No space left on device")
        return written(folder, step, *objects)

    monkeypatch.setattr(writer, "write_checkpoint", refuse)
    finished = run(tmp_path / "run", "local", start=run_in_process)
    assert finished.code == 0, finished.output
    refused = [note for note in notes(finished) if note.startswith("training continues without a new checkpoint in")]
    assert len(refused) == 1
    assert "No space left on device" in refused[0]
    assert in_memory(finished) == [[12], [12]]
