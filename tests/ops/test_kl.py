"""KL estimators: values by hand, expectations and gradients over an enumerated distribution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightrl.ops.formulas import kl_estimate, ratio_corrected_kl

torch.manual_seed(0)
LOGITS, REF, OLD = torch.randn(3, 5, dtype=torch.float64).unbind()


def test_k3_is_accurate_near_zero() -> None:
    # d = 1e-4: k3 = d^2 / 2 - d^3 / 6 = 5e-9; exp(-d) - 1 + d in float32 would lose all digits
    assert kl_estimate(torch.tensor(1e-4), torch.tensor(0.0), "k3").item() == pytest.approx(5e-9, rel=0.1)


def expectation_gradient(weights: Tensor, token_values: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad((weights.detach() * token_values).sum(), logits, retain_graph=True)[0]


def kl_gradient(logits: Tensor, reverse: bool) -> Tensor:
    logp, ref = logits.log_softmax(0), REF.log_softmax(0)
    kl = (logp.exp() * (logp - ref)).sum() if reverse else (ref.exp() * (ref - logp)).sum()
    return torch.autograd.grad(kl, logits)[0]


def test_expectations_are_the_kl() -> None:
    logp, ref = LOGITS.log_softmax(0), REF.log_softmax(0)
    kl = (logp.exp() * (logp - ref)).sum()
    for name in ("k1", "k3"):
        assert torch.allclose((logp.exp() * kl_estimate(logp, ref, name)).sum(), kl)  # type: ignore[arg-type]


def test_gradients_on_policy() -> None:
    logits = LOGITS.clone().requires_grad_()
    logp, ref = logits.log_softmax(0), REF.log_softmax(0)
    pi = logp.exp()
    reverse, forward = kl_gradient(logits, True), kl_gradient(logits, False)
    assert (reverse - forward).norm() > 0.1
    assert expectation_gradient(pi, kl_estimate(logp, ref, "k1"), logits).abs().max() < 1e-12
    assert torch.allclose(expectation_gradient(pi, kl_estimate(logp, ref, "k2"), logits), reverse)
    assert torch.allclose(expectation_gradient(pi, kl_estimate(logp, ref, "k3"), logits), forward)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_ratio_corrected_gradient_is_the_reverse_kls_off_policy(name: str) -> None:
    logits = LOGITS.clone().requires_grad_()
    logp, ref, old = logits.log_softmax(0), REF.log_softmax(0), OLD.log_softmax(0)
    corrected = ratio_corrected_kl(logp, old, ref, name)  # type: ignore[arg-type]
    assert torch.allclose(expectation_gradient(old.exp(), corrected, logits), kl_gradient(logits, True))
    plain = kl_estimate(logp, ref, name)  # type: ignore[arg-type]
    assert not torch.allclose(expectation_gradient(old.exp(), plain, logits), kl_gradient(logits, True), atol=0.01)


def test_finite_differences_and_overflow() -> None:
    logp = LOGITS.log_softmax(0).requires_grad_()
    for name in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x, n=name: kl_estimate(x, REF.log_softmax(0), n), logp)
    assert torch.autograd.gradcheck(lambda x: ratio_corrected_kl(x, OLD.log_softmax(0), REF.log_softmax(0)), logp)
    zero = torch.tensor(0.0)
    assert torch.isfinite(ratio_corrected_kl(zero, zero - 1e4, zero))
