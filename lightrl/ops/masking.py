"""Masked sums, means, variances, and whitening, on one process or exactly over all ranks; padding.

Values outside the mask are never read, so they may be NaN or infinite. Functions with `all_sum` call it a fixed number
of times, so ranks with unequal or no data stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def pad_rows(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
    """Right-pads B sequences of unequal length to a (B, T) tensor, where T is the longest length.

    Args:
        rows: B sequences of numbers.
        value: Padding value.
        dtype: Dtype of the result.
    """
    length = max((len(row) for row in rows), default=0)
    out = torch.full((len(rows), length), value, dtype=dtype)
    for i, row in enumerate(rows):
        if len(row):
            out[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return out
