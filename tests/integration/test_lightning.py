"""A LightningModule as a task: like Lightning's own Trainer in one process, and the same in every mode."""

import copy
import math
import pickle
import re
import shutil
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import launching
import pytest
import torch
from forkserver import ForkServer
from launching import assert_equal_runs, differing_tensors, environment, launch, resume, run_in_process, train

pytest.importorskip("lightning.pytorch")

import lightning_tasks as tasks
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset
from torchmetrics import MeanMetric, MeanSquaredError, MinMetric, R2Score

import paramserver
from paramserver.cluster import ProcessIdentity
from paramserver.config import ClusterConfig, Config
from paramserver.errors import NoSuchMember, TaskError
from paramserver.evaluate import evaluate_run
from paramserver.integrations.lightning import _NOT_CALLED, MEMBERS, LightningTask
from paramserver.parameters.remote_tables import make_remote
from paramserver.rng import CONSTRUCTOR, seed_all

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "lightning"
PAGE = (ROOT / "docs" / "lightning.md").read_text()
TASK = "lightning_tasks:RegressionTask"
EPOCHS = {"max_steps": None, "max_epochs": tasks.EPOCHS, "batch_size": tasks.BATCH, "validate_every": tasks.STEPS}


@pytest.fixture(autouse=True, scope="module")
def _lightning_is_imported_once():
    """Ranks are forked from a process that has imported Lightning, which takes seconds."""
    with (
        ForkServer(environment(TORCH_CPP_LOG_LEVEL="ERROR"), ["lightning.pytorch"]) as server,
        mock.patch.object(launching, "fork_server", return_value=server),
    ):
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


