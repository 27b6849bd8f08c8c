"""Advantage estimators: trajectory rewards to token advantages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightrl.compat.arguments import above, at_least, fraction, one_of
from lightrl.objectives.kl import KLInReward, KLPenalty
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

Credit = Literal["total", "parts", "turns"]


class AdvantageInput:
    """Input of an advantage estimator: B trajectories of at most T tokens.

    The record remembers which fields an estimator reads, so estimators don't have to declare them.

    Args:
        rewards: (B, T) float token rewards. The score is on the last response token, with any KL penalty included.
            Treated as 0 outside the mask and on invalid rows, where they may be NaN.
        mask: (B, T) bool, True on tokens sampled by the policy.
        groups: (B,) int64, equal for completions of one prompt. A group is on one rank.
        values: (B, T) float values of the critic for the state before token t. None without a critic.
        valid: (B,) bool, False on rows that no reward function scored. Defaults to all True. Invalid rows get advantage
            0 and are excluded from all baselines and statistics.
        reward_parts: Raw rewards (B,) by reward function, NaN if a function doesn't apply.
        part_weights: Weights by reward function.
        turn_ids: (B, T) int64 turn of each token, read on the mask. None if every row is one turn.
        anchors: (B, T) int64 state in which the token's turn began, read on the mask. Equal for equal states of a
            group. None if the environment doesn't name its states.
        all_sum: Sum over ranks.
    """

    def __init__(
        self,
        rewards: Tensor,
        mask: Tensor,
        groups: Tensor,
        values: Tensor | None = None,
        valid: Tensor | None = None,
        reward_parts: dict[str, Tensor] | None = None,
        part_weights: dict[str, float] | None = None,
        turn_ids: Tensor | None = None,
        anchors: Tensor | None = None,
        all_sum: AllSum = identity,
    ) -> None:
        self.mask = mask
        self.groups = groups
        self.values = values
        self.valid = torch.ones_like(mask[:, 0]) if valid is None else valid
        self.part_weights = part_weights
        self.all_sum = all_sum
        self.reads = set[str]()
        self._rewards = torch.where(self.trained, rewards, torch.zeros_like(rewards))
        self._reward_parts = reward_parts
        self._turn_ids = turn_ids
        self._anchors = anchors

    @property
    def rewards(self) -> Tensor:
        """Token rewards, (B, T)."""
        self.reads.add("rewards")
        return self._rewards

    @property
    def scores(self) -> Tensor:
        """Sum of each row's rewards, (B,); 0 on invalid rows."""
        self.reads.add("rewards")
        return masked_sum(self._rewards, self.mask, -1).to(self._rewards.dtype)

    @property
    def reward_parts(self) -> dict[str, Tensor] | None:
        """Rewards (B,) by reward function."""
        self.reads.add("reward_parts")
        return self._reward_parts

    @property
    def turn_ids(self) -> Tensor | None:
        """Turn of each token, (B, T)."""
        self.reads.add("turn_ids")
        return self._turn_ids

    @property
    def anchors(self) -> Tensor | None:
        """State in which each token's turn began, (B, T)."""
        self.reads.add("turn_ids")
        return self._anchors

    @property
    def trained(self) -> Tensor:
        """True on tokens of valid rows that the policy sampled, (B, T) bool."""
        return self.mask & self.valid[:, None]

    @property
    def credit(self) -> Credit:
        """Rewards that were read: "turns", "parts" (of each function), or "total" (their sum)."""
        if "turn_ids" in self.reads:
            return "turns"
        return "parts" if "reward_parts" in self.reads else "total"


