"""Dr. GRPO: GRPO without its two divisions, by the length of a response and by the std of a group."""

from __future__ import annotations

from typing import Any

from jsonargparse import lazy_instance

from lightrl.models.spec import ModelSpec
from lightrl.modules.advantages import AdvantageEstimator, GroupNorm
from lightrl.modules.aggregation import Aggregation, ConstantLength
from lightrl.modules.kl import KLPenalty
from lightrl.modules.losses import PolicyLoss, PPOClip
from lightrl.modules.ppo import PPOLightningModule

__all__ = ["DrGRPOLightningModule"]


class DrGRPOLightningModule(PPOLightningModule):
    """GRPO done right (Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2).

    `PPOLightningModule` with the paper's settings: no critic, `A = r - mean_group`, the sum over tokens divided by a
    constant (the paper's generation budget, 3000 tokens; take your `max_new_tokens`), PPO's clip at 0.2, no KL, one
    pass over each rollout.

    Args:
        actor: the policy: a folder or hub name, or a `ModelSpec`.
        advantage: estimator of advantages.
        loss: per-token policy loss.
        aggregation: how token losses become one number.
        kl: penalty against the reference; None for none.
        kl_coef: its coefficient; without effect where `kl` is None.
        whiten_advantages: scale advantages once more over the rollout.
        ppo_epochs: passes over each rollout.
        kwargs: the other arguments of `PPOLightningModule`.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        advantage: AdvantageEstimator = lazy_instance(GroupNorm, scale="none"),  # noqa: B008
        loss: PolicyLoss = lazy_instance(PPOClip),  # noqa: B008
        aggregation: Aggregation = lazy_instance(ConstantLength, length=3000),  # noqa: B008
        kl: KLPenalty | None = None,
        kl_coef: float = 0.0,
        whiten_advantages: bool = False,
        ppo_epochs: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            actor,
            critic=None,
            advantage=advantage,
            loss=loss,
            aggregation=aggregation,
            kl=kl,
            kl_coef=kl_coef,
            whiten_advantages=whiten_advantages,
            ppo_epochs=ppo_epochs,
            **kwargs,
        )
