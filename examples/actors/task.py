"""The learner: an actor and a critic that are trained with V-trace on the unrolls of actors.

Espeholt et al., "IMPALA", ICML 2018 (https://arxiv.org/abs/1802.01561), with a small network.
"""

from __future__ import annotations

from typing import Any

import torch
from actor import Policy, play
from environment import ACTIONS, OBSERVATION, make
from torch import Tensor, nn
from vtrace import vtrace

from paramserver import Task
from paramserver.sources import Simulations

VALIDATION_SEED = 1983


class ActorCritic(nn.Module):
    """Two networks of one hidden layer, which share nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(OBSERVATION, width), nn.Tanh(), nn.Linear(width, ACTIONS))
        self.value = nn.Sequential(nn.Linear(OBSERVATION, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Map observations [..., 5] to logits of actions [..., 2] and values [...]."""
        return self.policy(observations), self.value(observations).squeeze(-1)


class Actors(Task):
    """Trains on unrolls, and plays episodes to validate.

    Args:
        target: return of the validation with which the run ends.
        width: of the hidden layers.
        lr: learning rate of Adam, of the policy.
        value_lr: that of the values.
        discount: gamma.
        entropy_cost: weight of the entropy of the policy.
        reward_scale: factor of rewards, so that values are near 1.
        episodes: number of episodes of a validation.
    """

    def __init__(
        self,
        target: float = 475.0,
        width: int = 64,
        lr: float = 3e-3,
        value_lr: float = 1e-2,
        discount: float = 0.997,
        entropy_cost: float = 0.01,
        reward_scale: float = 0.01,
        episodes: int = 20,
    ) -> None:
        self.target, self.width, self.lr, self.value_lr = target, width, lr, value_lr
        self.discount, self.entropy_cost, self.reward_scale = discount, entropy_cost, reward_scale
        self.episodes = episodes

    def build_model(self) -> nn.Module:
        return ActorCritic(self.width)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": model.policy.parameters(), "lr": self.lr},
            {"params": model.value.parameters(), "lr": self.value_lr},
        ]
        return torch.optim.Adam(groups)

    def train_source(self, partition: Any) -> Any:
        return Simulations()

    def validation_source(self, partition: Any) -> Any:
        return torch.arange(self.episodes)

    def training_step(self, model: nn.Module, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, values = model(torch.cat([batch["observations"], batch["last_observation"][:, None]], dim=1))
        log_policy = logits[:, :-1].log_softmax(dim=-1)
        taken = log_policy.gather(-1, batch["actions"][..., None]).squeeze(-1)
        targets, advantages = vtrace(
            taken.detach() - batch["log_probabilities"],
            batch["rewards"] * self.reward_scale,
            self.discount * (1 - batch["terminations"]),
            values.detach(),
        )
        entropy = -(log_policy.exp() * log_policy).sum(dim=-1)
        critic = (targets - values[:, :-1]).square()
        return (0.5 * critic - advantages * taken - self.entropy_cost * entropy).mean()

    def validation_step(
        self, model: nn.Module, batch: Tensor, valid_batch_idx: int, batch_idx: int
    ) -> dict[str, float]:
        """Play an episode for each number of the batch, with the most probable actions; return the mean return."""
        policy = Policy({name: tensor.numpy() for name, tensor in model.state_dict().items()})
        returns = [play(policy, make((VALIDATION_SEED, number))) for number in batch.tolist()]
        return {"return": sum(returns) / len(returns)}

    def on_validation_end(self, batch_idx: int) -> None:
        reached = self.trainer.validation["return"]
        if reached >= self.target:
            self.trainer.stop(f"the return is {reached:.0f}, and the target {self.target:.0f}")
