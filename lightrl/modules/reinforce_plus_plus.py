"""REINFORCE++: no critic, no groups, advantages normalised over the whole batch."""

from __future__ import annotations

from typing import Any

from jsonargparse import lazy_instance

from lightrl.models.spec import ModelSpec
from lightrl.modules.advantages import AdvantageEstimator, ReinforcePlusPlus
from lightrl.modules.aggregation import Aggregation, TokenMean
from lightrl.modules.kl import KLInReward, KLPenalty
from lightrl.modules.losses import PolicyLoss, PPOClip
from lightrl.modules.ppo import PPOLightningModule

__all__ = ["ReinforcePlusPlusLightningModule"]


class ReinforcePlusPlusLightningModule(PPOLightningModule):
    """REINFORCE++ (Hu et al. 2025, https://arxiv.org/abs/2501.03262, section 3).

    `PPOLightningModule` with the paper's settings: no critic, `A_t` the return from token t on, normalised over all
    tokens of the rollout, k1 in the reward with coefficient 0.01, PPO's clip at 0.2, the mean over tokens, one pass
    over each rollout. One completion per prompt is enough. Its form for groups is `ReinforcePlusPlusBaseline` as the
    advantage with `KLInLoss("k2")` as the KL.

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
        advantage: AdvantageEstimator = lazy_instance(ReinforcePlusPlus),  # noqa: B008
        loss: PolicyLoss = lazy_instance(PPOClip),  # noqa: B008
        aggregation: Aggregation = lazy_instance(TokenMean),  # noqa: B008
        kl: KLPenalty | None = lazy_instance(KLInReward),  # noqa: B008
        kl_coef: float = 0.01,
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
