"""Rows that no reward function can score, and prompts that no engine takes, are found before any model loads."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from lightrl.algorithms import GRPOLightningModule
from lightrl.data.prompts import PromptMixture, PromptSource
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.rewards import CosineLength, ExactAnswer
from lightrl.rewards.scorer import RewardScorer
from lightrl.rollout import Evaluation
from tests.toys import SMALL, model_fixture, quiet_trainer, sums_data

WITH = [{"prompt": "1+1=", "answer": "2", "label": "m"}] * 4
WITHOUT = [{"prompt": "1+2=", "label": "n"}] * 4


model_path = model_fixture(**SMALL)


def needs(completions: list[str], answer: list[str]) -> list[float]:
    assert None not in answer
    return [0.5 * index for index in range(len(completions))]


def free(completions: list[str]) -> list[float]:
    return [0.5 * index for index in range(len(completions))]


def fit(model_path: str, **settings: Any) -> None:
    data = sums_data(**settings)
    try:
        quiet_trainer().fit(GRPOLightningModule(model_path, kl=None), data)
    except ValueError:
        assert data.engine.policy_version <= 0 and not data.engine.started
        raise


def placed(where: str, rows: Any) -> dict[str, Any]:
    """Rows as training or as evaluation prompts."""
    return {"prompts": rows} if where == "prompts" else {"prompts": WITH, "evaluation": Evaluation(rows)}


@pytest.mark.parametrize(
    "settings",
    [
        {"prompts": WITH, "evaluation": Evaluation(WITHOUT)},
        {
            "prompts": WITH,
            "evaluation": Evaluation({"easy": PromptSource(rows=WITH), "hard": PromptSource(rows=WITHOUT)}),
        },
        {"prompts": PromptMixture([PromptSource(rows=WITH), PromptSource(rows=WITHOUT)])},
    ],
)
def test_a_source_without_a_column_that_its_rewards_need_is_refused(settings: Any, model_path: str) -> None:
    with pytest.raises(ValueError, match=r"'needs': requires answer, but list \(.*rewards_by_label"):
        fit(model_path, rewards=[needs], **settings)


def test_a_function_needs_its_columns_where_its_labels_are(model_path: str) -> None:
    mixed = PromptMixture([PromptSource(rows=WITH), PromptSource(rows=WITHOUT)])
    rewards_by_label = {"m": [("needs", 1.0)], "n": [("free", 1.0)]}
    rewards = RewardScorer([needs, free], rewards_by_label=rewards_by_label)
    fit(model_path, prompts=mixed, rewards=rewards, evaluation=Evaluation(WITHOUT))
    with pytest.raises(ValueError, match=r"'needs': requires answer.*list \(prompts\)"):
        wrong = {**rewards_by_label, "n": [("needs", 1.0)], "o": [("free", 1.0)]}
        fit(model_path, prompts=mixed, rewards=RewardScorer([needs, free], rewards_by_label=wrong))


@pytest.mark.parametrize("reward", [ExactAnswer(), CosineLength(ExactAnswer(), 9)])
def test_the_column_of_a_rule_is_looked_for_before_training(reward: Any, model_path: str) -> None:
    with pytest.raises(ValueError, match=r"requires answer, but list \(evaluation.prompts\) has label, prompt"):
        fit(model_path, prompts=WITH, evaluation=Evaluation(WITHOUT), rewards=[reward])
    fit(model_path, prompts=PromptMixture([PromptSource(rows=WITH), PromptSource(rows=WITHOUT)]), rewards=[reward])


@pytest.mark.parametrize("label", ["zzz", None])
@pytest.mark.parametrize("where", ["prompts", "evaluation"])
def test_a_label_without_rewards_is_named(label: Any, where: str, model_path: str) -> None:
    rows = [*WITH, {"prompt": "1+1=", "label": label}]
    with pytest.raises(ValueError, match=rf"list .*an example has label {label!r}"):
        rewards = RewardScorer([free], rewards_by_label={"m": [("free", 1.0)]})
        fit(model_path, rewards=rewards, **placed(where, PromptSource(rows=rows)))


@pytest.mark.parametrize("where", ["prompts", "evaluation"])
def test_prompts_that_do_not_fit_the_model_are_found_before_it_loads(where: str, model_path: str) -> None:
    longest = TransformersEngine().known_model_len(model_path)
    assert longest is not None
    rows = [{"prompt": "1" * length} for length in (longest - 30, longest - 6, longest - 5)]
    message = rf"list, row 2: the prompt has {longest - 5} tokens; with max_new_tokens=6 .*max_prompt"
    with pytest.raises(ValueError, match=message):
        fit(model_path, rewards=[free], **placed(where, rows))
    short = TransformersEngine(max_model_len=20)
    with pytest.raises(ValueError, match="row 1: .*has 15 tokens.*maximum length of 20"):
        fit(model_path, engine=short, prompts=[{"prompt": "1" * 14}, {"prompt": "1" * 15}])
    fit(model_path, engine=TransformersEngine(max_model_len=20), prompts=[{"prompt": "1" * 14}] * 4)


def test_prompts_without_tokens_are_found_before_the_model_loads(model_path: str) -> None:
    with pytest.raises(ValueError, match="list, row 1: the prompt '日本語' has no tokens"):
        fit(model_path, prompts=[{"prompt": "日本語1"}, {"prompt": "日本語"}])


def test_conversations_are_looked_at_with_what_their_template_adds(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}({{ m['content'] }})" + "+" * 30 + "{% endfor %}"
    rows = [{"prompt": [{"role": "user", "content": "1" * n}]} for n in (10, 40)]
    assert len(PromptSource(rows=rows).load(tokenizer, room=(80, 8))) == 2
    with pytest.raises(ValueError, match="row 1: the prompt has 72 tokens"):
        PromptSource(rows=rows).load(tokenizer, room=(79, 8))
    assert len(PromptSource(rows=rows, max_prompt_tokens=50).load(tokenizer, room=(79, 8))) == 1
    stream = PromptSource(rows=lambda: Dataset.from_list(rows).to_iterable_dataset())
    with pytest.raises(ValueError, match="row 1: the prompt has 72 tokens"):
        stream.load(tokenizer, room=(79, 8), shuffle=False).batch(0, 2)
