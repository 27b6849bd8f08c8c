"""DAPO: GRPO with a higher upper clip, the mean over tokens, and no KL."""

from __future__ import annotations

from typing import Any

from jsonargparse import lazy_instance

from lightrl.models.spec import ModelSpec
from lightrl.modules.aggregation import Aggregation, TokenMean
from lightrl.modules.grpo import GRPOLightningModule
from lightrl.modules.kl import KLPenalty
from lightrl.modules.losses import PolicyLoss, PPOClip

__all__ = ["DAPOLightningModule"]


class DAPOLightningModule(GRPOLightningModule):
    """Decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025, https://arxiv.org/abs/2503.14476).

    `GRPOLightningModule` with the paper's settings: the ratio clipped to [0.8, 1.28], the mean over all tokens of the
    optimizer's batch, no KL (the paper makes 16 updates per rollout: set `minibatch_size`). Two of its parts belong to
    the data module and are set there: dynamic sampling (`RolloutDataModule(max_refills=...)`) and the soft over-long
    punishment (the reward `SoftOverlong`).

    Args:
        kwargs: the other arguments of `GRPOLightningModule`.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        loss: PolicyLoss = lazy_instance(PPOClip, eps_high=0.28),  # noqa: B008
        aggregation: Aggregation = lazy_instance(TokenMean),  # noqa: B008
        kl: KLPenalty | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, loss=loss, aggregation=aggregation, kl=kl, **kwargs)
