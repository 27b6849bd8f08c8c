"""Sums, means, variances, and whitening over a mask, on one process or exactly over all ranks; padding.

Values off the mask are never read, so they may be NaN or infinite. Every function that takes `all_sum` calls it a fixed
number of times, so ranks with unequal (or no) data stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

AllSum = Callable[[Tensor], Tensor]
"""Sum of a tensor over ranks, on every rank; the identity on one process."""


def identity(tensor: Tensor) -> Tensor:
    """The `all_sum` of a single process."""
    return tensor


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `x` where `mask`, added up in float64 so that it hardly depends on the order or the cut of the batch.

    Args:
        x: values, any shape, float.
        mask: bool, same shape.
        dim: sum over this dimension only; over everything where None.

    Returns:
        float64 tensor without `dim` (scalar where None); 0 where nothing is selected.
    """
    kept = torch.where(mask, x, torch.zeros_like(x))
    return kept.sum(dtype=torch.float64) if dim is None else kept.sum(dim, dtype=torch.float64)


def masked_moments(x: Tensor, mask: Tensor, *, all_sum: AllSum = identity) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and unbiased variance of all selected values, in two passes (no cancellation for a large mean).

    Args:
        x: values, any shape, float.
        mask: bool, same shape.
        all_sum: sums over ranks; called twice.

    Returns:
        float64 scalars (count, mean, variance). Variance is 0 where fewer than two values are selected.
    """
    local = torch.stack([masked_sum(torch.ones_like(x), mask), masked_sum(x, mask)])
    count, total = all_sum(local).unbind()
    mean = total / count.clamp(min=1)
    squares = all_sum(masked_sum((x.double() - mean) ** 2, mask))
    return count, mean, squares / (count - 1).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8, all_sum: AllSum = identity) -> Tensor:
    """Whitening over the mask: `(x - mean) / (std + eps)`, the std unbiased.

    Args:
        x: values, any shape, float.
        mask: bool, same shape.
        eps: added to the std, above 0.
        all_sum: sums over ranks, so that the moments are those of the global batch.

    Returns:
        as `x`, 0 off the mask. With fewer than two values the std is 0: a lone value becomes 0.

    Source: https://arxiv.org/abs/1909.08593 (and OpenAI's `lm-human-preferences`). It divides by `sqrt(var + 1e-8)`
        with the population variance of one process; here the variance is unbiased and that of all ranks.
    """
    _, mean, var = masked_moments(x, mask, all_sum=all_sum)
    whitened = ((x.double() - mean) / (var.sqrt() + eps)).to(x.dtype)
    return torch.where(mask, whitened, torch.zeros_like(x))


def pad_rows(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
    """Right-pads rows of unequal length to a (B, T) tensor, T being that of the longest.

    Args:
        rows: B sequences of numbers.
        value: what to fill with.
        dtype: of the result.
    """
    length = max((len(row) for row in rows), default=0)
    out = torch.full((len(rows), length), value, dtype=dtype)
    for i, row in enumerate(rows):
        if len(row):
            out[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return out
