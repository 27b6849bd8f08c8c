"""Advantages: temporal differences over a response's tokens, and statistics over a prompt's group of responses.

A *score* is one number per sequence, (B,); rows with `valid=False` have no score, take no part in any statistic and end
with advantage 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Differences between scores up to this fraction of the largest score of their group are rounding, not spread."""
SMALLEST_SCALE = 1e-6
"""The scale of a group whose scores are smaller: sums such as 0.1 + 0.2 - 0.3 leave 6e-17 instead of 0."""


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the masked tokens of each sequence, which need not be contiguous.

        delta_t = r_t + gamma * V_next(t) - V_t
        A_t     = delta_t + gamma * lam * A_next(t)
        R_t     = A_t + V_t

    next(t) is the next token on the mask; V and A are 0 after the last one.

    Args:
        rewards: (B, T) float; read on the mask only.
        values: (B, T) float, V of the state before token t is sampled; read on the mask only.
        mask: (B, T) bool, tokens the policy sampled. A token off the mask inside a response (a tool's answer) is
            skipped: no discount, no bootstrap through its value.
        gamma: discount per sampled token, in [0, 1]. lam: in [0, 1]; 1 is the Monte-Carlo return minus V.

    Returns:
        (B, T) advantages and (B, T) returns, both 0 off the mask, not normalised, without gradient.

    Source: https://arxiv.org/abs/1506.02438, eq. 11-16. TRL and LightRFT zero the masked tokens instead of skipping
        them, which discounts through them and bootstraps from values that were never trained.
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
    """Discounted sum of the rewards from each token on, masked tokens skipped: `R_t = r_t + gamma * R_next(t)`.

    Args and result as in `gae`, whose special case V = 0, lam = 1 it is. (B, T), 0 off the mask.
    Source: REINFORCE, https://doi.org/10.1007/BF00992696.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


class GroupStats(NamedTuple):
    """Statistics of each row's group over its valid rows, every field (B,).

    Attributes:
        size: number of valid rows. mean: 0 in a group without one.
        std: unbiased (`n - 1`), 0 in a group of fewer than two.
        varied: bool, whether the scores of the group differ by more than rounding (`ROUNDING`). This is the one
            definition of a group with spread, for estimators, metrics, and dynamic sampling.
    """

    size: Tensor
    mean: Tensor
    std: Tensor
    varied: Tensor


def group_stats(scores: Tensor, groups: Tensor, valid: Tensor, weights: Tensor | None = None) -> GroupStats:
    """Count, mean and unbiased std of the scores of each group, given back per row.

    Args:
        scores: (B,) float; what invalid rows hold is not read.
        groups: (B,) int64, any labels in any order; rows of a group need not be neighbours.
        valid: (B,) bool.
        weights: (B,) float, at least 0, for a weighted mean; the std stays unweighted around the plain mean.

    Returns:
        `GroupStats` on the device and in the dtype of `scores`.
    """
    _, index = torch.unique(groups, return_inverse=True)
    num_groups = int(index.max()) + 1 if index.numel() else 0
    clean = torch.where(valid, scores, torch.zeros_like(scores)).double()

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(num_groups).index_add_(0, index, x)[index]

    ones = valid.double()
    count = total(ones)
    plain = total(clean) / count.clamp(min=1)
    deviation = torch.where(valid, clean - plain, torch.zeros_like(clean))
    std = (total(deviation.square()) / (count - 1).clamp(min=1)).sqrt()
    mean = plain
    if weights is not None:
        w = torch.where(valid, weights, torch.zeros_like(weights)).double()
        mean = total(w * clean) / total(w).clamp(min=torch.finfo(torch.float64).tiny)
    low, high = (
        clean.new_full((num_groups,), start).scatter_reduce_(0, index[valid], clean[valid], how)[index]
        for start, how in ((torch.inf, "amin"), (-torch.inf, "amax"))
    )
    scale = torch.maximum(low.abs(), high.abs()).clamp(min=SMALLEST_SCALE)
    dtype = scores.dtype
    return GroupStats(count.to(dtype), mean.to(dtype), std.to(dtype), high - low > ROUNDING * scale)


def group_centered(scores: Tensor, stats: GroupStats, valid: Tensor) -> Tensor:
    """`r - mean` of the row's group, exactly 0 (no rounding left over) where the group has no spread or one row.

    Args:
        scores: (B,) float. stats: of the same rows. valid: (B,) bool.

    Returns:
        (B,), 0 on invalid rows.
    """
    return torch.where(valid & stats.varied, scores - stats.mean, torch.zeros_like(scores))


def leave_one_out(scores: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """Score minus the mean of the *other* scores of the group: `r_i - (sum_j r_j - r_i) / (n - 1)`.

    Computed as the equal `n / (n - 1) * (r_i - mean)`.

    Args:
        scores: (B,) float. groups: (B,) int64. valid: (B,) bool.

    Returns:
        (B,), 0 on invalid rows and in groups of one.

    Source: https://arxiv.org/abs/2402.14740, section 3; https://openreview.net/forum?id=r1lgTGL5DE.
    """
    stats = group_stats(scores, groups, valid)
    return group_centered(scores, stats, valid) * stats.size / (stats.size - 1).clamp(min=1)


def spread(scores: Tensor, mask: Tensor) -> Tensor:
    """(B, T) tensor that holds each sequence's score, (B,), on its masked tokens and 0 elsewhere."""
    return torch.where(mask, scores[:, None], torch.zeros((), dtype=scores.dtype, device=scores.device))


def optimal_baseline(scores: Tensor, groups: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """Score minus the length-weighted mean of its group: `r_i - sum_j l_j r_j / sum_j l_j`.

    Minimises the gradient's variance if the squared norm of a response's score function grows with its length.

    Args:
        scores: (B,) float. groups: (B,) int64. valid: (B,) bool. lengths: (B,) number of sampled tokens.

    Returns:
        (B,), 0 on invalid rows and in groups without spread.

    Source: OPO, https://arxiv.org/abs/2505.23585.
    """
    return group_centered(scores, group_stats(scores, groups, valid, lengths), valid)


def pass_at_k(successes: Tensor, groups: Tensor, valid: Tensor, k: int) -> Tensor:
    """Mean normalised pass@k reward over all k-subsets of the group that contain the row.

    With n rows, f failures, `q = C(f, k) / C(n, k)` and `std = sqrt(q * (1 - q))`: a success gets `q / std`, a failure
    `(q - C(f - 1, k - 1) / C(n - 1, k - 1)) / std`.

    Args:
        successes: (B,) float, 1 or 0. groups: (B,) int64. valid: (B,) bool. k: at least 1.

    Returns:
        (B,), 0 on invalid rows, where std is 0, and in groups of fewer than k rows. Sums to 0 over a group.

    Source: https://arxiv.org/abs/2508.10751, eq. 9-15.
    """
    stats = group_stats(successes, groups, valid)
    n = stats.size.double()
    failures = (n * (1 - stats.mean.double())).round()
    steps = torch.arange(k, dtype=torch.float64, device=n.device)
    # C(f, k) / C(n, k) = prod_j (f - j) / (n - j); one factor is 0 as soon as f < k, so later ones may be negative
    factors = (failures[:, None] - steps).clamp(min=0) / (n[:, None] - steps).clamp(min=1)
    none_pass, others_fail = factors.prod(1), _others_fail(failures, n, steps)
    std = (none_pass * (1 - none_pass)).sqrt()
    raw = torch.where(successes > 0, none_pass, none_pass - others_fail) / std.clamp(min=1e-12)
    keep = valid & (n >= k) & (std > 0)
    return torch.where(keep, raw, torch.zeros_like(raw)).to(successes.dtype)


def _others_fail(failures: Tensor, n: Tensor, steps: Tensor) -> Tensor:
    """`C(f - 1, k - 1) / C(n - 1, k - 1)` per row, for k = len(steps): the k - 1 others of a failure's subset fail."""
    tops = (failures[:, None] - 1 - steps[:-1]).clamp(min=0)
    return (tops / (n[:, None] - 1 - steps[:-1]).clamp(min=1)).prod(1)
