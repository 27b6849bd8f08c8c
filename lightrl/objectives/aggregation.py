"""How token losses become one number: `loss = sum(weights(mask) * token_loss) / count`.

A row is a trajectory here: the module joins the rows of one that was cut before it asks.

`count` is taken over the whole optimizer batch (all micro-batches, all ranks), summed up before the first backward, so
that any split of the batch gives the same gradient.

| class | sequence weight | length bias |
|---|---|---|
| `TokenMean` | its number of tokens | none per token; long responses count for more |
| `SequenceMean` | 1 | tokens of long responses count for less |
| `ConstantLength` | its number of tokens / length | none; scale does not depend on the batch |
| `SequenceSum` | its number of tokens | none; scale grows with the mean length |
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from lightrl.compat.arguments import above


class Aggregation(ABC):
    """Weights for token losses, and the count their weighted sum is divided by."""

    @abstractmethod
    def weights(self, mask: Tensor) -> Tensor:
        """Weight of each token's loss: (B, T) float32, 0 off `mask`, a (B, T) bool. A row depends on itself only."""

    @abstractmethod
    def count(self, mask: Tensor) -> Tensor:
        """Float32 scalar; additive: the count of a batch is the sum of the counts of its parts."""


class _PerSequence(Aggregation):
    def count(self, mask: Tensor) -> Tensor:
        """Number of sequences that have at least one token on the mask."""
        return mask.any(-1).float().sum()


class TokenMean(Aggregation):
    """Mean over all tokens of the optimizer batch: `sum_it L_it / sum_i len_i`.

    Source: DAPO, https://arxiv.org/abs/2503.14476 eq. 8. TRL's "dapo" divides by the generation batch's average per
        window instead of the window's own count, so that windows of long responses take larger steps.
    """

    def weights(self, mask: Tensor) -> Tensor:
        """1 on the mask."""
        return mask.float()

    def count(self, mask: Tensor) -> Tensor:
        """Number of tokens on the mask."""
        return mask.float().sum()


class SequenceMean(_PerSequence):
    """Mean over sequences of the mean over their tokens: `1 / B * sum_i 1 / len_i * sum_t L_it`.

    Sequences without a token on the mask are left out of B. Needed by losses with one value per sequence
    (`GSPO`, `GMPO`, `RLOOSequence`) to be exactly their papers' objectives.
    Source: GRPO, https://arxiv.org/abs/2402.03300 eq. 3.
    """

    def weights(self, mask: Tensor) -> Tensor:
        """1 / length of the sequence, on the mask."""
        return mask.float() / mask.sum(-1, keepdim=True).clamp(min=1)


class ConstantLength(_PerSequence):
    """Token sum over a constant: `1 / B * sum_i 1 / length * sum_t L_it`.

    Args:
        length: the constant in tokens, above 0; usually `max_new_tokens`. It scales the step and nothing else.

    Raises:
        ValueError: length is not above 0.

    Source: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2.
    """

    def __init__(self, length: float) -> None:
        self.length = above("ConstantLength.length", length, note=", for example max_new_tokens")

    def weights(self, mask: Tensor) -> Tensor:
        """1 / length on the mask."""
        return mask.float() / self.length


class SequenceSum(_PerSequence):
    """Mean over sequences of the sum over their tokens: `1 / B * sum_i sum_t L_it`.

    The plain policy gradient of a sequence. With `GSPO(2e-3, 2.5e-3)` it is LUSPO.
    Source: REINFORCE, https://doi.org/10.1007/BF00992696; LUSPO, https://arxiv.org/abs/2602.05261.
    """

    def weights(self, mask: Tensor) -> Tensor:
        """1 on the mask."""
        return mask.float()
