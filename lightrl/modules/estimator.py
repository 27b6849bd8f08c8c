"""What every advantage estimator is; the estimators themselves are in `advantages` and `group_advantages`.

Letters: B sequences, T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightrl.ops.advantages import spread
from lightrl.ops.masking import AllSum, identity, masked_sum

__all__ = ["AdvantageEstimator", "SequenceEstimator", "clean", "fraction", "positive"]

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


class SequenceEstimator(AdvantageEstimator):
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
        rewards, valid = clean(rewards, mask, valid)
        scores = masked_sum(rewards, mask, -1).to(rewards.dtype)
        advantages = self.sequence_advantages(scores, groups, valid, lengths=mask.sum(-1), all_sum=all_sum)
        return spread(torch.where(valid, advantages, torch.zeros_like(advantages)), mask), None

    @abstractmethod
    def sequence_advantages(
        self, scores: Tensor, groups: Tensor, valid: Tensor, *, lengths: Tensor, all_sum: AllSum
    ) -> Tensor:
        """(B,) advantages from (B,) scores (0 where not valid), (B,) groups, valid and token counts."""


def clean(rewards: Tensor, mask: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rewards with 0 off the mask and on rows that are not valid (where they may be NaN), and `valid` as a tensor."""
    valid = torch.ones_like(mask[:, 0]) if valid is None else valid
    return torch.where(mask & valid[:, None], rewards, torch.zeros_like(rewards)), valid


def fraction(owner: str, name: str, value: float) -> float:
    """The value of `owner`'s argument `name` if it is in [0, 1]; a ValueError otherwise."""
    if not 0 <= value <= 1:
        raise ValueError(f"{owner}({name}={value}): must be in [0, 1].")
    return value


def positive(owner: str, name: str, value: float) -> float:
    """The value of `owner`'s argument `name` if it is above 0; a ValueError otherwise."""
    if not value > 0:
        raise ValueError(f"{owner}({name}={value}): must be above 0.")
    return value
