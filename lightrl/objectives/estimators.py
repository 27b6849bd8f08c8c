"""Advantage estimators: from rewards of trajectories to advantages of tokens."""

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
    """What an estimator is given: B trajectories of at most T tokens.

    Every estimator gets the whole record. It remembers which fields were read, so that nothing has to be declared.

    Args:
        rewards: (B, T) float per token; the score on the last response token, a KL penalty already in it. Read as 0 off
            the mask and on rows that are not valid, where what is given may be NaN.
        mask: (B, T) bool, tokens the policy sampled.
        groups: (B,) int64, equal for completions of one prompt; a group is on one rank.
        values: (B, T) float, the critic's, V of the state before token t; None without a critic.
        valid: (B,) bool, False where no reward function scored the row; all True if None. Such a row gets advantage 0
            and takes no part in any baseline or statistic.
        reward_parts: name -> (B,) float, raw rewards per function, NaN for "does not apply".
        part_weights: name -> weight of that function.
        turn_ids: (B, T) int64, read on the mask: number of the turn a token belongs to; None if every row is one turn.
        anchors: (B, T) int64, read on the mask: the state in which the token's turn began, equal for equal states of a
            group; None without an environment that names its states.
        all_sum: Sums a tensor over ranks.
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
        """(B, T) per token."""
        self.reads.add("rewards")
        return self._rewards

    @property
    def scores(self) -> Tensor:
        """(B,) each row's sum of rewards; 0 where it is not valid."""
        self.reads.add("rewards")
        return masked_sum(self._rewards, self.mask, -1).to(self._rewards.dtype)

    @property
    def reward_parts(self) -> dict[str, Tensor] | None:
        """name -> (B,)."""
        self.reads.add("reward_parts")
        return self._reward_parts

    @property
    def turn_ids(self) -> Tensor | None:
        """(B, T)."""
        self.reads.add("turn_ids")
        return self._turn_ids

    @property
    def anchors(self) -> Tensor | None:
        """(B, T)."""
        self.reads.add("turn_ids")
        return self._anchors

    @property
    def trained(self) -> Tensor:
        """(B, T) bool, the tokens of valid rows that the policy sampled."""
        return self.mask & self.valid[:, None]

    @property
    def credit(self) -> Credit:
        """What was read: the rewards of turns, those of each function, or their sum only."""
        if "turn_ids" in self.reads:
            return "turns"
        return "parts" if "reward_parts" in self.reads else "total"


