"""The spine: the same task gives the same parameters in every mode (docs/interface.md, section 6)."""

import pytest
from runs import difference, same_bits, trained

pytestmark = pytest.mark.processes

EVERYTHING = {
    "task_args": {"groups": True, "schedule": "step"},
    "training": {
        "max_steps": 24,
        "batch_size": 8,
        "accumulate_batches": 2,
        "clip_grad_norm": 0.5,
        "validate_every": 10,
    },
}


def with_optimizer(name, **options):
    return {**EVERYTHING, "task_args": {**EVERYTHING["task_args"], "optimizer": name, **options}}


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_one_trainer_is_the_same_in_every_mode_bit_for_bit(tmp_path, optimizer):
    config = with_optimizer(optimizer)
    local, ddp, rpc = (trained(tmp_path, mode, 1, **config) for mode in ("local", "ddp", "rpc"))
    for other in (ddp, rpc):
        assert same_bits(local.load("model"), other.load("model")) == []
        assert same_bits(local.load("optimizer"), other.load("optimizer")) == []
        assert [r["loss"] for r in local.of_kind("train")] == [r["loss"] for r in other.of_kind("train")]
        assert [r["lr"] for r in local.of_kind("train")] == [r["lr"] for r in other.of_kind("train")]
        assert local.summary["validation"] == other.summary["validation"]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_two_trainers_are_the_same_in_ddp_and_rpc_bit_for_bit(tmp_path, optimizer):
    config = with_optimizer(optimizer)
    ddp, rpc = (trained(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    assert same_bits(ddp.load("model"), rpc.load("model")) == []
    assert same_bits(ddp.load("optimizer"), rpc.load("optimizer")) == []
    assert ddp.summary["validation"] == rpc.summary["validation"]
    assert [r["values"] for r in ddp.of_kind("validation")] == [r["values"] for r in rpc.of_kind("validation")]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_four_trainers_differ_by_rounding_only(tmp_path, optimizer):
    config = with_optimizer(optimizer, dtype="float64")
    config["training"] = {**config["training"], "max_steps": 50}
    ddp, rpc = (trained(tmp_path, mode, 4, **config) for mode in ("ddp", "rpc"))
    apart = difference(ddp.load("model"), rpc.load("model"))
    print(f"four trainers, float64, {optimizer}: {apart:.2e}")
    assert apart <= 1e-9


def test_four_trainers_in_float32_with_momentum(tmp_path):
    config = with_optimizer("sgd", batch_norm=False)
    config["training"] = {**config["training"], "max_steps": 50}
    ddp, rpc = (trained(tmp_path, mode, 4, **config) for mode in ("ddp", "rpc"))
    apart = difference(ddp.load("model"), rpc.load("model"))
    print(f"four trainers, float32, sgd: {apart:.2e}")
    assert apart <= 1e-6


@pytest.mark.parametrize("schedule", ["epoch", "validation"])
def test_schedules_by_epoch_and_validation_are_the_same(tmp_path, schedule):
    config = {
        "task_args": {"schedule": schedule, "samples": 64},
        "training": {"max_steps": 20, "batch_size": 8, "validate_every": 4},
    }
    ddp, rpc = (trained(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    rates = [r["lr"] for r in rpc.of_kind("train")]
    assert len({tuple(rate) for rate in rates}) > 2
    assert rates == [r["lr"] for r in ddp.of_kind("train")]
    assert same_bits(ddp.load("model"), rpc.load("model")) == []


def test_a_parameter_without_a_gradient_is_not_stepped(tmp_path):
    """With weight decay a step would change it even for a gradient of zeros."""
    config = {"task_args": {"optimizer": "adamw", "unused": True}, "ddp": {"find_unused_parameters": True}}
    local, ddp, rpc = (trained(tmp_path, mode, 1, **config) for mode in ("local", "ddp", "rpc"))
    assert local.load("model")["unused"].tolist() == [1.0, 1.0, 1.0]
    for other in (ddp, rpc):
        assert same_bits(local.load("model"), other.load("model")) == []
        assert same_bits(local.load("optimizer"), other.load("optimizer")) == []


def test_bfloat16_autocast_is_the_same(tmp_path):
    config = {"training": {"max_steps": 12, "batch_size": 8, "precision": "bfloat16", "validate_every": 0}}
    local, rpc = (trained(tmp_path, mode, 1, **config) for mode in ("local", "rpc"))
    assert same_bits(local.load("model"), rpc.load("model")) == []
    plain = trained(tmp_path / "plain", "local", 1)
    assert same_bits(local.load("model"), plain.load("model")) != []


@pytest.mark.parametrize("kind", ["firo", "reservoir"])
def test_random_buffers_draw_the_same_in_every_mode(tmp_path, kind):
    """The source is fully put before the first get, so that draws do not depend on timing."""
    config = {
        "task_args": {"samples": 128},
        "training": {"batch_size": 8, "max_epochs": 1, "validate_every": 0},
        "buffer": {"kind": kind, "capacity": 64, "watermark": 64},
    }
    ddp, rpc = (trained(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    assert same_bits(ddp.load("model"), rpc.load("model")) == []
    assert rpc.summary["samples"] == 128
