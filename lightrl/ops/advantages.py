"""Masked statistics, on one process or exactly over all ranks; advantages; and statistics over groups of responses.

Values outside the mask are never read, so they may be NaN or infinite. Functions with `all_sum` call it a fixed number
of times, so ranks with unequal or no data stay in step.

A *score* is one number per sequence, (B,). Rows with `valid=False` have no score, are excluded from all statistics, and
get advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

AllSum = Callable[[Tensor], Tensor]
"""Function that sums a tensor over ranks, on every rank. The identity on one process."""


def identity(tensor: Tensor) -> Tensor:
    """Returns its argument: `all_sum` of a single process."""
    return tensor


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sums `x` over `mask` in float64, so that the result barely depends on order or batch splits.

    Args:
        x: Float values of any shape.
        mask: bool, same shape.
        dim: Dimension to sum over. Defaults to all.

    Returns:
        float64 tensor without `dim`, or a scalar. 0 if nothing is selected.
    """
    kept = torch.where(mask, x, torch.zeros_like(x))
    return kept.sum(dtype=torch.float64) if dim is None else kept.sum(dim, dtype=torch.float64)


def masked_moments(x: Tensor, mask: Tensor, *, all_sum: AllSum = identity) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the count, mean, and unbiased variance of all selected values, in two passes for numerical stability.

    Args:
        x: Float values of any shape.
        mask: bool, same shape.
        all_sum: Sum over ranks, called twice.

    Returns:
        float64 scalars (count, mean, variance). The variance is 0 if fewer than two values are selected.
    """
    local = torch.stack([masked_sum(torch.ones_like(x), mask), masked_sum(x, mask)])
    count, total = all_sum(local).unbind()
    mean = total / count.clamp(min=1)
    squares = all_sum(masked_sum((x.double() - mean) ** 2, mask))
    return count, mean, squares / (count - 1).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8, all_sum: AllSum = identity) -> Tensor:
    """Whitens values over the mask: `(x - mean) / (std + eps)`, with the unbiased std.

    Args:
        x: Float values of any shape.
        mask: bool, same shape.
        eps: Constant added to the std, above 0.
        all_sum: Sum over ranks, for moments of the global batch.

    Returns:
        Tensor like `x`, 0 outside the mask. A single selected value becomes 0.

    Source: https://arxiv.org/abs/1909.08593 and OpenAI's `lm-human-preferences`, which divides by `sqrt(var + 1e-8)`
        with the population variance of one process. Here, the variance is unbiased and over all ranks.
    """
    _, mean, var = masked_moments(x, mask, all_sum=all_sum)
    whitened = ((x.double() - mean) / (var.sqrt() + eps)).to(x.dtype)
    return torch.where(mask, whitened, torch.zeros_like(x))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, all_sum: AllSum = identity) -> Tensor:
    """Fraction of the returns' variance explained by the critic: `1 - Var[R - V] / Var[R]` over the mask.

    Args:
        values: (B, T) values of the critic.
        returns: (B, T) returns.
        mask: (B, T) bool.
        all_sum: Sum over ranks.

    Returns:
        Scalar of the values' dtype. 1 is perfect, 0 no better than a constant, and negative worse than a constant. 0 if
        the returns don't vary.
    """
    residual = masked_moments(returns - values, mask, all_sum=all_sum)[2]
    total = masked_moments(returns, mask, all_sum=all_sum)[2]
    explained = 1 - residual / total.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(total > 0, explained, torch.zeros_like(explained)).to(values.dtype)


ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Score differences up to this fraction of the group's largest score count as rounding, not spread."""
SMALLEST_SCALE = 1e-6
"""Minimum scale of a group's scores: sums such as 0.1 + 0.2 - 0.3 give 6e-17 instead of 0."""


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
        groups: (B,) int64 labels. Rows of a group don't have to be adjacent.
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
