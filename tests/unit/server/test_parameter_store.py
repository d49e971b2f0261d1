"""Versions of the parameters against the same training in plain PyTorch: every optimizer, and what may go with it."""

import copy
import inspect

import pytest
import torch
from tasks import ReferenceModel
from torch import nn

from paramserver import Task
from paramserver.config import config_from_mapping
from paramserver.consistency import PushId, Update
from paramserver.devices import CPU
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.metrics.records import StepReport
from paramserver.optim.shard_updater import staleness_factor
from paramserver.parameters.model import build_model
from paramserver.parameters.model_tree import ModelTree
from paramserver.server.coordinator import split_over_servers
from paramserver.server.parameter_store import ParameterStore, check_optimizers
from paramserver.server.server_run import ServerRun
from paramserver.server.shard import ParameterShard
from paramserver.server.updates import Updates
from paramserver.transport.compression import CastCodec
from paramserver.transport.messages import PendingPush

# What torch.optim offers, but those that need a closure or sparse gradients.
NAMES = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
)
FUSED = ["Adagrad", "Adam", "AdamW", "SGD"]
FOREACH = sorted(
    {"Adadelta", "Adagrad", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "ASGD", "Adamax"}
)


class Given(Task):
    """``Everything`` with an optimizer by name; its matrices alone where that takes nothing else."""

    def __init__(self, name, options=None, groups=False, schedule=False):
        self.name, self.options, self.groups, self.schedule = name, options or {}, groups, schedule

    def build_model(self):
        return ReferenceModel(dropout=0.0, unused=True)

    def build_optimizer(self, model):
        parameters = [p for p in model.parameters() if p.requires_grad and (self.name != "Muon" or p.ndim == 2)]
        if self.groups:
            parameters = [{"params": parameters[:2], "lr": 0.002}, {"params": parameters[2:]}]
        return getattr(torch.optim, self.name)(parameters, lr=0.01, **self.options)

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if self.schedule else None


