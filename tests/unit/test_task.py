"""Tasks: required methods, defaults, and the arguments that create an equal task in another process."""

import dataclasses
import functools
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from paramserver import Callback, Partition, Task, rank_zero_only
from paramserver.cluster import ProcessIdentity
from paramserver.config import Role, config_from_mapping
from paramserver.context import set_role
from paramserver.errors import TaskError
from paramserver.runtime.rank import RankPlan, run_rank
from paramserver.task import (
    REQUIRED,
    check_task_class,
    construct_task,
    make_callbacks,
    make_task,
    restore_task,
    task_state,
    uses_default_batching,
)


class Complete(Task):
    def __init__(self, width: int = 4, *, lr: float = 0.1, **more) -> None:
        self.width = width

    def build_model(self):
        return nn.Linear(self.width, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_source(self, partition):
        return [1.0, 2.0]

    def training_step(self, model, batch, batch_idx):
        return model(batch).mean()


def without(name: str) -> type[Task]:
    written = {n: getattr(Complete, n) for n in REQUIRED if n != name}
    return type("Lacking", (Task,), written)


def test_a_complete_task_is_accepted():
    assert check_task_class(Complete, "m:Complete") is Complete
    assert check_task_class(type("Derived", (Complete,), {}), "m:Derived").__name__ == "Derived"


class KeepsConfig(Complete):
    def __init__(self):
        self.config = {"width": 4}


class HasDevices(Complete):
    @property
    def devices(self):
        return ["cpu"]


@pytest.mark.parametrize(
    ("task_class", "named"), [(KeepsConfig, r"KeepsConfig has an attribute config \(dict\)"), (HasDevices, "devices")]
)
def test_an_attribute_that_the_run_would_replace_is_refused(task_class, named):
    with pytest.raises(TaskError, match=f"{named}.*, which the run sets before it calls a method; rename it"):
        make_task(config_from_mapping({"task": "m:C"}), [], task_class)
    assert make_task(config_from_mapping({"task": "m:C"}), [], Complete).width == 4
    passes_on = type("PassesOn", (Complete,), {"__getattr__": lambda self, name: name})
    assert make_task(config_from_mapping({"task": "m:C"}), [], passes_on)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_method_that_is_missing_is_named_with_its_signature(name):
    with pytest.raises(TaskError, match=f"^task \\(m:C\\) lacks {name}; write {name}\\(self"):
        check_task_class(without(name), "m:C")
    arguments = {"build_model": 0, "build_optimizer": 1, "train_source": 1, "training_step": 3}[name]
    with pytest.raises(TaskError, match=f"^Lacking lacks {name}; write {name}\\(self"):
        getattr(without(name)(), name)(*[None] * arguments)


@pytest.mark.parametrize(
    ("name", "method", "arguments"),
    [
        ("validation_step", lambda self, model, batch: {}, "self, model, batch, valid_batch_idx, batch_idx"),
        ("on_train_start", lambda: None, "self"),
        ("on_epoch_end", lambda self, epoch, extra: None, "self, epoch"),
        ("training_step", lambda self, *, model, batch: None, "self, model, batch, batch_idx"),
    ],
)
def test_a_method_with_other_arguments_is_refused_at_the_start(name, method, arguments):
    with pytest.raises(TaskError, match=rf"^task \(m:C\): {name}\(.*\) cannot be called .* {name}\({arguments}\)$"):
        check_task_class(type("Other", (Complete,), {name: method}), "m:C")


@pytest.mark.parametrize(
    "method", [lambda self, *arguments: None, lambda self, number=0: None, staticmethod(lambda epoch: None), Mock()]
)
def test_a_method_may_take_more_than_it_is_given(method):
    check_task_class(type("Other", (Complete,), {"on_epoch_end": method}), "m:C")


@pytest.mark.parametrize("other", [nn.Linear, Complete(), None, "m:C", lambda: None])
def test_an_object_that_is_no_task_is_refused(other):
    with pytest.raises(TaskError, match=r"it must be a class derived from paramserver\.Task"):
        check_task_class(other, "m:C")


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Complete(), {}),
        (Complete(7), {"width": 7}),
        (Complete(width=7, lr=0.5), {"width": 7, "lr": 0.5}),
        (Complete(7, depth=2, kwargs=1), {"width": 7, "depth": 2, "kwargs": 1}),
    ],
)
def test_a_task_returns_the_arguments_that_create_an_equal_one(task, expected):
    assert task.keyword_arguments() == expected
    assert Complete(**task.keyword_arguments()).keyword_arguments() == expected


