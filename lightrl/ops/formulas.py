"""Statistics of tokens and groups, on one process or exactly over all ranks; KL estimates; and the clipped policy loss.

Values outside the mask are never read, so they may be NaN or infinite. Functions with `all_sum` call it a fixed number
of times, so ranks with unequal or no data stay in step.

A *score* is one number per sequence, (B,). Rows with `valid=False` have no score, are excluded from all statistics, and
get advantage 0.

KL estimators, with `d = log pi(a) - log pi_ref(a)` and `a ~ pi`:

    k1 = d                   unbiased, may be negative, high variance
    k2 = d**2 / 2            biased, correct gradient on-policy
    k3 = exp(-d) - 1 + d     unbiased, never negative

As a *number*, all three estimate `KL(pi || pi_ref)`. As a *loss*, with the gradient only through `log pi`, they differ
(a ~ pi):

    grad k1:  E[grad log pi] = 0                      no gradient, only noise
    grad k2:  E[d * grad log pi]                      gradient of the reverse KL(pi || pi_ref)
    grad k3:  E[(1 - pi_ref / pi) * grad log pi]      gradient of the forward KL(pi_ref || pi)

Source: http://joschu.net/blog/kl-approx.html for the estimators; https://arxiv.org/abs/2506.09477 and
    https://arxiv.org/abs/2510.01555 for the gradients; https://arxiv.org/abs/2512.02556 (DeepSeek-V3.2) for the ratio.
Nothing is clamped here. verl clamps d to +-20 and k3 to +-10, which also cuts the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

AllSum = Callable[[Tensor], Tensor]
"""Function that sums a tensor over ranks, on every rank. The identity on one process."""


def identity(tensor: Tensor) -> Tensor:
    """Returns its argument: `all_sum` of a single process."""
    return tensor


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sums float `x` over a bool `mask` of its shape in float64, which barely depends on order or batch splits.

    Over `dim` or, by default, all dimensions. 0 if nothing is selected.
    """
    kept = torch.where(mask, x, torch.zeros_like(x))
    return kept.sum(dtype=torch.float64) if dim is None else kept.sum(dim, dtype=torch.float64)


def masked_moments(x: Tensor, mask: Tensor, *, all_sum: AllSum = identity) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the count, mean, and unbiased variance of all selected values, in two passes for numerical stability.

    `x` is float, `mask` bool of the same shape, and `all_sum` is called twice. Returns float64 scalars. The variance is
    0 if fewer than two values are selected.
    """
    local = torch.stack([masked_sum(torch.ones_like(x), mask), masked_sum(x, mask)])
    count, total = all_sum(local).unbind()
    mean = total / count.clamp(min=1)
    squares = all_sum(masked_sum((x.double() - mean) ** 2, mask))
    return count, mean, squares / (count - 1).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8, all_sum: AllSum = identity) -> Tensor:
    """Whitens float values over a bool mask of their shape: `(x - mean) / (std + eps)`, with the unbiased std.

    Returns a tensor like `x`, 0 outside the mask. A single value becomes 0. If the mean is 0, values of 0 stay 0.

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
    """Statistics of each row's group over its valid rows, all (B,)."""

    size: Tensor  # number of valid rows
    mean: Tensor  # 0 in a group without valid rows
    std: Tensor  # unbiased; 0 in a group with fewer than two valid rows
    varied: Tensor  # scores differ by more than `ROUNDING`, also for metrics and dynamic sampling


def group_stats(scores: Tensor, groups: Tensor, valid: Tensor, weights: Tensor | None = None) -> GroupStats:
    """Computes the count, mean, and unbiased std of each group's scores, per row.

    Takes (B,) float scores, int64 labels of groups, whose rows don't have to be adjacent, and bool, False on rows to
    exclude. (B,) float `weights`, at least 0, apply to the mean; by default, they are equal. The std stays unweighted
    around the plain mean. The result has the device and dtype of `scores`.
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
    """(B,) score minus the group mean, exactly 0 on invalid rows, and if the group has no spread or one row."""
    return torch.where(valid & stats.varied, scores - stats.mean, torch.zeros_like(scores))


def spread(scores: Tensor, mask: Tensor) -> Tensor:
    """Expands (B,) scores to (B, T): each sequence's score on its masked tokens, 0 elsewhere."""
    return torch.where(mask, scores[:, None], torch.zeros((), dtype=scores.dtype, device=scores.device))


# ---- losses per token, to minimize -------------------------------------------------------------------------------

KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Bound on log-ratios before `exp`, since an infinite ratio turns a gradient of 0 into NaN."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Estimates `KL(pi || pi_ref)` per token from (B, T) log-probs in nats; (B, T), differentiable in `logprobs`."""
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"estimator={estimator!r}: must be 'k1', 'k2', or 'k3'.")


def ratio_corrected_kl(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k3"
) -> Tensor:
    """Token loss with the gradient of the reverse KL given a token's prefix, both on-policy and off-policy.

        k1, k3:  ratio * k          E_old[ratio * k] = E_pi[k] = KL(pi || ref), so the gradient is also correct
        k2:      stop(ratio) * k2   E_old[ratio * d * grad log pi]; the ratio's gradient would add a wrong term

    As `kl_estimate`; `old_logprobs` are (B, T) log-probs of the policy that sampled the tokens.

    Source: https://arxiv.org/abs/2512.02556, section "Unbiased KL estimate" (k3); TRL's `use_bias_correction_kl`.
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if estimator == "k2":
        ratio = ratio.detach()
    return ratio * kl_estimate(logprobs, ref_logprobs, estimator)


class ClippedLoss(NamedTuple):
    """A clipped loss, and indicators of active clips, which remove the gradient. All (B, T)."""

    loss: Tensor  # float
    low: Tensor  # bool, A < 0 and the ratio below `1 - eps_low`
    high: Tensor  # bool, A > 0 and the ratio above `1 + eps_high`
    cap: Tensor  # bool, A < 0 and the ratio above the dual clip


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> ClippedLoss:
    """PPO's clipped surrogate with separate lower and upper bounds, and an optional cap for A < 0.

        L = max(-A * ratio, -A * clip(ratio, 1 - eps_low, 1 + eps_high))
        L = min(L, -A * dual_clip)     if A < 0 and dual_clip is set

    `ratio` is pi / pi_old, (B, T) or any shape, differentiable; the advantages have the same shape, or one that
    broadcasts. `eps_low` is in [0, 1], `eps_high` at least 0. `dual_clip`, the maximum ratio for A < 0, is above 1;
    None disables it.

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
