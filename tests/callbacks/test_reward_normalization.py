"""Running moments of rewards, against numbers worked by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightrl.callbacks import RewardNormalization
from lightrl.records import Rollouts
from tests.callbacks.toys import make_rollouts
from tests.toys import on_ranks

NAN = float("nan")


class OneRank:
    def all_sum(self, tensor: Tensor) -> Tensor:
        return tensor


def rollouts(*rewards: float) -> Rollouts:
    return make_rollouts(["p"], [["x"] * len(rewards)], [list(rewards)])


def normalize(callback: RewardNormalization, *rewards: float, module: Any = None) -> Tensor:
    batch = rollouts(*rewards)
    callback.on_rollout_scored(None, module or OneRank(), batch)  # type: ignore[arg-type]
    return batch.rewards


def test_two_rollouts_by_hand() -> None:
    callback = RewardNormalization()
    # 1, 3: mean 2, variance ((-1)^2 + 1^2) / (2 - 1) = 2.
    torch.testing.assert_close(normalize(callback, 1.0, 3.0), torch.tensor([-1.0, 1.0]) / 2**0.5)
    # 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 3 = 20 / 3, used for the new rewards 5, 7.
    torch.testing.assert_close(normalize(callback, 5.0, 7.0), torch.tensor([1.0, 3.0]) / (20 / 3) ** 0.5)
    assert (callback.count, callback.mean, callback.sum_squares) == (4.0, 4.0, 20.0)


def test_without_centring_rewards_are_only_scaled() -> None:
    torch.testing.assert_close(
        normalize(RewardNormalization(center=False), 1.0, 3.0), torch.tensor([1.0, 3.0]) / 2**0.5
    )


def test_unscored_rows_stay_unscored_and_do_not_count() -> None:
    callback = RewardNormalization()
    got = normalize(callback, 1.0, NAN, 3.0)
    torch.testing.assert_close(got, torch.tensor([-1.0, NAN, 1.0]) / 2**0.5, equal_nan=True)
    assert callback.count == 2
    assert bool(normalize(callback, NAN, NAN).isnan().all())
    assert callback.count == 2


def test_equal_rewards_and_a_single_one_are_finite() -> None:
    callback = RewardNormalization(min_std=0.5)
    assert normalize(callback, 4.0).tolist() == [0.0] and callback.std == 1.0
    assert normalize(callback, 4.0, 4.0).tolist() == [0.0, 0.0] and callback.std == 0.5
    # 4, 4, 4, 4.2: mean 4.05, variance 0.03 / 3 = 0.01: below the floor, so (4.2 - 4.05) / 0.5.
    torch.testing.assert_close(normalize(callback, 4.2), torch.tensor([0.3]))


def test_two_ranks_have_the_moments_of_both() -> None:
    callbacks = [RewardNormalization(), RewardNormalization()]

    def rank(callback: RewardNormalization, rewards: list[float], all_sum: Any) -> Tensor:
        return normalize(callback, *rewards, module=SimpleNamespace(all_sum=all_sum))

    first, second = on_ranks(rank, (callbacks[0], [1.0, 3.0]), (callbacks[1], [5.0, 7.0, NAN]))  # not equally many
    for callback in callbacks:
        assert (callback.count, callback.mean, callback.sum_squares) == (4.0, 4.0, 20.0)
    torch.testing.assert_close(first, torch.tensor([-3.0, -1.0]) / (20 / 3) ** 0.5)
    torch.testing.assert_close(second, torch.tensor([1.0, 3.0, NAN]) / (20 / 3) ** 0.5, equal_nan=True)
