"""Coefficients that follow the run: entropy bonus, KL penalty, and the scale of rewards."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

from lightrl.algorithms.experience import first_rows
from lightrl.algorithms.hooks import RLCallback
from lightrl.compat.arguments import above, at_least
from lightrl.ops.entropy import adaptive_entropy_coef
from lightrl.records import Rollouts


class AdaptiveEntropy(RLCallback):
    """Keeps the policy's entropy from falling below a target by moving the weight of the entropy bonus.

    After each rollout with mean token entropy e the coefficient c moves by `step`: up where `e <= target`, else down,
    within [minimum, maximum]. The next rollout is trained with `entropy_coef = c` if `e <= target`, else with 0. It
    replaces the module's own `entropy_coef`, and has the module run rows without an advantage, which it otherwise
    skips. A rollout without trained tokens changes nothing.

    Args:
        target: Entropy in nats per token, above 0.
        step: Change of the coefficient per rollout, above 0.
        start: First coefficient.
        minimum: Lower bound of the coefficient, at least 0.
        maximum: Upper bound of the coefficient.

    Raises:
        ValueError: A value is out of range.

    Source: Skywork-OR1, https://arxiv.org/abs/2505.22312, section 4. There the entropy is that of the next step;
        here it is `policy/entropy` of the previous rollout, which needs no extra forward pass.
    """

    reads_old_logprobs = False

    def __init__(
        self, target: float = 0.2, step: float = 0.005, start: float = 0.0, minimum: float = 0.0, maximum: float = 1.0
    ) -> None:
        if not 0 <= minimum <= start <= maximum:
            raise ValueError(
                f"AdaptiveEntropy: minimum={minimum}, start={start}, maximum={maximum}: needs 0 <= minimum <= start "
                "<= maximum."
            )
        self.target = above("AdaptiveEntropy.target", target)
        self.step = above("AdaptiveEntropy.step", step)
        self.minimum = minimum
        self.maximum = maximum
        self.coef = start
        self.active = False

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Sets the coefficient of the first rollout, or of the one after a checkpoint."""
        self._apply(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Moves the coefficient by the rollout's entropy."""
        entropy = outputs.get("policy/entropy")
        if entropy is None:
            return
        self.coef = adaptive_entropy_coef(
            self.coef, entropy, self.target, step=self.step, minimum=self.minimum, maximum=self.maximum
        )
        self.active = entropy <= self.target
        self._apply(pl_module)

    def _apply(self, pl_module: Any) -> None:
        pl_module.set_entropy_coef(self.coef if self.active else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The coefficient, and whether it is in use."""
        return {"coef": self.coef, "active": self.active}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores them."""
        self.coef, self.active = state_dict["coef"], state_dict["active"]


class _KLControl(RLCallback):
    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Rejects a module without a KL penalty."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and pl_module.kl is None:
            raise ValueError(
                f"{type(self).__name__} needs a KL term: set the module's kl (KLInReward or KLInLoss), or drop it."
            )


class AdaptiveKL(_KLControl):
    """Moves the KL coefficient so that the KL to the reference stays near a target.

    After each rollout of n trajectories `coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon`
    (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2). There KL is summed over the tokens of a
    sequence; here it is `kl/ref`, nats per token, so that the target does not depend on the length. A rollout without
    trained tokens changes nothing.

    Args:
        target: Target KL in nats per sampled token, above 0.
        horizon: Trajectories after which a constant 20% error has multiplied the coefficient by about e^0.2.

    Raises:
        ValueError: A value is out of range; in `setup`, the module has no KL term.
    """

    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, target: float = 0.05, horizon: float = 10_000) -> None:
        self.target = above("AdaptiveKL.target", target)
        self.horizon = above("AdaptiveKL.horizon", horizon)
        self.coef: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Starts from the module's coefficient, or sets the one from a checkpoint."""
        if self.coef is None:
            self.coef = float(pl_module.kl.coef)
        pl_module.set_kl_coef(self.coef)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Updates the coefficient from the rollout's mean KL."""
        assert self.coef is not None, "set in on_train_start"
        if "kl/ref" not in outputs:
            return
        error = min(max(outputs["kl/ref"] / self.target - 1.0, -0.2), 0.2)
        trajectories = len(batch.trajectory_ids.unique()) * trainer.world_size
        self.coef *= 1.0 + error * trajectories / self.horizon
        pl_module.set_kl_coef(self.coef)

    def state_dict(self) -> dict[str, Any]:
        """The coefficient."""
        return {"coef": self.coef}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores it; the module gets it when training starts."""
        self.coef = state_dict["coef"]


class LinearKL(_KLControl):
    """Moves the KL coefficient linearly from `start` to `end` over the first `num_rollouts` rollouts, then holds it.

    Args:
        start: Coefficient of the first rollout.
        end: Coefficient from rollout `num_rollouts` on.
        num_rollouts: Length of the ramp, at least 1.

    Raises:
        ValueError: A value is out of range; in `setup`, the module has no KL term.
    """

    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, start: float, end: float, num_rollouts: int) -> None:
        self.start = at_least("LinearKL.start", start, 0)
        self.end = at_least("LinearKL.end", end, 0)
        self.num_rollouts = at_least("LinearKL.num_rollouts", num_rollouts, 1)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Sets the coefficient of this rollout, a function of its number."""
        done = min(trainer.fit_loop.total_batch_idx / self.num_rollouts, 1.0)
        pl_module.set_kl_coef(self.start + (self.end - self.start) * done)


class RewardNormalization(RLCallback):
    """Divides rewards by their running standard deviation, and shifts them by their running mean if asked.

    Moments are updated with each rollout over all ranks before they are used (Chan et al. 1983, parallel Welford,
    http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf) and saved in checkpoints. The standard
    deviation is unbiased and floored, so equal rewards and a first sample never become infinite.

    Args:
        center: Subtract the mean. Group estimators do it anyway; it matters for REINFORCE and GAE.
        min_std: Floor of the standard deviation, above 0.
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
        """Rejects estimators that do not read the normalized sum, or that need a score for success or failure."""
        super().setup(trainer, pl_module, stage)
        advantage = getattr(pl_module, "advantage", None)
        if advantage is None:
            return
        advantage.refuse_shaped_rewards("callback RewardNormalization")
        if advantage.needs_binary_scores:
            name = type(advantage).__name__
            raise ValueError(
                f"callback RewardNormalization with advantage={name}: {name} takes a score for success or failure, "
                "which normalization would move. Drop the callback, or use GroupRelative."
            )

    def on_rollout_scored(self, trainer: Trainer, pl_module: Any, rollouts: Rollouts) -> None:
        """Updates the moments and normalizes the rewards; unscored rows stay NaN."""
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