def lightnings_trainer(**options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for example that there is a GPU, or srun
        return Trainer(accelerator="cpu", devices=1, num_sanity_val_steps=0, **quiet, **options)


def fit(module, datamodule=None, **options):
    """Lightning's own training."""
    threads, callback = torch.get_num_threads(), Losses()
    torch.set_num_threads(1)
    trainer = lightnings_trainer(max_epochs=tasks.EPOCHS, callbacks=[callback], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=datamodule)
    torch.set_num_threads(threads)
    return trainer, callback


def module_of_run(**options):
    """The module as a run constructs it."""
    seed_all(Config().seed, CONSTRUCTOR)
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
    assert [r["lr"] for r in records] == by_lightning.rates
    assert len({rate for (rate,) in by_lightning.rates}) == (
        1
        if form in ("optimizer", "list")
        else 24
        if form == "step"
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
    losses = []

    class Watched(tasks.WithData):
        def on_before_backward(self, loss):
            losses.append(float(loss))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            losses.append(float(outputs["loss"]))

    seed_all(Config().seed, CONSTRUCTOR)
    module = Watched()
    task = LightningTask(copy.deepcopy(module))
    fit(module, accumulate_grad_batches=2, gradient_clip_val=0.1)
    by_lightning = list(losses)
    del losses[:]
    training = {**EPOCHS, "accumulate_batches": 2, "clip_grad_norm": 0.1, "validate_every": tasks.STEPS // 2}
    result = paramserver.run(task, quiet(tmp_path, training=training))
    assert differing_tensors(result.model().state_dict(), module.state_dict()) == []
    assert losses == by_lightning
    assert len(losses) == 2 * tasks.STEPS * tasks.EPOCHS


@pytest.mark.parametrize(
    ("loader", "accumulate", "steps", "steps_here"),
    [
        (lambda data: DataLoader(data, 5), 2, 3, 3),
        (lambda data: DataLoader(data, 4, drop_last=True), 1, 6, 6),
        (lambda data: DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False)), 1, 9, 9),
        # Where a pass does not end with a whole step, it ends with a smaller one in Lightning only.
        (lambda data: DataLoader(data, 4), 1, 9, 8),
        (lambda data: DataLoader(data, 2), 2, 9, 8),
    ],
)
def test_only_passes_of_whole_steps_are_the_same(tmp_path, loader, accumulate, steps, steps_here):
    class Ten(tasks.WithData):
        def train_dataloader(self):
            return loader(Subset(self.points.train, range(10)))

    seed_all(Config().seed, CONSTRUCTOR)
    module = Ten()
    task = LightningTask(copy.deepcopy(module))
    trainer, _ = fit(module, accumulate_grad_batches=accumulate)
    training = {"max_epochs": tasks.EPOCHS, "accumulate_batches": accumulate}
    result = paramserver.run(task, quiet(tmp_path, training=training))
    assert (trainer.global_step, result.summary["steps"]) == (steps, steps_here)
    assert (differing_tensors(result.model().state_dict(), module.state_dict()) == []) == (steps == steps_here)


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


def test_callback_metrics_are_those_of_lightning_in_every_hook(tmp_path):
    seen = []

    def see(hook):
        def call(self, *_):
            metrics = (self.trainer.callback_metrics, self.trainer.logged_metrics)
            seen.append((hook, *({name: float(value) for name, value in one.items()} for one in metrics)))

        return call

    class Logs(tasks.WithData):
        on_train_epoch_start, on_train_epoch_end = see("epoch start"), see("epoch end")
        on_train_batch_start, on_train_batch_end = see("batch start"), see("batch end")
        on_validation_end = see("validation end")

        def training_step(self, batch, batch_idx):
            outputs = super().training_step(batch, batch_idx)
            self.log("of_epoch", outputs["loss"], on_step=False, on_epoch=True)
            self.log("most", outputs["loss"], on_step=False, on_epoch=True, reduce_fx="max")
            return outputs

    seed_all(Config().seed, CONSTRUCTOR)
    fit(Logs())
    by_lightning = list(seen)
    del seen[:]
    seed_all(Config().seed, CONSTRUCTOR)
    paramserver.run(LightningTask(Logs()), quiet(tmp_path, training=EPOCHS))
    assert [hook for hook, *_ in seen] == [hook for hook, *_ in by_lightning]
    for (hook, callback, logged), (_, expected, logged_there) in zip(seen, by_lightning, strict=True):
        assert callback == pytest.approx(expected, rel=1e-6), hook
        assert {name: logged.get(name) for name in logged_there} == pytest.approx(logged_there, rel=1e-6), hook
    assert {"train_loss", "train_loss_step", "train_loss_epoch", "of_epoch", "most", "val_loss"} <= set(expected)


def test_hooks_of_checkpoints_have_weights_as_in_lightning_and_do_not_change_them(tmp_path):
    loaded = []

    class LeavesOut(tasks.WithData):
        def on_save_checkpoint(self, checkpoint):
            weights = checkpoint["state_dict"]
            bias = weights["net.0.bias"].double()
            kept = {name: value for name, value in weights.items() if not name.startswith("net.0")}
            checkpoint["state_dict"] = {**kept, "net.0.bias": bias, "more": torch.ones(1)}
            checkpoint["count"] = 1

        def on_load_checkpoint(self, checkpoint):
            loaded.append({name: value.clone() for name, value in checkpoint.pop("state_dict").items()})
            loaded.append(checkpoint)

    module = LeavesOut()
    run = paramserver.run(LightningTask(module), quiet(tmp_path))
    stored = run.model().state_dict()
    del loaded[:]
    again = paramserver.run(LightningTask(module), {"training": {"max_epochs": 2}}, resume=run.run_dir)
    weights, checkpoint = loaded
    assert checkpoint == {"epoch": 0, "global_step": 8, "count": 1}
    expected = {**stored, "net.0.bias": stored["net.0.bias"].double(), "more": torch.ones(1)}
    assert differing_tensors(weights, expected) == []
    assert weights["net.0.bias"].dtype == torch.float64
    straight = paramserver.run(LightningTask(module), quiet(tmp_path, training={"max_epochs": 2}))
    assert differing_tensors(again.model().state_dict(), straight.model().state_dict()) == []


class Recommender(tasks.WithData):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(6, 2, sparse=True)


class KeepsWeights(Recommender):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = checkpoint["state_dict"]["net.0.weight"].clone()

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint["state_dict"]["net.0.weight"] + checkpoint["own"]


@pytest.mark.parametrize("kind", [Recommender, KeepsWeights])
def test_checkpoints_have_no_values_of_a_table_whose_rows_are_on_the_servers(kind):
    task, state = LightningTask(kind()), {}
    task.module, task.trainer = kind(), SimpleNamespace()
    make_remote(task.module.users.weight, "users.weight", None)
    task.on_checkpoint(state)
    assert state["module"].keys() - {"epoch", "global_step"} == ({"own"} if kind is KeepsWeights else set())
    task.on_resume(state)
    if kind is KeepsWeights:
        assert torch.equal(task.module.loaded, 2 * task.module.net[0].weight)
        task.module.on_load_checkpoint = lambda checkpoint: checkpoint["state_dict"]["users.weight"].norm()
        with pytest.raises(TaskError, match=r"of table users.weight must not be used in a trainer"):
            task.on_resume(state)


@pytest.mark.parametrize("keys", [("both_epoch", "most"), (("both", "both_epoch"), ("most", "most"))])
def test_values_of_an_epoch_that_an_earlier_release_began_continue(keys):
    task, logged = LightningTask(tasks.WithData()), []
    task.module = tasks.WithData()
    sums = dict(zip(keys, [("mean", 6.0, 3.0), ("max", 2.0, 1.0)], strict=True))
    task.on_resume({"values": {}, "module": {}, "epoch": (0, 0, sums)})
    task.log = lambda *value: logged.append(value[:2])
    task.on_epoch_end(0)
    assert task.values == {"both": 2.0, "both_epoch": 2.0, "most": 2.0}
    assert logged == [("both_epoch", 2.0), ("most", 2.0)]


def test_what_is_logged_without_logger_has_no_record(tmp_path):
    seen = {}

    class Silent(tasks.WithData):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)["loss"]
            self.log("of_step", loss, logger=False)
            self.log("of_epoch", loss, on_step=False, on_epoch=True, logger=False)
            self.log("of_both", loss, on_step=True, on_epoch=True, logger=False)
            self.log("most", math.nan if batch_idx == 1 else 1.0, on_step=False, on_epoch=True, reduce_fx="max")
            return loss

        def on_train_epoch_end(self):
            seen.update(self.trainer.callback_metrics)

    result = paramserver.run(LightningTask(Silent()), quiet(tmp_path))
    names = {name for row in result.metrics("log") for name in row} - {"kind", "step", "time"}
    assert names == {"train_loss_step", "train_loss_epoch", "first", "batch_idx", "most"}
    assert seen.keys() >= {"of_step", "of_epoch", "of_both", "of_both_step", "of_both_epoch"}
    assert seen["most"].isnan()


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
        logs = [file.read_text() for file in (run.run_dir / "logs").glob("rank-*.log")]
        assert "".join([run.output, *logs]).count("only the first trainer prints") == run.summary["steps"]
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
    config["training"]["uneven_inputs"] = "join"
    run = train(tmp_path, "rpc", 2, **config, server=server)
    most = tasks.STEPS * tasks.EPOCHS  # fewer where gradients of a backup trainer are dropped
    assert run.summary["steps"] == most if "consistency" in server else most / 2 <= run.summary["steps"] <= most


