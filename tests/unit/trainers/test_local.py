"""What another thread saves of a local run whose hook does not return."""

import threading

import pytest
import torch
from tasks import ReferenceTask

import paramserver
from paramserver.runs.checkpoint_manager import CheckpointManager

WAIT_S = 20.0


class Saving:
    """The thread that trains, the one that saves, and how far the latter is."""

    def __init__(self):
        self.training, self.thread = threading.current_thread(), None
        self.applied, self.staged = {}, []
        self.began, self.updated = threading.Event(), threading.Event()


class ReturnsLate(ReferenceTask):
    """A hook that returns after the other thread has begun to save; the next update follows at once."""

    def __init__(self, hook, saving):
        super().__init__(dropout=0.0)
        self.hook, self.saving = hook, saving

    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        saving = self.saving
        optimizer.register_step_post_hook(lambda *_: saving.updated.set() if saving.began.is_set() else None)
        return optimizer

    def _reach(self, hook):
        saving = self.saving
        if hook == self.hook and saving.thread is None and self.trainer.step == 3:
            saving.applied = {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}
            at_limit = self.trainer.process.stop_limit.at_limit
            saving.thread = threading.Thread(target=at_limit, args=(f"{hook} (file, line 1)",))
            saving.thread.start()
            assert saving.began.wait(WAIT_S)

    def training_step(self, model, batch, batch_idx):
        self._reach("training_step")
        return super().training_step(model, batch, batch_idx)

    def on_checkpoint(self, state):
        self._reach("on_checkpoint")


@pytest.mark.claim("stuck-hook")
@pytest.mark.parametrize("hook", ["training_step", "on_checkpoint"])
def test_a_checkpoint_of_another_thread_has_one_version(tmp_path, monkeypatch, hook):
    saving, stage = Saving(), CheckpointManager.stage

    def slow(self, step, *args):
        if threading.current_thread() is saving.training:
            return stage(self, step, *args)
        saving.began.set()
        saving.updated.wait(0.5)  # an update that waits for the copy does not come
        saving.staged.append(stage(self, step, *args))
        return saving.staged[-1]

    monkeypatch.setattr(CheckpointManager, "stage", slow)
    paramserver.run(
        ReturnsLate(hook, saving),
        {
            "mode": "local",
            "training": {"max_steps": 6, "batch_size": 4},
            "checkpoint": {"every": 3 if hook == "on_checkpoint" else 0},
            "logging": {"run_dir": str(tmp_path), "name": "run", "progress": "off", "tensorboard": False},
        },
    )
    saving.thread.join(WAIT_S)
    assert [one.step for one in saving.staged] == [3]
    for name, value in saving.applied.items():
        assert torch.equal(saving.staged[0].objects["model"][name], value), name
