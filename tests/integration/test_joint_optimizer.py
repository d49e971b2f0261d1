"""A list of optimizers that step together: one update of one loss, in every mode and with every number of servers."""

from pathlib import Path

import pytest
import torch
from cli_errors import error_message
from launching import (
    assert_equal_runs,
    differing_tensors,
    environment,
    fork_server,
    launch,
    resume,
    resume_in_process,
    run_in_process,
    train,
    write_config,
)
from optimizer_tasks import Joint
from torch.nn import functional as F

from paramserver import Partition
from paramserver.devices import CPU
from paramserver.parameters.model import build_model
from paramserver.sources import deal

TASK = f"{Path(__file__).parents[1] / 'helpers' / 'optimizer_tasks.py'}:Joint"
STEPS, STOP = 14, 7
TRAINING = {"max_steps": STEPS, "batch_size": 8, "validate_every": 3, "ema_decay": 0.9, "clip_grad_norm": 0.5}
CONFIG = {"training": {**TRAINING, "accumulate_batches": 2}, "checkpoint": {"every": 7, "keep": 9, "background": False}}
# The norm over two servers rounds differently.
NOT_CLIPPED = {**CONFIG, "training": {**CONFIG["training"], "clip_grad_norm": None}}


def task(**arguments):
    return {"task": TASK, "task_args": arguments}


def stopped(config):
    return {**config, "training": {**config["training"], "max_steps": STOP}}


def assert_same(one, other):
    """The runs have made the same steps, bit for bit."""
    for name in ("model", "optimizer", "ema"):
        assert differing_tensors(one.load(name), other.load(name)) == [], name
    assert one.load("run")["scheduler"] == other.load("run")["scheduler"]
    for kind, fields in (("train", ("step", "loss", "lr", "epoch", "samples")), ("validation", ("step", "values"))):
        assert [[r[f] for f in fields] for r in one.of_kind(kind)] == [
            [r[f] for f in fields] for r in other.of_kind(kind)
        ]


