"""REINFORCE++: no critic, no groups, advantages normalised over the whole batch."""

from __future__ import annotations

from typing import Any

from jsonargparse import lazy_instance

from lightrl.models.spec import ModelSpec
from lightrl.modules.advantages import AdvantageEstimator, ReinforcePlusPlus
from lightrl.modules.ppo import PPOLightningModule

__all__ = ["ReinforcePlusPlusLightningModule"]


class ReinforcePlusPlusLightningModule(PPOLightningModule):
    """REINFORCE++ (Hu et al. 2025, https://arxiv.org/abs/2501.03262, section 3).

    `PPOLightningModule` with the paper's settings: no critic, `A_t` the return from token t on, normalised over all
    tokens of the rollout, k1 in the reward with coefficient 0.01, PPO's clip at 0.2, the mean over tokens, one pass
    over each rollout. One completion per prompt is enough. Its form for groups is `ReinforcePlusPlusBaseline` as the
    advantage with `KLInLoss("k2")` as the KL.

    Args:
        kwargs: the other arguments of `PPOLightningModule`, but for the critic's.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        advantage: AdvantageEstimator = lazy_instance(ReinforcePlusPlus),  # noqa: B008
        kl_coef: float = 0.01,
        whiten_advantages: bool = False,
        ppo_epochs: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            actor,
            advantage=advantage,
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
