"""Schedules of the KL penalty's coefficient."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightrl.algorithms.hooks import RLCallback
from lightrl.compat.arguments import above, at_least


class _KLControl(RLCallback):
    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuses a module without a KL penalty."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and pl_module.kl is None:
            raise ValueError(
                f"{type(self).__name__} needs a KL term: set the module's kl (KLInReward or KLInLoss), or drop it."
            )


class AdaptiveKL(_KLControl):
    """Moves the KL coefficient so that the KL to the reference stays near a target.

    After each rollout of n trajectories `coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon`
    (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2). There KL is summed over the tokens of a
    sequence; here it is `kl/ref`, nats per token, so that the target does not depend on the response length. A rollout
    of which nothing is trained says nothing about the KL and leaves the coefficient as it is.

    Args:
        target: KL to hold, nats per response token, above 0 and at most 1e3.
        horizon: trajectories after which a constant 20 % error has multiplied the coefficient by about e^0.2, in
            (0, 1e8].

    Raises:
        ValueError: a value is out of range; in `setup`, the module has no KL term.
    """

    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, target: float = 0.05, horizon: float = 10_000) -> None:
        self.target = above("AdaptiveKL.target", target)
        self.horizon = above("AdaptiveKL.horizon", horizon)
        self.coef: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Starts from the module's coefficient, or sets that of a checkpoint."""
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
        start: coefficient of the first rollout, 0 to 1e6.
        end: coefficient from rollout `num_rollouts` on, 0 to 1e6.
        num_rollouts: length of the ramp, at least 1.

    Raises:
        ValueError: a value is out of range; in `setup`, the module has no KL term.
    """

    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, start: float, end: float, num_rollouts: int) -> None:
        self.start = at_least("LinearKL.start", start, 0)
        self.end = at_least("LinearKL.end", end, 0)
        self.num_rollouts = at_least("LinearKL.num_rollouts", num_rollouts, 1)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Sets the coefficient of this rollout, which its number alone decides."""
        done = min(trainer.fit_loop.total_batch_idx / self.num_rollouts, 1.0)
        pl_module.set_kl_coef(self.start + (self.end - self.start) * done)