def test_arguments_without_a_name_cannot_be_passed_on():
    class Listing(Complete):
        def __init__(self, *widths) -> None:
            self.widths = widths

    assert Listing().keyword_arguments() == {}
    with pytest.raises(TaskError, match="Listing: argument widths has no name"):
        Listing(1, 2).keyword_arguments()


def test_a_task_without_a_constructor_takes_no_arguments():
    class Bare(Task):
        pass

    assert Bare().keyword_arguments() == {}
    with pytest.raises(TypeError, match=r"Bare\(\) takes no arguments"):
        Bare(width=3)


def test_a_constructor_that_changes_the_current_folder_changes_no_path_of_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()

    class Moves(Complete):
        def __init__(self, folder: str) -> None:
            os.chdir(folder)

    construct_task(Moves, "m:Moves", {"folder": "data"})
    assert Path.cwd() == tmp_path
    assert len(caplog.messages) == 1


def test_a_constructor_that_ends_the_process_is_described():
    with pytest.raises(
        TaskError, match=r"^task \(m:Ends\): the task\(\*\*task_args\) raised: SystemExit: no data; raise"
    ):
        construct_task(Mock(side_effect=SystemExit("no data")), "m:Ends", {})


def test_optional_methods_have_defaults():
    task = Complete()
    assert task.build_scheduler(None) is None
    assert task.validation_source(Partition(0, 1)) is None
    assert task.process_sample("sample") == "sample"
    assert torch.equal(task.collate([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert list(task.devices) == [torch.device("cpu")]
    for name, arguments in (
        ("on_train_start", 0),
        ("on_epoch_start", 1),
        ("on_batch_start", 1),
        ("on_batch_end", 1),
        ("on_validation_start", 1),
        ("on_validation_end", 1),
        ("on_epoch_end", 1),
        ("on_checkpoint", 1),
        ("on_resume", 1),
        ("on_train_end", 0),
    ):
        assert getattr(task, name)(*[{}] * arguments) is None
    with pytest.raises(TaskError, match="Complete has a validation_source but no validation_step"):
        task.validation_step(None, None, 0, 0)


def test_only_unchanged_batching_is_default():
    assert uses_default_batching(Complete())
    for name in ("process_sample", "collate"):
        assert not uses_default_batching(type("Own", (Complete,), {name: lambda self, x: x})())
        task = Complete()
        setattr(task, name, lambda x: x)
        assert not uses_default_batching(task)


def test_a_number_is_logged_by_the_trainer():
    class Trainer:
        def log(self, name, value, reduce):
            self.logged = name, value, reduce

    task = Complete()
    with pytest.raises(TaskError, match=r"self\.log\('gradient'\) was called where no trainer runs"):
        task.log("gradient", 1.0)
    task.trainer = Trainer()
    task.log("gradient", 1.0)
    assert task.trainer.logged == ("gradient", 1.0, "mean")
    task.log("largest", 2.0, reduce="max")
    assert task.trainer.logged == ("largest", 2.0, "max")


@pytest.mark.parametrize(
    ("role", "calls"),
    [
        (None, 1),
        (Role(0, "server", server_index=0), 0),
        (Role(1, "trainer", trainer_index=0), 1),
        (Role(2, "trainer", trainer_index=1), 0),
    ],
)
def test_rank_zero_only_runs_on_one_trainer(role, calls):
    called = []

    @rank_zero_only
    def save(path: str) -> str:
        called.append(path)
        return "saved"

    set_role(role)
    try:
        assert save("a") == ("saved" if calls else None)
    finally:
        set_role(None)
    assert len(called) == calls
    assert save.__name__ == "save"


@pytest.mark.parametrize(("global_rank", "calls"), [(0, 0), (1, 0), (2, 1), (3, 0)])
def test_rank_zero_only_holds_in_the_constructor_of_a_task(tmp_path, global_rank, calls):
    called = []

    class Refuses(Task):
        def __init__(self):
            rank_zero_only(called.append)(global_rank)
            raise TaskError("no task")

    cluster = {"num_servers": 2, "num_trainers": 2}
    config = config_from_mapping({"task": "m:C", "mode": "rpc", "cluster": cluster})
    identity = ProcessIdentity(global_rank, 4, global_rank, 4, 0, "127.0.0.1", 0, False, "job", "flags")
    with pytest.raises(TaskError, match="no task"):
        run_rank(RankPlan(config, identity, [tmp_path], create_task=Refuses))
    assert len(called) == calls


def with_generator(method):
    @functools.wraps(method)
    def call(self, *arguments):
        return method(self, *arguments, torch.Generator())

    return call


def test_a_decorator_may_add_an_argument():
    class Decorated(Complete):
        @with_generator
        def training_step(self, model, batch, batch_idx, generator):
            return model(batch).mean()

    assert check_task_class(Decorated, "m:Decorated") is Decorated


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "on_batch_start",
            None,
            r"on_batch_start \(NoneType\) must be a method; write on_batch_start\(self, batch_idx\)",
        ),
        ("callbacks", [Callback()], r"callbacks \(list\) must be a method; write callbacks\(self\), or leave it out"),
    ],
)
def test_an_attribute_in_the_place_of_a_method_is_refused(name, value, message):
    with pytest.raises(TaskError, match=rf"^task \(m:C\): {message}"):
        check_task_class(type("Other", (Complete,), {name: value}), "m:C")
    check_task_class(type("Other", (Complete,), {name: property(lambda self: len)}), "m:C")


