"""Micro-batches: complete, within the budget, balanced, groups kept together, deterministic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightrl.models.packing.micro_batches import micro_batches
from lightrl.models.packing.streams import GRID, make_stream
from tests.models.conftest import Batch, make_batch, make_tree


def cut(batch: Batch, budget: int, num_bins: int | None = None) -> list[Tensor]:
    return micro_batches(*batch[:3], budget, num_bins)


def tokens(batch: Batch, rows: Tensor) -> int:
    """Tokens with each group's prompt once, counted the slow way."""
    total = 0
    for group in batch.group_ids[rows].unique():
        own = rows[batch.group_ids[rows] == group]
        prompt = int((batch.attention_mask & ~batch.response_mask)[own[0]].sum())
        total += prompt + int(batch.response_mask[own].sum())
    return total


def test_every_row_once_within_the_budget() -> None:
    batch = make_batch([(10, [5, 6, 7, 8]), (20, [3, 3, 3, 3]), (5, [30, 1, 1, 1]), (8, [2, 2])])
    bins = cut(batch, 60)
    assert sorted(torch.cat(bins).tolist()) == list(range(14))
    assert all(tokens(batch, rows) <= 60 for rows in bins)
    # 36 + 32 + 38 + 12 tokens with prompts counted once: two bins of 60 cannot hold 36 + 32 + 38, three can
    assert len(bins) == 3


def test_groups_stay_together_when_they_fit() -> None:
    batch = make_batch([(10, [5, 5]), (10, [5, 5]), (10, [5, 5])])
    assert sorted(rows.tolist() for rows in cut(batch, 20)) == [[0, 1], [2, 3], [4, 5]]
    # prompts counted once, two groups of 20 fit into 40; counted per row they would be 30 each
    assert len(cut(batch, 40)) == 2


def test_a_large_group_is_split_and_a_long_row_is_alone() -> None:
    batch = make_batch([(10, [10, 10, 10, 10]), (100, [50])])
    bins = cut(batch, 30)
    assert sorted(rows.tolist() for rows in bins) == [[0, 1], [2, 3], [4]]


def test_cost_is_balanced_not_tokens() -> None:
    """One row of 8,000 tokens costs 8000 + 8000^2 / 2 / 6144 = 13,208; eighty of 100 cost 8,065."""
    batch = make_batch([(1, [7999])] + [(1, [99])] * 120, pad=0)
    batch.token_ids[:, 0] = torch.arange(121)  # prompts that differ, so that nothing is shared
    first, second = cut(batch, 20_000, num_bins=2)
    alone, others = (first, second) if 0 in first else (second, first)
    # 120 rows cost 12,098, so the long row stays alone although others hold 12,000 tokens against its 8,000
    assert len(alone) == 1 and len(others) == 120


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_what_a_layout_computes_counts(layout: str) -> None:
    """Without shared prompts every row counts in full; padded, all rows of a micro-batch count as its longest."""
    batch = make_batch([(10, [5, 6, 7, 8]), (20, [3, 3, 3, 3]), (5, [30, 1, 1, 1]), (8, [2, 2])])
    lengths = batch.attention_mask.sum(1)
    for budget in (1, 36, 60, 1000):
        bins = micro_batches(*batch[:3], budget, layout=layout)
        assert sorted(torch.cat(bins).tolist()) == list(range(14))
        for rows in bins:
            counted = len(rows) * lengths[rows].max() if layout == "padded" else lengths[rows].sum()
            assert len(rows) == 1 or int(counted) <= budget
        more = micro_batches(*batch[:3], budget, num_bins=len(bins) + 3, layout=layout)
        assert len(more) == len(bins) + 3 and sorted(torch.cat(more).tolist()) == list(range(14))
    assert len(micro_batches(*batch[:3], 1000, layout=layout)) == 1


