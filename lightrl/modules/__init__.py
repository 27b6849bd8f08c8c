"""LightningModules and the estimators, losses, aggregations and KL penalties they are put together from."""

from lightrl.modules.advantages import *  # noqa: F403
from lightrl.modules.aggregation import *  # noqa: F403
from lightrl.modules.grpo import GRPOLightningModule
from lightrl.modules.kl import *  # noqa: F403
from lightrl.modules.losses import *  # noqa: F403
from lightrl.modules.off_policy import *  # noqa: F403
from lightrl.modules.ppo import CriticSpec, PPOLightningModule
from lightrl.modules.rloo import RLOOLightningModule
from lightrl.modules.sft import SFTLightningModule

__all__ = ["CriticSpec", "GRPOLightningModule", "PPOLightningModule", "RLOOLightningModule", "SFTLightningModule"]
