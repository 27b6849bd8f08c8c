"""Where the KL to the reference enters, and how strongly: in the reward, or in the loss.

What each leads to on a bandit that the policy can represent (beta the coefficient, r the reward, an advantage that is
`r - b`; one divided by a std or by G / (G - 1) moves the optimum where the KL is in the loss: docs/algorithms.md):

| penalty | gradient | optimum |
|---|---|---|
| `KLInReward("k1")` | reverse KL | `pi ~ pi_ref * exp(r / beta)` |
| `KLInLoss("k2")` | reverse KL (on-policy) | the same |
| `KLInLoss(any, ratio_correction=True)` | reverse KL (off-policy too) | the same |
| `KLInLoss("k3")` | forward KL | `pi = beta * pi_ref / (lambda - r)` |
| `KLInLoss("k1")` | 0 in expectation | refused |
| `KLInReward("k2" or "k3")` | `E[k * grad log pi]`, of no KL | where `r - beta * k` is the same for every action |

In a sequence, the KL in the reward is that of whole responses: a token answers for the KL of those after it. In the
loss it is the sum of each token's KL given its prefix: the gradient does not see that a token changes which prefixes
come."""

from __future__ import annotations

from abc import ABC

from torch import Tensor

from lightrl.compat.arguments import at_least, one_of
from lightrl.ops.losses import KLEstimator, kl_estimate, ratio_corrected_kl


class KLPenalty(ABC):
    """Base of the placements.

    Attributes:
        estimator: "k1", "k2" or "k3" (see `lightrl.ops.losses`).
        coef: weight of the penalty; callbacks move it through the module's `set_kl_coef`.
    """

    estimator: KLEstimator
    coef: float

    def __init__(self, estimator: KLEstimator, coef: float) -> None:
        self.estimator = one_of(f"{type(self).__name__}.estimator", estimator, "k1", "k2", "k3")
        if isinstance(coef, bool):
            raise ValueError(f"{type(self).__name__}.coef={coef}: a number is needed. Pass flags by name.")
        self.coef = at_least(f"{type(self).__name__}.coef", coef, 0)


class KLInReward(KLPenalty):
    """KL as part of the reward: token t's reward is lowered by `coef * k(t)`; the score stays on the last token.

    Args:
        estimator: "k1" (the default: its policy gradient is the KL's), or "k2" or "k3", which are never negative but
            whose policy gradient is not that of a KL, since the reward is taken for a constant.
        coef: weight of the penalty in units of reward per nat, at least 0.

    Raises:
        ValueError: unknown estimator, or a negative coefficient.

    Source: https://arxiv.org/abs/1909.08593, section 2.
    """

    def __init__(self, estimator: KLEstimator = "k1", coef: float = 0.05) -> None:
        super().__init__(estimator, coef)

    def __call__(self, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """(B, T) estimate per token, without gradient; the caller subtracts `coef` times it from the rewards.

        Args:
            old_logprobs: (B, T) of the policy that starts the update. ref_logprobs: (B, T) of the reference.
        """
        return kl_estimate(old_logprobs, ref_logprobs, self.estimator).detach()


class KLInLoss(KLPenalty):
    """KL as a term of the loss: each token's loss is raised by `coef * k(t)`, differentiated through the policy.

    Args:
        estimator: "k3" (GRPO's: its gradient is that of the forward KL), "k2" (reverse KL while on-policy), or "k1",
            with `ratio_correction` only.
        coef: weight of the penalty, at least 0. GRPO: 0.04.
        ratio_correction: weight by `pi / pi_old`, which makes the gradient that of the reverse KL, off-policy too.

    Raises:
        ValueError: unknown estimator, "k1" without `ratio_correction`, or a negative coefficient.

    Source: k3: GRPO, https://arxiv.org/abs/2402.03300 eq. 4; ratio: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556
        (TRL: `use_bias_correction_kl`); the gradients: https://arxiv.org/abs/2506.09477.
    """

    def __init__(self, estimator: KLEstimator = "k3", coef: float = 0.04, *, ratio_correction: bool = False) -> None:
        super().__init__(estimator, coef)
        if estimator == "k1" and not ratio_correction:
            raise ValueError(
                "KLInLoss(estimator='k1'): the gradient of log pi - log pi_ref is grad log pi, whose expectation is 0, "
                "so the penalty would add noise and pull nowhere. Use KLInReward('k1'), KLInLoss('k2') or "
                "KLInLoss('k3', ratio_correction=True)."
            )
        self.ratio_correction = ratio_correction

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """(B, T) penalty per token, differentiable in `logprobs`; the caller masks, aggregates and weighs it.

        Args:
            logprobs: (B, T) of the policy. old_logprobs: (B, T) of the policy that starts the update (read for the
                ratio only). ref_logprobs: (B, T) of the reference.
        """
        if self.ratio_correction:
            return ratio_corrected_kl(logprobs, old_logprobs, ref_logprobs, self.estimator)
        return kl_estimate(logprobs, ref_logprobs, self.estimator)
