"""Tiny models with large random weights (differences show), a batch of groups with varied lengths, and random trees."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.toys import VOCAB


class Batch(NamedTuple):
    token_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    group_ids: Tensor

    def pick(self, rows: list[int]) -> Batch:
        return Batch(*(x[rows] for x in self))


def make_batch(groups: list[tuple[int, list[int]]], pad: int = 2, seed: int = 3) -> Batch:
    """(prompt length, completion lengths) per group; `pad` columns too many."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for group, (prompt, completions) in enumerate(groups):
        head = torch.randint(1, VOCAB, (prompt,), generator=generator).tolist()
        rows += [(group, head, torch.randint(1, VOCAB, (n,), generator=generator).tolist()) for n in completions]
    width = max(len(p) + len(c) for _, p, c in rows) + pad
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention, response = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for i, (_, p, c) in enumerate(rows):
        ids[i, : len(p) + len(c)] = torch.tensor(p + c)
        attention[i, : len(p) + len(c)] = True
        response[i, len(p) : len(p) + len(c)] = True
    return Batch(ids, attention, response, torch.tensor([group for group, _, _ in rows]))


def make_tree(seed: int) -> Batch:
    """Rows of random trees up to four deep, in random order: what a row is trained on is drawn for it alone."""
    draw = random.Random(seed)
    rows: list[list[int]] = []

    def grow(before: list[int], depth: int) -> None:
        row = before + [draw.randrange(1, VOCAB) for _ in range(draw.choice((1, 7, 33, 64, 70)))]
        if depth == 4 or draw.random() < 0.2:
            rows.extend([row] * draw.choice((1, 1, 2)))
            return
        if draw.random() < 0.2:  # a row that is the beginning of others
            rows.append(row)
        for _ in range(draw.choice((1, 2, 2, 3))):
            grow(row, depth + 1)

    while len(rows) < 6:
        grow([], 1)
    draw.shuffle(rows)
    rows = rows[:14]
    width = max(map(len, rows)) + 2
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    attention = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    coins = torch.tensor([[draw.random() < 0.5 for _ in range(0, width, 5)] for _ in rows])
    response = coins.repeat_interleave(5, 1)[:, :width] & attention
    response[:, 0] = False
    return Batch(ids, attention, response, torch.arange(len(rows)) % 3)


@pytest.fixture
def batch() -> Batch:
    """A group of four with an empty and a one-token response, a single row, a pair, and a prompt of one token."""
    return make_batch([(7, [5, 1, 9, 0]), (12, [4]), (3, [8, 2]), (1, [6, 6, 12])])


def plain_scores(lm: Any, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from transformers' own forward, each row alone."""
    logprobs, entropies = [], []
    for ids, attention, response in zip(*batch[:3], strict=True):
        logits = lm(input_ids=ids[attention][None]).logits[0, :-1] / temperature
        table = torch.log_softmax(logits.float(), -1)
        row, wide = torch.zeros(2, len(ids)).unbind()
        n = int(attention.sum())
        row = torch.cat([row[:1], table.gather(-1, ids[1:n, None]).squeeze(-1), row[n:]])
        wide = torch.cat([wide[:1], -(table.exp() * table).sum(-1), wide[n:]])
        logprobs.append(row * response)
        entropies.append(wide * response)
    return torch.stack(logprobs), torch.stack(entropies)
