"""Policy losses: their contract, and PPO's clip. `lightrl.objectives.policy_losses` has the others.

Every loss returns (B, T) token losses, 0 off the mask and differentiable in `logprobs`, and (B, T) metrics without
gradient, which are averaged over the mask (names that end in `_max` by maximum). The caller weighs them by the
aggregation and sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from lightrl.compat.arguments import above, at_least, fraction
from lightrl.ops.losses import MAX_LOG_RATIO, ClippedLoss, clipped_policy_loss

Metrics = dict[str, Tensor]

MAX_EXPONENT = 80.0
"""Largest argument of `exp` in metrics; float32 overflows at 88."""


class LossInput:
    """What a policy loss is given: B trajectories of at most T tokens. All tensors are (B, T) float32 unless noted.

    Every loss gets the whole record. It remembers which optional fields were read, so that nothing has to be declared.

    Args:
        logprobs: Log-probs of the policy being trained, with graph.
        old_logprobs: Log-probs of the policy that starts the updates, without graph.
        advantages: Without graph.
        mask: (B, T) bool, tokens that are trained.
        engine_logprobs: What the engine reported when it sampled; None if unknown.
        ref_logprobs: Log-probs of the reference; None without one.
        entropy: Entropy of the policy being trained, with graph; None if unknown.
    """

    def __init__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        engine_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> None:
        self.logprobs = logprobs
        self.old_logprobs = old_logprobs
        self.advantages = advantages
        self.mask = mask
        self.ref_logprobs = ref_logprobs
        self.entropy = entropy
        self._engine_logprobs = engine_logprobs
        self.reads = set[str]()

    @property
    def engine_logprobs(self) -> Tensor | None:
        """The engine's log-probs."""
        self.reads.add("engine_logprobs")
        return self._engine_logprobs

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`logprobs`, `old_logprobs`, `advantages`, `mask`."""
        return self.logprobs, self.old_logprobs, self.advantages, self.mask

    @property
    def reads_engine(self) -> bool:
        """Whether `engine_logprobs` of this record, or of one that `replace` made of it, has been read."""
        return bool(self.reads)

    def replace(self, **changes: Tensor | None) -> LossInput:
        """The same record with other tensors. Reading from it counts as reading from this one."""
        hidden = ("reads", "_engine_logprobs")
        mine: dict[str, Any] = {name: value for name, value in vars(self).items() if name not in hidden}
        changed = LossInput(**(mine | {"engine_logprobs": self._engine_logprobs} | changes))
        changed.reads = self.reads
        return changed

    def unread(self) -> LossInput:
        """The same record, of which nothing has been read."""
        changed = self.replace()
        changed.reads = set()
        return changed


EngineUse = Literal["unused", "compared", "ratio"]


class PolicyLoss(ABC):
    """A loss per token.

    The properties below promise things that make training faster or that other parts rely on. Their defaults are safe
    for any loss, and a subclass doesn't inherit a promise: it declares its own, or gets the default.

    Attributes:
        zero_advantage_is_zero_loss: A trajectory whose advantages are all 0 has no gradient, so it need not be run.
        needs_whole_trajectories: Looks at all tokens of a trajectory together, so its rows stay in one micro-batch.
        replaces_old_logprobs: Uses the engine's log-probs as the old ones, which are then not computed.
        engine_use: "unused": doesn't read the engine's log-probs. "compared": reads them, but the importance ratio to
            the engine's policy is no factor of the loss. "ratio": it is, so a correction would apply it twice. None:
            undeclared; a loss that reads them is then taken for "ratio".
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
        """Resets the promises that a subclass doesn't declare itself."""
        super().__init_subclass__(**kwargs)
        for name in PolicyLoss.PROMISES:
            if name not in cls.__dict__:
                setattr(cls, name, PolicyLoss.__dict__[name])

    @abstractmethod
    def __call__(self, given: LossInput) -> tuple[Tensor, Metrics]:
        """Computes token losses.

        Args:
            given: B trajectories.

        Returns:
            (B, T) token losses, 0 off the mask, and metrics, name -> (B, T) without graph, among them `kl/old`
            (k3 estimate of KL(pi_old || pi) per token) and `policy/ratio_max`.
        """


