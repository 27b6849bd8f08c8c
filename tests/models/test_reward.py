"""Reward models: scores as transformers gives them, from token ids and from texts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.compat.transformers_models import transformer_blocks
from lightrl.models.reward import RewardModel, RewardModelSpec
from tests.models.conftest import Batch
from tests.rows import unshared
from tests.toys import VOCAB, build


def classifier() -> Any:
    return build("qwen2", head="ForSequenceClassification", num_labels=1)


class Letters:
    """A tokenizer whose ids are a BOS and character codes modulo the vocabulary."""

    pad_token_id = None
    bos_token_id = 1
    model_max_length = 100

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [2 + ord(c) % (VOCAB - 2) for c in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], chat_template: str | None, tokenize: bool) -> str:
        assert not tokenize
        return f"{chat_template or 'T'}|" + "|".join(f"{m['role']}:{m['content']}" for m in messages)


def test_the_last_token_counts_even_if_it_is_the_pad_token(batch: Batch) -> None:
    """Many tokenizers pad with end-of-sequence; a position found by comparing ids would skip the real one."""
    ids = batch.token_ids[:1].clone()
    last = int(batch.attention_mask[0].sum()) - 1
    ids[0, last] = 0
    reward = RewardModel(classifier())
    score = reward(unshared(ids, batch.attention_mask[:1]))
    hidden = reward.model.model(input_ids=ids[:, : last + 1]).last_hidden_state[0, -1]
    torch.testing.assert_close(score[0], reward.model.score(hidden)[0], atol=1e-5, rtol=1e-5)


def test_texts_are_tokenised_by_its_own_tokenizer() -> None:
    reward = RewardModel(classifier(), Letters(), max_length=8)
    rollouts = SimpleNamespace(prompts=["ab", "a long prompt"], completions=["c", "d"])

    def alone(ids: list[int]) -> float:
        return reward.model(input_ids=torch.tensor([ids])).logits.item()

    def encode(text: str) -> list[int]:
        return [2 + ord(c) % (VOCAB - 2) for c in text]

    got = reward.score(rollouts, 100)
    assert got.tolist() == pytest.approx([alone([1, *encode("abc")]), alone([1, *encode("promptd")])], abs=1e-5)
    assert RewardModel(classifier(), Letters()).max_length == 100  # below the model's number of positions, 256
    for template, text in (("default", "T|user:ab|assistant:c"), ("X", "X|user:ab|assistant:c")):
        templated = RewardModel(classifier(), Letters(), chat_template=template)
        assert templated.score_texts(["ab"], ["c"]).item() == pytest.approx(alone(encode(text)), abs=1e-5)
        # The policy's template is not rendered into ours, and conversations keep their turns.
        prompts = SimpleNamespace(prompts=["<policy>ab"], raw_prompts=["ab"], completions=["c"])
        assert templated.score(prompts, 100).item() == pytest.approx(alone(encode(text)), abs=1e-5)
        turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]
        prompts = SimpleNamespace(prompts=["<policy>"], raw_prompts=[turns], completions=["c"])
        head, rest = text[0], text[1:]
        assert templated.score(prompts, 100).item() == pytest.approx(alone(encode(f"{head}|system:s{rest}")), abs=1e-5)


def test_from_spec_is_frozen(tmp_path: Path) -> None:
    classifier().save_pretrained(tmp_path)
    reward = RewardModel.from_spec(RewardModelSpec("quality", str(tmp_path), tokenizer="policy", dtype="bfloat16"))
    assert not any(p.requires_grad for p in reward.parameters())
    assert next(reward.parameters()).dtype == torch.bfloat16 and len(transformer_blocks(reward)) == 2


@pytest.mark.parametrize("layout", ["auto", "packed", "padded"])
def test_prompts_are_scored_once_and_scores_stay(layout: Any, batch: Batch) -> None:
    """From token ids and from texts: a group's common beginning goes through once, where the layout shares."""
    expected = classifier()(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits.squeeze(-1)
    reward, tokens = RewardModel(classifier(), layout=layout), []
    reward.model.model.embed_tokens.register_forward_hook(lambda m, args, out: tokens.append(args[0].numel()))
    for budget in (1, 30, 1000):  # one row each, a few, all at once
        tokens.clear()
        scores = reward.score(SimpleNamespace(**batch._asdict()), budget)
        torch.testing.assert_close(scores, expected.detach(), atol=1e-5, rtol=1e-5)
    real = int(batch.attention_mask.sum())
    # three prompts are repeated 3, 1 and 2 times: 3 x 7 + 3 + 2 tokens less
    assert tokens == [
        {"auto": real - 26, "packed": real, "padded": 10 * int(batch.attention_mask.sum(1).max())}[layout]
    ]
    tokens.clear()
    texts = RewardModel(classifier(), Letters(), layout=layout)
    texts.model.model.embed_tokens.register_forward_hook(lambda m, args, out: tokens.append(args[0].numel()))
    prompts, completions = ["a long prompt", "b", "a long prompt", "a long prompt"], ["cd", "efg", "ch", "cd"]
    together = texts.score_texts(prompts, completions)
    if layout == "auto":  # beginning of text, prompt and "c" once; then d, h and nothing; and a row of its own
        assert tokens[0] <= 15 + 3 + 5
    alone = [texts.score_texts([p], [c]).item() for p, c in zip(prompts, completions, strict=True)]
    assert together.tolist() == pytest.approx(alone, abs=1e-5)


def test_a_reward_model_with_labels_scores_the_rows_of_these_alone() -> None:
    spec = RewardModelSpec("maths", "x", labels=["sum", "product"], label_column="kind")
    assert spec.applies({"kind": ["sum", "poem", "product"]}) == [True, False, True]
    assert RewardModelSpec("all", "x").applies({}) is None
