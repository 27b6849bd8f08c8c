"""What a module refuses when it is built: numbers out of range, and parts that do not go together, with both names.

Everything else combines: any estimator with any loss, aggregation and KL in the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrl.modules.advantages import AdvantageEstimator
from lightrl.modules.kl import KLInReward, KLPenalty

if TYPE_CHECKING:
    from lightrl.modules.ppo import PPOLightningModule

__all__ = ["check_arguments", "refuse_combination", "refuse_shaped_rewards"]

AT_LEAST = {
    **{"kl_coef": 0, "vf_coef": 0, "ptx_coef": 0, "aux_loss_coef": 0, "critic_warmup_rollouts": 0},
    **{"ppo_epochs": 1, "micro_batch_tokens": 1, "max_skipped_updates": 1},
}
ABOVE_ZERO_OR_NONE = ("minibatch_size", "max_grad_norm", "value_clip", "advantage_clip", "reward_clip")


def check_arguments(module: PPOLightningModule) -> None:
    """Checks a module's numbers and its combination of parts.

    Raises:
        ValueError: a number is out of range, a part is missing that another needs, or two exclude each other.
    """
    _check_critic(module)
    refuse_combination(module.advantage, module.kl, whiten=module.whiten_advantages)
    if module.reward_clip is not None:
        refuse_shaped_rewards(module.advantage, f"reward_clip={module.reward_clip}")
    for name, low in AT_LEAST.items():
        if getattr(module, name) < low:
            raise ValueError(f"{name}={getattr(module, name)!r}: must be at least {low}.")
    for name in ABOVE_ZERO_OR_NONE:
        value = getattr(module, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value!r}: must be above 0, or None (null in YAML) to turn it off.")
    if not 0 < module.top_entropy_fraction <= 1:
        raise ValueError(
            f"top_entropy_fraction={module.top_entropy_fraction}: must be in (0, 1]; 1 trains every token."
        )
    if module.kl is not None and module.actor_spec.random_init and module.reference_spec is None:
        raise ValueError("actor.random_init=True has no weights to make a reference of: set kl=None or reference.")


def _check_critic(module: PPOLightningModule) -> None:
    """A critic is there if and only if the estimator uses it, and only then its settings mean something."""
    name, missing = type(module.advantage).__name__, module.critic_spec is None
    if module.advantage.needs_critic and missing:
        raise ValueError(
            f"advantage={name} needs a critic but critic=None: give a CriticSpec or another estimator (GroupNorm, "
            "RLOO, ...)."
        )
    if not module.advantage.needs_critic and not missing:
        raise ValueError(
            f"advantage={name} uses no critic, so the one given by `critic` would never be trained: set critic=None "
            "(null in YAML)."
        )
    if missing and (module.critic_warmup_rollouts or module.critic_lr is not None):
        raise ValueError(
            f"critic_warmup_rollouts={module.critic_warmup_rollouts}, critic_lr={module.critic_lr} with critic=None: "
            "there is no critic to train. Drop them."
        )


def refuse_shaped_rewards(advantage: AdvantageEstimator, shaping: str) -> None:
    """Refuses what changes the summed reward for estimators that do not read it.

    Args:
        advantage: the estimator. shaping: the argument or callback, as the user wrote it.

    Raises:
        ValueError: the estimator reads each function's own rewards, so that the change would be lost.
    """
    if advantage.needs_reward_parts:
        name = type(advantage).__name__
        raise ValueError(
            f"{shaping} with advantage={name}: {name} reads each reward function's own rewards, and a change of their "
            "sum would be lost. Drop it, or take GroupNorm."
        )


def refuse_combination(advantage: AdvantageEstimator, kl: KLPenalty | None, *, whiten: bool) -> None:
    """Raises for a combination in which one part would be lost or done twice.

    Args:
        advantage: the estimator.
        kl: where the KL goes; None without one.
        whiten: whether advantages are whitened after the estimator.

    Raises:
        ValueError: a KL in the reward with an estimator that takes scores for success or failure, or that does not
            read the summed rewards; whitening after an estimator that ends with a normalisation of its own.
    """
    name = type(advantage).__name__
    if isinstance(kl, KLInReward):
        way_out = "Use KLInLoss('k3', ratio_correction=True) or no KL."
        if advantage.needs_binary_scores:
            raise ValueError(
                f"advantage={name} with kl=KLInReward: {name} takes a score for success or failure, and a KL inside "
                f"the score would corrupt it. {way_out}"
            )
        if advantage.needs_reward_parts:
            raise ValueError(
                f"advantage={name} with kl=KLInReward: {name} reads each reward function's own rewards, and a KL in "
                f"their sum would be lost. {way_out}"
            )
    if whiten and advantage.normalizes:
        raise ValueError(
            f"advantage={name} with whiten_advantages=True: {name} already normalises over the batch, and a second "
            "normalisation would hide the first. Set whiten_advantages=False."
        )
