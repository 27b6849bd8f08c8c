"""Preference pairs: tokens, shared beginnings, margins, conversations, order, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightrl.data.preferences import PreferenceLoader, PreferenceSource
from lightrl.data.prompts import PromptSource
from tests.data.test_sft import TEMPLATE

ROWS = [{"prompt": "1+1=", "chosen": "2", "rejected": "23"}, {"prompt": "9=", "chosen": "009", "rejected": "5"}]


def loader(pairs: Any, batch_size: int, **kwargs: Any) -> PreferenceLoader:
    return PreferenceLoader(pairs, batch_size, 0, **kwargs)


def test_a_batch_by_hand(tokenizer: Any) -> None:
    pairs = PreferenceSource(rows=ROWS).tokenized(tokenizer)
    batch = loader(pairs, 2, train=False).collate(pairs)
    # "0" is 4, "1" 5, "2" 6, "3" 7, "5" 9, "9" 13, "+" 14, "=" 18, end 1, padding 0.
    assert batch["token_ids"].tolist() == [
        [5, 14, 5, 18, 6, 1, 0],
        [5, 14, 5, 18, 6, 7, 1],
        [13, 18, 4, 4, 13, 1, 0],
        [13, 18, 9, 1, 0, 0, 0],
    ]
    assert batch["attention_mask"].sum(1).tolist() == [6, 7, 6, 4]
    # "1+1=2" begins both of the first pair, "9=" both of the second.
    assert batch["response_mask"].int().tolist() == [
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
        [0, 0, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 0, 0, 0],
    ]
    assert batch["group_ids"].tolist() == [0, 0, 1, 1]
    assert batch["margin"].tolist() == [0.0, 0.0] and batch["valid"].tolist() == [True, True]
    assert batch["response_mask"].dtype == batch["attention_mask"].dtype == torch.bool


def test_columns_may_have_other_names(tokenizer: Any) -> None:
    named = [{"question": row["prompt"], "better": row["chosen"], "worse": row["rejected"]} for row in ROWS]
    columns = {"prompt_column": "question", "chosen_column": "better", "rejected_column": "worse"}
    expected = PreferenceSource(rows=ROWS).tokenized(tokenizer)
    assert PreferenceSource(rows=named, **columns).tokenized(tokenizer) == expected
    swapped = {**columns, "chosen_column": "worse", "rejected_column": "better"}
    assert PreferenceSource(rows=named, **swapped).tokenized(tokenizer) != expected


def test_text_rendering_has_no_end(tokenizer: Any) -> None:
    pair = PreferenceSource(rows=ROWS, rendering="text").tokenized(tokenizer)[0]
    assert (pair.chosen, pair.rejected) == ([5, 14, 5, 18, 6], [5, 14, 5, 18, 6, 7])


def test_margins(tokenizer: Any) -> None:
    rows = [{**row, "better_by": i + 0.5} for i, row in enumerate(ROWS)]
    pairs = PreferenceSource(rows=rows, margin_column="better_by").tokenized(tokenizer)
    assert loader(pairs, 2).collate(pairs)["margin"].tolist() == [0.5, 1.5]
    for wrong in (-1, None):
        with pytest.raises(ValueError, match=f"row 0: better_by={wrong}:"):
            PreferenceSource(rows=[{**rows[0], "better_by": wrong}], margin_column="better_by").tokenized(tokenizer)


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    "source",
    [
        {"rows": [{"prompt": "1", "chosen": "2", "rejected": "3"}]},
        {
            "rows": [
                {"prompt": [say("user", "1")], "chosen": [say("assistant", "2")], "rejected": [say("assistant", "3")]}
            ]
        },
        {
            "rows": [
                {
                    "chosen": [say("user", "1"), say("assistant", "2")],
                    "rejected": [say("user", "1"), say("assistant", "3")],
                }
            ],
            "prompt_column": None,
        },
    ],
)
def test_every_form_of_a_conversation_gives_the_same_tokens(source: dict[str, Any], tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    (pair,) = PreferenceSource(**source, system_prompt="4").tokenized(tokenizer)
    assert tokenizer.decode(pair.chosen) == "(4)(1)>2<eos>"
    assert tokenizer.decode(pair.rejected) == "(4)(1)>3<eos>"
    sampled = PromptSource(rows=[{"prompt": "1"}], system_prompt="4").load(tokenizer).batch(0, 1)
    assert pair.chosen[: len(sampled.token_ids[0])] == sampled.token_ids[0]


def test_bad_rows_are_named(tokenizer: Any) -> None:
    for argument in ("prompt_column", "chosen_column", "rejected_column", "margin_column"):
        with pytest.raises(ValueError, match=rf"{argument}='x': .* no such column"):
            PreferenceSource(rows=ROWS, **{argument: "x"}).tokenized(tokenizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="row 0: rejected=None: "):
        PreferenceSource(rows=[{**ROWS[0], "rejected": None}]).tokenized(tokenizer)
    tokenizer.chat_template = TEMPLATE
    apart = {"chosen": [say("user", "1"), say("assistant", "2")], "rejected": [say("user", "2"), say("assistant", "2")]}
    with pytest.raises(ValueError, match="row 0: 'chosen' and 'rejected' have different prompts"):
        PreferenceSource(rows=[apart], prompt_column=None).tokenized(tokenizer)
    whole = {"prompt": "1", "chosen": apart["chosen"], "rejected": [say("user", "1"), say("assistant", "3")]}
    with pytest.raises(ValueError, match="row 0: 'chosen' starts with a user turn"):  # it would be twice in the prompt
        PreferenceSource(rows=[whole]).tokenized(tokenizer)
    assert len(PreferenceSource(rows=[whole], prompt_column=None).tokenized(tokenizer)) == 1


def test_long_pairs(tokenizer: Any) -> None:
    """The longer of the two counts: 7 and 6 tokens."""
    assert len(PreferenceSource(rows=ROWS, max_tokens=7).tokenized(tokenizer)) == 2
    (kept,) = PreferenceSource(rows=ROWS, max_tokens=6).tokenized(tokenizer)
    assert kept.chosen == [13, 18, 4, 4, 13, 1]
    with pytest.raises(ValueError, match="row 0: max_tokens=6: .* 7 tokens"):
        PreferenceSource(rows=ROWS, max_tokens=6, overlong="error").tokenized(tokenizer)
    with pytest.raises(ValueError, match="max_tokens=5: every example"):
        PreferenceSource(rows=ROWS, max_tokens=5).tokenized(tokenizer)
    with pytest.raises(ValueError, match="rejected_column='chosen': equal in every pair"):
        PreferenceSource(rows=ROWS, rejected_column="chosen").tokenized(tokenizer)


def test_ranks_share_the_pairs_and_an_idle_one_says_so(tokenizer: Any) -> None:
    rows = [{"prompt": str(i), "chosen": "1", "rejected": "2"} for i in range(5)]
    pairs = PreferenceSource(rows=rows).tokenized(tokenizer)
    ranks = [list(loader(pairs, 2, train=False, rank=rank, world_size=2)) for rank in range(2)]
    prompts = [[int(i) for b in rank for i in b["token_ids"][::2, 0][b["valid"]]] for rank in ranks]
    assert prompts == [[4, 6, 8], [5, 7]]  # "0" is 4
    assert ranks[1][1]["valid"].tolist() == [False] and ranks[1][1]["token_ids"].shape[0] == 2
