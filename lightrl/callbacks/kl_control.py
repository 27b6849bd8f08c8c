"""Schedules of the module's `kl_coef`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["AdaptiveKL", "LinearKL"]


class AdaptiveKL(Callback):
    """Moves `kl_coef` so that the KL to the reference stays near a target.

    After each rollout of n sequences `kl_coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon`
    (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2). There KL is summed over the tokens of a
    sequence; here it is `kl/ref`, nats per token, so that the target does not depend on the response length.

    Args:
        target: KL to hold, nats per response token, above 0.
        horizon: sequences after which a constant 20 % error has multiplied the coefficient by about e^0.2, above 0.
    """

    def __init__(self, target: float = 0.05, horizon: float = 10_000) -> None:
        for name, value in (("target", target), ("horizon", horizon)):
            if value <= 0:
                raise ValueError(f"AdaptiveKL.{name}={value}: must be above 0.")
        self.target, self.horizon = target, horizon

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Updates the coefficient from the rollout's mean KL."""
        if "kl/ref" not in outputs:
            raise ValueError("AdaptiveKL needs a KL term: set the module's kl (KLInReward or KLInLoss).")
        error = min(max(outputs["kl/ref"] / self.target - 1.0, -0.2), 0.2)
        sequences = len(batch) * trainer.world_size
        pl_module.kl_coef *= 1.0 + error * sequences / self.horizon


class LinearKL(Callback):
    """Moves `kl_coef` linearly from `start` to `end` over the first `num_rollouts` rollouts, then holds it.

    Args:
        start: coefficient of the first rollout.
        end: coefficient from rollout `num_rollouts` on.
        num_rollouts: length of the ramp, at least 1.
    """

    def __init__(self, start: float, end: float, num_rollouts: int) -> None:
        if min(start, end) < 0:
            raise ValueError(f"LinearKL: start={start}, end={end}: coefficients must be 0 or more.")
        if num_rollouts < 1:
            raise ValueError(f"LinearKL.num_rollouts={num_rollouts}: must be at least 1.")
        self.start, self.end, self.num_rollouts = start, end, num_rollouts

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Sets the coefficient of this rollout."""
        done = min(trainer.fit_loop.total_batch_idx / self.num_rollouts, 1.0)
        pl_module.kl_coef = self.start + (self.end - self.start) * done  # type: ignore[assignment]