def test_a_metric_of_torchmetrics_is_merged_over_trainers(tmp_path):
    config = {"task": TASK, "task_args": {"kind": "Scored"}, "training": {**EPOCHS, "ema_decay": 0.9}}
    ddp, rpc = train(tmp_path, "ddp", 2, **config), train(tmp_path, "rpc", 2, **config)
    equal_runs(ddp, rpc)
    module = tasks.Scored().eval()
    module.load_state_dict(rpc.load("ema"))
    points = tasks.Points()
    points.setup("fit")
    x, y = points.valid.tensors
    expected = R2Score()(module(x), y).item()
    assert rpc.summary["validation"] == {"r2": pytest.approx(expected, abs=1e-6)}
    # What the module computes of all validations by itself; the last one with the averages.
    computed = {record["name"]: record["value"] for record in rpc.of_kind("reduced")}
    assert computed["r2_of_all"] == pytest.approx(rpc.summary["validation"]["r2"], abs=1e-6)
    assert computed["kept_r2"] == pytest.approx(expected, abs=1e-6)
    assert computed["seen"] == len(x)
    evaluated = evaluate_run(rpc.run_dir).logged
    assert evaluated == pytest.approx({name: computed[name] for name in evaluated}, abs=1e-6)
    assert evaluated.keys() == {"r2_of_all", "kept_r2", "seen"}


def test_a_metric_that_was_logged_computes_what_it_does_in_lightning(tmp_path):
    computed = []

    class Best(tasks.WithData):
        def __init__(self):
            super().__init__()
            self.error, self.best = MeanSquaredError(), MinMetric()

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.error(self(batch[0]), batch[1])
            self.log("error", self.error)

        def on_validation_epoch_end(self):
            self.best(self.error.compute())
            computed.append((float(self.error.compute()), float(self.best.compute())))

    seed_all(Config().seed, CONSTRUCTOR)
    fit(Best())
    by_lightning = list(computed)
    del computed[:]
    seed_all(Config().seed, CONSTRUCTOR)
    task = LightningTask(Best())
    paramserver.run(task, quiet(tmp_path, training=EPOCHS))
    assert computed == [pytest.approx(values, rel=1e-6) for values in by_lightning]
    assert min(error for error, _ in computed) > 0


def test_a_trainer_without_validation_samples_computes_what_the_others_do():
    task = LightningTask(own(setup=lambda self, stage: setattr(self, "mean", MeanMetric())))
    task.config, computed = Config(), []
    task.build_model()

    def all_gather(value):
        return [{"mean": "logged"}, value]

    task.module.on_validation_epoch_end = lambda: computed.append(float(task.module.mean.compute()))
    process = SimpleNamespace(trainers=2)
    task.trainer = SimpleNamespace(
        lockstep=True, process=process, all_gather=all_gather, validation={"logged": 3.0}, trainer_index=1
    )
    task.on_validation_start(0)
    task.on_validation_end(0)
    assert computed == [3.0]
    assert task.module.mean(2.0) == 2.0, "after the hook"


