"""Callbacks: the only place where modules and engines meet. Each can be left out or replaced from YAML."""

from lightrl.callbacks.checkpoint import RolloutCheckpoint
from lightrl.callbacks.evaluate_first import EvaluateFirst
from lightrl.callbacks.hf_export import HFExport
from lightrl.callbacks.kl_control import AdaptiveKL, LinearKL
from lightrl.callbacks.prediction_writer import PredictionWriter
from lightrl.callbacks.reward_normalization import RewardNormalization
from lightrl.callbacks.sample_log import SampleLog
from lightrl.callbacks.save_rollouts import SaveRollouts
from lightrl.callbacks.throughput import Throughput
from lightrl.callbacks.weight_sync import WeightSync

__all__ = [
    "AdaptiveKL",
    "EvaluateFirst",
    "HFExport",
    "LinearKL",
    "PredictionWriter",
    "RewardNormalization",
    "RolloutCheckpoint",
    "SampleLog",
    "SaveRollouts",
    "Throughput",
    "WeightSync",
]
