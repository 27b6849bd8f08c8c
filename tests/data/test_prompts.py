"""Prompts: their columns, their order, ranks, resume, mixing, length limits, streams."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightrl.data.prompts import PromptMixture, PromptSource
from lightrl.records import Prompts

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i % 2} for i in range(10)]


def texts(*batches: Prompts) -> list[str]:
    return [text for batch in batches for text in batch.texts]


def test_a_batch_has_tokens_texts_columns_and_row_numbers(tokenizer: Any) -> None:
    prompts = PromptSource(rows=ROWS).load(tokenizer, shuffle=False).batch(2, 2)
    # "0" has id 4, so "2+1=" is 6, then "+" 14, "1" 5, "=" 18.
    assert prompts.token_ids == [[6, 14, 5, 18], [7, 14, 5, 18]]
    assert prompts.texts == ["2+1=", "3+1="]
    assert prompts.columns == {"prompt": ["2+1=", "3+1="], "answer": ["3", "4"], "level": [0, 1]}
    assert prompts.indices == [2, 3]
    assert prompts.inputs == [{}, {}]


def test_each_pass_has_every_row_once_in_an_order_of_its_own(tokenizer: Any) -> None:
    prompts = PromptSource(rows=ROWS).load(tokenizer, seed=1)
    first, second = texts(prompts.batch(0, 10)), texts(prompts.batch(10, 10))
    assert sorted(first) == sorted(second) == [row["prompt"] for row in ROWS]
    assert first != second
    assert first != texts(PromptSource(rows=ROWS).load(tokenizer, seed=2).batch(0, 10))


def test_the_cursor_alone_resumes(tokenizer: Any) -> None:
    one = PromptSource(rows=ROWS).load(tokenizer, seed=5)
    whole = texts(*(one.batch(cursor, 4) for cursor in range(0, 24, 4)))
    resumed = PromptSource(rows=ROWS).load(tokenizer, seed=5)
    assert texts(*(resumed.batch(cursor, 4) for cursor in range(12, 24, 4))) == whole[12:]
    # Other batch sizes cut the same sequence.
    assert texts(resumed.batch(3, 6), resumed.batch(9, 15)) == whole[3:]


def test_ranks_share_a_batch_without_overlap(tokenizer: Any) -> None:
    prompts = PromptSource(rows=ROWS).load(tokenizer, seed=5)
    whole = texts(prompts.batch(6, 6))
    shares = [texts(prompts.batch(6, 6, rank=rank, world_size=3)) for rank in range(3)]
    assert [share[i] for i in range(2) for share in shares] == whole


def test_rows_are_in_the_order_of_the_data(tokenizer: Any) -> None:
    prompts = PromptSource(rows=ROWS).load(tokenizer, seed=5)
    assert len(prompts) == 10
    assert texts(prompts.rows([0, 3, 9])) == ["0+1=", "3+1=", "9+1="]
    assert texts(prompts.rows([])) == []


def test_conversations_and_system_prompt(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}{{ mark or '>' }}{% endif %}"
    )
    rows = [{"chat": [{"role": "user", "content": "1+1"}]}]
    source = PromptSource(rows=rows, prompt_column="chat", system_prompt="=", template_kwargs={"mark": "?"})
    prompts = source.load(tokenizer).batch(0, 1)
    assert prompts.texts == ["s:= u:1+1 ?"]
    assert tokenizer.decode(prompts.token_ids[0]) == ":= :1+1 ?"  # letters are not in this vocabulary
    assert prompts.columns["chat"] == [rows[0]["chat"]]
    plain = PromptSource(rows=[{"prompt": "1"}], chat_template=False).load(tokenizer)
    assert plain.batch(0, 1).texts == ["1"]


LONG = [{"prompt": "1" * n} for n in (2, 5, 3, 6, 1)]


def test_overlong_drop_leaves_rows_out_and_counts_them(tokenizer: Any) -> None:
    prompts = PromptSource(rows=LONG, max_prompt_tokens=3).load(tokenizer, shuffle=False)
    assert len(prompts) == 3
    assert prompts.counts == {"dropped": 2, "truncated": 0}
    assert prompts.max_prompt_tokens == 3
    drawn = prompts.batch(0, 4)
    assert [len(t) for t in drawn.token_ids] == [2, 3, 1, 2]
    assert drawn.indices == [0, 2, 4, 0]


def test_overlong_truncate_left_keeps_the_end(tokenizer: Any) -> None:
    rows = [{"prompt": "123456="}, {"prompt": "12="}]
    prompts = PromptSource(rows=rows, max_prompt_tokens=3, overlong="truncate_left").load(tokenizer, shuffle=False)
    assert prompts.batch(0, 2).texts == ["56=", "12="]
    assert prompts.batch(0, 2).token_ids[0] == [9, 10, 18]
    assert prompts.counts == {"dropped": 0, "truncated": 2}  # one row, drawn twice
    tokenizer.bos_token, tokenizer.chat_template = "+", "+{{ messages[0]['content'] }}"
    source = PromptSource(rows=rows, max_prompt_tokens=3, overlong="truncate_left", chat_template=True)
    kept = source.load(tokenizer, shuffle=False).batch(0, 2)
    assert [tokenizer.decode(ids) for ids in kept.token_ids] == ["+6=", "+2="]
    assert kept.texts == ["6=", "2="]  # the BOS is not text


def two_sources() -> list[PromptSource]:
    return [PromptSource(rows=[{"prompt": f"{i}+"} for i in range(3)]), PromptSource(rows=[{"prompt": "5-", "x": 1}])]


def test_a_mixture_keeps_the_proportions_exactly(tokenizer: Any) -> None:
    mixed = PromptMixture(two_sources(), weights=[3.0, 1.0]).load(tokenizer, seed=4)
    for block in range(2):
        counts = Counter(text[-1] for text in mixed.batch(1000 * block, 1000).texts)
        assert counts == {"+": 750, "-": 250}
    first = texts(mixed.batch(0, 1000))
    assert first != sorted(first)
    # Each source goes through its rows pass by pass: 750 draws of 3 rows are 250 of each.
    assert Counter(first) == {"0+": 250, "1+": 250, "2+": 250, "5-": 250}


def test_a_mixture_resumes_and_is_shared_by_ranks(tokenizer: Any) -> None:
    mixed = PromptMixture(two_sources(), weights=[3.0, 1.0]).load(tokenizer, seed=4)
    whole = texts(mixed.batch(0, 1200))
    again = PromptMixture(two_sources(), weights=[3.0, 1.0]).load(tokenizer, seed=4)
    assert texts(again.batch(990, 210)) == whole[990:]
    assert texts(again.batch(990, 210, rank=1, world_size=2)) == whole[991::2]


def test_a_mixture_has_the_columns_and_rows_of_all_sources(tokenizer: Any) -> None:
    mixed = PromptMixture(two_sources()).load(tokenizer)
    assert len(mixed) == 4
    rows = mixed.rows([2, 3])
    assert rows.columns == {"prompt": ["2+", "5-"], "x": [None, 1]}


@pytest.fixture()
def stream(tmp_path: Path) -> PromptSource:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return PromptSource(path=str(path), streaming=True)


def test_a_stream_goes_on_for_ever_and_resumes(stream: PromptSource, tokenizer: Any) -> None:
    prompts = stream.load(tokenizer, seed=1)
    first, second = texts(prompts.batch(0, 10)), texts(prompts.batch(10, 10))
    assert sorted(first) == sorted(second) == [row["prompt"] for row in ROWS]
    assert first != second
    assert texts(stream.load(tokenizer, seed=1).batch(13, 7)) == second[3:]
    assert texts(prompts.batch(4, 3)) == first[4:7]  # backwards: starts over
    assert texts(prompts.batch(4, 4, rank=1, world_size=2)) == first[5:8:2]


def test_a_stream_drops_long_rows_and_has_no_length(stream: PromptSource, tokenizer: Any) -> None:
    stream.max_prompt_tokens = 3
    with pytest.raises(ValueError, match="max_prompt_tokens=3: every example"):
        stream.load(tokenizer, shuffle=False).batch(0, 1)
    stream.max_prompt_tokens = 4
    prompts = stream.load(tokenizer, shuffle=False)
    assert texts(prompts.batch(8, 4)) == ["8+1=", "9+1=", "0+1=", "1+1="]
    with pytest.raises(ValueError, match="streaming=True: evaluation needs a length"):
        len(prompts)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0]])
def test_bad_weights_are_rejected(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"PromptMixture\.weights.*each of the 2 sources"):
        PromptMixture(two_sources(), weights=weights)
