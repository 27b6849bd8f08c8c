"""Top-entropy tokens over the batch and over ranks."""

from __future__ import annotations

import torch

from lightrl.ops.advantages import kth_largest, top_entropy_mask


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
    """Each rank's counts are summed with the other's by replaying the calls in step."""
    torch.manual_seed(1)
    entropy, mask = torch.rand(8, 20), torch.rand(8, 20) > 0.2
    whole = top_entropy_mask(entropy, mask, 0.2)
    totals: list[torch.Tensor] = []

    def record(x: torch.Tensor) -> torch.Tensor:
        totals.append(x.clone())
        return x

    top_entropy_mask(entropy, mask, 0.2, all_sum=record)  # what the sum over both ranks is, call by call
    seen: list[torch.Tensor] = []

    def lookup(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        return totals[(len(seen) - 1) % 32]

    halves = [
        top_entropy_mask(e, m, 0.2, all_sum=lookup) for e, m in ((entropy[:3], mask[:3]), (entropy[3:], mask[3:]))
    ]
    assert torch.equal(torch.cat(halves), whole)
    assert len(seen) == 64
    for call in range(32):
        assert torch.equal(seen[call] + seen[call + 32], totals[call]), "the ranks' parts add up to the whole"
