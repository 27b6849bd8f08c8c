"""Off-policy corrections: loss wrappers, and losses that include the correction.

The engine samples with other kernels and dtypes, and possibly older weights, so `engine_logprobs` differ from
`old_logprobs`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightrl.compat.arguments import one_of
from lightrl.objectives.loss_terms import (
    EngineUse,
    LossInput,
    Metrics,
    PolicyLoss,
    on_mask,
    ratio_metrics,
    sequence_mean,
)
from lightrl.ops.formulas import MAX_LOG_RATIO


class WeightedLoss(PolicyLoss):
    """Weights each token of another loss by how off-policy it is. Weight 0 excludes a token.

    Args:
        loss: Loss to weight.
    """

    def __init__(self, loss: PolicyLoss) -> None:
        self.loss = loss

    def __call__(self, given: LossInput) -> tuple[Tensor, Metrics]:
        declared = self.loss.engine_use is not None or self.engine_use != "ratio"
        # A loss that doesn't declare how it uses the engine's log-probs could apply their ratio a second time.
        try:
            loss, metrics = self.loss(given if declared else replace(given, engine_logprobs=None))
        except Exception as error:
            if declared:
                raise
            name = f"{type(self).__name__}(loss={type(self.loss).__name__})"
            raise ValueError(f"{name}: declare how the loss uses engine_logprobs (engine_use). {error!r}") from error
        weight, more = self.weights(replace(given, logprobs=given.logprobs.detach()))
        return torch.where(weight == 0, torch.zeros_like(loss), weight * loss), metrics | more

    @abstractmethod
    def weights(self, given: LossInput) -> tuple[Tensor, Metrics]:
        """Returns (B, T) or (B, 1) weights, and metrics, all without gradients.

        Raises a ValueError if it needs the engine's log-probs, and they are missing.
        """


def _as_wrapped(self: Any) -> bool:
    """Whether the wrapped loss is 0 without an advantage, which weights don't change."""
    zero: bool = self.loss.zero_advantage_is_zero_loss
    return zero


def _at_least_compared(self: Any) -> EngineUse | None:
    """Returns the wrapped loss's `engine_use`, or "compared" if that is "unused"."""
    use: EngineUse | None = self.loss.engine_use
    return "compared" if use == "unused" else use


def _engine(name: str, given: LossInput) -> Tensor:
    if given.engine_logprobs is None:
        raise ValueError(f"{name}: engine_logprobs=None: needs log-probs. Use an engine that reports them.")
    return given.engine_logprobs


class OffPolicyCorrection(WeightedLoss):
    """Weights token losses by the bounded importance ratio `w = pi_old / pi_engine`.

        level "token":     w_t = exp(old_t - engine_t)
        level "sequence":  w   = exp(sum_t (old_t - engine_t)), the same for all tokens of the sequence
        mode "truncate":   w clamped to [low, high]                       TIS
        mode "mask":       w if low <= w <= high, else 0                  MIS; token level: IcePop

    IcePop uses low 0.5 and high 5.

    Metrics: `off_policy/weight` (mean of the unbounded w), `off_policy/weight_max`, `off_policy/bounded_fraction`
    (fraction of tokens whose weight the bounds change), `off_policy/kl` (k3 estimate of KL(engine || old)).

    Args:
        loss: Loss to weight. Must not include this ratio already (`VESPO`, `RolloutRatio`, another correction).
        level: "token" (biased beyond one token, low variance) or "sequence" (unbiased, high variance).
        mode: "truncate" or "mask".
        high: Upper bound of the weight, at least 1.
        low: Lower bound of the weight, in [0, 1].

    Raises:
        ValueError: The loss includes this ratio already, or the engine's log-probs are missing.

    Source: TIS https://fengyao.notion.site/off-policy-rl; MIS https://richardli.xyz/rl-collapse; IcePop
        https://ringtech.notion.site/icepop. TRL's `vllm_importance_sampling_mode` has the same four combinations.
    """

    zero_advantage_is_zero_loss = property(_as_wrapped)
    engine_use = "ratio"

    def __init__(
        self,
        loss: PolicyLoss,
        level: Literal["token", "sequence"] = "token",
        mode: Literal["truncate", "mask"] = "truncate",
        high: float = 2.0,
        low: float = 0.0,
    ) -> None:
        if loss.engine_use == "ratio":
            raise ValueError(
                f"OffPolicyCorrection(loss={type(loss).__name__}): the loss already includes the ratio to the engine's "
                "policy. Remove the correction, or use a loss without that ratio."
            )
        super().__init__(loss)
        self.level = one_of("OffPolicyCorrection.level", level, "token", "sequence")
        self.mode = one_of("OffPolicyCorrection.mode", mode, "truncate", "mask")
        self.high = high
        self.low = low

    @property
    def needs_whole_trajectories(self) -> bool:
        """Whether the loss or the weights need whole trajectories."""
        return self.level == "sequence" or self.loss.needs_whole_trajectories

    @torch.no_grad()
    def weights(self, given: LossInput) -> tuple[Tensor, Metrics]:
        _, old_logprobs, _, mask = given.tokens
        token = on_mask(mask, old_logprobs - _engine("OffPolicyCorrection", given))
        log_weight = token.sum(-1, keepdim=True).expand_as(token) if self.level == "sequence" else token
        raw = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        outside = (raw < self.low) | (raw > self.high)
        bounded = raw.clamp(self.low, self.high) if self.mode == "truncate" else raw.masked_fill(outside, 0.0)
        return bounded, {
            **dict.fromkeys(("off_policy/weight", "off_policy/weight_max"), on_mask(mask, raw)),
            "off_policy/bounded_fraction": (outside & mask).float(),
            "off_policy/kl": torch.expm1(token) - token,
        }


