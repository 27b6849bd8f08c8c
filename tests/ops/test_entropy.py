"""Top-entropy tokens over the batch and over ranks."""

from __future__ import annotations

from functools import partial

import torch

from lightrl.ops.baselines import kth_largest, top_entropy_mask
from tests.toys import on_ranks


def test_top_fraction_by_hand() -> None:
    # 5 real tokens, fraction 0.4: the top 2 are 0.9 and 0.7; 2.0 is masked
    entropy = torch.tensor([[0.1, 0.9, 2.0], [0.7, 0.0, 0.3]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert top_entropy_mask(entropy, mask, 0.4).tolist() == [[False, True, False], [True, False, False]]
    assert torch.equal(top_entropy_mask(entropy, mask, 1.0), mask)
    # 0.5 of 5 tokens rounds up to 3
    assert top_entropy_mask(entropy, mask, 0.5).sum().item() == 3


def test_ties_are_kept_and_an_empty_mask_is_fine() -> None:
    entropy, mask = torch.tensor([[0.5, 0.5, 0.5, 0.1]]), torch.ones(1, 4, dtype=torch.bool)
    assert top_entropy_mask(entropy, mask, 0.25).tolist() == [[True, True, True, False]]
    assert not top_entropy_mask(entropy, torch.zeros_like(mask), 0.25).any()


def test_kth_largest_is_exact() -> None:
    torch.manual_seed(0)
    x, mask = torch.rand(40, 30).square(), torch.rand(40, 30) > 0.3
    ordered = x[mask].sort(descending=True).values
    for k in (1, 2, 100, len(ordered)):
        assert kth_largest(x, mask, k) == ordered[k - 1]
    assert kth_largest(x, mask, len(ordered) + 5) == 0


def test_sum_over_ranks_gives_the_batch_threshold() -> None:
    torch.manual_seed(1)
    entropy, mask = torch.rand(8, 20), torch.rand(8, 20) > 0.2
    halves = on_ranks(partial(top_entropy_mask, fraction=0.2), (entropy[:3], mask[:3]), (entropy[3:], mask[3:]))
    assert torch.equal(torch.cat(halves), top_entropy_mask(entropy, mask, 0.2))
