"""Entropy as a tool: which tokens have the most of it over the whole batch, and a coefficient that steers it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightrl.ops.masking import AllSum, identity


def top_entropy_mask(entropy: Tensor, mask: Tensor, fraction: float, *, all_sum: AllSum = identity) -> Tensor:
    """The tokens of highest entropy: the top `ceil(fraction * N)` of all N tokens of all ranks, and ties with the last.

    Args:
        entropy: (B, T) in nats, at least 0, without graph.
        mask: (B, T) bool, tokens that count.
        fraction: of the tokens to keep, in (0, 1]; the paper's is 0.2.
        all_sum: sums over ranks; called three times.

    Returns:
        (B, T) bool, a subset of `mask`.

    Raises:
        ValueError: fraction is out of range.

    Source: https://arxiv.org/abs/2506.01939, eq. 5. Losses of the others become 0 while the normaliser still counts
        them, as in the paper. TRL interpolates the quantile; LightRFT keeps a fraction of each sequence and never
        passes the fraction to its trainer.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction}: must be in (0, 1]; 1 keeps every token.")
    count = int(all_sum(mask.sum().double()))
    entropy = entropy.detach().float().clamp(min=0) + 0.0  # no negative zero: its bits would sort last
    threshold = kth_largest(entropy, mask, math.ceil(fraction * count), all_sum=all_sum)
    return mask & (entropy >= threshold)


def kth_largest(x: Tensor, mask: Tensor, k: int, *, all_sum: AllSum = identity) -> Tensor:
    """The k-th largest of the masked values of all ranks, exactly, with two summed histograms and no gathering.

    Bits of floats that are not negative sort as the floats do, so the upper 15 bits are found first, then the lower 16.

    Args:
        x: float32, any shape, none negative. mask: bool, same shape. k: 1 for the largest; the same on every rank.
        all_sum: sums over ranks; called twice.

    Returns:
        float32 scalar; the smallest value of all if there are fewer than k, 0 if there are none.
    """
    keys = x.contiguous().view(torch.int32)[mask].long()
    upper, above = _find(keys >> 16, 1 << 15, k, all_sum)
    lower, _ = _find(keys[keys >> 16 == upper] & 0xFFFF, 1 << 16, k - above, all_sum)
    return torch.tensor((upper << 16) | lower, dtype=torch.int32, device=x.device).view(torch.float32)


def _find(keys: Tensor, size: int, k: int, all_sum: AllSum) -> tuple[int, int]:
    """The bin that holds the k-th largest key, and how many keys lie above that bin."""
    counts = torch.zeros(size, dtype=torch.float64, device=keys.device)
    counts = all_sum(counts.index_add_(0, keys, torch.ones_like(keys, dtype=torch.float64)))
    at_least = counts.flip(0).cumsum(0).flip(0)
    target = min(float(k), float(at_least[0]))
    bin_ = int((at_least >= target).nonzero()[-1]) if target > 0 else 0
    return bin_, int(at_least[bin_] - counts[bin_])


def adaptive_entropy_coef(
    coef: float, entropy: float, target: float, *, step: float = 0.001, minimum: float = 0.0, maximum: float = 1.0
) -> float:
    """The next coefficient of the entropy bonus: up by `step` where the entropy is at or below target, else down.

    The bonus itself is applied in steps whose entropy is at or below target only.

    Args:
        coef: the present one. entropy: mean over the batch's tokens, in nats. target: in nats, at least 0.
        step: above 0. minimum, maximum: bounds of the result.

    Returns:
        the coefficient for the next step, in [minimum, maximum].

    Raises:
        ValueError: an argument is out of range.

    Source: Skywork-OR1, https://arxiv.org/abs/2505.22312, section 4.
    """
    if not (step > 0 and target >= 0 and minimum <= maximum):
        raise ValueError(
            f"adaptive_entropy_coef(step={step}, target={target}, minimum={minimum}, maximum={maximum}): needs "
            "step > 0, target >= 0 and minimum <= maximum."
        )
    return min(max(coef + (step if entropy <= target else -step), minimum), maximum)
