"""Work that several threads do together gives the bits that one thread gives."""

import copy
import functools
import threading
import types
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paramserver.optim import parallel_step
from paramserver.optim.parallel_step import ELEMENTWISE, PER_PARAMETER, ParallelStep, ThreadTeam, num_spare_threads
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.sharding import full_shard

SHAPES = [(301, 97), (301,), (1,), (513, 33), (0, 4), (7, 5), (2000, 3)]
MATRICES = [shape for shape in SHAPES if len(shape) == 2 and 0 not in shape]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[1, 2, 6])
def crew(request):
    made = ThreadTeam(request.param)
    yield made
    made.close()


def parameters(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = MATRICES if kind in PER_PARAMETER else SHAPES
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def optimizer_of(kind, own):
    return kind([{"params": own[:2], "lr": 0.02}, {"params": own[2:]}], lr=0.01)


# SparseAdam needs sparse gradients; tests/integration/test_tables.py has these.
@pytest.mark.parametrize("kind", [k for k in (*ELEMENTWISE, *PER_PARAMETER) if k is not torch.optim.SparseAdam])
def test_every_optimizer_makes_the_same_step(crew, kind):
    """Two groups, a schedule, and in each step another parameter without a gradient."""
    one, many = parameters(kind, 1), parameters(kind, 1)
    alone, together = optimizer_of(kind, one), optimizer_of(kind, many)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in (alone, together)]
    parted = ParallelStep(together, crew)
    assert parted.supports(together)
    generator = torch.Generator().manual_seed(2)
    for step in range(6):
        for number, (a, b) in enumerate(zip(one, many, strict=True)):
            a.grad = None if number == step else torch.randn(a.shape, generator=generator)
            b.grad = None if a.grad is None else a.grad.clone()
        alone.step()
        parted()
        for schedule in schedules:
            schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))
    mine, theirs = alone.state_dict(), together.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert list(mine["state"]) == list(theirs["state"])
    for number, state in mine["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs["state"][number][name])), (number, name)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.ASGD, torch.optim.Muon])
def test_a_step_takes_what_was_changed_since_the_last_one(crew, kind):
    """Learning rate, loaded state, replaced state of a parameter, another group."""
    one, many = parameters(kind, 1), parameters(kind, 1)
    optimizers = alone, together = optimizer_of(kind, one[:-1]), optimizer_of(kind, many[:-1])
    parted = ParallelStep(together, crew)
    generator = torch.Generator().manual_seed(2)

    def step(times=2):
        for _ in range(times):
            for a, b in zip(one, many, strict=True):
                a.grad = torch.randn(a.shape, generator=generator)
                b.grad = a.grad.clone()
            alone.step()
            parted()

    step()
    stored = copy.deepcopy(alone.state_dict())
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] *= 3
    step()
    for optimizer in optimizers:
        optimizer.load_state_dict(copy.deepcopy(stored))
    step()
    for optimizer, own in zip(optimizers, (one, many), strict=True):
        optimizer.state[own[0]] = {}
    step()
    for optimizer, own in zip(optimizers, (one, many), strict=True):
        optimizer.add_param_group({"params": own[-1:], "lr": 0.5})
    step()
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


def test_no_thread_keeps_its_last_part(crew):
    class Part:
        def __call__(self):
            pass

    parts = [Part() for _ in range(crew.size)]
    kept = [weakref.ref(part) for part in parts]
    crew.run(parts)
    del parts
    assert [part() for part in kept] == [None] * crew.size


