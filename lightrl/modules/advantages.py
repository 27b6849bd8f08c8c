"""Advantage estimators: what a token is credited with, from rewards and nothing the policy's gradient flows through.

Letters: B sequences, T tokens, G sequences per group (the completions of one prompt). The *score* of a sequence is the
sum of its token rewards: the reward on its last token, less the KL of its tokens where the KL is in the reward.

| class | advantage | scope |
|---|---|---|
| `GAE` | temporal differences with a critic | group |
| `Reinforce` | discounted return | group |
| `GroupNorm` | (score - group mean) / std | group, batch for `scale="batch"` |
| `RLOO` | score - mean of the others | group, batch for `normalize` |
| `OPO` | score - length-weighted group mean | group |
| `MaxRL` | (score - group mean) / group mean | group |
| `PassAtK` | what the sample adds to pass@k | group |
| `GDPO` | each reward part normalised in its group, summed, normalised over the batch | batch |
| `ReinforcePlusPlus` | return, normalised over the batch | batch |
| `ReinforcePlusPlusBaseline` | score - group mean, normalised over the batch | batch |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightrl.ops.advantages import (
    gae,
    group_centered,
    group_stats,
    leave_one_out,
    optimal_baseline,
    pass_at_k,
    returns_to_go,
    spread,
)
from lightrl.ops.masking import AllSum, identity, masked_moments, masked_sum, masked_whiten

__all__ = [
    "GAE",
    "GDPO",
    "OPO",
    "RLOO",
    "AdvantageEstimator",
    "GroupNorm",
    "MaxRL",
    "PassAtK",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
]

Scope = Literal["group", "batch"]
Parts = dict[str, Tensor]


class AdvantageEstimator(ABC):
    """Turns rewards into advantages.

    Attributes:
        scope: what must be complete before an advantage is known: "group" lets finished groups be trained on while
            others still generate; "batch" needs all of them, on all ranks.
        needs_critic: reads `values`. needs_groups: is meaningless with one completion per prompt.
        needs_binary_scores: takes the score for a success or a failure, so that a KL inside the reward would be lost
            or would corrupt it: to be combined with a KL in the loss or none.
        needs_reward_parts: reads `reward_parts` instead of `rewards`, so that whatever shapes the total (reward
            models, normalisation, clip, over-long penalty, KL in the reward) would be lost.
        normalizes: ends with a normalisation over the batch of its own; whitening it again would be a second one.
    """

    scope: Scope = "group"
    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    needs_binary_scores: ClassVar[bool] = False
    needs_reward_parts: ClassVar[bool] = False
    normalizes: bool = False

    @abstractmethod
    def __call__(
        self,
        rewards: Tensor,
        mask: Tensor,
        groups: Tensor,
        *,
        values: Tensor | None = None,
        valid: Tensor | None = None,
        reward_parts: Parts | None = None,
        part_weights: dict[str, float] | None = None,
        all_sum: AllSum = identity,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes advantages.

        Args:
            rewards: (B, T) float per token; the score on the last response token, a KL penalty already in it.
            mask: (B, T) bool, tokens the policy sampled.
            groups: (B,) int64, equal for completions of one prompt; a group lies on one rank.
            values: (B, T) float, the critic's, V of the state before token t.
            valid: (B,) bool, False where no reward function scored the row; all True where None. Such a row gets
                advantage 0 and takes no part in any baseline or statistic.
            reward_parts: name -> (B,) float, raw rewards per function, NaN for "does not apply".
            part_weights: name -> weight of that function.
            all_sum: sums a tensor over ranks.

        Returns:
            (B, T) advantages, 0 off the mask, and (B, T) targets for the critic, or None without one.
        """


class _SequenceEstimator(AdvantageEstimator):
    """One advantage per sequence, put on each of its tokens; children say which from the scores."""

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
        rewards, valid = _clean(rewards, mask, valid)
        scores = masked_sum(rewards, mask, -1).to(rewards.dtype)
        advantages = self.sequence_advantages(scores, groups, valid, lengths=mask.sum(-1), all_sum=all_sum)
        return spread(torch.where(valid, advantages, torch.zeros_like(advantages)), mask), None

    @abstractmethod
    def sequence_advantages(
        self, scores: Tensor, groups: Tensor, valid: Tensor, *, lengths: Tensor, all_sum: AllSum
    ) -> Tensor:
        """(B,) advantages from (B,) scores (0 where not valid), (B,) groups, valid and token counts."""


