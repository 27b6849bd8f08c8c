"""Named algorithms with a loss other than PPO's clip."""

from __future__ import annotations

from typing import Any

from lightrl.algorithms.variants import GRPOLightningModule
from lightrl.models.spec import ModelSpec
from lightrl.objectives.loss_terms import KLPenalty, PolicyLoss
from lightrl.objectives.policy_losses import CPG, GSPO


class GSPOLightningModule(GRPOLightningModule):
    """Group sequence policy optimization (GSPO).

    `GRPOLightningModule` with the paper's settings: the length-normalized sequence ratio clipped to
    [1 - 3e-4, 1 + 4e-4], and no KL penalty. With one update per rollout, the ratio is 1 and clipping has no effect. Set
    `minibatch_size` for several updates; the paper makes 4.

    Source: Zheng et al. 2025, https://arxiv.org/abs/2507.18071, sections 4.1 and 5.1.
    """

    def __init__(
        self, actor: str | ModelSpec, *, loss: PolicyLoss = GSPO(), kl: KLPenalty | None = None, **kwargs: Any
    ) -> None:
        super().__init__(actor, loss=loss, kl=kl, **kwargs)


class CPGDLightningModule(GRPOLightningModule):
    """Clipped policy gradient with policy drift (CPGD).

    `GRPOLightningModule` with the settings of the paper and its code: the log-ratio clipped to [log 0.8, log 1.2], the
    drift penalty with coefficient 0.01 and its ratio bounded at 3, and no KL penalty against a reference. The first
    update of a rollout equals REINFORCE. The clip and the drift take effect from the second update on, so set
    `minibatch_size` (the paper's code makes 8 updates) or `ppo_epochs`.

    Source: Liu et al. 2025, https://arxiv.org/abs/2505.12504.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        loss: PolicyLoss = CPG(drift_coef=0.01),
        kl: KLPenalty | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, loss=loss, kl=kl, **kwargs)
