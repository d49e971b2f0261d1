"""A LightningModule as a task: like Lightning's own Trainer in one process, and the same in every mode."""

import copy
import pickle
import warnings
from unittest import mock

import launching
import pytest
import torch
from forkserver import ForkServer
from launching import assert_equal_runs, differing_tensors, environment, launch, resume, run_in_process, train

pytest.importorskip("lightning.pytorch")

import lightning_tasks as tasks  # noqa: E402
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel  # noqa: E402

import paramserver  # noqa: E402
from paramserver.config import Config  # noqa: E402
from paramserver.errors import NoSuchMember, TaskError  # noqa: E402
from paramserver.integrations.lightning import _NOT_CALLED, MEMBERS, LightningTask  # noqa: E402
from paramserver.rng import seed_all  # noqa: E402
from paramserver.task import _CONSTRUCTOR  # noqa: E402

pytestmark = pytest.mark.processes

TASK = "lightning_tasks:RegressionTask"
EPOCHS = {"max_steps": None, "max_epochs": tasks.EPOCHS, "batch_size": tasks.BATCH, "validate_every": tasks.STEPS}


@pytest.fixture(autouse=True, scope="module")
def _lightning_is_imported_once():
    """Ranks are forked from a process that has imported Lightning, which takes seconds."""
    with ForkServer(environment(TORCH_CPP_LOG_LEVEL="ERROR"), ["lightning.pytorch"]) as server:
        with mock.patch.object(launching, "fork_server", lambda: server):
            yield


class Losses(Callback):
    """What Lightning computes: the loss and the learning rate of each step, and the values of each validation."""

    def __init__(self):
        self.losses, self.rates, self.values, self.epochs = [], [], [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def on_validation_end(self, trainer, module):
        self.values.append(trainer.callback_metrics["val_loss"].item())

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append(trainer.callback_metrics["train_loss_epoch"].item())


def fit(module, datamodule=None, **options):
    """Lightning's own training."""
    threads, callback = torch.get_num_threads(), Losses()
    torch.set_num_threads(1)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"max_epochs": tasks.EPOCHS, "callbacks": [callback], **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(accelerator="cpu", devices=1, num_sanity_val_steps=0, **quiet, **options)
        trainer.fit(module, datamodule=datamodule)
    torch.set_num_threads(threads)
    return trainer, callback


def module_of_run(**options):
    """The module as a run constructs it."""
    seed_all(Config().seed, _CONSTRUCTOR)
    return tasks.Regression(**options)


# Lightning's own Trainer.


@pytest.mark.parametrize(("form", "optimizer"), [*((form, "SGD") for form in tasks.FORMS), ("step", "AdamW")])
def test_one_process_is_the_same_as_lightnings_trainer_bit_for_bit(tmp_path, form, optimizer):
    options = {"form": form, "optimizer": optimizer}
    module = module_of_run(**options)
    trainer, by_lightning = fit(module, tasks.Points())
    run = train(tmp_path, "local", 1, task=TASK, task_args=options, training=EPOCHS, trainer="lightning_tasks:InOrder")
    assert differing_tensors(run.load("model"), module.state_dict()) == []
    assert differing_tensors(run.load("optimizer"), trainer.optimizers[0].state_dict()) == []
    records = run.of_kind("train")
    assert [record["loss"] for record in records] == by_lightning.losses
    # A record has the learning rate after the update; that of the epoch changes with the first step of the next one.
    is_step = form == "step"
    assert [r["lr"] for r in records][: -1 if is_step else None] == by_lightning.rates[is_step:]
    assert len({rate for (rate,) in by_lightning.rates}) == (
        1 if form in ("optimizer", "list") else 24 if is_step else 2 if form in ("dicts", "every second") else 3
    )
    values = [record["values"]["val_loss"] for record in run.of_kind("validation")]
    assert values == pytest.approx(by_lightning.values, rel=1e-6)  # Lightning adds in float32
    of_epochs = [r["value"] for r in run.of_kind("log") if r["name"] == "train_loss_epoch"]
    assert of_epochs == pytest.approx(by_lightning.epochs, rel=1e-6)
    assert [r["value"] for r in run.of_kind("log") if r["name"] == "batch_idx"] == [*range(tasks.STEPS)] * tasks.EPOCHS


def test_clipping_and_accumulation_are_the_same(tmp_path):
    module = module_of_run()
    fit(module, tasks.Points(), accumulate_grad_batches=2, gradient_clip_val=0.1)
    training = {**EPOCHS, "accumulate_batches": 2, "clip_grad_norm": 0.1, "validate_every": tasks.STEPS // 2}
    run = train(tmp_path, "local", 1, task=TASK, training=training, trainer="lightning_tasks:InOrder")
    assert differing_tensors(run.load("model"), module.state_dict()) == []


def test_hooks_are_called_as_by_lightning(tmp_path):
    del tasks.CALLS[:]
    fit(tasks.Recorded())
    by_lightning = list(tasks.CALLS)
    del tasks.CALLS[:]
    run_in_process(
        tmp_path,
        task=TASK,
        task_args={"kind": "Recorded"},
        training=EPOCHS,
        trainer="lightning_tasks:InOrder",
    )
    calls = list(tasks.CALLS)
    del tasks.CALLS[:]
    print(*by_lightning, sep="\n")
    print("--")
    print(*calls, sep="\n")
    assert calls == by_lightning
