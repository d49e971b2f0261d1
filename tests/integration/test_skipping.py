"""``training.nonfinite: skip``: a step with NaN or infinity changes nothing, and is decided alike by all trainers."""

import pytest
import torch
from invalid_tasks import __file__ as bad_tasks
from launching import differing_tensors, launch, resume, run_in_process, train
from skipped_steps import assert_same, skipped

pytestmark = pytest.mark.processes

TASK = f"{bad_tasks}:Nonfinite"
SKIP = {"nonfinite": "skip", "batch_size": 8, "max_epochs": 2, "max_steps": None, "validate_every": 5}
PLACES = [(0, 2), (1, 6), (1, 7), (0, 19)]


def config_of(what="loss", places=PLACES, training=(), **options):
    task_args = {"places": places, "what": what, "samples": 160, **options}
    return {"task": TASK, "task_args": task_args, "training": {**SKIP, **dict(training)}, "logging": {"log_every": 1}}


WAYS = {
    "shared memory": {},
    "messages": {"server": {"transport": "rpc"}},
    "float16": {"server": {"transport": "rpc", "wire_dtype": "float16"}},
    "int8": {"server": {"transport": "rpc", "compression": "int8"}},
    "two servers": {"cluster": {"num_servers": 2}},
}


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_of_all_trainers_is_skipped_alike_in_ddp_and_rpc(tmp_path, what):
    """Each of two trainers has 20 batches; the last one of an epoch is among those that are skipped."""
    config = config_of(what, schedule="epoch", training={"clip_grad_norm": 0.5})
    ddp, rpc = (train(tmp_path, mode, 2, **config) for mode in ("ddp", "rpc"))
    assert_same(ddp, rpc)
    assert (ddp.summary["steps"], ddp.summary["samples"], ddp.summary["samples_skipped"]) == (16, 256, 64)
    assert skipped(ddp) == [[step, [0, 1], 16, what] for step in (3, 6, 6, 17)]
    assert "256 applied, 64 skipped, 320 served, 0 left" in ddp.output
    # The schedule of epochs has been stepped after ten batches of each trainer, three of which were skipped.
    rates = [record["lr"][0] for record in ddp.of_kind("train")]
    assert rates == [0.05] * 7 + [0.025] * 9


@pytest.mark.parametrize("way", WAYS)
def test_no_transport_applies_or_keeps_what_is_skipped(tmp_path, way):
    run = train(tmp_path, "rpc", 2, **config_of(), **WAYS[way])
    assert (run.summary["steps"], run.summary["samples_skipped"]) == (16, 64)
    if way in ("shared memory", "messages", "two servers"):
        assert_same(run, train(tmp_path / "ddp", "ddp", 2, **config_of()))


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_a_run_is_that_of_the_other_samples(tmp_path, mode):
    """Also by its module buffers, which the forward with NaN changes."""
    options = {"sequential": True, "dropout": 0.0, "training": {"max_epochs": 1}}
    bad = train(tmp_path / "bad", mode, 1, **config_of(places=[(0, 2), (0, 19)], **options))
    left_out = [*range(16, 24), *range(152, 160)]
    good = train(tmp_path / "good", mode, 1, **config_of(places=[], left_out=left_out, **options))
    for name in ("model", "optimizer"):
        assert differing_tensors(bad.load(name), good.load(name)) == []
    assert bad.summary["validation"] == good.summary["validation"]
    assert bad.summary["samples_skipped"] == 16
    assert "samples_skipped" not in good.summary


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_trainers_without_data_follow(tmp_path, mode):
    """Trainer 0 has one batch more, which is skipped, and one more before."""
    options = {"training": {"uneven_inputs": "join", "batch_size": 9, "max_epochs": 1}, "samples": 37}
    run = train(tmp_path, mode, 2, **config_of(places=[(1, 0), (0, 2)], **options))
    assert [run.summary[name] for name in ("steps", "samples", "samples_skipped")] == [1, 18, 19]


@pytest.mark.parametrize(
    "server", [{"consistency": "async"}, {"consistency": "bounded"}, {"backup_trainers": 1}, {"arrivals": 3}], ids=str
)
def test_trainers_that_run_freely_skip_their_own_push_only(tmp_path, server):
    server = {"consistency": "async", **server} if "arrivals" in server else server
    run = train(tmp_path, "rpc", 2, **config_of(training={"uneven_inputs": "join"}), server=server)
    assert [entry[1:] for entry in sorted(skipped(run), key=lambda entry: entry[1])] == [
        [[trainer], 8, "loss"] for trainer in (0, 0, 1, 1)
    ]
    assert run.summary["samples_skipped"] == 32
    if "backup_trainers" not in server:  # which drops others
        assert run.summary["samples"] == 320 - 32
    assert all(tensor.isfinite().all() for tensor in run.load("model").values())


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_a_resumed_run_is_the_same_as_a_straight_one(tmp_path, mode):
    """It stops after the skipped batches 6 and 7, and skips one more after that."""
    config = {**config_of(places=[(0, 2), (0, 6), (0, 7), (0, 15)]), "checkpoint": {"every": 2}}
    straight = train(tmp_path / "straight", mode, 2, **config)
    stopped = train(tmp_path / "stopped", mode, 2, **{**config, "training": {**config["training"], "max_steps": 6}})
    resumed = resume(stopped, "--set", "training.max_steps=null")
    assert resumed.code == 0, resumed.output
    assert_same(straight, resumed)
    assert straight.load("run")["skipping"] == resumed.load("run")["skipping"]


