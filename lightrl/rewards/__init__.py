"""Reward functions, rules and remote scorers: (prompts, completions, columns) -> one float or None each."""

from lightrl.rewards.base import Reward, RewardError, RewardFn, RewardSpec, RewardValues, load_reward, reward_name
from lightrl.rewards.scorer import RewardScorer, ScoreHandle, Scores

__all__ = [
    "Reward",
    "RewardError",
    "RewardFn",
    "RewardScorer",
    "RewardSpec",
    "RewardValues",
    "ScoreHandle",
    "Scores",
    "load_reward",
    "reward_name",
]
