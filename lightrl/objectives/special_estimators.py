"""Advantage estimators without groups, or with other baselines than GRPO's."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.objectives.estimators import AdvantageEstimator, AdvantageInput, SequenceEstimator
from lightrl.ops.advantages import group_centered, group_stats, masked_whiten, spread
from lightrl.ops.baselines import gae, leave_one_out, optimal_baseline, pass_at_k, returns_to_go


def unscored_at_values(returns: Tensor, given: AdvantageInput, values: Tensor) -> Tensor:
    """Sets returns equal to values on unscored rows, so that they don't train an unclipped critic."""
    on_mask = torch.where(given.mask, values, torch.zeros_like(values))
    return torch.where(given.trained, returns, on_mask)


class GAE(AdvantageEstimator):
    """Generalized advantage estimation (GAE): `A_t = sum_l (gamma * lam)**l * delta_{t+l}`, with returns `A + V`.

    Steps are sampled tokens; other tokens inside a response are skipped. Invalid rows get returns equal to their
    values, which don't train an unclipped critic.

    Args:
        gamma: Discount per token, in [0, 1]. Use 1 for a reward at the end of the response.
        lam: Trade-off in [0, 1]. 1 is the return minus V (no bias from the critic), 0 the one-step difference.

    Source: https://arxiv.org/abs/1506.02438. For differences from other libraries, see `lightrl.ops.baselines.gae`.
    """

    needs_critic = True

    def __init__(self, gamma: float = 1.0, lam: float = 0.95) -> None:
        self.gamma = gamma
        self.lam = lam

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, Tensor]:
        assert given.values is not None, "GAE needs a critic"
        advantages, returns = gae(given.rewards, given.values, given.mask, self.gamma, self.lam)
        return advantages, unscored_at_values(returns, given, given.values)


class Reinforce(AdvantageEstimator):
    """Discounted reward-to-go without a baseline: `A_t = r_t + gamma * A_{t+1}`.

    Args:
        gamma: Discount per sampled token, in [0, 1].

    Source: https://doi.org/10.1007/BF00992696.
    """

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = gamma

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        return returns_to_go(given.rewards, given.mask, self.gamma), None


class ReinforcePlusPlus(AdvantageEstimator):
    """Discounted reward-to-go, normalized over all tokens of all ranks (REINFORCE++).

        A_t = (R_t - mean) / (std + 1e-8),    R_t the discounted return from token t

    Args:
        gamma: Discount per sampled token, in [0, 1].

    Source: https://arxiv.org/abs/2501.03262, eq. 7-9; the same in verl and OpenRLHF.
    """

    normalizes = True

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = gamma

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        returns = returns_to_go(given.rewards, given.mask, self.gamma)
        return masked_whiten(returns, given.trained, all_sum=given.all_sum), None


class RLOO(SequenceEstimator):
    """Score minus the mean of the group's other scores: `A_i = s_i - (sum_j s_j - s_i) / (n - 1)`.

    Args:
        normalize: Whiten the advantages over all sequences of all ranks (TRL's `normalize_advantages`).

    Source: https://arxiv.org/abs/2402.14740.
    """

    needs_groups = True

    def __init__(self, normalize: bool = False) -> None:
        self.normalizes = normalize

    def sequence_advantages(self, given: AdvantageInput) -> Tensor:
        advantages = leave_one_out(given.scores, given.groups, given.valid)
        if not self.normalizes:
            return advantages
        return masked_whiten(advantages, given.valid, eps=1e-4, all_sum=given.all_sum)


class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """Score minus the group mean, normalized over all tokens of all ranks (REINFORCE++-baseline).

        A_i = s_i - mean_group,    A_t <- (A_i - mean_tokens) / (std_tokens + 1e-8)

    Source: https://arxiv.org/abs/2501.03262, section 3.3. The paper combines it with k2 in the loss.
    """

    needs_groups = True
    normalizes = True

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        stats = group_stats(given.scores, given.groups, given.valid)
        centered = spread(group_centered(given.scores, stats, given.valid), given.mask)
        compared = stats.size > 1  # a single row has no baseline: its advantage is 0, and it is not in the moments
        return masked_whiten(centered, given.trained & compared[:, None], all_sum=given.all_sum), None


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
