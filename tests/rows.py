"""Rows as models take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightrl.records import Experience, RowBatch


def as_rows(token_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, **fields: Any) -> RowBatch:
    given = {name: value for name, value in fields.items() if value is not None}
    return RowBatch(token_ids=token_ids, attention_mask=attention_mask, response_mask=response_mask, **given)


def unshared(token_ids: Tensor, attention_mask: Tensor | None = None) -> RowBatch:
    """Rows without groups, all tokens real unless a mask says otherwise."""
    mask = torch.ones_like(token_ids, dtype=torch.bool) if attention_mask is None else attention_mask
    return as_rows(token_ids, mask, mask)


def as_experience(rows: Any, **fields: Any) -> Experience:
    """An experience of these rows: what is not given is 0, each row is a trajectory, and all are scored."""
    zero = torch.zeros(rows.token_ids.shape)
    made = {name: getattr(rows, name) for name in ("token_ids", "attention_mask", "response_mask", "group_ids")}
    made |= {"trajectory_ids": torch.arange(len(zero)), "valid": torch.ones(len(zero), dtype=torch.bool)}
    made |= {"engine_logprobs": zero, "advantages": zero, "rewards": zero[:, 0]}
    return Experience(**{**made, **fields})


def prompt_and_completion(example: Any) -> tuple[list[int], list[int]]:
    """Tokens of an SFT example before its first trained token, and from there on."""
    first = example.trained.index(True)
    return example.token_ids[:first], example.token_ids[first:]
