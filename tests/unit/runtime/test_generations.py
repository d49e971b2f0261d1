"""What a process makes of a generation that follows a loss: its task and its config. Without other processes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tasks import ReferenceTask

from paramserver.buffers.positions import AppliedPositions
from paramserver.checkpoint import ChunkedFile, pack, unpack
from paramserver.cluster import ProcessIdentity
from paramserver.cluster.base import list_numbers
from paramserver.config import CheckpointConfig, ClusterConfig, Config, Role, ServerConfig, load_config
from paramserver.context import Kept, ProcessContext
from paramserver.devices import Placement
from paramserver.errors import Evicted
from paramserver.runs.checkpoint_manager import (
    CheckpointManager,
    StagedCheckpoint,
    _gradients_per_update,
    load_for_resume,
)
from paramserver.runs.losses import LossLog
from paramserver.runs.monitor import RunMonitor
from paramserver.runs.rundir import RunDir
from paramserver.runtime.rank import RankPlan, RankSession, _in_generation, _open_run
from paramserver.sources.expected import Origin

CONFIG = Config(
    mode="rpc", cluster=ClusterConfig(num_trainers=3), checkpoint=CheckpointConfig(every=0, background=False)
)


def manager(config, run, **options):
    monitor = RunMonitor(config, SimpleNamespace(write=lambda record: None), Path())
    return CheckpointManager(config, run, monitor, **options)


def saved(folder, parts, config=CONFIG, **state):
    """A run with a checkpoint of these parts."""
    run = RunDir(folder)
    run.checkpoints_dir.mkdir()
    first = manager(config, run)
    state |= {**first.monitor.state_dict(), "step": 4, "scheduler": None, "simulations": None}
    first.commit(StagedCheckpoint(4, {"model": {}, "optimizer": {}, "run": state}, False, "periodic", 0.0), parts, 0.0)
    first.writer.close(5.0)
    return run


def saved_and_resumed(folder, parts):
    """The manager of a generation that begins with a checkpoint of these parts."""
    run = saved(folder, parts)
    return manager(CONFIG, run, resume=load_for_resume(CONFIG, run))


@pytest.mark.parametrize(
    ("before", "now", "is_stored", "sums"),
    [
        ((3, "sync", 0), (3, "sync", 0), True, [0.5, 1.0, 2.0]),
        ((3, "sync", 0), (1, "sync", 0), True, [3.5 / 3]),
        ((3, "sync", 0), (6, "sync", 0), False, [1.0, 2.0, 4.0, 0.0, 0.0, 0.0]),
        ((3, "sync", 1), (2, "sync", 1), True, [1.25, 0.5]),
        ((3, "async", 0), (1, "async", 0), True, [3.5]),
        ((3, "bounded", 0), (4, "bounded", 0), False, [0.5, 1.0, 2.0, 0.0]),
        ((3, "async", 0), (3, "sync", 0), True, [1.5, 3.0, 6.0]),
    ],
)
def test_residuals_move_the_parameters_as_far_as_in_the_updates_before(tmp_path, before, now, is_stored, sums):
    def config(trainers, consistency, backups):
        server = ServerConfig(consistency=consistency, backup_trainers=backups, compression="int8")
        return replace(CONFIG, cluster=ClusterConfig(num_trainers=trainers), server=server)

    part = {"buffer": None, "source": {}, "applied": AppliedPositions().state_dict(), "random": None, "task": {}}
    counters = {"batch_idx": 0, "samples_served": 0, "seconds": 0.0}
    residuals = [{"w": torch.tensor([own])} for own in (0.5, 1.0, 2.0)]
    parts = {i: {**part, "counters": counters, "residuals": own} for i, own in enumerate(residuals)}
    stored = {"gradients_per_update": _gradients_per_update(config(*before), 3)} if is_stored else {}
    run, given = saved(tmp_path, parts, config(*before), **stored), config(*now)
    resumed = load_for_resume(given, run)
    found = list(parts.values()) if resumed.parts is None else [unpack(one) for one in resumed.parts]
    assert (resumed.parts is None) is (now == before)
    assert (resumed.origin == Origin.of_start(given)) is (now[0] == 3)  # of steps of the same size
    assert [float(sum(one["residuals"].values())) for one in found] == pytest.approx(sums)


def sent(part):
    file = ChunkedFile()
    file.append(np.frombuffer(pack(part), np.uint8))
    return file


def test_a_task_is_made_anew_unless_the_checkpoint_has_a_state_of_it(tmp_path):
    """Also where its trainer was absent when the checkpoint was made: it has a part then, without a state."""
    lost = {"buffer": None, "random": None}
    parts = {0: sent({"random": 1, "task": {}}), 1: lost, 2: {**lost, "task": {"n": 3}}}
    with_state = saved_and_resumed(tmp_path, parts).trainers_with_state
    renewed = []
    for index in range(3):
        task = ReferenceTask()
        process = SimpleNamespace(
            kept=Kept(started=task, generation=1), trainer_index=index, role=None, placement=SimpleNamespace(devices=())
        )
        plan = SimpleNamespace(config=CONFIG, folders=(), create_task=ReferenceTask, on_task=lambda role, task: None)
        process.config = CONFIG
        session = RankSession(plan, process, task, None)
        session.generation = 2
        session._renew_task(process, with_state)
        renewed.append(session.task is not task)
    assert renewed == [False, True, False]


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_process_that_a_generation_leaves_out_ends_and_one_that_a_server_evicted_joins_again(tmp_path, has_joined):
    """No later generation has its rank: it would wait until the timeout, and that error would end the run."""
    run = RunDir(tmp_path)
    LossLog(run.losses_file).begin(4, [1, 2])
    identity = ProcessIdentity(2, 3, 0, 3, 0, "127.0.0.1", 1, False, "job", "supervisor")
    placement = Placement((torch.device("cpu"),), "gloo")
    process = ProcessContext(CONFIG, identity, Role(2, "trainer", trainer_index=1), 2, placement)
    session = RankSession(RankPlan(CONFIG, identity, (), run=run, writes_log=False), process, ReferenceTask(), None)
    session._continue_generations()
    assert session.generation == 1, "the losses of a run are for the count of rank 0"
    loss = Evicted("rank 2 takes no part in the run any more, which continues without it")
    if has_joined:
        session.peer = "process 7 on host a"
        assert session.after(loss).min_generation == 1
        return
    with pytest.raises(Evicted):
        session.after(loss)


@pytest.mark.parametrize(("trainers", "backups"), [((2,), 0), ((2, 3), 1), ((1, 2, 3), 2)])
def test_a_run_without_late_trainers_names_them_and_its_config_can_be_read_again(tmp_path, trainers, backups):
    """They may be more than those that have to stay beside the backups."""
    config = Config(
        task="tasks:ReferenceTask",
        mode="rpc",
        cluster=ClusterConfig(num_servers=1, num_trainers=3),
        server=ServerConfig(consistency="sync", backup_trainers=2),
    )
    identity = ProcessIdentity(0, 4, 0, 4, 0, "127.0.0.1", 1, False, "job", "flags")
    placement = Placement((torch.device("cpu"),), "gloo")
    process = ProcessContext(config, identity, Role(0, "server", server_index=0), 3, placement)
    process = _in_generation(process, SimpleNamespace(trainer_ranks=trainers))
    run = RunDir(tmp_path)
    late = [rank for rank in (1, 2, 3) if rank not in trainers]
    session = SimpleNamespace(
        generation=2, trainer_ranks=trainers, resize=None, replaced=(), late=late, task=ReferenceTask()
    )
    with _open_run(RankPlan(config, identity, (), run=run, restarted=True), process, session) as checkpoints:
        checkpoints.suspend()
    stored = load_config(run.config_file)
    assert stored == process.config
    assert (stored.cluster.num_trainers, stored.server.backup_trainers) == (len(trainers), backups)
    records = map(json.loads, run.metrics_file.read_text().splitlines())
    notes = [record["text"].partition(", as")[0] for record in records if record["kind"] == "note"]
    left_out = [f"rank {list_numbers(late)} did not join; the run continues without"] if late else []
    assert notes == left_out + ([] if backups == 2 else [f"server.backup_trainers is {backups} and not 2"])
    faults = [fault["text"] for fault in LossLog(run.losses_file).faults]
    assert faults == ["all processes return to step 0", *left_out]
