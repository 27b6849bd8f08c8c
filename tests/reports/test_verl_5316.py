"""https://github.com/verl-project/verl/issues/5316: wrong steps of a trajectory cannot be left out of the loss."""

from __future__ import annotations

from lightrl.data.sft import SFTSource
from tests.environments.families import FAMILIES, make_tokenizer


def test_a_wrong_step_is_context_and_not_trained() -> None:
    tokenizer = make_tokenizer(FAMILIES["llama3"])
    turns = [
        {"role": "user", "content": "1 and 2?"},
        {"role": "assistant", "content": "it is 4", "loss_mask": 0},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "it is 3", "loss_mask": 1},
        {"role": "user", "content": "and 4?"},
        {"role": "assistant", "content": "it is 7", "loss_mask": 1},
    ]
    ((prompt, completion, trained),) = SFTSource(rows=[{"m": turns}], messages_column="m", train_on="all").tokenized(
        tokenizer
    )
    assert "it is 4<|eot_id|>" in tokenizer.decode(prompt)
    learned = tokenizer.decode([token for token, is_trained in zip(completion, trained, strict=True) if is_trained])
    assert learned == "it is 3<|eot_id|>it is 7<|eot_id|>"
