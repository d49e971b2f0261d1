"""What another thread saves of a local run whose hook does not return; how a local run is resumed."""

import random
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from launching import differing_tensors
from tasks import ReferenceTask

import paramserver
from paramserver import Task
from paramserver.errors import TaskError
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


class Harder(Task):
    """A data set whose samples depend on a level, which ``on_epoch_start`` sets."""

    def __init__(self, served):
        self.served = served

    class Samples(list):
        level = 0

        def __getitem__(self, index):
            torch.rand(1), random.random()
            return self.level * torch.ones(1)

    def build_model(self):
        return torch.nn.Linear(1, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_source(self, partition):
        self.data = self.Samples(range(32))
        return self.data

    def on_epoch_start(self, epoch):
        self.data.level = epoch

    def on_checkpoint(self, state):
        state["level"] = self.data.level

    def on_resume(self, state):
        self.data.level = state["level"]

    def training_step(self, model, batch, batch_idx):
        self.served((batch.flatten().tolist(), torch.rand(1).item(), random.random()))
        return model(batch).mean()


def test_samples_that_the_buffer_holds_are_read_again_of_what_on_resume_restores(tmp_path):
    config = {
        "mode": "local",
        "training": {"max_steps": 16, "batch_size": 4},
        "checkpoint": {"every": 13, "keep": 2, "background": False},
        "logging": {"run_dir": str(tmp_path), "name": "run", "progress": "off", "tensorboard": False},
    }
    whole, resumed = [], []
    paramserver.run(Harder(whole.append), config)
    paramserver.run(Harder(resumed.append), resume=tmp_path / "run" / "checkpoints" / "step-00000013")
    assert len(resumed) == 3
    assert resumed == whole[13:]


class Relabels(Task):
    """Gives each epoch labels of its own, in place, and notes the labels of each batch with the epoch."""

    def __init__(self, as_tensors, noted):
        self.as_tensors, self.noted = as_tensors, noted

    build_model, build_optimizer = Harder.build_model, Harder.build_optimizer

    def train_source(self, partition):
        self.labels = torch.full((14,), -1.0)
        data = torch.utils.data.TensorDataset(torch.ones(14, 1), self.labels)
        return data if self.as_tensors else torch.utils.data.ConcatDataset([self.Rows(data)])

    class Rows(list):
        def __init__(self, data):
            super().__init__(range(len(data)))
            self.data = data

        def __getitem__(self, index):
            return self.data[index]

    def on_epoch_start(self, epoch):
        self.labels.fill_(epoch)

    def on_checkpoint(self, state):
        state["label"] = self.labels[0].item()

    def on_resume(self, state):
        self.labels.fill_(state["label"])

    def training_step(self, model, batch, batch_idx):
        self.noted((self.labels[0].item(), batch[1].tolist()))
        return model(batch[0]).mean()


@pytest.mark.parametrize(
    ("as_tensors", "batch_size", "more"),
    [
        (True, 4, {}),
        (False, 4, {}),
        (True, 7, {}),
        (False, 4, {"accumulate_batches": 2}),
        (True, 4, {"local_steps": 2}),
    ],
)
def test_what_on_epoch_start_changes_in_a_data_set_holds_from_the_first_batch_on(
    tmp_path, as_tensors, batch_size, more
):
    """Some batches of 4 samples are of two passes, as that of the fourth step."""
    config = {
        "mode": "local",
        "training": {"max_steps": 9, "batch_size": batch_size, **more},
        "checkpoint": {"every": 4, "keep": 3, "background": False},
        "logging": {"run_dir": str(tmp_path), "name": "run", "progress": "off", "tensorboard": False},
    }
    whole, resumed = [], []
    paramserver.run(Relabels(as_tensors, whole.append), config)
    assert all(set(labels) == {label} for label, labels in whole)
    assert len({label for label, _ in whole}) > 2
    paramserver.run(Relabels(as_tensors, resumed.append), resume=tmp_path / "run" / "checkpoints" / "step-00000004")
    assert resumed == whole[-len(resumed) :]


class Hooked(ReferenceTask):
    """Compares what a hook of a parameter gets, which ``build_model`` registers, with the gradient."""

    def build_model(self):
        model, self.seen = super().build_model(), []
        next(model.parameters()).register_hook(self.seen.append)
        return model

    def on_batch_end(self, batch_idx):
        assert torch.equal(self.seen[-1], next(self.trainer.model.parameters()).grad)


def test_hooks_of_build_model_see_gradients_without_the_scale(tmp_path):
    config = {
        "mode": "local",
        "training": {"max_steps": 3, "batch_size": 4, "precision": "float16"},
        "logging": {"run_dir": str(tmp_path), "progress": "off", "tensorboard": False},
    }
    assert paramserver.run(Hooked(), config).summary["steps"] == 3


class DrawsAtStart(Harder):
    def on_train_start(self):
        torch.rand(1), random.random()


def test_what_on_train_start_draws_is_drawn_once_in_a_run_that_is_resumed(tmp_path):
    config = {
        "mode": "local",
        "training": {"max_steps": 6, "batch_size": 4},
        "checkpoint": {"every": 4, "keep": 2, "background": False},
        "logging": {"run_dir": str(tmp_path), "name": "run", "progress": "off", "tensorboard": False},
    }
    whole, resumed = [], []
    paramserver.run(DrawsAtStart(whole.append), config)
    paramserver.run(DrawsAtStart(resumed.append), resume=tmp_path / "run" / "checkpoints" / "step-00000004")
    assert resumed == whole[4:]


class Probes(ReferenceTask):
    """Computes gradients outside of steps: in hooks, and in a validation."""

    def __init__(self, probes):
        super().__init__(dropout=0.0)
        self.probes = probes

    def probe(self, *_):
        if self.probes:
            sum(parameter.square().sum() for parameter in self.trainer.model.parameters()).backward()

    on_epoch_start = on_batch_start = on_validation_start = probe


def test_gradients_that_hooks_leave_are_in_no_update(tmp_path):
    config = {
        "mode": "local",
        "training": {"max_steps": 5, "batch_size": 16, "validate_every": 2},
        "logging": {"run_dir": str(tmp_path), "progress": "off", "tensorboard": False},
    }
    probed, plain = (torch.load(paramserver.run(Probes(n), config).checkpoint / "model.pt") for n in (True, False))
    assert differing_tensors(probed, plain) == []


class Finetunes(ReferenceTask):
    """Trains a layer, and takes statistics, from the second epoch on."""

    def on_train_start(self):
        self.train_all(False)

    def on_epoch_start(self, epoch):
        self.train_all(epoch > 0)

    def train_all(self, trains):
        self.trainer.model.first.requires_grad_(trains)
        self.trainer.model.bn.train(trains)


class Pauses(ReferenceTask):
    """Freezes a layer, which has a hook, in three batches."""

    def on_train_start(self):
        self.trainer.model.first.weight.register_hook(lambda gradient: None)  # not while the layer is frozen

    def on_batch_start(self, batch_idx):
        self.trainer.model.first.requires_grad_(not 3 <= batch_idx < 6)


class PausesItself(Pauses):
    """Freezes the layer where it is resumed."""

    def on_train_start(self):
        """Register no hook."""

    def on_resume(self, state):
        self.trainer.model.first.requires_grad_(False)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("task", [Finetunes, Pauses, PausesItself])
def test_what_a_task_freezes_for_a_time_is_trained_alike_after_a_resume(tmp_path, task, precision):
    config = {
        "mode": "local",
        "training": {"max_steps": 8, "batch_size": 4, "precision": precision},
        "checkpoint": {"every": 4, "keep": 2, "background": False},
        "logging": {"run_dir": str(tmp_path), "name": "run", "progress": "off", "tensorboard": False},
    }
    whole, resumed = (
        torch.load(run(task(samples=12)).checkpoint / "model.pt")
        for run in (
            partial(paramserver.run, config=config),
            partial(paramserver.run, resume=tmp_path / "run" / "checkpoints" / "step-00000004"),
        )
    )
    assert differing_tensors(whole, resumed) == []


class Freezes(ReferenceTask):
    """Freezes a layer, and lets another one keep its statistics, where it is told to."""

    def __init__(self, freezes, **options):
        super().__init__(**options)
        self.freezes = freezes

    def on_train_start(self):
        self.trainer.model.first.requires_grad_(not self.freezes)
        self.trainer.model.bn.train(not self.freezes)


@pytest.mark.parametrize("freezes", [True, False])
def test_a_run_may_be_resumed_to_train_other_layers(tmp_path, freezes):
    """What ``on_train_start`` switches otherwise than in the run that is resumed is not restored."""
    config = {
        "mode": "local",
        "training": {"max_steps": 4, "batch_size": 4},
        "logging": {"run_dir": str(tmp_path), "name": "run", "progress": "off", "tensorboard": False},
    }
    more = {"training": {"max_steps": 8}}
    before = torch.load(paramserver.run(Freezes(not freezes), config).checkpoint / "model.pt")
    after = torch.load(
        paramserver.run(Freezes(freezes), resume=tmp_path / "run", overrides=more).checkpoint / "model.pt"
    )
    for name in ("first.weight", "bn.running_mean"):
        assert torch.equal(before[name], after[name]) is freezes
    assert not torch.equal(before["square.weight"], after["square.weight"])


class Paths(torch.utils.data.IterableDataset):
    """Its place is a path."""

    def __iter__(self):
        return iter(torch.ones(8, 1))

    def state_dict(self):
        return {"file": [Path("shard-0")]}

    def load_state_dict(self, state):
        """Never called."""


class Warmup(torch.optim.lr_scheduler.LambdaLR):
    """Holds the scheduler that follows."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1.0)
        self.after = torch.optim.lr_scheduler.StepLR(optimizer, 2)


class StoresObjects(Harder):
    def __init__(self, data=None):
        super().__init__(len)
        self.own = data

    def train_source(self, partition):
        return super().train_source(partition) if self.own is None else self.own

    def build_scheduler(self, optimizer):
        return None if self.own else Warmup(optimizer)

    def on_epoch_start(self, epoch):
        """Sets no level."""

    on_checkpoint = on_resume = Task.on_checkpoint


@pytest.mark.parametrize(
    ("task", "where", "held"),
    [
        (StoresObjects(Paths()), "the data set of train_source", "pathlib"),
        (StoresObjects(), "the optimizer or scheduler of local steps", "StepLR"),
    ],
)
def test_a_part_that_cannot_be_loaded_again_is_refused_by_its_trainer(tmp_path, task, where, held):
    """Where rank 0 writes what it receives, it does not look into it."""
    config = {
        "mode": "local",
        "training": {"max_steps": 2, "batch_size": 2, "local_steps": 2},
        "checkpoint": {"every": 1, "background": False},
        "logging": {"run_dir": str(tmp_path), "name": "run", "progress": "off", "tensorboard": False},
    }
    with pytest.raises(TaskError, match=f"{where} stored what cannot be loaded again .*{held}"):
        paramserver.run(task, config)


class Validated(ReferenceTask):
    """Notes the values of the newest validation in each step."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def training_step(self, model, batch, batch_idx):
        self.seen(dict(self.trainer.validation))
        return super().training_step(model, batch, batch_idx)


def test_the_values_of_the_newest_validation_are_those_of_the_run_that_is_resumed(tmp_path):
    config = {
        "mode": "local",
        "training": {"max_steps": 8, "batch_size": 4, "validate_every": 4},
        "checkpoint": {"every": 3, "keep": 4, "background": False},
        "logging": {"run_dir": str(tmp_path), "name": "run", "progress": "off", "tensorboard": False},
    }
    whole, resumed = [], []
    paramserver.run(Validated(whole.append), config)
    paramserver.run(Validated(resumed.append), resume=tmp_path / "run" / "checkpoints" / "step-00000006")
    assert resumed == whole[6:]
    assert all(resumed)
