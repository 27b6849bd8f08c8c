"""Clipped losses against numbers worked by hand, and their gradients."""

from __future__ import annotations

import pytest
import torch

from lightrl.ops.baselines import clipped_value_loss, explained_variance


def test_value_loss_by_hand() -> None:
    # V_old 1, eps 0.2. V 1.5, R 2: plain 0.25, clipped (1.2 - 2)^2 = 0.64 -> 0.32, no gradient
    # V 1.5, R 1: plain 0.25, clipped 0.04 -> 0.125, gradient 0.5. V 1.1, R 2: inside, 0.81 -> 0.405, gradient -0.9
    values = torch.tensor([[1.5, 1.5, 1.1, 9.0]], requires_grad=True)
    old, returns = torch.ones(1, 4), torch.tensor([[2.0, 1.0, 2.0, float("nan")]])
    mask = torch.tensor([[True, True, True, False]])
    loss, clipped = clipped_value_loss(values, old, returns, mask, 0.2)
    loss.sum().backward()
    assert loss[0].tolist() == pytest.approx([0.32, 0.125, 0.405, 0.0], abs=1e-6)
    assert values.grad[0].tolist() == pytest.approx([0.0, 0.5, -0.9, 0.0], abs=1e-6)
    assert clipped[0].tolist() == [1, 0, 0, 0]
    assert clipped_value_loss(values, old, returns, mask, None)[0][0].tolist() == pytest.approx(
        [0.125, 0.125, 0.405, 0]
    )


def test_explained_variance_by_hand() -> None:
    # R 0, 2, 4: variance 4. V 0, 1, 4: R - V = 0, 1, 0 with variance 1/3. 1 - 1/12
    returns, values = torch.tensor([[0.0, 2.0, 4.0, 50.0]]), torch.tensor([[0.0, 1.0, 4.0, -50.0]])
    mask = torch.tensor([[True, True, True, False]])
    assert explained_variance(values, returns, mask).item() == pytest.approx(11 / 12)
    assert explained_variance(returns, returns, mask).item() == 1
    assert explained_variance(returns + 3, returns, mask).item() == pytest.approx(1), "a constant offset is no variance"
    assert explained_variance(values, torch.ones_like(returns), mask).item() == 0
