"""Schedules of `kl_coef`, against numbers worked by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.callbacks import AdaptiveKL, LinearKL


def after(callback: AdaptiveKL, kl: float, coef: float = 0.1, rows: int = 100, ranks: int = 1) -> float:
    module: Any = SimpleNamespace(kl_coef=coef)
    trainer: Any = SimpleNamespace(world_size=ranks)
    callback.on_train_batch_end(trainer, module, {"kl/ref": kl}, [None] * rows, 0)
    return float(module.kl_coef)


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
    callback = AdaptiveKL(target=0.05, horizon=1000)
    assert after(callback, 5.0, rows=25, ranks=4) == after(callback, 5.0, rows=100)


def test_without_a_kl_term_it_is_refused() -> None:
    with pytest.raises(ValueError, match="AdaptiveKL needs a KL term"):
        AdaptiveKL().on_train_batch_end(SimpleNamespace(world_size=1), None, {}, [], 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [{"target": 0.0}, {"horizon": -1.0}])
def test_bad_arguments(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"AdaptiveKL.{next(iter(arguments))}="):
        AdaptiveKL(**arguments)


def test_linear_ramp() -> None:
    callback, module = LinearKL(start=0.2, end=0.0, num_rollouts=4), SimpleNamespace(kl_coef=9.0)
    seen = []
    for done in range(6):
        trainer = SimpleNamespace(fit_loop=SimpleNamespace(total_batch_idx=done))
        callback.on_train_batch_start(trainer, module, None, 0)  # type: ignore[arg-type]
        seen.append(module.kl_coef)
    assert seen == pytest.approx([0.2, 0.15, 0.1, 0.05, 0.0, 0.0])


@pytest.mark.parametrize(
    "arguments", [{"start": -0.1, "end": 0.0, "num_rollouts": 1}, {"start": 0.1, "end": 0.0, "num_rollouts": 0}]
)
def test_bad_ramps(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="LinearKL"):
        LinearKL(**arguments)
