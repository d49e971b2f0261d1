"""The outer optimizer of a config: its defaults, and what a checkpoint restores of it."""

import copy

import pytest
import torch
from torch import nn

from paramserver.config import ClusterConfig, Config, OuterConfig, ServerConfig, TrainingConfig
from paramserver.config.schema import OUTER_OPTIMIZERS
from paramserver.optim.outer import DelayedNesterov, OuterBuilder, round_weights, shared_optimizer, updates_per_round
from paramserver.optim.updater import Updater


def config(outer=None, local_steps=8, mode="rpc", trainers=4, **server):
    return Config(
        mode=mode,
        cluster=ClusterConfig(num_trainers=trainers),
        server=ServerConfig(**server),
        training=TrainingConfig(local_steps=local_steps, outer=None if outer is None else OuterConfig(**outer)),
    )


@pytest.mark.parametrize("name", OUTER_OPTIMIZERS)
def test_every_value_of_the_key_has_an_optimizer(name):
    assert OuterBuilder(config({"optimizer": name})).build_optimizer(nn.Linear(1, 1)).param_groups


@pytest.mark.parametrize(
    ("given", "name", "lr", "momentum"),
    [
        (config(), "sgd", 1.0, 0.0),
        (config(local_steps=64), "nesterov", 0.7, 0.9),
        (config({"momentum": 0.5}, local_steps=63), "sgd", 1.0, 0.5),
        (config({"optimizer": "nesterov"}), "nesterov", 0.7, 0.9),
        (config({"lr": 0.3}, consistency="async"), "sgd", 0.3, 0.0),
        (config(consistency="async"), "sgd", 0.25, 0.0),
        (config(consistency="bounded", local_steps=64), "nesterov", 0.175, 0.9),
        (config(consistency="async", arrivals=2), "sgd", 0.5, 0.0),
        (config(consistency="async", arrivals=8), "sgd", 1.0, 0.0),  # several rounds of a trainer, from one version
        (config(backup_trainers=1), "sgd", 1.0, 0.0),
        (config(mode="ddp", consistency="async"), "sgd", 1.0, 0.0),
        (config({"optimizer": "delayed_nesterov"}, consistency="async"), "delayed_nesterov", 0.7, 0.9),
    ],
)
def test_values_that_are_null_follow_from_the_consistency_and_the_local_steps(given, name, lr, momentum):
    builder = OuterBuilder(given)
    assert builder.name == name
    assert builder.hyperparameters["lr"] == pytest.approx(lr)
    assert builder.hyperparameters["momentum"] == momentum


@pytest.mark.parametrize(("consistency", "delay"), [("sync", 1), ("async", 4)])
def test_the_delay_is_the_number_of_updates_of_a_round(consistency, delay):
    builder = OuterBuilder(config({"optimizer": "delayed_nesterov"}, consistency=consistency))
    assert builder.hyperparameters["delay"] == delay == updates_per_round(config(consistency=consistency))


def test_with_a_delay_of_one_it_is_nesterovs_momentum():
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    optimizers = [
        DelayedNesterov(weights[:1], lr=0.7, momentum=0.9, delay=1),
        torch.optim.SGD(weights[1:], lr=0.7, momentum=0.9, nesterov=True),
    ]
    for _ in range(6):
        gradient = torch.randn(3, dtype=torch.float64)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    assert (weights[0] - weights[1]).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam", "delayed_nesterov"])
def test_a_checkpoint_restores_the_state_and_the_config_the_hyperparameters(name):
    def updater(lr):
        model = nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(1.0)
        given = config({"optimizer": name, "lr": lr, "momentum": 0.5})
        return Updater(shared_optimizer(None, given), model, given.training)

    def step(own):
        for parameter in own.parameters:
            parameter.grad = torch.full_like(parameter, 0.25)
        own.apply(1)

    first, other = updater(0.1), updater(0.2)
    for _ in range(3):
        step(first)
    stored = copy.deepcopy(first.state_dict())
    other.load_state_dict(stored)
    assert other.lr == (0.2,)
    states = other.state_dict()["optimizer"]["state"]
    assert states.keys() == stored["optimizer"]["state"].keys()
    for number, state in stored["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(states[number][key]), torch.as_tensor(value))


def test_weights_of_samples_have_the_mean_one():
    training = TrainingConfig(outer=OuterConfig(weighting="samples"))
    assert round_weights(training, [8, 8, 2]) == pytest.approx([4 / 3, 4 / 3, 1 / 3])
    assert round_weights(training, [0, 0]) == [1.0, 1.0]
    assert round_weights(TrainingConfig(local_steps=2), [8, 2]) == [1.0, 1.0]
