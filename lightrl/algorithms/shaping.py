"""What callbacks do to the rewards of a rollout, and whether the estimator sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.objectives.trajectories import TrajectoryLayout
from lightrl.records import Rollouts


@dataclass
class RewardCopy:
    """Rewards before callbacks, which may change them in place.

    Attributes:
        rewards: (B,). parts: name -> (B,). turns: (B,), sum of the turn rewards of the row's trajectory.
    """

    rewards: Tensor
    parts: dict[str, Tensor]
    turns: Tensor


def copy_rewards(rollouts: Rollouts) -> RewardCopy:
    """The rewards as they are now."""
    parts = {name: part.clone() for name, part in rollouts.reward_parts.items()}
    return RewardCopy(rollouts.rewards.clone(), parts, _of_turns(rollouts))


def credits_that_miss(before: RewardCopy, rollouts: Rollouts) -> frozenset[str]:
    """For which `AdvantageEstimator.credit` the change since `before` would be lost or land elsewhere.

    "total" misses a change of parts alone. "parts" misses one of the total that the weighted parts don't add up to;
    "turns" one that the turn rewards don't, which would land on the last turn.
    """
    now = rollouts.rewards
    scored = now.isfinite()
    total = _difference(now, before.rewards, scored)
    of_parts, parts_changed = torch.zeros_like(total), False
    for name, part in rollouts.reward_parts.items():
        old = before.parts.get(name)
        moved = _difference(part, torch.zeros_like(part) if old is None else old, scored)
        parts_changed |= bool((moved != 0).any())
        of_parts += rollouts.reward_weights.get(name, 1.0) * moved
    of_turns = _difference(_of_turns(rollouts), before.turns, scored)
    scale = before.rewards.nan_to_num(0.0).abs().max() if len(now) else now.new_zeros(())
    bound = 8 * torch.finfo(torch.float32).eps * (1.0 + float(scale))
    missed = {
        "total": parts_changed and not bool((total != 0).any()),
        "parts": bool(((total - of_parts).abs() > bound).any()),
        "turns": bool(((total - of_turns).abs() > bound).any()),
    }
    return frozenset(name for name, missing in missed.items() if missing)


def _difference(now: Tensor, before: Tensor, scored: Tensor) -> Tensor:
    return torch.where(scored, now.nan_to_num(0.0) - before.nan_to_num(0.0), torch.zeros_like(now))


def _of_turns(rollouts: Rollouts) -> Tensor:
    """(B,) sum of the turn rewards of each row's trajectory."""
    layout = TrajectoryLayout(rollouts.trajectory_ids, rollouts.response_mask)
    total = torch.zeros_like(layout.join(rollouts.rewards.nan_to_num(0.0)))
    for rewards in rollouts.turn_rewards.values():
        total = total + (layout.join(rewards) * layout.mask).sum(1)
    return layout.split(total)
