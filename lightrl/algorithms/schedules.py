"""Learning-rate schedules over all updates of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lightrl.compat.lightning_checkpoints import count_updates

_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}
"""Decay factors of an `LRSchedule` with floor 0; `progress` is in [0, 1]."""


@dataclass
class LRSchedule:
    """Learning-rate schedule with warmup over all updates of the run.

    The factor of update u = 0, 1, ... U - 1 with W warmup updates is

        u < W:     (u + 1) / W
        constant:  1
        linear:    floor + (1 - floor) (1 - p),                p = (u - W) / (U - W)
        cosine:    floor + (1 - floor) (1 + cos(pi p)) / 2

    Unlike the schedules of transformers, warmup doesn't start at 0, so the first update has an effect.

    Args:
        name: Decay after warmup: "constant", "linear", or "cosine".
        warmup: Number of warmup updates, or a fraction of all updates if below 1.
        floor: Final factor of the decay, in [0, 1].
    """

    name: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: float = 0.0
    floor: float = 0.0

    def factor(self, update: float, total: float) -> float:
        """Returns the factor of update `update` out of `total`."""
        warmup = int(self.warmup) if self.warmup >= 1 else math.ceil(self.warmup * total)
        if update < warmup:
            return (update + 1) / warmup
        progress = min((update - warmup) / max(total - warmup, 1), 1.0)
        return 1 - (1 - self.floor) * (1 - _SHAPES[self.name](progress))


class NamedSchedule(LambdaLR):
    """Scheduler of an `LRSchedule` that depends only on the run's position, not on its own step count.

    A run resumed with a different length therefore continues at the rate of the new schedule. `position` returns
    (updates so far, updates of the whole run).
    """

    def __init__(self, optimizer: Optimizer, schedule: LRSchedule, position: Callable[[], tuple[float, float]]) -> None:
        super().__init__(optimizer, lambda _: schedule.factor(*position()))

    def refresh(self) -> None:
        """Sets the rates for the next update."""
        factor = self.lr_lambdas[0](0)
        for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = rate * factor


def rollout_position(module: Any) -> tuple[float, float]:
    """Returns (updates so far, updates of the whole run) of an RL module.

    Updates are counted in rollouts, so an overridden `minibatches` may make any number of updates per rollout. Updates
    of one rollout then share one rate. If `max_steps` ends the run first, its steps are counted.
    """
    trainer, each, size = module.trainer, module.ppo_epochs, module.updates.minibatch_size
    data = trainer.datamodule
    if size is not None and hasattr(data, "prompts_per_rollout"):  # else one rate per pass over a rollout
        each *= max(data.prompts_per_rollout * data.group_size // size, 1)
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    steps = math.inf if trainer.max_steps == -1 else trainer.max_steps
    updates = trainer.num_training_batches * epochs * each
    if steps < updates:
        return float(trainer.global_step), float(steps)
    rollouts = trainer.current_epoch * trainer.num_training_batches + max(trainer.fit_loop.batch_idx, 0)
    return float(rollouts * each + min(module.updates_made, each - 1)), updates


def run_position(module: Any) -> Callable[[], tuple[float, float]]:
    """Returns a function like `rollout_position` for a supervised module, with automatic optimization."""
    total: list[float] = []

    def position() -> tuple[float, float]:
        if not total:
            total.append(count_updates(module.trainer))
        return float(module.trainer.global_step + module.updates_ahead), total[0]

    return position


def updates_ahead(trainer: Any) -> int:
    """Returns how far a run that resumes with different data is ahead of its `global_step`, by its number of epochs.

    Call it at the start: after a restart between epochs, Lightning counts the current epoch only when it ends.
    """
    batches = trainer.num_training_batches
    if trainer.max_steps != -1 or not math.isfinite(batches):
        return 0
    window, epoch = trainer.accumulate_grad_batches, trainer.fit_loop.epoch_progress.current
    done = min(trainer.fit_loop.batch_idx + 1, batches) if epoch.ready > epoch.completed else 0
    each = math.ceil(batches / window)
    return int(trainer.current_epoch * each + (each if done == batches else done // window) - trainer.global_step)


def with_schedule(optimizer: Optimizer, schedule: Any, position: Callable[[], tuple[float, float]]) -> Any:
    """Builds the return value of `configure_optimizers`.

    `schedule` is an `LRSchedule` over all updates of the run, or a function of the optimizer. `position` returns
    (updates so far, updates of the whole run), the latter infinite if unknown.

    Raises:
        ValueError: An `LRSchedule` in a run without an end, or a scheduler that needs a metric.
    """
    if isinstance(schedule, LRSchedule):
        total = position()[1]
        if not math.isfinite(total):
            raise ValueError(
                "lr_scheduler: a named schedule needs the length of the run. Set trainer.max_epochs or "
                "trainer.max_steps, or pass a scheduler class with its number of steps."
            )
        made: Any = NamedSchedule(optimizer, schedule, position)
    else:
        made = schedule(optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise ValueError("lr_scheduler=ReduceLROnPlateau: it needs a metric at each update. Use an LRSchedule.")
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": "step"}}
