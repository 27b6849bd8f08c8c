"""Terms of the training loss: the policy loss with PPO's clip, the KL penalty, and the aggregation.

Every policy loss returns (B, T) token losses, 0 outside the mask and differentiable in `logprobs`, and (B, T) metrics
without gradient. Metrics are averaged over the mask; names ending in `_max` are reduced by maximum. The caller
aggregates. See `lightrl.objectives.policy_losses` for other losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightrl.ops.formulas import (
    MAX_LOG_RATIO,
    ClippedLoss,
    KLEstimator,
    clipped_policy_loss,
    kl_estimate,
    ratio_corrected_kl,
)

Metrics = dict[str, Tensor]

MAX_EXPONENT = 80.0
"""Maximum argument of `exp` in metrics; float32 overflows at 88."""


@dataclass(eq=False)
class LossInput:
    """Input of a policy loss: B trajectories of at most T tokens. All tensors are (B, T) float32 unless noted.

    Args:
        logprobs: Log-probs of the trained policy, with graph.
        old_logprobs: Log-probs of the policy that starts the updates, without graph.
        advantages: Advantages, without graph.
        mask: (B, T) bool, True on trained tokens.
        engine_logprobs: Log-probs that the engine reported when sampling. None if unknown.
        ref_logprobs: Log-probs of the reference. None without one.
        entropy: Entropy of the trained policy, with graph. None if not computed.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    engine_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`logprobs`, `old_logprobs`, `advantages`, and `mask`."""
        return self.logprobs, self.old_logprobs, self.advantages, self.mask


EngineUse = Literal["unused", "compared", "ratio"]


class PolicyLoss(ABC):
    """Base of policy losses, which compute one loss per token.

    The attributes declare properties that speed up training or that other parts rely on. Their defaults are safe for
    any loss. Subclasses don't inherit them: each class declares its own.

    Attributes:
        zero_advantage_is_zero_loss: Whether a trajectory whose advantages are all 0 has no gradient. It can then be
            skipped.
        needs_whole_trajectories: Whether it reads all tokens of a trajectory together. Its rows then stay in one
            micro-batch.
        replaces_old_logprobs: Whether it uses the engine's log-probs as the old ones, which are then not computed.
        engine_use: How it uses the engine's log-probs. "unused" doesn't read them. "compared" reads them, but the
            importance ratio to the engine's policy is not a factor of the loss. "ratio" includes that factor, so a
            correction would apply it twice. None is undeclared; a corrected loss then gets no engine log-probs.
    """

    PROMISES = ("zero_advantage_is_zero_loss", "needs_whole_trajectories", "replaces_old_logprobs", "engine_use")

    @property
    def zero_advantage_is_zero_loss(self) -> bool:
        return False

    @property
    def needs_whole_trajectories(self) -> bool:
        return True

    @property
    def replaces_old_logprobs(self) -> bool:
        return False

    @property
    def engine_use(self) -> EngineUse | None:
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Resets the attributes that a subclass doesn't declare."""
        super().__init_subclass__(**kwargs)
        for name in PolicyLoss.PROMISES:
            if name not in cls.__dict__:
                setattr(cls, name, PolicyLoss.__dict__[name])

    @abstractmethod
    def __call__(self, given: LossInput) -> tuple[Tensor, Metrics]:
        """Returns (B, T) token losses, 0 outside the mask, and metrics: (B, T) tensors by name, without graph.

        Metrics include `kl/old` (k3 estimate of KL(pi_old || pi) per token) and `policy/ratio_max`.
        """


class PPOClip(PolicyLoss):
    """PPO's clipped surrogate: `-min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A)` per token.

    Metrics: fractions of tokens without a gradient. `policy/clip_fraction_low` (A < 0, ratio below the lower bound),
    `policy/clip_fraction_high` (A > 0, ratio above the upper bound), and with a cap `policy/clip_fraction_dual`.

    Args:
        eps_low: Lower clip range, in [0, 1].
        eps_high: Upper clip range, at least 0. DAPO uses 0.2 and 0.28.
        dual_clip: Maximum ratio if A < 0, above 1 + eps_high, usually 3. INTELLECT-2 calls it delta. None disables it.

    Source: https://arxiv.org/abs/1707.06347 and the sources of `lightrl.ops.formulas.clipped_policy_loss`.
    """

    zero_advantage_is_zero_loss = True
    needs_whole_trajectories = False
    engine_use = "unused"

    def __init__(self, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None) -> None:
        self.eps_low = eps_low
        self.eps_high = eps_high
        self.dual_clip = dual_clip

    def __call__(self, given: LossInput) -> tuple[Tensor, Metrics]:
        logprobs, old_logprobs, advantages, mask = given.tokens
        log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
        ratio = log_ratio.exp()
        clipped = clipped_policy_loss(ratio, advantages, self.eps_low, self.eps_high, self.dual_clip)
        metrics = ratio_metrics(given, ratio) | clip_metrics(clipped, mask)
        if self.dual_clip is not None:
            metrics["policy/clip_fraction_dual"] = (clipped.cap & mask).float()
        return on_mask(mask, clipped.loss), metrics


