"""Masked statistics against numbers worked by hand, and their independence of the cut of the batch."""

from __future__ import annotations

import pytest
import torch

from lightrl.ops.formulas import masked_moments, masked_sum, masked_whiten
from tests.toys import on_ranks

NAN, INF = float("nan"), float("inf")
X = torch.tensor([[1.0, NAN, 3.0], [4.0, INF, NAN]])
MASK = torch.tensor([[True, False, True], [True, False, False]])


def test_values_by_hand() -> None:
    # selected: 1, 3, 4. sum 8, mean 8/3, squares 25/9 + 1/9 + 16/9 = 42/9, unbiased variance 21/9
    assert masked_sum(X, MASK).item() == 8
    assert masked_sum(X, MASK, -1).tolist() == [4, 4]
    assert [x.item() for x in masked_moments(X, MASK)] == pytest.approx([3, 8 / 3, 21 / 9])


def test_whitening_by_hand() -> None:
    # std sqrt(21/9) = 1.527525; (1 - 8/3) / std = -1.091089, (3 - 8/3) / std = 0.218218, (4 - 8/3) / std = 0.872872
    out = masked_whiten(X, MASK)
    assert out[MASK].tolist() == pytest.approx([-1.091089, 0.218218, 0.872872], abs=1e-6)
    assert (out[~MASK] == 0).all()
    # eps 1: (1 - 8/3) / 2.527525
    assert masked_whiten(X, MASK, eps=1.0)[0, 0].item() == pytest.approx(-0.659407, abs=1e-6)


def test_nothing_or_one_value_selected() -> None:
    none = torch.zeros_like(MASK)
    assert [x.item() for x in masked_moments(X, none)] == [0, 0, 0]
    assert masked_sum(X, none, 0).tolist() == [0, 0, 0]
    assert (masked_whiten(X, none) == 0).all()
    one = none.clone()
    one[0, 0] = True
    assert masked_moments(X, one)[2].item() == 0 and masked_whiten(X, one)[0, 0].item() == 0


def test_variance_survives_a_large_mean() -> None:
    x = torch.tensor([[1e4 + 1, 1e4 + 2, 1e4 + 3]])  # E[x^2] - E[x]^2 in float32 would be off by more than 1
    assert masked_moments(x, torch.ones_like(x, dtype=torch.bool))[2].item() == pytest.approx(1.0)


def test_two_ranks_equal_the_whole_batch() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(6, 5) + 3, torch.rand(6, 5) > 0.4
    whole = masked_whiten(x, mask)
    parts = on_ranks(masked_whiten, (x[:4], mask[:4]), (x[4:], mask[4:]))
    assert torch.allclose(torch.cat(parts), whole, atol=1e-6)
    # a rank without any selected value takes part all the same
    empty = on_ranks(masked_moments, (x, mask), (x, torch.zeros_like(mask)))
    assert all(torch.allclose(torch.stack(m), torch.stack(masked_moments(x, mask))) for m in empty)
