"""Callbacks: the only place where modules and engines meet. Each can be left out or replaced from YAML."""

from lightrl.callbacks.ema import EMA
from lightrl.callbacks.entropy_control import AdaptiveEntropy
from lightrl.callbacks.evaluate_first import EvaluateFirst
from lightrl.callbacks.fidelity_gate import FidelityGate
from lightrl.callbacks.hf_export import HFExport
from lightrl.callbacks.kl_control import AdaptiveKL, LinearKL
from lightrl.callbacks.ledger_canary import LedgerCanary
from lightrl.callbacks.offload_models import OffloadModels
from lightrl.callbacks.offload_optimizer import OffloadOptimizer
from lightrl.callbacks.prediction_writer import PredictionWriter
from lightrl.callbacks.reference_sync import ReferenceSync
from lightrl.callbacks.reward_normalization import RewardNormalization
from lightrl.callbacks.sample_log import SampleLog
from lightrl.callbacks.save_rollouts import SaveRollouts
from lightrl.callbacks.throughput import Throughput
from lightrl.checkpoints.rollout_checkpoint import RolloutCheckpoint
from lightrl.rollout.weight_sync import WeightSync

__all__ = [
    "EMA",
    "AdaptiveEntropy",
    "AdaptiveKL",
    "EvaluateFirst",
    "FidelityGate",
    "HFExport",
    "LedgerCanary",
    "LinearKL",
    "OffloadModels",
    "OffloadOptimizer",
    "PredictionWriter",
    "ReferenceSync",
    "RewardNormalization",
    "RolloutCheckpoint",
    "SampleLog",
    "SaveRollouts",
    "Throughput",
    "WeightSync",
]
