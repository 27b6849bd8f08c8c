"""A trajectory counts once, of however many rows it is."""

from __future__ import annotations

import torch

from lightrl.algorithms.experience import TrajectoryLayout
from lightrl.objectives import (
    GSPO,
    LossInput,
    SequenceMean,
)

# trajectory 5: tokens 1 2 in its first row and 3 in its second; trajectory 2: token 4
IDS = torch.tensor([5, 5, 2])
MASK = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]]).bool()
X = torch.tensor([[9.0, 1, 2, 9], [9, 9, 9, 3], [9, 4, 9, 9]])


def test_rows_of_a_trajectory_are_laid_out_one_after_another() -> None:
    layout = TrajectoryLayout(IDS, MASK)
    assert layout.is_cut
    assert layout.join(X).tolist() == [[4, 0, 0], [1, 2, 3]]
    assert layout.mask.tolist() == [[True, False, False], [True, True, True]]
    assert layout.join(torch.tensor([7.0, 7, 8])).tolist() == [8, 7]


def test_splitting_undoes_joining() -> None:
    layout = TrajectoryLayout(IDS, MASK)
    assert torch.equal(layout.split(layout.join(X)), X * MASK)
    assert layout.split(torch.tensor([8.0, 7.0])).tolist() == [7, 7, 8]


def test_whole_trajectories_are_not_touched() -> None:
    layout = TrajectoryLayout(torch.arange(3), MASK)
    assert layout.join(X) is X and layout.split(X) is X and layout.mask is MASK


def test_a_trajectory_without_a_sampled_token_stays_a_row() -> None:
    layout = TrajectoryLayout(torch.tensor([0, 1, 1]), torch.tensor([[0, 0], [0, 1], [1, 0]]).bool())
    assert layout.mask.tolist() == [[False, False], [True, True]]


def test_loss_weights_are_those_of_the_trajectory() -> None:
    """Trajectory 5 has three tokens, 2 has one: 1 / 3 each, and 1; two trajectories, not three rows."""
    layout = TrajectoryLayout(IDS, MASK)
    weights = layout.split(SequenceMean().weights(layout.mask))
    third = 1 / 3
    torch.testing.assert_close(weights, torch.tensor([[0, third, third, 0], [0, 0, 0, third], [0, 1, 0, 0]]))
    assert SequenceMean().count(layout.mask) == 2


def test_the_ratio_of_a_trajectory_is_that_of_all_its_rows() -> None:
    """Log-ratios 0.1, 0.2, 0.6: mean 0.3, not 0.15 and 0.6."""
    layout = TrajectoryLayout(IDS, MASK)
    logprobs = torch.tensor([[0, 0.1, 0.2, 0], [0, 0, 0, 0.6], [0, 0, 0, 0]]) * MASK
    zero, ones = torch.zeros_like(logprobs), torch.ones_like(logprobs)
    loss, _ = GSPO(1.0, 9.0)(LossInput(layout.join(logprobs), layout.join(zero), layout.join(ones), layout.mask))
    expected = -torch.tensor(0.3).exp() * MASK
    expected[2, 1] = -1.0
    torch.testing.assert_close(layout.split(loss), expected)
