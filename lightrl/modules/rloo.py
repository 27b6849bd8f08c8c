"""RLOO: REINFORCE with the mean of the other completions as baseline."""

from __future__ import annotations

from typing import Any

from jsonargparse import lazy_instance

from lightrl.models.spec import ModelSpec
from lightrl.modules.advantages import RLOO, AdvantageEstimator
from lightrl.modules.aggregation import Aggregation, SequenceSum
from lightrl.modules.kl import KLInReward, KLPenalty
from lightrl.modules.ppo import PPOLightningModule

__all__ = ["RLOOLightningModule"]


class RLOOLightningModule(PPOLightningModule):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 3.2).

    `PPOLightningModule` with the paper's settings: no critic, `A = r - mean of the others`, k1 in the reward, summed
    over the sequence, one on-policy update per rollout, where the clipped loss has the gradient of REINFORCE.

    Args:
        actor: the policy: a folder or hub name, or a `ModelSpec`.
        advantage: estimator of advantages.
        aggregation: how token losses become one number.
        kl: penalty against the reference; None for none.
        kl_coef: its coefficient.
        whiten_advantages: scale advantages once more over the rollout.
        ppo_epochs: passes over each rollout.
        kwargs: the other arguments of `PPOLightningModule`.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        advantage: AdvantageEstimator = lazy_instance(RLOO),  # noqa: B008
        aggregation: Aggregation = lazy_instance(SequenceSum),  # noqa: B008
        kl: KLPenalty | None = lazy_instance(KLInReward),  # noqa: B008
        kl_coef: float = 0.05,
        whiten_advantages: bool = False,
        ppo_epochs: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            actor,
            critic=None,
            advantage=advantage,
            aggregation=aggregation,
            kl=kl,
            kl_coef=kl_coef,
            whiten_advantages=whiten_advantages,
            ppo_epochs=ppo_epochs,
            **kwargs,
        )
