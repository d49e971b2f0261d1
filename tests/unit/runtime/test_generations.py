"""What a process makes of a generation that follows a loss: its task and its config. Without other processes."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tasks import ReferenceTask

from paramserver.checkpoint import ChunkedFile, pack
from paramserver.config import CheckpointConfig, ClusterConfig, Config
from paramserver.context import Kept
from paramserver.runs.checkpoint_manager import CheckpointManager, StagedCheckpoint, load_for_resume
from paramserver.runs.monitor import RunMonitor
from paramserver.runs.rundir import RunDir
from paramserver.runtime.rank import RankSession

CONFIG = Config(
    mode="rpc", cluster=ClusterConfig(num_trainers=3), checkpoint=CheckpointConfig(every=0, background=False)
)


def saved_and_resumed(folder, parts):
    """The manager of a generation that begins with a checkpoint of these parts."""
    config, run = CONFIG, RunDir(folder)
    run.checkpoints_dir.mkdir()

    def manager(**options):
        monitor = RunMonitor(config, SimpleNamespace(write=lambda record: None), Path())
        return CheckpointManager(config, run, monitor, **options)

    first = manager()
    state = {**first.monitor.state_dict(), "step": 4, "scheduler": None, "simulations": None}
    first.commit(StagedCheckpoint(4, {"model": {}, "optimizer": {}, "run": state}, False, "periodic", 0.0), parts, 0.0)
    first.writer.close(5.0)
    return manager(resume=load_for_resume(config, run))


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
