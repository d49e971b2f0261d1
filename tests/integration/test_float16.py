"""``training.precision: float16``: the loss is scaled as by ``torch.amp.GradScaler``, alike in all modes."""

from types import SimpleNamespace

import pytest
import torch
from invalid_tasks import Overflows, __file__ as bad_tasks
from launching import differing_tensors, resume, train
from skipped_steps import assert_same, skipped_with_scale as skipped
from torch import nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.processes

TASK = f"{bad_tasks}:Overflows"
HALF = {"precision": "float16", "batch_size": 8, "max_epochs": 2, "max_steps": None, "validate_every": 5}
# Batches of which the gradients overflow with the first scale, and with half of it, on some trainers.
PLACES = [(0, 0), (1, 3), (0, 4), (1, 11), (0, 11)]


def config_of(places=PLACES, training=(), **options):
    task_args = {"places": places, "samples": 160, **options}
    return {"task": TASK, "task_args": task_args, "training": {**HALF, **dict(training)}, "logging": {"log_every": 1}}


WAYS = {
    "shared memory": {},
    "messages": {"server": {"transport": "rpc"}},
    "two servers": {"cluster": {"num_servers": 2}},
    "batches": {"training": {"accumulate_batches": 2, "clip_grad_norm": 0.5}},
    "values": {"training": {"clip_grad_value": 0.01}},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trainers", [1, 2])
def test_it_is_the_same_in_every_mode_bit_for_bit(tmp_path, way, trainers):
    config = config_of(training=WAYS[way].get("training", ()))
    others = {name: section for name, section in WAYS[way].items() if name != "training"}
    ddp, rpc = train(tmp_path, "ddp", trainers, **config), train(tmp_path, "rpc", trainers, **config, **others)
    assert_same(ddp, rpc)
    if trainers == 1:
        assert_same(ddp, train(tmp_path, "local", 1, **config))
    scales = [entry[-1] for entry in skipped(rpc)]
    assert scales == [2.0 ** (16 - number) for number in range(len(scales))]
    assert len(scales) > 1
    assert {tuple(entry[1]) for entry in skipped(rpc)} == {tuple(range(trainers))}
    full = train(tmp_path / "full", "local", 1, **config_of([], training={"precision": "float32"}))
    assert differing_tensors(full.load("model"), rpc.load("model"))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_it_is_what_torch_computes(tmp_path, clip):
    """A loop with ``torch.amp.GradScaler`` over the same batches gives the same parameters and the same scale."""
    options = {"places": [(0, 0), (0, 3), (0, 11)], "samples": 160, "plain": True, "validation": 0}
    config = config_of(training={"max_epochs": 1, "clip_grad_norm": clip}, **options)
    run = train(tmp_path, "local", 1, **config)
    task = Overflows(**options)
    model, scaler = task.build_model(), torch.amp.GradScaler("cpu")
    optimizer = task.build_optimizer(model)
    task.trainer = SimpleNamespace(trainer_index=0)
    for batch_idx, batch in enumerate(DataLoader(task.train_source(None), batch_size=8)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = task.training_step(model, batch, batch_idx)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    assert differing_tensors(run.load("model"), model.state_dict()) == []
    assert run.load("run")["skipping"]["scale"] == scaler.get_scale() < 2.0**16
    assert run.summary["steps"] + len(skipped(run)) == 20


@pytest.mark.parametrize("server", [{"consistency": "async"}, {"consistency": "bounded"}], ids=str)
def test_trainers_that_run_freely_skip_their_own_push_only(tmp_path, server):
    run = train(tmp_path, "rpc", 2, **config_of(training={"uneven_inputs": "join"}), server=server)
    found = skipped(run)
    assert all(len(entry[1]) == 1 and entry[2:4] == [8, "gradient"] for entry in found)
    assert run.summary["samples_skipped"] == 8 * len(found) > 0
    assert run.summary["samples"] == 320 - run.summary["samples_skipped"]
    assert run.load("run")["skipping"]["scale"] == min(entry[-1] for entry in found) / 2


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_a_resumed_run_is_the_same_as_a_straight_one(tmp_path, mode):
    config = {**config_of([(0, 0), (0, 1), (0, 11), (0, 15)]), "checkpoint": {"every": 3}}
    straight = train(tmp_path / "straight", mode, 2, **config)
    stopped = train(tmp_path / "stopped", mode, 2, **{**config, "training": {**config["training"], "max_steps": 7}})
    resumed = resume(stopped, "--set", "training.max_steps=null")
    assert resumed.code == 0, resumed.output
    assert_same(straight, resumed)


@pytest.mark.parametrize("way", ["shared memory", "messages", "two servers"])
def test_rounds_have_a_scale_for_each_trainer_alike_in_ddp_and_rpc(tmp_path, way):
    config = config_of(training={"local_steps": 2, "clip_grad_norm": 0.5})
    ddp, rpc = train(tmp_path, "ddp", 2, **config), train(tmp_path, "rpc", 2, **config, **WAYS[way])
    for name in ("model", "optimizer"):
        assert differing_tensors(ddp.load(name), rpc.load(name)) == []
    for name in ("steps", "samples", "samples_skipped", "validation"):
        assert ddp.summary[name] == rpc.summary[name], name
    assert sorted(skipped(ddp)) == sorted(skipped(rpc))
    for trainer in (0, 1):
        scales = [scale for _, trainers, _, _, scale in skipped(rpc) if trainers == [trainer]]
        assert scales == [2.0 ** (16 - number) for number in range(len(scales))] != []
    assert rpc.summary["steps"] == 10
    assert rpc.summary["samples"] + rpc.summary["samples_skipped"] == 320


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_a_resumed_run_of_rounds_continues_with_the_scales(tmp_path, mode):
    config = {**config_of([(0, 0), (0, 1), (0, 11), (0, 15)], training={"local_steps": 2}), "checkpoint": {"every": 3}}
    straight = train(tmp_path / "straight", mode, 2, **config)
    stopped = train(tmp_path / "stopped", mode, 2, **{**config, "training": {**config["training"], "max_steps": 3}})
    resumed = resume(stopped, "--set", "training.max_steps=null")
    assert resumed.code == 0, resumed.output
    assert differing_tensors(straight.load("model"), resumed.load("model")) == []
    assert sorted(skipped(straight)) == sorted(skipped(resumed))


@pytest.mark.parametrize("mode", ["local", "rpc"])
def test_a_derivative_of_the_task_itself_has_no_scale(tmp_path, mode):
    run = train(tmp_path, mode, 1, **config_of([], derives=True, training={"max_steps": 2}))
    assert run.summary["steps"] == 2
