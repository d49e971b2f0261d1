"""Module buffers that forwards, steps and hooks change: the same in every mode, sent, stored and resumed."""

import pytest
from launching import differing_tensors, launch, resume, train

pytestmark = pytest.mark.processes

CONFIG = {
    "task": "buffer_tasks:Buffers",
    "training": {"max_steps": 15, "batch_size": 8, "accumulate_batches": 2, "validate_every": 4, "ema_decay": 0.9},
    "checkpoint": {"every": 3},
}
SEVERAL = {
    **CONFIG,
    "task_args": {"optimizers": 2, "quantized": False},
    "training": {"max_steps": 16, "batch_size": 8, "validate_every": 4},
}


def assert_equal(one, other):
    assert differing_tensors(one.load("model"), other.load("model")) == []
    for kind, field in (("train", "loss"), ("validation", "values")):
        assert [r[field] for r in one.of_kind(kind)] == [r[field] for r in other.of_kind(kind)]


def typed(task, kind, optimizers):
    """The config of a task with tensors of one type, whose run can be resumed: at its end a run closes its epoch."""
    without = ["on_epoch_start", "on_epoch_end", "on_batch_end"]
    args = {"kind": kind, "optimizers": optimizers, "without": without, "persistent": True}
    return {**(CONFIG if optimizers == 1 else SEVERAL), "task": f"buffer_tasks:{task}", "task_args": args}


def train_in_two_parts(folder, mode, config):
    begun = train(folder, mode, 2, **{**config, "training": {**config["training"], "max_steps": 8}})
    resumed = resume(begun, "--set", f"training.max_steps={config['training']['max_steps']}")
    assert resumed.code == 0, resumed.output
    return resumed


@pytest.mark.claim("assigned-buffers", "late-buffers", "eval-buffers")
@pytest.mark.parametrize("config", [CONFIG, SEVERAL], ids=["one optimizer", "several optimizers"])
def test_buffers_of_one_trainer_are_the_same_in_every_mode(tmp_path, config):
    local, ddp, rpc = (train(tmp_path, mode, 1, **config) for mode in ("local", "ddp", "rpc"))
    model = local.load("model")
    assert model["hooks"].count_nonzero() == 6
    calls = [name for name in model if name.endswith("calls")]
    assert [int(model[name]) for name in calls] == [30 if config is CONFIG else 16]
    assert_equal(local, ddp)
    assert_equal(local, rpc)
    over_rpc = train(tmp_path / "rpc", "rpc", 1, server={"transport": "rpc"}, **config)
    assert_equal(local, over_rpc)