def test_modules_of_the_other_package_train(tmp_path):
    """``pytorch_lightning`` has classes of its own."""
    other = pytest.importorskip("pytorch_lightning.demos.boring_classes")
    assert not issubclass(other.BoringModel, LightningModule)
    result = paramserver.run(LightningTask(other.BoringModel(), other.BoringDataModule()), quiet(tmp_path))
    assert result.summary["samples"] == 64


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


# Manual optimization.

MANUAL = {"task": TASK, "training": {**EPOCHS, "validate_every": 2 * tasks.STEPS}}


@pytest.mark.parametrize(
    ("way", "schedule"), [("toggled", True), ("plain", False), ("closure", False), ("zero after", False)]
)
def test_manual_optimization_is_that_of_lightning_bit_for_bit(tmp_path, way, schedule):
    seed_all(Config().seed, CONSTRUCTOR)
    module = tasks.Manual(way, schedule)
    torch.set_num_threads(1)
    trainer = lightnings_trainer(max_epochs=tasks.EPOCHS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=tasks.Points())
    args = {"kind": "Manual", "way": way, "schedule": schedule}
    run = train(tmp_path, "local", 1, **MANUAL, task_args=args)
    assert differing_tensors(run.load("model"), module.state_dict()) == []
    stored = run.load("optimizer")
    for number, optimizer in enumerate(trainer.optimizers):
        assert differing_tensors(stored[f"optimizer_{number}"], optimizer.state_dict()) == []
    assert run.summary["steps"] == trainer.global_step == 2 * tasks.STEPS * tasks.EPOCHS


def test_manual_optimization_of_two_trainers_is_the_same_in_ddp_and_rpc_and_resumes(tmp_path):
    config = {**MANUAL, "task_args": {"kind": "Manual", "schedule": True}}
    ddp, rpc = train(tmp_path, "ddp", 2, **config), train(tmp_path, "rpc", 2, **config)
    equal_runs(ddp, rpc)
    begun = train(tmp_path / "begun", "rpc", 2, **{**config, "training": {**config["training"], "max_steps": 10}})
    ended = resume(begun, "--set", "training.max_steps=null")
    assert ended.code == 0, ended.output
    assert_equal_runs(rpc, ended, trainers=2)


def test_lightnings_manual_demo_trains(tmp_path):
    result = paramserver.run(LightningTask(ManualOptimBoringModel()), quiet(tmp_path))
    assert result.summary["samples"] == 64


def manual(step, **members):
    """A module with one optimizer, whose training_step is ``step(module, optimizer, loss)``."""

    def training_step(self, batch, batch_idx):
        step(self, self.optimizers(), self.step(batch))

    return own(training_step=training_step, automatic_optimization=False, **members)


def twice(module, optimizer, loss):
    module.manual_backward(loss, retain_graph=True)
    module.manual_backward(loss)
    optimizer.step()


def never_zero(module, optimizer, loss):
    module.manual_backward(loss)
    optimizer.step()


def of_epochs(self):
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def of_steps(self):
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


def step_schedule(module, optimizer, loss):
    zero_and_step(module, optimizer, loss)
    module.lr_schedulers().step()


def zero_and_step(module, optimizer, loss):
    optimizer.zero_grad()
    never_zero(module, optimizer, loss)


def only_first_batch(module, optimizer, loss):
    if not module.global_step:
        zero_and_step(module, optimizer, loss)


def own_schedule(self):
    return [torch.optim.SGD(self.parameters(), 0.1)], [SimpleNamespace(state_dict=dict, load_state_dict=dict)]


def of_another(self):
    return [torch.optim.SGD(self.parameters(), 0.1)], of_steps(self)[1]


def clipped(clip):
    def step(module, optimizer, loss):
        optimizer.zero_grad()
        module.manual_backward(loss)
        clip(module.parameters(), 0.1)
        optimizer.step()

    return step


def clipped_between(module, _, loss):
    """Two optimizers have gradients of one loss; those of the second are clipped after the first is stepped."""
    first, _ = module.optimizers()
    module.manual_backward(loss, retain_graph=True)
    first.step()
    torch.nn.utils.clip_grad_norm_(module.layer.bias, 0.1)


def read_after(*, zeroed=False, at_next=False):
    def step(module, optimizer, loss):
        if at_next and module.global_step:
            module.layer.weight.grad.norm()
        zero_and_step(module, optimizer, loss)
        if zeroed:
            optimizer.zero_grad()
            assert module.layer.weight.grad is None
        elif not at_next:
            module.layer.weight.grad.norm()

    return step


def two_parts(self):
    return [torch.optim.SGD([parameter], 0.1) for parameter in self.layer.parameters()]


