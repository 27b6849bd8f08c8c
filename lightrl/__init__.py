"""LightRL: reinforcement fine-tuning of language models as an ordinary Lightning job.

The names below are loaded when they are first asked for, so that `import lightrl` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lightrl.algorithms import (
        CPGDLightningModule,
        CriticSpec,
        DAPOLightningModule,
        DistillLightningModule,
        DrGRPOLightningModule,
        GRPOLightningModule,
        GSPOLightningModule,
        PPOLightningModule,
        ReinforcePlusPlusLightningModule,
        RewardLightningModule,
        RLOOLightningModule,
        SFTLightningModule,
    )
    from lightrl.callbacks import WeightSync
    from lightrl.data import (
        PreferenceDataModule,
        PreferenceSource,
        PromptSource,
        SFTDataModule,
        SFTSource,
    )
    from lightrl.engines import ServerEngine, TransformersEngine, VLLMEngine
    from lightrl.environments import AgentProgram, EnvironmentEpisode
    from lightrl.models.spec import LoraSpec, ModelSpec
    from lightrl.rollout import RolloutDataModule
    from lightrl.types import Experience, Rollouts, SamplingParams

_HOMES = {
    "callbacks": ["WeightSync"],
    "data": [
        "PreferenceDataModule",
        "PreferenceSource",
        "PromptSource",
        "SFTDataModule",
        "SFTSource",
    ],
    "engines": ["ServerEngine", "TransformersEngine", "VLLMEngine"],
    "models.spec": ["LoraSpec", "ModelSpec"],
    "algorithms": [
        "CPGDLightningModule",
        "CriticSpec",
        "DAPOLightningModule",
        "DistillLightningModule",
        "DrGRPOLightningModule",
        "GRPOLightningModule",
        "GSPOLightningModule",
        "PPOLightningModule",
        "ReinforcePlusPlusLightningModule",
        "RewardLightningModule",
        "RLOOLightningModule",
        "SFTLightningModule",
    ],
    "environments": ["AgentProgram", "EnvironmentEpisode"],
    "rollout": ["RolloutDataModule"],
    "types": ["Experience", "Rollouts", "SamplingParams"],
}
_MODULE_OF = {name: f"lightrl.{home}" for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 - grouped as above
    "WeightSync",
    "PreferenceDataModule",
    "PreferenceSource",
    "PromptSource",
    "AgentProgram",
    "EnvironmentEpisode",
    "RolloutDataModule",
    "SFTDataModule",
    "SFTSource",
    "ServerEngine",
    "TransformersEngine",
    "VLLMEngine",
    "LoraSpec",
    "ModelSpec",
    "CPGDLightningModule",
    "CriticSpec",
    "DAPOLightningModule",
    "DistillLightningModule",
    "DrGRPOLightningModule",
    "GRPOLightningModule",
    "GSPOLightningModule",
    "PPOLightningModule",
    "ReinforcePlusPlusLightningModule",
    "RewardLightningModule",
    "RLOOLightningModule",
    "SFTLightningModule",
    "Experience",
    "Rollouts",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        from importlib import import_module

        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'lightrl' has no attribute {name!r}")
