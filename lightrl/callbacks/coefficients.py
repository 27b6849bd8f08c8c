"""Adaptive coefficients: entropy bonus, KL penalty, and reward scale."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

from lightrl.algorithms.experience import first_rows
from lightrl.records import Rollouts
from lightrl.rollout.learner import RLCallback


class StatefulCallback(RLCallback):
    """A callback that saves the attributes listed in `state` to checkpoints."""

    state: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


class AdaptiveEntropy(StatefulCallback):
    """Keeps the policy's entropy above a target by adapting the coefficient of the entropy bonus.

    After each rollout with mean token entropy e, the coefficient c increases by `step` if `e <= target` and decreases
    otherwise, within [minimum, maximum]. The next rollout uses `entropy_coef = c` if `e <= target`, otherwise 0. This
    overrides the module's `entropy_coef`, and disables skipping sequences with zero advantage. A rollout without
    trained tokens has no effect.

    Args:
        target: Target entropy in nats per token.
        step: Change of the coefficient per rollout.
        start: Initial coefficient.
        minimum: Lower bound of the coefficient.
        maximum: Upper bound of the coefficient.

    Source: Skywork-OR1, https://arxiv.org/abs/2505.22312, section 4, which uses the entropy of the next step. We use
        `policy/entropy` of the previous rollout, which needs no additional forward pass.
    """

    state = ("coef", "active")
    reads_old_logprobs = False

    def __init__(
        self, target: float = 0.2, step: float = 0.005, start: float = 0.0, minimum: float = 0.0, maximum: float = 1.0
    ) -> None:
        self.target = target
        self.step = step
        self.minimum = minimum
        self.maximum = maximum
        self.coef = start
        self.active = False

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._apply(pl_module)

    def on_policy_updated(self, trainer: Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        entropy = metrics.get("policy/entropy")
        if entropy is None:
            return
        self.active = entropy <= self.target
        step = self.step if self.active else -self.step
        self.coef = min(max(self.coef + step, self.minimum), self.maximum)
        self._apply(pl_module)

    def _apply(self, pl_module: Any) -> None:
        pl_module.set_entropy_coef(self.coef if self.active else 0.0)


class KLCallback(StatefulCallback):
    """A callback that requires a KL penalty."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and pl_module.kl is None:
            raise ValueError(
                f"callback {type(self).__name__} with kl=None: requires a KL penalty. Set kl (KLInReward or "
                "KLInLoss), or remove the callback."
            )


class AdaptiveKL(KLCallback):
    """Adapts the KL coefficient to keep the KL divergence from the reference near a target.

    After each rollout of n trajectories, `coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon`. A rollout
    without trained tokens has no effect.

    Args:
        target: Target KL divergence in nats per sampled token.
        horizon: Number of trajectories in which a constant error of 20% multiplies the coefficient by about e^0.2.

    Raises:
        ValueError: If the module has no KL penalty.

    Source: Ziegler et al. (2019), https://arxiv.org/abs/1909.08593, section 2.2, which sums the KL over a sequence. We
        use `kl/ref`, the mean per token, so that the target doesn't depend on the length.
    """

    state = ("coef",)
    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, target: float = 0.05, horizon: float = 10_000) -> None:
        self.target = target
        self.horizon = horizon
        self.coef: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.coef is None:
            self.coef = float(pl_module.kl.coef)
        pl_module.set_kl_coef(self.coef)

    def on_rollout_scored(self, trainer: Trainer, pl_module: Any, rollouts: Rollouts) -> None:
        self._trajectories = len(rollouts.trajectory_ids.unique()) * trainer.world_size

    def on_policy_updated(self, trainer: Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        assert self.coef is not None, "set in on_train_start"
        if "kl/ref" not in metrics:
            return
        error = min(max(metrics["kl/ref"] / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * self._trajectories / self.horizon
        pl_module.set_kl_coef(self.coef)


class LinearKL(KLCallback):
    """Changes the KL coefficient linearly from `start` to `end` over the first `num_rollouts` rollouts.

    Args:
        start: Coefficient of the first rollout.
        end: Final coefficient.
        num_rollouts: Length of the ramp in rollouts.

    Raises:
        ValueError: If the module has no KL penalty.
    """

    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, start: float, end: float, num_rollouts: int) -> None:
        self.start = start
        self.end = end
        self.num_rollouts = num_rollouts

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        done = min(trainer.fit_loop.total_batch_idx / self.num_rollouts, 1.0)
        pl_module.set_kl_coef(self.start + (self.end - self.start) * done)


class RewardNormalization(StatefulCallback):
    """Normalizes rewards by their running mean and standard deviation.

    The statistics are updated across all ranks before each use and saved in checkpoints. The standard deviation is
    unbiased, and `min_std` avoids infinite rewards. Turn rewards are divided by it as well.

    Args:
        center: Whether to subtract the mean. Has an effect on REINFORCE and GAE, but not on group estimators.
        min_std: Lower bound of the standard deviation.

    Source: Chan et al. (1983), parallel Welford algorithm,
        http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.
    """

    state = ("count", "mean", "sum_squares")
    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, center: bool = True, min_std: float = 1e-4) -> None:
        self.center = center
        self.min_std = min_std
        self.count = 0.0
        self.mean = 0.0
        self.sum_squares = 0.0

    @property
    def std(self) -> float:
        """Running unbiased standard deviation, at least `min_std`, or 1 for fewer than two rewards."""
        if self.count < 2:
            return 1.0
        return max((self.sum_squares / (self.count - 1)) ** 0.5, self.min_std)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Rejects estimators that don't use the total reward or that require binary scores."""
        super().setup(trainer, pl_module, stage)
        advantage = getattr(pl_module, "advantage", None)
        if advantage is None:
            return
        advantage.refuse_shaped_rewards("callback RewardNormalization")
        if advantage.needs_binary_scores:
            name = type(advantage).__name__
            raise ValueError(
                f"callback RewardNormalization with advantage={name}: requires binary scores, which normalization "
                "changes. Remove the callback, or use GroupRelative."
            )

    def on_rollout_scored(self, trainer: Trainer, pl_module: Any, rollouts: Rollouts) -> None:
        """Updates the statistics and normalizes the rewards. Missing rewards stay NaN."""
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
        rollouts.turn_rewards = {name: x / self.std for name, x in rollouts.turn_rewards.items()}
