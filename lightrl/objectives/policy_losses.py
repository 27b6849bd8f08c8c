"""Policy losses per token, from new and old log-probs and advantages.

Formulas use the advantage A, the ratio `r = pi / pi_old`, and sg, which stops the gradient. Sequence losses assign the
value of a sequence to each of its tokens. `SequenceMean` turns them into the objectives of their papers.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from lightrl.objectives.loss_terms import (
    LossInput,
    Metrics,
    PolicyLoss,
    clip_metrics,
    on_mask,
    ratio_metrics,
    sequence_mean,
    token_log_ratio,
)
from lightrl.ops.formulas import MAX_LOG_RATIO, ClippedLoss, clipped_policy_loss


class SequenceClip(PolicyLoss):
    """PPO's clip on a sequence ratio defined by the subclass. Clip fractions count tokens of clipped sequences."""

    def __init__(self, eps_low: float, eps_high: float) -> None:
        self.eps_low, self.eps_high = eps_low, eps_high

    def __call__(self, given: LossInput) -> tuple[Tensor, Metrics]:
        logprobs, old_logprobs, advantages, mask = given.tokens
        log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
        ratio = self.sequence_log_ratio(log_ratio, mask).exp().expand_as(log_ratio)
        clipped = clipped_policy_loss(ratio, advantages, self.eps_low, self.eps_high)
        return on_mask(mask, clipped.loss), ratio_metrics(given, ratio) | clip_metrics(clipped, mask)

    @abstractmethod
    def sequence_log_ratio(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """Returns (B, 1) log-ratios of sequences from (B, T) token log-ratios, which are 0 outside the mask."""


class GSPO(SequenceClip):
    """PPO's clip on the length-normalized sequence ratio: `s = exp(1 / len * sum_t log r_t)`.

        L = -min(s * A, clip(s, 1 - eps_low, 1 + eps_high) * A)

    The ratio is close to 1, so the bounds are hundreds of times tighter than PPO's. Use it with `SequenceMean` (the
    paper), or with `SequenceSum` and bounds of 2e-3 and 2.5e-3 (LUSPO).

    Args:
        eps_low: Lower clip range, in [0, 1].
        eps_high: Upper clip range, at least 0.

    Source: https://arxiv.org/abs/2507.18071, eq. 5-7; bounds from section 5.1. If advantages differ within a sequence,
        their mean counts. TRL's default bounds are PPO's 0.2, which never clip.
    """

    zero_advantage_is_zero_loss = True
    engine_use = "unused"

    def __init__(self, eps_low: float = 3e-4, eps_high: float = 4e-4) -> None:
        super().__init__(eps_low, eps_high)

    def sequence_log_ratio(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return sequence_mean(log_ratio, mask)


class RLOOSequence(SequenceClip):
    """PPO's clip on the ratio of the whole response, treated as one action: `s = exp(sum_t log r_t)`.

        L = -min(s * A, clip(s, 1 - eps_low, 1 + eps_high) * A)

    Unbiased off-policy while unclipped, but the variance of the ratio grows with the length. Use it with `SequenceMean`
    to match TRL's RLOO loss. Clip fractions count the tokens of clipped sequences.

    Args:
        eps_low: Lower clip range, in [0, 1].
        eps_high: Upper clip range, at least 0.

    Source: https://arxiv.org/abs/2402.14740; TRL's `RLOOTrainer`.
    """

    zero_advantage_is_zero_loss = True
    engine_use = "unused"

    def __init__(self, eps_low: float = 0.2, eps_high: float = 0.2) -> None:
        super().__init__(eps_low, eps_high)

    def sequence_log_ratio(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return log_ratio.sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class GMPO(PolicyLoss):
    """Geometric mean of the sequence's token ratios, each clipped in log space on its pessimistic side.

        A > 0: c_t = min(log r_t, eps_high)        A < 0: c_t = max(log r_t, -eps_low)
        L = -A * exp(1 / len * sum_t c_t)

    Clip fractions count tokens with a clipped log-ratio. Use it with `SequenceMean` (the paper).

    Args:
        eps_low: Bound on -log r, above 0.
        eps_high: Bound on log r, above 0. The paper's range is (e^-0.4, e^0.4).

    Source: https://arxiv.org/abs/2507.20673, eq. 4 and algorithm 1.
    """

    zero_advantage_is_zero_loss = True
    engine_use = "unused"

    def __init__(self, eps_low: float = 0.4, eps_high: float = 0.4) -> None:
        self.eps_low = eps_low
        self.eps_high = eps_high

    def __call__(self, given: LossInput) -> tuple[Tensor, Metrics]:
        logprobs, old_logprobs, advantages, mask = given.tokens
        log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
        upper, lower = log_ratio.clamp(max=self.eps_high), log_ratio.clamp(min=-self.eps_low)
        bounded = torch.where(advantages > 0, upper, torch.where(advantages < 0, lower, log_ratio))
        ratio = sequence_mean(bounded, mask).exp().expand_as(log_ratio)
        low, high = log_ratio < -self.eps_low, log_ratio > self.eps_high
        clips = ClippedLoss(log_ratio, low & (advantages < 0), high & (advantages > 0), low)
        return on_mask(mask, -advantages * ratio), ratio_metrics(given, ratio) | clip_metrics(clips, mask)


class CISPO(PolicyLoss):
    """Policy gradient weighted by a bounded ratio, which keeps the gradient of every token.

        L = -sg(clip(r, ratio_min, ratio_max)) * A * log pi

    Clip fractions count tokens with a bounded weight, regardless of the sign of A. `ratio_min = ratio_max = 1` is plain
    REINFORCE. Use it with `TokenMean` (eq. 4 of the paper divides by the tokens of the group).

    Args:
        ratio_max: Maximum weight, at least 1 (1 + eps_high in the paper).
        ratio_min: Minimum weight, in [0, 1] (1 - eps_low; the paper doesn't specify it).

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585 eq. 4-5; `ratio_max` 5 from https://arxiv.org/abs/2510.13786.
        TRL treats `epsilon_high` as the bound itself, so its default bounds the weight at 0.2.
    """

    zero_advantage_is_zero_loss = True
    needs_whole_trajectories = False
    engine_use = "unused"

    def __init__(self, ratio_max: float = 5.0, ratio_min: float = 0.0) -> None:
        if not ratio_max >= 1:
            raise ValueError(
                f"CISPO.ratio_max={ratio_max!r}: bounds pi / pi_old, not its excess over 1. Set it to at least 1."
            )
        self.ratio_max = ratio_max
        self.ratio_min = ratio_min

    def __call__(self, given: LossInput) -> tuple[Tensor, Metrics]:
        logprobs, old_logprobs, advantages, mask = given.tokens
        log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
        ratio = log_ratio.detach().exp()
        loss = -ratio.clamp(self.ratio_min, self.ratio_max) * advantages * logprobs
        low, high = ratio < self.ratio_min, ratio > self.ratio_max
        return on_mask(mask, loss), ratio_metrics(given, ratio) | clip_metrics(ClippedLoss(loss, low, high, low), mask)


class SAPO(PolicyLoss):
    """Soft gate instead of a clip: the gradient weight falls smoothly as the ratio moves away from 1.

        L = -4 / tau * sigmoid(tau * (r - 1)) * A,    tau = tau_pos if A > 0, else tau_neg

    On-policy, the gradient equals PPO's. There are no clip fractions. Use it with `SequenceMean` (the paper).

    Args:
        tau_pos: Sharpness for A > 0, above 0.
        tau_neg: Sharpness for A <= 0, above 0. Larger values decay faster.

    Source: https://arxiv.org/abs/2511.20347, eq. 5-6.
    """

    zero_advantage_is_zero_loss = True
    needs_whole_trajectories = False
    engine_use = "unused"

    def __init__(self, tau_pos: float = 1.0, tau_neg: float = 1.05) -> None:
        self.tau_pos = tau_pos
        self.tau_neg = tau_neg

    def __call__(self, given: LossInput) -> tuple[Tensor, Metrics]:
        logprobs, old_logprobs, advantages, mask = given.tokens
        log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
        ratio = log_ratio.exp()
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg).to(ratio.dtype)
        loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
        return on_mask(mask, loss), ratio_metrics(given, ratio)


class CPG(PolicyLoss):
    """CPGD's clipped policy gradient: PPO's clip on the log-ratio, and a penalty on the drift from the old policy.

        L = -min(log r * A, clip(log r, log(1 - eps_low), log(1 + eps_high)) * A) + drift_coef * D
        grad D = clip(r - 1, max=drift_clip) * grad log pi        (k3 of KL(pi_old || pi), its ratio bounded)

    The gradient of a token is A times grad log pi without the ratio, which is exact for the first update on a rollout.
    The reported value of D is the k3 estimate.

    Args:
        eps_low: Lower clip range, in [0, 1).
        eps_high: Upper clip range, at least 0.
        drift_coef: Weight of the drift penalty, at least 0. 0 disables it. The drift is 0 in the first update of a
            rollout.
        drift_clip: Bound on r - 1 in the drift's gradient, above 0. The authors' code uses 2.

    Source: https://arxiv.org/abs/2505.12504, with `GroupRelative(scale="group")`. Eq. 2 divides by the tokens of the
        group; `SequenceMean` equals the authors' code at one sequence per micro-batch. LightRFT has the clip without
        the drift, and its CPGD advantages are all 0.
    """

    needs_whole_trajectories = False
    engine_use = "unused"

    def __init__(
        self, eps_low: float = 0.2, eps_high: float = 0.2, drift_coef: float = 0.0, drift_clip: float = 2.0
    ) -> None:
        self.eps_low, self.eps_high = eps_low, eps_high
        self.drift_coef = drift_coef
        self.drift_clip = drift_clip

    @property
    def zero_advantage_is_zero_loss(self) -> bool:
        """Whether the drift penalty is disabled."""
        return self.drift_coef == 0

    def __call__(self, given: LossInput) -> tuple[Tensor, Metrics]:
        logprobs, old_logprobs, advantages, mask = given.tokens
        log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
        lower, upper = math.log(1 - self.eps_low), math.log(1 + self.eps_high)
        loss = torch.maximum(-advantages * log_ratio, -advantages * log_ratio.clamp(lower, upper))
        clips = ClippedLoss(
            loss, (log_ratio < lower) & (advantages < 0), (log_ratio > upper) & (advantages > 0), advantages < 0
        )
        if self.drift_coef:
            loss = loss + self.drift_coef * self._drift(log_ratio)
        return on_mask(mask, loss), ratio_metrics(given, log_ratio.exp()) | clip_metrics(clips, mask)

    def _drift(self, log_ratio: Tensor) -> Tensor:
        fixed = log_ratio.detach()
        weight = torch.expm1(fixed).clamp(max=self.drift_clip)
        return torch.expm1(fixed) - fixed + weight * (log_ratio - fixed)  # k3's value, gradient with bounded ratio


class DPPO(PolicyLoss):
    """Divergence PPO with binary total variation: a trust region in probabilities instead of ratios.

        L = -m * sg(min(r, ratio_max)) * A * log pi + penalty_coef * (log r)**2
        m = 0 if A > 0 and pi - pi_old > delta_high, or A < 0 and pi_old - pi > delta_low, else 1

    For the sampled token, |pi - pi_old| is the total variation of the two-outcome distribution "this token or another".
    A ratio clip restricts rare tokens whose change barely affects the distribution, and lets likely tokens move far.
    This bound avoids both. Clip fractions count tokens with m = 0. The paper measures the distance from the policy that
    sampled: `RolloutRatio(DPPO())`.

    Args:
        delta_low: Maximum decrease of a token's probability if A < 0, in (0, 1].
        delta_high: Maximum increase of a token's probability if A > 0, in (0, 1].
        ratio_max: Maximum weight, at least 1.
        penalty_coef: Weight of the squared log-ratio, at least 0, including tokens with m = 0. 0 disables it.

    Source: https://arxiv.org/abs/2602.04879; verl's `dppo_tv` (ratio_max 20). prime-rl's default loss is
        `RolloutRatio(DPPO(penalty_coef=1e-3, ratio_max=inf))`; the penalty is Kimi K2.5's,
        https://arxiv.org/abs/2602.02276.
    """

    needs_whole_trajectories = False
    engine_use = "unused"

    def __init__(
        self, delta_low: float = 0.2, delta_high: float = 0.2, ratio_max: float = 20.0, penalty_coef: float = 0.0
    ) -> None:
        self.delta_low = delta_low
        self.delta_high = delta_high
        self.ratio_max = ratio_max
        self.penalty_coef = penalty_coef

    @property
    def zero_advantage_is_zero_loss(self) -> bool:
        """Whether the penalty is disabled."""
        return self.penalty_coef == 0

    def __call__(self, given: LossInput) -> tuple[Tensor, Metrics]:
        logprobs, old_logprobs, advantages, mask = given.tokens
        log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
        moved = on_mask(mask, logprobs.detach().exp() - old_logprobs.exp())
        low, high = (moved < -self.delta_low) & (advantages < 0), (moved > self.delta_high) & (advantages > 0)
        weight = log_ratio.detach().exp().clamp(max=self.ratio_max).masked_fill(low | high, 0.0)
        loss = -weight * advantages * logprobs
        if self.penalty_coef:
            loss = loss + self.penalty_coef * log_ratio.square()
        metrics = ratio_metrics(given, log_ratio.exp())
        return on_mask(mask, loss), metrics | clip_metrics(ClippedLoss(loss, low, high, low), mask)