@pytest.mark.parametrize(
    ("step", "members", "sentence"),
    [
        (zero_and_step, {"configure_optimizers": own_schedule}, "returned a SimpleNamespace whose attribute optimizer"),
        (zero_and_step, {"configure_optimizers": of_another}, "returned a StepLR whose attribute optimizer is none of"),
        (clipped(torch.nn.utils.clip_grad_norm_), {}, "to clip gradients set training.clip_grad_norm"),
        (clipped(torch.nn.utils.clip_grad_value_), {}, "to clip gradients set training.clip_grad_norm"),
        (clipped_between, {"configure_optimizers": two_parts}, "to clip gradients set training.clip_grad_norm"),
        (read_after(), {}, r"to read them call torch.autograd.grad\(loss, parameters, retain_graph=True\)"),
        (read_after(at_next=True), {}, "a gradient cannot be read or clipped between"),
        (twice, {}, r"step\(\) of optimizer_0 must follow one self.manual_backward\(loss\) since its zero_grad"),
        (never_zero, {}, r"step\(\) of optimizer_0 must follow one self.manual_backward\(loss\) since its zero_grad"),
        (only_first_batch, {}, "must step an optimizer in each batch, and stepped none; in place of gradients of"),
        (lambda module, optimizer, loss: optimizer.step(), {}, r"step\(\) of optimizer_0 must follow one"),
        (lambda module, optimizer, loss: optimizer.param_groups, {}, "has no param_groups in a LightningTask; it has"),
        (lambda module, *_: module.clip_gradients(None, 1.0), {}, "clip_gradients .* set training.clip_grad_norm"),
        (step_schedule, {"configure_optimizers": of_epochs}, "a scheduler of manual optimization must be stepped once"),
        (zero_and_step, {"configure_optimizers": of_steps}, "a scheduler of manual optimization must be stepped once"),
    ],
)
def test_what_manual_optimization_cannot_do_exactly_is_refused(tmp_path, step, members, sentence):
    with pytest.raises(TaskError, match=sentence):
        paramserver.run(LightningTask(manual(step, **members)), quiet(tmp_path))


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_gradients_that_are_not_computed_are_refused_with_two_trainers(tmp_path, mode):
    args = {"kind": "Manual", "way": "clipped"}
    finished = launch(tmp_path, mode=mode, cluster={"num_trainers": 2, "timeout_s": 30}, **MANUAL, task_args=args)
    assert finished.code != 0
    assert "a gradient cannot be read or clipped between self.manual_backward(loss) and zero_grad()" in finished.output


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_gradients_can_be_read_by_autograd_and_are_none_after_zero_grad(tmp_path, mode):
    args = {"kind": "Manual", "way": "read"}
    run = train(tmp_path, mode, 2, **MANUAL, task_args=args)
    plain = train(tmp_path / "plain", mode, 2, **MANUAL, task_args={"kind": "Manual", "way": "plain"})
    assert differing_tensors(run.load("model"), plain.load("model")) == []


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_gradients_that_a_step_has_released_are_refused_with_two_trainers(tmp_path, mode):
    args = {"kind": "Manual", "way": "read after"}
    finished = launch(tmp_path, mode=mode, cluster={"num_trainers": 2, "timeout_s": 30}, **MANUAL, task_args=args)
    assert finished.code != 0
    assert "a gradient cannot be read or clipped between self.manual_backward(loss) and zero_grad()" in finished.output


def test_a_layer_is_compiled_before_the_step_of_its_gradients(tmp_path):
    def step(module, _, loss):
        module.manual_backward(loss, retain_graph=True)
        assert (torch.compile(module.layer, backend="eager")(torch.ones(1, 32)) == module(torch.ones(1, 32))).all()
        for one in module.optimizers():
            one.step()
            one.zero_grad()

    result = paramserver.run(LightningTask(manual(step, configure_optimizers=two_parts)), quiet(tmp_path))
    assert result.summary["steps"] == 128


