"""How gradients become the next version: clipping, schedules, what is refused, and the loss as a number."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from paramserver import Task
from paramserver.config import Config, TrainingConfig
from paramserver.config.schema import CLIPPINGS
from paramserver.errors import NotFinite, TaskError
from paramserver.optim.clipping import _KINDS, clipping_of
from paramserver.optim.updater import Updater


class Given(Task):
    """Optimizer and scheduler are made by functions."""

    def __init__(self, optimizer=None, scheduler=None) -> None:
        self.make_optimizer = optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=1.0))
        self.make_scheduler = scheduler or (lambda o: None)

    def build_optimizer(self, model):
        return self.make_optimizer(model)

    def build_scheduler(self, optimizer):
        return self.make_scheduler(optimizer)


class Line(nn.Module):
    def __init__(self, weight=(1.0, 2.0), bias=(0.0,)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.bias = nn.Parameter(torch.tensor(bias))


def made(optimizer=None, scheduler=None, clip=None, model=None, validate_every=1, **training) -> Updater:
    training = TrainingConfig(clip_grad_norm=clip, validate_every=validate_every, **training)
    return Updater(Given(optimizer, scheduler), Line() if model is None else model, training)


def with_gradients(updater: Updater, *gradients) -> Updater:
    for parameter, gradient in zip(updater.parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    return updater


def step_rates(updater: Updater, steps: int = 4) -> list[float]:
    rates = []
    for _ in range(steps):
        with_gradients(updater, [0.0, 0.0], [0.0]).apply(1)
        rates.append(updater.lr[0])
    return rates


def values(updater: Updater) -> list[list[float]]:
    return [p.detach().tolist() for p in updater.parameters]


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda task: lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=task.total_steps),
        lambda task: lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 - step / task.total_steps),
    ],
    ids=["raises after its end", "becomes negative"],
)
def test_a_schedule_of_total_steps_is_not_stepped_beyond_them(caplog, scheduler):
    """Such as where simulations are given up: the samples that they had sent make more updates."""
    task = Given()
    task.make_scheduler, task.train_source = scheduler(task), lambda partition: range(20)
    task.config = Config(mode="local", training=TrainingConfig(max_epochs=1, batch_size=1))
    updater = Updater(task, Line(), TrainingConfig())
    rates = step_rates(updater, 22)
    assert 0.02 > rates[19] == rates[20] == rates[21] >= 0.0
    assert [record.getMessage() for record in caplog.records] == [
        "more updates are made than self.total_steps (20) of the task; its schedule has ended"
    ]
    resumed = Updater(task, Line(), TrainingConfig())
    resumed.load_state_dict(updater.state_dict())
    assert step_rates(resumed, 1) == rates[-1:]


def test_the_rates_of_an_update_are_those_before_its_schedule_is_stepped():
    """Also where another process has made it, with a schedule that warns unless an optimizer was stepped first."""
    made_here, followed = (made(scheduler=lambda o: lr_scheduler.StepLR(o, 1, 0.5)) for _ in range(2))
    rates = []
    for _ in range(3):
        with_gradients(made_here, [0.0, 0.0], [0.0]).apply(1)
        followed.on_missed_update()
        rates.append((made_here.applied_lr, followed.applied_lr))
    assert rates == [((rate,), (rate,)) for rate in (1.0, 0.5, 0.25)]
    assert made_here.lr == followed.lr == (0.125,)


def test_an_update_is_a_step_of_the_optimizer():
    updater = with_gradients(made(), [0.5, 0.5], [1.0])
    updater.apply(1)
    assert values(updater) == [[0.5, 1.5], [-1.0]]


def test_a_parameter_without_a_gradient_is_not_stepped():
    updater = made(lambda m: torch.optim.SGD(m.parameters(), lr=1.0, weight_decay=0.5))
    with_gradients(updater, None, [1.0]).apply(1)
    assert values(updater) == [[1.0, 2.0], [-1.0]]


def test_the_norm_over_all_parameters_is_clipped():
    updater = with_gradients(made(clip=1.0), [3.0, 0.0], [4.0])  # norm 5
    updater.apply(1)
    assert values(updater) == [[pytest.approx(0.4), 2.0], [pytest.approx(-0.8)]]


def test_a_small_norm_is_left_alone():
    updater = with_gradients(made(clip=10.0), [0.3, 0.0], [0.4])
    updater.apply(1)
    assert values(updater) == [[pytest.approx(0.7), 2.0], [pytest.approx(-0.4)]]


def test_clipping_counts_what_has_a_gradient_only():
    updater = with_gradients(made(clip=1.0), None, [4.0])
    updater.apply(1)
    assert values(updater) == [[1.0, 2.0], [pytest.approx(-1.0)]]


def test_each_element_is_clipped_by_its_value():
    updater = with_gradients(made(clip_grad_value=0.5), [3.0, -0.25], [-4.0])
    updater.apply(1)
    assert values(updater) == [[0.5, 2.25], [0.5]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_clipping_would_hide_is_refused(bad):
    updater = with_gradients(made(clip_grad_value=0.5), [3.0, 0.25], [bad])
    with pytest.raises(NotFinite, match=r"^step 4: the largest value of all gradients is (nan|inf) and must be finite"):
        updater.apply(4)
    assert values(updater) == [[1.0, 2.0], [0.0]]


def test_rows_and_complex_numbers_are_clipped_by_value():
    table, weight = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    table.grad = torch.sparse_coo_tensor([[1]], [[3.0, -0.25]], (3, 2), check_invariants=True).coalesce()
    weight.grad = torch.tensor([-0.25 + 3j])
    clipping_of(TrainingConfig(clip_grad_value=0.5)).clip([table, weight], 1)
    assert table.grad.to_dense().tolist() == [[0.0, 0.0], [0.5, -0.25], [0.0, 0.0]]
    assert weight.grad.tolist() == [-0.25 + 0.5j]


@pytest.mark.parametrize("key", ["clip_grad_value", "clip_grad_norm"])
def test_a_shard_without_gradients_is_not_clipped_where_another_is(key):
    weight = nn.Parameter(torch.ones(2))
    clipping_of(TrainingConfig(**{key: 0.5})).clip_shard([weight], torch.tensor(3.0))
    assert weight.grad is None


# Schedules.


def test_a_plain_scheduler_is_stepped_per_update():
    assert step_rates(made(scheduler=lambda o: lr_scheduler.StepLR(o, 2, 0.1))) == pytest.approx([1, 0.1, 0.1, 0.01])


def test_a_schedule_that_asks_the_trainer_for_the_steps_of_the_run_is_told_where_they_are():
    for trainer in (None, object()):  # of a server, and of a trainer
        with pytest.raises(TaskError, match=r"write self\.total_steps"):
            made(scheduler=lambda o, t=trainer: lr_scheduler.OneCycleLR(o, 0.1, total_steps=t.total_steps))
    with pytest.raises(AttributeError, match="other"):
        made(scheduler=lambda o: o.other)


def test_a_schedule_of_another_optimizer_is_refused():
    other = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(TaskError, match="build_scheduler returned a StepLR of another Adam than it was given"):
        made(scheduler=lambda _: lr_scheduler.StepLR(other, 1))


def test_without_a_scheduler_the_rate_stays():
    updater = made()
    updater.on_epoch_end()
    updater.on_validation_end(1, {"loss": 1.0})
    assert step_rates(updater) == [1.0] * 4


def test_a_schedule_of_epochs_is_stepped_at_their_end_only():
    updater = made(scheduler=lambda o: {"scheduler": lr_scheduler.ExponentialLR(o, 0.5), "every": "epoch"})
    assert step_rates(updater) == [1.0] * 4
    updater.on_validation_end(1, {"loss": 1.0})
    assert updater.lr == (1.0,)
    updater.on_epoch_end()
    assert updater.lr == (0.5,)


def test_a_schedule_of_validations_without_a_metric():
    updater = made(scheduler=lambda o: {"scheduler": lr_scheduler.ExponentialLR(o, 0.5), "every": "validation"})
    assert step_rates(updater) == [1.0] * 4
    updater.on_epoch_end()
    updater.on_validation_end(1, {})
    assert updater.lr == (0.5,)


def plateau(optimizer) -> dict:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return {"scheduler": scheduler, "every": "validation", "metric": "loss"}


def scheduler_with(step) -> SimpleNamespace:
    return SimpleNamespace(step=step, state_dict=dict, load_state_dict=len)


def test_a_plateau_follows_its_metric():
    updater = made(scheduler=plateau)
    rates = []
    for loss in (1.0, 0.5, 0.5, 0.4, 0.6):
        updater.on_validation_end(1, {"accuracy": 0.0, "loss": loss})
        rates += updater.lr
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(("validate_every", "rates"), [(2, [1.0, 0.5, 0.5, 0.25]), (3, [1, 1, 0.5, 0.5]), (0, [1] * 4)])
def test_a_validation_that_is_not_due_leaves_the_schedule_alone(validate_every, rates):
    def exponential(optimizer):
        return {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "every": "validation"}

    updater = made(scheduler=exponential, validate_every=validate_every)
    found = []
    for step in range(1, 5):
        with_gradients(updater, [0.0, 0.0], [0.0]).apply(1)
        updater.on_validation_end(step, {})
        found += updater.lr
    assert found == rates


def test_a_metric_that_validation_lacks_is_named():
    with pytest.raises(TaskError, match=r"metric \(loss\), which validation_step does not return; it returns accuracy"):
        made(scheduler=plateau).on_validation_end(1, {"accuracy": 0.1})
    with pytest.raises(TaskError, match="it returns nothing; return it there, in a LightningModule"):
        made(scheduler=plateau).on_validation_end(1, {})


def test_each_group_has_its_rate():
    def groups(model):
        return torch.optim.SGD([{"params": [model.weight], "lr": 0.2}, {"params": [model.bias]}], lr=0.1)

    assert made(groups).lr == (0.2, 0.1)


# What is refused.


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TaskError, match=r"Given\.build_optimizer returned Line; it must return a torch\.optim"):
        made(lambda model: model)


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(TaskError, match="LBFGS needs a closure"):
        made(lambda model: torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_whose_closure_is_optional_is_welcome():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    updater = with_gradients(made(lambda m: Own(m.parameters(), lr=1.0)), [1.0, 1.0], [1.0])
    updater.apply(1)
    assert values(updater) == [[0.0, 1.0], [-1.0]]


def test_tensors_of_another_model_are_refused():
    stranger = nn.Parameter(torch.zeros(1))
    with pytest.raises(TaskError, match=r"optimizes 2 tensor\(s\) that are not parameters of the model"):
        made(lambda m: torch.optim.SGD([*m.parameters(), stranger, nn.Parameter(torch.zeros(2))], lr=0.1))


@pytest.mark.parametrize("use", [lambda u: u.apply(1), Updater.state_dict], ids=["update", "checkpoint"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("in_new_group", [False, True])
def test_groups_that_change_after_the_start_are_refused(in_new_group, several, use):
    """A resumed run would begin without the change."""
    own = []

    def build(model):
        own[:] = [torch.optim.SGD([p], lr=1.0) for p in (model.weight, model.scale)]
        return own if several else own[0]

    model = Line()
    model.scale = nn.Parameter(torch.ones(1))
    updater = made(build, model=model)
    with_gradients(updater, [1.0, 1.0], [1.0], [1.0]).apply(1)
    before = values(updater)
    if in_new_group:
        own[0].add_param_group({"params": [model.bias], "lr": 0.1})
    else:
        own[0].param_groups[0]["params"].append(model.bias)
    groups = 1 + several
    message = f"has {groups + 1} parameters in {groups + in_new_group} groups, .* gave it {groups} in {groups}"
    with pytest.raises(TaskError, match=message):
        use(updater)
    assert values(updater) == before


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (lambda o: "cosine", "build_scheduler must return None, a scheduler, or"),
        (lambda o: {"every": "step"}, "build_scheduler must return None"),
        (lambda o: {**plateau(o), "interval": 1}, "build_scheduler must return None"),
        (lambda o: SimpleNamespace(step=len), "SimpleNamespace, which must have state_dict and load_state_dict"),
        (lambda o: {**plateau(o), "every": "batch"}, r"every \('batch'\) must be one of step, epoch, validation"),
        (lambda o: plateau(o)["scheduler"], "ReduceLROnPlateau needs a metric"),
        (lambda o: {**plateau(o), "metric": None}, "ReduceLROnPlateau needs a metric"),
        (lambda o: {**plateau(o), "every": "epoch"}, r"metric \('loss'\) needs every=.validation."),
        (lambda o: scheduler_with(lambda epoch: None), r"whose step\(\) must take no argument \(missing .*'epoch'"),
        (lambda o: {**plateau(o), "scheduler": scheduler_with(lambda: None)}, r"whose step\(\) must take the metric"),
    ],
)
def test_a_scheduler_that_cannot_be_stepped_is_refused(scheduler, message):
    with pytest.raises(TaskError, match=message):
        made(scheduler=scheduler)


# State.


@pytest.mark.parametrize("scheduler", [None, lambda o: lr_scheduler.StepLR(o, 3, 0.5), plateau])
def test_the_state_goes_on_where_it_was(scheduler):
    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=0.1)

    def train(updater: Updater, steps: range) -> Updater:
        for step in steps:
            with_gradients(updater, [0.1 * step, 1.0], [float(step)]).apply(1)
            updater.on_validation_end(step, {"loss": float(step % 3)})
        return updater

    whole = train(made(adam, scheduler), range(10))
    first = train(made(adam, scheduler), range(4))
    second = made(adam, scheduler, model=Line(*values(first)))
    second.load_state_dict(first.state_dict())
    train(second, range(4, 10))
    assert values(second) == values(whole)
    assert second.lr == whole.lr


def test_a_state_without_a_schedule_is_taken_by_a_task_that_has_one_now():
    updater = made(scheduler=lambda o: lr_scheduler.StepLR(o, 2, 0.1))
    updater.load_state_dict(made().state_dict())
    assert step_rates(updater, 2) == pytest.approx([1, 0.1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_gradients_that_are_clipped_and_not_finite_are_not_applied(value):
    updater = with_gradients(made(clip=1.0), [0.5, 0.5], [value])
    with pytest.raises(NotFinite, match=r"^step 7: the norm of all gradients is (nan|inf) and must be finite"):
        updater.apply(7)
    assert values(updater) == values(made())


class WithCount(torch.optim.SGD):
    """Has an entry in its state that is of no parameter."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


