"""Every optimizer trains, stops and resumes: those of torch, of packages, and others with a state of their own form."""

import io
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from any_optimizers import NAMES, OF_TORCH, OWN, WITH_MODES, AnyOptimizer, RelativeAdafactor, Wrapper, build
from launching import differing_tensors, launch, resume, resume_in_process, run_in_process, train
from torch import nn

from paramserver.config import TrainingConfig, config_from_mapping
from paramserver.devices import CPU
from paramserver.errors import CheckpointError, TaskError, UnsupportedConfiguration
from paramserver.optim.parallel_step import is_elementwise
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.optim.updater import Updater
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.model import build_model
from paramserver.parameters.sharding import full_shard
from paramserver.server.parameter_store import ParameterStore, check_optimizers

TASKS = Path(__file__).parents[1] / "helpers" / "any_optimizers.py"
REFUSED = {"LBFGS", "SparseAdam"}
STEPS, STOP = 9, 4


def task(name, **options):
    return {"task": f"{TASKS}:AnyOptimizer", "task_args": {"optimizer": name, **options}}


def config(name, steps=STEPS, **options):
    training = {"max_steps": steps, "batch_size": 8, "validate_every": 2}
    return {**task(name, **options), "training": training, "checkpoint": {"every": 3, "keep": 9, "background": False}}


def require(name):
    module = "torch" if name in OF_TORCH or name in OWN else name.partition(".")[0]
    pytest.importorskip(module, exc_type=ImportError)
    try:
        return build(name, [nn.Parameter(torch.zeros(2, 2))])
    except ImportError as error:  # of a package that this one needs
        pytest.skip(str(error))


def files_of(name):
    return ("model", "optimizer", *(("trained",) if name in WITH_MODES else ()))


def assert_same(one, other, files=("model", "optimizer")):
    for name in files:
        assert differing_tensors(one.load(name), other.load(name)) == [], name
    numbers = ("step", "loss", "lr")
    assert [[r[n] for n in numbers] for r in one.of_kind("train")] == [
        [r[n] for n in numbers] for r in other.of_kind("train")
    ]
    values = [[(r["step"], r["values"]) for r in run.of_kind("validation")] for run in (one, other)]
    assert values[0] == values[1]


def test_every_optimizer_of_torch_is_here():
    classes = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"}
    assert classes == {*OF_TORCH, *REFUSED}


@pytest.mark.sampled(2)
@pytest.mark.claim("any-optimizer")
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_is_stopped_and_resumed_is_one_that_was_not(tmp_path, name):
    require(name)
    whole = run_in_process(tmp_path / "whole", **config(name))
    assert whole.code == 0, whole.output
    part = run_in_process(tmp_path / "part", **config(name, STOP))
    more = resume_in_process(part, "--set", f"training.max_steps={STEPS}")
    assert more.code == 0, more.output
    assert_same(whole, more, files_of(name))
    weights = whole.load("model")
    assert all(bool(t.isfinite().all()) for t in weights.values() if t.is_floating_point())
    initial = build_model(AnyOptimizer(name), 0, CPU).state_dict()
    assert not torch.equal(weights["square.weight"], initial["square.weight"])


@pytest.mark.claim("any-optimizer")
@pytest.mark.processes
@pytest.mark.parametrize("name", ["ScheduleFree", "OwnLayout", "RelativeAdafactor", "Muon"])
def test_two_trainers_are_the_same_in_ddp_and_rpc_that_is_stopped_and_resumed(tmp_path, name):
    ddp = train(tmp_path, "ddp", 2, **config(name))
    for transport in ("shared_memory", "rpc"):
        server = {"transport": transport}
        part = train(tmp_path / transport, "rpc", 2, **config(name, STOP), server=server)
        more = resume(part, "--set", f"training.max_steps={STEPS}")
        assert more.code == 0, more.output
        assert_same(ddp, more, files_of(name))


@pytest.mark.claim("any-optimizer")
@pytest.mark.processes
def test_a_gradient_that_an_optimizer_keeps_stays_as_it_is(tmp_path):
    """Whatever has the memory of gradients: buckets of DistributedDataParallel, a segment, a message."""
    runs = [train(tmp_path / "one", mode, 1, **config("Extrapolating")) for mode in ("local", "ddp", "rpc")]
    runs.append(train(tmp_path / "rpc", "rpc", 1, **config("Extrapolating"), server={"transport": "rpc"}))
    for run in runs[1:]:
        assert_same(runs[0], run)


