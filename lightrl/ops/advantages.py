"""Advantage functions: temporal differences over tokens, and statistics over groups of responses.

A *score* is one number per sequence, (B,). Rows with `valid=False` have no score, are excluded from all statistics, and
get advantage 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Score differences up to this fraction of the group's largest score count as rounding, not spread."""
SMALLEST_SCALE = 1e-6
"""Minimum scale of a group's scores: sums such as 0.1 + 0.2 - 0.3 give 6e-17 instead of 0."""


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the masked tokens of each sequence, which need not be contiguous.

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


class GroupStats(NamedTuple):
    """Statistics of each row's group over its valid rows, all (B,).

    Attributes:
        size: Number of valid rows.
        mean: Mean score, 0 in a group without valid rows.
        std: Unbiased standard deviation, 0 in a group with fewer than two valid rows.
        varied: Whether the group's scores differ by more than rounding (`ROUNDING`). Estimators, metrics, and dynamic
            sampling all use this definition of spread.
    """

    size: Tensor
    mean: Tensor
    std: Tensor
    varied: Tensor


def group_stats(scores: Tensor, groups: Tensor, valid: Tensor, weights: Tensor | None = None) -> GroupStats:
    """Computes the count, mean, and unbiased std of each group's scores, per row.

    Args:
        scores: (B,) float, not read on invalid rows.
        groups: (B,) int64 labels. Rows of a group need not be adjacent.
        valid: (B,) bool, False on rows to exclude.
        weights: (B,) float weights of the mean, at least 0. The std stays unweighted around the plain mean. Defaults to
            equal weights.

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
    """Score minus the group mean, exactly 0 if the group has no spread or one row.

    Args:
        scores: (B,) float scores.
        stats: Statistics of the same rows.
        valid: (B,) bool, False on rows to exclude.

    Returns:
        (B,), 0 on invalid rows.
    """
    return torch.where(valid & stats.varied, scores - stats.mean, torch.zeros_like(scores))


def leave_one_out(scores: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """Score minus the mean of the *other* scores of the group: `r_i - (sum_j r_j - r_i) / (n - 1)`.

    Computed as the equivalent `n / (n - 1) * (r_i - mean)`.

    Args:
        scores: (B,) float scores.
        groups: (B,) int64 labels.
        valid: (B,) bool, False on rows to exclude.

    Returns:
        (B,), 0 on invalid rows and in groups of one.

    Source: https://arxiv.org/abs/2402.14740, section 3; https://openreview.net/forum?id=r1lgTGL5DE.
    """
    stats = group_stats(scores, groups, valid)
    return group_centered(scores, stats, valid) * stats.size / (stats.size - 1).clamp(min=1)


def spread(scores: Tensor, mask: Tensor) -> Tensor:
    """Expands (B,) scores to (B, T): each sequence's score on its masked tokens, 0 elsewhere."""
    return torch.where(mask, scores[:, None], torch.zeros((), dtype=scores.dtype, device=scores.device))


def optimal_baseline(scores: Tensor, groups: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
    """Score minus the length-weighted mean of its group: `r_i - sum_j l_j r_j / sum_j l_j`.

    Minimizes the gradient's variance if the squared norm of a response's score function grows with its length.

    Args:
        scores: (B,) float scores.
        groups: (B,) int64 labels.
        valid: (B,) bool, False on rows to exclude.
        lengths: (B,) number of sampled tokens.

    Returns:
        (B,), 0 on invalid rows and in groups without spread.

    Source: OPO, https://arxiv.org/abs/2505.23585.
    """
    return group_centered(scores, group_stats(scores, groups, valid, lengths), valid)


def pass_at_k(successes: Tensor, groups: Tensor, valid: Tensor, k: int) -> Tensor:
    """Mean normalized pass@k reward over all k-subsets of the group that contain the row.

    With n rows, f failures, `q = C(f, k) / C(n, k)`, and `std = sqrt(q * (1 - q))`, a success gets `q / std`. A failure
    gets `(q - C(f - 1, k - 1) / C(n - 1, k - 1)) / std`.

    Args:
        successes: (B,) float, 1 or 0.
        groups: (B,) int64 labels.
        valid: (B,) bool, False on rows to exclude.
        k: Subset size, at least 1.

    Returns:
        (B,), 0 on invalid rows, if std is 0, and in groups of fewer than k rows. Sums to 0 over a group.

    Source: https://arxiv.org/abs/2508.10751, eq. 9-15.
    """
    stats = group_stats(successes, groups, valid)
    n = stats.size.double()
    failures = (n * (1 - stats.mean.double())).round()
    steps = torch.arange(k, dtype=torch.float64, device=n.device)
    # C(f, k) / C(n, k) = prod_j (f - j) / (n - j); if f < k, one factor is 0, so later ones may be negative
    factors = (failures[:, None] - steps).clamp(min=0) / (n[:, None] - steps).clamp(min=1)
    none_pass, others_fail = factors.prod(1), _others_fail(failures, n, steps)
    std = (none_pass * (1 - none_pass)).sqrt()
    raw = torch.where(successes > 0, none_pass, none_pass - others_fail) / std.clamp(min=1e-12)
    keep = valid & (n >= k) & (std > 0)
    return torch.where(keep, raw, torch.zeros_like(raw)).to(successes.dtype)


def _others_fail(failures: Tensor, n: Tensor, steps: Tensor) -> Tensor:
    """Returns `C(f - 1, k - 1) / C(n - 1, k - 1)` per row for k = len(steps): the rest of a failure's subset fails."""
    tops = (failures[:, None] - 1 - steps[:-1]).clamp(min=0)
    return (tops / (n[:, None] - 1 - steps[:-1]).clamp(min=1)).prod(1)
