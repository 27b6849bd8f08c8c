"""Log-probs and entropies of given tokens against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.models.plain_logprobs import entropy_from_logits, logprobs_from_logits

# logits log(1), log(2), log(5): probabilities 1/8, 2/8, 5/8
LOGITS = torch.tensor([[[1.0, 2.0, 5.0], [1.0, 1.0, 2.0]]]).log()
TOKENS = torch.tensor([[0, 2]])


def test_by_hand() -> None:
    # entry 1 is token 2 under the first position's logits: log(5/8); entry 0 has no prediction
    assert logprobs_from_logits(LOGITS, TOKENS)[0].tolist() == pytest.approx([0.0, math.log(5 / 8)])
    # H = 1/8 log 8 + 2/8 log 4 + 5/8 log 8/5 = 0.259930 + 0.346574 + 0.293752 = 0.900256
    assert entropy_from_logits(LOGITS)[0].tolist() == pytest.approx([0.0, 0.900256], abs=1e-6)


def test_temperature_by_hand() -> None:
    # temperature 1/2 squares the odds: 1, 4, 25 of 30
    assert logprobs_from_logits(LOGITS, TOKENS, 0.5)[0, 1].item() == pytest.approx(math.log(25 / 30))
    # H = log 30 - (4 log 4 + 25 log 25) / 30 = 3.401197 - 0.184839 - 2.682397 = 0.533961
    assert entropy_from_logits(LOGITS, 0.5)[0, 1].item() == pytest.approx(0.533961, abs=1e-5)
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match="temperature"):
            logprobs_from_logits(LOGITS, TOKENS, bad)


def test_forbidden_tokens_add_no_entropy() -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    assert entropy[0, 1].item() == pytest.approx(math.log(2))
    entropy.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_gradients_by_finite_differences() -> None:
    logits = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 5, (2, 4))
    assert torch.autograd.gradcheck(lambda x: logprobs_from_logits(x, tokens, 0.7), logits)
    assert torch.autograd.gradcheck(lambda x: entropy_from_logits(x, 0.7), logits)


def test_half_precision_gives_float32() -> None:
    assert logprobs_from_logits(LOGITS.bfloat16(), TOKENS).dtype == torch.float32
