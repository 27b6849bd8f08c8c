"""CPGD: a clipped policy gradient without ratio, and a penalty on the drift from the last policy."""

from __future__ import annotations

from typing import Any

from jsonargparse import lazy_instance

from lightrl.models.spec import ModelSpec
from lightrl.modules.grpo import GRPOLightningModule
from lightrl.modules.kl import KLPenalty
from lightrl.modules.losses import CPG, PolicyLoss

__all__ = ["CPGDLightningModule"]


class CPGDLightningModule(GRPOLightningModule):
    """Clipped policy gradient with drift (Liu et al. 2025, https://arxiv.org/abs/2505.12504).

    `GRPOLightningModule` with the settings of the paper and its code: the log-ratio clipped to [log 0.8, log 1.2], the
    drift penalty with coefficient 0.01 and its ratio bounded at 1.2, no KL to a reference. A rollout's first update
    is REINFORCE's; clip and drift act from the second on: set `minibatch_size` (its code makes 8) or `ppo_epochs`.

    Args:
        kwargs: the other arguments of `GRPOLightningModule`.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        loss: PolicyLoss = lazy_instance(CPG, drift_coef=0.01),  # noqa: B008
        kl: KLPenalty | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, loss=loss, kl=kl, **kwargs)
