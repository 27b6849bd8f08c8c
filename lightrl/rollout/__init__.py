"""Rollouts: the data module, its schedules, and the collection and collation of groups."""

from typing import Any

from lightrl.rollout.datamodule import RolloutDataModule
from lightrl.rollout.loaders import Evaluation
from lightrl.rollout.schedules import Ahead, InFlight, OnPolicy, Schedule

__all__ = ["Ahead", "Evaluation", "InFlight", "OnPolicy", "PTXSource", "RolloutDataModule", "Schedule"]


def __getattr__(name: str) -> Any:
    if name == "PTXSource":  # imports the SFT code, which most runs don't need
        from lightrl.rollout.ptx import PTXSource

        return PTXSource
    raise AttributeError(f"module 'lightrl.rollout' has no attribute {name!r}")
