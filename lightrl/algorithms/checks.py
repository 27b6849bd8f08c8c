"""What `PPOLightningModule` rejects before any model is loaded."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.compat.arguments import at_least, instance_of
from lightrl.compat.lightning import is_compiled
from lightrl.objectives.kl import KLInLoss, KLInReward
from lightrl.rollout.datamodule import RolloutDataModule

REFUSED_CALLBACKS = {
    "BatchSizeFinder": "micro_batch_tokens bounds the memory; `lightrl plan` says what fits.",
    "GradientAccumulationScheduler": "micro_batch_tokens and prompts_per_rollout say what is accumulated.",
    "LearningRateFinder": "the loss of a rollout says nothing about its rate; compare runs by eval/reward.",
    "StochasticWeightAveraging": "take lightrl.callbacks.EMA, whose average is evaluated and exported.",
    "WeightAveraging": "take lightrl.callbacks.EMA, whose average is evaluated and exported.",
}


def check_arguments(module: Any) -> None:
    """Rejects numbers out of range and parts that do not go together. Called at the end of the constructor."""
    advantage = type(module.advantage).__name__
    if module.advantage.needs_critic and module.critic_spec is None:
        raise ValueError(
            f"advantage={advantage} needs a critic but critic=None: give a CriticSpec or another estimator "
            "(GroupRelative, RLOO, ...)."
        )
    if module.critic_spec is not None and not module.advantage.needs_critic:
        raise ValueError(
            f"advantage={advantage} uses no critic, so the one given by `critic` would never be trained: set "
            "critic=None (null in YAML)."
        )
    module.advantage.refuse_combination(module.kl, whiten=module.whiten_advantages)
    if module.shaping.reward_clip is not None:
        module.advantage.refuse_shaped_rewards(f"reward_clip={module.shaping.reward_clip}")
    at_least("ppo_epochs", module.ppo_epochs, 1)
    instance_of("kl", module.kl, KLInReward, KLInLoss, or_none="for no KL")  # the two places where it can act
    if module.kl is not None and module.actor_spec.random_init and module.reference_spec is None:
        raise ValueError("actor.random_init=True has no weights to make a reference of: set kl=None or reference.")


def check_trainer(module: Any, trainer: Any) -> None:
    """Rejects Trainer options that do not go with manual optimization and rollouts."""
    if is_compiled(module):
        raise ValueError(
            "torch.compile(module): a step that samples, scores and updates is no graph to compile. Give the "
            "module itself; a subclass may compile its models in configure_model."
        )
    if trainer.gradient_clip_val is not None:
        raise ValueError(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val}: set the module's "
            f"max_grad_norm={trainer.gradient_clip_val} (null is off), which bounds actor and critic jointly."
        )
    if trainer.gradient_clip_algorithm is not None:
        raise ValueError(
            f"trainer.gradient_clip_algorithm={trainer.gradient_clip_algorithm.value}: the module's max_grad_norm "
            "bounds the joint norm; there is no other way of clipping."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: gradients are accumulated within "
            "a rollout. Set the module's micro_batch_tokens (memory), or a larger prompts_per_rollout (batch)."
        )
    if trainer.overfit_batches:
        raise ValueError(
            f"trainer.overfit_batches={trainer.overfit_batches}: rollouts are sampled again, so no batch comes "
            "twice. To see the same prompts again and again give prompts.limit=N, and eval_prompts the same rows."
        )
    if module.critic_spec is not None and (warmup := module.critic_spec.warmup_rollouts):
        rollouts = count_rollouts(trainer)
        if warmup > rollouts:
            raise ValueError(
                f"critic.warmup_rollouts={warmup}: the policy would never be trained in this run's {rollouts} rollouts."
            )
        if warmup == rollouts:
            rank_zero_warn(f"critic.warmup_rollouts={warmup}: this run trains the critic alone, not the policy.")
    for callback in trainer.callbacks:
        for base in type(callback).__mro__:
            if base.__name__ in REFUSED_CALLBACKS:
                raise ValueError(
                    f"callback {type(callback).__name__}: {base.__name__} does not go with manual optimisation: "
                    f"{REFUSED_CALLBACKS[base.__name__]}"
                )


def count_rollouts(trainer: Any) -> float:
    """Rollouts of the whole run, as far as `max_epochs` and the data module say; infinity where they do not."""
    each = trainer.datamodule.rollouts_per_epoch if isinstance(trainer.datamodule, RolloutDataModule) else None
    counted = trainer.state.fn == "fit" and each is not None and trainer.max_epochs not in (None, -1)
    return trainer.max_epochs * each if counted else math.inf
