"""Aggregations by hand, and the rule that a batch may be cut in any way."""

from __future__ import annotations

import pytest
import torch

from lightrl.objectives import Aggregation, ConstantLength, SequenceMean, SequenceSum, TokenMean

# lengths 3, 1 and 0; token losses 1 2 3 | 8 | none
LOSS = torch.tensor([[1.0, 2.0, 3.0], [8.0, 50.0, 50.0], [50.0, 50.0, 50.0]])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
ALL: list[Aggregation] = [TokenMean(), SequenceMean(), ConstantLength(4), SequenceSum()]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (TokenMean(), 14 / 4),
        (SequenceMean(), (2 + 8) / 2),  # the empty sequence is none
        (ConstantLength(4), (6 / 4 + 8 / 4) / 2),
        (SequenceSum(), (6 + 8) / 2),
    ],
)
def test_by_hand(aggregation: Aggregation, expected: float) -> None:
    weights = aggregation.weights(MASK)
    assert weights.dtype == torch.float32 and (weights[~MASK] == 0).all()
    assert ((weights * LOSS).sum() / aggregation.count(MASK)).item() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ALL, ids=lambda a: type(a).__name__)
def test_any_cut_gives_the_same_loss_and_gradient(aggregation: Aggregation) -> None:
    torch.manual_seed(0)
    mask = torch.rand(7, 9) > 0.3
    mask[2] = False
    count = aggregation.count(mask)

    def gradient(cuts: list[slice], width: int) -> torch.Tensor:
        theta = torch.full((7, width), 0.5, requires_grad=True)
        wide = torch.nn.functional.pad(mask, (0, width - 9))
        for rows in cuts:  # micro-batches add up their gradients
            ((aggregation.weights(wide[rows]) * theta[rows].square()).sum() / count).backward()
        assert theta.grad is not None
        return theta.grad[:, :9]

    whole = gradient([slice(0, 7)], 9)
    assert torch.allclose(gradient([slice(0, 1), slice(1, 5), slice(5, 7)], 9), whole)
    assert torch.allclose(gradient([slice(0, 7)], 14), whole), "padding columns"
    parts = sum(aggregation.count(mask[rows]) for rows in (slice(0, 3), slice(3, 7)))
    assert parts == count, "counts of ranks add up"
