"""Grouped settings of the RL modules, checks for incompatible combinations, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightrl.compat.lightning import count_updates
from lightrl.distributed.strategies import local_shard
from lightrl.models.spec import ModelSpec

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

    A run resumed with a different length therefore continues at the rate of the new schedule.

    Args:
        optimizer: Optimizer whose rates are set.
        schedule: Factors of the learning rate.
        position: Callable that returns (updates so far, updates of the whole run).
    """

    def __init__(self, optimizer: Optimizer, schedule: LRSchedule, position: Callable[[], tuple[float, float]]) -> None:
        super().__init__(optimizer, lambda _: schedule.factor(*position()))

    def refresh(self) -> None:
        """Sets the rates for the next update."""
        factor = self.lr_lambdas[0](0)
        for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = rate * factor


def set_named_rates(schedulers: Any) -> None:
    """Refreshes the named schedules among a module's schedulers."""
    for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
        if isinstance(scheduler, NamedSchedule):
            scheduler.refresh()


def step_schedulers(schedulers: Any) -> None:
    """Steps the schedulers that count updates themselves."""
    for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
        if scheduler is not None and not isinstance(scheduler, NamedSchedule):
            scheduler.step()


def rollout_position(module: Any) -> tuple[float, float]:
    """Returns (updates so far, updates of the whole run) of an RL module.

    Updates are counted in rollouts, so an overridden `minibatches` may make any number of updates per rollout. Updates
    of one rollout then share one rate. If `max_steps` ends the run first, its steps are counted.
    """
    trainer, each, size = module.trainer, module.ppo_epochs, module.updates.minibatch_size
    if size is not None:
        data = trainer.datamodule
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
    """Returns a function like `rollout_position` for a run with automatic optimization.

    Counts epochs of the current dataset, so a run resumed with different data keeps its position.
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
    """Builds the return value of `configure_optimizers`.

    Args:
        optimizer: Optimizer of the module.
        schedule: An `LRSchedule` over all updates of the run, a function of the optimizer, or None.
        position: Callable that returns (updates so far, updates of the whole run). The latter is infinite if unknown.

    Raises:
        ValueError: An `LRSchedule` in a run without an end.
    """
    if schedule is None:
        return optimizer
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
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": "step"}}


def make_optimizer(factory: Callable[[Any], Any], parameters: Any, strategy: Strategy) -> Any:
    """Builds the optimizer; warns if updates are too small for bfloat16 weights.

    An Adam update is about as large as the learning rate. Neighbors of a bfloat16 weight w are 2^-8 to 2^-7 |w| away,
    so a single update below half of that rounds back to w. DeepSpeed's optimizers keep float32 weights.
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
            f"optimizer: lr={rate:g} is too small for bfloat16 weights (mean magnitude {size:.1g}, spacing about "
            f"{size * 2.0**-8:.1g}): most updates round to zero. Set actor.dtype=float32 with "
            "trainer.precision=bf16-mixed, or raise the learning rate."
        )


@dataclass(frozen=True)
class CriticSpec:
    """Critic (value model) and its loss.

    Args:
        model: Backbone of the critic. Defaults to the policy's model.
        shared: Put a value head on the policy's backbone instead of using a second one. Incompatible with `model`.
        lr: Learning rate of the critic's parameters. Defaults to the optimizer's.
        loss_coef: Weight of the critic's loss.
        clip: Clip range of the value loss, in units of value. None uses the plain squared error.
        warmup_rollouts: Number of initial rollouts that train only the critic.

    Raises:
        ValueError: A shared critic has a model.
    """

    model: ModelSpec | None = None
    shared: bool = False
    lr: float | None = None
    loss_coef: float = 0.5
    clip: float | None = 0.2
    warmup_rollouts: int = 0

    def __post_init__(self) -> None:
        if self.shared and self.model is not None:
            raise ValueError("CriticSpec.model with shared=True: a shared critic uses the policy's model. Remove one.")


@dataclass(frozen=True)
class Updates:
    """Updates per rollout and their limits.

    Args:
        minibatch_size: Number of trajectories per optimizer step, over all ranks. Must divide the rollout. Defaults to
            the whole rollout.
        micro_batch_tokens: Maximum number of tokens per forward/backward pass. Affects memory and speed, not results.
        max_grad_norm: Maximum joint gradient norm of policy and critic. None disables clipping.
        max_skipped_updates: Number of consecutive updates with a non-finite loss or gradient that stops the run.
        off_policy_correction: Apply `OffPolicyCorrection` to rollouts sampled by older policies. No effect if the loss
            declares that it reads the engine's log-probs.
    """

    minibatch_size: int | None = None
    micro_batch_tokens: int = 16384
    max_grad_norm: float | None = 1.0
    max_skipped_updates: int = 5
    off_policy_correction: bool = True


@dataclass(frozen=True)
class Shaping:
    """Clipping of rewards and advantages, and filters on trained tokens.

    Args:
        reward_clip: Maximum absolute trajectory reward, before the KL penalty. None disables clipping.
        advantage_clip: Maximum absolute advantage, after whitening. None disables clipping.
        mask_truncated: Exclude completions truncated at `max_new_tokens` from all losses and their normalizers. They
            still count in the baselines of other completions.
        top_entropy_fraction: Fraction of the rollout's tokens that the policy loss trains, by highest entropy over all
            ranks. In (0, 1]; 1 trains all tokens. The paper (https://arxiv.org/abs/2506.01939) uses 0.2. As in the
            paper, the normalizer counts all tokens. The KL penalty, entropy bonus, and critic also use all tokens.
    """

    reward_clip: float | None = None
    advantage_clip: float | None = None
    mask_truncated: bool = False
    top_entropy_fraction: float = 1.0


@dataclass(frozen=True)
class ExtraLosses:
    """Weights of losses added to the policy loss. 0 disables a loss.

    Args:
        entropy_coef: Weight of the entropy bonus.
        ptx_coef: Weight of the supervised loss on the data module's `ptx` examples, a mean over completion tokens.
            InstructGPT's PPO-ptx (https://arxiv.org/abs/2203.02155, eq. 2) sums over tokens instead.
        aux_loss_coef: Weight of a mixture-of-experts model's load-balancing loss, computed per micro-batch. It is the
            only loss that depends slightly on the micro-batch size.
    """

    entropy_coef: float = 0.0
    ptx_coef: float = 0.0
    aux_loss_coef: float = 0.0


def require_matching_parts(module: Any) -> None:
    """Raises a ValueError if parts of an RL module are incompatible. Called at the end of its constructor."""
    advantage, kl, clip = module.advantage, module.kl, module.shaping.reward_clip
    name = type(advantage).__name__
    if advantage.needs_critic and module.critic_spec is None:
        raise ValueError(
            f"advantage={name} needs a critic but critic=None. Pass a CriticSpec, or use an estimator without a critic "
            "(GroupRelative, RLOO, ...)."
        )
    if module.critic_spec is not None and not advantage.needs_critic:
        raise ValueError(
            f"critic with advantage={name}: the estimator doesn't use values. Set critic=None (null in YAML)."
        )
    advantage.refuse_combination(kl, whiten=module.whiten_advantages)
    if clip is not None:
        advantage.refuse_shaped_rewards(f"reward_clip={clip}")
    if kl is not None and module.actor_spec.random_init and module.reference_spec is None:
        raise ValueError(
            "actor.random_init=True with kl: there are no pretrained weights to use as reference. "
            "Set kl=None, or pass a reference."
        )
