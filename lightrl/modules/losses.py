"""Policy losses: a loss per token from new and old log-probs and advantages.

Letters: B sequences, T tokens. Every loss returns (B, T) token losses, 0 off the mask and differentiable in
`logprobs`, and (B, T) metrics without gradient, which are averaged over the mask (names that end in `_max` by maximum).
The caller masks, weighs by the aggregation and sums. With `ratio = pi / pi_old`:

| class | loss of a token | ratio |
|---|---|---|
| `PPOClip` | `-min(ratio * A, clip(ratio) * A)` | token |
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightrl.ops.kl import MAX_LOG_RATIO
from lightrl.ops.losses import ClippedLoss, clipped_policy_loss

__all__ = ["PPOClip", "PolicyLoss"]

Metrics = dict[str, Tensor]


class PolicyLoss(ABC):
    """A loss per token."""

    @abstractmethod
    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        engine_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Computes token losses.

        Args:
            logprobs: (B, T) of the policy being trained, with graph.
            old_logprobs: (B, T) of the policy that starts the update, without graph.
            advantages: (B, T), without graph.
            mask: (B, T) bool, tokens that are trained.
            engine_logprobs: (B, T) that the engine sampled with; read by off-policy corrections only.

        Returns:
            (B, T) token losses, 0 off the mask, and metrics, name -> (B, T) without graph, among them `kl/old`
            (k3 estimate of KL(pi_old || pi) per token) and `policy/ratio_max`.
        """


class PPOClip(PolicyLoss):
    """PPO's clipped surrogate: `-min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A)`, ratio per token.

    Metrics `policy/clip_fraction_low` (A < 0, ratio below the lower bound), `policy/clip_fraction_high` (A > 0, ratio
    above the upper bound) and, with a cap, `policy/clip_fraction_dual` are the fractions of tokens without gradient.

    Args:
        eps_low: in [0, 1]. eps_high: at least 0. DAPO: 0.2 and 0.28.
        dual_clip: largest ratio that counts where A < 0, above 1; None is off. Usual: 3.
        delta: INTELLECT-2's name for the same cap, above 1 + eps_high; None is off. Give one of the two.

    Raises:
        ValueError: an argument is out of range, or both `dual_clip` and `delta` are given.

    Source: https://arxiv.org/abs/1707.06347 and those of `lightrl.ops.losses.clipped_policy_loss`.
    """

    def __init__(
        self,
        eps_low: float = 0.2,
        eps_high: float = 0.2,
        dual_clip: float | None = None,
        delta: float | None = None,
    ) -> None:
        self.eps_low, self.eps_high = _bounds("PPOClip", eps_low, eps_high)
        if dual_clip is not None and delta is not None:
            raise ValueError(f"PPOClip(dual_clip={dual_clip}, delta={delta}): both are the same cap; give one.")
        if dual_clip is not None and not dual_clip > 1:
            raise ValueError(f"PPOClip(dual_clip={dual_clip}): must be above 1.")
        if delta is not None and not delta > 1 + eps_high:
            raise ValueError(f"PPOClip(delta={delta}): must be above 1 + eps_high = {1 + eps_high:g}.")
        self.cap = delta if dual_clip is None else dual_clip

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        engine_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        log_ratio = _log_ratio(logprobs, old_logprobs, mask)
        ratio = log_ratio.exp()
        clipped = clipped_policy_loss(ratio, advantages, self.eps_low, self.eps_high, self.cap)
        metrics = _metrics(log_ratio, ratio, mask) | _clip_metrics(clipped, mask)
        if self.cap is not None:
            metrics["policy/clip_fraction_dual"] = (clipped.cap & mask).float()
        return _on(mask, clipped.loss), metrics


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi - log pi_old on the mask, 0 elsewhere; clamped, since an infinite ratio makes a clipped gradient NaN."""
    return _on(mask, logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _on(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, x, torch.zeros_like(x))


@torch.no_grad()
def _metrics(log_ratio: Tensor, ratio: Tensor, mask: Tensor) -> Metrics:
    """KL(pi_old || pi) by k3 from the token log-ratios, and the largest ratio of the kind the loss uses."""
    return {
        "kl/old": _on(mask, torch.expm1(log_ratio) - log_ratio),
        "policy/ratio_max": _on(mask, ratio.expand_as(mask)).detach(),
    }


@torch.no_grad()
def _clip_metrics(clipped: ClippedLoss, mask: Tensor) -> Metrics:
    return {
        "policy/clip_fraction_low": (clipped.low & mask).float(),
        "policy/clip_fraction_high": (clipped.high & mask).float(),
    }


def _bounds(owner: str, eps_low: float, eps_high: float) -> tuple[float, float]:
    if not 0 <= eps_low <= 1:
        raise ValueError(f"{owner}(eps_low={eps_low}): must be in [0, 1]; the lower bound of the ratio is 1 - eps_low.")
    if not eps_high >= 0:
        raise ValueError(f"{owner}(eps_high={eps_high}): must be 0 or more; the upper bound of the ratio is 1 + it.")
    return eps_low, eps_high
