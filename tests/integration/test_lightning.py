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


ONE_BY_ONE = {"max_steps": None, "max_epochs": 1, "batch_size": 1}


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
    run = train(tmp_path, "local", 1, task=TASK, task_args=options, training=EPOCHS)
    assert differing_tensors(run.load("model"), module.state_dict()) == []
    assert differing_tensors(run.load("optimizer"), trainer.optimizers[0].state_dict()) == []
    records = run.of_kind("train")
    assert [record["loss"] for record in records] == by_lightning.losses
    # A record has the learning rate after the update; that of the epoch changes with the first step of the next one.
    is_step = form == "step"
    assert [r["lr"] for r in records][: -1 if is_step else None] == by_lightning.rates[is_step:]
    assert len({rate for (rate,) in by_lightning.rates}) == (
        1
        if form in ("optimizer", "list")
        else 24
        if is_step
        else 2
        if form in ("dicts", "every second", "plateau")
        else 3
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
    run = train(tmp_path, "local", 1, task=TASK, training=training)
    assert differing_tensors(run.load("model"), module.state_dict()) == []


def test_hooks_are_called_as_by_lightning(tmp_path):
    del tasks.CALLS[:]
    fit(tasks.Recorded())
    by_lightning = list(tasks.CALLS)
    del tasks.CALLS[:]
    run_in_process(
        tmp_path,
        task=TASK,
        task_args={"kind": "Recorded", "datamodule": False},
        training=EPOCHS,
    )
    calls = list(tasks.CALLS)
    del tasks.CALLS[:]
    # Lightning calls on_train_batch_end after the update, which in mode rpc happens on the server.
    loaders = {"train_dataloader", "val_dataloader"}
    expected = [call for call in by_lightning if call[0] not in loaders]
    for i in [i for i, call in enumerate(expected) if call[0] == "on_before_optimizer_step"]:
        assert expected[i + 1][0] == "on_train_batch_end"
        expected[i], expected[i + 1] = expected[i + 1], expected[i]
    assert [call for call in calls if call[0] not in loaders] == expected
    assert {call[0] for call in calls} == {call[0] for call in by_lightning} == set(tasks.HOOKS)


# Modes.


def equal_runs(ddp, rpc):
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []
    assert differing_tensors(ddp.load("optimizer"), rpc.load("optimizer")) == []
    for kind, field in (("train", "loss"), ("train", "lr"), ("validation", "values"), ("reduced", "value")):
        assert [r[field] for r in ddp.of_kind(kind)] == [r[field] for r in rpc.of_kind(kind)]
        assert kind == "reduced" or ddp.of_kind(kind)


@pytest.mark.parametrize(
    ("form", "optimizer", "servers"),
    [("two lists", "SGD", {}), ("step", "Adam", {"num_servers": 2}), ("plateau", "AdamW", {"transport": "rpc"})],
)
def test_two_trainers_are_the_same_in_ddp_and_rpc_bit_for_bit(tmp_path, form, optimizer, servers):
    args = {"form": form, "optimizer": optimizer, "dropout": 0.2}
    config = {"task": TASK, "task_args": args, "training": {**EPOCHS, "validate_every": tasks.STEPS // 2}}
    ddp = train(tmp_path, "ddp", 2, **config)
    server = {"server": {"transport": servers.pop("transport", "auto")}, "cluster": servers}
    rpc = train(tmp_path, "rpc", 2, **config, **server)
    equal_runs(ddp, rpc)
    assert ddp.summary["steps"] == tasks.EPOCHS * tasks.STEPS // 2
    assert len({tuple(r["lr"]) for r in ddp.of_kind("train")}) > 1


def test_what_a_module_uses_of_its_trainer_is_the_same_in_every_mode(tmp_path):
    config = {"task": TASK, "task_args": {"kind": "Everything"}, "training": {**EPOCHS, "validate_every": 4}}
    local, alone = train(tmp_path, "local", 1, **config), train(tmp_path / "alone", "rpc", 1, **config)
    equal_runs(local, alone)
    ddp, rpc = train(tmp_path, "ddp", 2, **config), train(tmp_path, "rpc", 2, **config)
    equal_runs(ddp, rpc)
    for run, trainers in ((local, 1), (alone, 1), (ddp, 2), (rpc, 2)):
        assert (
            run.output.count("only the first trainer prints")
            + run.log(run is alone or run is rpc).count("only the first trainer prints")
            == run.summary["steps"]
        )
        for i in range(trainers):
            stored = run.load(f"trainer-{i}")["task"]["module"]
            seen, steps = stored["seen"], tasks.EPOCHS * tasks.STEPS // trainers
            assert (stored["epoch"], stored["global_step"]) == (tasks.EPOCHS - 1, steps)
            assert seen["ranks"] == (i, i, i == 0)
            assert seen["setup"] == ("fit", trainers, tasks.EPOCHS)
            assert seen["step"][:2] == (steps - 1, tasks.EPOCHS - 1)
            assert seen["valid"] == (True, False, pytest.approx(run.summary["validation"]["val_loss"]))


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
@pytest.mark.parametrize("task", ["Boring", "Demo"])
def test_lightnings_demos_train(tmp_path, mode, task):
    run = train(tmp_path, mode, 2, task=f"lightning_tasks:{task}", training=ONE_BY_ONE)
    assert run.summary["samples"] == 64
    if mode == "rpc" and task == "Boring":
        equal = train(tmp_path, "ddp", 2, task=f"lightning_tasks:{task}", training=ONE_BY_ONE)
        assert differing_tensors(run.load("model"), equal.load("model")) == []


@pytest.mark.parametrize("server", [{"consistency": "async"}, {"backup_trainers": 1}])
def test_trainers_that_run_freely_reach_the_estimated_number_of_updates(tmp_path, server):
    """One-cycle schedules raise after their last step."""
    config = {"task": TASK, "task_args": {"kind": "Everything"}, "training": {**EPOCHS, "validate_every": 0}}
    run = train(tmp_path, "rpc", 2, **config, server=server)
    assert run.summary["samples"] <= tasks.SAMPLES * tasks.EPOCHS
    assert "consistency" not in server or run.summary["steps"] == tasks.STEPS * tasks.EPOCHS


# Resume.


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_a_resumed_run_is_the_same_as_a_straight_one(tmp_path, mode):
    args = {"form": "every second", "dropout": 0.3, "optimizer": "Adam"}
    config = {"task": TASK, "task_args": args, "checkpoint": {"every": 5}}
    training = {**EPOCHS, "validate_every": 3}
    straight = train(tmp_path / "straight", mode, 2, **config, training=training)
    stopped = train(tmp_path / "stopped", mode, 2, **config, training={**training, "max_steps": 5})
    resumed = resume(stopped, "--set", "training.max_steps=null")
    assert resumed.code == 0, resumed.output
    assert_equal_runs(straight, resumed, trainers=1 if mode == "local" else 2)
    for trainer in range(1 if mode == "local" else 2):
        assert straight.load(f"trainer-{trainer}")["task"] == resumed.load(f"trainer-{trainer}")["task"]
    logged = [[(r["step"], r["name"], r["value"]) for r in run.of_kind("log")] for run in (straight, resumed)]
    # A run that ends within an epoch calls on_train_epoch_end there, and again when that epoch ends.
    assert {(step, name) for step, name, _ in set(logged[1]) - set(logged[0])} == {(5, "train_loss_epoch")}
    assert set(logged[0]) <= set(logged[1])
