"""GRPO: PPO without critic, advantages from the group of completions of one prompt."""

from __future__ import annotations

from typing import Any

from jsonargparse import lazy_instance

from lightrl.models.spec import ModelSpec
from lightrl.modules.advantages import AdvantageEstimator, GroupNorm
from lightrl.modules.aggregation import Aggregation, SequenceMean
from lightrl.modules.kl import KLInLoss, KLPenalty
from lightrl.modules.ppo import PPOLightningModule

__all__ = ["GRPOLightningModule"]


class GRPOLightningModule(PPOLightningModule):
    """Group relative policy optimisation (Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1).

    `PPOLightningModule` with the paper's settings: no critic, `A = (r - mean_group) / std_group`, k3 in the loss with
    coefficient 0.04, the mean over sequences of the mean over tokens, one update per rollout.

    Args:
        kwargs: the other arguments of `PPOLightningModule`, but for the critic's.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        advantage: AdvantageEstimator = lazy_instance(GroupNorm),  # noqa: B008
        aggregation: Aggregation = lazy_instance(SequenceMean),  # noqa: B008
        kl: KLPenalty | None = lazy_instance(KLInLoss),  # noqa: B008
        kl_coef: float = 0.04,
        whiten_advantages: bool = False,
        ppo_epochs: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            actor,
            advantage=advantage,
            aggregation=aggregation,
            kl=kl,
            kl_coef=kl_coef,
            whiten_advantages=whiten_advantages,
            ppo_epochs=ppo_epochs,
            critic=None,
            vf_coef=0.0,
            value_clip=None,
            critic_lr=None,
            critic_warmup_rollouts=0,
            **kwargs,
        )
