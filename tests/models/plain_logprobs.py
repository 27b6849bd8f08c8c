"""Log-prob and entropy of given tokens, in the plainest way: what the chunked versions are compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def logprobs_from_logits(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token under the distribution it is sampled from: `log_softmax(logits / temperature)`.

    Args:
        logits: (B, T, V) float, what the model puts out; entry t predicts token t + 1.
        token_ids: (B, T) int64 in [0, V).
        temperature: of the sampling distribution, above 0.

    Returns:
        (B, T) float32, entry t belongs to token t; entry 0, which nothing predicts, is 0.

    Raises:
        ValueError: temperature is not above 0.
    """
    logprobs = torch.log_softmax(_scaled(logits, temperature), -1)
    picked = logprobs.gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(picked, (1, 0))


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of the distribution each token was drawn from: `-sum_v p(v) log p(v)`.

    Args:
        logits: (B, T, V) float; entry t predicts token t + 1. A logit of -inf (a forbidden token) adds nothing.
        temperature: of the sampling distribution, above 0.

    Returns:
        (B, T) float32 in [0, log V], entry t belongs to token t; entry 0 is 0.

    Raises:
        ValueError: temperature is not above 0.
    """
    logprobs = torch.log_softmax(_scaled(logits, temperature), -1)
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    return torch.nn.functional.pad(-(logprobs.exp() * finite).sum(-1), (1, 0))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: must be above 0; greedy decoding has no log-probs to train on.")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide[:, :-1] / temperature
