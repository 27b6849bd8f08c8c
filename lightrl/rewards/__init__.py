"""Reward functions, rule-based rewards, judges, and remote scorers.

Importing this package loads neither torch nor the classes that a run doesn't use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightrl.compat.arguments import lazy_names

if TYPE_CHECKING:
    from lightrl.rewards.answers import extract_boxed, extract_gsm8k, extract_number
    from lightrl.rewards.base import Reward, RewardError, RewardFn, RewardSpec, RewardValues, load_reward, reward_name
    from lightrl.rewards.code import CodeTests
    from lightrl.rewards.gym import ReasoningGymReward
    from lightrl.rewards.judges import GroupRanking
    from lightrl.rewards.maths import MathVerify
    from lightrl.rewards.remote import RemoteReward
    from lightrl.rewards.rubrics import Criterion, Rubric
    from lightrl.rewards.rules import (
        CosineLength,
        ExactAnswer,
        LengthReward,
        RegexFormat,
        RepetitionPenalty,
        SoftOverlong,
    )
    from lightrl.rewards.sandbox import Sandbox, SandboxedBash, SandboxedPython
    from lightrl.rewards.scorer import RewardScorer
    from lightrl.rewards.server import ModelReward

__all__ = [
    "CodeTests",
    "CosineLength",
    "Criterion",
    "ExactAnswer",
    "GroupRanking",
    "LengthReward",
    "MathVerify",
    "ModelReward",
    "ReasoningGymReward",
    "RegexFormat",
    "RemoteReward",
    "RepetitionPenalty",
    "Reward",
    "RewardError",
    "RewardFn",
    "RewardScorer",
    "RewardSpec",
    "RewardValues",
    "Rubric",
    "Sandbox",
    "SandboxedBash",
    "SandboxedPython",
    "SoftOverlong",
    "extract_boxed",
    "extract_gsm8k",
    "extract_number",
    "load_reward",
    "reward_name",
]

_MODULES = ("base", "answers", "rules", "gym", "maths", "remote", "sandbox", "code", "judges", "rubrics", "server")


def __getattr__(name: str) -> Any:
    return lazy_names(__name__, ("scorer",) if name == "RewardScorer" else _MODULES, __all__)(name)
