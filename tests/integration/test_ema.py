"""``training.ema_decay``: the average of the parameters is torch's, in every mode; it is validated, stored, resumed."""

import copy
from contextlib import closing

import pytest
import torch
from launching import assert_equal_runs, differing_tensors, main_in_process, resume, train, write_config
from tasks import ReferenceTask
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paramserver import Callback
from paramserver.config import TrainingConfig
from paramserver.evaluate import evaluate_run
from paramserver.optim.parallel_step import ThreadTeam
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.optim.updater import Updater
from paramserver.parameters.flat import FlatTensors, trainable_parameters
from paramserver.parameters.sharding import full_shard

DECAY = 0.8
CONFIG = {
    "training": {"max_steps": 10, "batch_size": 8, "validate_every": 4, "ema_decay": DECAY},
    "checkpoint": {"every": 4, "keep": 9, "background": False, "best": {"metric": "loss", "mode": "min"}},
    "buffer": {"capacity": 512},
}


class Averages(Callback):
    """AveragedModel, updated by hand before each step and before each validation: it has seen every version by then."""

    def __init__(self):
        self.seen = 0

    def see(self):
        trainer = self.task.trainer
        if self.seen == 0:
            self.averaged = AveragedModel(trainer.unwrapped_model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        elif trainer.step > self.seen - 1:
            self.averaged.update_parameters(trainer.unwrapped_model)
        self.seen = trainer.step + 1

    def on_batch_start(self, batch_idx):
        self.see()

    def on_validation_start(self, batch_idx):
        self.see()

    def state_dict(self):
        return {"model": self.averaged.module.state_dict(), "own": self.task.trainer.unwrapped_model.state_dict()}


class Averaged(ReferenceTask):
    """Compares with the average that torch makes of the versions that a trainer sees."""

    def callbacks(self):
        return [Averages()]


def by_torch(run):
    """The average of torch over all versions of a run, from its trainer 0."""
    return run.load("trainer-0")["task"]["paramserver.callbacks"]["Averages"]["model"]


MODES = [
    ("local", 1, {}),
    ("ddp", 2, {}),
    ("rpc", 1, {}),
    ("rpc", 2, {}),
    ("rpc", 2, {"server": {"transport": "rpc"}}),
    ("rpc", 2, {"cluster": {"num_servers": 2}}),
    ("rpc", 2, {"cluster": {"num_servers": 2}, "server": {"transport": "rpc"}}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = {}

    def run(number):
        if number not in made:
            mode, trainers, more = MODES[number]
            folder = tmp_path_factory.mktemp("ema")
            made[number] = train(folder, mode, trainers, task=f"{__file__}:Averaged", **CONFIG, **copy.deepcopy(more))
        return made[number]

    return run


@pytest.mark.processes
@pytest.mark.parametrize("number", range(len(MODES)))
def test_the_average_is_that_of_torch(runs, number):
    run = runs(number)
    # Module buffers are those of the model, as AveragedModel has them.
    expected, found = by_torch(run), run.load("ema")
    assert differing_tensors(found, run.load("model")) != []
    assert differing_tensors(found, expected) == []


@pytest.mark.processes
def test_the_average_is_the_same_in_every_mode(runs):
    for one, others in ((0, [2]), (1, [3, 4, 5, 6])):
        for other in others:
            assert differing_tensors(runs(one).load("ema"), runs(other).load("ema")) == []
            assert differing_tensors(runs(one).load("optimizer"), runs(other).load("optimizer")) == []
            assert [r["values"] for r in runs(one).of_kind("validation")] == [
                r["values"] for r in runs(other).of_kind("validation")
            ]


@pytest.mark.processes
@pytest.mark.parametrize("number", [0, 1, 3, 6])
def test_the_average_is_what_is_validated_and_evaluated(runs, number):
    run = runs(number)
    for record in run.of_kind("validation"):
        if f"step-{record['step']:08d}" in run.checkpoints:
            found = evaluate_run(run.run_dir, str(record["step"]))
            assert found.values == pytest.approx(record["values"], rel=1e-6)
    plain = evaluate_run(run.run_dir, overrides=["training.ema_decay=null"])
    assert plain.values["loss"] != pytest.approx(run.of_kind("validation")[-1]["values"]["loss"], rel=1e-6)
    best = min(run.of_kind("validation"), key=lambda record: record["values"]["loss"])
    assert run.best == f"step-{best['step']:08d}"


@pytest.mark.processes
@pytest.mark.parametrize("number", [0, 1, 3, 6])
def test_a_resumed_average_is_that_of_a_run_that_was_not_stopped(runs, tmp_path, number):
    mode, trainers, more = MODES[number]
    half = {**copy.deepcopy(CONFIG), "training": {**CONFIG["training"], "max_steps": 4}}
    whole = train(tmp_path / "whole", mode, trainers, **CONFIG, **copy.deepcopy(more))
    other = train(tmp_path / "other", mode, trainers, **half, **copy.deepcopy(more))
    other = resume(other, "--set", "training.max_steps=10")
    assert other.code == 0, other.output
    assert_equal_runs(whole, other, trainers)
    assert differing_tensors(whole.load("ema"), other.load("ema")) == []


@pytest.mark.processes
@pytest.mark.parametrize("server", [{"consistency": "async"}, {"consistency": "bounded"}, {"backup_trainers": 1}])
def test_trainers_that_run_freely_validate_one_average_together(tmp_path, server):
    config = {**CONFIG, "checkpoint": {**CONFIG["checkpoint"], "best": None}}
    run = train(tmp_path, "rpc", 2, **config, server=server)
    for record in run.of_kind("validation"):
        assert record["samples"] == 37
        if f"step-{record['step']:08d}" in run.checkpoints:
            found = evaluate_run(run.run_dir, str(record["step"]))
            assert found.values == pytest.approx(record["values"], rel=1e-6)


@pytest.mark.processes
def test_trainers_without_data_have_the_averages_of_the_others(tmp_path):
    training = {**CONFIG["training"], "max_steps": None, "uneven_inputs": "join"}
    config = {**CONFIG, "training": training}
    ddp, rpc = (train(tmp_path, mode, 2, task="UnevenLengths", **config) for mode in ("ddp", "rpc"))
    assert ddp.summary["steps"] == 10
    assert differing_tensors(ddp.load("ema"), rpc.load("ema")) == []
    assert [r["values"] for r in ddp.of_kind("validation")] == [r["values"] for r in rpc.of_kind("validation")]


@pytest.mark.processes
def test_an_average_is_dropped_and_begun_by_a_resume(tmp_path):
    run = train(tmp_path, "local", 1, **CONFIG)
    assert resume(run, "--set", "training.max_steps=12", "--set", "training.ema_decay=null").code == 0
    assert not (run.run_dir / "checkpoints" / "step-00000012" / "ema.pt").exists()
    assert all("ema_average" not in state for state in run.load("optimizer")["state"].values())
    assert resume(run, "--set", "training.max_steps=14", "--set", "training.ema_decay=0.5").code == 0
    assert differing_tensors(run.load("ema"), run.load("model")) != []


def test_a_parameter_that_is_not_stepped_keeps_its_average():
    task = ReferenceTask(optimizer="adam", unused=True)
    model = task.build_model()
    updater = Updater(task, model, TrainingConfig(ema_decay=DECAY))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(1, 5):
        model(torch.randn(8, 1, 6, 6)).sum().backward()
        updater.apply(step)
        updater.optimizer.zero_grad()
        averaged.update_parameters(model)
    found = updater.averages()
    expected = dict(averaged.module.named_parameters())
    assert found.keys() == {n for n, p in model.named_parameters() if p.requires_grad and n != "unused"}
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def test_threads_move_the_same_averages():
    def train(team):
        torch.manual_seed(0)
        model, task = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 5)), ReferenceTask()
        flat = FlatTensors(trainable_parameters(model))
        updater = Updater(task, model, TrainingConfig(ema_decay=DECAY))
        parameters = list(flat.tensors.values())
        shard = ShardUpdater(flat.layout, full_shard(flat.layout), flat.flats, parameters, updater.optimizer)
        if team is not None:
            shard.use_threads(team)
        for _ in range(3):
            model(torch.ones(8, 40)).sum().backward()
            shard.step()
        return updater.averages()

    with closing(ThreadTeam(2)) as team:
        assert differing_tensors(train(team), train(None)) == []


def test_what_cannot_be_averaged_is_refused(tmp_path):
    for more, expected in (
        ({"server": {"compute": "server"}, "mode": "rpc"}, "training.ema_decay (0.8) must be null with server.compute"),
        ({"training": {"ema_decay": 1.5}}, "training.ema_decay (1.5) must be at most 1"),
    ):
        code, output = main_in_process("--config", write_config(tmp_path, **{**CONFIG, **more}))
        assert code == 2
        assert expected in output