class GAE(AdvantageEstimator):
    """Generalised advantage estimation: `A_t = sum_l (gamma * lam)**l * delta_{t+l}`; returns are `A + V`.

    Counts sampled tokens only: tokens off the mask inside a response are skipped. Rows that are not valid get returns
    equal to their values, which leave an unclipped critic where it is.

    Args:
        gamma: discount per token, in [0, 1]; 1 for a reward at the end of a text.
        lam: in [0, 1]; 1 is the return minus V (no bias from the critic), 0 the one-step difference.

    Raises:
        ValueError: an argument is out of range; on call, `values` is missing.

    Source: https://arxiv.org/abs/1506.02438; see `lightrl.ops.advantages.gae` for how others differ.
    """

    needs_critic = True

    def __init__(self, gamma: float = 1.0, lam: float = 0.95) -> None:
        self.gamma = _fraction("GAE", "gamma", gamma)
        self.lam = _fraction("GAE", "lam", lam)

    def __call__(
        self,
        rewards: Tensor,
        mask: Tensor,
        groups: Tensor,
        *,
        values: Tensor | None = None,
        valid: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor, Tensor]:
        if values is None:
            raise ValueError("GAE: values=None: it needs a critic. Give the module one, or use RLOO or GroupNorm.")
        rewards, valid = _clean(rewards, mask, valid)
        advantages, returns = gae(rewards, values, mask, self.gamma, self.lam)
        keep = mask & valid[:, None]
        zero = torch.zeros_like(advantages)
        return torch.where(keep, advantages, zero), torch.where(keep, returns, torch.where(mask, values, zero))


class Reinforce(AdvantageEstimator):
    """The discounted sum of the rewards from each token on, without a baseline: `A_t = r_t + gamma * A_{t+1}`.

    Args:
        gamma: discount per sampled token, in [0, 1].

    Raises:
        ValueError: gamma is out of range.

    Source: https://doi.org/10.1007/BF00992696.
    """

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = _fraction("Reinforce", "gamma", gamma)

    def __call__(
        self, rewards: Tensor, mask: Tensor, groups: Tensor, *, valid: Tensor | None = None, **unused: object
    ) -> tuple[Tensor, None]:
        rewards, _ = _clean(rewards, mask, valid)
        return returns_to_go(rewards, mask, self.gamma), None


class GroupNorm(_SequenceEstimator):
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
        self.eps = _positive("GroupNorm", "eps", eps)
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


class RLOO(_SequenceEstimator):
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


class OPO(_SequenceEstimator):
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


class MaxRL(_SequenceEstimator):
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


class PassAtK(_SequenceEstimator):
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

    A part that is NaN in a row takes no part in that part's statistics and adds 0 to the row.

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
        self.eps = _positive("GDPO", "eps", eps)

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
        _, valid = _clean(rewards, mask, valid)
        total = torch.zeros(len(groups), dtype=rewards.dtype, device=rewards.device)
        for name, part in reward_parts.items():
            given = valid & ~part.isnan()
            scores = torch.where(given, part, torch.zeros_like(part)).to(rewards.dtype)
            stats = group_stats(scores, groups, given)
            total += (part_weights or {})[name] * group_centered(scores, stats, given) / (stats.std + self.eps)
        return spread(masked_whiten(total, valid, eps=self.eps, all_sum=all_sum), mask), None


class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE with the KL in the reward and one normalisation over all tokens of all ranks.

        A_t = (R_t - mean) / (std + 1e-8),    R_t the discounted return from token t on

    Args:
        gamma: discount per sampled token, in [0, 1].

    Raises:
        ValueError: gamma is out of range.

    Source: https://arxiv.org/abs/2501.03262, eq. 7-9. LightRFT's `reinforce++` raises; verl and TRL-based ones
        normalise on one rank.
    """

    scope = "batch"
    normalizes = True

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = _fraction("ReinforcePlusPlus", "gamma", gamma)

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
        rewards, valid = _clean(rewards, mask, valid)
        returns = returns_to_go(rewards, mask, self.gamma)
        return masked_whiten(returns, mask & valid[:, None], all_sum=all_sum), None


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
        rewards, valid = _clean(rewards, mask, valid)
        scores = masked_sum(rewards, mask, -1).to(rewards.dtype)
        stats = group_stats(scores, groups, valid)
        centered = group_centered(scores, stats, valid)
        compared = valid & (stats.size > 1)  # a row without a group has no baseline: 0, and left out of the moments
        return masked_whiten(spread(centered, mask), mask & compared[:, None], all_sum=all_sum), None


def _clean(rewards: Tensor, mask: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rewards with 0 off the mask and on rows that are not valid (where they may be NaN), and `valid` as a tensor."""
    valid = torch.ones_like(mask[:, 0]) if valid is None else valid
    return torch.where(mask & valid[:, None], rewards, torch.zeros_like(rewards)), valid


def _fraction(owner: str, name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{owner}({name}={value}): must be in [0, 1].")
    return value


def _positive(owner: str, name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{owner}({name}={value}): must be above 0.")
    return value
