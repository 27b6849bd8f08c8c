"""Shaping of rewards that depends on the response alone. Letters: B sequences."""

from __future__ import annotations

from torch import Tensor

__all__ = ["overlong_penalty"]


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Soft penalty for responses that run into the last `buffer` tokens before the limit.

        penalty = -factor * clip((len - (max_length - buffer)) / buffer, 0, 1)

    Args:
        lengths: (B,) number of sampled tokens.
        max_length: the limit in tokens, usually `max_new_tokens`.
        buffer: tokens before the limit over which the penalty grows, in [1, max_length].
        factor: penalty at the limit, at least 0.

    Returns:
        (B,) float32 in [-factor, 0], to be added to the rewards.

    Raises:
        ValueError: an argument is out of range.

    Source: DAPO, https://arxiv.org/abs/2503.14476 eq. 13.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer}: must be between 1 and max_length={max_length}.")
    if not factor >= 0:
        raise ValueError(f"factor={factor}: must be 0 or more; it is subtracted.")
    return -factor * ((lengths.float() - (max_length - buffer)) / buffer).clamp(0, 1)
