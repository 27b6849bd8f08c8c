"""GAE, returns and group statistics against numbers worked by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lightrl.ops.baselines import gae, leave_one_out, pass_at_k, returns_to_go
from lightrl.ops.formulas import group_centered, group_stats

# prompt, sampled, tool answer, sampled, sampled, padding
MASK = torch.tensor([[False, True, False, True, True, False]])
REWARDS = torch.tensor([[9.0, 0.5, 9.0, 0.0, 1.0, 9.0]])
VALUES = torch.tensor([[9.0, 0.2, 7.0, 0.4, 0.6, 9.0]])


def test_gae_by_hand_skips_the_interior_mask() -> None:
    # gamma 0.9, lam 0.8, gamma * lam 0.72
    # t=4: delta = 1 - 0.6 = 0.4                         A = 0.4                            R = 1.0
    # t=3: delta = 0 + 0.9 * 0.6 - 0.4 = 0.14            A = 0.14 + 0.72 * 0.4 = 0.428      R = 0.828
    # t=1: delta = 0.5 + 0.9 * 0.4 - 0.2 = 0.66          A = 0.66 + 0.72 * 0.428 = 0.96816  R = 1.16816
    advantages, returns = gae(REWARDS, VALUES, MASK, 0.9, 0.8)
    assert advantages[0].tolist() == pytest.approx([0, 0.96816, 0, 0.428, 0.4, 0], abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0, 1.16816, 0, 0.828, 1.0, 0], abs=1e-6)


def test_gae_equals_itself_without_the_masked_tokens() -> None:
    keep = MASK[0]
    short, _ = gae(REWARDS[:, keep], VALUES[:, keep], MASK[:, keep], 0.9, 0.8)
    assert torch.equal(short, gae(REWARDS, VALUES, MASK, 0.9, 0.8)[0][:, keep])


def test_gae_of_a_row_does_not_depend_on_the_other_rows() -> None:
    """Another row samples a token where this one has the tool's answer, and goes on where this one is padding."""
    other = torch.tensor([[False, True, True, True, True, True]])
    pair = [torch.cat([x, y]) for x, y in ((REWARDS, REWARDS + 1), (VALUES, VALUES - 1), (MASK, other))]
    both, returns = gae(pair[0], pair[1], pair[2], 0.9, 0.8)
    assert torch.equal(both[:1], gae(REWARDS, VALUES, MASK, 0.9, 0.8)[0])
    assert torch.equal(returns[1:], gae(REWARDS + 1, VALUES - 1, other, 0.9, 0.8)[1])


def test_gae_limits() -> None:
    # lam 1: return minus value. returns to go with gamma 0.9: 1, 0.9, 0.5 + 0.81 = 1.31
    advantages, returns = gae(REWARDS, VALUES, MASK, 0.9, 1.0)
    assert advantages[MASK].tolist() == pytest.approx([1.11, 0.5, 0.4], abs=1e-6)
    assert returns[MASK].tolist() == pytest.approx([1.31, 0.9, 1.0], abs=1e-6)
    assert returns_to_go(REWARDS, MASK, 0.9)[MASK].tolist() == pytest.approx([1.31, 0.9, 1.0], abs=1e-6)
    # lam 0: the one-step difference
    assert gae(REWARDS, VALUES, MASK, 0.9, 0.0)[0][MASK].tolist() == pytest.approx([0.66, 0.14, 0.4], abs=1e-6)


SCORES = torch.tensor([1.0, 5.0, 0.0, float("nan"), 2.0])
GROUPS = torch.tensor([7, 3, 7, 7, 7])
VALID = torch.tensor([True, True, True, False, True])


def test_group_statistics_by_hand() -> None:
    # group 7: 1, 0, 2 (the NaN row is not valid): mean 1, std sqrt((0 + 1 + 1) / 2) = 1; group 3: 5 alone
    stats = group_stats(SCORES, GROUPS, VALID)
    assert stats.size.tolist() == [3, 1, 3, 3, 3]
    assert stats.mean.tolist() == [1, 5, 1, 1, 1]
    assert stats.std.tolist() == [1, 0, 1, 1, 1]
    assert stats.varied.tolist() == [True, False, True, True, True]
    assert group_centered(SCORES, stats, VALID).tolist() == [0, 0, -1, 0, 1]
    # others of 1: (0 + 2) / 2 = 1; of 0: 1.5; of 2: 0.5; a group of one and an invalid row: 0
    assert leave_one_out(SCORES, GROUPS, VALID).tolist() == pytest.approx([0, 0, -1.5, 0, 1.5])


@pytest.mark.parametrize(
    ("scores", "varied"),
    [
        ([0.3, 0.1 + 0.2], False),
        ([1e6 * 0.3, 1e6 * 0.1 + 1e6 * 0.2], False),
        ([-0.3, -0.1 - 0.2], False),
        ([0.1 + 0.2 - 0.3, 0.0], False),
        ([0.7 + 0.1, 0.8, 0.8, 0.8], False),
        ([20_000.0, 20_000.112], True),
        ([1e-5, 1.1e-5], True),
        ([0.0, 1e-4], True),
        ([-1.0, 1.0], True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_not_spread(scores: list[float], varied: bool, dtype: torch.dtype) -> None:
    given, groups = torch.tensor(scores, dtype=dtype), torch.zeros(len(scores), dtype=torch.int64)
    valid = torch.ones(len(scores), dtype=torch.bool)
    stats = group_stats(given, groups, valid)
    assert stats.varied.tolist() == [varied] * len(scores)
    assert bool((group_centered(given, stats, valid) != 0).any()) == varied
    assert bool((leave_one_out(given, groups, valid) != 0).any()) == varied


@pytest.mark.parametrize(
    ("n", "wins", "k"), [(5, 2, 1), (5, 1, 3), (6, 2, 3), (6, 3, 4), (5, 5, 2), (5, 0, 2), (5, 1, 5)]
)
def test_pass_at_k_against_all_subsets(n: int, wins: int, k: int) -> None:
    """The closed form is the mean over all k-subsets with the row of the subset's normalised reward."""
    successes = torch.tensor([1.0] * wins + [0.0] * (n - wins))
    subsets = list(itertools.combinations(range(n), k))
    reward = [max(successes[i].item() for i in s) for s in subsets]
    mean = sum(reward) / len(reward)
    std = math.sqrt(sum((r - mean) ** 2 for r in reward) / len(reward))
    expected = [
        sum((r - mean) / std for r, s in zip(reward, subsets, strict=True) if i in s) / math.comb(n - 1, k - 1)
        if std > 0
        else 0.0
        for i in range(n)
    ]
    out = pass_at_k(successes, torch.zeros(n, dtype=torch.int64), torch.ones(n).bool(), k)
    assert out.tolist() == pytest.approx(expected, abs=1e-6)
