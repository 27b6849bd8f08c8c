"""Control of the entropy bonus, against numbers worked by hand and in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import AdaptiveEntropy
from lightrl.records import SamplingParams
from tests.algorithms.toys import FirstSums, fit, grpo, weights
from tests.toys import SMALL, model_fixture, sgd

model_path = model_fixture(**SMALL)


class Module:
    entropy_coef = 0.5

    def set_entropy_coef(self, coef: float) -> None:
        self.entropy_coef = coef


def test_adaptive_entropy_by_hand() -> None:
    control, module, seen = AdaptiveEntropy(1.0, step=0.1, start=0.2, minimum=0.3, maximum=0.35), Module(), []
    control.on_train_start(None, module)  # type: ignore[arg-type]
    assert module.entropy_coef == 0.0
    for entropy in (0.9, 0.8, 1.0, 1.1, 0.5):
        control.on_policy_updated(None, module, {"policy/entropy": entropy})  # type: ignore[arg-type]
        seen.append((round(control.coef, 6), round(module.entropy_coef, 6)))
    # at or below the target: +0.1 up to 0.35, in use; above: -0.1 down to 0.3, not in use
    assert seen == [(0.3, 0.3), (0.35, 0.35), (0.35, 0.35), (0.3, 0.0), (0.35, 0.35)]
    again = AdaptiveEntropy(target=1.0)
    again.load_state_dict(control.state_dict())
    again.on_train_start(None, module)  # type: ignore[arg-type]
    assert module.entropy_coef == pytest.approx(0.35)


class ReturnsNothing(GRPOLightningModule):
    def training_step(self, rollouts: Any, batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(rollouts, batch_idx)


@pytest.mark.parametrize("own", [GRPOLightningModule, ReturnsNothing])
def test_adaptive_entropy_changes_the_training(own: Any, model_path: str) -> None:
    plain, steered = (own(model_path, optimizer=sgd, kl=None) for _ in range(2))
    fit(plain, rollouts=2)
    keep = fit(steered, rollouts=2, callbacks=[AdaptiveEntropy(target=10.0, step=0.5)])
    assert "policy/entropy_coef" not in keep.updated[0] and keep.updated[1]["policy/entropy_coef"] == 0.5
    assert not torch.equal(weights(plain), weights(steered))


def test_rows_without_advantage_are_run_where_the_entropy_is_read(model_path: str) -> None:
    """Without a reader they are left out, and `policy/entropy` is that of the others; with one it is that of all."""

    def metrics(reward: Any, *callbacks: Any) -> dict[str, float]:
        module = grpo(model_path)
        sampling = SamplingParams(max_new_tokens=6)
        return fit(module, rewards=[reward], callbacks=list(callbacks), sampling=sampling).metrics[0]

    every = metrics(lambda prompts, **_: [float(i % 2) for i in range(len(prompts))])
    some = metrics(FirstSums())
    exact = metrics(FirstSums(), AdaptiveEntropy(target=1e-6))
    flat = some["reward/zero_std_fraction"]
    assert 0 < flat < 1 and every["advantage/nonzero_fraction"] == 1
    # of FirstSums' 0, 1, 2, 3 all differ from their mean 1.5
    assert some["advantage/nonzero_fraction"] == exact["advantage/nonzero_fraction"] == pytest.approx(1 - flat)
    assert abs(some["policy/entropy"] - every["policy/entropy"]) > 1e-5
    assert exact["policy/entropy"] == pytest.approx(every["policy/entropy"], rel=1e-6)