@pytest.mark.claim("optimizer-draws")
@pytest.mark.processes
@pytest.mark.parametrize(("name", "trainers"), [("Langevin", 1), ("Langevin", 2), ("NoisySGD", 2)])
def test_what_an_optimizer_draws_is_the_same_in_every_mode_and_after_a_resume(tmp_path, name, trainers):
    whole = train(tmp_path, "local" if trainers == 1 else "ddp", trainers, **config(name))
    others = [("ddp", {}), ("rpc", {"transport": "shared_memory"}), ("rpc", {"transport": "rpc"})]
    for number, (mode, server) in enumerate(others):
        part = train(tmp_path / str(number), mode, trainers, **config(name, STOP), server=server)
        more = resume(part, "--set", f"training.max_steps={STEPS}")
        assert more.code == 0, more.output
        assert_same(whole, more)


@pytest.mark.claim("optimizer-draws")
@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared_memory", "rpc", "tcp"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_what_an_optimizer_draws_on_several_servers_is_the_same_after_a_resume(tmp_path, transport, clip):
    def options(steps):
        training = {**config("Langevin")["training"], "max_steps": steps, "clip_grad_norm": clip}
        common = {"cluster": {"num_servers": 2}, "server": {"transport": transport}, "training": training}
        return {**config("Langevin"), **common}

    whole = train(tmp_path / "whole", "rpc", 2, **options(STEPS))
    part = train(tmp_path / "part", "rpc", 2, **options(STOP))
    more = resume(part, "--set", f"training.max_steps={STEPS}")
    assert more.code == 0, more.output
    assert_same(whole, more)


@pytest.mark.claim("optimizer-draws")
@pytest.mark.processes
def test_several_optimizers_draw_the_same_in_every_mode(tmp_path):
    options = {**task("any"), "task": f"{TASKS}:SparseOptimizers", "task_args": {"kind": "Langevin", "sparse": False}}
    options |= {"training": {"max_steps": STEPS - 1, "batch_size": 8, "validate_every": 2}}
    runs = [train(tmp_path / mode, mode, 2, **options) for mode in ("ddp", "rpc")]
    assert_same(*runs)


@pytest.mark.claim("any-optimizer")
@pytest.mark.processes
@pytest.mark.parametrize("name", ["Swapping", "Wrapper", "Adafactor"])
def test_a_run_continues_in_the_other_modes(tmp_path, name):
    whole = run_in_process(tmp_path / "whole", **config(name, 12))
    part = train(tmp_path, "local", 1, **config(name, 3))
    for mode, steps in (("ddp", 6), ("rpc", 9), ("local", 12)):
        more = resume(part, "--set", f"mode={mode}", "--set", f"training.max_steps={steps}")
        assert more.code == 0, more.output
    assert_same(whole, more, files_of(name))


@pytest.mark.claim("any-optimizer")
@pytest.mark.processes
@pytest.mark.parametrize("mode", ["ddp", "rpc"])
@pytest.mark.parametrize("name", ["ScheduleFree", "Wrapper", "Muon"])
def test_a_run_of_which_a_rank_is_killed_ends_as_one_without(tmp_path, mode, name):
    whole = train(tmp_path, mode, 2, **config(name), server={"on_loss": "rollback"})
    dies = {**config(name, die=str(tmp_path / "died")), "server": {"on_loss": "rollback"}}
    killed = train(tmp_path / "killed", mode, 2, **dies)
    assert (tmp_path / "died").exists()
    for file in files_of(name):
        assert differing_tensors(whole.load(file), killed.load(file)) == []


@pytest.mark.claim("any-optimizer")
@pytest.mark.processes
@pytest.mark.parametrize("name", ["ScheduleFree", "OwnLayout", "Wrapper", "Muon"])
def test_a_local_run_that_is_killed_resumes_from_its_last_checkpoint(tmp_path, name):
    whole = run_in_process(tmp_path / "whole", **config(name))
    killed = launch(tmp_path / "killed", **config(name, die=str(tmp_path / "died"), dying=0))
    assert killed.code == -signal.SIGKILL
    more = resume(killed)
    assert more.code == 0, more.output
    assert_same(whole, more, files_of(name))


@pytest.mark.claim("any-optimizer")
@pytest.mark.processes
@pytest.mark.parametrize("name", ["Lion", "Lamb", "Nested", "Adafactor"])
def test_two_servers_have_the_updates_and_the_state_of_one(tmp_path, name):
    options = {"dropout": 0.0}
    one = train(tmp_path, "rpc", 1, **config(name, **options))
    part = train(tmp_path / "part", "rpc", 1, **config(name, STOP, **options), cluster={"num_servers": 2})
    more = resume(part, "--set", f"training.max_steps={STEPS}")
    assert more.code == 0, more.output
    assert_same(one, more)