def test_a_batch_is_kept_only_where_a_hook_takes_it_and_no_gradient_stays_marked(tmp_path):
    kept = []

    def ends(self):
        kept.append((task._train_outputs, self))

    def backward_at_the_end(module, optimizer, loss):
        optimizer.zero_grad()
        module.manual_backward(loss, retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        module.manual_backward(loss)

    task = LightningTask(manual(backward_at_the_end, on_train_end=ends))
    paramserver.run(task, quiet(tmp_path))
    ((outputs, module),) = kept
    assert (outputs, [parameter.grad for parameter in module.parameters()]) == (None, [None, None])


# Callbacks of a module.


class Observes(Callback):
    """Records the hooks that it is called in, and keeps their number."""

    def __init__(self):
        self.calls, self.resumed = [], {}

    def state_dict(self):
        return {"calls": len(self.calls)}

    def load_state_dict(self, state):
        self.resumed = state


def observed(hook):
    def call(self, trainer, module, *args, **_):
        assert isinstance(module, LightningModule)
        self.calls.append((hook, trainer.global_step if hook not in ("setup", "teardown") else None, len(args)))

    return call


OBSERVED = [hook for hook in tasks.HOOKS if hasattr(Callback, hook) and hook != "on_before_optimizer_step"]
for _hook in OBSERVED:
    setattr(Observes, _hook, observed(_hook))


def test_callbacks_of_a_module_observe_it_as_in_lightning(tmp_path):
    callbacks = []

    class Observed(tasks.WithData):
        def configure_callbacks(self):
            callbacks.append(Observes())
            return callbacks[-1]

    fit(Observed())
    result = paramserver.run(LightningTask(Observed()), {**quiet(tmp_path), "training": EPOCHS})
    by_lightning, here = callbacks
    # Without the numbers of steps: Lightning makes the update before on_train_batch_end.
    assert [call[::2] for call in here.calls] == [call[::2] for call in by_lightning.calls]
    assert {call[0] for call in here.calls} == set(OBSERVED)
    paramserver.run(LightningTask(Observed()), {"training": {"max_epochs": tasks.EPOCHS + 1}}, resume=result.run_dir)
    assert callbacks[-1].resumed == {"calls": len(here.calls) - 3}, "without the hooks of the end of the run"


def test_the_module_of_the_page_trains_with_manual_optimization(tmp_path):
    code = re.search(r"<!-- run: manual -->\n```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[1]
    names = {}
    exec(code, names)
    result = paramserver.run(names["Gan"](), quiet(tmp_path))
    assert (result.summary["samples"], result.summary["steps"]) == (256, 16)


@pytest.mark.parametrize(
    ("callback", "sentence"),
    [
        (EarlyStopping("loss"), "returned EarlyStopping, which acts on Lightning's Trainer; set training.patience"),
        (type("Mine", (ModelCheckpoint,), {})(), "returned Mine, which acts on .*; set checkpoint.best"),
        (type("Mine", (Callback,), {"on_exception": lambda *_: None})(), "Mine.on_exception would not be called"),
        (
            LambdaCallback(on_before_optimizer_step=lambda *_: None),
            "LambdaCallback.on_before_optimizer_step would not be called by a LightningTask; remove it: the optimizer",
        ),
        (1, "configure_callbacks returned 1; it must return Lightning's callbacks"),
        ([Observes(), Observes()], "several callbacks with the state_key 'Observes', of which a checkpoint would have"),
    ],
)
def test_other_callbacks_are_refused_by_name(tmp_path, callback, sentence):
    callbacks = callback if isinstance(callback, list) else [callback]
    task = LightningTask(own(configure_callbacks=lambda self: callbacks))
    with pytest.raises(TaskError, match=sentence):
        paramserver.run(task, quiet(tmp_path))


def test_callbacks_of_one_class_without_state_are_called_each(tmp_path):
    calls = []
    callbacks = [LambdaCallback(on_train_start=lambda *_, number=number: calls.append(number)) for number in range(2)]
    paramserver.run(LightningTask(own(configure_callbacks=lambda self: callbacks)), quiet(tmp_path))
    assert calls == [0, 1]


def test_a_callback_after_the_backward_is_refused_with_manual_optimization(tmp_path):
    callback = LambdaCallback(on_after_backward=lambda *_: None)
    task = LightningTask(manual(zero_and_step, configure_callbacks=lambda self: callback))
    with pytest.raises(TaskError, match=r"LambdaCallback.on_after_backward would not be called with manual opt"):
        paramserver.run(task, quiet(tmp_path))


# What is refused, and what self.trainer is.


class Lacks(LightningModule):
    def training_step(self, batch, batch_idx): ...


class TakesIterator(BoringModel):
    def training_step(self, dataloader_iter): ...


def own(**members):
    """A BoringModel with these members."""
    return type("Own", (BoringModel,), members)()


def quiet(folder, **sections):
    logging = {"run_dir": str(folder), "progress": "off", "tensorboard": False}
    return {"mode": "local", "training": {"max_epochs": 1, "validate_every": 10}, "logging": logging, **sections}


@pytest.mark.parametrize(
    ("module", "datamodule", "sentence"),
    [
        (torch.nn.Linear(1, 1), None, "give it an instance of a LightningModule"),
        (BoringModel, None, "give it an instance of a LightningModule"),
        (BoringModel(), [1], "give it a LightningDataModule, or None"),
        (manual(None, on_after_backward=lambda self: None), None, "Own.on_after_backward would not be called with man"),
        (Lacks(), None, "Lacks lacks configure_optimizers"),
        (TakesIterator(), None, "takes a dataloader_iter"),
        *(
            (own(**{name: lambda *_: None}), None, f"Own.{name} would not be called by a LightningTask; remove it: ")
            for name in _NOT_CALLED
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(module, datamodule, sentence):
    with pytest.raises(TaskError, match=sentence):
        LightningTask(module, datamodule)


def test_refused_methods_are_those_of_lightning():
    assert [name for name in _NOT_CALLED if not hasattr(LightningModule, name)] == []


def two_optimizers(self):
    return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


def two_intervals(self):
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    step, epoch = (torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2))
    return [optimizer], [{"scheduler": step, "interval": "step"}, epoch]


def every_fourth_step(self):
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step", "frequency": 4}
    return [optimizer], [schedule]


def two_loaders(self):
    return [BoringModel().train_dataloader(), BoringModel().train_dataloader()]


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"configure_optimizers": two_optimizers}, "configure_optimizers returned 2 optimizers"),
        ({"configure_optimizers": lambda self: None}, "configure_optimizers: Unknown configuration"),
        ({"configure_optimizers": two_intervals}, "schedulers of several intervals"),
        ({"configure_optimizers": every_fourth_step}, r"frequency \(4\) must be 1 with interval step.*LambdaLR can"),
        ({"train_dataloader": two_loaders}, "returned list; a LightningTask takes one"),
        ({"train_dataloader": lambda self: [torch.zeros(1, 32)]}, "returned Tensor; a LightningTask takes one"),
        ({"val_dataloader": two_loaders}, "val_dataloader returned list"),
        ({"training_step": lambda self, batch, batch_idx: None}, "training_step returned no loss"),
        ({"on_train_batch_start": lambda self, batch, batch_idx: -1}, "returned -1"),
        ({"on_train_start": lambda self: self.trainer.fit_loop}, "self.trainer has no fit_loop in a LightningTask"),
        ({"on_train_start": lambda self: self.optimizers()}, "self.trainer has no strategy in a LightningTask"),
        ({"on_train_start": lambda self: setattr(self.trainer, "limit", 1)}, "self.trainer.limit cannot be set"),
        (
            {"training_step": lambda self, *_: self.log("x", 1.0, on_step=False)},
            r"self.log\('x', on_step=False\) in a step must be given on_epoch=True",
        ),
        ({"on_train_start": lambda self: self.log("x", 1.0, reduce_fx="min")}, "reduce_fx must be one of"),
        (
            {"on_train_start": lambda self: self.log("x", MeanMetric())},
            "was given a MeanMetric outside of validation_step",
        ),
        ({"validation_step": lambda self, *_: self.log("x", 1.0, reduce_fx="sum")}, "and mean in validation_step"),
    ],
)
def test_what_a_run_finds_is_refused_in_one_sentence(tmp_path, members, sentence):
    with pytest.raises(TaskError, match=sentence):
        paramserver.run(LightningTask(own(**members)), quiet(tmp_path))