def gradients(model, seed):
    """A gradient for each parameter of the model that gets one; the unused one gets none."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator)
        for name, p in model.named_parameters()
        if p.requires_grad and name != "unused"
    }


class Server:
    """The parameters of the only server, and its updates."""

    def __init__(self, task, effective, by_bucket=False):
        self.config, self.run, self.errors = effective, ServerRun(), []
        self.store = ParameterStore(task, effective)
        self.segments = {}
        (whole,), updater, _ = split_over_servers(self.store, 1)
        self.shard = ParameterShard(
            updater,
            CastCodec(torch.float32),
            self.run.lock,
            0,
            whole if by_bucket else None,
            clipping=self.store.updater.clipping,
            attach=self.segments.__getitem__,
            snapshot=None if by_bucket else lambda: self.store.snapshot()[0],
        )
        self.updates = Updates(effective, self.store, self.shard, (whole,), (), None, self.run, lambda: True, None)

    def push(self, trainer_index, given, buffers=None, segment_key=None):
        """Send what a trainer does: flat gradients, and the mask of those that it has."""
        flats = self.store.parameters.layout.allocate()
        views = self.store.parameters.layout.views(flats)
        for name, gradient in given.items():
            views[name].copy_(gradient)
        used, version = tuple(name in given for name in views), self.shard.version
        report = StepReport(trainer_index, version, 8, 1.0, 0.0, used)
        push = PushId(trainer_index, 1, 1, version + 1)
        if segment_key is None:
            self.shard.accept(push, version, flats)
        else:
            self.segments[segment_key] = flats
        future = torch.futures.Future()
        return PendingPush(push, report, buffers, future=future, arrival_s=0.0, segment_key=segment_key)

    def apply(self, update, pushes):
        applied = []
        self.updates.apply(self.shard.version + 1, update, pushes, set(), set(), lambda: applied.append(True))
        if self.run.error is not None:
            raise self.run.error
        assert applied == [True]


def config(**training):
    server = training.pop("server", {})
    return config_from_mapping({"task": "a:B", "training": {"max_steps": 9, **training}, "server": server})


def plainly(task, steps, trainers, clip=None, scales=None):
    """The same by hand: mean of the gradients, clip, step, schedule."""
    model = build_model(task, 0, CPU)
    optimizer = task.build_optimizer(model)
    scheduler = task.build_scheduler(optimizer)
    for step in range(steps):
        given = [gradients(model, 100 * step + i) for i in range(trainers)]
        for name, parameter in model.named_parameters():
            if name in given[0]:
                total = given[0][name] * (scales[step] if scales else 1.0)
                for other in given[1:]:
                    total = total + other[name]
                parameter.grad = total / trainers if trainers > 1 else total
        if clip is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model.state_dict(), optimizer.state_dict()


def served(task, steps, trainers, staleness=None, **training):
    server = Server(task, config(**training))
    store = server.store
    for step in range(steps):
        pushes = [server.push(i, gradients(store.model, 100 * step + i)) for i in range(trainers)]
        stale = (staleness[step],) if staleness else (0,) * trainers
        server.apply(Update(tuple(range(trainers)), stale, 0), pushes)
    return store.model.state_dict(), copy.deepcopy(store.updater.optimizer.state_dict())


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            assert_same(value, other[key])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


def test_every_optimizer_of_torch_is_tried():
    assert {"Adadelta", "Adafactor", "Adam", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"} < set(NAMES)


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_runs_unchanged(name, trainers):
    """Parameters and state in the form of plain PyTorch, bit for bit; tied, frozen and unused ones among them."""
    for one, other in zip(served(Given(name), 4, trainers), plainly(Given(name), 4, trainers), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    ("name", "option"), [*((name, "foreach") for name in FOREACH), *((name, "fused") for name in FUSED)]
)
def test_the_fast_forms_of_an_optimizer_run_too(name, option):
    task = Given(name, {option: True})
    for one, other in zip(served(task, 3, 2), plainly(task, 3, 2), strict=True):
        assert_same(one, other)


def test_groups_schedule_and_clipping_go_with_it():
    task = Given("AdamW", {"weight_decay": 0.1}, groups=True, schedule=True)
    for one, other in zip(served(task, 5, 2, clip_grad_norm=0.5), plainly(task, 5, 2, clip=0.5), strict=True):
        assert_same(one, other)


def test_a_stale_gradient_is_scaled_before_it_is_applied():
    staleness = [0, 3, 1, 7]
    scales = [staleness_factor(s, "inverse") for s in staleness]
    got = served(Given("SGD"), 4, 1, staleness, server={"stale_scaling": "inverse"})
    assert_same(got[0], plainly(Given("SGD"), 4, 1, scales=scales)[0])
    assert scales == [1.0, 0.25, 0.5, 0.125]


def test_a_parameter_without_a_gradient_is_not_stepped_though_it_decays():
    """Weight decay would move it, if a gradient of zeros passed for none."""
    task = Given("SGD", {"weight_decay": 0.5, "momentum": 0.9})
    model, state = served(task, 3, 2)
    assert torch.equal(model["unused"], build_model(task, 0, CPU).state_dict()["unused"])
    names = [n for n, p in build_model(task, 0, CPU).named_parameters() if p.requires_grad]
    assert names.index("unused") not in state["state"]


def test_a_gradient_that_one_trainer_has_counts_as_zero_for_the_other():
    server = Server(Given("SGD"), config())
    model = server.store.model
    before = model.scale.detach().clone()
    lacking = {n: g for n, g in gradients(model, 1).items() if n != "scale"}
    having = {**lacking, "scale": torch.tensor(2.0)}
    server.apply(Update((0, 1), (0, 0), 0), [server.push(0, lacking), server.push(1, having)])
    assert torch.allclose(model.scale, before - 0.01 * 1.0)


def test_a_snapshot_stays_what_it_was():
    server = Server(Given("SGD"), config())
    versions = server.store
    flats, _ = versions.snapshot()
    held = [flat.clone() for flat in flats]
    versions.retained[0] = versions.snapshot()
    server.apply(Update((0,), (0,), 0), [server.push(0, gradients(versions.model, 1))])
    assert all(torch.equal(a, b) for a, b in zip(flats, held, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(versions.retained[0][0], held, strict=True))
    assert not torch.equal(versions.snapshot()[0][0], held[0])


@pytest.mark.claim("slow-update")
@pytest.mark.parametrize("by_bucket", [False, True])
def test_what_is_read_while_an_update_is_written_is_not_kept_for_its_version(by_bucket):
    """A trainer that joins over RPC reads while the others, which share memory, make an update."""
    server, held = Server(Given("SGD"), config(), by_bucket), []
    store, shard = server.store, server.shard
    store.updater.optimizer.register_step_pre_hook(lambda *_: held.extend([store.snapshot(), shard.sent_version()]))
    server.apply(Update((0,), (0,), 0), [server.push(0, gradients(store.model, 1), segment_key="shared")])
    assert len(held) == 2
    for flats in (store.snapshot()[0], shard.sent_version()):
        assert all(map(torch.equal, flats, store.parameters.flats))


def test_no_push_is_held_on_to():
    """In async a gradient's memory is the trainer's next one's."""
    server = Server(Given("SGD"), config())
    server.apply(Update((0,), (0,), 0), [server.push(0, gradients(server.store.model, 1))])
    assert all(p.grad is None for p in server.store.model.parameters())


