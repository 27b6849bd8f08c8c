"""Losses per token, (B, T), not yet aggregated: clipped policy loss, clipped value loss, explained variance.

A loss is minimised; a term to maximise comes with a minus sign.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightrl.ops.masking import AllSum, identity, masked_moments


class ClippedLoss(NamedTuple):
    """A clipped loss and where its clips are active, that is, where they take the gradient away. All (B, T).

    Attributes:
        loss: float. low: bool, A < 0 and the ratio below `1 - eps_low`. high: bool, A > 0 and the ratio above
            `1 + eps_high`. cap: bool, A < 0 and the ratio above the dual clip.
    """

    loss: Tensor
    low: Tensor
    high: Tensor
    cap: Tensor


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> ClippedLoss:
    """PPO's pessimistic surrogate, with bounds of its own on either side and an optional cap for A < 0.

        L = max(-A * ratio, -A * clip(ratio, 1 - eps_low, 1 + eps_high))
        L = min(L, -A * dual_clip)     where A < 0 and dual_clip is given

    Args:
        ratio: (B, T) or any shape, pi / pi_old, differentiable.
        advantages: same shape, or one that broadcasts.
        eps_low: in [0, 1]; 1 - eps_low is the lower bound. eps_high: at least 0; 1 + eps_high is the upper bound.
        dual_clip: largest ratio that still counts for A < 0, above 1; None turns it off.

    Returns:
        `ClippedLoss`.

    Source: PPO https://arxiv.org/abs/1707.06347 eq. 7; asymmetric bounds: DAPO https://arxiv.org/abs/2503.14476 eq. 10;
        dual clip https://arxiv.org/abs/1912.09729 eq. 5; INTELLECT-2's two-sided delta
        (https://arxiv.org/abs/2505.07291, section 3.4) is the same function for delta > 1 + eps_high.
    """
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    negative, positive = advantages < 0, advantages > 0
    cap = torch.zeros_like(negative & (ratio > 0))
    if dual_clip is not None:
        loss = torch.where(negative, torch.minimum(loss, -advantages * dual_clip), loss)
        cap = negative & (ratio > dual_clip)
    return ClippedLoss(loss, negative & (ratio < 1 - eps_low), positive & (ratio > 1 + eps_high), cap)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """The critic's squared error, pessimistic over a trust region around the old values.

        L = 0.5 * max((V - R)**2, (clip(V, V_old - eps, V_old + eps) - R)**2)

    Args:
        values: (B, T), differentiable. old_values: (B, T), at the start of the update. returns: (B, T) targets.
        mask: (B, T) bool.
        clip_eps: eps, above 0, in units of the return; None leaves `0.5 * (V - R)**2`.

    Returns:
        (B, T) loss, 0 off the mask, and (B, T) float without graph, 1 where the clip takes the gradient away: V has
        left the region towards its target, so that the clipped error is the larger one.

    Source: https://github.com/openai/baselines `ppo2/model.py`; https://arxiv.org/abs/2005.12729 on what it does.
    """
    zero = torch.zeros_like(values)
    values, old_values, returns = (torch.where(mask, x, zero) for x in (values, old_values, returns))
    plain = (values - returns).square()
    if clip_eps is None:
        return 0.5 * plain, zero.detach()
    bounded = (old_values + (values - old_values).clamp(-clip_eps, clip_eps) - returns).square()
    return 0.5 * torch.maximum(plain, bounded), (bounded > plain).to(values.dtype).detach()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, all_sum: AllSum = identity) -> Tensor:
    """How much of the returns' variance the critic explains: `1 - Var[R - V] / Var[R]` over the mask.

    Args:
        values, returns: (B, T). mask: (B, T) bool. all_sum: sums over ranks.

    Returns:
        scalar of the values' dtype; 1 is perfect, 0 no better than a constant, negative is worse than a constant.
        0 where the returns do not vary.
    """
    residual = masked_moments(returns - values, mask, all_sum=all_sum)[2]
    total = masked_moments(returns, mask, all_sum=all_sum)[2]
    explained = 1 - residual / total.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(total > 0, explained, torch.zeros_like(explained)).to(values.dtype)