class AdvantageEstimator(ABC):
    """Computes advantages from rewards.

    Attributes:
        needs_critic: Whether it reads `values`.
        needs_groups: Whether it needs several completions per prompt.
        needs_binary_scores: Whether scores must be successes or failures. Rejects a KL penalty in the reward, which
            would change scores. Use a KL penalty in the loss, or none.
        credit: Rewards that it reads. "parts" reads `reward_parts` instead of `rewards`, so changes of the sum alone
            (reward clip, normalization, KL in the reward) would be lost. "turns" assigns turn rewards to turns, so
            changes of the sum alone would go to the last turn. Both reject such combinations at setup. None detects
            the credit from the fields read. "total" uses the sum, regardless of other fields read.
        normalizes: Whether it ends with a normalization over the batch, which makes whitening redundant.
    """

    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    needs_binary_scores: ClassVar[bool] = False
    credit: ClassVar[Credit | None] = None
    normalizes: bool = False

    def __call__(self, given: AdvantageInput) -> tuple[Tensor, Tensor | None]:
        """Computes advantages, and checks the result of `estimate`.

        Returns:
            (B, T) advantages, 0 outside the mask and on invalid rows, and (B, T) targets for the critic or None.
        """
        answer = self.estimate(given)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise ValueError(
                f"advantage={type(self).__name__}: `estimate` must return advantages, and returns or None."
            )
        advantages, returns = answer
        for name, found in {"advantages": advantages, "returns": returns}.items():
            if found is None and name == "returns":
                continue
            if not isinstance(found, Tensor) or found.shape != given.mask.shape:
                shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise ValueError(
                    f"advantage={type(self).__name__}: {name} have shape {shape}, but tokens have shape "
                    f"{tuple(given.mask.shape)}. Return one value per token."
                )
        return torch.where(given.trained, advantages, torch.zeros_like(advantages)), returns

    @abstractmethod
    def estimate(self, given: AdvantageInput) -> tuple[Tensor, Tensor | None]:
        """Returns (B, T) advantages, read on trained tokens only, and (B, T) targets for the critic or None."""

    def refuse_combination(self, kl: KLPenalty | None, *, whiten: bool) -> None:
        """Rejects combinations in which one part would have no effect or be applied twice.

        Args:
            kl: KL penalty. None without one.
            whiten: Whether advantages are whitened after the estimator.

        Raises:
            ValueError: A KL penalty in the reward with an estimator that needs binary scores or doesn't read summed
                rewards, or whitening after an estimator that normalizes.
        """
        name = type(self).__name__
        if isinstance(kl, KLInReward):
            way_out = "Use KLInLoss('k3', ratio_correction=True) or no KL."
            if self.needs_binary_scores:
                raise ValueError(
                    f"advantage={name} with kl=KLInReward: {name} needs scores that mean success or failure, and the "
                    f"KL penalty would change them. {way_out}"
                )
            if self.credit == "parts":
                raise ValueError(
                    f"advantage={name} with kl=KLInReward: {name} reads the rewards of each function, so a KL penalty "
                    f"in their sum would be lost. {way_out}"
                )
        if whiten and self.normalizes:
            raise ValueError(
                f"advantage={name} with whiten_advantages=True: {name} already normalizes over the batch. Set "
                "whiten_advantages=False."
            )

    def refuse_group_size(self, size: int) -> None:  # noqa: B027 - optional hook
        """Raises a ValueError if groups of `size` completions can't be used for training. Accepts all by default."""

    def refuse_shaped_rewards(self, shaping: str, credit: Credit | None = None) -> None:
        """Raises a ValueError if a change of the summed reward conflicts with the rewards that the estimator reads.

        Args:
            shaping: Argument or callback for the message, as the user wrote it.
            credit: Rewards that the estimator read. Defaults to the declared `credit`.
        """
        name, credit = type(self).__name__, credit or self.credit
        if credit == "turns":
            raise ValueError(
                f"{shaping} with advantage={name}: {name} assigns turn rewards to turns, so a change of the sum alone "
                "would go to the last turn. Change `turn_rewards` by the same amount, or use RLOO."
            )
        if credit == "parts":
            raise ValueError(
                f"{shaping} with advantage={name}: {name} reads the rewards of each function, so a change of their sum "
                "would be lost. Change `reward_parts` by the same amount, or use GroupRelative."
            )


