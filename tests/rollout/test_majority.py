"""Completions vote for their answers, whatever else they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightrl.algorithms import GRPOLightningModule
from lightrl.data.prompts import PromptSource
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.records import SamplingParams
from lightrl.rewards import CosineLength, ExactAnswer, MathVerify
from lightrl.rollout import Evaluation
from tests.toys import SMALL, quickstart_model, quiet_trainer, sums_data

THREE_RIGHT = [
    "first I add, so 1+1=2. The answer is \\boxed{2}",
    "\\boxed{2} it is",
    "\\boxed{2.0}",
    "\\boxed{3}",
    "\\boxed{3}",
]


class Says(TransformersEngine):
    """Its completions have these texts."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.texts = texts

    async def generate(self, request: Any) -> Any:
        group = await super().generate(request)
        for completion, text in zip(group.completions, self.texts, strict=True):
            completion.text = text
        return group


def majority(tmp_path: Path, texts: list[str], reward: Any, answer: Any = None) -> float:
    path = quickstart_model(tmp_path / "model", **SMALL)
    rows = PromptSource(rows=[{"prompt": "1+1=", "answer": "2"}])
    made = sums_data(
        prompts=rows,
        evaluation=Evaluation(rows, group_size=len(texts), answer=answer),
        engine=Says(texts),
        rewards=[reward],
        sampling=SamplingParams(max_new_tokens=2),
    )
    (found,) = quiet_trainer().validate(GRPOLightningModule(path), made, verbose=False)
    return float(found[f"eval/maj@{len(texts)}"])


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float("2" in text) for text in completions]


def last_word(text: str) -> str | None:
    return text.split()[-1] if text.split() else None


@pytest.mark.parametrize(
    "reward",
    [
        MathVerify(),
        CosineLength(ExactAnswer(extract="boxed", numeric=True), 100, correct_at_max=1.0),
    ],
)
def test_the_majority_is_that_of_the_answers_which_the_reward_extracts(reward: Any, tmp_path: Path) -> None:
    assert majority(tmp_path, THREE_RIGHT, reward) == 1.0


def test_the_majority_of_a_plain_function_is_that_of_marked_answers_or_of_what_the_user_extracts(
    tmp_path: Path,
) -> None:
    assert majority(tmp_path, ["so \\boxed{2}", "\\boxed{2}", "\\boxed{3}"], right) == 1.0
    words = ["it is 2", "I say 2", "no, it is 3", "it is 3!"]
    assert majority(tmp_path, words, right, last_word) == 1.0
    assert majority(tmp_path, ["3", "3 ", "2", "so 2"], right) == 0.0, "whole texts where nothing extracts"
