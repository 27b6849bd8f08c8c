"""Datasets, chat templates, and data modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrl.compat.arguments import lazy_names

if TYPE_CHECKING:
    from lightrl.data.arithmetic import ArithmeticRows
    from lightrl.data.curriculum import PromptCurriculum
    from lightrl.data.preferences import PreferenceDataModule, PreferenceSource
    from lightrl.data.prompts import PromptMixture, PromptSet, PromptSource
    from lightrl.data.reasoning_gym import ReasoningGymRows, ReasoningGymTask
    from lightrl.data.rows import RowSource
    from lightrl.data.sft import SFTDataModule, SFTSource
    from lightrl.data.templates import load_tokenizer

__all__ = [
    "ArithmeticRows",
    "PreferenceDataModule",
    "PreferenceSource",
    "PromptCurriculum",
    "PromptMixture",
    "PromptSet",
    "PromptSource",
    "ReasoningGymRows",
    "ReasoningGymTask",
    "RowSource",
    "SFTDataModule",
    "SFTSource",
    "load_tokenizer",
]

__getattr__ = lazy_names(
    __name__,
    ("templates", "rows", "prompts", "curriculum", "arithmetic", "reasoning_gym", "sft", "preferences"),
    __all__,
)
