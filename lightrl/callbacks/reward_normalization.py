"""Running normalisation of rewards."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

from lightrl.algorithms.experience import first_rows
from lightrl.algorithms.hooks import RLCallback
from lightrl.compat.arguments import above
from lightrl.records import Rollouts


class RewardNormalization(RLCallback):
    """Divides rewards by their running standard deviation, and shifts them by their running mean if asked.

    Moments are updated with each rollout over all ranks before they are used (Chan et al. 1983, parallel Welford,
    http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf) and saved in checkpoints. The standard
    deviation is unbiased and floored, so equal rewards and a first sample give 0 or themselves, never infinity.

    Args:
        center: subtract the mean. Group estimators do it anyway; it matters for REINFORCE and GAE.
        min_std: floor of the standard deviation, above 0 and at most 1e6.
    """

    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, center: bool = True, min_std: float = 1e-4) -> None:
        self.center = center
        self.min_std = above("RewardNormalization.min_std", min_std)
        self.count = 0.0
        self.mean = 0.0
        self.sum_squares = 0.0

    @property
    def std(self) -> float:
        """Running unbiased standard deviation, at least `min_std`; 1 before there are two rewards."""
        if self.count < 2:
            return 1.0
        return max((self.sum_squares / (self.count - 1)) ** 0.5, self.min_std)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuses estimators that do not read the normalised sum, or for which it would be no score any more."""
        super().setup(trainer, pl_module, stage)
        advantage = getattr(pl_module, "advantage", None)
        if advantage is None:
            return
        advantage.refuse_shaped_rewards("callback RewardNormalization")
        if advantage.needs_binary_scores:
            name = type(advantage).__name__
            raise ValueError(
                f"callback RewardNormalization with advantage={name}: {name} takes a score for success or failure, "
                "which normalisation would move. Drop the callback, or take GroupRelative."
            )

    def on_rollout_scored(self, trainer: Trainer, pl_module: Any, rollouts: Rollouts) -> None:
        """Updates the moments and normalises `rollouts.rewards` in place; unscored rows stay NaN."""
        rewards = rollouts.rewards[first_rows(rollouts.trajectory_ids)]
        scored = rewards[rewards.isfinite()].double()
        local = torch.stack([torch.tensor(float(len(scored)), dtype=torch.float64), scored.sum().cpu()])
        n, total = pl_module.all_sum(local).tolist()
        if n == 0:
            return
        mean = total / n
        spread = float(pl_module.all_sum((scored - mean).square().sum().cpu()))
        delta, count = mean - self.mean, self.count + n
        self.sum_squares += spread + delta * delta * self.count * n / count
        self.mean += delta * n / count
        self.count = count
        shift = self.mean if self.center else 0.0
        rollouts.rewards = (rollouts.rewards - shift) / self.std

    def state_dict(self) -> dict[str, Any]:
        """The moments."""
        return {"count": self.count, "mean": self.mean, "sum_squares": self.sum_squares}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the moments."""
        self.count, self.mean = state_dict["count"], state_dict["mean"]
        self.sum_squares = state_dict["sum_squares"]