class RolloutRatio(PolicyLoss):
    """Uses the engine's log-probs as the old ones, so that several updates per rollout need no extra forward pass.

        r_t = pi / pi_engine instead of pi / pi_old

    The wrapped loss then bounds a single ratio, which covers older weights, the engine's numerics, and updates on this
    rollout. A clipped loss leaves r unbounded if A < 0, so set `dual_clip` or `delta` of `PPOClip`. `kl/old` then
    measures the distance to the engine's policy, and `kl/engine` is not reported.

    Args:
        loss: Loss to compute with this ratio. Not `OffPolicyCorrection`, whose weights would all be 1.

    Raises:
        ValueError: The loss reads the engine's log-probs itself.

    Source: PPO's importance ratio to the policy that sampled; verl calls it bypass mode.
    """

    zero_advantage_is_zero_loss = property(_as_wrapped)
    replaces_old_logprobs = True
    engine_use = "ratio"

    def __init__(self, loss: PolicyLoss) -> None:
        if loss.engine_use in ("compared", "ratio"):
            raise ValueError(
                f"RolloutRatio(loss={type(loss).__name__}): the loss already reads the engine's log-probs. Remove one "
                "of the two."
            )
        self.loss = loss

    @property
    def needs_whole_trajectories(self) -> bool:
        """Whether the wrapped loss needs whole trajectories."""
        return self.loss.needs_whole_trajectories

    def __call__(self, given: LossInput) -> tuple[Tensor, Metrics]:
        return self.loss(replace(given, old_logprobs=_engine("RolloutRatio", given), engine_logprobs=None))


class OffPolicySequenceMask(WeightedLoss):
    """Excludes sequences with negative advantage that are far off-policy.

        m_t = 0 if A_t < 0 and mean_t (log pi_sampler - log pi) > threshold, else 1

    pi_sampler is the engine's policy if its log-probs are available, which covers both updates since the rollout and
    the engine's numerics. Otherwise it is pi_old. Metric: `off_policy/masked_fraction` of tokens.

    Args:
        loss: Loss to mask.
        threshold: Threshold in nats per token, above 0. TRL suggests 0.5; the paper doesn't specify a value.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556 eq. 8-9; TRL's `off_policy_mask_threshold`.
    """

    zero_advantage_is_zero_loss = property(_as_wrapped)
    engine_use = property(_at_least_compared)

    def __init__(self, loss: PolicyLoss, threshold: float = 0.5) -> None:
        super().__init__(loss)
        self.threshold = threshold

    @torch.no_grad()
    def weights(self, given: LossInput) -> tuple[Tensor, Metrics]:
        logprobs, old_logprobs, advantages, mask = given.tokens
        sampler = old_logprobs if given.engine_logprobs is None else given.engine_logprobs
        drift = sequence_mean(sampler - logprobs, mask)
        dropped = mask & (advantages < 0) & (drift > self.threshold)
        return (~dropped).float(), {"off_policy/masked_fraction": dropped.float()}


