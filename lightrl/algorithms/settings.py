"""Settings of the RL modules that belong together, and combinations of parts that they reject."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightrl.compat.arguments import above, at_least, fraction
from lightrl.models.spec import ModelSpec
from lightrl.objectives.kl import KLInLoss, KLInReward

OFF = "(null in YAML) to turn it off"


@dataclass(frozen=True)
class CriticSpec:
    """Where the critic's values come from, and how they are learned.

    Args:
        model: Backbone of the critic. Defaults to the policy's model.
        shared: Put a value head on the policy's own backbone instead of a second one; excludes `model`.
        lr: Learning rate of the critic's parameters. Defaults to the optimizer's.
        loss_coef: Weight of the critic's loss.
        clip: Range of the clipped value loss, in units of value. None is the plain squared error.
        warmup_rollouts: Number of first rollouts that train the critic only.

    Raises:
        ValueError: A value is out of range, or a shared critic is given a model.
    """

    model: ModelSpec | None = None
    shared: bool = False
    lr: float | None = None
    loss_coef: float = 0.5
    clip: float | None = 0.2
    warmup_rollouts: int = 0

    def __post_init__(self) -> None:
        if self.shared and self.model is not None:
            raise ValueError("CriticSpec.model with shared=True: a shared critic has no own model. Drop one of them.")
        at_least("CriticSpec.loss_coef", self.loss_coef, 0)
        at_least("CriticSpec.warmup_rollouts", self.warmup_rollouts, 0)
        above("CriticSpec.lr", self.lr, or_none="(null) for the optimizer's")
        above("CriticSpec.clip", self.clip, or_none=OFF)


@dataclass(frozen=True)
class Updates:
    """How a rollout is cut into updates, and what bounds them.

    Args:
        minibatch_size: Trajectories per optimizer step, over all ranks. Must divide the rollout. Defaults to all.
        micro_batch_tokens: Maximum number of tokens per forward/backward pass. Affects memory and speed, not results.
        max_grad_norm: Bound on the joint gradient norm of policy and critic. None is off.
        max_skipped_updates: Consecutive updates with a non-finite loss or gradient after which the run stops.
        off_policy_correction: Weight rollouts of older policies by `OffPolicyCorrection`, unless the loss reads the
            engine's log-probs already.

    Raises:
        ValueError: A value is out of range.
    """

    minibatch_size: int | None = None
    micro_batch_tokens: int = 16384
    max_grad_norm: float | None = 1.0
    max_skipped_updates: int = 5
    off_policy_correction: bool = True

    def __post_init__(self) -> None:
        at_least("minibatch_size", self.minibatch_size, 1, or_none="for all")
        at_least("micro_batch_tokens", self.micro_batch_tokens, 1)
        above("max_grad_norm", self.max_grad_norm, or_none=OFF)
        at_least("max_skipped_updates", self.max_skipped_updates, 1)


@dataclass(frozen=True)
class Shaping:
    """What is done to rewards and advantages, and which tokens are trained.

    Args:
        reward_clip: Bound on |trajectory reward| before the KL penalty. None is off.
        advantage_clip: Bound on |advantage| after whitening. None is off.
        mask_truncated: Leave completions that `max_new_tokens` cut off out of all losses and their normalizers. They
            keep their place in the baselines of the others.
        top_entropy_fraction: Fraction of the rollout's tokens, those of highest entropy over all ranks, that the policy
            loss trains, in (0, 1] (https://arxiv.org/abs/2506.01939: 0.2). The normalizer counts all tokens, as in the
            paper, and KL, entropy bonus, and critic see all of them. 1 is off.

    Raises:
        ValueError: A value is out of range.
    """

    reward_clip: float | None = None
    advantage_clip: float | None = None
    mask_truncated: bool = False
    top_entropy_fraction: float = 1.0

    def __post_init__(self) -> None:
        above("reward_clip", self.reward_clip, or_none=OFF)
        above("advantage_clip", self.advantage_clip, or_none=OFF)
        fraction("top_entropy_fraction", self.top_entropy_fraction, "(0, 1]", "; 1 trains every token")


@dataclass(frozen=True)
class ExtraLosses:
    """Weights of losses that are added to the policy loss. 0 is off.

    Args:
        entropy_coef: Of the entropy bonus.
        ptx_coef: Of the supervised loss on the data module's `ptx` rows, a mean over their completion tokens
            (InstructGPT's PPO-ptx, https://arxiv.org/abs/2203.02155 eq. 2, which sums over tokens).
        aux_loss_coef: Of a mixture-of-experts model's own load-balancing loss, over the tokens of each micro-batch. It
            alone depends a little on how micro-batches are cut.

    Raises:
        ValueError: A value is negative.
    """

    entropy_coef: float = 0.0
    ptx_coef: float = 0.0
    aux_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        at_least("ptx_coef", self.ptx_coef, 0)
        at_least("aux_loss_coef", self.aux_loss_coef, 0)


# ---- what does not go together ---------------------------------------------------------------------------------------

UNSUPPORTED_CALLBACKS = {
    "BatchSizeFinder": "Use micro_batch_tokens; `lightrl plan` reports what fits.",
    "LearningRateFinder": "Compare runs by eval/reward.",
    "StochasticWeightAveraging": "Use lightrl.callbacks.EMA.",
    "WeightAveraging": "Use lightrl.callbacks.EMA.",
}
"""Lightning's callbacks that expect automatic optimization -> what to use instead."""


def require_matching_parts(module: Any) -> None:
    """Raises a ValueError if parts of an RL module exclude each other. Called at the end of its constructor."""
    advantage, kl, clip = module.advantage, module.kl, module.shaping.reward_clip
    name = type(advantage).__name__
    at_least("ppo_epochs", module.ppo_epochs, 1)
    if not isinstance(kl, KLInReward | KLInLoss | type(None)):
        raise ValueError(f"kl={type(kl).__name__}: acts nowhere. Derive it from KLInReward or KLInLoss.")
    if advantage.needs_critic and module.critic_spec is None:
        raise ValueError(
            f"advantage={name} needs a critic but critic=None. Pass a CriticSpec, or an estimator without a critic "
            "(GroupRelative, RLOO, ...)."
        )
    if module.critic_spec is not None and not advantage.needs_critic:
        raise ValueError(
            f"advantage={name} uses no critic, so it would never be trained. Set critic=None (null in YAML)."
        )
    advantage.refuse_combination(kl, whiten=module.whiten_advantages)
    if clip is not None:
        advantage.refuse_shaped_rewards(f"reward_clip={clip}")
    if kl is not None and module.actor_spec.random_init and module.reference_spec is None:
        raise ValueError("actor.random_init=True with kl: there is no reference. Set kl=None, or pass a reference.")


def require_supported_trainer(trainer: Any) -> None:
    """Raises a ValueError for options and callbacks that expect automatic optimization or repeated batches."""
    if trainer.overfit_batches:
        raise ValueError(
            f"trainer.overfit_batches={trainer.overfit_batches}: rollouts are sampled again, so no batch comes twice. "
            "Use prompts.limit=N to repeat the same prompts."
        )
    for callback in trainer.callbacks:
        for base in type(callback).__mro__:
            if base.__name__ in UNSUPPORTED_CALLBACKS:
                raise ValueError(
                    f"callback {type(callback).__name__}: {base.__name__} needs automatic optimization. "
                    f"{UNSUPPORTED_CALLBACKS[base.__name__]}"
                )