def test_a_plateau_needs_validations(tmp_path):
    task, training = LightningTask(tasks.Regression("plateau"), tasks.Points()), {"max_steps": 1, "validate_every": 0}
    with pytest.raises(TaskError, match=r"training.validate_every \(0\) must be above 0"):
        paramserver.run(task, quiet(tmp_path, training=training))


def test_forwards_on_the_server_are_refused_at_the_start(tmp_path):
    config = {"mode": "rpc", "server": {"compute": "server"}, "training": ONE_BY_ONE}
    run = launch(tmp_path, task="lightning_tasks:Boring", **config)
    assert run.code == 2
    assert "server.compute (server) must be trainer for a LightningTask" in run.output
    assert not run.run_dir.exists()


def test_values_of_a_step_on_the_server_are_refused(tmp_path):
    config = {"task": TASK, "task_args": {"kind": "LogsGradients"}}
    run = launch(tmp_path, **config, mode="rpc")
    assert run.code == 2
    assert "self.log('norm') was called where no trainer runs" in run.output
    local = train(tmp_path, "local", 1, **config)
    assert [r["step"] for r in local.of_kind("log") if r["name"] == "norm"] == list(range(1, 13))


def test_the_module_that_is_given_stays_as_it_was(tmp_path):
    module = BoringModel()
    before = copy.deepcopy(module.state_dict())
    result = paramserver.run(LightningTask(module), quiet(tmp_path))
    assert (result.status, result.summary["samples"]) == ("completed", 64)
    assert differing_tensors(module.state_dict(), before) == []


def test_an_instance_is_for_one_process(tmp_path):
    sentence = r"task: module \(BoringModel\) of LightningTask must be a plain value"
    with pytest.raises(paramserver.UnsupportedConfiguration, match=sentence):
        paramserver.run(LightningTask(BoringModel()), {**quiet(tmp_path), "mode": "ddp"})


