"""Callbacks: the only place where modules and engines meet. Each can be left out or replaced from YAML."""

from lightrl.callbacks.checkpoint import RolloutCheckpoint
from lightrl.callbacks.hf_export import HFExport
from lightrl.callbacks.kl_control import AdaptiveKL, LinearKL
from lightrl.callbacks.reward_normalization import RewardNormalization
from lightrl.callbacks.weight_sync import WeightSync

__all__ = ["AdaptiveKL", "HFExport", "LinearKL", "RewardNormalization", "RolloutCheckpoint", "WeightSync"]