def token_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Returns log pi - log pi_old on the mask, clamped: an infinite ratio would make a clipped gradient NaN."""
    return on_mask(mask, logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def on_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Returns `x` on the mask and 0 elsewhere."""
    return torch.where(mask, x, torch.zeros_like(x))


def sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the (B, 1) mean over the masked tokens of each sequence; ignores `x` outside the mask."""
    return on_mask(mask, x).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


@torch.no_grad()
def ratio_metrics(given: LossInput, ratio: Tensor) -> Metrics:
    """Computes KL(pi_old || pi) with k3 from token log-ratios, and the maximum of the ratio that the loss uses."""
    log_ratio = on_mask(given.mask, given.logprobs - given.old_logprobs)
    return {
        "kl/old": torch.expm1(log_ratio.clamp(max=MAX_EXPONENT)) - log_ratio,
        "policy/ratio_max": on_mask(given.mask, ratio.expand_as(given.mask)).detach(),
    }


@torch.no_grad()
def clip_metrics(clipped: ClippedLoss, mask: Tensor) -> Metrics:
    """Returns (B, T) indicators of tokens without a gradient: clipped below, above, and either."""
    return {
        "policy/clip_fraction_low": (clipped.low & mask).float(),
        "policy/clip_fraction_high": (clipped.high & mask).float(),
        "policy/clip_fraction_region": ((clipped.low | clipped.high) & mask).float(),
    }


class KLPenalty(ABC):
    """Base of KL penalties against the reference, in the reward or in the loss.

    The optimum of each penalty on a bandit that the policy can represent. beta is the coefficient, r the reward, and
    the advantage is `r - b`. Advantages divided by a std or by G / (G - 1) move the optimum of a KL penalty in the loss
    (docs/algorithms/kl.md).

    | penalty | gradient | optimum |
    |---|---|---|
    | `KLInReward("k1")` | reverse KL | `pi ~ pi_ref * exp(r / beta)` |
    | `KLInLoss("k2")` | reverse KL (on-policy) | the same |
    | `KLInLoss(any, ratio_correction=True)` | reverse KL (also off-policy) | the same |
    | `KLInLoss("k3")` | forward KL | `pi = beta * pi_ref / (lambda - r)` |
    | `KLInLoss("k1")` | 0 in expectation | rejected |
    | `KLInReward("k2" or "k3")` | `E[k * grad log pi]`, not of a KL | equal `r - beta * k` for every action |

    On sequences, the KL in the reward covers whole completions: the return of a token includes the KL of later tokens.
    In the loss, it is the sum of each token's KL given its prefix: the gradient ignores how a token changes later
    prefixes.

    Attributes:
        estimator: "k1", "k2", or "k3" (see `lightrl.ops.formulas`).
        coef: Weight of the penalty. Callbacks change it with the module's `set_kl_coef`.
    """

    estimator: KLEstimator
    coef: float

    def __init__(self, estimator: KLEstimator, coef: float) -> None:
        self.estimator = estimator
        self.coef = coef


class KLInReward(KLPenalty):
    """KL penalty in the reward: subtracts `coef * k(t)` from token t's reward. The score stays on the last token.

    Args:
        estimator: Estimator of the KL per token. "k1" has the policy gradient of the KL. "k2" and "k3" are never
            negative, but their policy gradient is not a KL's, since rewards are treated as constants.
        coef: Weight of the penalty, in reward per nat, at least 0.

    Source: https://arxiv.org/abs/1909.08593, section 2.
    """

    def __init__(self, estimator: KLEstimator = "k1", coef: float = 0.05) -> None:
        super().__init__(estimator, coef)

    def __call__(self, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Returns (B, T) KL estimates without gradients. The caller subtracts `coef` times them from the rewards.

        Both (B, T) log-probs are of the sampled tokens; the old ones of the policy that starts the update.
        """
        return kl_estimate(old_logprobs, ref_logprobs, self.estimator).detach()


