"""GSPO: GRPO with one ratio per sequence."""

from __future__ import annotations

from typing import Any

from jsonargparse import lazy_instance

from lightrl.models.spec import ModelSpec
from lightrl.modules.grpo import GRPOLightningModule
from lightrl.modules.kl import KLPenalty
from lightrl.modules.losses import GSPO, PolicyLoss

__all__ = ["GSPOLightningModule"]


class GSPOLightningModule(GRPOLightningModule):
    """Group sequence policy optimisation (Zheng et al. 2025, https://arxiv.org/abs/2507.18071, section 4.1 and 5.1).

    `GRPOLightningModule` with the paper's settings: the length-normalised ratio of the sequence clipped to
    [1 - 3e-4, 1 + 4e-4], no KL. With one update per rollout the ratio is 1 and nothing is clipped: set `minibatch_size`
    (the paper makes 4).

    Args:
        kwargs: the other arguments of `GRPOLightningModule`.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        loss: PolicyLoss = lazy_instance(GSPO),  # noqa: B008
        kl: KLPenalty | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, loss=loss, kl=kl, **kwargs)
