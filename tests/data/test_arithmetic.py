"""The quickstart's task and its model folder."""

from __future__ import annotations

from typing import Any

from lightrl.data.arithmetic import ArithmeticRows
from lightrl.data.prompts import PromptSource


def test_rows_are_right_sums_of_fixed_width() -> None:
    for row in ArithmeticRows(size=500)():
        a, b = row["prompt"].removesuffix("=").split("+")
        assert len(a) == len(b) == 2
        assert len(row["answer"]) == 3
        assert int(a) + int(b) == int(row["answer"])
        assert row["completion"] == row["answer"]


def test_training_and_evaluation_never_share_a_sum() -> None:
    train = ArithmeticRows(split="train", seed=3)()["prompt"]
    held_out = ArithmeticRows(split="eval", seed=3)()["prompt"]
    assert len(train) == 10_000 - 256
    assert len(held_out) == 256
    assert len({*train, *held_out}) == 10_000


def test_the_tokenizer_of_the_quickstart_gives_one_token_per_character(tokenizer: Any) -> None:
    prompts = PromptSource(rows=ArithmeticRows(size=3)).load(tokenizer).batch(0, 3)
    assert [len(ids) for ids in prompts.token_ids] == [6, 6, 6]
    assert prompts.columns["completion"] == prompts.columns["answer"]
    text = "12+34=046 -*/.,:;?!()<>\n#789"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(text)["input_ids"]) == len(text)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
