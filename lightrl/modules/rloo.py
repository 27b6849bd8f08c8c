"""RLOO: REINFORCE with the mean of the other completions as baseline."""

from __future__ import annotations

from typing import Any

from jsonargparse import lazy_instance

from lightrl.models.spec import ModelSpec
from lightrl.modules.advantages import RLOO, AdvantageEstimator
from lightrl.modules.aggregation import Aggregation, SequenceSum
from lightrl.modules.ppo import PPOLightningModule

__all__ = ["RLOOLightningModule"]


class RLOOLightningModule(PPOLightningModule):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 3.2).

    `PPOLightningModule` with the paper's settings: no critic, `A = r - mean of the others`, k1 in the reward, summed
    over the sequence, one on-policy update per rollout, where the clipped loss has the gradient of REINFORCE.

    Args:
        kwargs: the other arguments of `PPOLightningModule`, but for the critic's.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        advantage: AdvantageEstimator = lazy_instance(RLOO),  # noqa: B008
        aggregation: Aggregation = lazy_instance(SequenceSum),  # noqa: B008
        whiten_advantages: bool = False,
        ppo_epochs: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            actor,
            advantage=advantage,
            aggregation=aggregation,
            whiten_advantages=whiten_advantages,
            ppo_epochs=ppo_epochs,
            critic=None,
            vf_coef=0.0,
            value_clip=None,
            critic_lr=None,
            critic_warmup_rollouts=0,
            **kwargs,
        )
