"""Scores of reward models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