def test_callbacks_in_an_attribute_of_the_object_are_refused():
    task = Complete()
    task.callbacks = [Callback()]
    for one in (task, type("Other", (Complete,), {"callbacks": property(lambda self: [Callback()])})()):
        with pytest.raises(TaskError, match=r"\.callbacks \(list\) must be a method; write callbacks\(self\), which"):
            make_callbacks(one)


def test_a_frozen_dataclass_is_refused_by_name():
    @dataclasses.dataclass(frozen=True)
    class Frozen(Complete):
        width: int = 4

    Frozen(3)
    with pytest.raises(TaskError, match=r"^task \(m:Frozen\) must be no frozen dataclass"):
        check_task_class(Frozen, "m:Frozen")


class Validated(Callback):
    def __init__(self):
        self.seen = {}

    def state_dict(self):
        return dict(self.seen)

    def load_state_dict(self, state):
        self.seen = dict(state)


def test_a_callback_that_outlives_a_loss_returns_to_an_empty_state():
    callbacks = {"Validated": Validated(), "Callback": Callback()}
    state = task_state(Complete(), callbacks)
    assert state == {"paramserver.callbacks": {"Validated": {}}}
    callbacks["Validated"].seen[6] = 1
    restore_task(Complete(), {"random": None, "task": state}, callbacks)
    assert callbacks["Validated"].seen == {}


@pytest.mark.parametrize(("random", "called"), [(None, 0), ({"cpu": 0}, 1)])
def test_a_part_of_a_trainer_that_was_lost_before_the_first_checkpoint_has_no_state(random, called):
    class Resumed(Complete):
        resumed = 0

        def on_resume(self, state):
            self.resumed += 1

    task = Resumed()
    restore_task(task, {"random": random, "task": {}}, {})
    assert task.resumed == called


def test_an_attribute_that_a_property_lacks_is_the_one_that_is_named():
    class Scaled(Complete):
        @property
        def factor(self):
            return self.options.factor

    with pytest.raises(AttributeError, match=r"^Scaled has no attribute 'options'$"):
        _ = Scaled().factor
