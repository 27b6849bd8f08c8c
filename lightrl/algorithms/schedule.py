"""Optimizers, and learning-rate schedules by name over as many updates as the run will make."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lightrl.compat.arguments import fraction, one_of
from lightrl.compat.lightning import count_updates
from lightrl.distributed.strategies import local_shard

_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}
"""Factors of an `LRSchedule` without floor; `progress` goes from 0 to 1."""


@dataclass
class LRSchedule:
    """A factor on the learning rate of update u = 0, 1, ... U - 1, with W updates of warm-up.

        u < W:     (u + 1) / W
        constant:  1
        linear:    floor + (1 - floor) (1 - p),                p = (u - W) / (U - W)
        cosine:    floor + (1 - floor) (1 + cos(pi p)) / 2

    Args:
        name: "constant", "linear", or "cosine".
        warmup: Updates of warm-up: a count from 1 on, below 1 a fraction of all updates.
        floor: Factor at the end of a decay, in [0, 1].

    Raises:
        ValueError: A value is out of range.

    Source: transformers' schedules of these names; they begin the warm-up at 0, so their first update does nothing.
    """

    name: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        one_of("LRSchedule.name", self.name, *_SHAPES)
        if not 0 <= self.warmup < math.inf or (self.warmup > 1 and self.warmup != int(self.warmup)):
            raise ValueError(f"LRSchedule.warmup={self.warmup}: must be a number of updates, or a fraction below 1.")
        fraction("LRSchedule.floor", self.floor)

    def factor(self, update: float, total: float) -> float:
        """The factor of update number `update` of `total`."""
        warmup = int(self.warmup) if self.warmup >= 1 else math.ceil(self.warmup * total)
        if update < warmup:
            return (update + 1) / warmup
        progress = min((update - warmup) / max(total - warmup, 1), 1.0)
        return 1 - (1 - self.floor) * (1 - _SHAPES[self.name](progress))


class NamedSchedule(LambdaLR):
    """An `LRSchedule` over the run as it is now: its rates depend on the position alone, not on its own count.

    So a resumed run that is longer or shorter continues at the rate that the new length gives.

    Args:
        optimizer: Its rates are set.
        schedule: The factors.
        position: Returns (updates so far, updates of the whole run).
    """

    def __init__(self, optimizer: Optimizer, schedule: LRSchedule, position: Callable[[], tuple[float, float]]) -> None:
        super().__init__(optimizer, lambda _: schedule.factor(*position()))

    def refresh(self) -> None:
        """Sets the rates for the next update."""
        factor = self.lr_lambdas[0](0)
        for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = rate * factor


def set_named_rates(schedulers: Any) -> None:
    """Refreshes those of a module's schedulers that are schedules by name."""
    for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
        if isinstance(scheduler, NamedSchedule):
            scheduler.refresh()


def step_schedulers(schedulers: Any) -> None:
    """Steps those of a module's schedulers that count updates themselves."""
    for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
        if scheduler is not None and not isinstance(scheduler, NamedSchedule):
            scheduler.step()


def rollout_position(module: Any) -> tuple[float, float]:
    """(Updates so far, updates of the whole run) of an RL module.

    Counted in rollouts, so that it also fits a `minibatches` that makes another number of updates: these share one
    rate. A run that ends at `max_steps` first counts its steps.

    Raises:
        ValueError: Mini-batches of a data module whose rollouts have no known size.
    """
    trainer, each, size = module.trainer, module.ppo_epochs, module.updates.minibatch_size
    if size is not None:
        data = trainer.datamodule
        if not hasattr(data, "prompts_per_rollout"):
            raise ValueError(
                f"lr_scheduler by name with minibatch_size={size}: only RolloutDataModule tells how many updates a "
                "rollout makes. Pass a scheduler class with its number of steps."
            )
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


def run_position(trainer: Any) -> Callable[[], tuple[float, float]]:
    """The same of a run with automatic optimization.

    Counted in epochs of the rows as they are now, so that a run resumed with other rows keeps its place.
    """
    total: list[float] = []

    def position() -> tuple[float, float]:
        if not total:
            total.append(count_updates(trainer))
        batches = trainer.num_training_batches
        if trainer.max_steps != -1 or not math.isfinite(batches):
            return float(trainer.global_step), total[0]
        window, epoch = trainer.accumulate_grad_batches, trainer.fit_loop.epoch_progress.current
        done = min(trainer.fit_loop.batch_idx + 1, batches) if epoch.ready > epoch.completed else 0
        each = math.ceil(batches / window)
        return float(trainer.current_epoch * each + (each if done == batches else done // window)), total[0]

    return position


def with_schedule(optimizer: Optimizer, schedule: Any, position: Callable[[], tuple[float, float]]) -> Any:
    """What `configure_optimizers` returns.

    Args:
        optimizer: The only one.
        schedule: An `LRSchedule` over all updates of the run, a function of the optimizer, or None.
        position: Returns (updates so far, updates of the whole run), the latter infinite if it has no end.

    Raises:
        ValueError: An `LRSchedule` in a run without an end, or a scheduler that waits for a metric.
    """
    if schedule is None:
        return optimizer
    if isinstance(schedule, LRSchedule):
        total = position()[1]
        if not math.isfinite(total):
            raise ValueError(
                "lr_scheduler by name needs the end of the run. Set trainer.max_epochs or trainer.max_steps, or pass a "
                "scheduler class with its number of steps."
            )
        if schedule.warmup > max(total, 1):
            rank_zero_warn(f"lr_scheduler.warmup={schedule.warmup:g}: the run has {total:g} updates, all within it.")
        made: Any = NamedSchedule(optimizer, schedule, position)
    else:
        made = schedule(optimizer)
        if isinstance(made, ReduceLROnPlateau):
            raise ValueError("lr_scheduler=ReduceLROnPlateau: it waits for a metric. Use one that counts updates.")
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": "step"}}


def make_optimizer(factory: Callable[[Any], Any], parameters: Any, strategy: Strategy) -> Any:
    """What an `optimizer` argument makes of parameters or groups; warns if bfloat16 weights would not move.

    An update of Adam and its kin is about its learning rate in size. A bfloat16 weight w has neighbors 2^-8 to 2^-7
    |w| away, and an update of less than half of that, taken alone, rounds back to w. DeepSpeed's optimizers keep
    float32 weights.
    """
    optimizer = factory(parameters)
    if "Adam" in type(optimizer).__name__ and not isinstance(strategy, DeepSpeedStrategy):
        for group in optimizer.param_groups:
            _warn_of_lost_updates(group)
    return optimizer


def _warn_of_lost_updates(group: dict[str, Any]) -> None:
    matrices = [p for p in group["params"] if p.dtype == torch.bfloat16 and p.dim() > 1]
    largest = max(matrices, key=lambda p: p.numel(), default=None)
    own = None if largest is None else local_shard(largest)
    if own is None or not own.numel():
        return
    size, rate = float(own.abs().float().mean()), float(group["lr"])
    if 0 < rate < size * 2.0**-9:
        rank_zero_warn(
            f"optimizer: lr={rate:g} with bfloat16 weights (of {size:.1g} on average): they have neighbors about "
            f"{size * 2.0**-8:.1g} apart, so most updates round to nothing. Train float32 weights under "
            "trainer.precision=bf16-mixed (actor.dtype=float32), or raise the rate."
        )
