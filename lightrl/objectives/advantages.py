"""Advantage estimators: from rewards of trajectories to advantages of tokens."""

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
    "GiGPO",
    "GroupRelative",
    "MaxRL",
    "PassAtK",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "SequenceEstimator",
    "TurnGAE",
    "TurnReturns",
    "Turns",
    "clean",
    "fraction",
    "positive",
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
        needs_turns: gives turns credit of their own: is called with `turn_ids`, and reads where in `rewards` each
            turn's reward stands, so that what rescales the trajectory's total alone is refused.
        needs_anchors: compares turns that began in the same state: is called with `anchors`.
        normalizes: ends with a normalisation over the batch of its own; whitening it again would be a second one.
    """

    scope: Scope = "group"
    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    needs_binary_scores: ClassVar[bool] = False
    needs_reward_parts: ClassVar[bool] = False
    needs_turns: ClassVar[bool] = False
    needs_anchors: ClassVar[bool] = False
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
        turn_ids: Tensor | None = None,
        anchors: Tensor | None = None,
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
            turn_ids: (B, T) int64, read on the mask: number of the turn a token belongs to; None where every row is
                one turn. Given to estimators with `needs_turns`.
            anchors: (B, T) int64, read on the mask: the state in which the token's turn began, equal for equal states
                of a group; None where every row is one turn. Given to estimators with `needs_anchors`.
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
        self.gamma = fraction("GAE", "gamma", gamma)
        self.lam = fraction("GAE", "lam", lam)

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
            raise ValueError("GAE: values=None: it needs a critic. Give the module one, or use RLOO or GroupRelative.")
        rewards, valid = clean(rewards, mask, valid)
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
        self.gamma = fraction("Reinforce", "gamma", gamma)

    def __call__(
        self, rewards: Tensor, mask: Tensor, groups: Tensor, *, valid: Tensor | None = None, **unused: object
    ) -> tuple[Tensor, None]:
        rewards, _ = clean(rewards, mask, valid)
        return returns_to_go(rewards, mask, self.gamma), None


class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE with the KL in the reward and one normalisation over all tokens of all ranks.

        A_t = (R_t - mean) / (std + 1e-8),    R_t the discounted return from token t on

    Args:
        gamma: discount per sampled token, in [0, 1].

    Raises:
        ValueError: gamma is out of range.

    Source: https://arxiv.org/abs/2501.03262, eq. 7-9. verl and OpenRLHF normalise over the whole batch, too; LightRFT's
        `reinforce++` raises.
    """

    scope = "batch"
    normalizes = True

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = fraction("ReinforcePlusPlus", "gamma", gamma)

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
        returns = returns_to_go(rewards, mask, self.gamma)
        return masked_whiten(returns, mask & valid[:, None], all_sum=all_sum), None


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
        if scale not in ("group", "batch", "none"):
            raise ValueError(f"GroupRelative(scale={scale!r}): must be 'group', 'batch' or 'none'.")
        self.scale = scale
        self.eps = positive("GroupRelative", "eps", eps)
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
            raise ValueError(f"MaxRL: a score of {scores.min().item():.4g}: rewards must be 0 or 1. Use GroupRelative.")
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


