"""LightRL: reinforcement learning for LLMs and VLMs, built on PyTorch Lightning. Names are imported when used."""

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
        ExtraLosses,
        GRPOLightningModule,
        GSPOLightningModule,
        PPOLightningModule,
        ReinforcePlusPlusLightningModule,
        RewardLightningModule,
        RLOOLightningModule,
        SFTLightningModule,
        Shaping,
        Updates,
    )
    from lightrl.callbacks import WeightSync
    from lightrl.data import PreferenceDataModule, PreferenceSource, PromptSource, SFTDataModule, SFTSource
    from lightrl.engines import ServerEngine, TransformersEngine, VLLMEngine
    from lightrl.environments import AgentProgram, EnvironmentEpisode
    from lightrl.models.spec import LoraSpec, ModelSpec
    from lightrl.records import Experience, Rollouts, SamplingParams
    from lightrl.rollout import RolloutDataModule

# Where the names are, in import order: a room is looked through before those that would import it.
_ROOMS = ("records", "models.spec", "engines", "data", "environments", "rollout", "algorithms", "callbacks")

__all__ = [  # noqa: RUF022 - grouped
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
    "ExtraLosses",
    "GRPOLightningModule",
    "GSPOLightningModule",
    "PPOLightningModule",
    "ReinforcePlusPlusLightningModule",
    "RewardLightningModule",
    "RLOOLightningModule",
    "SFTLightningModule",
    "Shaping",
    "Updates",
    "Experience",
    "Rollouts",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for room in _ROOMS if name in __all__ else ():
        module = import_module(f"lightrl.{room}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'lightrl' has no attribute {name!r}")
