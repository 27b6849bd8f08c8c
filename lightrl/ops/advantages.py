"""Masked and group statistics of tokens and scores, on one process or exactly over all ranks.

Values outside the mask are never read, so they may be NaN or infinite. Functions with `all_sum` call it a fixed number
of times, so ranks with unequal or no data stay in step.

A *score* is one number per sequence, (B,). Rows with `valid=False` have no score, are excluded from all statistics, and
get advantage 0.
"""

from __future__ import annotations

import math
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
        Tensor like `x`, 0 outside the mask. A single selected value becomes 0. If the mean is 0, values of 0 stay 0.

    Source: https://arxiv.org/abs/1909.08593 and OpenAI's `lm-human-preferences`, which divides by `sqrt(var + 1e-8)`
        with the population variance of one process. Here, the variance is unbiased and covers all ranks.
    """
    _, mean, var = masked_moments(x, mask, all_sum=all_sum)
    mean = mean * (mean.abs() > ROUNDING * var.sqrt())  # a mean of rounding errors would give flat groups a sign
    return torch.where(mask, ((x.double() - mean) / (var.sqrt() + eps)).to(x.dtype), torch.zeros_like(x))


ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Score differences up to this fraction of the group's largest score count as rounding, not spread."""
SMALLEST_SCALE = 1e-6
"""Minimum scale of a group's scores: sums such as 0.1 + 0.2 - 0.3 give 6e-17 instead of 0."""


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


def spread(scores: Tensor, mask: Tensor) -> Tensor:
    """Expands (B,) scores to (B, T): each sequence's score on its masked tokens, 0 elsewhere."""
    return torch.where(mask, scores[:, None], torch.zeros((), dtype=scores.dtype, device=scores.device))


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

    Args:
        x: Nonnegative float32 values of any shape, whose bits sort like the values.
        mask: bool, same shape.
        k: Rank of the value, 1 for the largest. Must be equal on all ranks.
        all_sum: Sum over ranks, called 31 times.

    Returns:
        float32 scalar. 0 if there are fewer than k values.
    """
    keys, found = x.contiguous().view(torch.int32)[mask], 0
    for bit in reversed(range(31)):
        higher = found | 1 << bit
        if int(all_sum((keys >= higher).sum().double())) >= max(k, 1):
            found = higher
    return torch.tensor(found, dtype=torch.int32, device=x.device).view(torch.float32)
