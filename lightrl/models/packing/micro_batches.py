"""Cuts rows into micro-batches by tokens instead of by rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.models.spec import Layout

__all__ = ["micro_batches"]

PAIRS_PER_TOKEN = 6144  # query-key pairs that cost what one token's linear layers cost: 6 x hidden size, here 1024


@dataclass
class _Block:
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
    units: Tensor | None = None,
) -> list[Tensor]:
    """Row indices of micro-batches of at most `budget` tokens, balanced by cost.

    A group's prompt (the tokens before its first response token) is counted once, as the shared-prefix layout
    computes it. Cost is the number of tokens plus that of query-key pairs / 6144. Groups stay together unless they
    exceed the budget; the largest go first, each into the cheapest bin that has room (longest processing time first).
    In the packed layout, which shares no prompt, rows count in full and by themselves. In the padded one a micro-batch
    counts as its rectangle, rows x longest row, and takes rows of like length.

    Args:
        attention_mask: (B, T) bool. response_mask: (B, T) bool. group_ids: (B,) int64.
        budget: most tokens of a micro-batch, at least 1; a row (or unit) that is longer gets one of its own.
        num_bins: exactly so many micro-batches, some possibly empty; None takes as few as the budget allows.
        layout: in which the rows will be run.
        units: (B,) int64; rows of one unit, such as those of a trajectory, stay in one micro-batch, which exceeds the
            budget where a unit does. A unit lies within a group. None lets every row go by itself.

    Returns:
        int64 index tensors on the CPU, ascending within each; together every row once. The same for the same input.

    Raises:
        ValueError: budget is below 1, or `num_bins` micro-batches cannot hold the rows.
    """
    if budget < 1:
        raise ValueError(f"micro_batch_tokens={budget}: must be at least 1.")
    if layout == "padded":
        bins = _rectangles(attention_mask.sum(1).tolist(), _by_unit(range(len(group_ids)), units), budget, num_bins)
        return [torch.tensor(sorted(bin_), dtype=torch.long) for bin_ in bins]
    blocks = _blocks(attention_mask, response_mask, group_ids, budget, units, share=layout != "packed")
    fewest = _first_fit(blocks, budget)
    wanted = len(fewest) if num_bins is None else num_bins
    if wanted < len(fewest):
        raise ValueError(f"num_bins={num_bins}: these rows need {len(fewest)} micro-batches of {budget} tokens.")
    chosen = _balanced(blocks, budget, wanted)
    if chosen is None:  # balancing needs more room than first fit, which packs tighter
        chosen = fewest + [[] for _ in range(wanted - len(fewest))]
    return [torch.tensor(sorted(row for i in bin_ for row in blocks[i].rows), dtype=torch.long) for bin_ in chosen]


def _by_unit(rows: Iterable[int], units: Tensor | None) -> list[list[int]]:
    """The rows of each unit, in the order in which they first occur."""
    members: dict[int, list[int]] = {}
    names = None if units is None else units.tolist()
    for row in rows:
        members.setdefault(row if names is None else names[row], []).append(row)
    return list(members.values())


def _rectangles(lengths: list[int], units: list[list[int]], budget: int, num_bins: int | None) -> list[list[int]]:
    """Longest units first, as many into a bin as its longest row leaves room for; the fullest are halved for more."""
    longest = [max(lengths[row] for row in unit) for unit in units]
    bins: list[list[int]] = []  # of numbers of units
    for i in sorted(range(len(units)), key=lambda i: -longest[i]):
        rows = sum(len(units[j]) for j in bins[-1]) + len(units[i]) if bins else 0
        if bins and rows * longest[bins[-1][0]] <= budget:
            bins[-1].append(i)
        else:
            bins.append([i])
    if num_bins is not None and num_bins < len(bins):
        raise ValueError(f"num_bins={num_bins}: these rows need {len(bins)} micro-batches of {budget} tokens.")
    while num_bins is not None and len(bins) < num_bins:
        fullest = max(range(len(bins)), key=lambda i: len(bins[i]))
        half = len(bins[fullest]) // 2
        bins[fullest], rest = bins[fullest][half:], bins[fullest][:half]
        bins.append(rest)
    return [[row for i in bin_ for row in units[i]] for bin_ in bins]


def _blocks(
    attention_mask: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    budget: int,
    units: Tensor | None,
    *,
    share: bool,
) -> list[_Block]:
    """Groups, or parts of them that fit the budget; without shared prompts single units."""
    lengths = attention_mask.sum(1).tolist()
    has_response = response_mask.any(1)
    first = torch.where(has_response, response_mask.int().argmax(1), attention_mask.sum(1)).tolist()
    members: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids.tolist()):
        members.setdefault(group, []).append(row)
    count, blocks = (_tokens if share else _all_tokens), []
    for rows in members.values():
        # longest first, so that parts of a group that is cut are alike
        together = _by_unit(rows, units)
        together.sort(key=lambda unit: -count(unit, lengths, first))
        part: list[int] = []  # what still fits beside its prompt
        for unit in together:
            if part and (not share or count([*part, *unit], lengths, first) > budget):
                blocks.append(_block(part, lengths, first, share))
                part = []
            part += unit
        blocks.append(_block(part, lengths, first, share))
    return sorted(blocks, key=lambda block: (-block.cost, block.rows[0]))


def _tokens(rows: list[int], lengths: list[int], first: list[int]) -> int:
    """Tokens of some rows of one group; a prompt once, and prompts of unequal lengths are different ones."""
    return sum({first[row] for row in rows}) + sum(lengths[row] - first[row] for row in rows)


def _all_tokens(rows: list[int], lengths: list[int], first: list[int]) -> int:
    """Tokens of some rows, each with its prompt."""
    return sum(lengths[row] for row in rows)


def _block(rows: list[int], lengths: list[int], first: list[int], share: bool) -> _Block:
    if share:
        own = [(first[row], lengths[row] - first[row]) for row in rows]
        pairs = sum(prompt**2 / 2 for prompt in {p for p, _ in own}) + sum(n * (p + n / 2) for p, n in own)
        tokens = _tokens(rows, lengths, first)
    else:
        pairs = sum(lengths[row] ** 2 / 2 for row in rows)
        tokens = _all_tokens(rows, lengths, first)
    return _Block(rows, tokens, tokens + pairs / PAIRS_PER_TOKEN)


def _first_fit(blocks: list[_Block], budget: int) -> list[list[int]]:
    """First-fit decreasing: blocks into as few bins as it finds, by tokens."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(blocks)), key=lambda i: -blocks[i].tokens):
        tokens = blocks[i].tokens
        at = next((b for b, left in enumerate(room) if tokens <= left), None)
        if at is None:
            bins.append([])
            room.append(budget)
            at = len(bins) - 1
        bins[at].append(i)
        room[at] -= tokens
    return bins


def _balanced(blocks: list[_Block], budget: int, num_bins: int) -> list[list[int]] | None:
    """Most expensive first into the cheapest bin with room; None where one does not fit."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    cost, room = [0.0] * num_bins, [budget] * num_bins
    for i, block in enumerate(blocks):
        fits = [b for b in range(num_bins) if block.tokens <= room[b] or not bins[b]]
        if not fits:
            return None
        at = min(fits, key=lambda b: (cost[b], b))
        bins[at].append(i)
        cost[at] += block.cost
        room[at] -= block.tokens
    return bins
