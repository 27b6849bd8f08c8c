"""GSPO: GRPO with one ratio per sequence."""

from __future__ import annotations

from typing import Any

from jsonargparse import lazy_instance

from lightrl.models.spec import ModelSpec
from lightrl.modules.advantages import AdvantageEstimator, GroupNorm
from lightrl.modules.aggregation import Aggregation, SequenceMean
from lightrl.modules.kl import KLPenalty
from lightrl.modules.losses import GSPO, PolicyLoss
from lightrl.modules.ppo import PPOLightningModule

__all__ = ["GSPOLightningModule"]


class GSPOLightningModule(PPOLightningModule):
    """Group sequence policy optimisation (Zheng et al. 2025, https://arxiv.org/abs/2507.18071, section 4.1 and 5.1).

    `PPOLightningModule` with the paper's settings: no critic, `A = (r - mean_group) / std_group`, the length-normalised
    ratio of the sequence clipped to [1 - 3e-4, 1 + 4e-4], the mean over sequences, no KL, one pass over each rollout
    (in 4 mini-batches there: set `minibatch_size`; with one update per rollout the ratio is 1 and nothing is clipped).

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
        advantage: AdvantageEstimator = lazy_instance(GroupNorm),  # noqa: B008
        loss: PolicyLoss = lazy_instance(GSPO),  # noqa: B008
        aggregation: Aggregation = lazy_instance(SequenceMean),  # noqa: B008
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
