"""KL penalties against the reference, in the reward or in the loss.

The optimum of each penalty on a bandit that the policy can represent. beta is the coefficient, r the reward, and the
advantage is `r - b`. Advantages divided by a std or by G / (G - 1) move the optimum of a KL penalty in the loss
(docs/algorithms/kl.md).

| penalty | gradient | optimum |
|---|---|---|
| `KLInReward("k1")` | reverse KL | `pi ~ pi_ref * exp(r / beta)` |
| `KLInLoss("k2")` | reverse KL (on-policy) | the same |
| `KLInLoss(any, ratio_correction=True)` | reverse KL (also off-policy) | the same |
| `KLInLoss("k3")` | forward KL | `pi = beta * pi_ref / (lambda - r)` |
| `KLInLoss("k1")` | 0 in expectation | rejected |
| `KLInReward("k2" or "k3")` | `E[k * grad log pi]`, not that of a KL | `r - beta * k` is the same for every action |

On sequences, the KL in the reward is that of whole responses: a token gets credit for the KL of later tokens. In the
loss, it is the sum of each token's KL given its prefix: the gradient ignores how a token changes later prefixes.
"""

from __future__ import annotations

from abc import ABC

from torch import Tensor

from lightrl.ops.losses import KLEstimator, kl_estimate, ratio_corrected_kl


class KLPenalty(ABC):
    """Base of KL penalties.

    Attributes:
        estimator: "k1", "k2", or "k3" (see `lightrl.ops.losses`).
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
            negative, but their policy gradient is not that of a KL, since rewards are treated as constants.
        coef: Weight of the penalty, in reward per nat, at least 0.

    Source: https://arxiv.org/abs/1909.08593, section 2.
    """

    def __init__(self, estimator: KLEstimator = "k1", coef: float = 0.05) -> None:
        super().__init__(estimator, coef)

    def __call__(self, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Returns (B, T) KL estimates without gradients. The caller subtracts `coef` times them from the rewards.

        Args:
            old_logprobs: (B, T) log-probs of the policy that starts the update.
            ref_logprobs: (B, T) log-probs of the reference.
        """
        return kl_estimate(old_logprobs, ref_logprobs, self.estimator).detach()


class KLInLoss(KLPenalty):
    """KL penalty in the loss: adds `coef * k(t)` to each token's loss, differentiated through the policy.

    Args:
        estimator: Estimator of the KL per token. "k3" (GRPO) has the gradient of the forward KL, "k2" that of the
            reverse KL while on-policy. "k1" requires `ratio_correction`.
        coef: Weight of the penalty, at least 0. GRPO uses 0.04.
        ratio_correction: Weight the penalty by `pi / pi_old`, which gives the gradient of the reverse KL, also
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

        Args:
            logprobs: (B, T) log-probs of the policy.
            old_logprobs: (B, T) log-probs of the policy that starts the update, read only for the ratio.
            ref_logprobs: (B, T) log-probs of the reference.
        """
        if self.ratio_correction:
            return ratio_corrected_kl(logprobs, old_logprobs, ref_logprobs, self.estimator)
        return kl_estimate(logprobs, ref_logprobs, self.estimator)