class SequenceEstimator(AdvantageEstimator):
    """Base of estimators with one advantage per sequence, assigned to each of its tokens."""

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        advantages = self.sequence_advantages(given)
        if advantages.shape != given.scores.shape:
            found, name = tuple(advantages.shape), type(self).__name__
            raise ValueError(f"advantage={name}: advantages have shape {found}. Return one value per sequence.")
        return spread(advantages, given.mask), None

    @abstractmethod
    def sequence_advantages(self, given: AdvantageInput) -> Tensor:
        """Returns (B,) advantages from `given.scores`, read on valid rows only."""


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

    Raises:
        ValueError: An argument is out of range, or `values` is missing.

    Source: https://arxiv.org/abs/1506.02438. For differences from other libraries, see `lightrl.ops.advantages.gae`.
    """

    needs_critic = True

    def __init__(self, gamma: float = 1.0, lam: float = 0.95) -> None:
        self.gamma = fraction("GAE.gamma", gamma)
        self.lam = fraction("GAE.lam", lam)

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, Tensor]:
        if given.values is None:
            raise ValueError("GAE: values=None: needs a critic. Set critic, or use RLOO or GroupRelative.")
        advantages, returns = gae(given.rewards, given.values, given.mask, self.gamma, self.lam)
        return advantages, unscored_at_values(returns, given, given.values)


class Reinforce(AdvantageEstimator):
    """Discounted reward-to-go without a baseline: `A_t = r_t + gamma * A_{t+1}`.

    Args:
        gamma: Discount per sampled token, in [0, 1].

    Source: https://doi.org/10.1007/BF00992696.
    """

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = fraction("Reinforce.gamma", gamma)

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
        self.gamma = fraction("ReinforcePlusPlus.gamma", gamma)

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        returns = returns_to_go(given.rewards, given.mask, self.gamma)
        return masked_whiten(returns, given.trained, all_sum=given.all_sum), None


class GroupRelative(SequenceEstimator):
    """Score relative to its group: `A_i = (s_i - mean) / (std + eps)` with the unbiased std (GRPO, Dr. GRPO, CPGD).

    Groups without spread or with one valid row get exactly 0. Division by the group's std gives easy and hard prompts
    more weight and, with a KL penalty in the loss, moves the optimum (see docs/algorithms/kl.md). "none" doesn't.

    Args:
        scale: Divisor: "group" is the std of the row's group (GRPO, CPGD), "batch" the std of all scores of all ranks,
            "none" is 1 (Dr. GRPO).
        eps: Constant added to the std, above 0.

    Source: GRPO https://arxiv.org/abs/2402.03300 section 4.1.2; Dr. GRPO https://arxiv.org/abs/2503.20783; batch std
        https://arxiv.org/abs/2508.08221 section 4.1. The papers don't specify the std; unbiased as in TRL and verl.
    """

    needs_groups = True

    def __init__(self, scale: Literal["group", "batch", "none"] = "group", eps: float = 1e-4) -> None:
        self.scale = one_of("GroupRelative.scale", scale, "group", "batch", "none")
        self.eps = above("GroupRelative.eps", eps)
        self.normalizes = scale == "batch"

    def sequence_advantages(self, given: AdvantageInput) -> Tensor:
        stats = group_stats(given.scores, given.groups, given.valid)
        centered = group_centered(given.scores, stats, given.valid)
        if self.scale == "none":
            return centered
        std = stats.std
        if self.scale == "batch":
            std = masked_moments(given.scores, given.valid, all_sum=given.all_sum)[2].sqrt().to(centered.dtype)
        return centered / (std + self.eps)


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
        threshold: Scores above it are successes. At most 1e16 in magnitude.

    Raises:
        ValueError: A value is out of range, or groups are smaller than k.

    Source: https://arxiv.org/abs/2508.10751, eq. 14-15.
    """

    needs_groups = True
    needs_binary_scores = True

    def __init__(self, k: int = 4, threshold: float = 0.5) -> None:
        self.k = at_least("PassAtK.k", k, 1)
        self.threshold = threshold

    def refuse_group_size(self, size: int) -> None:
        """Rejects groups smaller than k."""
        if size < self.k:
            raise ValueError(
                f"PassAtK.k={self.k} with group_size={size}: groups are smaller than k, so every advantage would be 0. "
                f"Set data.group_size to at least {self.k} (2 k is usual), or lower k."
            )

    def sequence_advantages(self, given: AdvantageInput) -> Tensor:
        passed = (given.scores > self.threshold).to(given.scores.dtype)
        return pass_at_k(passed, given.groups, given.valid, self.k)


class GDPO(AdvantageEstimator):
    """Normalizes each reward function within its group, then the weighted sum over the batch.

        A_i = sum_k w_k * (r_ik - mean_k) / (std_k + eps),    A_i <- (A_i - mean_batch) / (std_batch + eps)

    A NaN part is excluded from that part's statistics and adds 0 to the row. `dynamic_sampling_rounds` still compares
    summed rewards, so it replaces a group whose differing parts cancel exactly.

    Args:
        eps: Constant added to both stds, above 0.

    Raises:
        ValueError: `eps` is not above 0, there are no reward parts, or a part has no weight.

    Source: https://arxiv.org/abs/2601.05242, eq. 4-6. It doesn't specify the std; unbiased as in TRL.
    """

    needs_groups = True
    credit = "parts"
    normalizes = True

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = above("GDPO.eps", eps)

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        parts, weights = given.reward_parts, given.part_weights or {}
        if not parts:
            raise ValueError("GDPO: reward_parts={}: needs at least one reward function. Set data.rewards.")
        missing = sorted(set(parts) - set(weights))
        if missing:
            raise ValueError(
                f"GDPO: part_weights={given.part_weights}: lacks the reward parts {missing}. Add their weights."
            )
        total = torch.zeros_like(given.rewards[:, 0])
        for name, part in parts.items():
            there = given.valid & ~part.isnan()
            scores = torch.where(there, part, torch.zeros_like(part)).to(total.dtype)
            stats = group_stats(scores, given.groups, there)
            total += weights[name] * group_centered(scores, stats, there) / (stats.std + self.eps)
        return spread(masked_whiten(total, given.valid, eps=self.eps, all_sum=given.all_sum), given.mask), None


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
