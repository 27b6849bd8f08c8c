"""Cuts rows into micro-batches by tokens instead of by rows.

Letters: B rows, T tokens of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.models.spec import Layout

__all__ = ["micro_batches"]

PAIRS_PER_TOKEN = 6144  # query-key pairs that cost what one token's linear layers cost: 6 x hidden size, here 1024


@dataclass
class _Unit:
    """Rows that stay together: a group, or as much of it as fits the budget. Its prompt is counted once."""

    rows: list[int]
    tokens: int
    cost: float


def micro_batches(
    attention_mask: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    budget: int,
    num_bins: int | None = None,
    layout: Layout = "auto",
) -> list[Tensor]:
    """Row indices of micro-batches of at most `budget` tokens, balanced by cost.

    A group's prompt (the tokens before its first response token) is counted once, as the shared-prefix layout
    computes it. Cost is the number of tokens plus that of query-key pairs / 6144. Groups stay together unless they
    exceed the budget; the largest go first, each into the cheapest bin that has room (longest processing time first).
    In the packed layout, which shares no prompt, rows count in full and by themselves. In the padded one a micro-batch
    counts as its rectangle, rows x longest row, and takes rows of like length.

    Args:
        attention_mask: (B, T) bool. response_mask: (B, T) bool. group_ids: (B,) int64.
        budget: most tokens of a micro-batch, at least 1; a single row that is longer gets one of its own.
        num_bins: exactly so many micro-batches, some possibly empty; None takes as few as the budget allows.
        layout: in which the rows will be run.

    Returns:
        int64 index tensors on the CPU, ascending within each; together every row once. The same for the same input.

    Raises:
        ValueError: budget is below 1, or `num_bins` micro-batches cannot hold the rows.
    """
    if budget < 1:
        raise ValueError(f"micro_batch_tokens={budget}: must be at least 1.")
    if layout == "padded":
        bins = _rectangles(attention_mask.sum(1).tolist(), budget, num_bins)
        return [torch.tensor(sorted(bin_), dtype=torch.long) for bin_ in bins]
    alone = torch.arange(len(group_ids))
    units = _units(attention_mask, response_mask, alone if layout == "packed" else group_ids, budget)
    fewest = _first_fit(units, budget)
    wanted = len(fewest) if num_bins is None else num_bins
    if wanted < len(fewest):
        raise ValueError(f"num_bins={num_bins}: these rows need {len(fewest)} micro-batches of {budget} tokens.")
    chosen = _balanced(units, budget, wanted)
    if chosen is None:  # balancing needs more room than first fit, which packs tighter
        chosen = fewest + [[] for _ in range(wanted - len(fewest))]
    return [torch.tensor(sorted(row for i in bin_ for row in units[i].rows), dtype=torch.long) for bin_ in chosen]


def _rectangles(lengths: list[int], budget: int, num_bins: int | None) -> list[list[int]]:
    """Longest rows first, as many into a bin as the longest of it leaves room for; the fullest are halved for more."""
    bins: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= budget:
            bins[-1].append(row)
        else:
            bins.append([row])
    if num_bins is not None and num_bins < len(bins):
        raise ValueError(f"num_bins={num_bins}: these rows need {len(bins)} micro-batches of {budget} tokens.")
    while num_bins is not None and len(bins) < num_bins:
        fullest = max(range(len(bins)), key=lambda i: len(bins[i]))
        half = len(bins[fullest]) // 2
        bins[fullest], rest = bins[fullest][half:], bins[fullest][:half]
        bins.append(rest)
    return bins


def _units(attention_mask: Tensor, response_mask: Tensor, group_ids: Tensor, budget: int) -> list[_Unit]:
    lengths = attention_mask.sum(1).tolist()
    has_response = response_mask.any(1)
    first = torch.where(has_response, response_mask.int().argmax(1), attention_mask.sum(1)).tolist()
    members: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids.tolist()):
        members.setdefault(group, []).append(row)
    units = []
    for rows in members.values():
        # rows that still fit beside their prompt; longest first, so that parts of a split group are alike
        rows = sorted(rows, key=lambda row: -lengths[row])
        part: list[int] = []
        for row in rows:
            if part and _tokens([*part, row], lengths, first) > budget:
                units.append(_unit(part, lengths, first))
                part = []
            part.append(row)
        units.append(_unit(part, lengths, first))
    return sorted(units, key=lambda unit: (-unit.cost, unit.rows[0]))


def _tokens(rows: list[int], lengths: list[int], first: list[int]) -> int:
    """Tokens of some rows of one group, their prompt once."""
    return max(first[row] for row in rows) + sum(lengths[row] - first[row] for row in rows)


def _unit(rows: list[int], lengths: list[int], first: list[int]) -> _Unit:
    prompt = max(first[row] for row in rows)
    own = [lengths[row] - first[row] for row in rows]
    pairs = prompt * prompt / 2 + sum(n * (prompt + n / 2) for n in own)
    tokens = _tokens(rows, lengths, first)
    return _Unit(rows, tokens, tokens + pairs / PAIRS_PER_TOKEN)


def _first_fit(units: list[_Unit], budget: int) -> list[list[int]]:
    """First-fit decreasing: units into as few bins as it finds, by tokens."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(units)), key=lambda i: -units[i].tokens):
        tokens = units[i].tokens
        at = next((b for b, left in enumerate(room) if tokens <= left), None)
        if at is None:
            bins.append([])
            room.append(budget)
            at = len(bins) - 1
        bins[at].append(i)
        room[at] -= tokens
    return bins


def _balanced(units: list[_Unit], budget: int, num_bins: int) -> list[list[int]] | None:
    """Most expensive first into the cheapest bin with room; None where one does not fit."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    cost, room = [0.0] * num_bins, [budget] * num_bins
    for i, unit in enumerate(units):
        fits = [b for b in range(num_bins) if unit.tokens <= room[b] or not bins[b]]
        if not fits:
            return None
        at = min(fits, key=lambda b: (cost[b], b))
        bins[at].append(i)
        cost[at] += unit.cost
        room[at] -= unit.tokens
    return bins
