"""Advantage estimators that no named algorithm uses: OPO, MaxRL, pass@k, and GDPO."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.objectives.estimators import AdvantageEstimator, AdvantageInput, SequenceEstimator
from lightrl.ops.advantages import group_centered, group_stats, masked_whiten, optimal_baseline, pass_at_k, spread


class OPO(SequenceEstimator):
    """Score minus the variance-optimal baseline, the length-weighted group mean: `b = sum_j l_j s_j / sum_j l_j`.

    Use it for exactly on-policy training without a KL penalty. The baseline includes the row's own score, which shrinks
    the gradient by about `1 - 1 / G`, as with GRPO's mean.
    Source: https://arxiv.org/abs/2505.23585, eq. 8.
    """

    needs_groups = True

    def sequence_advantages(self, given: AdvantageInput) -> Tensor:
        return optimal_baseline(given.scores, given.groups, given.valid, given.mask.sum(-1))


class MaxRL(SequenceEstimator):
    """Maximum likelihood of success: `A_i = (s_i - mean) / mean`, 0 in a group without a success.

    In expectation, this is the gradient of `sum_{k=1}^{G-1} 1/k * pass@k`, which approaches that of `log p(success)`.
    Hard prompts get more weight. Scores should be 0 or 1, but may be any nonnegative numbers.

    Raises:
        ValueError: A score is negative.

    Source: https://arxiv.org/abs/2602.02710, algorithm 1.
    """

    needs_groups = True
    needs_binary_scores = True

    def sequence_advantages(self, given: AdvantageInput) -> Tensor:
        scores = given.scores
        if bool((scores < 0).any()):
            raise ValueError(f"MaxRL: score={scores.min().item():.4g}: must not be negative. Use GroupRelative.")
        stats = group_stats(scores, given.groups, given.valid)
        centered = group_centered(scores, stats, given.valid)
        return torch.where(stats.mean > 0, centered / stats.mean.clamp(min=1e-12), torch.zeros_like(centered))


class PassAtK(SequenceEstimator):
    """Optimizes pass@k: the advantage for a best-of-k reward over all k-subsets of the group, in closed form.

    With n rows, f failures, `q = C(f, k) / C(n, k)`, `mean = 1 - q`, and `std = sqrt(mean * (1 - mean))`:

        success: (1 - mean) / std        failure: (1 - mean - C(f - 1, k - 1) / C(n - 1, k - 1)) / std

    The advantage is 0 if std is 0 (every or no subset passes), and in groups with fewer than k valid rows.

    Args:
        k: Number of samples per subset, at least 1 and at most `group_size`.
        threshold: Scores above it are successes.

    Source: https://arxiv.org/abs/2508.10751, eq. 14-15.
    """

    needs_groups = True
    needs_binary_scores = True

    def __init__(self, k: int = 4, threshold: float = 0.5) -> None:
        self.k = k
        self.threshold = threshold

    def sequence_advantages(self, given: AdvantageInput) -> Tensor:
        if int(given.groups.unique(return_counts=True)[1].max()) < self.k:
            raise ValueError(f"PassAtK.k={self.k}: every advantage is 0 in smaller groups. Set data.group_size to 2 k.")
        passed = (given.scores > self.threshold).to(given.scores.dtype)
        return pass_at_k(passed, given.groups, given.valid, self.k)


class GDPO(AdvantageEstimator):
    """Normalizes each reward function within its group, then the weighted sum over the batch.

        A_i = sum_k w_k * (r_ik - mean_k) / (std_k + eps),    A_i <- (A_i - mean_batch) / (std_batch + eps)

    A NaN part is excluded from that part's statistics and adds 0 to the row. The sum of an environment's turn rewards
    is another part with weight 1. `dynamic_sampling_rounds` still compares summed rewards, so it replaces a group whose
    differing parts cancel exactly.

    Args:
        eps: Constant added to both stds, above 0.

    Source: https://arxiv.org/abs/2601.05242, eq. 4-6. It doesn't specify the std; unbiased as in TRL.
    """

    needs_groups = True
    credit = "parts"
    normalizes = True

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = eps

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        parts, weights = given.reward_parts or {}, given.part_weights or {}
        total = torch.zeros_like(given.rewards[:, 0])
        for name, part in parts.items():
            there = given.valid & ~part.isnan()
            scores = torch.where(there, part, torch.zeros_like(part)).to(total.dtype)
            stats = group_stats(scores, given.groups, there)
            total += weights[name] * group_centered(scores, stats, there) / (stats.std + self.eps)
        return spread(masked_whiten(total, given.valid, eps=self.eps, all_sum=given.all_sum), given.mask), None