class GeometricRejection(WeightedLoss):
    """Excludes responses whose engine and trainer log-probs differ too much.

        m = 1 if low <= exp(mean_t (old_t - engine_t)) <= high, else 0, for all tokens of the response

    Unlike the product, the mean doesn't grow with the length. It only masks; to also weight tokens, wrap it in
    `OffPolicyCorrection`. Metric: `off_policy/geometric_masked_fraction` of tokens.

    Args:
        loss: Loss to mask.
        low: Lower bound of the geometric mean of token ratios, in (0, 1].
        high: Upper bound of the geometric mean, at least 1.

    Raises:
        ValueError: The engine's log-probs are missing.

    Source: https://richardli.xyz/rl-collapse; verl's `rollout_rs=seq_mean_k1` with its threshold "0.999_1.001".
    """

    zero_advantage_is_zero_loss = property(_as_wrapped)
    engine_use = property(_at_least_compared)

    def __init__(self, loss: PolicyLoss, low: float = 0.999, high: float = 1.001) -> None:
        super().__init__(loss)
        self.low = low
        self.high = high

    @torch.no_grad()
    def weights(self, given: LossInput) -> tuple[Tensor, Metrics]:
        mask = given.mask
        mean = sequence_mean(given.old_logprobs - _engine("GeometricRejection", given), mask).exp()
        dropped = mask & ((mean < self.low) | (mean > self.high))
        return (~dropped).float(), {"off_policy/geometric_masked_fraction": dropped.float()}


class VESPO(PolicyLoss):
    """Policy gradient weighted by a smooth function of the response's ratio, instead of a clip and a correction.

        L = -sg(phi(w)) * A * log pi,    w = pi / pi_sampler = exp(sum_t (log pi_t - log pi_sampler_t))
        phi(w) = w**k * exp(lam * (1 - w)),    (k, lam) by the sign of A

    phi(1) = 1, so the on-policy gradient equals REINFORCE's. phi is largest at w = k / lam and falls to 0 on both
    sides. pi_sampler is the engine's policy if its log-probs are available, else pi_old. Don't wrap this loss in
    `OffPolicyCorrection`. Metrics: `policy/ratio_max` is the maximum of w. Use it with `TokenMean` (TRL).

    Args:
        k_pos: Exponent for A >= 0, above 0.
        lam_pos: Decay for A >= 0, above 0.
        k_neg: Exponent for A < 0, above 0.
        lam_neg: Decay for A < 0, above 0.

    Source: https://arxiv.org/abs/2602.10693; defaults of TRL's `loss_type="vespo"`. TRL multiplies by its bounded
        pi_old / pi_engine; here, that ratio is part of w without a separate bound.
    """

    zero_advantage_is_zero_loss = True
    engine_use = "ratio"

    def __init__(self, k_pos: float = 2.0, lam_pos: float = 3.0, k_neg: float = 3.0, lam_neg: float = 2.0) -> None:
        self.k_pos = k_pos
        self.lam_pos = lam_pos
        self.k_neg = k_neg
        self.lam_neg = lam_neg

    def __call__(self, given: LossInput) -> tuple[Tensor, Metrics]:
        logprobs, old_logprobs, advantages, mask = given.tokens
        sampler = old_logprobs if given.engine_logprobs is None else given.engine_logprobs
        total = on_mask(mask, logprobs.detach() - sampler).sum(-1, keepdim=True)
        log_w = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expand_as(logprobs)
        k = torch.where(advantages < 0, self.k_neg, self.k_pos)
        lam = torch.where(advantages < 0, self.lam_neg, self.lam_pos)
        weight = (k * log_w + lam * (1 - log_w.exp())).exp().to(logprobs.dtype)
        return on_mask(mask, -weight * advantages * logprobs), ratio_metrics(given, log_w.exp())
