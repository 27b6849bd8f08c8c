"""Advantage estimators that compare the completions of one prompt with one another; the table is in `advantages`.

Letters: B sequences, T tokens, G sequences per group. The *score* of a sequence is the sum of its token rewards.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightrl.modules.estimator import AdvantageEstimator, Parts, SequenceEstimator, clean, positive
from lightrl.ops.advantages import group_centered, group_stats, leave_one_out, optimal_baseline, pass_at_k, spread
from lightrl.ops.masking import AllSum, identity, masked_moments, masked_sum, masked_whiten

__all__ = ["GDPO", "OPO", "RLOO", "GroupNorm", "MaxRL", "PassAtK", "ReinforcePlusPlusBaseline"]


class GroupNorm(SequenceEstimator):
    """Score relative to its group: `A_i = (s_i - mean) / (std + eps)`, the std unbiased. GRPO, Dr. GRPO and CPGD.

    A group of one valid row, or without spread, gets exactly 0. Dividing by the group's std weighs easy and hard
    prompts up and, with a KL in the loss, moves the optimum (see docs/algorithms.md); "none" does not.

    Args:
        scale: what is divided by: "group", the std of the row's group (GRPO, CPGD); "batch", the std of all scores of
            all ranks; "none", 1 (Dr. GRPO).
        eps: added to the std, above 0.

    Raises:
        ValueError: unknown scale, or eps is not above 0.

    Source: GRPO https://arxiv.org/abs/2402.03300 section 4.1.2; Dr. GRPO https://arxiv.org/abs/2503.20783; batch std
        https://arxiv.org/abs/2508.08221 section 4.1. The papers do not say which std; unbiased as TRL and verl have it.
    """

    needs_groups = True

    def __init__(self, scale: Literal["group", "batch", "none"] = "group", eps: float = 1e-4) -> None:
        if scale not in ("group", "batch", "none"):
            raise ValueError(f"GroupNorm(scale={scale!r}): must be 'group', 'batch' or 'none'.")
        self.scale = scale
        self.eps = positive("GroupNorm", "eps", eps)
        self.scope = "batch" if scale == "batch" else "group"
        self.normalizes = scale == "batch"

    def sequence_advantages(
        self, scores: Tensor, groups: Tensor, valid: Tensor, *, lengths: Tensor, all_sum: AllSum
    ) -> Tensor:
        """See the class."""
        stats = group_stats(scores, groups, valid)
        centered = group_centered(scores, stats, valid)
        if self.scale == "none":
            return centered
        if self.scale == "group":
            return centered / (stats.std + self.eps)
        std = masked_moments(scores, valid, all_sum=all_sum)[2].sqrt().to(scores.dtype)
        return centered / (std + self.eps)


class RLOO(SequenceEstimator):
    """Score minus the mean of the group's other scores: `A_i = s_i - (sum_j s_j - s_i) / (n - 1)`.

    Args:
        normalize: whiten the advantages over all sequences of all ranks (TRL's `normalize_advantages`).

    Source: https://arxiv.org/abs/2402.14740.
    """

    needs_groups = True

    def __init__(self, normalize: bool = False) -> None:
        self.normalizes = normalize
        self.scope = "batch" if normalize else "group"

    def sequence_advantages(
        self, scores: Tensor, groups: Tensor, valid: Tensor, *, lengths: Tensor, all_sum: AllSum
    ) -> Tensor:
        """See the class."""
        advantages = leave_one_out(scores, groups, valid)
        return masked_whiten(advantages, valid, eps=1e-4, all_sum=all_sum) if self.normalizes else advantages


class OPO(SequenceEstimator):
    """Score minus the variance-optimal baseline, the length-weighted group mean: `b = sum_j l_j s_j / sum_j l_j`.

    Meant for exactly on-policy training without a KL. The baseline contains the row's own score, so that the gradient
    is shrunk by about `1 - 1 / G`, as with GRPO's mean.
    Source: https://arxiv.org/abs/2505.23585, eq. 8.
    """

    needs_groups = True

    def sequence_advantages(
        self, scores: Tensor, groups: Tensor, valid: Tensor, *, lengths: Tensor, all_sum: AllSum
    ) -> Tensor:
        """See the class."""
        return optimal_baseline(scores, groups, valid, lengths)


class MaxRL(SequenceEstimator):
    """Maximum likelihood of success: `A_i = (s_i - mean) / mean`, 0 in a group without a success.

    In expectation the gradient of `sum_{k=1}^{G-1} 1/k * pass@k`, which tends to that of `log p(success)`: hard prompts
    weigh more. Scores must be 0 or 1 (anything at least 0 is computed the same way).

    Raises:
        ValueError: on call, a negative score.

    Source: https://arxiv.org/abs/2602.02710, algorithm 1.
    """

    needs_groups = True
    needs_binary_scores = True

    def sequence_advantages(
        self, scores: Tensor, groups: Tensor, valid: Tensor, *, lengths: Tensor, all_sum: AllSum
    ) -> Tensor:
        """See the class."""
        if bool((scores < 0).any()):
            raise ValueError(f"MaxRL: a score of {scores.min().item():.4g}: rewards must be 0 or 1. Use GroupNorm.")
        stats = group_stats(scores, groups, valid)
        centered = group_centered(scores, stats, valid)
        return torch.where(stats.mean > 0, centered / stats.mean.clamp(min=1e-12), torch.zeros_like(centered))


class PassAtK(SequenceEstimator):
    """Advantage of a sample for the best of k: pass@k as the reward of every k-subset of the group, in closed form.

    With n rows, f of them failures, `q = C(f, k) / C(n, k)`, `mean = 1 - q` and `std = sqrt(mean * (1 - mean))`:

        success: (1 - mean) / std        failure: (1 - mean - C(f - 1, k - 1) / C(n - 1, k - 1)) / std

    0 where std is 0 (every or no subset passes). Groups with fewer than k valid rows get 0.

    Args:
        k: samples per attempt, at least 1; needs `group_size >= k`.
        threshold: a score above it is a success.

    Raises:
        ValueError: k is below 1.

    Source: https://arxiv.org/abs/2508.10751, eq. 14-15.
    """

    needs_groups = True
    needs_binary_scores = True

    def __init__(self, k: int = 4, threshold: float = 0.5) -> None:
        if k < 1:
            raise ValueError(f"PassAtK(k={k}): must be at least 1.")
        self.k = k
        self.threshold = threshold

    def sequence_advantages(
        self, scores: Tensor, groups: Tensor, valid: Tensor, *, lengths: Tensor, all_sum: AllSum
    ) -> Tensor:
        """See the class."""
        return pass_at_k((scores > self.threshold).to(scores.dtype), groups, valid, self.k)


class GDPO(AdvantageEstimator):
    """Each reward function normalised in its group, then summed, then normalised over the batch.

        A_i = sum_k w_k * (r_ik - mean_k) / (std_k + eps),    A_i <- (A_i - mean_batch) / (std_batch + eps)

    A part that is NaN in a row takes no part in that part's statistics and adds 0 to the row. With `max_refills` groups
    are still judged by their summed rewards: one whose parts differ and cancel exactly is replaced.

    Args:
        eps: added to both stds, above 0.

    Raises:
        ValueError: eps is not above 0; on call, no reward parts, or a part without a weight.

    Source: https://arxiv.org/abs/2601.05242, eq. 4-6. It does not say which std; unbiased here as in TRL.
    """

    scope = "batch"
    needs_groups = True
    needs_reward_parts = True
    normalizes = True

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = positive("GDPO", "eps", eps)

    def __call__(
        self,
        rewards: Tensor,
        mask: Tensor,
        groups: Tensor,
        *,
        valid: Tensor | None = None,
        reward_parts: Parts | None = None,
        part_weights: dict[str, float] | None = None,
        all_sum: AllSum = identity,
        **unused: object,
    ) -> tuple[Tensor, None]:
        if not reward_parts:
            raise ValueError("GDPO: no reward parts: it needs reward functions, each giving its own reward.")
        missing = sorted(set(reward_parts) - set(part_weights or {}))
        if missing:
            raise ValueError(f"GDPO: reward parts without a weight: {missing}; part_weights={part_weights}.")
        _, valid = clean(rewards, mask, valid)
        total = torch.zeros(len(groups), dtype=rewards.dtype, device=rewards.device)
        for name, part in reward_parts.items():
            given = valid & ~part.isnan()
            scores = torch.where(given, part, torch.zeros_like(part)).to(rewards.dtype)
            stats = group_stats(scores, groups, given)
            total += (part_weights or {})[name] * group_centered(scores, stats, given) / (stats.std + self.eps)
        return spread(masked_whiten(total, valid, eps=self.eps, all_sum=all_sum), mask), None


class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """Score minus the group mean, then one normalisation over all tokens of all ranks.

        A_i = s_i - mean_group,    A_t <- (A_i - mean_tokens) / (std_tokens + 1e-8)

    Source: https://arxiv.org/abs/2501.03262, section 3.3 (which takes k2 in the loss as its KL).
    """

    scope = "batch"
    needs_groups = True
    normalizes = True

    def __call__(
        self,
        rewards: Tensor,
        mask: Tensor,
        groups: Tensor,
        *,
        valid: Tensor | None = None,
        all_sum: AllSum = identity,
        **unused: object,
    ) -> tuple[Tensor, None]:
        rewards, valid = clean(rewards, mask, valid)
        scores = masked_sum(rewards, mask, -1).to(rewards.dtype)
        stats = group_stats(scores, groups, valid)
        centered = group_centered(scores, stats, valid)
        compared = valid & (stats.size > 1)  # a row without a group has no baseline: 0, and left out of the moments
        return masked_whiten(spread(centered, mask), mask & compared[:, None], all_sum=all_sum), None
