"""A checkpoint of one mode and number of trainers resumes in another, like a loop in plain PyTorch."""

import shutil
from pathlib import Path

import pytest
import torch
from launching import TASKS, relative_difference, resume, train
from tasks import ReferenceModel, ReferenceTask
from torch.nn import functional as F

from paramserver.sources import deal
from paramserver.sources.base import Partition
from paramserver.sources.dataset import PartitionOrder

pytestmark = pytest.mark.processes

SAMPLES, BATCH, STOP, END = 96, 8, 4, 11
CONFIG = {
    "task_args": {"dropout": 0.0, "batch_norm": False, "dtype": "float64", "samples": SAMPLES, "schedule": "step"},
    "training": {"max_steps": STOP, "batch_size": BATCH, "validate_every": 5},
    "logging": {"log_every": 1, "tensorboard": False},
}
BEGIN = [("local", 1), ("ddp", 1), ("rpc", 1), ("ddp", 2), ("rpc", 2)]
GO_ON = {1: [("local", 1), ("ddp", 1), ("rpc", 1), ("ddp", 2), ("rpc", 2)]}
GO_ON[2] = [("local", 1), ("ddp", 1), ("rpc", 1), ("ddp", 2), ("rpc", 2), ("ddp", 3), ("rpc", 3)]
# Of the same number one of each: the others differ in nothing that a checkpoint holds.
SAME = {("local", "ddp"), ("ddp", "rpc"), ("rpc", "local"), ("rpc", "ddp")}
MATRIX = [
    (before, after)
    for before in BEGIN
    for after in GO_ON[before[1]]
    if before[1] != after[1] or (before[0], after[0]) in SAME
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """One run of each mode and number, stopped after four steps."""
    folder = tmp_path_factory.mktemp("begun")
    return {(mode, trainers): train(folder, mode, trainers, **CONFIG) for mode, trainers in BEGIN}


@pytest.fixture(scope="module")
def differences():
    found = {}
    yield found
    worst = max(found, key=found.get, default="none")
    print(f"\nlargest difference of {len(found)} resumes: {found.get(worst, 0.0):.1e} ({worst})")


def batches_by_hand(before, after):
    """The indices of each step after the stop, per trainer: what is left of the first pass in turn, then new passes."""
    options = {"seed": 0}
    left = [deal(SAMPLES, Partition(i, before), seed=0, epoch=0)[STOP * BATCH :] for i in range(before)]
    in_turn = [index for turn in zip(*left, strict=True) for index in turn]
    if before == after:
        shares = [PartitionOrder(SAMPLES, Partition(i, after), options, left[i], 1) for i in range(after)]
    else:
        shares = [PartitionOrder(SAMPLES, Partition(i, after), options, in_turn[i::after], 1) for i in range(after)]
    rows = [[index for block in share.blocks(0, 4) for index in block] for share in shares]
    return [[row[n * BATCH : (n + 1) * BATCH] for row in rows] for n in range(END - STOP)]


def by_hand(run, before, after):
    """Plain PyTorch: load model and optimizer, take the mean of the trainers' mean gradients."""
    task = ReferenceTask(**CONFIG["task_args"])
    model = ReferenceModel(dropout=0.0, unused=False, batch_norm=False).double()
    model.load_state_dict(run.load("model"))
    optimizer = task.build_optimizer(model)
    optimizer.load_state_dict(run.load("optimizer"))
    scheduler = task.build_scheduler(optimizer)
    scheduler.load_state_dict(run.load("run")["scheduler"])
    images, labels = task.train_source(None).tensors
    for step in batches_by_hand(before, after):
        optimizer.zero_grad()
        for indices in step:
            loss = F.cross_entropy(model(images[indices]), labels[indices]) / len(step)
            loss.backward()
        optimizer.step()
        scheduler.step()
    return model.state_dict()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("before", "after"), MATRIX, ids=lambda case: f"{case[0]}{case[1]}")