@pytest.mark.parametrize("way", ["local", "ddp", "rpc", "async"])
def test_a_hundred_in_succession_end_the_run_by_name(tmp_path, way):
    places = [(0, batch) for batch in range(1, 200)]
    config = config_of(places=places, training={"batch_size": 1, "max_epochs": 4})
    config |= {"mode": "rpc" if way == "async" else way}
    config |= {"server": {"consistency": "async"}} if way == "async" else {}
    finished = (run_in_process if way == "local" else launch)(tmp_path, **config)
    assert finished.code == 1, finished.output
    sentence = (
        "100 steps in succession were skipped (training.nonfinite: skip), the last one as the loss was NaN or "
        "infinite; lower the learning rate, or look at the batches"
    )
    assert sentence in finished.output.rstrip().splitlines()[-1]
    assert sentence in finished.summary["error"]
    assert len([entry for entry in skipped(finished) if 0 in entry[1]]) == 100


# Rounds of local steps: 20 batches of each of two trainers are 10 rounds, and all of one of these are skipped.
ROUNDS = {"places": [(0, 2), (1, 6), (1, 7), (0, 19)], "training": {"local_steps": 2, "clip_grad_norm": 0.5}}


def assert_same_rounds(one, other):
    for name in ("model", "optimizer"):
        assert differing_tensors(one.load(name), other.load(name)) == []
    for name in ("steps", "samples", "samples_skipped", "validation"):
        assert one.summary[name] == other.summary[name], name
    assert sorted(skipped(one)) == sorted(skipped(other))
    assert [r["loss"] for r in one.of_kind("train")] == [r["loss"] for r in other.of_kind("train")]


@pytest.mark.parametrize("way", ["shared memory", "messages", "two servers"])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_trainer_skips_its_own_local_step_alike_in_ddp_and_rpc(tmp_path, what, way):
    config = config_of(what, schedule="epoch", **ROUNDS)
    ddp, rpc = train(tmp_path, "ddp", 2, **config), train(tmp_path, "rpc", 2, **config, **WAYS[way])
    assert_same_rounds(ddp, rpc)
    assert [rpc.summary[name] for name in ("steps", "samples", "samples_skipped")] == [10, 320 - 32, 32]
    assert sorted(skipped(rpc)) == [[2, [0], 8, what], [4, [1], 8, what], [4, [1], 8, what], [10, [0], 8, what]]
    assert all(0 < record["loss"] < 10 for record in rpc.of_kind("train"))
    # The schedule of epochs has been stepped after ten batches of each trainer, three of which were skipped.
    assert [record["lr"][0] for record in rpc.of_kind("inner") if record["trainer"] == 1] == [0.05] * 5 + [0.025] * 5


def test_rounds_of_one_trainer_skip_what_its_steps_without_rounds_skip(tmp_path):
    options = {"sequential": True, "dropout": 0.0, "places": [(0, 2), (0, 6), (0, 7), (0, 19)]}
    plain, rounds = (
        train(
            tmp_path / str(steps), "local", 1, **config_of(training={"max_epochs": 1, "local_steps": steps}, **options)
        )
        for steps in (1, 2)
    )
    assert plain.summary["samples_skipped"] == rounds.summary["samples_skipped"] == 32
    assert plain.summary["samples"] == rounds.summary["samples"]
    for name, tensor in plain.load("model").items():  # an outer SGD without momentum: the same but for rounding
        assert torch.allclose(tensor.double(), rounds.load("model")[name].double(), atol=1e-6), name


@pytest.mark.parametrize("arrivals", [1, 2])
def test_rounds_of_trainers_that_run_freely_skip_local_steps(tmp_path, arrivals):
    config = config_of(**ROUNDS)
    config["training"] |= {"uneven_inputs": "join", "outer": {"weighting": "trainers" if arrivals > 1 else "samples"}}
    run = train(tmp_path, "rpc", 2, **config, server={"consistency": "async", "arrivals": arrivals})
    assert [run.summary[name] for name in ("samples", "samples_skipped")] == [320 - 32, 32]
    assert all(tensor.isfinite().all() for tensor in run.load("model").values())


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_a_resumed_run_of_rounds_is_the_same_as_a_straight_one(tmp_path, mode):
    config = {
        **config_of(places=[(0, 2), (0, 6), (0, 7), (0, 15)], training={"local_steps": 2}),
        "checkpoint": {"every": 2},
    }
    straight = train(tmp_path / "straight", mode, 2, **config)
    stopped = train(tmp_path / "stopped", mode, 2, **{**config, "training": {**config["training"], "max_steps": 4}})
    resumed = resume(stopped, "--set", "training.max_steps=null")
    assert resumed.code == 0, resumed.output
    assert_same_rounds(straight, resumed)


@pytest.mark.parametrize("way", ["local", "rpc"])
def test_a_hundred_local_steps_in_succession_end_the_run_by_name(tmp_path, way):
    places = [(0, batch) for batch in range(1, 200)]
    config = config_of(places=places, training={"batch_size": 1, "max_epochs": 4, "local_steps": 8})
    finished = (run_in_process if way == "local" else launch)(tmp_path, **config, mode=way)
    assert finished.code == 1, finished.output
    assert "100 steps in succession were skipped (training.nonfinite: skip), the last" in finished.summary["error"]


def test_the_default_ends_the_run(tmp_path):
    config = config_of(training={"nonfinite": "fail"})
    finished = run_in_process(tmp_path, mode="local", **config)
    assert finished.code == 1
    assert "batch 2: the loss is nan; nothing of this batch was applied" in finished.output