class TurnReturns(AdvantageEstimator):
    """Return from each turn on, minus the mean of the group's other attempts at that turn, on the turn's tokens.

        A_ik = G_ik - 1 / (n - 1) * sum_{j != i} G_j,min(k, last_j),    G_ik = r_ik + gamma * G_i,k+1

    The baseline of a turn takes one return from every other attempt, from its last turn where it ended sooner. So it
    depends on the others alone, whichever turn the attempt itself stops at, and with gamma = 1 the expected gradient
    is the policy gradient. With a reward at the end alone it is RLOO. A group of one valid attempt gets 0.

    Args:
        gamma: discount per turn, in [0, 1].

    Raises:
        ValueError: gamma is out of range.

    Source: leave-one-out https://arxiv.org/abs/2402.14740, per turn; why not MT-GRPO's normalisation per turn number
        (https://arxiv.org/abs/2505.11821): it subtracts a mean only from those that take another turn, which is a
        hidden penalty on taking one (https://github.com/verl-project/verl/issues/7244).
    """

    needs_groups = True
    needs_turns = True

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = fraction("TurnReturns", "gamma", gamma)

    def __call__(
        self,
        rewards: Tensor,
        mask: Tensor,
        groups: Tensor,
        *,
        valid: Tensor | None = None,
        turn_ids: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        rewards, valid = clean(rewards, mask, valid)
        turns = Turns(mask, turn_ids)
        returns = returns_to_go(turns.sums(rewards), turns.there, self.gamma)
        reached = turns.held(returns)
        columns = [leave_one_out(column, groups, valid) for column in reached.unbind(1)]
        return turns.spread(torch.stack(columns, 1)), None


class TurnGAE(AdvantageEstimator):
    """Generalised advantage estimation whose steps are turns; a turn's tokens share its advantage and its return.

        delta_k = r_k + gamma * V_k+1 - V_k,    A_k = delta_k + gamma * lam * A_k+1,    R_k = A_k + V_k

    V_k is the critic's value before the first token of turn k, 0 after the last turn. lam = 1 needs no true critic:
    the expected gradient is the policy gradient (gamma = 1) whatever V is.

    Args:
        gamma: discount per turn, in [0, 1].
        lam: in [0, 1].

    Raises:
        ValueError: an argument is out of range; on call, `values` is missing.

    Source: https://arxiv.org/abs/1506.02438; turns as steps: https://arxiv.org/abs/2512.17008, whose clip per turn is
        a loss's matter and not here.
    """

    needs_critic = True
    needs_turns = True

    def __init__(self, gamma: float = 1.0, lam: float = 0.95) -> None:
        self.gamma = fraction("TurnGAE", "gamma", gamma)
        self.lam = fraction("TurnGAE", "lam", lam)

    def __call__(
        self,
        rewards: Tensor,
        mask: Tensor,
        groups: Tensor,
        *,
        values: Tensor | None = None,
        valid: Tensor | None = None,
        turn_ids: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor, Tensor]:
        if values is None:
            raise ValueError("TurnGAE: values=None: it needs a critic. Give the module one, or use TurnReturns.")
        rewards, valid = clean(rewards, mask, valid)
        turns = Turns(mask, turn_ids)
        advantages, returns = gae(turns.sums(rewards), turns.first(values), turns.there, self.gamma, self.lam)
        keep, zero = mask & valid[:, None], torch.zeros_like(values)
        unscored = torch.where(mask, values, zero)  # leaves an unclipped critic where it is
        return torch.where(keep, turns.spread(advantages), zero), torch.where(keep, turns.spread(returns), unscored)


class GiGPO(AdvantageEstimator):
    """Credit of the whole attempt plus credit of the turn among all turns of the group that began in the same state.

        A_ik = (R_i - mean_others) / F + step_weight * (G_ik - mean of the others' G in the state of turn k) / F_state

    R is the attempt's summed reward, G_ik the return from turn k on, discounted by gamma per turn. F is 1, or the std
    plus eps. A state that no other attempt saw adds nothing. States are equal where `Environment.state_key` is. With
    scale "none" and gamma = 1 the expected gradient is the policy gradient plus `step_weight` times the same with each
    state weighted by the chance that another attempt saw it.

    Args:
        gamma: discount per turn, in [0, 1]; the paper takes 0.95.
        step_weight: weight of the turn's credit, at least 0.
        scale: "group" divides by the std of the attempts', and of the state's, returns; "none" by 1.
        eps: added to the std, above 0.

    Raises:
        ValueError: an argument is out of its range; on call, a turn has no state.

    Source: https://arxiv.org/abs/2505.10978, eq. 3-8. There means are of the whole group; here they leave the attempt
        out, with all its visits, so that they do not depend on when it stops.
    """

    needs_groups = True
    needs_turns = True
    needs_anchors = True

    def __init__(
        self,
        gamma: float = 0.95,
        step_weight: float = 1.0,
        scale: Literal["group", "none"] = "group",
        eps: float = 1e-4,
    ) -> None:
        if scale not in ("group", "none"):
            raise ValueError(f"GiGPO(scale={scale!r}): must be 'group' or 'none'.")
        if not step_weight >= 0:
            raise ValueError(f"GiGPO(step_weight={step_weight}): must be at least 0.")
        self.gamma = fraction("GiGPO", "gamma", gamma)
        self.step_weight = step_weight
        self.scale = scale
        self.eps = positive("GiGPO", "eps", eps)

    def __call__(
        self,
        rewards: Tensor,
        mask: Tensor,
        groups: Tensor,
        *,
        valid: Tensor | None = None,
        turn_ids: Tensor | None = None,
        anchors: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        rewards, valid = clean(rewards, mask, valid)
        turns = Turns(mask, turn_ids)
        scores = masked_sum(rewards, mask, -1).to(rewards.dtype)
        attempts = leave_one_out(scores, groups, valid)
        if self.scale == "group":
            attempts = attempts / (group_stats(scores, groups, valid).std + self.eps)
        returns = returns_to_go(turns.sums(rewards), turns.there, self.gamma)
        keys = torch.zeros_like(groups)[:, None].expand_as(returns) if anchors is None else turns.first(anchors)
        if anchors is None and turns.there.shape[1] > 1:
            raise ValueError(
                "GiGPO: anchors=None: it compares turns in equal states, and nothing says which state a turn began "
                "in. Use an environment (`EnvironmentEpisode`), or TurnReturns."
            )
        seen = turns.there & valid[:, None]
        owners, _ = seen.nonzero(as_tuple=True)
        pairs = torch.stack([groups[owners], keys[seen].long()], 1)
        states = pairs.unique(dim=0, return_inverse=True)[1] if len(pairs) else owners
        steps = torch.zeros_like(returns)
        steps[seen] = self._against_others(returns[seen], states, owners)
        return turns.spread(torch.where(seen, attempts[:, None] + self.step_weight * steps, 0.0)), None

    def _against_others(self, returns: Tensor, states: Tensor, owners: Tensor) -> Tensor:
        """(m,) returns less the mean of those of other owners in the same state, over its std where asked for."""
        stats = group_stats(returns, states, torch.ones_like(returns, dtype=torch.bool))
        visits = torch.stack([states, owners], 1).unique(dim=0, return_inverse=True)[1] if len(states) else states
        own = group_stats(returns, visits, torch.ones_like(returns, dtype=torch.bool))
        others = stats.size - own.size
        mean = (stats.mean * stats.size - own.mean * own.size) / others.clamp(min=1)
        against = torch.where((others > 0) & stats.varied, returns - mean, torch.zeros_like(returns))
        return against / (stats.std + self.eps) if self.scale == "group" else against


class Turns:
    """Moves numbers between B rows of tokens and K turns.

    Args:
        mask: (B, T) bool, sampled tokens. turn_ids: (B, T) int64, read on the mask; one turn per row where None.

    Attributes:
        there: (B, K) bool, whether the row has tokens of the turn.
    """

    def __init__(self, mask: Tensor, turn_ids: Tensor | None) -> None:
        self._mask = mask
        self._ids = torch.where(mask, torch.zeros_like(mask, dtype=torch.long) if turn_ids is None else turn_ids, 0)
        count = int(self._ids.max()) + 1 if self._ids.numel() else 1
        self.there = self._per_turn(count, mask.long()) > 0
        positions = torch.arange(mask.shape[1], device=mask.device).expand_as(self._ids)
        end = torch.where(mask, positions, mask.shape[1])
        first = end.new_full(self.there.shape, mask.shape[1]).scatter_reduce_(1, self._ids, end, "amin")
        self._firsts = first.clamp(max=mask.shape[1] - 1)

    def _per_turn(self, count: int, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), count).scatter_add_(1, self._ids, x * self._mask)

    def sums(self, x: Tensor) -> Tensor:
        """(B, K) sums of (B, T) numbers over each turn's tokens."""
        return self._per_turn(self.there.shape[1], x)

    def first(self, x: Tensor) -> Tensor:
        """(B, K) what (B, T) `x` holds on each turn's first token; 0 where there is no such turn."""
        return torch.where(self.there, x.gather(1, self._firsts), torch.zeros((), dtype=x.dtype, device=x.device))

    def held(self, x: Tensor) -> Tensor:
        """(B, K) numbers in which a turn that is not there has the number of the one before it, or of the first."""
        numbers = torch.arange(x.shape[1], device=x.device)
        last = torch.where(self.there, numbers, -1).cummax(1).values
        start = self.there.long().argmax(1, keepdim=True)
        return x.gather(1, torch.where(last < 0, start, last))

    def spread(self, x: Tensor) -> Tensor:
        """(B, T) tokens that hold their turn's number of (B, K) `x`; 0 off the mask."""
        return torch.where(self._mask, x.gather(1, self._ids), torch.zeros((), dtype=x.dtype, device=x.device))
