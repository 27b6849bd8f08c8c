"""Rollouts: the data module, its schedules, and the collection and collation of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrl.compat.arguments import lazy_names

if TYPE_CHECKING:
    from lightrl.data.sft import PTXSource
    from lightrl.rollout.datamodule import Evaluation, RolloutDataModule
    from lightrl.rollout.overlap import Ahead, InFlight
    from lightrl.rollout.sampler import OnPolicy, Schedule

__all__ = ["Ahead", "Evaluation", "InFlight", "OnPolicy", "PTXSource", "RolloutDataModule", "Schedule"]

__getattr__ = lazy_names(__name__, ("sampler", "datamodule", "overlap", ".data.sft"), __all__)