@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
def test_rows_of_a_unit_stay_in_one_micro_batch(layout: str) -> None:
    """Eight rows of 20 tokens, trajectories 7 (rows 0, 5), 8 (1, 2, 3) and single rows: 40, 60 and 20 each in full."""
    batch = make_batch([(10, [10] * 8)], pad=0)
    units = torch.tensor([7, 8, 8, 8, 1, 7, 2, 3])
    bins = micro_batches(*batch[:3], 40, layout=layout, units=units)
    assert sorted(torch.cat(bins).tolist()) == list(range(8))
    holders = [{i for i, rows in enumerate(bins) if (units[rows] == unit).any()} for unit in units.unique()]
    assert all(len(found) == 1 for found in holders)
    # with the prompt once: 10 + 2 x 10, 10 + 3 x 10 and 10 + 3 x 10 tokens; else 40, 60 (alone) and 20 + 20, 20
    assert sorted(map(len, bins)) == ([2, 3, 3] if layout == "shared_prefix" else [1, 2, 2, 3])
    alone = micro_batches(*batch[:3], 1, layout=layout, units=units)
    assert sorted(rows.tolist() for rows in alone) == [[0, 5], [1, 2, 3], [4], [6], [7]]
    exactly = micro_batches(*batch[:3], 1000, num_bins=7, layout=layout, units=units)
    assert sum(len(rows) > 0 for rows in exactly) <= 5
    assert sorted(torch.cat(exactly).tolist()) == list(range(8))


def computed(batch: Batch, rows: Tensor) -> int:
    """Tokens of a micro-batch in the tree layout, its last ones included."""
    ids, attention, response = (torch.nn.functional.pad(x[rows], (0, 1)) for x in batch[:3])
    after = attention.roll(1, 1) & ~attention  # asks for a token after the last one
    return make_stream(ids, attention | after, response | after).num_tokens


@pytest.mark.parametrize("seed", range(6))
def test_a_forest_is_cut_by_what_its_micro_batches_compute(seed: int) -> None:
    """Nodes are repeated where the budget demands it, and only there."""
    batch = make_tree(seed)
    lengths = batch.attention_mask.sum(1)
    whole = computed(batch, torch.arange(len(lengths)))
    counts = []
    for budget in (1, int(lengths.max()), whole // 2, whole, 10_000):
        bins = micro_batches(*batch[:3], budget)
        assert sorted(torch.cat(bins).tolist()) == list(range(len(lengths)))
        assert all(len(rows) == 1 or computed(batch, rows) <= budget for rows in bins)
        counts.append(sum(computed(batch, rows) for rows in bins))
    assert len(bins) == 1 and counts[-1] == whole
    assert counts[0] >= max(counts[1:])
    assert min(counts) > whole - GRID * len(lengths)  # a part of a tree may share a few tokens more


def test_a_node_is_repeated_in_each_micro_batch_that_needs_it() -> None:
    """64 tokens, two branches of 32 after them, and two leaves of 10 after each: 64 + 2 x 32 + 4 x 10 = 168."""
    draw = torch.Generator().manual_seed(0)
    root, *rest = (torch.randint(1, 97, (n,), generator=draw) for n in (64, 32, 32, 10, 10, 10, 10))
    for i, part in enumerate(rest):
        part[0] = i
    ids = torch.stack([torch.cat([root, rest[i // 2], rest[2 + i]]) for i in (0, 2, 1, 3)])
    mask = torch.ones_like(ids, dtype=torch.bool)
    response = mask & (torch.arange(106) >= 96)

    def cut(budget: int) -> list[list[int]]:
        return sorted(rows.tolist() for rows in micro_batches(ids, mask, response, budget))

    assert cut(168) == [[0, 1, 2, 3]]
    assert cut(167) == [[0, 2], [1, 3]]  # each 64 + 32 + 2 x 10 = 116: the root twice
    assert cut(116) == [[0, 2], [1, 3]]
    assert cut(115) == [[0], [1], [2], [3]]
