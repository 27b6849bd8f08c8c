"""Families that differ in attention, experts or logits: each equals transformers' own forward, row by row."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers

from lightrl.models.policy import PolicyModel
from tests.models.conftest import VOCAB, Batch, plain_scores

SETTINGS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
PACKED: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 8},
    "Phi3": {},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 6},  # sliding and full layers in turn
    "Granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2},
    "Cohere": {"logit_scale": 0.3},
    "Mixtral": {"num_local_experts": 4},
}
PADDED: dict[str, dict[str, Any]] = {
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 6},  # attention sinks
    "Mamba": {},  # recurrent state
    "Llama4Text": {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2},  # chunked attention
}


def build(name: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SETTINGS, **settings})
    return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()


@pytest.mark.parametrize("name", PACKED)
def test_packed_families(name: str, batch: Batch) -> None:
    lm = build(name, PACKED[name])
    expected, entropy = plain_scores(lm, batch, 0.7)
    policy = PolicyModel(lm, layout="shared_prefix")
    out = policy(*batch[:3], group_ids=batch.group_ids, temperature=0.7, entropy=True)
    torch.testing.assert_close(out.logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.entropy, entropy, atol=1e-5, rtol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
    plain, packed = (
        torch.autograd.grad((x * weights).sum(), list(lm.parameters()), allow_unused=True)
        for x in (expected, out.logprobs)
    )
    for (parameter, _), a, b in zip(lm.named_parameters(), plain, packed, strict=True):
        if a is None or b is None:  # an expert that no token chose
            assert a is None and b is None, parameter
        else:
            assert (a - b).norm() <= 1e-5 * a.norm() + 1e-7, parameter


@pytest.mark.parametrize("name", PADDED)
def test_other_families_fall_back(name: str, batch: Batch) -> None:
    lm = build(name, PADDED[name])
    expected, _ = plain_scores(lm, batch)
    with pytest.warns(UserWarning, match="padded layout"):
        policy = PolicyModel(lm)
        got = policy(*batch[:3], group_ids=batch.group_ids).logprobs
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
def test_experts_report_their_balance(layout: Any, batch: Batch) -> None:
    lm = build("Mixtral", {"num_local_experts": 4, "output_router_logits": True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = PolicyModel(lm, layout=layout)(*batch[:3], group_ids=batch.group_ids)
    # 4 experts, 2 per token: a balanced router has loss 2, one that always takes the same two has up to 4
    assert out.aux_loss is not None and 1.9 < out.aux_loss.item() < 4.0
    out.aux_loss.backward()
    assert any("gate" in name and p.grad.any() for name, p in lm.named_parameters() if p.grad is not None)
