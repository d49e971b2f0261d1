"""Equivalence of modes: the same task gives the same parameters in every mode (docs/interface.md, section 6)."""

import pytest
from launching import TASKS, differing_tensors, relative_difference, resume, train

pytestmark = pytest.mark.processes

EVERYTHING = {
    "task_args": {"groups": True, "schedule": "step"},
    "training": {
        "max_steps": 16,
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
    """With adamw also: a parameter without a gradient is not stepped, though weight decay alone would change it."""
    unused = optimizer == "adamw"
    config = {**with_optimizer(optimizer, unused=unused), "ddp": {"extra": {"find_unused_parameters": unused}}}
    local, ddp, rpc = (train(tmp_path, mode, 1, **config) for mode in ("local", "ddp", "rpc"))
    for other in (ddp, rpc):
        assert differing_tensors(local.load("model"), other.load("model")) == []
        assert differing_tensors(local.load("optimizer"), other.load("optimizer")) == []
        assert [r["loss"] for r in local.of_kind("train")] == [r["loss"] for r in other.of_kind("train")]
        assert [r["lr"] for r in local.of_kind("train")] == [r["lr"] for r in other.of_kind("train")]
        assert local.summary["validation"] == other.summary["validation"]
    assert not unused or local.load("model")["unused"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("optimizer", "schedule"), [("sgd", "epoch"), ("adam", "step"), ("adamw", "validation")])
def test_two_trainers_are_the_same_in_ddp_and_rpc_bit_for_bit(tmp_path, optimizer, schedule):
    """An epoch is four steps, and a validation happens every five."""
    config = with_optimizer(optimizer, schedule=schedule, samples=128)
    config["training"] = {**config["training"], "validate_every": 5, "max_steps": 24}
    ddp, rpc = (train(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []
    assert differing_tensors(ddp.load("optimizer"), rpc.load("optimizer")) == []
    assert ddp.summary["validation"] == rpc.summary["validation"]
    values = [r["values"] for r in ddp.of_kind("validation")]
    assert values == [r["values"] for r in rpc.of_kind("validation")]
    # The mean is over all 37 samples, whatever the share of each trainer.
    assert [value["accuracy"] * 37 for value in values] == pytest.approx(
        [round(value["accuracy"] * 37) for value in values], abs=1e-4
    )
    rates = [r["lr"] for r in rpc.of_kind("train")]
    assert len({tuple(rate) for rate in rates}) > 2
    assert rates == [r["lr"] for r in ddp.of_kind("train")]


@pytest.mark.parametrize("rounds", [{}, {"local_steps": 3}], ids=["steps", "rounds"])
def test_clipping_by_value_is_the_same_in_every_mode_bit_for_bit(tmp_path, rounds):
    training = {**EVERYTHING["training"], "clip_grad_norm": None, "clip_grad_value": 0.01, "max_steps": 6, **rounds}
    config = {**with_optimizer("sgd"), "training": training}
    local, *others = (train(tmp_path, mode, 1, **config) for mode in ("local", "ddp", "rpc"))
    ddp, *of_two = (train(tmp_path / "two", mode, 2, **config) for mode in ("ddp", "rpc"))
    servers = {"cluster": {"num_trainers": 2, "num_servers": 2}}
    of_two += [train(tmp_path / "servers", "rpc", 2, **config, **servers)] * (not rounds)
    for one, other in [(local, other) for other in others] + [(ddp, other) for other in of_two]:
        assert differing_tensors(one.load("model"), other.load("model")) == []
    plain = train(tmp_path / "plain", "local", 1, **{**config, "training": {**training, "clip_grad_value": None}})
    assert differing_tensors(local.load("model"), plain.load("model"))


@pytest.mark.parametrize(
    ("dtype", "optimizer", "batch_norm", "most"), [("float64", "adamw", True, 1e-9), ("float32", "sgd", False, 1e-6)]
)
def test_four_trainers_differ_by_rounding_only_where_gloo_sums(tmp_path, dtype, optimizer, batch_norm, most):
    config = with_optimizer(optimizer, dtype=dtype, batch_norm=batch_norm)
    config["ddp"] = {"shared_memory": "off"}
    ddp, rpc = (train(tmp_path, mode, 4, **config) for mode in ("ddp", "rpc"))
    apart = relative_difference(ddp.load("model"), rpc.load("model"))
    print(f"four trainers, {dtype}, {optimizer}: {apart:.2e}")
    assert apart <= most


@pytest.mark.claim("all-reduce")
@pytest.mark.parametrize("trainers", [3, 4])
@pytest.mark.parametrize(("optimizer", "batch_norm"), [("adamw", True), ("sgd", False)])
def test_any_number_of_trainers_are_the_same_bit_for_bit_in_shared_memory(tmp_path, trainers, optimizer, batch_norm):
    """In float32, where a sum in another order has other bits."""
    config = with_optimizer(optimizer, batch_norm=batch_norm)
    ddp, rpc, gloo = (
        train(tmp_path / name, mode, trainers, **config, **options)
        for name, mode, options in (
            ("ddp", "ddp", {}),
            ("rpc", "rpc", {}),
            ("gloo", "ddp", {"ddp": {"shared_memory": "off"}}),
        )
    )
    assert ddp.summary["transports"] == {str(trainer): "shared_memory" for trainer in range(trainers)}
    assert gloo.summary["transports"] == {str(trainer): "gloo" for trainer in range(trainers)}
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []
    assert differing_tensors(ddp.load("optimizer"), rpc.load("optimizer")) == []
    assert ddp.summary["validation"] == rpc.summary["validation"]
    assert differing_tensors(ddp.load("model"), gloo.load("model")) != []


@pytest.mark.parametrize("task", ["LeavesGradOff", "WholeStates", "InferenceBuffer"])
def test_what_a_task_does_to_gradients_states_and_buffers_trains_the_same(tmp_path, task):
    config = {"task": f"{TASKS}:{task}", "training": {"max_steps": 6, "batch_size": 8, "validate_every": 3}}
    ddp, rpc = (train(tmp_path / mode, mode, 2, **config) for mode in ("ddp", "rpc"))
    sent = train(tmp_path / "sent", "rpc", 2, **config, server={"transport": "rpc"})
    for other in (rpc, sent):
        assert differing_tensors(ddp.load("model"), other.load("model")) == []


def test_bfloat16_autocast_is_the_same(tmp_path):
    config = {"training": {"max_steps": 12, "batch_size": 8, "precision": "bfloat16", "validate_every": 0}}
    local, rpc = (train(tmp_path, mode, 1, **config) for mode in ("local", "rpc"))
    assert differing_tensors(local.load("model"), rpc.load("model")) == []
    plain = train(tmp_path / "plain", "local", 1)
    assert differing_tensors(local.load("model"), plain.load("model")) != []


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_complex_parameters_are_the_same_in_every_mode(tmp_path, optimizer):
    config = {"task": "spectral_task:Spectral", "task_args": {"optimizer": optimizer}, "checkpoint": {"every": 6}}
    local, alone = (train(tmp_path / mode, mode, 1, **config) for mode in ("local", "rpc"))
    assert differing_tensors(local.load("model"), alone.load("model")) == []
    ddp = train(tmp_path / "ddp", "ddp", 2, **config)
    assert differing_tensors(ddp.load("model"), local.load("model")) != []
    for servers, transport in ((1, "shared_memory"), (2, "shared_memory"), (1, "rpc"), (2, "rpc")):
        sections = {"server": {"transport": transport}, "cluster": {"num_servers": servers}}
        rpc = train(tmp_path / f"{servers}-{transport}", "rpc", 2, **config, **sections)
        assert differing_tensors(ddp.load("model"), rpc.load("model")) == []
        assert differing_tensors(ddp.load("optimizer"), rpc.load("optimizer")) == []


@pytest.mark.parametrize("rounds", [{}, {"local_steps": 2, "outer": {"optimizer": "sgd", "lr": 1.0}}])
def test_complex_parameters_of_three_trainers_are_the_same(tmp_path, rounds):
    """A third of a complex number is that of its parts: with two trainers any division is exact."""
    config = {"task": "spectral_task:Spectral", "training": {"max_steps": 6, "batch_size": 8, **rounds}}
    ddp, rpc = (train(tmp_path, mode, 3, **config) for mode in ("ddp", "rpc"))
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []
    assert differing_tensors(ddp.load("optimizer"), rpc.load("optimizer")) == []


@pytest.mark.parametrize("task", ["HasExtraState", "HasOwnExtraState"])
@pytest.mark.parametrize(("servers", "first"), [(1, "rpc"), (2, "rpc"), (1, "ddp")])
def test_extra_state_of_modules_is_saved_and_resumed_in_every_mode(tmp_path, servers, first, task):
    config = {"task": f"{TASKS}:{task}", "cluster": {"num_servers": servers}, "training": {"max_steps": 12}}
    ddp, rpc = (train(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    if task == "HasExtraState":
        assert rpc.load("model")["1._extra_state"]["calls"] == 12
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []
    begun = train(tmp_path / "half", first, 2, **{**config, "training": {"max_steps": 6}})
    resumed = resume(begun, "--set", "training.max_steps=12")
    assert resumed.code == 0, resumed.output
    assert differing_tensors(ddp.load("model"), resumed.load("model")) == []


def test_a_random_buffer_draws_the_same_in_every_mode(tmp_path):
    """The source is fully put before the first get, so that draws do not depend on timing.

    With a reservoir, whose drain too is random; test_resume_stops.py holds firo in both modes against each other.
    """
    config = {
        "task_args": {"samples": 128},
        "training": {"batch_size": 8, "max_epochs": 1, "validate_every": 0},
        "buffer": {"kind": "reservoir", "capacity": 64, "watermark": 64},
    }
    ddp, rpc = (train(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []
    assert rpc.summary["samples"] == 128


@pytest.mark.claim("wire-dtype")
@pytest.mark.parametrize("servers", [1, 2])
def test_float64_over_messages_is_as_exact_as_elsewhere(tmp_path, servers):
    """Also after a resume with a config that has float32 by the default of an earlier version."""
    config = {"task_args": {"dtype": "float64", "optimizer": "adam"}}
    ddp = train(tmp_path, "ddp", 2, **config)
    config |= {"server": {"transport": "rpc"}, "cluster": {"num_servers": servers}, "training": {"max_steps": 6}}
    rpc = train(tmp_path, "rpc", 2, **config)
    stored = rpc.run_dir / "config.yaml"
    text = stored.read_text()
    assert "\n  wire_dtype: null\n" in text
    stored.write_text(text.replace("wire_dtype: null", "wire_dtype: float32"))
    more = resume(rpc, "--set", "training.max_steps=12")
    assert more.code == 0, more.output
    assert differing_tensors(ddp.load("model"), more.load("model")) == []
    assert differing_tensors(ddp.load("optimizer"), more.load("optimizer")) == []
