"""Losses per token or pair, not yet aggregated: KL estimates, clipped policy and value losses, preferences.

A loss is minimized; a term to maximize comes with a minus sign.

KL estimators, with `d = log pi(a) - log pi_ref(a)` and `a ~ pi`:

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

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrl.ops.masking import AllSum, identity, masked_moments

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


class ClippedLoss(NamedTuple):
    """A clipped loss and where its clips are active, that is, where they take the gradient away. All (B, T).

    Attributes:
        loss: float. low: bool, A < 0 and the ratio below `1 - eps_low`. high: bool, A > 0 and the ratio above
            `1 + eps_high`. cap: bool, A < 0 and the ratio above the dual clip.
    """

    loss: Tensor
    low: Tensor
    high: Tensor
    cap: Tensor


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> ClippedLoss:
    """PPO's pessimistic surrogate, with bounds of its own on either side and an optional cap for A < 0.

        L = max(-A * ratio, -A * clip(ratio, 1 - eps_low, 1 + eps_high))
        L = min(L, -A * dual_clip)     where A < 0 and dual_clip is given

    Args:
        ratio: (B, T) or any shape, pi / pi_old, differentiable.
        advantages: same shape, or one that broadcasts.
        eps_low: in [0, 1]; 1 - eps_low is the lower bound. eps_high: at least 0; 1 + eps_high is the upper bound.
        dual_clip: largest ratio that still counts for A < 0, above 1; None turns it off.

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


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """The critic's squared error, pessimistic over a trust region around the old values.

        L = 0.5 * max((V - R)**2, (clip(V, V_old - eps, V_old + eps) - R)**2)

    Args:
        values: (B, T), differentiable. old_values: (B, T), at the start of the update. returns: (B, T) targets.
        mask: (B, T) bool.
        clip_eps: eps, above 0, in units of the return; None leaves `0.5 * (V - R)**2`.

    Returns:
        (B, T) loss, 0 off the mask, and (B, T) float without graph, 1 where the clip takes the gradient away: V has
        left the region towards its target, so that the clipped error is the larger one.

    Source: https://github.com/openai/baselines `ppo2/model.py`; https://arxiv.org/abs/2005.12729 on what it does.
    """
    zero = torch.zeros_like(values)
    values, old_values, returns = (torch.where(mask, x, zero) for x in (values, old_values, returns))
    plain = (values - returns).square()
    if clip_eps is None:
        return 0.5 * plain, zero.detach()
    bounded = (old_values + (values - old_values).clamp(-clip_eps, clip_eps) - returns).square()
    return 0.5 * torch.maximum(plain, bounded), (bounded > plain).to(values.dtype).detach()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, all_sum: AllSum = identity) -> Tensor:
    """How much of the returns' variance the critic explains: `1 - Var[R - V] / Var[R]` over the mask.

    Args:
        values, returns: (B, T). mask: (B, T) bool. all_sum: sums over ranks.

    Returns:
        scalar of the values' dtype; 1 is perfect, 0 no better than a constant, negative is worse than a constant.
        0 where the returns do not vary.
    """
    residual = masked_moments(returns - values, mask, all_sum=all_sum)[2]
    total = masked_moments(returns, mask, all_sum=all_sum)[2]
    explained = 1 - residual / total.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(total > 0, explained, torch.zeros_like(explained)).to(values.dtype)


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, *, centering_coef: float = 0.0
) -> Tensor:
    """Negative log-likelihood of each preference, and a pull of the scores towards 0.

        loss = -log sigmoid(r_c - r_r - m) + c (r_c + r_r)^2

    Args:
        chosen: (P,) scores r_c of the preferred completions.
        rejected: (P,) scores r_r of the others.
        margin: (P,) m, how much better the preferred one is, in units of score; None is 0.
        centering_coef: c, at least 0. The likelihood knows differences only; this term settles the sum.

    Returns:
        (P,) losses, not averaged.

    Source: the likelihood is that of Ouyang et al. 2022, https://arxiv.org/abs/2203.02155 (eq. 1), the margin that of
    Llama 2, https://arxiv.org/abs/2307.09288 (eq. 2), the centering that of Eisenstein et al. 2023,
    https://arxiv.org/abs/2312.09244. Pairs are not averaged per prompt: each counts once, wherever it comes from.
    """
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    loss = -F.logsigmoid(difference)
    if centering_coef:
        loss = loss + centering_coef * (chosen + rejected) ** 2
    return loss
