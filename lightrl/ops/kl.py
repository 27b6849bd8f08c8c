"""Estimators of the KL divergence between the policy and its reference from sampled tokens.

With `d = log pi(a) - log pi_ref(a)` and `a ~ pi`:

    k1 = d                   unbiased, may be negative, high variance
    k2 = d**2 / 2            biased, gradient right on-policy
    k3 = exp(-d) - 1 + d     unbiased, never negative

As a *number* all three estimate `KL(pi || pi_ref)`. As a *loss*, with the gradient taken through `log pi` alone, they
differ (a ~ pi):

    grad k1:  E[grad log pi] = 0                      no gradient at all: only noise
    grad k2:  E[d * grad log pi]                      gradient of the reverse KL(pi || pi_ref)
    grad k3:  E[(1 - pi_ref / pi) * grad log pi]      gradient of the forward KL(pi_ref || pi)

Source: http://joschu.net/blog/kl-approx.html for the estimators; https://arxiv.org/abs/2506.09477 and
    https://arxiv.org/abs/2510.01555 for the gradients; https://arxiv.org/abs/2512.02556 (DeepSeek-V3.2) for the ratio.
How we differ: nothing is clamped (verl clamps d to +-20 and k3 to +-10, which also cuts the gradient).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`, since an infinite ratio turns a gradient of 0 into NaN."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """One token's estimate of `KL(pi || pi_ref)`.

    Args:
        logprobs: (B, T) of the policy, in nats.
        ref_logprobs: (B, T) of the reference.
        estimator: "k1", "k2" or "k3".

    Returns:
        (B, T), differentiable in `logprobs`.

    Raises:
        ValueError: unknown estimator.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"estimator={estimator!r}: must be 'k1', 'k2' or 'k3'.")


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """`pi(a) / pi_old(a)` per token, log-ratio clamped to +-20. (B, T), differentiable in `logprobs`."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ratio_corrected_kl(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k3"
) -> Tensor:
    """A loss per token whose gradient is that of the reverse KL, on-policy and off-policy, for a token's given prefix.

        k1, k3:  ratio * k          E_old[ratio * k] = E_pi[k] = KL(pi || ref), so the gradient is right as well
        k2:      stop(ratio) * k2   E_old[ratio * d * grad log pi]; the ratio's own gradient would add a wrong term

    Args:
        logprobs: (B, T) of the policy.
        old_logprobs: (B, T) of the policy that sampled the tokens.
        ref_logprobs: (B, T) of the reference.
        estimator: "k1", "k2" or "k3".

    Returns:
        (B, T), differentiable in `logprobs`.

    Source: https://arxiv.org/abs/2512.02556, section "Unbiased KL estimate" (k3); TRL's `use_bias_correction_kl`.
    """
    ratio = importance_ratio(logprobs, old_logprobs)
    if estimator == "k2":
        ratio = ratio.detach()
    return ratio * kl_estimate(logprobs, ref_logprobs, estimator)
