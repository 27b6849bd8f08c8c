"""Advantage estimators with credit per turn."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightrl.compat.arguments import one_of
from lightrl.objectives.estimators import AdvantageEstimator, AdvantageInput
from lightrl.objectives.special_estimators import unscored_at_values
from lightrl.ops.advantages import group_stats
from lightrl.ops.baselines import gae, leave_one_out, returns_to_go
from lightrl.records import Rollouts


class TurnReturns(AdvantageEstimator):
    """Return from each turn, minus the mean return of the group's other trajectories from that turn.

        A_ik = G_ik - 1 / (n - 1) * sum_{j != i} G_j,min(k, last_j),    G_ik = r_ik + gamma * G_i,k+1

    The baseline of a turn uses one return of every other trajectory, from its last turn if it has fewer turns. It
    depends only on the others, so with gamma = 1 the expected gradient is the policy gradient. With a reward only at
    the end, it equals RLOO. A group of one valid trajectory gets 0.

    Args:
        gamma: Discount per turn, in [0, 1].

    Source: leave-one-out https://arxiv.org/abs/2402.14740, per turn. Unlike MT-GRPO (https://arxiv.org/abs/2505.11821),
        the mean is not limited to trajectories that reach the turn, which implicitly penalizes further turns
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
        return turns.spread(advantages), unscored_at_values(turns.spread(returns), given, given.values)


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

    Source: https://arxiv.org/abs/2505.10978, eq. 3-8. The paper's means are over the whole group. Here they exclude all
        visits of the trajectory itself, so they don't depend on when it stops.
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
