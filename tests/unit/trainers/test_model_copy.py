"""What a trainer holds of the server's model: changes that are sent, and changes that are refused."""

import pytest
import torch
from torch import nn

from paramserver.errors import TaskError
from paramserver.parameters.flat import FlatLayout, trainable_parameters
from paramserver.trainers.model_copy import ModelCopy, find_trained


@pytest.fixture
def model():
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    return layers.requires_grad_(False), layers[0].requires_grad_(True)


@pytest.fixture
def copy(model):
    whole, _ = model
    refused = []
    copy = ModelCopy(whole, trainable_parameters(whole), before_refusal=lambda: refused.append(True))
    copy.refused = refused
    copy.loaded.note(values=True)
    return copy


def test_the_trained_parameters_are_in_the_order_of_the_layout(model):
    whole, first = model
    layout = FlatLayout.of([("0.bias", first.bias), ("0.weight", first.weight)])
    assert list(find_trained(whole, layout)) == ["0.bias", "0.weight"]
    with pytest.raises(TaskError, match=r"parameter 0.other of shape \(3,\) is on the server only"):
        find_trained(whole, FlatLayout.of([("0.other", torch.zeros(3))]))


def test_a_change_of_a_trained_parameter_is_refused(model, copy):
    copy.check_unchanged()
    assert copy.refused == []
    with pytest.raises(TaskError, match=r"parameter 0\.bias was changed"), copy.hooks_called(are_waiting=True):
        model[1].bias.data += 1
    assert copy.refused == [True]


def test_a_sparse_gradient_is_refused(model, copy):
    model[1].weight.grad = torch.zeros(2, 2).to_sparse()
    with pytest.raises(TaskError, match=r"gradient of parameter 0\.weight is sparse"):
        copy.check_gradients()


def test_changed_buffers_are_sent_once_by_the_trainer_whose_buffers_are_kept(model, copy):
    copy.load_buffers(copy.tree.pack_buffers())
    model[0][1].running_mean += 1
    assert copy.changed_buffers() is None
    copy.keeps_buffers = True
    assert copy.changed_buffers().values()["1.running_mean"].tolist() == [1.0, 1.0]
    assert copy.changed_buffers() is None


def test_frozen_parameters_are_sent_once_they_have_changed(model, copy):
    assert copy.extra_state() == {}
    model[0][2].bias.data += 1
    assert list(copy.extra_state()) == ["2.bias"]


def test_of_a_model_that_stays_on_the_server_there_is_nothing():
    copy = ModelCopy(nn.Module(), {})
    copy.keeps_buffers = True
    with copy.hooks_called(are_waiting=False):
        copy.check_unchanged()
    assert copy.changed_buffers() is None
    assert copy.extra_state() == {}
