"""Interface of policy losses, and PPO's clip. See `lightrl.objectives.policy_losses` for other losses.

Every loss returns (B, T) token losses, 0 outside the mask and differentiable in `logprobs`, and (B, T) metrics without
gradient. Metrics are averaged over the mask; names ending in `_max` are reduced by maximum. The caller aggregates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from lightrl.ops.losses import MAX_LOG_RATIO, ClippedLoss, clipped_policy_loss

Metrics = dict[str, Tensor]

MAX_EXPONENT = 80.0
"""Maximum argument of `exp` in metrics; float32 overflows at 88."""


class LossInput:
    """Input of a policy loss: B trajectories of at most T tokens. All tensors are (B, T) float32 unless noted.

    The record remembers which optional fields a loss reads, so losses don't have to declare them.

    Args:
        logprobs: Log-probs of the trained policy, with graph.
        old_logprobs: Log-probs of the policy that starts the updates, without graph.
        advantages: Advantages, without graph.
        mask: (B, T) bool, True on trained tokens.
        engine_logprobs: Log-probs that the engine reported when sampling. None if unknown.
        ref_logprobs: Log-probs of the reference. None without one.
        entropy: Entropy of the trained policy, with graph. None if not computed.
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
        """Log-probs reported by the engine."""
        self.reads.add("engine_logprobs")
        return self._engine_logprobs

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`logprobs`, `old_logprobs`, `advantages`, and `mask`."""
        return self.logprobs, self.old_logprobs, self.advantages, self.mask

    @property
    def reads_engine(self) -> bool:
        """Whether `engine_logprobs` has been read from this record or from a copy made by `replace`."""
        return bool(self.reads)

    def replace(self, **changes: Tensor | None) -> LossInput:
        """Returns a copy with other tensors. Reads from the copy count as reads from this record."""
        hidden = ("reads", "_engine_logprobs")
        mine: dict[str, Any] = {name: value for name, value in vars(self).items() if name not in hidden}
        changed = LossInput(**(mine | {"engine_logprobs": self._engine_logprobs} | changes))
        changed.reads = self.reads
        return changed

    def unread(self) -> LossInput:
        """Returns a copy with no fields marked as read."""
        changed = self.replace()
        changed.reads = set()
        return changed


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
            correction would apply it twice. None is undeclared; correcting a loss that reads them is then an error.
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
        """Computes token losses.

        Args:
            given: B trajectories.

        Returns:
            (B, T) token losses, 0 outside the mask, and metrics: (B, T) tensors by name, without graph. They include
            `kl/old` (k3 estimate of KL(pi_old || pi) per token) and `policy/ratio_max`.
        """


class PPOClip(PolicyLoss):
    """PPO's clipped surrogate: `-min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A)` per token.

    Metrics: fractions of tokens without a gradient. `policy/clip_fraction_low` (A < 0, ratio below the lower bound),
    `policy/clip_fraction_high` (A > 0, ratio above the upper bound), and with a cap `policy/clip_fraction_dual`.

    Args:
        eps_low: Lower clip range, in [0, 1].
        eps_high: Upper clip range, at least 0. DAPO uses 0.2 and 0.28.
        dual_clip: Maximum ratio if A < 0, above 1 + eps_high, usually 3. INTELLECT-2 calls it delta. None disables it.

    Source: https://arxiv.org/abs/1707.06347 and those of `lightrl.ops.losses.clipped_policy_loss`.
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
