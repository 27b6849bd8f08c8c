"""Schedules of the KL coefficient, against numbers worked by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.callbacks import AdaptiveKL
from lightrl.objectives import KLInLoss


class Module:
    """Owns a KL penalty, as the real one does."""

    def __init__(self, coef: float) -> None:
        self.kl = KLInLoss(coef=coef)

    def set_kl_coef(self, coef: float) -> None:
        self.kl.coef = coef


def batch(rows: int) -> Any:
    return SimpleNamespace(trajectory_ids=torch.arange(rows))


def roll(callback: AdaptiveKL, module: Any, metrics: dict[str, float], rows: Any, ranks: int = 1) -> None:
    trainer: Any = SimpleNamespace(world_size=ranks)
    callback.on_train_start(trainer, module)
    callback.on_rollout_scored(trainer, module, rows)
    callback.on_policy_updated(trainer, module, metrics)


def after(callback: AdaptiveKL, kl: float, rows: int = 100, ranks: int = 1) -> float:
    module = Module(0.1)
    roll(callback, module, {"kl/ref": kl}, batch(rows), ranks)
    return module.kl.coef


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.055, 0.1 * (1 + 0.1 * 0.1)),  # 10 % above the target, a tenth of the horizon
        (0.05, 0.1),
        (0.045, 0.1 * (1 - 0.1 * 0.1)),
        (5.0, 0.1 * (1 + 0.2 * 0.1)),  # clipped at 20 %
        (0.0, 0.1 * (1 - 0.2 * 0.1)),
        (-1.0, 0.1 * (1 - 0.2 * 0.1)),  # an estimate may be negative
    ],
)
def test_one_rollout(kl: float, expected: float) -> None:
    assert after(AdaptiveKL(target=0.05, horizon=1000), kl) == pytest.approx(expected)


def test_rows_of_all_ranks_count() -> None:
    four, one = AdaptiveKL(target=0.05, horizon=1000), AdaptiveKL(target=0.05, horizon=1000)
    assert after(four, 5.0, rows=25, ranks=4) == after(one, 5.0, rows=100)


def test_rows_of_a_trajectory_count_once() -> None:
    callback, module = AdaptiveKL(target=0.05, horizon=1000), Module(0.1)
    cut = SimpleNamespace(trajectory_ids=torch.arange(100).repeat_interleave(3))
    roll(callback, module, {"kl/ref": 5.0}, cut)
    assert module.kl.coef == pytest.approx(0.1 * (1 + 0.2 * 0.1))
