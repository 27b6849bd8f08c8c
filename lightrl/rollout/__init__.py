"""Rollouts: the data module, its schedules, and what collects and lays out groups."""

from typing import Any

from lightrl.rollout.datamodule import RolloutDataModule
from lightrl.rollout.loaders import Evaluation
from lightrl.rollout.schedules import Ahead, InFlight, OnPolicy, Schedule

__all__ = ["Ahead", "Evaluation", "InFlight", "OnPolicy", "PTXSource", "RolloutDataModule", "Schedule"]


def __getattr__(name: str) -> Any:
    if name == "PTXSource":  # reads supervised rows, which most runs have none of
        from lightrl.rollout.ptx import PTXSource

        return PTXSource
    raise AttributeError(f"module 'lightrl.rollout' has no attribute {name!r}")