class AdvantageEstimator(ABC):
    """Turns rewards into advantages.

    Attributes:
        needs_critic: reads `values`. needs_groups: is meaningless with one completion per prompt.
        needs_binary_scores: takes the score for a success or a failure, so that a KL inside the reward would be lost
            or would corrupt it: to be combined with a KL in the loss or none.
        credit: "parts" reads `reward_parts` in place of `rewards`, so what changes only the sum (reward clip,
            normalization, KL in the reward) would be lost. "turns" gives turns credit for their own rewards, so what
            changes only the sum would land on the last turn. Such combinations are rejected at set-up. None:
            undeclared; the same is rejected when the estimator is seen to read those fields. "total": the sum decides,
            whatever else is read.
        normalizes: ends with a normalization over the batch, so whitening would be a second one.
    """

    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    needs_binary_scores: ClassVar[bool] = False
    credit: ClassVar[Credit | None] = None
    normalizes: bool = False

    def __call__(self, given: AdvantageInput) -> tuple[Tensor, Tensor | None]:
        """Computes advantages, and checks what a subclass returns.

        Returns:
            (B, T) advantages, 0 off the mask and on rows that are not valid, and (B, T) targets for the critic, or
            None without one.
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
                    f"advantage={type(self).__name__}: {name} of shape {shape} for tokens of shape "
                    f"{tuple(given.mask.shape)}. Return one per token."
                )
        return torch.where(given.trained, advantages, torch.zeros_like(advantages)), returns

    @abstractmethod
    def estimate(self, given: AdvantageInput) -> tuple[Tensor, Tensor | None]:
        """(B, T) advantages, of which those of trained tokens are taken, and (B, T) targets for the critic or None."""

    def refuse_combination(self, kl: KLPenalty | None, *, whiten: bool) -> None:
        """Raises for a combination in which one part would be lost or done twice.

        Args:
            kl: where the KL goes; None without one.
            whiten: whether advantages are whitened after the estimator.

        Raises:
            ValueError: a KL in the reward with an estimator that takes scores for success or failure, or that does not
                read the summed rewards; whitening after an estimator that ends with a normalization of its own.
        """
        name = type(self).__name__
        if isinstance(kl, KLInReward):
            way_out = "Use KLInLoss('k3', ratio_correction=True) or no KL."
            if self.needs_binary_scores:
                raise ValueError(
                    f"advantage={name} with kl=KLInReward: {name} takes a score for success or failure, and a KL "
                    f"inside the score would corrupt it. {way_out}"
                )
            if self.credit == "parts":
                raise ValueError(
                    f"advantage={name} with kl=KLInReward: {name} reads each reward function's own rewards, and a KL "
                    f"in their sum would be lost. {way_out}"
                )
        if whiten and self.normalizes:
            raise ValueError(
                f"advantage={name} with whiten_advantages=True: {name} already normalizes over the batch, and a second "
                "normalization would hide the first. Set whiten_advantages=False."
            )

    def refuse_group_size(self, size: int) -> None:  # noqa: B027 - most estimators take any
        """Raises a ValueError where groups of `size` attempts teach nothing; by default none does."""

    def refuse_shaped_rewards(self, shaping: str, credit: Credit | None = None) -> None:
        """Raises a ValueError for a change of the summed reward if the estimator doesn't read the sum.

        Args:
            shaping: The argument or callback, as the user wrote it.
            credit: What the estimator was seen to read; the declared `credit` if None.
        """
        name, credit = type(self).__name__, credit or self.credit
        if credit == "turns":
            raise ValueError(
                f"{shaping} with advantage={name}: {name} gives turns credit for their own rewards, and a change of "
                "the sum alone would land on the last turn. Change `turn_rewards` by the same amount, or use RLOO."
            )
        if credit == "parts":
            raise ValueError(
                f"{shaping} with advantage={name}: {name} reads each reward function's own rewards, and a change of "
                "their sum would be lost. Change `reward_parts` by the same amount, or use GroupRelative."
            )


class SequenceEstimator(AdvantageEstimator):
    """One advantage per sequence, put on each of its tokens; subclasses compute it from the scores."""

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        advantages = self.sequence_advantages(given)
        if advantages.shape != given.scores.shape:
            found, name = tuple(advantages.shape), type(self).__name__
            raise ValueError(f"advantage={name}: advantages of shape {found}. Return one per sequence.")
        return spread(advantages, given.mask), None

    @abstractmethod
    def sequence_advantages(self, given: AdvantageInput) -> Tensor:
        """(B,) advantages from `given.scores`; those of valid rows are taken."""


def unscored_at_values(returns: Tensor, given: AdvantageInput, values: Tensor) -> Tensor:
    """Returns that equal the values on rows without a score, which leaves an unclipped critic where it is there."""
    on_mask = torch.where(given.mask, values, torch.zeros_like(values))
    return torch.where(given.trained, returns, on_mask)


class GAE(AdvantageEstimator):
    """Generalized advantage estimation: `A_t = sum_l (gamma * lam)**l * delta_{t+l}`; returns are `A + V`.

    Counts sampled tokens only: tokens off the mask inside a response are skipped. Rows that are not valid get returns
    equal to their values, which leave an unclipped critic where it is.

    Args:
        gamma: discount per token, in [0, 1]; 1 for a reward at the end of a text.
        lam: in [0, 1]; 1 is the return minus V (no bias from the critic), 0 the one-step difference.

    Raises:
        ValueError: an argument is out of range; on call, `values` is missing.

    Source: https://arxiv.org/abs/1506.02438. `lightrl.ops.advantages.gae` says how others differ.
    """

    needs_critic = True

    def __init__(self, gamma: float = 1.0, lam: float = 0.95) -> None:
        self.gamma = fraction("GAE.gamma", gamma)
        self.lam = fraction("GAE.lam", lam)

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, Tensor]:
        if given.values is None:
            raise ValueError("GAE: values=None: it needs a critic. Give the module one, or use RLOO or GroupRelative.")
        advantages, returns = gae(given.rewards, given.values, given.mask, self.gamma, self.lam)
        return advantages, unscored_at_values(returns, given, given.values)


class Reinforce(AdvantageEstimator):
    """The discounted sum of the rewards from each token on, without a baseline: `A_t = r_t + gamma * A_{t+1}`.

    Args:
        gamma: discount per sampled token, in [0, 1].

    Raises:
        ValueError: gamma is out of range.

    Source: https://doi.org/10.1007/BF00992696.
    """

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = fraction("Reinforce.gamma", gamma)

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        return returns_to_go(given.rewards, given.mask, self.gamma), None


class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE with the KL in the reward and one normalization over all tokens of all ranks.

        A_t = (R_t - mean) / (std + 1e-8),    R_t the discounted return from token t on

    Args:
        gamma: discount per sampled token, in [0, 1].

    Raises:
        ValueError: gamma is out of range.

    Source: https://arxiv.org/abs/2501.03262, eq. 7-9; the same in verl and OpenRLHF.
    """

    normalizes = True

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = fraction("ReinforcePlusPlus.gamma", gamma)

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        returns = returns_to_go(given.rewards, given.mask, self.gamma)
        return masked_whiten(returns, given.trained, all_sum=given.all_sum), None