class PPOClip(PolicyLoss):
    """PPO's clipped surrogate: `-min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A)`, ratio per token.

    Metrics `policy/clip_fraction_low` (A < 0, ratio below the lower bound), `policy/clip_fraction_high` (A > 0, ratio
    above the upper bound) and, with a cap, `policy/clip_fraction_dual` are the fractions of tokens without gradient.

    Args:
        eps_low: in [0, 1].
        eps_high: at least 0. DAPO: 0.2 and 0.28.
        dual_clip: largest ratio that counts where A < 0, above 1; None is off. Usual: 3.
        delta: INTELLECT-2's name for the same cap, above 1 + eps_high; None is off. Give one of the two.

    Raises:
        ValueError: an argument is out of range, or both `dual_clip` and `delta` are given.

    Source: https://arxiv.org/abs/1707.06347 and those of `lightrl.ops.losses.clipped_policy_loss`.
    """

    zero_advantage_is_zero_loss = True
    needs_whole_trajectories = False
    engine_use = "unused"

    def __init__(
        self,
        eps_low: float = 0.2,
        eps_high: float = 0.2,
        dual_clip: float | None = None,
        delta: float | None = None,
    ) -> None:
        self.eps_low, self.eps_high = clip_bounds("PPOClip", eps_low, eps_high)
        if dual_clip is not None and delta is not None:
            raise ValueError(f"PPOClip(dual_clip={dual_clip}, delta={delta}): both are the same cap; give one.")
        above("PPOClip.dual_clip", dual_clip, 1, or_none="for no cap")
        above("PPOClip.delta", delta, 1 + eps_high, " = 1 + eps_high", or_none="for no cap")
        self.cap = delta if dual_clip is None else dual_clip

    def __call__(self, given: LossInput) -> tuple[Tensor, Metrics]:
        logprobs, old_logprobs, advantages, mask = given.tokens
        log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
        ratio = log_ratio.exp()
        clipped = clipped_policy_loss(ratio, advantages, self.eps_low, self.eps_high, self.cap)
        metrics = ratio_metrics(given, ratio) | clip_metrics(clipped, mask)
        if self.cap is not None:
            metrics["policy/clip_fraction_dual"] = (clipped.cap & mask).float()
        return on_mask(mask, clipped.loss), metrics


def token_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi - log pi_old on the mask, 0 elsewhere; clamped, since an infinite ratio makes a clipped gradient NaN."""
    return on_mask(mask, logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def on_mask(mask: Tensor, x: Tensor) -> Tensor:
    """`x` on the mask, 0 elsewhere."""
    return torch.where(mask, x, torch.zeros_like(x))


def sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) mean over the masked tokens of each sequence; `x` is 0 off the mask or is made so."""
    return on_mask(mask, x).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


@torch.no_grad()
def ratio_metrics(given: LossInput, ratio: Tensor) -> Metrics:
    """KL(pi_old || pi) by k3 from the token log-ratios, and the largest ratio of the kind the loss uses."""
    log_ratio = on_mask(given.mask, given.logprobs - given.old_logprobs)
    return {
        "kl/old": torch.expm1(log_ratio.clamp(max=MAX_EXPONENT)) - log_ratio,
        "policy/ratio_max": on_mask(given.mask, ratio.expand_as(given.mask)).detach(),
    }


@torch.no_grad()
def clip_metrics(clipped: ClippedLoss, mask: Tensor) -> Metrics:
    """(B, T) indicators of tokens whose gradient a clip takes away, below, above, and either."""
    return {
        "policy/clip_fraction_low": (clipped.low & mask).float(),
        "policy/clip_fraction_high": (clipped.high & mask).float(),
        "policy/clip_fraction_region": ((clipped.low | clipped.high) & mask).float(),
    }


def clip_bounds(owner: str, eps_low: float, eps_high: float) -> tuple[float, float]:
    """Checks the bounds of a ratio clip."""
    fraction(f"{owner}.eps_low", eps_low, note="; the lower bound of the ratio is 1 - eps_low")
    at_least(f"{owner}.eps_high", eps_high, 0, "; the upper bound of the ratio is 1 + eps_high")
    if eps_low == eps_high == 0:
        raise ValueError(f"{owner}.eps_low=0 with eps_high=0: every change is clipped, so nothing is learned.")
    return eps_low, eps_high
