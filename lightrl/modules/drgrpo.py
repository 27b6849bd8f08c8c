"""Dr. GRPO: GRPO without its two divisions, by the length of a response and by the std of a group."""

from __future__ import annotations

from typing import Any

from jsonargparse import lazy_instance

from lightrl.models.spec import ModelSpec
from lightrl.modules.advantages import AdvantageEstimator, GroupNorm
from lightrl.modules.aggregation import Aggregation, ConstantLength
from lightrl.modules.grpo import GRPOLightningModule
from lightrl.modules.kl import KLPenalty

__all__ = ["DrGRPOLightningModule"]


class DrGRPOLightningModule(GRPOLightningModule):
    """GRPO done right (Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2).

    `GRPOLightningModule` with the paper's settings: `A = r - mean_group`, the sum over tokens divided by a constant
    (the paper's generation budget, 3000 tokens; take your `max_new_tokens`), no KL.

    Args:
        kwargs: the other arguments of `GRPOLightningModule`.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        advantage: AdvantageEstimator = lazy_instance(GroupNorm, scale="none"),  # noqa: B008
        aggregation: Aggregation = lazy_instance(ConstantLength, length=3000),  # noqa: B008
        kl: KLPenalty | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantage=advantage, aggregation=aggregation, kl=kl, **kwargs)