@pytest.mark.claim("any-optimizer")
@pytest.mark.parametrize("name", ["OwnLayout", "Wrapper"])
def test_a_state_that_is_not_by_parameter_is_refused_with_several_servers(name):
    said = r"optimizer \(\w+\) must keep its state by parameter, .* cluster\.num_servers \(2\), .*; set cluster\."
    with pytest.raises(TaskError, match=said):
        is_elementwise(require(name), 2)


def test_a_state_of_no_parameter_is_refused_with_several_servers():
    weight = nn.Parameter(torch.zeros(4))
    layout = FlatLayout.of([("weight", weight)])
    sgd = torch.optim.SGD([weight], lr=0.1)
    updater = ShardUpdater(layout, full_shard(layout), layout.allocate(), [weight], sgd)
    sgd.state["common"] = {"step": 3}
    with pytest.raises(TaskError, match=r"the state of SGD must belong to parameters, .*; set cluster\.num_servers: 1"):
        _ = updater.states


def test_a_state_that_torch_converts_has_the_types_that_were_stored():
    def made():
        model = build_model(AnyOptimizer("Nested", dtype="bfloat16"), 0, CPU)
        return model, Updater(AnyOptimizer("Nested", dtype="bfloat16"), model, TrainingConfig())

    _, updater = made()
    for parameter in updater.parameters:
        parameter.grad = torch.full_like(parameter, 0.3)
    updater.apply(1)
    (_, other), file = made(), io.BytesIO()
    torch.save(updater.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    first = next(iter(other.optimizer.state.values()))
    assert (first["kind"], first["clipped"], first["seen"].dtype) == ("heavy ball", True, torch.int64)
    assert [first["moments"][0].dtype, first["moments"][1]["sign"].dtype] == [torch.float64, torch.bool]
    assert differing_tensors(updater.state_dict(), other.state_dict()) == []


def test_an_optimizer_that_loads_nothing_is_refused():
    class Silent(Wrapper):
        def load_state_dict(self, state_dict):
            pass

    model = nn.Linear(2, 2)
    given = Given(lambda: Silent(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
    updater = Updater(given, model, TrainingConfig())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    updater.apply(1)
    with pytest.raises(CheckpointError, match=r"Silent\.load_state_dict does not take over what its state_dict"):
        Updater(given, model, TrainingConfig()).load_state_dict(updater.state_dict())


def test_a_state_that_is_divided_among_ranks_is_refused():
    class Divided(torch.optim.SGD):
        def consolidate_state_dict(self, to=0):
            pass

    model = nn.Linear(2, 2)
    with pytest.raises(
        TaskError, match=r"^Divided divides its state among ranks, .*; use the optimizer that it wraps$"
    ):
        Updater(Given(lambda: Divided(model.parameters(), lr=0.1)), model, TrainingConfig())


def test_a_state_that_is_no_dictionary_is_refused():
    class Listed(torch.optim.SGD):
        def state_dict(self):
            return [super().state_dict()]

    model = nn.Linear(2, 2)
    with pytest.raises(
        TaskError, match=r"^Listed\.state_dict\(\) returned list; it must return a dict, as that of torch"
    ):
        Updater(Given(lambda: Listed(model.parameters(), lr=0.1)), model, TrainingConfig())


@pytest.mark.claim("optimizer-exits")
@pytest.mark.processes
@pytest.mark.parametrize(("name", "kind"), [("Raising", "SystemExit"), ("Interrupting", "KeyboardInterrupt")])
@pytest.mark.parametrize(
    ("mode", "servers", "clip", "transport"),
    [("ddp", 1, None, "auto"), ("rpc", 1, None, "rpc"), ("rpc", 2, None, "auto"), ("rpc", 2, 0.5, "rpc")],
)
def test_an_optimizer_that_raises_no_exception_ends_the_run_by_name(
    tmp_path, name, kind, mode, servers, clip, transport
):
    options = config(name)
    options["training"]["clip_grad_norm"] = clip
    cluster = {"num_trainers": 2, "num_servers": servers, "timeout_s": 30}
    began = time.monotonic()
    run = launch(tmp_path, mode=mode, cluster=cluster, server={"transport": transport}, **options)
    assert (run.code, run.summary["status"]) == (1, "failed"), run.output
    assert time.monotonic() - began < 15  # half of every deadline
    said = rf"^error: .*((the server|server [01]) raised )?{kind}: from step 3"
    assert re.search(said, run.output, re.MULTILINE), run.output


# A learning rate that is None, and wrappers.


class Given(AnyOptimizer):
    def __init__(self, make):
        super().__init__("given")
        self.make = make

    def build_optimizer(self, model):
        return self.make()


@pytest.mark.claim("optimizer-lr-none")
def test_a_group_without_a_learning_rate_is_left_out_of_the_records(tmp_path):
    run = run_in_process(tmp_path, **config("RelativeAdafactor"))
    assert run.code == 0, run.output
    assert [record["lr"] for record in run.of_kind("train")] == [[]] * STEPS
    weights = nn.ParameterList([torch.zeros(2), torch.zeros(2)])
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.5}]
    both = Updater(Given(lambda: RelativeAdafactor(groups)), weights, TrainingConfig())
    assert both.lr == (0.5,)


@pytest.mark.claim("optimizer-lr-none")
@pytest.mark.parametrize("scheduler", [False, True])
def test_a_wrapper_without_the_constructor_of_torch_trains_and_averages(scheduler):
    model = nn.Linear(3, 1)
    wrapper = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    task = Given(lambda: wrapper)
    if scheduler:
        task.build_scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer.base, 1, 0.5)
    updater = Updater(task, model, TrainingConfig(ema_decay=0.5))
    expected = {}
    for step in range(1, 5):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        updater.apply(step)
        for name, value in model.state_dict().items():
            expected[name] = torch.lerp(value, expected[name], 0.5) if name in expected else value.clone()
    torch.testing.assert_close(updater.averages(), expected)
    assert updater.lr == ((0.1 / 16,) if scheduler else (0.1,))
    wrapper.zero_grad()


