"""Selection of high-entropy tokens, and an adaptive coefficient of the entropy bonus."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightrl.ops.advantages import AllSum, identity


def top_entropy_mask(entropy: Tensor, mask: Tensor, fraction: float, *, all_sum: AllSum = identity) -> Tensor:
    """Selects the `ceil(fraction * N)` tokens of highest entropy out of all N tokens of all ranks, including ties.

    Args:
        entropy: (B, T) entropy in nats, at least 0, without graph.
        mask: (B, T) bool, True on tokens to select from.
        fraction: Fraction of tokens to keep, in (0, 1]. The paper uses 0.2.
        all_sum: Sum over ranks, called three times.

    Returns:
        (B, T) bool, a subset of `mask`.

    Source: https://arxiv.org/abs/2506.01939, eq. 5. As in the paper, the loss of other tokens is 0, but the normalizer
        counts them. TRL interpolates the quantile. LightRFT selects per sequence and doesn't pass the fraction to its
        trainer.
    """
    count = int(all_sum(mask.sum().double()))
    entropy = entropy.detach().float().clamp(min=0) + 0.0  # turns -0.0 into 0.0, whose bits sort correctly
    threshold = kth_largest(entropy, mask, math.ceil(fraction * count), all_sum=all_sum)
    return mask & (entropy >= threshold)


def kth_largest(x: Tensor, mask: Tensor, k: int, *, all_sum: AllSum = identity) -> Tensor:
    """Finds the exact k-th largest masked value of all ranks with two summed histograms, without gathering.

    The bits of nonnegative floats sort like the floats, so it finds the upper 15 bits first, then the lower 16.

    Args:
        x: Nonnegative float32 values of any shape.
        mask: bool, same shape.
        k: Rank of the value, 1 for the largest. Must be equal on all ranks.
        all_sum: Sum over ranks, called twice.

    Returns:
        float32 scalar. The smallest value if there are fewer than k, 0 if there are none.
    """
    keys = x.contiguous().view(torch.int32)[mask].long()
    upper, above = _find(keys >> 16, 1 << 15, k, all_sum)
    lower, _ = _find(keys[keys >> 16 == upper] & 0xFFFF, 1 << 16, k - above, all_sum)
    return torch.tensor((upper << 16) | lower, dtype=torch.int32, device=x.device).view(torch.float32)


def _find(keys: Tensor, size: int, k: int, all_sum: AllSum) -> tuple[int, int]:
    """Returns the bin of the k-th largest key, and the number of keys above that bin."""
    counts = torch.zeros(size, dtype=torch.float64, device=keys.device)
    counts = all_sum(counts.index_add_(0, keys, torch.ones_like(keys, dtype=torch.float64)))
    at_least = counts.flip(0).cumsum(0).flip(0)
    target = min(float(k), float(at_least[0]))
    bin_ = int((at_least >= target).nonzero()[-1]) if target > 0 else 0
    return bin_, int(at_least[bin_] - counts[bin_])


def adaptive_entropy_coef(
    coef: float, entropy: float, target: float, *, step: float = 0.001, minimum: float = 0.0, maximum: float = 1.0
) -> float:
    """Updates the coefficient of the entropy bonus: up by `step` if the entropy is at or below the target, else down.

    The caller applies the bonus only in steps whose entropy is at or below the target.

    Args:
        coef: Current coefficient.
        entropy: Mean entropy over the batch's tokens, in nats.
        target: Target entropy in nats, at least 0.
        step: Change of the coefficient per step, above 0.
        minimum: Lower bound of the result.
        maximum: Upper bound of the result.

    Returns:
        Coefficient of the next step, in [minimum, maximum].

    Source: Skywork-OR1, https://arxiv.org/abs/2505.22312, section 4.
    """
    return min(max(coef + (step if entropy <= target else -step), minimum), maximum)
