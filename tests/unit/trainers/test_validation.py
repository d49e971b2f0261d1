"""Distributed validation: the shares, the exact mean, and a training that is not affected."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from paramserver import Partition, Task
from paramserver.config import Config, TrainingConfig
from paramserver.errors import PeerLost, TaskError
from paramserver.metrics.records import merge_sums
from paramserver.trainers.validation import eval_mode, evaluate, validation_batches

CPU = torch.device("cpu")


class Mean(Task):
    """Reports the mean of its samples; ``returned`` in place of it."""

    def __init__(self, data=None, returned=None) -> None:
        self.data = data
        self.returned = returned
        self.calls = []

    def validation_source(self, partition):
        return self.data(partition) if callable(self.data) else self.data

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        self.calls.append((valid_batch_idx, batch_idx, torch.is_grad_enabled(), model.training))
        return {"x": batch.double().mean()} if self.returned is None else self.returned


def config(**training) -> Config:
    return Config(training=TrainingConfig(**{"batch_size": 4, **training}))


def batches_of(task: Task, index: int = 0, count: int = 1, **training):
    return validation_batches(task, Partition(index, count), config(**training))


def evaluated(task: Task, batches, model=None, precision="float32"):
    return evaluate(task, nn.Linear(1, 1) if model is None else model, batches, 17, lambda b: b, precision, CPU)


def numbers(count: int) -> list[float]:
    return [float(i * i) for i in range(count)]


@pytest.mark.parametrize("length", [1, 2, 3, 10, 37])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_shares_together_hold_every_sample_once(length, count):
    task = Mean(TensorDataset(torch.arange(length)))
    task.collate = lambda samples: [int(s[0]) for s in samples]
    shares = [list(batches_of(task, i, count)) for i in range(count)]
    assert sorted(s for share in shares for batch, _ in share for s in batch) == list(range(length))
    assert all(n == len(batch) <= 4 for share in shares for batch, n in share)


@pytest.mark.parametrize("length", [1, 7, 37])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_mean_over_all_shares_is_exact(length, count):
    values = numbers(length)
    parts = {}
    for index in range(count):
        task = Mean(values)
        parts[index] = evaluated(task, batches_of(task, index, count))
    merged = merge_sums(parts)
    assert merged.samples == length
    assert merged.means() == {"x": sum(values) / length}


def test_an_iterable_is_this_trainers_own_share():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(numbers(6))

    for data in (lambda p: iter(numbers(6)), Stream()):
        task = Mean(data)
        assert [n for _, n in batches_of(task, 1, 2)] == [4, 2]
        assert evaluated(task, batches_of(task, 1, 2)).samples == 6


def test_the_batch_size_of_validation_may_be_its_own():
    assert [n for _, n in batches_of(Mean(numbers(9)), validation_batch_size=5)] == [5, 4]


def test_samples_are_processed_and_collated_by_the_task():
    class Own(Mean):
        def process_sample(self, sample):
            return sample + 1

        def collate(self, samples):
            return torch.tensor([samples])

    task = Own([1.0, 2.0, 3.0])
    assert evaluated(task, batches_of(task)).means() == {"x": 3.0}


def test_samples_that_cannot_be_stacked_are_named():
    task = Mean([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(TaskError, match=r"a batch of validation_source: samples .* DataLoader with a collate_fn"):
        evaluated(task, batches_of(task))


def test_a_task_may_have_no_validation():
    assert batches_of(Mean(None)) is None
    assert evaluated(Mean(), ()).means() == {}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_size": 2}, range(7)),
        ({"batch_size": 2, "shuffle": True}, range(7)),
        ({"batch_size": 2, "sampler": SubsetRandomSampler([1, 4, 5])}, [1, 4, 5]),
        ({"batch_sampler": [[0, 6], [1], [2, 3, 4]]}, [0, 1, 2, 3, 4, 6]),
    ],
)
def test_a_data_loader_is_taken_apart(count, options, expected):
    loader = DataLoader(range(7), collate_fn=tuple, **options)
    shares = [list(batches_of(Mean(loader), i, count, batch_size=32)) for i in range(count)]
    assert sorted(s for share in shares for batch, _ in share for s in batch) == list(expected)
    assert all(len(batch) == n for share in shares for batch, n in share)
    assert max((n for share in shares for _, n in share)) <= (2 if "batch_size" in options else 3)


@pytest.mark.parametrize("options", [{"sampler": [2, 0, 2, 2, 1]}, {"batch_sampler": [[2, 0], [2, 2], [1]]}])
def test_a_sampler_may_repeat_samples(options):
    loader = DataLoader(
        TensorDataset(torch.arange(3.0)), **({"batch_size": 2} if "sampler" in options else {}), **options
    )
    task = Mean(loader)
    task.collate = lambda samples: [int(s[0]) for s in samples]
    assert [batch for batch, _ in batches_of(task)] == [[2, 0], [2, 2], [1]]


def test_a_data_loader_over_an_iterable_is_read_at_each_validation_without_changing_random_numbers():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(numbers(5))

    batches, before = (
        batches_of(Mean(DataLoader(Stream(), 2, collate_fn=list, num_workers=1, timeout=9))),
        torch.get_rng_state(),
    )
    for _ in range(2):
        assert list(batches) == [([0.0, 1.0], 2), ([4.0, 9.0], 2), ([16.0], 1)]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("data", "kind"), [(7, "int"), (object(), "object")])
def test_an_object_that_is_no_data_is_refused(data, kind):
    with pytest.raises(TaskError, match=f"validation_source returned {kind}; it must return a map-style data set"):
        batches_of(Mean(data))


def test_a_data_set_without_a_sample_is_refused_and_a_share_without_one_is_not():
    for data in ([], torch.utils.data.TensorDataset(torch.empty(0, 1))):
        with pytest.raises(TaskError, match=f"validation_source returned {type(data).__name__} without a sample; ret"):
            batches_of(Mean(data))
    assert list(batches_of(Mean([1.0]), 1, 2)) == []


def test_a_source_without_a_step_is_refused_before_the_run():
    class Half(Task):
        def validation_source(self, partition):
            return [1.0]

    with pytest.raises(TaskError, match="Half has a validation_source but no validation_step; write"):
        batches_of(Half())


def test_validation_step_gets_a_model_in_eval_mode_and_both_counts():
    task = Mean(numbers(6))
    evaluated(task, batches_of(task))
    assert task.calls == [(0, 17, False, False), (1, 17, False, False)]


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_step_runs_in_the_precision_of_the_training(precision, dtype):
    class Typed(Mean):
        def validation_step(self, model, batch, valid_batch_idx, batch_idx):
            self.dtype = model(torch.ones(1, 1)).dtype
            return {}

    task = Typed(numbers(1))
    evaluated(task, batches_of(task), precision=precision)
    assert task.dtype is dtype


@pytest.mark.parametrize("value", [torch.tensor(2), torch.tensor([2.0]), 2, 2.0, True, torch.tensor(2.0).numpy()])
def test_a_metric_is_one_number(value):
    task = Mean(numbers(2), {"x": value})
    assert evaluated(task, batches_of(task)).means() == {"x": float(value)}


class Total:
    def __init__(self):
        self.reset()

    def reset(self):
        self.total = 0.0

    def update(self, value):
        self.total += value

    def merge_state(self, other):
        self.total += other.total

    def compute(self):
        return self.total


def test_one_metric_with_two_names_has_its_value_under_both():
    metric = Total()
    metric.update(3.0)
    task = Mean(numbers(2), {"x": metric, "y": metric})
    assert evaluated(task, batches_of(task)).means() == {"x": 3.0, "y": 3.0}
    assert metric.total == 0.0


def test_a_metric_does_not_keep_what_it_got_in_an_evaluation_that_is_ended():
    class Ends(Mean):
        metric = Total()

        def validation_step(self, model, batch, valid_batch_idx, batch_idx):
            self.metric.update(3.0)
            if valid_batch_idx == 1:
                raise PeerLost("server 0")
            return {"x": self.metric}

    with pytest.raises(PeerLost):
        evaluated(task := Ends(numbers(8)), batches_of(task))
    assert task.metric.total == 0.0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (0.5, "returned float; it must return a dict of name: mean over the batch"),
        ([("x", 1.0)], "returned list"),
        ({"x": torch.ones(3)}, r"x has shape \(3,\); each value must be one number, the mean"),
        ({"x": "high"}, "x is 'high'; each value must be one number"),
        ({"x": 1.0, 0: 1.0}, "the name 0 must be text"),
        ({"x": [1.0]}, r"x is \[1\.0\]; each value must be one number"),
    ],
)
def test_a_value_that_is_no_metric_is_refused(returned, message):
    task = Mean(numbers(2), returned)
    with pytest.raises(TaskError, match=f"^validation_step, batch 0: {message}"):
        evaluated(task, batches_of(task))


@pytest.mark.parametrize("fails", [False, True])
def test_the_mode_of_every_module_is_restored(fails):
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Sequential(nn.Dropout(), nn.Linear(1, 1)))
    model[1][0].eval()  # frozen by the user
    before = [module.training for module in model.modules()]
    assert before == [True, True, True, False, True]
    try:
        with eval_mode(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            if fails:
                raise RuntimeError("in the middle")
    except RuntimeError:
        assert fails
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


class Merging(nn.Module):
    """Adds its adapter to its weight in ``eval()``, and takes it away in ``train()``, as layers of LoRA do."""

    def __init__(self):
        super().__init__()
        self.weight, self.adapter, self.merged = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1)), False

    def train(self, mode=True):
        if self.merged == mode:
            self.merged = not mode
            self.weight.data += self.adapter.data * (-1 if mode else 1)
        return super().train(mode)


def test_what_a_layer_does_in_eval_is_undone():
    frozen, layer, outer = Merging().eval(), Merging(), Merging()
    model = nn.Sequential(nn.Sequential(frozen, layer), outer, nn.Sequential(layer, nn.Dropout()))
    model[2].training = False
    before = [module.training for module in model.modules()]
    with eval_mode(model):
        assert layer.weight.item() == outer.weight.item() == frozen.weight.item() == 2
    assert (layer.weight.item(), outer.weight.item(), frozen.weight.item()) == (1, 1, 2)
    assert [module.training for module in model.modules()] == before


def test_validation_does_not_change_the_random_state():
    task = Mean(numbers(9))
    loader, model = batches_of(task), nn.Linear(1, 1)
    state = torch.get_rng_state()
    for _ in range(3):
        evaluated(task, loader, model)
    assert torch.equal(torch.get_rng_state(), state)
