"""CPGD: a clipped policy gradient without ratio, and a penalty on the drift from the last policy."""

from __future__ import annotations

from typing import Any

from jsonargparse import lazy_instance

from lightrl.models.spec import ModelSpec
from lightrl.modules.advantages import AdvantageEstimator, GroupNorm
from lightrl.modules.aggregation import Aggregation, SequenceMean
from lightrl.modules.kl import KLPenalty
from lightrl.modules.losses import CPG, PolicyLoss
from lightrl.modules.ppo import PPOLightningModule

__all__ = ["CPGDLightningModule"]


class CPGDLightningModule(PPOLightningModule):
    """Clipped policy gradient with drift (Liu et al. 2025, https://arxiv.org/abs/2505.12504).

    `PPOLightningModule` with the settings of the paper and its code: no critic, `A = (r - mean_group) / std_group`, the
    log-ratio clipped to [log 0.8, log 1.2], the drift penalty with coefficient 0.01 and its ratio bounded at 1.2, the
    mean over sequences, no KL to a reference, one pass over each rollout (in 8 mini-batches there). The first update of
    a rollout is REINFORCE's; clip and drift act from the second on: set `minibatch_size` or `ppo_epochs`.

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
        loss: PolicyLoss = lazy_instance(CPG, drift_coef=0.01),  # noqa: B008
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
