"""V-trace, for a policy that is newer than the one that has acted.

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures", ICML 2018
(https://arxiv.org/abs/1802.01561).
"""

from __future__ import annotations

import torch
from torch import Tensor


def vtrace(
    log_ratios: Tensor,
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the targets of values, and the advantages with which log probabilities of actions are weighted.

    Targets are those of equation 1, computed from the last step to the first as in remark 1. An advantage is ``rho_s
    (r_s + gamma v_{s+1} - V(x_s))``, as in section 4.2. On-policy, that is with ``log_ratios`` of 0, targets are
    n-step returns (equation 2). There is no gradient.

    Args:
        log_ratios: log of pi(a|x) / mu(a|x), [batch, n]; pi is the policy that is trained, mu that of the actor.
        rewards: [batch, n].
        discounts: [batch, n]; 0 where the episode ended.
        values: V(x) of n + 1 observations, [batch, n + 1].
        clip_rho: the largest rho, by which the fixed point is determined.
        clip_c: the largest c, by which the speed of contraction is determined.

    Returns:
        Targets and advantages, [batch, n] each.

    Example::

        >>> ones = torch.ones(1, 2)
        >>> targets, _ = vtrace(torch.zeros(1, 2), ones, 0.5 * ones, torch.tensor([[7.0, 7.0, 4.0]]))
        >>> targets  # 1 + 0.5 * (1 + 0.5 * 4), and 1 + 0.5 * 4
        tensor([[2.5000, 3.0000]])
    """
    with torch.no_grad():
        ratios = log_ratios.exp()
        rho, c = ratios.clamp(max=clip_rho), ratios.clamp(max=clip_c)
        deltas = rho * (rewards + discounts * values[:, 1:] - values[:, :-1])
        excess = [torch.zeros_like(values[:, -1])]  # v_s - V(x_s), from the last to the first
        for s in reversed(range(rewards.shape[1])):
            excess.append(deltas[:, s] + discounts[:, s] * c[:, s] * excess[-1])
        targets = values + torch.stack(excess[::-1], dim=1)
        advantages = rho * (rewards + discounts * targets[:, 1:] - values[:, :-1])
        return targets[:, :-1], advantages
