"""LightningModules for PPO and its variants, distillation, supervised fine-tuning, and reward models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrl.compat.arguments import lazy_names

if TYPE_CHECKING:
    from lightrl.algorithms.distill import DistillLightningModule
    from lightrl.algorithms.experience import TrajectoryLayout
    from lightrl.algorithms.module import ExtraLosses, Shaping, Updates
    from lightrl.algorithms.policy_gradient import GRPOLightningModule, PolicyGradientLightningModule
    from lightrl.algorithms.ppo import CriticSpec, PPOLightningModule
    from lightrl.algorithms.schedules import LRSchedule
    from lightrl.algorithms.supervised import RewardLightningModule, SFTLightningModule
    from lightrl.algorithms.variants import (
        CPGDLightningModule,
        DAPOLightningModule,
        DrGRPOLightningModule,
        GSPOLightningModule,
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
    "PolicyGradientLightningModule",
    "RLCallback",
    "RLOOLightningModule",
    "ReinforcePlusPlusLightningModule",
    "RewardLightningModule",
    "SFTLightningModule",
    "Shaping",
    "TrajectoryLayout",
    "Updates",
]

_MODULES = ("module", "experience", "base", "policy_gradient", "ppo", "variants", "schedules", "supervised", "distill")
__getattr__ = lazy_names(__name__, _MODULES, __all__)
