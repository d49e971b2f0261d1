"""Gradients on their way out: what arrives is what the parameters hold at the end, whatever left before."""

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paramserver import Task
from paramserver.parameters.flat import FlatLayout, trainable_parameters
from paramserver.parameters.sharding import full_shard
from paramserver.trainers.base import overrides
from paramserver.trainers.push import GradientBuckets, GradientPush
from paramserver.transport.base import GradientBucket
from paramserver.transport.compression import CastCodec
from paramserver.transport.rpc import RpcTrainerTransport

SMALL = 600  # bytes: most parameters of the models here travel alone


class Sent:
    """Where messages go: a copy of each as it was when it left, and whether backward was going on."""

    def __init__(self, model, flat_bytes=SMALL):
        self.parameters = trainable_parameters(model)
        self.layout = FlatLayout.of(self.parameters.items(), flat_bytes)
        self.transport = RpcTrainerTransport(
            self.layout, [full_shard(self.layout)], CastCodec(torch.float32), list(self.parameters.values())
        )
        self.messages, self.during, self.in_backward = {}, [], False
        self.buckets = GradientBuckets(self.transport, list(self.parameters.values()), self.send)

    def send(self, early):
        self.messages[early] = self.transport.bucket_tensor(early).clone()
        if self.in_backward:
            self.during.append(early)

    def backward(self, loss):
        self.in_backward = True
        loss.backward()
        self.in_backward = False

    def arrived(self):
        """By name: the last of each message, and what goes with the context."""
        pulled = [torch.zeros(n, requires_grad=True) for n in self.layout.sizes]
        self.transport.backward_root(pulled).backward()
        assert [flat.grad is None for flat in pulled] == [False] + [True] * len(self.transport.buckets)
        flats = [pulled[0].grad, *(self.messages[GradientBucket(0, n)] for n in range(1, len(self.layout.sizes)))]
        return self.layout.views(flats)

    def check(self):
        for name, got in self.arrived().items():
            gradient = self.parameters[name].grad
            assert torch.equal(got, torch.zeros_like(got) if gradient is None else gradient), name


def layers(*sizes):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def halved_unseen(parameter):
    parameter.grad.data.mul_(0.5)


@pytest.fixture
def sent():
    torch.manual_seed(1)
    made = Sent(layers(5, 20, 20, 20, 3))
    yield made
    made.buckets.close()


def loss_of(made, seed=0):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(4, 5, generator=generator)
    names = iter(made.parameters.values())
    for weight, bias in zip(names, names, strict=True):
        value = torch.tanh(value @ weight.T + bias)
    return value.pow(2).sum()


def test_messages_leave_while_backward_goes_on(sent):
    assert len(sent.transport.buckets) > 2
    sent.buckets.start()
    sent.backward(loss_of(sent))
    assert sorted(sent.during, key=lambda bucket: bucket.flat_index) == list(sent.transport.buckets)
    assert sent.buckets.finish() is None
    assert len(sent.during) == len(sent.transport.buckets)  # none twice
    sent.check()


def test_nothing_leaves_before_it_is_awaited(sent):
    sent.backward(loss_of(sent))
    assert sent.messages == {}
    assert sent.buckets.finish() is None
    sent.check()
    sent.parameters["0.weight"].grad.zero_()
    sent.backward(loss_of(sent))  # finish has ended what begin began
    assert sent.during == []


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.grad.mul_(0.5),
        lambda p: setattr(p, "grad", p.grad * 2),
        lambda p: setattr(p, "grad", None),
        lambda p: torch.nn.utils.clip_grad_norm_([p], 1e-3),
    ],
    ids=["in place", "another", "none", "clipped"],
)
def test_what_was_changed_since_it_left_leaves_again(sent, change):
    sent.buckets.start()
    sent.backward(loss_of(sent))
    change(sent.parameters["2.weight"])
    before = len(sent.during)
    used = sent.buckets.finish()
    assert before == len(sent.during) == len(sent.transport.buckets)
    assert (used is None) == all(p.grad is not None for p in sent.parameters.values())
    sent.check()