def test_a_hook_sees_all_parameters_at_once(crew):
    own = parameters(torch.optim.SGD, 1)
    optimizer = optimizer_of(torch.optim.SGD, own)
    parted = ParallelStep(optimizer, crew)
    seen = []
    optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(sum(len(g["params"]) for g in optimizer.param_groups))
    )
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    parted()
    assert seen == [len(own)]


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_so_does_a_hook_of_all_optimizers(crew, register):
    own = parameters(torch.optim.SGD, 1)
    parted = ParallelStep(optimizer_of(torch.optim.SGD, own), crew)
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    seen = []
    hook = register(lambda optimizer, *_: seen.append(sum(len(g["params"]) for g in optimizer.param_groups)))
    try:
        parted()
    finally:
        hook.remove()
    assert seen == [len(own)]


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_somebody_put_in_place_is_the_one_that_is_made(crew, scheduled):
    own = parameters(torch.optim.SGD, 1)
    optimizer = optimizer_of(torch.optim.SGD, own)
    step, seen = optimizer.step, []

    @functools.wraps(step)
    def counted(self):
        seen.append(len(self.param_groups))
        return step()

    optimizer.step = types.MethodType(counted, optimizer)
    if scheduled:
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    assert not ParallelStep.supports(optimizer)
    ParallelStep(optimizer, crew)()
    assert seen == [2]


def test_what_may_look_at_several_parameters_is_left_alone():
    class Own(torch.optim.SGD):
        pass

    own = parameters(torch.optim.SGD, 1)
    assert not ParallelStep.supports(Own(own, lr=0.1))
    assert not ParallelStep.supports(torch.optim.LBFGS(own))


@pytest.mark.parametrize("seed", range(6))
def test_a_mean_has_the_same_bits(crew, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = [int(n) for n in torch.randint(0, 40_000, (3,), generator=generator)]
    named = [
        (f"{n}", torch.randn(size, generator=generator, dtype=t))
        for n, (size, t) in enumerate(zip(sizes, (torch.float32, torch.float64, torch.float32), strict=True))
    ]
    layout = FlatLayout.of(named)
    pushes = [
        [torch.randn(n, generator=generator, dtype=t) for n, t in zip(layout.sizes, layout.dtypes, strict=True)]
        for _ in range(3)
    ]
    factors = [1.0, 1 / 3, 0.5]

    def mean(by):
        own = [nn.Parameter(tensor.clone()) for _, tensor in named]
        portion = ShardUpdater(layout, full_shard(layout), layout.allocate(), own, torch.optim.SGD(own, lr=0.1))
        if by is not None:
            portion.use_threads(by)
        return portion.average(copy.deepcopy(pushes), factors)

    assert all(torch.equal(a, b) for a, b in zip(mean(None), mean(crew), strict=True))


def test_all_take_part(crew):
    names, here = set(), threading.Barrier(crew.size, timeout=20)

    def part():
        here.wait()
        names.add(threading.current_thread().name)

    crew.run([part] * crew.size)
    assert len(names) == crew.size


def test_the_others_are_done_when_one_has_failed(crew):
    done = threading.Event()

    def fails():
        raise ValueError("on purpose")

    for parts in ([fails, done.set], [done.set, fails]):
        done.clear()
        with pytest.raises(ValueError, match="on purpose"):
            crew.run(parts)
        assert done.is_set()


@pytest.mark.parametrize(
    ("cores", "threads", "helpers"), [(2, 1, 1), (2, 2, 0), (1, 1, 0), (64, 1, 7), (12, 5, 1), (1, 4, -1)]
)
def test_helpers_are_for_cores_that_are_left(monkeypatch, cores, threads, helpers):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert num_spare_threads(cores) == max(helpers, 0)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_of_the_package_is_called_for_each_part(crew, register, monkeypatch):
    class Counted:
        def __call__(self, optimizer, *_):
            seen.append(sum(len(g["params"]) for g in optimizer.param_groups))

    monkeypatch.setattr(parallel_step, "OWN_HOOKS", (Counted,))
    own, seen = parameters(torch.optim.SGD, 1), []
    optimizer = optimizer_of(torch.optim.SGD, own)
    getattr(optimizer, register)(Counted())
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    assert ParallelStep.supports(optimizer)
    ParallelStep(optimizer, crew)()
    assert len(seen) > 1
    assert sum(seen) == len(own)