@pytest.mark.claim("assigned-buffers", "late-buffers", "eval-buffers")
@pytest.mark.parametrize("optimizers", [1, 2])
def test_buffers_of_two_trainers_are_the_same_in_ddp_and_rpc(tmp_path, optimizers):
    # With several optimizers ``on_batch_end`` follows the last update.
    several = {**SEVERAL, "task_args": {**SEVERAL["task_args"], "without": ["on_batch_end"]}}
    config = CONFIG if optimizers == 1 else several
    ddp, rpc = (train(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    assert_equal(ddp, rpc)
    sections = {"server": {"transport": "rpc"}, "cluster": {"num_servers": 2}}
    assert_equal(ddp, train(tmp_path / "servers", "rpc", 2, **config, **sections))


@pytest.mark.parametrize("task", ["CallsAgain", "GrowsAndCallsAgain"])
def test_buffers_are_taken_over_once_in_a_step_that_calls_the_model_more_than_once(tmp_path, task):
    config = {**CONFIG, "task": f"buffer_tasks:{task}"}
    ddp, rpc = (train(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    assert_equal(ddp, rpc)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_buffer_may_get_another_shape_on_one_trainer_than_on_another(tmp_path, optimizers):
    several = {**SEVERAL, "task_args": {**SEVERAL["task_args"], "without": ["on_batch_end"]}}
    config = {**(CONFIG if optimizers == 1 else several), "task": "buffer_tasks:Grows"}
    ddp, rpc = (train(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    assert_equal(ddp, rpc)


@pytest.mark.claim("late-buffers")
@pytest.mark.parametrize(("mode", "trainers"), [("local", 1), ("ddp", 2), ("rpc", 2)])
def test_buffers_that_get_their_shape_later_are_resumed(tmp_path, mode, trainers):
    # At its end a run closes its epoch.
    config = {**CONFIG, "task_args": {"persistent": True, "without": ["on_epoch_start", "on_epoch_end"]}}
    whole = train(tmp_path / "whole", mode, trainers, **config)
    begun = train(tmp_path / "begun", mode, trainers, **{**config, "training": {**CONFIG["training"], "max_steps": 8}})
    resumed = resume(begun, "--set", "training.max_steps=15")
    assert resumed.code == 0, resumed.output
    assert_equal(whole, resumed)


@pytest.mark.claim("assigned-buffers", "eval-buffers")
def test_buffers_that_a_forward_on_the_server_changes_are_those_of_local(tmp_path):
    config = {**CONFIG, "task": "buffer_tasks:Served"}
    config["training"] = {key: value for key, value in CONFIG["training"].items() if key != "ema_decay"}
    local = train(tmp_path / "local", "local", 1, **config)
    rpc = train(tmp_path / "rpc", "rpc", 1, server={"compute": "server"}, **config)
    assert_equal(local, rpc)


@pytest.mark.claim("replaced-modules")
@pytest.mark.parametrize(
    ("mode", "trainers", "what", "message"),
    [
        ("local", 1, "replaced_layer", "layer 0 was replaced"),
        ("ddp", 2, "added_layer", "layer 4 was added"),
        ("rpc", 2, "removed_layer", "layer 3 was replaced"),
        ("ddp", 1, "replaced_parameter", "parameter 0.weight was replaced"),
        ("rpc", 1, "added_parameter", "parameter 0.scale was added"),
    ],
)
def test_a_layer_or_parameter_that_changes_in_mid_run_is_refused_before_the_next_update(
    tmp_path, mode, trainers, what, message
):
    config = {**CONFIG, "task": "buffer_tasks:Changes", "task_args": {"what": what}, "checkpoint": {"every": 1}}
    config["training"] = {"max_steps": 12, "batch_size": 8}
    run = launch(tmp_path, mode=mode, **config, cluster={"num_trainers": trainers})
    assert run.code == 2, run.output
    assert f"{message} after the start of the run, and would not be trained" in run.output
    assert run.checkpoints[-1:] == ["step-00000003"]  # of batches 0 to 2


@pytest.mark.claim("replaced-modules")
def test_a_layer_without_parameters_may_change(tmp_path):
    config = {**CONFIG, "task": "buffer_tasks:Changes", "task_args": {"what": "activation"}}
    local, rpc = (train(tmp_path, mode, 1, **config) for mode in ("local", "rpc"))
    assert_equal(local, rpc)


@pytest.mark.claim("eval-buffers")
def test_frozen_parameters_that_a_task_changes_are_the_same_in_every_mode_and_resumed(tmp_path):
    config = {"task": "ChangesFrozen", "training": {"max_steps": 9, "batch_size": 8, "validate_every": 5}}
    local = train(tmp_path, "local", 1, **config)
    for transport in ("shared_memory", "rpc"):
        folder, server = tmp_path / transport, {"transport": transport}
        assert_equal(local, train(folder, "rpc", 1, **config, server=server))
        part = {**config, "training": {**config["training"], "max_steps": 5}}
        resumed = resume(train(folder / "part", "rpc", 1, **part, server=server), "--set", "training.max_steps=9")
        assert resumed.code == 0, resumed.output
        assert_equal(local, resumed)


@pytest.mark.claim("replaced-modules")
@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_a_parameter_that_is_unfrozen_is_refused_in_every_mode(tmp_path, mode):
    run = launch(tmp_path, mode=mode, task="UnfreezesLayer", checkpoint={"every": 1}, cluster={"num_trainers": 1})
    assert run.code == 2, run.output
    assert "parameter frozen.weight was frozen when the run began" in run.output
    assert run.checkpoints[-1:] == ["step-00000003"]


@pytest.mark.claim("large-buffers")
def test_a_model_with_large_buffers_uses_the_socket(tmp_path):
    config = {**CONFIG, "task": "buffer_tasks:LargeBuffers", "training": {"max_steps": 6, "batch_size": 8}}
    ddp = train(tmp_path, "ddp", 2, **config)
    rpc = train(tmp_path, "rpc", 2, **config, trainer="buffer_tasks:OverSocket")
    assert_equal(ddp, rpc)
    assert rpc.load("model")["large"][0] == 6


@pytest.mark.sampled(7)
@pytest.mark.claim("buffer-types")
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("kind", ["int16", "uint16", "uint8", "float8_e4m3fn", "expanded"])
def test_buffers_of_every_type_are_the_same_in_every_mode_and_resumed(tmp_path, kind, optimizers):
    config = typed("TypedBuffers", kind, optimizers)
    rpc, ddp = train(tmp_path, "rpc", 2, **config), train_in_two_parts(tmp_path, "ddp", config)
    assert_equal(ddp, rpc)
    if kind != "expanded":
        assert str(ddp.load("model")["4.typed"].dtype) == f"torch.{kind}"


@pytest.mark.claim("buffer-types")
def test_a_buffer_that_gets_a_type_that_ddp_cannot_send_is_refused_by_name(tmp_path):
    config = {**CONFIG, "task": "buffer_tasks:TypedBuffers", "task_args": {"kind": "float32", "changes_to": "int16"}}
    run = launch(tmp_path, mode="ddp", cluster={"num_trainers": 2}, **config)
    assert run.code == 2, run.output
    assert "module buffer 4.typed has become torch.int16" in run.output


@pytest.mark.sampled(6)
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("kind", ["float32", "int16", "float8_e4m3fn"])
def test_frozen_parameters_of_every_type_may_be_missing_in_the_state_of_the_model(tmp_path, kind, optimizers):
    """Each process has them from ``build_model``; a checkpoint has none, so that a resumed run makes them again."""
    config = typed("Adapter", kind, optimizers)
    ddp, rpc = train(tmp_path, "ddp", 2, **config), train_in_two_parts(tmp_path, "rpc", config)
    assert_equal(ddp, rpc)
    assert not [name for name in rpc.load("model") if "base" in name]
    over_rpc = train(tmp_path / "rpc", "rpc", 2, server={"transport": "rpc"}, **config)
    assert_equal(ddp, over_rpc)


def test_each_trainer_may_change_frozen_parameters_by_its_own_data(tmp_path):
    config = {"task": "buffer_tasks:Center", "task_args": {"quantized": False}}
    config["training"] = {"max_steps": 9, "batch_size": 8, "validate_every": 3}
    ddp, rpc = (train(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    assert_equal(ddp, rpc)
    assert ddp.load("model")["center"] != 0


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_a_sparse_module_buffer_is_refused_by_name(tmp_path, mode):
    run = launch(tmp_path, mode=mode, task="buffer_tasks:SparseBuffer", cluster={"num_trainers": 2})
    assert run.code == 2, run.output
    assert "adjacency is a sparse tensor; parameters and buffers must be dense" in run.output


@pytest.mark.claim("async-buffers")
def test_buffers_in_async_are_those_of_the_trainer_whose_push_was_applied_last(tmp_path):
    """As documented: they are not merged, so that the batches of other trainers are not in them."""
    config = {"task": "buffer_tasks:Buffers", "task_args": {"quantized": False}, "checkpoint": {"every": 0}}
    config["training"] = {"max_steps": 30, "batch_size": 8}
    run = train(tmp_path, "rpc", 2, **config, server={"consistency": "async"})
    model = run.load("model")
    pushes = run.summary["steps"]
    assert pushes == 30
    assert 1 <= model["2.num_batches_tracked"] <= 30
    # All statistics are of one push: they have counted the same batches.
    assert int(model["1.calls"]) == int(model["2.num_batches_tracked"])
    assert float(model["1.kind"]) == 0.25 * int(model["1.calls"])


@pytest.mark.claim("clipping-hook")
def test_clipping_in_a_hook_acts_on_the_mean_in_ddp_and_on_own_gradients_in_rpc(tmp_path):
    """As documented: ``training.clip_grad_norm`` acts on the mean in every mode."""
    config = {"task": "buffer_tasks:ClipsInHook", "training": {"max_steps": 1, "batch_size": 8}}
    ddp, rpc = (train(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    norms = [[r["value"] for r in run.of_kind("log") if r["name"] == "norm"] for run in (ddp, rpc)]
    assert len(set(norms[0])) == 1
    assert len(set(norms[1])) == 2
    assert min(norms[0]) > 1.0  # so that both clip
    assert differing_tensors(ddp.load("model"), rpc.load("model")) != []
    config = {"task": "buffer_tasks:Buffers", "training": {**config["training"], "clip_grad_norm": 1.0}}
    ddp, rpc = (train(tmp_path / "key", mode, 2, **config) for mode in ("ddp", "rpc"))
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []


@pytest.mark.claim("eval-buffers")
def test_with_join_the_buffers_are_those_of_the_last_trainer_that_has_data(tmp_path):
    """Trainer 1 has no data in the last steps; what it changes in validations then is not kept."""
    config = {**CONFIG, "task": "buffer_tasks:Uneven", "task_args": {"without": ["on_epoch_end"]}}
    config["training"] = {"uneven_inputs": "join", "max_steps": 100, "batch_size": 8, "validate_every": 3}
    ddp, rpc = (train(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    assert_equal(ddp, rpc)
    assert ddp.summary["steps"] == 12