class KLInLoss(KLPenalty):
    """KL penalty in the loss: adds `coef * k(t)` to each token's loss, differentiated through the policy.

    Args:
        estimator: Estimator of the KL per token. "k3" (GRPO) has the gradient of the forward KL, "k2" that of the
            reverse KL while on-policy. "k1" requires `ratio_correction`.
        coef: Weight of the penalty, at least 0. GRPO uses 0.04.
        ratio_correction: Weight the penalty by `pi / pi_old`, which yields the gradient of the reverse KL, even
            off-policy.

    Raises:
        ValueError: `estimator` is "k1" without `ratio_correction`.

    Source: k3: GRPO, https://arxiv.org/abs/2402.03300 eq. 4; ratio: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556
        (TRL: `use_bias_correction_kl`); the gradients: https://arxiv.org/abs/2506.09477.
    """

    def __init__(self, estimator: KLEstimator = "k3", coef: float = 0.04, *, ratio_correction: bool = False) -> None:
        super().__init__(estimator, coef)
        if estimator == "k1" and not ratio_correction:
            raise ValueError(
                "KLInLoss(estimator='k1'): its gradient has expectation 0, so it would only add noise. "
                "Use KLInReward('k1'), KLInLoss('k2'), or KLInLoss('k3', ratio_correction=True)."
            )
        self.ratio_correction = ratio_correction

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Returns (B, T) token penalties, differentiable in `logprobs`. The caller masks, aggregates, and weights them.

        All are (B, T). The old log-probs, of the policy that starts the update, are read only for the ratio.
        """
        if self.ratio_correction:
            return ratio_corrected_kl(logprobs, old_logprobs, ref_logprobs, self.estimator)
        return kl_estimate(logprobs, ref_logprobs, self.estimator)


class Aggregation(ABC):
    """Reduction of token losses to a scalar: `loss = sum(weights(mask) * token_loss) / count`.

    A row is a trajectory: the module joins trajectories of several rows first. `count` is summed over the whole
    optimizer step (all micro-batches, all ranks) before the first backward pass, so the gradient doesn't depend on how
    the batch is split.

    | class | sequence weight | length bias |
    |---|---|---|
    | `TokenMean` | its number of tokens | none per token; long responses weigh more |
    | `SequenceMean` | 1 | tokens of long responses weigh less |
    | `ConstantLength` | its number of tokens / length | none; scale doesn't depend on the batch |
    | `SequenceSum` | its number of tokens | none; scale grows with the mean length |
    """

    @abstractmethod
    def weights(self, mask: Tensor) -> Tensor:
        """Returns (B, T) float32 token weights, 0 outside the (B, T) bool `mask`. Rows must be independent."""

    @abstractmethod
    def count(self, mask: Tensor) -> Tensor:
        """Returns a float32 scalar. Must be additive: the count of a batch is the sum over its parts."""


class _PerSequence(Aggregation):
    def count(self, mask: Tensor) -> Tensor:
        return mask.any(-1).float().sum()


class TokenMean(Aggregation):
    """Mean over all tokens of the optimizer step: `sum_it L_it / sum_i len_i`.

    Source: DAPO, https://arxiv.org/abs/2503.14476 eq. 8. TRL's "dapo" divides by the generation batch's average instead
        of each step's own count, so steps with long responses are larger.
    """

    def weights(self, mask: Tensor) -> Tensor:
        return mask.float()

    def count(self, mask: Tensor) -> Tensor:
        return mask.float().sum()


class SequenceMean(_PerSequence):
    """Mean over sequences of token means: `1 / B * sum_i 1 / len_i * sum_t L_it`.

    B excludes sequences without masked tokens. Losses with one value per sequence (`GSPO`, `GMPO`, `RLOOSequence`)
    need it to match their papers.
    Source: GRPO, https://arxiv.org/abs/2402.03300 eq. 3.
    """

    def weights(self, mask: Tensor) -> Tensor:
        return mask.float() / mask.sum(-1, keepdim=True).clamp(min=1)


class ConstantLength(_PerSequence):
    """Token sum divided by a constant: `1 / B * sum_i 1 / length * sum_t L_it`.

    Args:
        length: Constant in tokens, above 0; usually `max_new_tokens`. Affects only the scale of the loss.

    Source: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2.
    """

    def __init__(self, length: float) -> None:
        self.length = length

    def weights(self, mask: Tensor) -> Tensor:
        return mask.float() / self.length


class SequenceSum(_PerSequence):
    """Mean over sequences of token sums: `1 / B * sum_i sum_t L_it`.

    The plain policy gradient over sequences. With `GSPO(2e-3, 2.5e-3)` it is LUSPO.
    Source: REINFORCE, https://doi.org/10.1007/BF00992696; LUSPO, https://arxiv.org/abs/2602.05261.
    """

    def weights(self, mask: Tensor) -> Tensor:
        return mask.float()