def test_should_stop_ends_the_run(tmp_path):
    def stop(self):
        assert self.trainer.should_stop is False
        self.trainer.should_stop = True

    result = paramserver.run(LightningTask(own(on_validation_end=stop)), quiet(tmp_path))
    assert result.summary["reason"] == "the module set trainer.should_stop"
    assert 10 <= result.summary["steps"] <= 11


def test_other_members_of_the_trainer_are_missing_by_name():
    task = LightningTask(BoringModel())
    task.config = Config()
    module = task.build_model()
    assert (module.logger, module.loggers, module.trainer.world_size) == (None, [], 2)
    assert not hasattr(module.trainer, "fit_loop")
    with pytest.raises(NoSuchMember, match=f"it has {', '.join(sorted(MEMBERS))}"):
        module.trainer.checkpoint_callback  # noqa: B018
    with pytest.raises(TaskError, match="a process that does not train"):
        module.trainer.global_step  # noqa: B018
    assert set(MEMBERS) <= set(dir(lightnings_trainer()))
    assert copy.deepcopy(module)._trainer is None
    assert pickle.loads(pickle.dumps(module.trainer)) is None


def test_the_local_rank_counts_the_trainers_of_the_host():
    task = LightningTask(BoringModel())
    task.config = Config(cluster=ClusterConfig(num_servers=2))
    # Ranks 0, 2 and 4 are on this host, where rank 0 is a server.
    identity = ProcessIdentity(4, 5, 2, 3, 0, "node0", 29500, False, "job", "srun", host_ranks=(0, 2, 4))
    task.trainer = SimpleNamespace(process=SimpleNamespace(identity=identity))
    assert MEMBERS["local_rank"](task) == 1


def test_a_metric_is_passed_on_to_the_validation():
    metric = MeanMetric()
    task = LightningTask(own(validation_step=lambda self, batch, batch_idx: self.log("mean", metric)))
    task.config = Config()
    assert task.validation_step(task.build_model(), torch.zeros(1, 32), 0, 0) == {"mean": metric}


def test_data_is_prepared_by_one_process_at_a_time(tmp_path):
    run = train(tmp_path, "rpc", 2, task="lightning_tasks:Prepared", task_args={"folder": str(tmp_path)})
    times = sorted(tuple(map(float, file.read_text().split())) for file in tmp_path.glob("prepared-*"))
    assert len(times) == 3, run.output
    assert all(before[1] <= after[0] for before, after in pairwise(times))


# docs/lightning.md.


@pytest.mark.parametrize("file", ["digits.py", "task.py", "config.yaml"])
def test_the_page_has_the_example(file):
    block = re.search(rf"<!-- file: examples/lightning/{file} -->\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert block[1] == (EXAMPLE / file).read_text()


def test_the_page_lists_members_and_refused_methods():
    table = PAGE.partition("<!-- members: begin -->")[2].partition("<!-- members: end -->")[0]
    named = [
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    ]
    assert sorted(named) == sorted(MEMBERS)
    refused = PAGE.partition("a module that overrides")[2].partition(";")[0]
    assert re.findall(r"`(\w+)`", refused) == sorted(_NOT_CALLED)


def test_the_example_trains_in_every_mode_and_its_model_loads_without_this_package(tmp_path, monkeypatch):
    shutil.copytree(EXAMPLE, tmp_path / "example")
    runs = {}
    for mode in ("ddp", "rpc"):
        arguments = ["--config", "example/config.yaml", "--mode", mode, "--set", "logging.name=digits"]
        folder = tmp_path / mode
        shutil.copytree(tmp_path / "example", folder / "example")
        runs[mode] = launching._run_forked(arguments, folder, 90, folder / "runs" / "digits", environment())
        assert runs[mode].code == 0, runs[mode].output
    equal_runs(runs["ddp"], runs["rpc"])
    assert runs["rpc"].summary["steps"] == 118
    assert runs["rpc"].summary["validation"]["accuracy"] > 0.9
    code = re.search(r"<!-- run: checkpoint -->\n```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[1]
    monkeypatch.chdir(tmp_path / "rpc")
    monkeypatch.syspath_prepend("example")
    loaded = {}
    absent = {name: None for name in sys.modules if name.partition(".")[0] == "paramserver"}
    with mock.patch.dict(sys.modules, absent), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code.replace("MODEL", runs["rpc"].checkpoints[-1]), loaded)
    assert dict(loaded["module"].hparams) == {"lr": 0.1, "width": 64}


def test_two_servers_refuse_a_hook_that_sees_a_part_of_the_parameters(tmp_path):
    config = {"task": TASK, "task_args": {"kind": "LogsGradients"}, "cluster": {"num_servers": 2}}
    run = launch(tmp_path, mode="rpc", **config)
    assert run.code == 2
    assert "must look at no two parameters together, in step() or in hooks of it" in run.output
