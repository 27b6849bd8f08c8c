"""Reward functions, rules and remote scorers: (prompts, completions, columns) -> one float or None each.

Importing this package does not load torch, which a reward function and `lightrl serve-reward` need not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightrl.rewards.base import Reward, RewardError, RewardFn, RewardSpec, RewardValues, load_reward, reward_name
from lightrl.rewards.combined import CombinedReward
from lightrl.rewards.extract import extract_boxed, extract_gsm8k, extract_number
from lightrl.rewards.judge import GenerativeJudge
from lightrl.rewards.maths import MathVerify
from lightrl.rewards.reasoning_gym import ReasoningGymReward
from lightrl.rewards.remote import RemoteReward
from lightrl.rewards.rules import (
    CosineLength,
    ExactAnswer,
    LengthReward,
    RegexFormat,
    RepetitionPenalty,
    SoftOverlong,
)

if TYPE_CHECKING:
    from lightrl.rewards.scorer import RewardScorer, ScoreHandle

__all__ = [
    "CombinedReward",
    "CosineLength",
    "ExactAnswer",
    "GenerativeJudge",
    "LengthReward",
    "MathVerify",
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
    "ScoreHandle",
    "SoftOverlong",
    "extract_boxed",
    "extract_gsm8k",
    "extract_number",
    "load_reward",
    "reward_name",
]


def __getattr__(name: str) -> Any:
    if name in ("RewardScorer", "ScoreHandle"):  # the records that they take hold tensors
        from lightrl.rewards import scorer

        return getattr(scorer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
