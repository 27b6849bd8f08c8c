"""Unaggregated losses per token: KL estimates and the clipped policy loss.

All losses are minimized.

KL estimators, with `d = log pi(a) - log pi_ref(a)` and `a ~ pi`:

    k1 = d                   unbiased, may be negative, high variance
    k2 = d**2 / 2            biased, correct gradient on-policy
    k3 = exp(-d) - 1 + d     unbiased, never negative

As a *number*, all three estimate `KL(pi || pi_ref)`. As a *loss*, with the gradient only through `log pi`, they differ
(a ~ pi):

    grad k1:  E[grad log pi] = 0                      no gradient, only noise
    grad k2:  E[d * grad log pi]                      gradient of the reverse KL(pi || pi_ref)
    grad k3:  E[(1 - pi_ref / pi) * grad log pi]      gradient of the forward KL(pi_ref || pi)

Source: http://joschu.net/blog/kl-approx.html for the estimators; https://arxiv.org/abs/2506.09477 and
    https://arxiv.org/abs/2510.01555 for the gradients; https://arxiv.org/abs/2512.02556 (DeepSeek-V3.2) for the ratio.
Nothing is clamped here. verl clamps d to +-20 and k3 to +-10, which also cuts the gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Bound on log-ratios before `exp`, since an infinite ratio turns a gradient of 0 into NaN."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Estimates `KL(pi || pi_ref)` per token.

    Args:
        logprobs: (B, T) log-probs of the policy, in nats.
        ref_logprobs: (B, T) log-probs of the reference.
        estimator: "k1", "k2", or "k3".

    Returns:
        (B, T), differentiable in `logprobs`.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"estimator={estimator!r}: must be 'k1', 'k2', or 'k3'.")


def ratio_corrected_kl(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k3"
) -> Tensor:
    """Token loss with the gradient of the reverse KL given a token's prefix, both on-policy and off-policy.

        k1, k3:  ratio * k          E_old[ratio * k] = E_pi[k] = KL(pi || ref), so the gradient is also correct
        k2:      stop(ratio) * k2   E_old[ratio * d * grad log pi]; the ratio's gradient would add a wrong term

    Args:
        old_logprobs: (B, T) log-probs of the policy that sampled the tokens.
        logprobs, ref_logprobs, estimator: As in `kl_estimate`.

    Returns:
        (B, T), differentiable in `logprobs`.

    Source: https://arxiv.org/abs/2512.02556, section "Unbiased KL estimate" (k3); TRL's `use_bias_correction_kl`.
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if estimator == "k2":
        ratio = ratio.detach()
    return ratio * kl_estimate(logprobs, ref_logprobs, estimator)


class ClippedLoss(NamedTuple):
    """A clipped loss, and indicators of active clips, which remove the gradient. All (B, T).

    Attributes:
        loss: float loss.
        low: bool, A < 0 and the ratio below `1 - eps_low`.
        high: bool, A > 0 and the ratio above `1 + eps_high`.
        cap: bool, A < 0 and the ratio above the dual clip.
    """

    loss: Tensor
    low: Tensor
    high: Tensor
    cap: Tensor


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> ClippedLoss:
    """PPO's clipped surrogate with separate lower and upper bounds, and an optional cap for A < 0.

        L = max(-A * ratio, -A * clip(ratio, 1 - eps_low, 1 + eps_high))
        L = min(L, -A * dual_clip)     if A < 0 and dual_clip is set

    Args:
        ratio: pi / pi_old, (B, T) or any shape, differentiable.
        advantages: Advantages of the same shape, or one that broadcasts.
        eps_low: Lower clip range, in [0, 1]. The lower bound is 1 - eps_low.
        eps_high: Upper clip range, at least 0. The upper bound is 1 + eps_high.
        dual_clip: Maximum ratio for A < 0, above 1. None disables it.

    Returns:
        `ClippedLoss`.

    Source: PPO https://arxiv.org/abs/1707.06347 eq. 7; asymmetric bounds: DAPO https://arxiv.org/abs/2503.14476 eq. 10;
        dual clip https://arxiv.org/abs/1912.09729 eq. 5; INTELLECT-2's two-sided delta
        (https://arxiv.org/abs/2505.07291, section 3.4) is the same function for delta > 1 + eps_high.
    """
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    negative, positive = advantages < 0, advantages > 0
    cap = torch.zeros_like(negative & (ratio > 0))
    if dual_clip is not None:
        loss = torch.where(negative, torch.minimum(loss, -advantages * dual_clip), loss)
        cap = negative & (ratio > dual_clip)
    return ClippedLoss(loss, negative & (ratio < 1 - eps_low), positive & (ratio > 1 + eps_high), cap)