def test_a_checkpoint_resumes_in_every_mode_and_number_of_trainers(tmp_path, begun, differences, before, after):
    first = begun[before]
    run_dir = tmp_path / "run"
    shutil.copytree(first.run_dir, run_dir)
    mode, trainers = after
    flags = ["--mode", mode, "--set", f"training.max_steps={END}", "--set", f"cluster.num_trainers={trainers}"]
    second = resume(type(first)(0, "", run_dir), *flags)
    assert second.code == 0, second.output
    assert second.summary["mode"] == mode
    assert second.summary["num_trainers"] == trainers
    assert second.summary["samples"] == STOP * BATCH * before[1] + (END - STOP) * BATCH * trainers
    found = relative_difference(second.load("model"), by_hand(first, before[1], trainers))
    differences[f"{before} to {after}"] = found
    assert found < 1e-12
    assert [r["step"] for r in second.of_kind("train")] == list(range(1, END + 1))
    times = [r["seconds"] for r in second.of_kind("train")]
    assert times == sorted(times)
    noted = f"a step takes {trainers} x 8 samples in place of {before[1]} x 8" in second.output
    assert noted == (trainers != before[1])


def test_more_trainers_have_their_own_random_numbers_and_the_old_ones_keep_theirs(tmp_path):
    """Dropout and a random buffer: ddp and rpc agree bit for bit on what two trainers do that were one."""
    config = {
        **CONFIG,
        "task_args": {"samples": SAMPLES, "dropout": 0.5},
        "training": {"max_epochs": 1, "max_steps": 3, "batch_size": BATCH},
        "buffer": {"kind": "firo", "capacity": SAMPLES, "watermark": SAMPLES},
    }
    first = train(tmp_path, "local", 1, **config)
    models = []
    for mode in ("ddp", "rpc"):
        shutil.copytree(first.run_dir, tmp_path / mode)
        # Each trainer gets 36 of the 72 samples that are left, and draws from all: the watermark waits for them.
        flags = ["--mode", mode, "--set", "training.max_steps=5", "--set", "buffer.watermark=36"]
        flags += ["--set", "cluster.num_trainers=2"]
        second = resume(type(first)(0, "", tmp_path / mode), *flags)
        assert second.code == 0, second.output
        models.append(second.load("model"))
        parts = [second.load(f"trainer-{i}") for i in range(2)]
        assert not torch.equal(parts[0]["random"]["torch"], parts[1]["random"]["torch"])
        served = first.load("trainer-0")["counters"]["samples_served"]
        assert sum(part["counters"]["samples_served"] for part in parts) == served + 2 * 2 * BATCH
    assert relative_difference(*models) < 1e-6


def test_a_plain_iterable_is_refused_for_another_number_and_nothing_is_lost(tmp_path):
    config = {
        "task": "UnevenLengths",
        "training": {"max_steps": 3, "batch_size": BATCH},
        "logging": {"tensorboard": False},
    }
    first = train(tmp_path, "rpc", 2, **config)
    summary = first.summary
    second = resume(first, "--mode", "local", "--set", "training.max_steps=5")
    assert second.code == 2
    assert "a checkpoint of 2 trainers, whose data comes from IterableSource, must be resumed with 2" in second.output
    assert first.checkpoints == ["step-00000003"]
    assert first.summary == summary
    again = resume(first, "--set", "training.max_steps=5")  # in the stored mode, which is still that of before
    assert again.code == 0, again.output
    assert again.summary["mode"] == "rpc"
    assert again.summary["samples"] == 5 * 2 * BATCH
    assert [r["step"] for r in again.of_kind("train")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_an_epoch_is_a_pass_also_after_passes_that_left_out_fewer_samples(tmp_path, mode):
    """A pass has 24 of the 28 samples with one trainer, and 16 with two."""
    task = f"{Path(TASKS).parent}/sampler_tasks.py:Loaded"
    config = {"task_args": {"kind": "shuffled", "samples": 28, "schedule": "epoch"}, "logging": {"log_every": 1}}
    run = train(tmp_path, "local", 1, task=task, training={"max_epochs": 3, "max_steps": None}, **config)
    flags = ("--mode", mode, "--set", "cluster.num_trainers=2", "--set", "training.max_epochs=5")
    resumed = resume(run, *flags)
    assert resumed.code == 0, resumed.output
    found = [(r["epoch"], r["lr"][0]) for r in resumed.of_kind("train")]
    assert [epoch for epoch, _ in found] == [*(epoch for epoch in range(3) for _ in range(3)), 3, 4]
    assert [lr for _, lr in found] == pytest.approx([found[0][1] * 0.5**epoch for epoch, _ in found])
