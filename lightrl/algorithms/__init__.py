"""LightningModules: PPO and its variants, supervised fine-tuning, reward models."""

from lightrl.algorithms.distill import DistillLightningModule
from lightrl.algorithms.hooks import RLCallback
from lightrl.algorithms.ppo import PPOLightningModule
from lightrl.algorithms.reward import RewardLightningModule
from lightrl.algorithms.schedule import LRSchedule
from lightrl.algorithms.settings import CriticSpec, ExtraLosses, Shaping, Updates
from lightrl.algorithms.sft import SFTLightningModule
from lightrl.algorithms.variants import (
    CPGDLightningModule,
    DAPOLightningModule,
    DrGRPOLightningModule,
    GRPOLightningModule,
    GSPOLightningModule,
    ReinforcePlusPlusLightningModule,
    RLOOLightningModule,
)

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
    "Updates",
]
