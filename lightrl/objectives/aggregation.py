"""Reductions of token losses to a scalar: `loss = sum(weights(mask) * token_loss) / count`.

A row is a trajectory: the module joins trajectories of several rows first.

`count` is summed over the whole optimizer step (all micro-batches, all ranks) before the first backward pass, so the
gradient doesn't depend on how the batch is split.

| class | sequence weight | length bias |
|---|---|---|
| `TokenMean` | its number of tokens | none per token; long responses weigh more |
| `SequenceMean` | 1 | tokens of long responses weigh less |
| `ConstantLength` | its number of tokens / length | none; scale doesn't depend on the batch |
| `SequenceSum` | its number of tokens | none; scale grows with the mean length |
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Aggregation(ABC):
    """Token weights, and the count that divides their weighted sum."""

    @abstractmethod
    def weights(self, mask: Tensor) -> Tensor:
        """Returns (B, T) float32 token weights, 0 outside the (B, T) bool `mask`. Rows must be independent."""

    @abstractmethod
    def count(self, mask: Tensor) -> Tensor:
        """Returns a float32 scalar. Must be additive: the count of a batch is the sum over its parts."""


class _PerSequence(Aggregation):
    def count(self, mask: Tensor) -> Tensor:
        """Returns the number of sequences with at least one masked token."""
        return mask.any(-1).float().sum()


class TokenMean(Aggregation):
    """Mean over all tokens of the optimizer step: `sum_it L_it / sum_i len_i`.

    Source: DAPO, https://arxiv.org/abs/2503.14476 eq. 8. TRL's "dapo" divides by the generation batch's average instead
        of each step's own count, so steps with long responses are larger.
    """

    def weights(self, mask: Tensor) -> Tensor:
        """Returns 1 on the mask."""
        return mask.float()

    def count(self, mask: Tensor) -> Tensor:
        """Returns the number of masked tokens."""
        return mask.float().sum()


class SequenceMean(_PerSequence):
    """Mean over sequences of token means: `1 / B * sum_i 1 / len_i * sum_t L_it`.

    B excludes sequences without masked tokens. Losses with one value per sequence (`GSPO`, `GMPO`, `RLOOSequence`)
    need it to match their papers.
    Source: GRPO, https://arxiv.org/abs/2402.03300 eq. 3.
    """

    def weights(self, mask: Tensor) -> Tensor:
        """Returns 1 / sequence length on the mask."""
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
        """Returns 1 / length on the mask."""
        return mask.float() / self.length


class SequenceSum(_PerSequence):
    """Mean over sequences of token sums: `1 / B * sum_i sum_t L_it`.

    The plain policy gradient over sequences. With `GSPO(2e-3, 2.5e-3)` it is LUSPO.
    Source: REINFORCE, https://doi.org/10.1007/BF00992696; LUSPO, https://arxiv.org/abs/2602.05261.
    """

    def weights(self, mask: Tensor) -> Tensor:
        """Returns 1 on the mask."""
        return mask.float()
