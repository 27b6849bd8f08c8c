"""Families that differ in attention, experts or logits: each equals transformers' own forward, row by row."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers

from lightrl.models.policy import PolicyModel
from tests.models.conftest import Batch, plain_scores
from tests.rows import as_rows
from tests.toys import VOCAB, build

PACKED: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 8},
    "Phi3": {},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 6},  # sliding and full layers in turn
    "Granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2},
    "Cohere": {"logit_scale": 0.3},
    "Mixtral": {"num_local_experts": 4},
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},  # learned positions; embeds token types
    "DeepseekV3": {  # keys and values of different sizes
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
        **{"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "first_k_dense_replace": 1},
    },
}
PADDED: dict[str, dict[str, Any]] = {
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 6},  # attention sinks
    "Mamba": {},  # recurrent state
    "FalconH1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},  # and attention
    "RecurrentGemma": {"num_hidden_layers": 3, "lru_width": 32, "logits_soft_cap": 2.0, "head_dim": 8},
    "MBart": {"d_model": 32, "decoder_ffn_dim": 48, "decoder_layers": 2, "dropout": 0.0},  # takes no positions
    "Llama4Text": {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2},  # chunked attention
}
# transformers 5.24 lets its attention be replaced
(PACKED if transformers.GPTJPreTrainedModel._supports_sdpa else PADDED)["GPTJ"] = {
    **{"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_families(name: str, batch: Batch) -> None:
    lm = build(name, **PACKED[name]).eval()
    expected, entropy = plain_scores(lm, batch, 0.7)
    policy = PolicyModel(lm, layout="shared_prefix")
    out = policy(as_rows(*batch[:3], group_ids=batch.group_ids, temperature=0.7), entropy=True)
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
    lm = build(name, **PADDED[name]).eval()
    expected, _ = plain_scores(lm, batch)
    with pytest.warns(UserWarning, match="padded layout"):
        policy = PolicyModel(lm)
        ids = batch.token_ids.masked_fill(~batch.attention_mask, VOCAB)  # a pad token that was added to the tokenizer
        got = policy(as_rows(ids, *batch[1:3], group_ids=batch.group_ids)).logprobs
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_capped_attention_is_capped(layout: Any, batch: Batch) -> None:
    """transformers' SDPA, which it takes by default, leaves the cap out; engines do not."""
    settings = {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 1.0, "initializer_range": 0.5}
    expected, _ = plain_scores(build("Gemma2", **settings, attn_implementation="eager").eval(), batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = PolicyModel(build("Gemma2", **settings).eval(), layout=layout)(
            as_rows(*batch[:3], group_ids=batch.group_ids)
        ).logprobs
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
def test_experts_report_their_balance(layout: Any, batch: Batch) -> None:
    lm = build("Mixtral", num_local_experts=4, output_router_logits=True).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = PolicyModel(lm, layout=layout)(as_rows(*batch[:3], group_ids=batch.group_ids))
    # 4 experts, 2 per token: a balanced router has loss 2, one that always takes the same two has up to 4
    assert out.aux_loss is not None and 1.9 < out.aux_loss.item() < 4.0
    out.aux_loss.backward()
    assert any("gate" in name and p.grad.any() for name, p in lm.named_parameters() if p.grad is not None)


def test_attention_that_depends_on_the_batch_is_refused(batch: Batch) -> None:
    """DeepSeek V3.2 attends to the keys that an indexer likes best; as long as it likes all, batches are right."""
    settings = {**PACKED["DeepseekV3"], "index_n_heads": 2, "index_head_dim": 8, "n_shared_experts": 1}
    lm = build("DeepseekV32", **settings, index_topk=64).eval()
    expected, _ = plain_scores(lm, batch)
    with pytest.warns(UserWarning, match="indexed_attention"):
        policy = PolicyModel(lm)
    torch.testing.assert_close(policy(as_rows(*batch[:3])).logprobs, expected, atol=1e-5, rtol=1e-5)
    with pytest.warns(UserWarning, match="indexed_attention"):
        policy = PolicyModel(build("DeepseekV32", **settings, index_topk=4).eval())
    with pytest.raises(ValueError, match="best 4 keys"):
        policy(as_rows(*batch[:3]))
