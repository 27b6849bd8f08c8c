"""LightningModules for PPO and its variants, distillation, supervised fine-tuning, and reward models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrl.compat.arguments import lazy_names

if TYPE_CHECKING:
    from lightrl.algorithms.distill import DistillLightningModule
    from lightrl.algorithms.experience import TrajectoryLayout
    from lightrl.algorithms.loss_variants import CPGDLightningModule, GSPOLightningModule
    from lightrl.algorithms.ppo import PPOLightningModule
    from lightrl.algorithms.schedules import LRSchedule
    from lightrl.algorithms.settings import CriticSpec, ExtraLosses, Shaping, Updates
    from lightrl.algorithms.supervised import RewardLightningModule, SFTLightningModule
    from lightrl.algorithms.variants import (
        DAPOLightningModule,
        DrGRPOLightningModule,
        GRPOLightningModule,
        ReinforcePlusPlusLightningModule,
        RLOOLightningModule,
    )
    from lightrl.rollout.learner import RLCallback

__all__ = [
    "CPGDLightningModule",
    "CriticSpec",
    "DAPOLightningModule",
    "DistillLightningModule",
    "DrGRPOLightningModule",
    "ExtraLosses",
    "GRPOLightningModule",
    "GSPOLightningModule",
    "LRSchedule",
    "PPOLightningModule",
    "RLCallback",
    "RLOOLightningModule",
    "ReinforcePlusPlusLightningModule",
    "RewardLightningModule",
    "SFTLightningModule",
    "Shaping",
    "TrajectoryLayout",
    "Updates",
]

__getattr__ = lazy_names(
    __name__,
    ("settings", "experience", "base", "ppo", "variants", "schedules", "loss_variants", "supervised", "distill"),
    __all__,
)
