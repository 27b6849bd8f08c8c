"""Rewards other than the sum of the reward functions: of reward models, single functions, and turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lightrl.algorithms.experience import TrajectoryLayout
from lightrl.objectives.estimators import AdvantageEstimator
from lightrl.records import Rollouts


def last_rows(trajectory_ids: Tensor) -> Tensor:
    """Returns the (B,) index of the last row of each row's trajectory."""
    index = trajectory_ids.unique(return_inverse=True)[1]
    rows = torch.arange(len(index), device=index.device)
    return rows.clone().scatter_reduce_(0, index, rows, "amax", include_self=False)[index]


def add_scores(
    rollouts: Rollouts, name: str, weight: float, scores: Tensor, applies: Sequence[bool] | None = None
) -> None:
    """Adds a reward model's (B,) scores to the rewards in place. Each trajectory's last row has its score.

    Trajectories without other rewards get only the scores of models. Failed trajectories remain unscored, and weight 0
    only records scores. `applies` selects the rows that the model scores; defaults to all.
    """
    applies = applies or [True] * len(rollouts)
    unscored = [failed or not own for failed, own in zip(rollouts.failed, applies, strict=True)]
    scores = scores[last_rows(rollouts.trajectory_ids)]
    scores = scores.masked_fill(torch.tensor(unscored, device=scores.device), float("nan"))
    rollouts.reward_parts[name], rollouts.reward_weights[name] = scores, weight
    total = rollouts.rewards.nan_to_num(0.0) + weight * scores
    rollouts.rewards = torch.where(scores.isfinite() & (weight != 0), total, rollouts.rewards)


def reward_totals(rollouts: Rollouts) -> dict[str, Tensor]:
    """Returns (B,) rewards by `AdvantageEstimator.credit`, 0 on unscored rows. "scale" sums their absolute values."""
    turns, weights = _turn_totals(rollouts), rollouts.reward_weights
    weighted = (weights.get(name, 1.0) * part.nan_to_num(0.0) for name, part in rollouts.reward_parts.items())
    parts, total = torch.stack([turns, *weighted]), rollouts.rewards.nan_to_num(0.0)
    return {"total": total, "parts": parts.sum(0), "turns": turns, "scale": total.abs() + parts.abs().sum(0)}


def uncredited(estimator: AdvantageEstimator, rollouts: Rollouts, before: dict[str, Tensor] | None = None) -> Tensor:
    """Returns the (B,) part of the total that `estimator` doesn't read, or its change since `before`; 0 if rounding."""
    now, credit = reward_totals(rollouts), estimator.credit
    missed = now["total"] - now[credit]
    if before is not None:
        missed = missed - (before["total"] - before[credit])
    bound = 8 * torch.finfo(torch.float32).eps * (1.0 + now["scale"].max())
    return torch.where(rollouts.rewards.isfinite() & (missed.abs() > bound), missed, 0.0)


@contextmanager
def keeps_credit(estimator: AdvantageEstimator, rollouts: Rollouts) -> Iterator[None]:
    """Context manager in which callbacks must not change rewards that the estimator doesn't read."""
    before = reward_totals(rollouts)
    yield
    if bool(uncredited(estimator, rollouts, before).any()):
        estimator.refuse_shaped_rewards("on_rollout_scored: a callback changes rewards")


def with_credited_parts(estimator: AdvantageEstimator, rollouts: Rollouts) -> Rollouts:
    """Adds the sum of turn rewards to the rewards by function, for an estimator with `credit` "parts"."""
    parts, weights = dict(rollouts.reward_parts), dict(rollouts.reward_weights)
    if several := sorted(parts.keys() - weights.keys()):
        name = type(estimator).__name__
        raise ValueError(
            f"rewards_by_label with advantage={name}: {several} need a weight that is equal for all labels."
        )
    missed = uncredited(estimator, rollouts)
    if rollouts.turn_rewards:  # lack those of turns without trained tokens
        name = next(iter(rollouts.turn_rewards))
        parts[name], weights[name] = _turn_totals(rollouts) + missed, 1.0
    elif bool(missed.any()):
        estimator.refuse_shaped_rewards("changed rewards")
    return replace(rollouts, reward_parts=parts, reward_weights=weights)


def _turn_totals(rollouts: Rollouts) -> Tensor:
    """Returns the (B,) sum of turn rewards of each row's trajectory."""
    if not rollouts.turn_rewards:
        return torch.zeros_like(rollouts.rewards)
    layout = TrajectoryLayout(rollouts.trajectory_ids, rollouts.response_mask)
    turns = [(layout.join(x) * layout.mask).sum(1) for x in rollouts.turn_rewards.values()]
    return layout.split(torch.stack(turns).sum(0))
