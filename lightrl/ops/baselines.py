"""Baselines over groups and from a critic, the critic's loss, and the selection of tokens by entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightrl.ops.formulas import AllSum, group_centered, group_stats, identity, masked_moments


def leave_one_out(scores: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """Score minus the mean of the *other* scores of the group: `r_i - (sum_j r_j - r_i) / (n - 1)`.

    Computed as the equivalent `n / (n - 1) * (r_i - mean)`. (B,), 0 on invalid rows and in groups of one. See
    `group_stats` for the arguments.

    Source: https://arxiv.org/abs/2402.14740, section 3; https://openreview.net/forum?id=r1lgTGL5DE.
    """
    stats = group_stats(scores, groups, valid)
    return group_centered(scores, stats, valid) * stats.size / (stats.size - 1).clamp(min=1)


def pass_at_k(successes: Tensor, groups: Tensor, valid: Tensor, k: int) -> Tensor:
    """Mean normalized pass@k reward over all k-subsets of the group that contain the row, k at least 1.

    With n rows, f failures, `q = C(f, k) / C(n, k)`, and `std = sqrt(q * (1 - q))`, a success scores `q / std`. A
    failure scores `(q - C(f - 1, k - 1) / C(n - 1, k - 1)) / std`. `successes` are (B,) float, 1 or 0; see
    `group_stats` for the others. Returns (B,), 0 on invalid rows, if std is 0, and in groups of fewer than k rows. Sums
    to 0 over a group.

    Source: https://arxiv.org/abs/2508.10751, eq. 9-15.
    """
    stats = group_stats(successes, groups, valid)
    n = stats.size.double()
    failures = (n * (1 - stats.mean.double())).round()
    steps = torch.arange(k, dtype=torch.float64, device=n.device)
    # C(f, k) / C(n, k) = prod_j (f - j) / (n - j); if f < k, one factor is 0, so later ones may be negative
    factors = (failures[:, None] - steps).clamp(min=0) / (n[:, None] - steps).clamp(min=1)
    tops = (failures[:, None] - 1 - steps[:-1]).clamp(min=0)
    none_pass, others_fail = factors.prod(1), (tops / (n[:, None] - 1 - steps[:-1]).clamp(min=1)).prod(1)
    std = (none_pass * (1 - none_pass)).sqrt()
    raw = torch.where(successes > 0, none_pass, none_pass - others_fail) / std.clamp(min=1e-12)
    keep = valid & (n >= k) & (std > 0)
    return torch.where(keep, raw, torch.zeros_like(raw)).to(successes.dtype)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the masked tokens of each sequence, which don't have to be contiguous.

        delta_t = r_t + gamma * V_next(t) - V_t
        A_t     = delta_t + gamma * lam * A_next(t)
        R_t     = A_t + V_t

    next(t) is the next masked token. V and A are 0 after the last one.

    Args:
        rewards: (B, T) float, read only on the mask.
        values: (B, T) float values of the state before token t is sampled, read only on the mask.
        mask: (B, T) bool, True on tokens sampled by the policy. Other tokens inside a response, such as tool results,
            are skipped: no discount, and no bootstrapping through their values.
        gamma: Discount per sampled token, in [0, 1].
        lam: Trade-off in [0, 1]. 1 is the Monte Carlo return minus V.

    Returns:
        (B, T) advantages and (B, T) returns, both 0 outside the mask, not normalized, without gradients.

    Source: https://arxiv.org/abs/1506.02438, eq. 11-16. TRL and LightRFT set masked-out tokens to 0 instead of skipping
        them, which discounts through them and bootstraps from untrained values.
    """
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(values.shape[0])
    next_advantage = torch.zeros_like(next_value)
    with torch.no_grad():
        for t in mask.any(0).nonzero().flatten().flip(0).tolist():
            on = mask[:, t]
            delta = rewards[:, t] + gamma * next_value - values[:, t]
            advantage = delta + gamma * lam * next_advantage
            next_advantage = torch.where(on, advantage, next_advantage)
            next_value = torch.where(on, values[:, t], next_value)
            advantages[:, t] = torch.where(on, advantage, torch.zeros_like(advantage))
        returns = torch.where(mask, advantages + values, torch.zeros_like(values))
    return advantages, returns


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of rewards from each token, skipping other tokens: `R_t = r_t + gamma * R_next(t)`.

    Same arguments as `gae`, whose special case V = 0, lam = 1 it is. Returns (B, T), 0 outside the mask.
    Source: REINFORCE, https://doi.org/10.1007/BF00992696.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """The critic's squared error, clipped pessimistically around the old values.

        L = 0.5 * max((V - R)**2, (clip(V, V_old - eps, V_old + eps) - R)**2)

    All are (B, T): differentiable values, the values at the start of the update, targets, and a bool mask. eps is above
    0, in units of the return. None uses `0.5 * (V - R)**2`.

    Returns:
        (B, T) loss, 0 outside the mask, and (B, T) float without graph, 1 on tokens whose gradient the clip removes: V
        has left the region toward its target, so the clipped error is larger.

    Source: https://github.com/openai/baselines `ppo2/model.py`; analysis in https://arxiv.org/abs/2005.12729.
    """
    zero = torch.zeros_like(values)
    values, old_values, returns = (torch.where(mask, x, zero) for x in (values, old_values, returns))
    plain = (values - returns).square()
    if clip_eps is None:
        return 0.5 * plain, zero.detach()
    bounded = (old_values + (values - old_values).clamp(-clip_eps, clip_eps) - returns).square()
    return 0.5 * torch.maximum(plain, bounded), (bounded > plain).to(values.dtype).detach()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, all_sum: AllSum = identity) -> Tensor:
    """Fraction of the returns' variance explained by the critic: `1 - Var[R - V] / Var[R]` over the mask.

    All are (B, T): values, returns, and a bool mask. Returns a scalar of the values' dtype. 1 is perfect, 0 no better
    than a constant, and negative worse than a constant. 0 if the returns don't vary.
    """
    residual = masked_moments(returns - values, mask, all_sum=all_sum)[2]
    total = masked_moments(returns, mask, all_sum=all_sum)[2]
    explained = 1 - residual / total.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(total > 0, explained, torch.zeros_like(explained)).to(values.dtype)


def top_entropy_mask(entropy: Tensor, mask: Tensor, fraction: float, *, all_sum: AllSum = identity) -> Tensor:
    """Selects the `ceil(fraction * N)` tokens of highest entropy out of all N tokens of all ranks, including ties.

    Args:
        entropy: (B, T) entropy in nats, at least 0, without graph.
        mask: (B, T) bool, True on tokens to select from.
        fraction: Fraction of tokens to keep, in (0, 1]. The paper uses 0.2.
        all_sum: Sum over ranks, called 32 times.

    Returns:
        (B, T) bool, a subset of `mask`.

    Source: https://arxiv.org/abs/2506.01939, eq. 5. As in the paper, the loss of other tokens is 0, but the normalizer
        counts them. TRL interpolates the quantile. LightRFT selects per sequence and doesn't pass the fraction to its
        trainer.
    """
    count = int(all_sum(mask.sum().double()))
    entropy = entropy.detach().float().clamp(min=0) + 0.0  # turns -0.0 into 0.0, whose bits sort correctly
    return mask & (entropy >= kth_largest(entropy, mask, math.ceil(fraction * count), all_sum=all_sum))


def kth_largest(x: Tensor, mask: Tensor, k: int, *, all_sum: AllSum = identity) -> Tensor:
    """Finds the exact k-th largest masked value of all ranks bit by bit, without gathering.

    `x` are nonnegative float32 values of any shape, whose bits sort like the values, and `mask` bool of that shape. k
    is 1 for the largest, and equal on all ranks. `all_sum` is called 31 times. Returns a float32 scalar, 0 if there are
    fewer than k values.
    """
    keys, found = x.contiguous().view(torch.int32)[mask], 0
    for bit in reversed(range(31)):
        higher = found | 1 << bit
        if int(all_sum((keys >= higher).sum().double())) >= max(k, 1):
            found = higher
    return torch.tensor(found, dtype=torch.int32, device=x.device).view(torch.float32)