def test_a_second_backward_of_the_same_step_counts(sent):
    sent.buckets.start()
    sent.backward(loss_of(sent, 1))
    sent.backward(loss_of(sent, 2))
    sent.buckets.finish()
    sent.check()


def test_a_hook_that_comes_later_may_change_gradients_unseen(sent):
    """Through ``grad.data``; the messages of other parameters leave early all the same."""
    parameter = sent.parameters["2.weight"]
    hook = parameter.register_post_accumulate_grad_hook(halved_unseen)
    sent.buckets.start()
    sent.backward(loss_of(sent))
    assert len(sent.during) == len(sent.transport.buckets) - 1
    sent.buckets.finish()
    sent.check()
    hook.remove()
    sent.buckets.start()
    sent.during.clear()
    sent.backward(loss_of(sent))
    assert len(sent.during) == len(sent.transport.buckets)


def test_a_parameter_without_a_gradient_holds_up_only_its_own_message(sent):
    sent.buckets.start()
    names = ["2.weight", "3.weight", "3.bias"]
    sent.backward(sum(sent.parameters[name].sum() for name in names))
    assert 0 < len(sent.during) < len(sent.transport.buckets)
    assert sent.buckets.finish() == tuple(name in names for name in sent.parameters)
    sent.check()


def test_what_the_last_step_left_does_not_come_again(sent):
    sent.buckets.start()
    sent.backward(loss_of(sent))
    sent.buckets.finish()
    for parameter in sent.parameters.values():
        parameter.grad = None
    sent.buckets.start()
    sent.backward(sent.parameters["2.weight"].sum())
    sent.buckets.finish()
    sent.check()


def test_closed_it_leaves_the_parameters_as_they_were(sent):
    sent.buckets.close()
    sent.buckets.start()
    sent.backward(loss_of(sent))
    assert sent.during == []


@pytest.mark.parametrize("seed", range(40))
def test_any_steps_of_any_model(seed):
    """Random layers and sizes of messages; micro-batches, frozen parts, changes after backward."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return int(torch.randint(n, (), generator=generator))

    torch.manual_seed(seed)
    made = Sent(layers(5, *(1 + draw(30) for _ in range(1 + draw(5)))), flat_bytes=4 * (1 + draw(1000)))
    for step in range(5):
        for parameter in made.parameters.values():
            parameter.grad = None
        batches = 1 + draw(3)
        for batch in range(batches):
            if batch == batches - 1 and draw(4):
                made.buckets.start()
            part = [p.sin().sum() for p in made.parameters.values() if draw(5)] if draw(3) == 0 else []
            made.backward(sum(part[1:], part[0]) if part else loss_of(made, step))
        for parameter in made.parameters.values():
            if draw(8) == 0 and parameter.grad is not None:
                parameter.grad.add_(1.0)
        made.buckets.finish()
        made.check()
    made.buckets.close()


def test_a_hook_is_seen_wherever_it_is_written():
    class Derived(Task):
        def on_batch_end(self, batch_idx):
            pass

    plain, own, derived = object.__new__(Task), object.__new__(Task), object.__new__(Derived)
    own.on_batch_end = print
    assert [overrides(task, Task.on_batch_end) for task in (plain, own, derived)] == [False, True, True]


def test_bytes_that_go_again_are_counted_again():
    transport = SimpleNamespace(bucket_tensor=lambda _: torch.zeros(10), buckets={})
    server = SimpleNamespace(send_bucket=lambda *_: SimpleNamespace(wait=lambda: None))
    pull = SimpleNamespace(server=server, transport=transport, version=3, wire_bytes=0)
    pull.model_copy = SimpleNamespace(parameters={})
    push = GradientPush(pull)
    transport.buckets = defaultdict(list)
    for early, counted in (
        (GradientBucket(0, 1), 0),
        (GradientBucket(0, 2), 0),
        (GradientBucket(0, 1), 40),
        (GradientBucket(0, 1), 80),
    ):
        push._send_bucket(early)
        assert pull.wire_bytes == counted