class GroupRelative(SequenceEstimator):
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
        normalize: whiten the advantages over all sequences of all ranks (TRL's `normalize_advantages`).

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

    Meant for exactly on-policy training without a KL. The baseline contains the row's own score, so that the gradient
    is shrunk by about `1 - 1 / G`, as with GRPO's mean.
    Source: https://arxiv.org/abs/2505.23585, eq. 8.
    """

    needs_groups = True

    def sequence_advantages(self, given: AdvantageInput) -> Tensor:
        return optimal_baseline(given.scores, given.groups, given.valid, given.mask.sum(-1))


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

    def sequence_advantages(self, given: AdvantageInput) -> Tensor:
        scores = given.scores
        if bool((scores < 0).any()):
            raise ValueError(f"MaxRL: a score of {scores.min().item():.4g}: rewards must be 0 or 1. Use GroupRelative.")
        stats = group_stats(scores, given.groups, given.valid)
        centered = group_centered(scores, stats, given.valid)
        return torch.where(stats.mean > 0, centered / stats.mean.clamp(min=1e-12), torch.zeros_like(centered))


class PassAtK(SequenceEstimator):
    """Advantage of a sample for the best of k: pass@k as the reward of every k-subset of the group, in closed form.

    With n rows, f of them failures, `q = C(f, k) / C(n, k)`, `mean = 1 - q` and `std = sqrt(mean * (1 - mean))`:

        success: (1 - mean) / std        failure: (1 - mean - C(f - 1, k - 1) / C(n - 1, k - 1)) / std

    0 where std is 0 (every or no subset passes). Groups with fewer than k valid rows get 0.

    Args:
        k: samples per attempt, at least 1; needs `group_size >= k`.
        threshold: a score above it is a success; at most 1e16 in size.

    Raises:
        ValueError: a value is out of its range; at set-up, groups are smaller than k.

    Source: https://arxiv.org/abs/2508.10751, eq. 14-15.
    """

    needs_groups = True
    needs_binary_scores = True

    def __init__(self, k: int = 4, threshold: float = 0.5) -> None:
        self.k = at_least("PassAtK.k", k, 1)
        self.threshold = threshold

    def refuse_group_size(self, size: int) -> None:
        """Refuses groups of which no subset has k samples."""
        if size < self.k:
            raise ValueError(
                f"PassAtK.k={self.k} with group_size={size}: no k samples are in a group, so that every advantage "
                f"would be 0. Set data.group_size to {self.k} or more (2 k is usual), or lower k."
            )

    def sequence_advantages(self, given: AdvantageInput) -> Tensor:
        passed = (given.scores > self.threshold).to(given.scores.dtype)
        return pass_at_k(passed, given.groups, given.valid, self.k)


class GDPO(AdvantageEstimator):
    """Each reward function normalized in its group, then summed, then normalized over the batch.

        A_i = sum_k w_k * (r_ik - mean_k) / (std_k + eps),    A_i <- (A_i - mean_batch) / (std_batch + eps)

    A part that is NaN in a row takes no part in that part's statistics and adds 0 to the row. With
    `dynamic_sampling_rounds` groups
    are still judged by their summed rewards: one whose parts differ and cancel exactly is replaced.

    Args:
        eps: added to both stds, above 0.

    Raises:
        ValueError: eps is not above 0; on call, no reward parts, or a part without a weight.

    Source: https://arxiv.org/abs/2601.05242, eq. 4-6. It does not say which std; unbiased here as in TRL.
    """

    needs_groups = True
    credit = "parts"
    normalizes = True

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = above("GDPO.eps", eps)

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        parts, weights = given.reward_parts, given.part_weights or {}
        if not parts:
            raise ValueError("GDPO: no reward parts: it needs reward functions, each giving its own reward.")
        missing = sorted(set(parts) - set(weights))
        if missing:
            raise ValueError(f"GDPO: reward parts without a weight: {missing}; part_weights={given.part_weights}.")
        total = torch.zeros_like(given.rewards[:, 0])
        for name, part in parts.items():
            there = given.valid & ~part.isnan()
            scores = torch.where(there, part, torch.zeros_like(part)).to(total.dtype)
            stats = group_stats(scores, given.groups, there)
            total += weights[name] * group_centered(scores, stats, there) / (stats.std + self.eps)
        return spread(masked_whiten(total, given.valid, eps=self.eps, all_sum=given.all_sum), given.mask), None


class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """Score minus the group mean, then one normalization over all tokens of all ranks.

        A_i = s_i - mean_group,    A_t <- (A_i - mean_tokens) / (std_tokens + 1e-8)

    Source: https://arxiv.org/abs/2501.03262, section 3.3 (which takes k2 in the loss as its KL).
    """

    needs_groups = True
    normalizes = True

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        stats = group_stats(given.scores, given.groups, given.valid)
        centered = spread(group_centered(given.scores, stats, given.valid), given.mask)
        compared = stats.size > 1  # a row without a group has no baseline: 0, and left out of the moments
        return masked_whiten(centered, given.trained & compared[:, None], all_sum=given.all_sum), None
