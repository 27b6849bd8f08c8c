"""Callbacks, which connect modules and engines. Each can be removed or replaced in YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrl.checkpoints.rollout_checkpoint import RolloutCheckpoint
from lightrl.compat.arguments import lazy_names
from lightrl.rollout.learner import WeightSync

if TYPE_CHECKING:
    from lightrl.callbacks.coefficients import AdaptiveEntropy, AdaptiveKL, LinearKL, RewardNormalization
    from lightrl.callbacks.completion_logger import CompletionLogger
    from lightrl.callbacks.hf_export import HFExport
    from lightrl.callbacks.logprob_checks import LogprobMonitor, TrajectoryLogprobCheck
    from lightrl.callbacks.moving_weights import EMA, ReferenceSync
    from lightrl.callbacks.offload import OffloadModels, OffloadOptimizer
    from lightrl.callbacks.prediction_writer import PredictionWriter
    from lightrl.callbacks.rollout_writer import RolloutWriter
    from lightrl.callbacks.throughput import EvaluateFirst, ThroughputMonitor

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

_MODULES = (
    *("throughput", "coefficients", "moving_weights", "offload", "logprob_checks"),
    *("hf_export", "prediction_writer", "rollout_writer", "completion_logger"),
)
__getattr__ = lazy_names(__name__, _MODULES, __all__)
