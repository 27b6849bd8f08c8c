"""KL placements: values by hand, what has a gradient, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from lightrl.objectives import KLInLoss, KLInReward

P, OLD, REF = (torch.tensor([[x]]).log() for x in (0.5, 0.4, 0.25))


def test_in_reward_by_hand() -> None:
    # d = log(0.5 / 0.25) = 0.693147, d^2 / 2 = 0.240227, 1/2 - 1 + d = 0.193147
    for name, value in {"k1": math.log(2), "k2": 0.240227, "k3": 0.193147}.items():
        out = KLInReward(name)(P.clone().requires_grad_(), REF)  # type: ignore[arg-type]
        assert out.item() == pytest.approx(value, abs=1e-6) and not out.requires_grad
    assert KLInReward().estimator == "k1"


def test_in_loss_by_hand() -> None:
    # ratio 0.5 / 0.4 = 1.25
    p = P.clone().requires_grad_()
    for estimator, ratio, value, gradient in [
        ("k3", False, 0.193147, 0.5),  # 1 - 1/2
        ("k2", False, 0.240227, 0.693147),  # d
        ("k3", True, 0.241434, 0.241434 + 0.625),  # 1.25 * (k3 + 1/2)
        ("k2", True, 0.300283, 0.866434),  # 1.25 * d, the ratio fixed
        ("k1", True, 0.866434, 0.866434 + 1.25),  # 1.25 * (d + 1)
    ]:
        out = KLInLoss(estimator, ratio_correction=ratio)(p, OLD, REF)  # type: ignore[arg-type]
        assert out.item() == pytest.approx(value, abs=1e-5)
        assert torch.autograd.grad(out.sum(), p)[0].item() == pytest.approx(gradient, abs=1e-5)


def test_k1_in_the_loss_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="KLInLoss"):
        KLInLoss("k1")
    with pytest.raises(ValueError, match="k4"):
        KLInReward("k4")(P, REF)  # type: ignore[arg-type]
