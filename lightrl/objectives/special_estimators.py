"""Advantage estimators without groups, with other baselines than GRPO's, or with credit per turn."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightrl.compat.arguments import one_of
from lightrl.objectives.estimators import AdvantageEstimator, AdvantageInput, SequenceEstimator
from lightrl.ops.baselines import gae, leave_one_out, pass_at_k, returns_to_go
from lightrl.ops.formulas import group_centered, group_stats, masked_whiten, spread
from lightrl.records import Rollouts


class GAE(AdvantageEstimator):
    """Generalized advantage estimation (GAE): `A_t = sum_l (gamma * lam)**l * delta_{t+l}`, with returns `A + V`.

    Steps are sampled tokens; other tokens inside a response are skipped.

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
        return gae(given.rewards, given.values, given.mask, self.gamma, self.lam)


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
        stats = group_stats(given.scores, given.groups, given.valid, given.mask.sum(-1))
        return group_centered(given.scores, stats, given.valid)


class MaxRL(SequenceEstimator):
    """Maximum likelihood of success: `A_i = (s_i - mean) / mean`, 0 in a group without a success.

    In expectation, this is the gradient of `sum_{k=1}^{G-1} 1/k * pass@k`, which approaches `grad log p(success)`.
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


# ---- credit per turn -------------------------------------------------------------------------------------------------


class TurnReturns(AdvantageEstimator):
    """Return from each turn, minus the mean return of the group's other trajectories from that turn.

        A_ik = G_ik - 1 / (n - 1) * sum_{j != i} G_j,min(k, last_j),    G_ik = r_ik + gamma * G_i,k+1

    The baseline of a turn uses one return of every other trajectory, from its last turn if it has fewer turns. It
    depends only on the others, so with gamma = 1 the expected gradient is the policy gradient. With a reward only at
    the end, it equals RLOO. A group of one valid trajectory gets 0.

    Args:
        gamma: Discount per turn, in [0, 1].

    Source: leave-one-out https://arxiv.org/abs/2402.14740, per turn. Unlike MT-GRPO (https://arxiv.org/abs/2505.11821),
        the mean is not limited to trajectories that reach the turn, which implicitly penalizes additional turns
        (https://github.com/verl-project/verl/issues/7244).
    """

    needs_groups = True
    credit = "turns"

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = gamma

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        turns = Turns(given)
        returns = returns_to_go(turns.rewards, turns.there, self.gamma)
        reached = turns.held(returns)
        columns = [leave_one_out(column, given.groups, given.valid) for column in reached.unbind(1)]
        return turns.spread(torch.stack(columns, 1)), None


class TurnGAE(AdvantageEstimator):
    """Generalized advantage estimation over turns. All tokens of a turn share its advantage and return.

        delta_k = r_k + gamma * V_k+1 - V_k,    A_k = delta_k + gamma * lam * A_k+1,    R_k = A_k + V_k

    V_k is the critic's value before the first token of turn k, and 0 after the last turn. With lam = 1 and gamma = 1,
    the expected gradient is the policy gradient for any V.

    Args:
        gamma: Discount per turn, in [0, 1].
        lam: Trade-off in [0, 1]. 1 is the return minus V, 0 the one-step difference.

    Source: https://arxiv.org/abs/1506.02438; turns as steps: https://arxiv.org/abs/2512.17008, without its clip per
        turn.
    """

    needs_critic = True
    credit = "turns"

    def __init__(self, gamma: float = 1.0, lam: float = 0.95) -> None:
        self.gamma = gamma
        self.lam = lam

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, Tensor]:
        assert given.values is not None, "TurnGAE needs a critic"
        turns = Turns(given)
        advantages, returns = gae(turns.rewards, turns.first(given.values), turns.there, self.gamma, self.lam)
        return turns.spread(advantages), turns.spread(returns)


class GiGPO(AdvantageEstimator):
    """Group-in-group policy optimization (GiGPO): credit of the trajectory plus credit of the turn.

        A_ik = (R_i - mean_others) / F + step_weight * (G_ik - mean of the others' G in the state of turn k) / F_state

    R is the trajectory's summed reward, and G_ik the return from turn k, discounted by gamma per turn. F is 1, or the
    std plus eps. A turn is compared with all turns of the group that began in the same state, as given by
    `Environment.state_key`. States that no other trajectory visited add nothing. With scale "none" and gamma = 1, the
    expected gradient is the policy gradient plus `step_weight` times a weighted one. Its weight of a state is the
    probability that another trajectory visits it.

    Args:
        gamma: Discount per turn, in [0, 1]. The paper uses 0.95.
        step_weight: Weight of the turn's credit, at least 0.
        scale: Divisor: "group" is the std of returns over trajectories or over visits of a state, "none" is 1.
        eps: Constant added to the std, above 0.

    Raises:
        ValueError: A turn has no state.

    Source: https://arxiv.org/abs/2505.10978, eq. 3-8. The paper averages over the whole group. Here the means exclude
        all visits of the trajectory itself, so they don't depend on when it stops.
    """

    needs_groups = True
    credit = "turns"

    def __init__(
        self,
        gamma: float = 0.95,
        step_weight: float = 1.0,
        scale: Literal["group", "none"] = "group",
        eps: float = 1e-4,
    ) -> None:
        self.gamma = gamma
        self.step_weight = step_weight
        self.scale = one_of("GiGPO.scale", scale, "group", "none")
        self.eps = eps

    def estimate(self, given: AdvantageInput) -> tuple[Tensor, None]:
        turns, groups, anchors = Turns(given), given.groups, given.anchors
        attempts = leave_one_out(given.scores, groups, given.valid)
        if self.scale == "group":
            attempts = attempts / (group_stats(given.scores, groups, given.valid).std + self.eps)
        returns = returns_to_go(turns.rewards, turns.there, self.gamma)
        keys = torch.zeros_like(groups)[:, None].expand_as(returns) if anchors is None else turns.first(anchors)
        if anchors is None and turns.there.shape[1] > 1:
            raise ValueError(
                "GiGPO: anchors=None: needs the state in which each turn began. Use an environment "
                "(`EnvironmentEpisode`), or TurnReturns."
            )
        seen = turns.there & given.valid[:, None]
        owners, _ = seen.nonzero(as_tuple=True)
        pairs = torch.stack([groups[owners], keys[seen].long()], 1)
        states = pairs.unique(dim=0, return_inverse=True)[1] if len(pairs) else owners
        steps = torch.zeros_like(returns)
        steps[seen] = self._against_others(returns[seen], states, owners)
        return turns.spread(torch.where(seen, attempts[:, None] + self.step_weight * steps, 0.0)), None

    def _against_others(self, returns: Tensor, states: Tensor, owners: Tensor) -> Tensor:
        """Returns (m,) returns minus the mean of other owners' in the same state, divided by their std if scaled."""
        stats = group_stats(returns, states, torch.ones_like(returns, dtype=torch.bool))
        visits = torch.stack([states, owners], 1).unique(dim=0, return_inverse=True)[1] if len(states) else states
        own = group_stats(returns, visits, torch.ones_like(returns, dtype=torch.bool))
        others = stats.size - own.size
        mean = (stats.mean * stats.size - own.mean * own.size) / others.clamp(min=1)
        against = torch.where((others > 0) & stats.varied, returns - mean, torch.zeros_like(returns))
        return against / (stats.std + self.eps) if self.scale == "group" else against


class Turns:
    """Maps tensors between B rows of tokens and K turns.

    Args:
        given: Input whose `turn_ids` assign tokens to turns. Defaults to one turn per row if they are None.

    Attributes:
        there: (B, K) bool, whether the row has tokens of the turn.
        rewards: (B, K) sums of the rewards over each turn's tokens.
    """

    def __init__(self, given: AdvantageInput) -> None:
        mask, ids = given.mask, given.turn_ids
        self._mask = mask
        self._ids = torch.where(mask, torch.zeros_like(mask, dtype=torch.long) if ids is None else ids, 0)
        count = int(self._ids.max()) + 1 if self._ids.numel() else 1
        self.there = self._per_turn(count, mask.long()) > 0
        self.rewards = self._per_turn(count, given.rewards)
        positions = torch.arange(mask.shape[1], device=mask.device).expand_as(self._ids)
        end = torch.where(mask, positions, mask.shape[1])
        first = end.new_full(self.there.shape, mask.shape[1]).scatter_reduce_(1, self._ids, end, "amin")
        self._firsts = first.clamp(max=mask.shape[1] - 1)

    def _per_turn(self, count: int, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), count).scatter_add_(1, self._ids, x * self._mask)

    def first(self, x: Tensor) -> Tensor:
        """Returns the (B, K) values of (B, T) `x` on each turn's first token; 0 for missing turns."""
        return torch.where(self.there, x.gather(1, self._firsts), torch.zeros((), dtype=x.dtype, device=x.device))

    def held(self, x: Tensor) -> Tensor:
        """Fills missing turns of (B, K) numbers with the previous turn's number, or with the first."""
        numbers = torch.arange(x.shape[1], device=x.device)
        last = torch.where(self.there, numbers, -1).cummax(1).values
        start = self.there.long().argmax(1, keepdim=True)
        return x.gather(1, torch.where(last < 0, start, last))

    def spread(self, x: Tensor) -> Tensor:
        """Returns (B, T) tokens with their turn's number from (B, K) `x`; 0 outside the mask."""
        return torch.where(self._mask, x.gather(1, self._ids), torch.zeros((), dtype=x.dtype, device=x.device))


def turn_anchors(rollouts: Rollouts) -> Tensor:
    """Returns the (B, T) int64 index of the state in which each token's turn began."""
    numbers: dict[str, int] = {}
    count = max(len(states) for states in rollouts.states)
    rows = [[numbers.setdefault(state, len(numbers)) for state in states] for states in rollouts.states]
    table = torch.tensor([row + [0] * (count - len(row)) for row in rows], device=rollouts.token_ids.device)
    mask = rollouts.response_mask
    turns = torch.zeros_like(mask, dtype=torch.long) if rollouts.turn_ids is None else rollouts.turn_ids
    return torch.where(mask, table.gather(1, torch.where(mask, turns, 0)), 0)