def test_the_updates_are_those_of_a_loop_in_plain_pytorch(tmp_path):
    run = train(tmp_path, "local", 1, **task(), training={"max_steps": STEPS, "batch_size": 8})
    reference = Joint()
    model = build_model(reference, 0, CPU)
    optimizers = reference.build_optimizer(model)
    by_step, _, _ = reference.build_scheduler(optimizers)
    pairs, targets = reference.train_source(None).tensors
    rates = []
    for step in range(STEPS):
        epoch, first = divmod(step * 8, 96)
        indices = deal(96, Partition(0, 1), seed=0, epoch=epoch)[first : first + 8]
        F.mse_loss(model(pairs[indices]), targets[indices]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        rates.append([group["lr"] for optimizer in optimizers for group in optimizer.param_groups])
        by_step.step()
    assert differing_tensors(run.load("model"), model.state_dict()) == []
    plain = {"optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    assert differing_tensors(run.load("optimizer"), plain) == []
    assert [r["lr"] for r in run.of_kind("train")] == rates
    assert run.load("optimizer")["optimizers"][1]["state"][0]["sum"].shape == (300,)


@pytest.mark.processes
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_one_trainer_is_the_same_in_every_mode_bit_for_bit(tmp_path, precision):
    config = {**CONFIG, "training": {**CONFIG["training"], "precision": precision}}
    local = train(tmp_path / "local", "local", 1, **task(), **config)
    for folder, mode, options in (
        ("ddp", "ddp", {}),
        ("memory", "rpc", {"server": {"transport": "shared_memory"}}),
        ("messages", "rpc", {"server": {"transport": "rpc", "bucket_mb": 0.005}}),
    ):
        assert_same(local, train(tmp_path / folder, mode, 1, **task(), **config, **options))


@pytest.mark.processes
def test_the_model_on_the_server_is_the_same(tmp_path):
    config = {"training": {"max_steps": STEPS, "batch_size": 8}}
    local = train(tmp_path, "local", 1, **task(), **config)
    rpc = train(tmp_path, "rpc", 1, **task(), **config, server={"compute": "server"})
    for name in ("model", "optimizer"):
        assert differing_tensors(local.load(name), rpc.load(name)) == []


@pytest.mark.processes
@pytest.mark.parametrize("consistency", ["async", "bounded"])
def test_one_trainer_is_the_same_in_every_consistency(tmp_path, consistency):
    """With one trainer no gradient is stale. Two of them push when they are ready, and the run ends."""
    local = train(tmp_path / "local", "local", 1, **task(), **CONFIG)
    alone = train(tmp_path / "alone", "rpc", 1, **task(), **CONFIG, server={"consistency": consistency})
    assert_same(local, alone)
    server = {"consistency": consistency, "transport": "rpc"}
    two = train(tmp_path / "two", "rpc", 2, **task(), **CONFIG, server=server, cluster={"num_servers": 2})
    assert two.summary["steps"] == STEPS
    assert len(two.load("optimizer")["optimizers"]) == 3


@pytest.mark.processes
@pytest.mark.parametrize("tables", ["rows", "elements"])
def test_two_trainers_are_the_same_in_ddp_and_rpc_bit_for_bit(tmp_path, tables):
    """With row-wise Adagrad in the list several servers own whole tensors; otherwise they divide them too."""
    clipped = train(tmp_path / "clipped", "ddp", 2, **task(tables=tables), **CONFIG)
    assert_same(clipped, train(tmp_path / "clipped", "rpc", 2, **task(tables=tables), **CONFIG))
    ddp = train(tmp_path / "ddp", "ddp", 2, **task(tables=tables), **NOT_CLIPPED)
    assert differing_tensors(ddp.load("model"), clipped.load("model")) != []
    for transport in ("shared_memory", "rpc"):
        server = {"transport": transport, "bucket_mb": 0.005}
        cluster = {"num_servers": 2}
        rpc = train(
            tmp_path / transport, "rpc", 2, **task(tables=tables), **NOT_CLIPPED, server=server, cluster=cluster
        )
        assert_same(ddp, rpc)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("mode", "trainers", "servers"), [("local", 1, 1), ("ddp", 2, 1), ("rpc", 2, 1), ("rpc", 2, 2)]
)
def test_a_run_that_is_stopped_and_resumed_is_one_that_was_not(tmp_path, mode, trainers, servers):
    cluster = {"num_servers": servers}
    whole = train(tmp_path / "whole", mode, trainers, **task(), **CONFIG, cluster=cluster)
    part = train(tmp_path / "part", mode, trainers, **task(), **stopped(CONFIG), cluster=cluster)
    resumed = resume(part, "--set", f"training.max_steps={STEPS}")
    assert resumed.code == 0, resumed.output
    assert_equal_runs(whole, resumed, trainers)
    assert_same(whole, resumed)


@pytest.mark.processes
@pytest.mark.parametrize("tables", ["rows", "elements"])
def test_a_checkpoint_resumes_in_another_mode_and_with_another_number_of_servers(tmp_path, tables):
    """From local over two servers and three to ddp, like a run that was not stopped."""
    whole = run_in_process(tmp_path / "whole", mode="local", **task(tables=tables), **NOT_CLIPPED)
    run = run_in_process(tmp_path / "begun", mode="local", **task(tables=tables), **stopped(NOT_CLIPPED))
    for steps, mode, servers in ((9, "rpc", 2), (11, "rpc", 3), (12, "ddp", 1), (STEPS, "rpc", 1)):
        shape = ("--set", f"cluster.num_servers={servers}", "--set", "cluster.num_trainers=1")
        run = resume(run, "--mode", mode, *shape, "--set", f"training.max_steps={steps}")
        assert run.code == 0, run.output
    assert_same(whole, run)


@pytest.mark.processes
def test_after_a_kill_the_run_is_one_without(tmp_path):
    """A server and a trainer are killed; the run returns to a checkpoint each time."""
    sections = {"training": TRAINING | {"max_steps": 40}, "checkpoint": {"every": 7}}
    sections |= {"cluster": {"num_trainers": 2, "num_servers": 2, "timeout_s": 60}, "server": {"on_loss": "rollback"}}
    file = write_config(tmp_path, mode="rpc", **task(), **sections)
    faults = "kill server:1 @step 12; kill trainer:1 @step 24"
    arguments = ["--config", file, "--set", "logging.name=run", "--compare", "--faults", faults]
    code, output = fork_server().run(arguments, tmp_path, 150, environment(), program="chaos")
    assert code == 0, output
    assert "FAIL" not in output


def test_sparse_gradients_give_the_bits_of_dense_ones(tmp_path):
    config = {"training": {"max_steps": STEPS, "batch_size": 8}}
    dense = run_in_process(tmp_path / "dense", **task(schedule=False), **config)
    sparse = run_in_process(tmp_path / "sparse", **task(schedule=False, sparse=True), **config)
    assert sparse.code == 0, sparse.output
    assert differing_tensors(dense.load("model"), sparse.load("model")) == []
    differing = differing_tensors(dense.load("optimizer"), sparse.load("optimizer"))
    assert [name for name in differing if not name.endswith("/row_version")] == []


def test_optimizer_pt_loads_into_the_optimizers_of_plain_pytorch(tmp_path):
    run = run_in_process(tmp_path, **task(), **stopped(CONFIG))
    (path,) = run.run_dir.glob("checkpoints/step-*/optimizer.pt")
    reference = Joint()
    optimizers = reference.build_optimizer(reference.build_model())
    for optimizer, state in zip(optimizers, torch.load(path, weights_only=True)["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    assert optimizers[1].param_groups[0]["initial_accumulator_value"] == 0.0
    assert [len(optimizer.state) for optimizer in optimizers] == [6, 2, 1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("empty", "Joint.build_optimizer returned no optimizer; it must return at least one"),
        ("element", "Joint.build_optimizer returned Tables at position 3 of a list; it must return"),
        ("dict", "Joint.build_optimizer returned dict at position 1 of a list; it must return"),
        ("bias", "a parameter of shape (1,) and torch.float32 must have two dimensions and be of floating"),
        (
            "shared",
            "Joint.build_optimizer gives last.bias to two optimizers (0, 2); give each parameter to one of them",
        ),
    ],
)
def test_what_is_no_list_of_optimizers_is_refused_in_one_sentence(tmp_path, how, message):
    run = run_in_process(tmp_path, **task(how=how), **CONFIG)
    assert message in error_message(run)
    assert not run.run_dir.exists()


@pytest.mark.processes
def test_so_is_it_by_a_server(tmp_path):
    run = launch(tmp_path, mode="rpc", cluster={"num_trainers": 1, "num_servers": 2}, **task(how="shared"), **CONFIG)
    assert "gives last.bias to two optimizers (0, 2)" in error_message(run)


def test_a_checkpoint_of_a_list_is_refused_for_one_optimizer(tmp_path):
    run = run_in_process(tmp_path, **task(schedule=False), **stopped(CONFIG))
    flags = ("--set", f"training.max_steps={STEPS}", "--set", "task_args.how=one")
    refused = resume_in_process(run, *flags)
    assert "the stored state is not one of this Adam" in error_message(refused)
