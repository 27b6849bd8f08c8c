"""Callbacks: the only place where modules and engines meet. Each can be left out or replaced from YAML."""

from lightrl.callbacks.completion_logger import CompletionLogger
from lightrl.callbacks.ema import EMA
from lightrl.callbacks.entropy_control import AdaptiveEntropy
from lightrl.callbacks.evaluate_first import EvaluateFirst
from lightrl.callbacks.hf_export import HFExport
from lightrl.callbacks.kl_control import AdaptiveKL, LinearKL
from lightrl.callbacks.logprob_monitor import LogprobMonitor
from lightrl.callbacks.offload_models import OffloadModels
from lightrl.callbacks.offload_optimizer import OffloadOptimizer
from lightrl.callbacks.prediction_writer import PredictionWriter
from lightrl.callbacks.reference_sync import ReferenceSync
from lightrl.callbacks.reward_normalization import RewardNormalization
from lightrl.callbacks.rollout_writer import RolloutWriter
from lightrl.callbacks.throughput import ThroughputMonitor
from lightrl.callbacks.trajectory_check import TrajectoryLogprobCheck
from lightrl.checkpoints.rollout_checkpoint import RolloutCheckpoint
from lightrl.rollout.weight_sync import WeightSync

__all__ = [
    "EMA",
    "AdaptiveEntropy",
    "AdaptiveKL",
    "CompletionLogger",
    "EvaluateFirst",
    "HFExport",
    "LinearKL",
    "LogprobMonitor",
    "OffloadModels",
    "OffloadOptimizer",
    "PredictionWriter",
    "ReferenceSync",
    "RewardNormalization",
    "RolloutCheckpoint",
    "RolloutWriter",
    "ThroughputMonitor",
    "TrajectoryLogprobCheck",
    "WeightSync",
]
