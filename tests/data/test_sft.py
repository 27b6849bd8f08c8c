"""Supervised rows: what is learnt, padding, chat templates, order, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.data.prompts import PromptSource
from lightrl.data.sft import SFTDataModule, SFTSource
from lightrl.data.sft_loader import Example, SFTLoader
from tests.rows import prompt_and_completion

ROWS = [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(8)]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}>{{ m['content'] }}<eos>\n{% else %}"
    "({{ m['content'] }}){% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def test_only_the_completion_and_its_end_are_learnt(tokenizer: Any) -> None:
    rows = SFTSource(rows=[{"prompt": "1+1=", "completion": "2"}, {"prompt": "9=", "completion": "009"}])
    batch = SFTLoader(rows.tokenized(tokenizer), 2, 0, train=False).collate(rows.tokenized(tokenizer))
    # "0" is 4, "1" 5, "2" 6, "9" 13, "+" 14, "=" 18, end 1, padding 0.
    assert batch["token_ids"].tolist() == [[5, 14, 5, 18, 6, 1], [13, 18, 4, 4, 13, 1]]
    assert batch["response_mask"].int().tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1]]
    assert batch["attention_mask"].all()
    assert batch["token_ids"].dtype == torch.long
    assert batch["response_mask"].dtype == batch["attention_mask"].dtype == torch.bool


@pytest.mark.parametrize(
    "source",
    [
        {"rows": [{"prompt": "1", "completion": "2"}]},
        {
            "rows": [
                {"prompt": [{"role": "user", "content": "1"}], "completion": [{"role": "assistant", "content": "2"}]}
            ]
        },
        {
            "rows": [{"chat": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}],
            "messages_column": "chat",
        },
    ],
)
def test_every_form_of_a_conversation_gives_the_same_tokens(source: dict[str, Any], tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    (example,) = SFTSource(**source, system_prompt="3").tokenized(tokenizer)
    prompt, completion = prompt_and_completion(example)
    assert tokenizer.decode(prompt) == "(3)(1)>"
    assert tokenizer.decode(completion) == "2<eos>"  # the template's line break after the end is not learnt


def test_the_prompt_is_the_one_of_reinforcement_learning(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    rows = [{"prompt": "1+1", "completion": "2"}]
    sampled = PromptSource(rows=rows, system_prompt="3").load(tokenizer).batch(0, 1)
    (example,) = SFTSource(rows=rows, system_prompt="3").tokenized(tokenizer)
    assert prompt_and_completion(example)[0] == sampled.token_ids[0]
    plain = SFTSource(rows=rows, chat_template=False).tokenized(tokenizer)[0]
    assert tokenizer.decode(plain.token_ids) == "1+12<eos>"


def test_a_template_that_rewrites_the_prompt_is_rejected(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages | length }}{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(ValueError, match="row 0: .* renders the prompt differently"):
        SFTSource(rows=ROWS).tokenized(tokenizer)


def test_overlong_rows(tokenizer: Any) -> None:
    rows = [{"prompt": "1=", "completion": "23456"}, {"prompt": "1=", "completion": "2"}]  # 8 and 4 tokens
    assert len(SFTSource(rows=rows, max_tokens=8).tokenized(tokenizer)) == 2
    assert SFTSource(rows=rows, max_tokens=7).tokenized(tokenizer) == [Example([5, 18, 6, 1], [False] * 2 + [True] * 2)]
    cut = SFTSource(rows=rows, max_tokens=5, overlong="truncate").tokenized(tokenizer)
    assert [example.token_ids for example in cut] == [[5, 18, 6, 7, 8], [5, 18, 6, 1]]  # no end token
    with pytest.raises(ValueError, match="row 0: max_tokens=7: .* 8 tokens"):
        SFTSource(rows=rows, max_tokens=7, overlong="error").tokenized(tokenizer)
    with pytest.raises(ValueError, match="max_tokens=3: every example"):
        SFTSource(rows=rows, max_tokens=3).tokenized(tokenizer)


def firsts(loader: SFTLoader) -> list[list[int]]:
    return [batch["token_ids"][:, 0].tolist() for batch in loader]


def numbered(count: int) -> list[Example]:
    return [Example([i, 99], [False, True]) for i in range(count)]


def test_a_stream_is_rejected_by_name(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    with pytest.raises(ValueError, match="streaming=True"):
        SFTSource(path=str(tmp_path / "rows.jsonl"), streaming=True).tokenized(tokenizer)


def test_training_passes_are_shuffled_and_shared_by_ranks() -> None:
    ranks = [SFTLoader(numbered(9), 2, 0, seed=1, rank=rank, world_size=2) for rank in range(2)]
    assert [len(loader) for loader in ranks] == [2, 2]
    passes = [[[i for batch in firsts(loader) for i in batch] for loader in ranks] for _ in range(2)]
    for first, second in passes:
        assert len(set(first)) == len(set(second)) == 4
        assert not set(first) & set(second)
    assert passes[0] != passes[1]


def test_validation_has_every_row_once_and_equally_many_batches() -> None:
    ranks = [SFTLoader(numbered(5), 2, 0, train=False, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(2):
        assert firsts(ranks[0]) == [[0, 2], [4]]
        first, idle = list(ranks[1])
        assert first["token_ids"][:, 0].tolist() == [1, 3]
        assert not idle["response_mask"].any()  # rank 1 has no row left: it takes part, and learns nothing


def test_a_loader_resumes_within_a_pass_and_at_its_end() -> None:
    loader = SFTLoader(numbered(8), 2, 0, seed=1)
    first, second = firsts(loader), firsts(loader)
    for position in (1, 4):
        resumed = SFTLoader(numbered(8), 2, 0, seed=1)
        part = iter(resumed)
        for _ in range(position):
            next(part)
        state = resumed.state_dict()
        resumed = SFTLoader(numbered(8), 2, 0, seed=1)
        resumed.load_state_dict(state)
        assert firsts(resumed) == [*first, *second][position : position + 4]


def test_a_loader_resumes_at_the_same_example_on_other_ranks() -> None:
    loader = SFTLoader(numbered(16), 2, 0, seed=1)
    flat = [row for batch in firsts(loader) for row in batch]
    begun = SFTLoader(numbered(16), 2, 0, seed=1)
    part = iter(begun)
    for _ in range(4):
        next(part)
    resumed = SFTLoader(numbered(16), 2, 0, seed=1, rank=1, world_size=2)
    resumed.load_state_dict(begun.state_dict())
    assert firsts(resumed)[:2] == [flat[8:12][1::2], flat[12:16][1::2]]


def test_the_order_is_that_of_the_runs_seed_and_a_resumed_one_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def seed(number: int, **given: Any) -> int:
        monkeypatch.setenv("PL_GLOBAL_SEED", str(number))
        return SFTDataModule(SFTSource(rows=ROWS), **given).seed

    assert [seed(3), seed(4), seed(3, seed=7)] == [3, 4, 7]
    loader, other = SFTLoader(numbered(8), 2, 0, seed=1), SFTLoader(numbered(8), 2, 0, seed=2)
    other.load_state_dict(loader.state_dict())
    assert firsts(other) == firsts(loader)