# Modes.


@pytest.mark.claim("optimizer-modes")
@pytest.mark.parametrize("name", sorted(WITH_MODES))
def test_validations_and_checkpoints_change_no_bit_and_are_of_eval(tmp_path, name):
    require(name)
    plain = config(name)
    often = run_in_process(tmp_path / "often", **plain)
    rare = {**plain, "training": {**plain["training"], "validate_every": 0}, "checkpoint": {"every": 0}}
    rare = run_in_process(tmp_path / "rare", **rare)
    assert often.code == rare.code == 0
    for file in files_of(name):
        assert differing_tensors(often.load(file), rare.load(file)) == []
    # What was stored is what was validated, and what plain PyTorch continues from.
    task, last = AnyOptimizer(name), often.of_kind("validation")[-1]
    model = build_model(task, 0, CPU)
    model.load_state_dict(often.load("model"))
    optimizer = task.build_optimizer(model)
    optimizer.eval()
    optimizer.load_state_dict(often.load("optimizer"))
    optimizer.train()
    trained = often.load("trained")
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.detach(), trained[parameter_name])
    assert differing_tensors(often.load("trained"), {n: often.load("model")[n] for n in trained}) != []
    model.load_state_dict(often.load("model"))
    model.eval()
    data = task.validation_source(None)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1])
    assert last["step"] == STEPS
    assert last["values"]["loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.claim("optimizer-modes")
@pytest.mark.parametrize("name", ["ScheduleFree", "Swapping"])
def test_a_task_may_switch_the_modes_too(name):
    """Around its validation, as in plain PyTorch."""

    def trained(switches):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        updater = Updater(Given(lambda: build(name, model.parameters())), model, TrainingConfig())
        optimizer, validated = updater.optimizer, []
        for step in range(1, 5):
            model(torch.ones(4, 3) * step).square().sum().backward()
            updater.apply(step)
            updater.clear_gradients()
            if switches:
                optimizer.eval()
            validated.append(updater.averages())
            if switches:
                optimizer.train()
        return validated, updater.state_dict()["parameters"]

    # The way from train() to eval() and back rounds where the task makes it.
    for own, other in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.claim("optimizer-modes")
@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"server": {"consistency": "async"}}, "server.consistency (async) must be sync"),
        ({"server": {"compute": "server"}}, "server.compute (server) must be trainer"),
        ({"cluster": {"num_servers": 2}}, "cluster.num_servers (2) must be 1"),
    ],
)
def test_where_the_modes_cannot_be_switched_is_refused(sections, key):
    effective = config_from_mapping({"task": "a:B", **sections})
    store = ParameterStore(AnyOptimizer("ScheduleFree"), effective)
    with pytest.raises(UnsupportedConfiguration, match=re.escape(f"{key} with ScheduleFree, whose train() and eval()")):
        check_optimizers(effective, store)


@pytest.mark.claim("optimizer-modes")
def test_averages_of_an_optimizer_with_modes_are_refused():
    model = build_model(AnyOptimizer("ScheduleFree"), 0, CPU)
    for name, said in (("ScheduleFree", "whose eval\\(\\) gives"), ("OwnLayout", "has no entry state")):
        with pytest.raises(UnsupportedConfiguration, match=rf"training\.ema_decay \(0\.9\) must be null .*{said}"):
            Updater(AnyOptimizer(name), model, TrainingConfig(ema_decay=0.9))
