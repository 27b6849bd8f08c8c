"""LightningModules and the estimators, losses, aggregations and KL penalties they are put together from."""

from lightrl.modules.advantages import *  # noqa: F403
from lightrl.modules.aggregation import *  # noqa: F403
from lightrl.modules.cpgd import CPGDLightningModule
from lightrl.modules.dapo import DAPOLightningModule
from lightrl.modules.drgrpo import DrGRPOLightningModule
from lightrl.modules.grpo import GRPOLightningModule
from lightrl.modules.gspo import GSPOLightningModule
from lightrl.modules.kl import *  # noqa: F403
from lightrl.modules.losses import *  # noqa: F403
from lightrl.modules.off_policy import *  # noqa: F403
from lightrl.modules.ppo import CriticSpec, PPOLightningModule
from lightrl.modules.reinforce_plus_plus import ReinforcePlusPlusLightningModule
from lightrl.modules.reward import RewardLightningModule
from lightrl.modules.rloo import RLOOLightningModule
from lightrl.modules.sft import SFTLightningModule

__all__ = [
    "CPGDLightningModule",
    "CriticSpec",
    "DAPOLightningModule",
    "DrGRPOLightningModule",
    "GRPOLightningModule",
    "GSPOLightningModule",
    "PPOLightningModule",
    "RLOOLightningModule",
    "ReinforcePlusPlusLightningModule",
    "RewardLightningModule",
    "SFTLightningModule",
]