def test_an_optimizer_that_needs_a_closure_is_refused():
    class Closure(Given):
        def build_optimizer(self, model):
            return torch.optim.LBFGS(model.parameters())

    with pytest.raises(TaskError, match="LBFGS needs a closure"):
        ParameterStore(Closure("SGD"), config())


def test_an_optimizer_of_sparse_gradients_is_refused():
    class Sparse(Given):
        def build_optimizer(self, model):
            return torch.optim.SparseAdam(list(model.parameters()))

    with pytest.raises(TaskError, match="SparseAdam must step tables only"):
        check_optimizers(config(), ParameterStore(Sparse("SGD"), config()))


@pytest.mark.parametrize("outer", ["sgd", "nesterov", "adam", "delayed_nesterov"])
def test_rounds_with_a_table_are_refused_as_such(outer):
    """Not by what the outer optimizer cannot step: the task has another one."""

    class Table(Given):
        def build_model(self):
            return nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True), nn.Linear(2, 1))

    rounds = config(local_steps=2, outer={"optimizer": outer})
    with pytest.raises(UnsupportedConfiguration, match=r"training.local_steps \(2\) must be 1 with embedding tables"):
        check_optimizers(rounds, ParameterStore(Table("SGD"), rounds))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_parameters_are_trained_if_their_gradients_can_be_averaged(dtype):
    class Odd(Given):
        def build_model(self):
            model = ReferenceModel(dropout=0.0, unused=False)
            model.odd = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=dtype.is_complex)
            return model

    assert ("odd" in ParameterStore(Odd("SGD"), config()).parameters.tensors) is dtype.is_complex


def test_the_forward_on_the_server_is_the_models():
    versions = ParameterStore(Given("SGD"), config())
    images = torch.randn(4, 1, 6, 6)
    expected = copy.deepcopy(versions.model)(images)
    assert torch.equal(versions.forward(versions.snapshot()[0], [images]), expected)


@pytest.mark.claim("async-buffers")
def test_the_module_buffers_of_a_version_are_those_of_the_last_push_and_are_not_merged():
    """As documented for async: two trainers compute with the same version, one after the other pushes."""
    server = Server(Given("SGD"), config())
    versions = server.store
    name = next(name for name in versions.model.state_dict() if name.endswith("num_batches_tracked"))
    sent = []
    for index in range(2):
        trainer = build_model(Given("SGD"), 0, CPU)
        trainer(torch.full((4, 1, 6, 6), 1.0 + index))
        sent.append(server.push(index, gradients(trainer, index), ModelTree(trainer).pack_buffers()))
    for one in sent:
        index = one.report.trainer_index
        server.apply(Update((index,), (index,), index), [one])
        found = versions.buffers.values()
        assert all(torch.equal(found[key], value) for key, value in one.buffers.values().items())
        assert versions.model.state_dict()[name] == 1  # also after the second push