@pytest.mark.claim("any-optimizer")
@pytest.mark.parametrize("ema_decay", [None, 0.5])
@pytest.mark.parametrize("several", [False, True])
def test_a_state_that_is_of_no_parameter_is_loaded(ema_decay, several):
    def build(model):
        if not several:
            return WithCount(model.parameters(), lr=0.1, momentum=0.9)
        return {name: WithCount([p], lr=0.1) for name, p in model.named_parameters()}

    stored, loaded = (Updater(Given(build), Line(), TrainingConfig(ema_decay=ema_decay)) for _ in range(2))
    for parameter in stored.parameters:
        parameter.grad = torch.ones_like(parameter)
    stored.optimizer.step()
    loaded.load_state_dict(stored.state_dict())
    assert loaded.averages().keys() == stored.averages().keys() == (set() if ema_decay is None else {"weight", "bias"})
    own = loaded.optimizer.by_name["bias"] if several else loaded.optimizer
    assert own.state["steps"] == 1


def test_every_key_of_clipping_has_a_kind():
    assert tuple(_KINDS) == CLIPPINGS
    for key in CLIPPINGS:
        training = TrainingConfig(**{key: 0.5})
        assert training.clips
        assert isinstance(clipping_of(training), _KINDS[key])
    assert clipping_of(TrainingConfig()) is None
