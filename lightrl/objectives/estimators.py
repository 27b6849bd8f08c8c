"""Base classes of advantage estimators, and the estimator of GRPO. See `special_estimators.py` for others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightrl.compat.arguments import one_of
from lightrl.objectives.loss_terms import KLInReward, KLPenalty
from lightrl.ops.formulas import AllSum, group_centered, group_stats, identity, masked_moments, masked_sum, spread

Credit = Literal["total", "parts", "turns"]
_CREDITS: dict[str, Credit] = {"reward_parts": "parts", "turn_ids": "turns", "anchors": "turns"}


@dataclass
class AdvantageInput:
    """Input of an advantage estimator: B trajectories of at most T tokens.

    Args:
        rewards: (B, T) float token rewards, 0 outside the mask and on invalid rows. The score is on the last response
            token, with any KL penalty included.
        mask: (B, T) bool, True on tokens sampled by the policy.
        groups: (B,) int64, equal for completions of one prompt. A group is on one rank.
        values: (B, T) float values of the critic for the state before token t. None without a critic.
        valid: (B,) bool, False on rows that no reward function scored. Defaults to all True. Invalid rows get advantage
            0 and are excluded from all baselines and statistics.
        reward_parts: Raw rewards (B,) by reward function, NaN if a function doesn't apply. With `credit` "parts", also
            the sum of turn rewards.
        part_weights: Weights by reward function.
        turn_ids: (B, T) int64 turn of each token, read on the mask. None if every row is one turn.
        anchors: (B, T) int64 state in which the token's turn began, read on the mask. Equal for equal states of a
            group. None if the environment doesn't name its states.
        all_sum: Sum over ranks.
    """

    rewards: Tensor
    mask: Tensor
    groups: Tensor
    values: Tensor | None = None
    valid: Tensor = None  # type: ignore[assignment]
    reward_parts: dict[str, Tensor] | None = None
    part_weights: dict[str, float] | None = None
    turn_ids: Tensor | None = None
    anchors: Tensor | None = None
    all_sum: AllSum = identity
    reads: set[Credit] = field(default_factory=set, init=False, repr=False, compare=False)

    def __getattribute__(self, name: str) -> Any:
        """Records which rewards an estimator reads, so that reading them without declaring `credit` raises an error."""
        if name in _CREDITS:
            self.reads.add(_CREDITS[name])
        return super().__getattribute__(name)

    def __post_init__(self) -> None:
        if self.valid is None:
            self.valid = torch.ones_like(self.mask[:, 0])
        self.rewards = torch.where(self.trained, self.rewards, torch.zeros_like(self.rewards))

    @property
    def scores(self) -> Tensor:
        """Sum of each row's rewards, (B,); 0 on invalid rows."""
        return masked_sum(self.rewards, self.mask, -1).to(self.rewards.dtype)

    @property
    def trained(self) -> Tensor:
        """True on tokens of valid rows that the policy sampled, (B, T) bool."""
        return self.mask & self.valid[:, None]


class AdvantageEstimator(ABC):
    """Computes advantages from rewards.

    Attributes:
        needs_critic: Whether it reads `values`.
        needs_groups: Whether it needs several completions per prompt.
        needs_binary_scores: Whether scores must be successes or failures. Rejects a KL penalty in the reward, which
            would change scores. Use a KL penalty in the loss, or none.
        credit: Rewards that it reads. "total" is their sum. "parts" reads `reward_parts` instead of `rewards`, so
            changes to the sum alone (reward clip, normalization, KL in the reward) would be lost. "turns" assigns turn
            rewards to turns, so changes to the sum alone would go to the last turn. Both reject such changes; with
            "turns", KL in the reward counts per turn. Reading `reward_parts`, `turn_ids`, or `anchors` requires it.
        normalizes: Whether it ends with a normalization over the batch, which makes whitening redundant.
    """

    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    needs_binary_scores: ClassVar[bool] = False
    credit: ClassVar[Credit] = "total"
    normalizes: bool = False

    def __call__(self, given: AdvantageInput) -> tuple[Tensor, Tensor | None]:
        """Computes advantages, and checks the shapes of the result of `estimate`.

        Returns:
            (B, T) advantages, 0 outside the mask and on invalid rows, and (B, T) targets for the critic or None. Those
            of invalid rows equal their values, which don't train an unclipped critic.
        """
        advantages, returns = self.estimate(given)
        declared = any("credit" in vars(cls) for cls in type(self).__mro__ if cls is not AdvantageEstimator)
        if given.reads and not declared:
            raise ValueError(
                f"advantage={type(self).__name__}: reads {' and '.join(sorted(given.reads))} without declaring it, so "
                'changes to the sum of rewards might be lost. Set `credit` to "parts", "turns", or "total".'
            )
        for found in (advantages, returns):
            if found is not None and found.shape != given.mask.shape:  # it would broadcast
                raise ValueError(
                    f"advantage={type(self).__name__}: returned shape {tuple(found.shape)} for tokens of shape "
                    f"{tuple(given.mask.shape)}. Return one value per token."
                )
        if returns is not None and given.values is not None:
            returns = torch.where(given.trained, returns, torch.where(given.mask, given.values, 0.0))
        return torch.where(given.trained, advantages, torch.zeros_like(advantages)), returns

    @abstractmethod
    def estimate(self, given: AdvantageInput) -> tuple[Tensor, Tensor | None]:
        """Returns (B, T) advantages, read on trained tokens only, and (B, T) targets for the critic or None."""

    def refuse_combination(self, kl: KLPenalty | None, *, whiten: bool) -> None:
        """Rejects a KL penalty in the reward that the estimator can't use, and whitening after a normalization."""
        if isinstance(kl, KLInReward) and (self.needs_binary_scores or self.credit == "parts"):
            raise ValueError(
                f"advantage={type(self).__name__} with kl=KLInReward: the penalty would change scores that must mean "
                "success or failure, or be lost. Use KLInLoss('k3', ratio_correction=True) or no KL."
            )
        if whiten and self.normalizes:
            raise ValueError(
                f"advantage={type(self).__name__} with whiten_advantages=True: the estimator already normalizes. Set "
                "whiten_advantages=False."
            )

    def refuse_shaped_rewards(self, shaping: str) -> None:
        """Raises a ValueError if a change to the summed reward conflicts with the rewards that the estimator reads.

        `shaping` is the argument or callback for the message, as the user wrote it.
        """
        if self.credit == "total":
            return
        parts = "turn_rewards" if self.credit == "turns" else "reward_parts"
        raise ValueError(
            f"{shaping} with advantage={type(self).__name__}: it reads {parts}, so a change to their sum alone would "
            f"be lost or misplaced. Change {parts} by the same amount, or use RLOO or GroupRelative."
        )


class SequenceEstimator(AdvantageEstimator):
    """Base of estimators with one advantage per sequence, assigned to each of its tokens."""

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        return spread(self.sequence_advantages(given), given.mask), None

    @abstractmethod
    def sequence_advantages(self, given: AdvantageInput) -> Tensor:
        """Returns (B,) advantages from `given.scores`, read on valid rows only."""


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
        self.eps = eps
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
